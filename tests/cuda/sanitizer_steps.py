"""``python tests/cuda/sanitizer_steps.py``: steps of every algorithm on odd shapes, for compute-sanitizer.

With ``planted`` it launches a kernel that writes behind an array, or with ``race`` one whose threads do not
wait for each other: what the tool has to find.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oxidion._cuda import device as _device
from support.cases import ONLY_OF_MATRICES, Case, Group, cases_of

ALGORITHMS = (*ONLY_OF_MATRICES, "adamw", "lion", "lamb", "adafactor", "came", "soap")
SHAPES = ((33, 65), (130, 17), (136, 200))
STEPS = 2
PLANTED = {
    "planted": 'extern "C" __global__ void fault(float* x) { x[threadIdx.x] = 1.0f; }',
    "race": """extern "C" __global__ void fault(float* x) {
    __shared__ float y[256];
    y[threadIdx.x] = threadIdx.x;
    x[0] = y[255 - threadIdx.x];
}""",
}


def steps(algorithm: str, device: str, dtype: torch.dtype, **settings: object) -> None:
    """Steps of the first row of an algorithm, with products of 16 bits where there are some."""
    row = cases_of(algorithm)[0]
    vectors = algorithm not in ONLY_OF_MATRICES
    shapes = (*SHAPES, (1,), (5001,)) if vectors else SHAPES
    case = Case(algorithm, row.cls, algorithm, row.kwargs, (Group(shapes, {"min_quant_numel": 0}),))
    params = [torch.nn.Parameter(param.detach().to(device)) for param in case.parameters(dtype)]
    optimizer = case.build(params, orth_dtype="bfloat16", **settings)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
    assert all(bool(param.isfinite().all()) for param in params)


def main() -> None:
    """Takes all steps, or plants what the command line names."""
    logging.disable(logging.WARNING)
    emulated = os.environ.get("OXIDION_TEST_DEVICE") == "emulated"
    if emulated:
        _device.prepare(emulated=True)
    if names := sys.argv[1:]:
        fault = torch.cuda._compile_kernel(PLANTED[names[0]], "fault")
        fault((1, 1, 1), (256, 1, 1), [torch.zeros(100, device="cuda")])
        torch.cuda.synchronize()
        return
    torch.manual_seed(0)
    device = "cpu" if emulated else "cuda"
    for algorithm in ALGORITHMS:
        steps(algorithm, device, torch.float32)
        steps(algorithm, device, torch.bfloat16, state_bits=8, stochastic_rounding=True)
        print("stepped", algorithm, flush=True)
    if not emulated:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
