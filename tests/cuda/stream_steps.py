"""``python tests/cuda/stream_steps.py HOW``: steps of every algorithm on streams of the emulated device.

``HOW`` says on which: ``default``, ``side`` (in ``torch.cuda.stream``), ``graph`` (in ``torch.cuda.graph``)
or ``replays`` (of a `CudaGraphOptimizer`). ``stray``: launches go to the default stream in any case.
Prints ``ALGORITHM LAUNCHES OTHERS``: those of the steps on the stream that they belong to, and all others.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cuda import streams
from cuda.sanitizer_steps import ALGORITHMS
from oxidion._cuda import device as _device
from oxidion.graph import CudaGraphOptimizer
from support.cases import BASIS_ALGORITHMS, LOW_RANK_ALGORITHMS, ONLY_OF_MATRICES, Case, Group, cases_of

MATRICES = ((33, 65), (136, 200), (200, 136))
VECTORS = ((1,), (5001,))


def made(algorithm: str, **settings: Any) -> tuple[list[Parameter], Any]:
    """The optimizer of an algorithm, whose steps are all alike, and its parameters with gradients."""
    row, low_rank = cases_of(algorithm)[0], algorithm in LOW_RANK_ALGORITHMS
    shapes = MATRICES if algorithm in ONLY_OF_MATRICES else (*MATRICES, *VECTORS)
    case = Case(algorithm, row.cls, algorithm, row.kwargs, (Group(shapes, {"min_quant_numel": 0}),))
    params = case.parameters(torch.float32)
    for param in params:
        param.grad = torch.randn_like(param)
    settings |= {"update_proj_gap": 1000} if low_rank else {}
    settings |= {"precondition_frequency": 1000} if algorithm in BASIS_ALGORITHMS else {}
    return params, case.build(params, orth_dtype="bfloat16", **settings)


class Counts:
    """Launches on every stream since `clear`."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        self._driver = driver
        self.clear()

    def clear(self) -> None:
        """Restarts the counts."""
        self._before = self._now()

    def _now(self) -> dict[int, int]:
        known: dict[int, int] = {}
        while (count := self._driver.emulator_launches_on(ctypes.c_void_p(len(known)))) >= 0:
            known[len(known)] = count
        return known

    def of(self, stream: streams.Stream) -> tuple[int, int]:
        """Those of a stream, and all others."""
        since = {name: count - self._before.get(name, 0) for name, count in self._now().items()}
        own = since.pop(stream.cuda_stream)
        return own, sum(since.values())


counts: Counts


def on_default(algorithm: str) -> streams.Stream:
    """Two steps where nothing was said, with 8-bit states."""
    optimizer = made(algorithm, state_bits=8)[1]
    optimizer.step()
    optimizer.step()
    return streams.current[0]


def on_side(algorithm: str) -> streams.Stream:
    """A step there, with 8-bit states and random rounding; the stream waits for those that were before."""
    params, optimizer = made(algorithm, state_bits=8, stochastic_rounding=True)
    if algorithm == "soap":  # whose first gradient moves nothing
        optimizer.step()
        counts.clear()
    side = streams.Stream()
    side.wait_stream(streams.current[-1])
    before = [param.detach().clone() for param in params]
    with torch.cuda.stream(side):
        optimizer.step()
    streams.current[-1].wait_stream(side)
    assert not any(torch.equal(old, param) for old, param in zip(before, params, strict=True))
    return side


def in_graph(algorithm: str) -> streams.Stream:
    """A step in 32 bits that is captured and replayed twice; the one before it is not counted."""
    params, optimizer = made(algorithm, capturable=True, state_bits=32)
    optimizer.step()
    side, graph = streams.Stream(), torch.cuda.CUDAGraph()
    counts.clear()
    before = [param.detach().clone() for param in params]
    with torch.cuda.graph(graph, stream=side):
        optimizer.step()
    assert all(torch.equal(old, param) for old, param in zip(before, params, strict=True))
    graph.replay()
    graph.replay()
    assert not any(torch.equal(old, param) for old, param in zip(before, params, strict=True))
    return side


def in_replays(algorithm: str) -> streams.Stream:
    """As above, by the package: it makes the stream, and has it and the current one wait for each other."""
    params, inner = made(algorithm)
    optimizer = CudaGraphOptimizer(inner, warmup_steps=1)
    optimizer.step()
    counts.clear()
    for _ in range(3):
        before = [param.detach().clone() for param in params]
        optimizer.step()
        assert not any(torch.equal(old, param) for old, param in zip(before, params, strict=True))
    assert optimizer.captured
    side: streams.Stream = optimizer._replay._capture._stream  # type: ignore[union-attr]
    return side


HOW: dict[str, Callable[[str], streams.Stream]] = {
    "default": on_default,
    "side": on_side,
    "graph": in_graph,
    "replays": in_replays,
}


def main(how: str, *faults: str) -> None:
    """Takes the steps of all algorithms."""
    _device.prepare(emulated=True)
    driver = ctypes.CDLL("libcuda.so.1")
    streams.install(driver)
    if faults:
        _device.current_stream = lambda device: 0
    global counts
    counts = Counts(driver)
    torch.manual_seed(0)
    for algorithm in ALGORITHMS:
        counts.clear()
        own, others = counts.of(HOW[how](algorithm))
        print(algorithm, own, others, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
