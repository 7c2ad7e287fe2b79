"""The interpreter of a plan's schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from oxidion._oxidion import Session

COMPUTE, ISSUE, WAIT = 0, 1, 2


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Orders what follows after the collective."""


class CommunicationError(RuntimeError):
    """A collective failed: a rank has ended, or did not come in time."""


class Absent:
    """A step that a rank cannot take: it takes part in the collectives, and computes nothing."""

    def idle(self) -> set[int]:
        """No collective is left out."""
        return set()

    def compute(self, k: int) -> None:
        """Nothing."""


def execute(
    session: Session | Absent, schedule: Sequence[tuple[int, int]], comms: Sequence[Callable[[], Work]]
) -> None:
    """Executes every instruction in order: computes in the core, collectives where they were bound.

    Collectives that are idle in this step are left out, on all of their ranks.

    Raises:
        CommunicationError: when a collective fails.
    """
    idle = session.idle()
    inflight: dict[int, Work] = {}
    try:
        for op, k in schedule:
            if op == COMPUTE:
                session.compute(k)
            elif k in idle:
                continue
            else:
                try:
                    if op == ISSUE:
                        inflight[k] = comms[k]()
                    else:
                        inflight.pop(k).wait()
                except RuntimeError as failure:
                    raise CommunicationError(f"{type(failure).__name__}: {failure}") from failure
    except BaseException:
        for work in inflight.values():  # their buffers must not go away under them
            with suppress(RuntimeError):
                work.wait()
        raise
