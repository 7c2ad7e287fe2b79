"""How the schedule of a step is run: as it comes, unless another runner takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from oxidion import _driver
from oxidion._oxidion import Session


def compute(session: Session, schedule: Sequence[tuple[int, int]]) -> None:
    """Runs the computes alone, in their order."""
    for op, k in schedule:
        if op == _driver.COMPUTE:
            session.compute(k)


class Runner(Protocol):
    """How the schedule of a step is run."""

    def around(self) -> AbstractContextManager[object]:
        """What a step is taken in, from before its gradients are looked at."""

    def begun(self, session: Session) -> None:
        """Looks at a step that has begun; an error here leaves everything as it was."""

    def run(
        self,
        session: Session,
        schedule: Sequence[tuple[int, int]],
        comms: Sequence[Callable[[], _driver.Work]],
    ) -> None:
        """Runs every instruction, as `_driver.run`."""


class Directly:
    """Runs every step as it comes."""

    def around(self) -> AbstractContextManager[object]:
        """Nothing."""
        return nullcontext()

    def begun(self, session: Session) -> None:
        """Takes any step."""

    def run(
        self,
        session: Session,
        schedule: Sequence[tuple[int, int]],
        comms: Sequence[Callable[[], _driver.Work]],
    ) -> None:
        """Runs every instruction, as `_driver.run`."""
        _driver.run(session, schedule, comms)


DIRECTLY: Runner = Directly()
