"""Runners of a step's schedule: the direct one, and the protocol that any other implements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from oxidion._core import driver
from oxidion._oxidion import Session


class Runner(Protocol):
    """Runner of a step: it wraps the step, prepares it and executes its schedule."""

    def wrap(self) -> AbstractContextManager[object]:
        """The context of a step, from before its gradients are looked at."""

    def prepare(self, session: Session) -> None:
        """Looks at a step that has begun; an error here leaves everything as it was."""

    def execute(
        self,
        session: Session,
        schedule: Sequence[tuple[int, int]],
        comms: Sequence[Callable[[], driver.Work]],
    ) -> None:
        """Executes every instruction, as `driver.execute`."""


class Direct:
    """Executes every step as it comes."""

    def wrap(self) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def prepare(self, session: Session) -> None:
        """Takes any step."""

    def execute(
        self,
        session: Session,
        schedule: Sequence[tuple[int, int]],
        comms: Sequence[Callable[[], driver.Work]],
    ) -> None:
        """Executes every instruction, as `driver.execute`."""
        driver.execute(session, schedule, comms)

    def compute(self, session: Session, schedule: Sequence[tuple[int, int]]) -> None:
        """Executes the computes alone, in their order."""
        for op, k in schedule:
            if op == driver.COMPUTE:
                session.compute(k)


DIRECT = Direct()
