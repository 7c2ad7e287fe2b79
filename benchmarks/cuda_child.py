"""Measurements in child processes: one that crashes, hangs or fails ends alone, and the others are taken.

The calling process has imported torch and must not have used a device: a fork of it could not use it then.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from oxidion._gpu_check.runner import end_with_parent

Row = dict[str, Any]
"""Result of a measurement: `status` is "ok", or says why there is none."""

FAILURES = ("failed", "not compiled", "crashed", "no answer", "wrong result")
"""First words of a status that reports a fault; others say that nothing was tried."""
LEFT_OUT = "left out"
NO_TIME = f"{LEFT_OUT}: no time"
START_SECONDS = 60.0
"""Limit of what a child does before its first measurement: a context on the device, imports."""
TRACEBACK = 2000


class Refused(Exception):
    """A measurement that is not possible here; the message says why."""


@dataclass(frozen=True)
class Item:
    """One measurement.

    Attributes:
        group: Items in sequence with the same group run in one child.
        subject: What is measured, such as a contender. Its other items are left out once it crashed or hung.
        work: Measures, in the child. ``busy`` in its result is the part of the seconds that grows with cost.
        keep: Takes the result, in the calling process.
        variables: Environment variables of the child, the same for all items of a group.
        cost: Size of the work relative to other items of the subject.
        limit: Seconds after which the child is killed.
        fault: First words of the status when the work raises.
    """

    group: str
    subject: str
    work: Callable[[], Row]
    keep: Callable[[Row], None]
    variables: Mapping[str, str] = field(default_factory=dict)
    cost: float = 1.0
    limit: float = 20.0
    fault: str = "failed"


def is_fault(status: str) -> bool:
    """Whether a status reports a fault."""
    return status.startswith(FAILURES)


def run(
    items: Sequence[Item],
    seconds: float,
    done: Callable[[], None],
    prepare: Callable[[], None],
    recover: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Takes all measurements that are expected to end in time.

    Args:
        items: The measurements, the most valuable ones first.
        seconds: Time for all of them.
        done: Called after each item.
        prepare: Called first in each child.
        recover: Called in the child after each item; when it raises, the next item gets another child.
        clock: Seconds since any fixed time.

    Returns:
        How many were left out because of the time.
    """
    end, left_out = clock() + seconds, 0
    expected, refused, child = _Expected(), dict[str, str](), None
    try:
        for index, item in enumerate(items):
            remaining, why = end - clock(), refused.get(item.group) or refused.get(item.subject)
            if why or expected.seconds(item) > remaining:
                left_out += not why
                item.keep({"status": f"{LEFT_OUT}: {why}" if why else NO_TIME})
                done()
                continue
            if child is None or child.group != item.group:
                if child is not None:
                    child.stop()
                child = _Child(items, item, prepare, recover)
                if row := child.started(min(START_SECONDS, remaining)):
                    child = None
                    if row["status"].startswith("no answer") and clock() >= end:
                        row, left_out = {"status": NO_TIME}, left_out + 1
                    else:
                        refused[item.group] = row["status"]
                    item.keep(row)
                    done()
                    continue
            begun = clock()
            row, is_usable = child.ask(index, min(item.limit, end - begun))
            if row["status"].startswith("no answer") and clock() >= end:
                row, left_out = {"status": NO_TIME}, left_out + 1
            expected.note(item, clock() - begun, row.pop("busy", 0.0))
            if not is_usable:
                child.stop()
                child = None
            if row["status"].startswith(("crashed", "no answer")):
                refused[item.subject] = row["status"]
            item.keep(row)
            done()
    finally:
        if child is not None:
            child.stop()
    return left_out


class _Expected:
    """Expected seconds of an item, by those of the last one of its subject, else by all others."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, float, float]] = {}
        self._all: list[float] = []

    def note(self, item: Item, seconds: float, busy: float) -> None:
        self._last[item.subject] = item.cost, max(0.0, seconds - busy), busy
        self._all.append(seconds)

    def seconds(self, item: Item) -> float:
        if item.subject not in self._last:
            return statistics.median(self._all) if self._all else 0.0
        cost, idle, busy = self._last[item.subject]
        return idle + busy * max(1.0, item.cost / cost)


class _Child:
    """A fork that takes measurements when it is asked for them."""

    def __init__(
        self,
        items: Sequence[Item],
        first: Item,
        prepare: Callable[[], None],
        recover: Callable[[], object],
    ) -> None:
        self.group = first.group
        self._connection, other = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                end_with_parent()
                self._connection.close()
                os.environ.update(first.variables)
                _serve(items, other, prepare, recover)
            finally:
                os._exit(0)
        other.close()

    def started(self, limit: float) -> Row | None:
        """None once the child is ready, else what is wrong."""
        row, is_usable = self._answer(limit)
        if is_usable and row["status"] == "ok":
            return None
        self.stop()
        return row

    def ask(self, index: int, limit: float) -> tuple[Row, bool]:
        """The result of an item, and whether the child can take more."""
        with suppress(OSError):
            self._connection.send(index)
        return self._answer(limit)

    def _answer(self, limit: float) -> tuple[Row, bool]:
        try:
            if self._connection.poll(max(0.0, limit)):
                row, is_usable = self._connection.recv()
                return row, is_usable
        except (EOFError, OSError):
            return {"status": f"crashed: {self._how_it_ended()}"}, False
        return {"status": f"no answer within {limit:.0f} s"}, False

    def _how_it_ended(self) -> str:
        code = self._reaped()
        if code is None:
            return "it closed its connection"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"

    def _reaped(self) -> int | None:
        """Exit status, or minus the signal; None while a process that was killed does not end."""
        for _ in range(50):
            with suppress(ChildProcessError):
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._pid = 0
                    return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None

    def stop(self) -> None:
        """Ends the child."""
        self._connection.close()
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._reaped()


def _serve(
    items: Sequence[Item],
    connection: Connection,
    prepare: Callable[[], None],
    recover: Callable[[], object],
) -> None:
    def ready() -> Row:
        prepare()
        return {}

    connection.send((_attempt(ready, "failed"), True))
    while True:
        try:
            item = items[connection.recv()]
        except EOFError:
            return
        row, is_usable = _attempt(item.work, item.fault), True
        try:
            recover()
        except Exception:  # an error of the device stays with the process
            is_usable = False
        connection.send((row, is_usable))


def _attempt(work: Callable[[], Row], fault: str) -> Row:
    try:
        return {"status": "ok", **work()}
    except Refused as error:
        return {"status": str(error)}
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:160]
        where = traceback.format_exc()[-TRACEBACK:]
        return {"status": f"{fault}: {type(error).__name__}: {first}", "traceback": where}
