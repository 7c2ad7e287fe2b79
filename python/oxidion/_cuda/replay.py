"""Capture and replay of a step: a graph of torch's, and the launches of the core in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from oxidion._oxidion import Session, graphs_refusal
from oxidion._torch.compat import cuda_graph


class Capture:
    """A graph of torch's, captured on a stream of its own."""

    def __init__(self, device: torch.device, error_mode: str) -> None:
        if device.type != "cuda":
            raise RuntimeError(f"a CUDA graph needs parameters on a CUDA device, got {device}")
        self._error_mode = error_mode
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph = cuda_graph()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Makes the stream of the capture the current one, ordered after and before the one that is."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def record(self, work: Callable[[], None]) -> None:
        """Captures what `work` launches."""
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode=self._error_mode):
            work()
        self._graph.instantiate()

    def handle(self) -> int:
        """The executable graph, as the driver knows it."""
        return self._graph.raw_cuda_graph_exec()

    def replay(self) -> None:
        """Runs the graph on the current stream."""
        self._graph.replay()

    def release(self) -> None:
        """Gives the graph and its memory back, once it has run."""
        torch.cuda.synchronize(self._stream.device)
        self._graph.reset()


Schedule = Sequence[tuple[int, int]]
Comms = Sequence[Callable[[], Any]]


class Plain(Protocol):
    """The runner of steps without a graph."""

    def execute(self, session: Session, schedule: Schedule, comms: Comms) -> None:
        """Executes every instruction in order."""

    def compute(self, session: Session, schedule: Schedule) -> None:
        """Executes the computes alone, in their order."""


class Replay:
    """Runner of steps: plain ones first, then one that is captured, then replays of it.

    A capture that fails leaves no graph. That step is lost together with the counters of the host, so the
    next step asks for a checkpoint.

    Attributes:
        captured: whether there is a graph.
    """

    def __init__(self, warmup_steps: int, error_mode: str, plain: Plain) -> None:
        self._plain = plain
        self._error_mode = error_mode
        self._warmup_steps = warmup_steps
        self._taken = 0
        self._session: Session | None = None
        self._pattern: list[int] = []
        self._capture: Capture | None = None
        self._directly = True
        self.captured = False

    @property
    def is_next(self) -> bool:
        """True before the step that is to be captured."""
        return not self.captured and self._taken >= self._warmup_steps

    def open_capture(self, devices: Sequence[torch.device]) -> None:
        """Makes the stream and the graph for the capture of the next step.

        Raises:
            RuntimeError: where the driver is too old for replays, and for parameters on several devices.
        """
        if len(devices) > 1:
            found = ", ".join(map(str, devices))
            raise RuntimeError(f"a CUDA graph needs parameters on one CUDA device, got {found}")
        capture = Capture(devices[0], self._error_mode)
        refusal = graphs_refusal()
        if refusal is not None:
            raise RuntimeError(f"no step can be captured: {refusal}. Step the inner optimizer itself")
        self._capture = capture

    def release(self) -> None:
        """Drops the graph; the next steps are warm-up again."""
        capture, self._capture = self._capture, None
        self._session, self.captured, self._taken = None, False, 0
        if capture is not None:
            capture.release()

    def wrap(self) -> contextlib.AbstractContextManager[object]:
        """The stream of the capture, in the step that is captured."""
        if self._capture is None or self.captured:
            return contextlib.nullcontext()
        return self._capture.on_stream()

    def prepare(self, session: Session) -> None:
        """Refuses a step that is not the captured one, and one that cannot be captured."""
        pattern, due, copied = session.pattern()
        # A part of the step that not every step has, as GaLore's new basis, is never in the graph.
        self._directly = due or self._capture is None
        if self.captured and session is not self._session:
            raise RuntimeError(
                "parameters, states or settings that shape the step changed after the capture: call release()"
            )
        if self.captured and not due and pattern != self._pattern:
            raise RuntimeError(
                "other parameters have gradients than in the captured step, or gradients that must not move "
                "were moved: call release()"
            )
        if not self._directly and not self.captured:
            if copied:
                raise RuntimeError(
                    f"{', '.join(copied[:3])}: parameters and states must be contiguous to be captured"
                )
            self._session, self._pattern = session, pattern

    def execute(self, session: Session, schedule: Schedule, comms: Comms) -> None:
        """Executes the step directly, or captures it or gives the captured one its settings, and replays."""
        capture = self._capture
        if self._directly or capture is None:
            self._plain.execute(session, schedule, comms)
            self._taken += 1
            return
        try:
            if self.captured:
                session.set_launches(capture.handle())
                self._plain.compute(session, schedule)
            else:
                session.note_launches()
                capture.record(lambda: self._plain.execute(session, schedule, comms))
                session.keep_launches()
                self.captured = True
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error counts
                session.finish_launches()
            session.drop_scratch()
            raise
        try:
            session.finish_launches()
            capture.replay()
        finally:
            # Not before: another thread could be given the memory that the graph is about to use.
            session.drop_scratch()
