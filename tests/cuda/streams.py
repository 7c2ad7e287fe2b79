"""torch's streams and graphs on the emulated device.

A process there calls `install`: what the package asks of ``torch.cuda`` is then answered here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from types import TracebackType

import torch

from oxidion._cuda import device as _device
from oxidion._cuda import replay

from .recording import Recording

CUDA = torch.device("cuda", 0)


class Stream:
    """A stream of the driver, which refuses a launch before what other streams were given is waited for."""

    driver: ctypes.CDLL

    def __init__(self, device: torch.device | None = None, cuda_stream: int | None = None) -> None:
        self.device = device or CUDA
        self.cuda_stream: int = self.driver.emulator_make_stream() if cuda_stream is None else cuda_stream

    def wait_stream(self, stream: Stream) -> None:
        """What this one is given next comes after what the other one has."""
        names = (ctypes.c_void_p(self.cuda_stream), ctypes.c_void_p(stream.cuda_stream))
        self.driver.emulator_wait(*names)

    def launches(self) -> int:
        """How many launches it was given, also those that were captured."""
        count: int = self.driver.emulator_launches_on(ctypes.c_void_p(self.cuda_stream))
        return count


class CUDAGraph:
    """A graph of launches and of what torch does between."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._recording = Recording(Stream.driver)

    def capture_begin(self) -> None:
        """Captures what the current stream is given."""
        global capturing
        capturing = True
        self._recording.begin(current[-1].cuda_stream)

    def capture_end(self) -> None:
        """Ends the capture."""
        global capturing
        capturing = False
        self._recording.end()

    def instantiate(self) -> None:
        """It is ready as it is."""

    def raw_cuda_graph_exec(self) -> int:
        """Anything but 0."""
        return 1

    def replay(self) -> None:
        """Gives it to the current stream."""
        self._recording.replay(current[-1].cuda_stream)

    def reset(self) -> None:
        """Nothing has to be given back."""


class graph:
    """Captures what is launched in its context on a stream."""

    def __init__(
        self, cuda_graph: CUDAGraph, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        self._graph, self._there = cuda_graph, given(stream or Stream())

    def __enter__(self) -> None:
        """Waits for everything, as torch does, and begins."""
        Stream.driver.emulator_synchronize()
        self._there.__enter__()
        self._graph.capture_begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Ends the capture."""
        self._graph.capture_end()
        self._there.__exit__(kind, error, traceback)


current: list[Stream] = []
"""Current streams, the innermost last."""
capturing = False


@contextlib.contextmanager
def given(stream: Stream) -> Iterator[None]:
    """Makes a stream the current one."""
    current.append(stream)
    try:
        yield
    finally:
        current.pop()


def install(driver: ctypes.CDLL) -> None:
    """Answers for torch in this process; what counts as a CUDA device is then asked for its streams."""
    Stream.driver = driver
    current.append(Stream(cuda_stream=0))
    answers: dict[str, Callable[..., object]] = {
        "current_stream": lambda device=None: current[-1],
        "default_stream": lambda device=None: current[0],
        "is_current_stream_capturing": lambda: capturing,
        "synchronize": lambda device=None: driver.emulator_synchronize(),
        "stream": given,
        "Stream": Stream,
        "CUDAGraph": CUDAGraph,
        "graph": graph,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    stream, is_capturing, capture = _device.current_stream, _device.is_capturing, replay.Capture
    _device.current_stream = lambda device: stream(CUDA)
    _device.is_capturing = lambda device: is_capturing(CUDA)
    replay.Capture = lambda device, mode: capture(CUDA, mode)  # type: ignore[assignment,misc]
