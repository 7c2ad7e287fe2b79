"""Cases of which some are wrong, crash, hang or ask for all memory: what the tests of the fuzzer look for."""

from __future__ import annotations

import os
import signal
import time

from .draw import Draw


class Panic(BaseException):
    """As a panic of the core, which is no ``Exception``."""


def case(draw: Draw) -> None:
    """Wrong is number 2, a crash number 4, a panic number 5."""
    if os.environ.get("OXIDION_FUZZ_HANG"):
        time.sleep(600)
    if os.environ.get("OXIDION_FUZZ_MEMORY"):
        bytearray(14 << 30)
    if draw.number == 2:
        raise AssertionError("wrong numbers")
    if draw.number == 4:
        os.kill(os.getpid(), signal.SIGSEGV)
    if draw.number == 5:
        raise Panic("a panic")
