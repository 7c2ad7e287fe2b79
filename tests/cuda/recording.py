"""Graphs without a device: torch's operations and the core's launches, recorded together and done again.

A process on the emulated device imports this and gives `Capture` the driver. While a step is recorded no
launch runs and nothing is written to memory that was there before, as under a capture of CUDA's.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

UNWRITTEN = ("empty", "new_empty")
"""Names, also with suffixes, of operations whose result is uninitialized."""


@dataclass(frozen=True)
class Operation:
    """One of torch's operations: what was recorded before it, and where its results belong."""

    launches: int
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: list[Tensor]

    def repeat(self) -> None:
        """Does it again on what its operands hold now."""
        found = tree_leaves(self.work(*self.arguments, **self.keywords))
        for kept, result in zip(self.results, found, strict=False):
            kept.copy_(result)


def _written(work: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """The operands that an operation writes, by the name of what its results alias."""
    found: dict[str, Any] = {}
    for at, argument in enumerate(work._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = keywords.get(argument.name, arguments[at] if at < len(arguments) else None)
            found[",".join(argument.alias_info.before_set)] = value
    return found


class Recorder(TorchDispatchMode):
    """Records torch's operations; refuses those that read a value of the device or draw a random number."""

    def __init__(self, launches: Callable[[], int]) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.kept: list[Any] = []  # memory that launches of the graph name
        self._launches = launches

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Does what only makes memory or looks at it otherwise, and notes the rest."""
        keywords = kwargs or {}
        for tag in (torch.Tag.data_dependent_output, torch.Tag.nondeterministic_seeded):
            if tag in func.tags:
                raise RuntimeError(f"{func} cannot be captured")
        written = _written(func, args, keywords)
        if written:
            self.operations.append(Operation(self._launches(), func, args, keywords, []))
            results = [
                written[",".join(returned.alias_info.before_set)]
                for returned in func._schema.returns
                if returned.alias_info is not None
            ]
            return results[0] if len(results) == 1 else tuple(results) or None
        made = func(*args, **keywords)
        results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.kept.append(made)
        there = {
            x.untyped_storage().data_ptr() for x in tree_leaves((args, keywords)) if isinstance(x, Tensor)
        }
        is_view = any(x.untyped_storage().data_ptr() in there for x in results if x.numel())
        if not is_view and not func._schema.name.removeprefix("aten::").startswith(UNWRITTEN):
            self.operations.append(Operation(self._launches(), func, args, keywords, results))
        return made


class Recording:
    """What a stream was given while it was captured."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self.recorder: Recorder | None = None
        self.launches = 0

    def begin(self, stream: int = 0) -> None:
        """Captures what the stream is given, and what torch does between."""
        before = self._driver.emulator_launches()
        self._driver.emulator_begin_capture_on(ctypes.c_void_p(stream))
        self.recorder = Recorder(lambda: self._driver.emulator_launches() - before)
        self.recorder.__enter__()

    def end(self) -> None:
        """Ends the capture."""
        assert self.recorder is not None
        self.recorder.__exit__(None, None, None)
        self.launches = self._driver.emulator_end_capture()

    def replay(self, stream: int = 0) -> None:
        """Gives a stream everything again, in its order."""
        assert self.recorder is not None
        done = 0
        for operation in self.recorder.operations:
            self._launch(stream, done, operation.launches)
            done = operation.launches
            operation.repeat()
        self._launch(stream, done, self.launches)

    def _launch(self, stream: int, first: int, last: int) -> None:
        some = (ctypes.c_void_p(stream), ctypes.c_long(first), ctypes.c_long(last))
        if self._driver.emulator_replay_some_on(*some):
            raise RuntimeError("a launch of the graph failed")


class Capture:
    """Takes the place of ``oxidion._cuda.replay.Capture``."""

    driver: ctypes.CDLL
    made: list[Capture] = []  # noqa: RUF012

    def __init__(self, device: torch.device, error_mode: str) -> None:
        Capture.made.append(self)
        self.replays = 0
        self.released = False
        self.recording: Recording | None = Recording(self.driver)

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """There is one stream."""
        yield

    def record(self, work: Callable[[], None]) -> None:
        """Records what `work` launches and what torch does between."""
        assert self.recording is not None
        self.recording.begin()
        try:
            work()
        finally:
            self.recording.end()

    def handle(self) -> int:
        """Anything but 0."""
        return 1

    def replay(self) -> None:
        """Does everything again, in its order."""
        assert self.recording is not None
        self.replays += 1
        self.recording.replay()

    def release(self) -> None:
        """Gives memory back."""
        self.released = True
        self.recording = None
