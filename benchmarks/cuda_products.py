"""Symmetric products ``X X^T`` of bfloat16 matrices: our kernels against cuBLAS and microsoft/dion's.

Rates count the operations of the whole product, 2 m² n for each matrix, whoever computes one triangle only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from contenders import OURS, availability
from cuda_clock import Clock
from cuda_kernels import SymmetricKernels, is_product
from eligible import missing
from harness import in_turns

#: Matrices, rows and columns of each.
SHAPES = (
    *((48, 768, 768), (24, 768, 3072), (1, 2048, 2048), (32, 2048, 2048), (8, 1024, 4096)),
    *((1, 4096, 4096), (4, 4096, 4096), (1, 4096, 11008), (1, 8192, 8192)),
)
SMALL = ((2, 96, 160),)
#: A sample repeats the product for so long, so that the ends of a launch do not count.
SAMPLE_SECONDS = 2e-3
MOST_REPEATS = 200

Multiply = Callable[[Tensor, Tensor], object]


def cublas(x: Tensor, out: Tensor) -> Tensor:
    """By ``torch.mm`` or ``torch.bmm``."""
    if len(x) == 1:
        torch.mm(x[0], x[0].mT, out=out[0])
        return out
    return torch.bmm(x, x.mT, out=out)


def multipliers(device: torch.device) -> dict[str, tuple[str, Multiply | str]]:
    """Source and function of every contender, or why it is not there."""
    found: dict[str, tuple[str, Multiply | str]] = {"torch (cuBLAS)": ("torch", cublas)}
    versions = availability()
    if device.type != "cuda":
        return found | {"oxidion": (OURS, "needs a CUDA device")}
    try:
        kernels = SymmetricKernels(int(torch.cuda.current_stream(device).cuda_stream))
        for name in kernels.names:
            found[f"oxidion {name}"] = OURS, functools.partial(kernels.multiply, name)
    except (OSError, RuntimeError) as error:
        found["oxidion"] = OURS, f"failed: {error}"
    theirs, version = "microsoft/dion", versions["microsoft/dion"]
    if missing(version):
        return found | {"dion ns_line_1": (theirs, version)}
    line = importlib.import_module("dion.newton_schulz_triton").ns_line_1
    return found | {"dion ns_line_1": (theirs, lambda x, out: line(x, out=out))}


def race(shape: tuple[int, int, int], rounds: int, clock: Clock) -> dict[str, Any]:
    """One size: rows of contenders with seconds for a product, after a look at what they compute."""
    batch, size, depth = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, size, depth, generator=generator).to(clock.device).bfloat16().repeat(batch, 1, 1)
    out = torch.zeros(batch, size, size, dtype=torch.bfloat16, device=clock.device)
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[], None]] = {}
    for name, (source, multiply) in multipliers(clock.device).items():
        rows[name] = row = {"source": source}
        if isinstance(multiply, str):
            row["status"] = multiply
            continue
        try:
            out.zero_()
            multiply(x, out)
            clock.synchronize()
            row["status"] = "ok" if is_product(x[:2], out[:2]) else "wrong result"
        except Exception as error:
            row["status"] = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        if row["status"] == "ok":
            row["repeats"] = repeats = _repeats(clock, functools.partial(multiply, x, out))
            steps[name] = functools.partial(_repeat, multiply, x, out, repeats)
            row["seconds"] = []
    for name in in_turns(steps, rounds):
        rows[name]["seconds"].append(clock.sample(steps[name])[0] / rows[name]["repeats"])
    return {"shape": list(shape), "flops": 2.0 * batch * size * size * depth, "contenders": rows}


def _repeat(multiply: Multiply, x: Tensor, out: Tensor, repeats: int) -> None:
    for _ in range(repeats):
        multiply(x, out)


def _repeats(clock: Clock, work: Callable[[], object]) -> int:
    seconds = min(clock.sample(lambda: (work(), None)[1])[0] for _ in range(3))
    return max(1, min(MOST_REPEATS, round(SAMPLE_SECONDS / max(seconds, 1e-9))))


def races(rounds: int, clock: Clock) -> Iterator[dict[str, Any]]:
    """All sizes."""
    for shape in SHAPES if clock.device.type == "cuda" else SMALL:
        yield race(shape, rounds, clock)
