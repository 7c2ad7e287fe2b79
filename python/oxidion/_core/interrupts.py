"""Signals that arrive during a step: their handlers run when it is done."""

from __future__ import annotations

import importlib
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

# The functions behind those of `signal`, which makes an enumeration member of each result: that takes longer.
_signals: Any = importlib.import_module("_signal")

NUMBERS = tuple(
    int(getattr(signal, name))
    for name in map("SIG{}".format, ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "ALRM", "XCPU", "CHLD"))
    if hasattr(signal, name)
)
IMPATIENCE = 1.0
"""Seconds after which a second SIGINT ends a step at once: it may wait for a rank that has ended."""


class Deferred:
    """Context in which Python's handlers of signals wait: no exception of theirs ends a step half way.

    Python runs handlers in the main thread alone: elsewhere this does nothing.
    """

    _handlers: list[tuple[int, Callable[[int, FrameType | None], Any]]]
    _arrived: list[tuple[int, FrameType | None, float]]

    def __enter__(self) -> Deferred:
        """Replaces every handler that is a function by one that only records the signal."""
        self._handlers, self._arrived = [], []
        if threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in NUMBERS:
                handler = _signals.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    _signals.signal(number, self._note)
        except BaseException:
            self._restore()
            raise
        return self

    def __exit__(self, *_raised: object) -> None:
        """Puts the handlers back, and runs those of the signals that arrived, in their order.

        All of them run, also after one has raised: a job that is interrupted and terminated still saves.
        """
        self._restore()
        if not self._arrived:
            return
        handlers = dict(self._handlers)
        with ExitStack() as stack:
            for number, frame, _ in reversed(self._arrived):
                stack.callback(handlers[number], number, frame)

    def _restore(self) -> None:
        for number, handler in self._handlers:
            _signals.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        earlier = [at for other, _, at in self._arrived if other == number == signal.SIGINT]
        if earlier and now - earlier[0] > IMPATIENCE:
            dict(self._handlers)[number](number, frame)
        else:
            self._arrived.append((number, frame, now))
