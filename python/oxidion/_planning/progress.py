"""Progress of work that takes longer than a moment, for who sits at a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

SLOW = 2.0
"""Seconds after which progress is shown."""

Shown = Callable[[int], None]
"""Takes how many parts are done."""


@contextmanager
def progress(total: int, parts: str) -> Iterator[Shown]:
    """Shows how far it is, on stderr if that is a terminal and two seconds have passed; removed at the end.

    Args:
        total: how many parts there are.
        parts: their name.
    """
    start = time.monotonic()
    bar: Shown | None = None
    with ExitStack() as stack:

        def report(done: int) -> None:
            nonlocal bar
            if bar is None and time.monotonic() - start > SLOW and sys.stderr.isatty():
                bar = stack.enter_context(_bar(total, parts))
            if bar is not None:
                bar(done)

        yield report


@contextmanager
def _bar(total: int, parts: str) -> Iterator[Shown]:
    """The bar of rich, or a line with numbers where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        text = ""

        def write(done: int) -> None:
            nonlocal text
            text = f"{done} of {total} {parts}"
            sys.stderr.write(f"\r{text}")
            sys.stderr.flush()

        try:
            yield write
        finally:
            sys.stderr.write("\r" + " " * len(text) + "\r")
            sys.stderr.flush()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    ) as bar:
        task = bar.add_task(parts, total=total)
        yield lambda done: bar.update(task, completed=done)
