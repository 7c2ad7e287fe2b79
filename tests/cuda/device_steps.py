"""Steps of every row of the table of optimizers on a device, and the same steps on the CPU.

``python tests/cuda/device_steps.py ALGORITHM FILE`` takes those of an algorithm on the CPU, in a process of
its own: where memory of the host counts as that of the emulated device, there is no CPU to compare with.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))

from support.cases import (  # noqa: E402
    ALL_CASES,
    EMULATED,
    ONLY_OF_MATRICES,
    Case,
    Group,
    cases_of,
)
from support.inputs import gradients, well_conditioned  # noqa: E402

DEVICE = "cpu" if EMULATED else "cuda"
STEPS = 4
ALGORITHMS = tuple(dict.fromkeys(case.algorithm for case in ALL_CASES))

#: Shapes of more than one tile, piece and block of the kernels, odd ones among them.
LARGE = ((96, 64), (64, 200), (300, 300), (257, 130), (33, 65))
VECTORS = ((5,), (1000,), (3, 4, 5), (20_001,))
HALF = (torch.bfloat16,)


def _large(algorithm: str) -> Case:
    case = cases_of(algorithm)[0]
    plain = algorithm not in ONLY_OF_MATRICES
    shapes = (*LARGE, (1, 7), (7, 1), *VECTORS) if plain else LARGE
    return Case(f"{algorithm}-large", case.cls, algorithm, case.kwargs, (Group(shapes),))


CASES: dict[str, tuple[Case, ...]] = {
    algorithm: (*cases_of(algorithm), _large(algorithm)) for algorithm in ALGORITHMS
}
QUANTIZED: dict[str, Case] = {
    algorithm: Case(
        f"{algorithm}-quantized",
        cases_of(algorithm)[0].cls,
        algorithm,
        {**cases_of(algorithm)[0].kwargs, **({"beta1": 0.9} if algorithm == "adafactor" else {})},
        (Group(((40, 300), (9, 513), (33, 128)), {"min_quant_numel": 0}),),
    )
    for algorithm in ALGORITHMS
}


@dataclass(frozen=True)
class Outcome:
    """What steps leave: parameters before and after, and states."""

    before: list[Tensor]
    after: list[Tensor]
    states: list[dict[str, Tensor]]


def optimizer_of(case: Case, params: list[Parameter], **overrides: object) -> Any:
    """The row's optimizer, whose products are exact in the type of the parameters or float32."""
    wide = "float64" if params[0].dtype == torch.float64 else "float32"
    # Which slices are selected depends on the last bit of the momentum.
    if params[0].dtype in HALF and {"dion2", "nordion2"} & set(case.algorithms):
        overrides["state_dtype"] = torch.float32
    optimizer = case.build(params, orth_dtype=wide, **overrides)
    optimizer.init_state()
    for index, param in enumerate(params):
        if "Q" in (state := optimizer.state[param]):
            state["Q"].copy_(well_conditioned(state["Q"].shape, 0, index, 99))
    return optimizer


def parameters_of(case: Case, dtype: torch.dtype, device: str) -> list[Parameter]:
    """The row's parameters."""
    return [Parameter(param.detach().to(device)) for param in case.parameters(dtype)]


def gradients_of(case: Case, steps: int) -> list[list[Tensor]]:
    """Gradients [step][parameter] of a row, on the CPU."""
    return gradients(case.shapes, steps, 0, flatten=bool(case.kwargs.get("flatten", False)))


def outcome(case: Case, dtype: torch.dtype, device: str, **overrides: object) -> Outcome:
    """Takes the steps of a row."""
    params = parameters_of(case, dtype, device)
    before = [param.detach().cpu().clone() for param in params]
    optimizer = optimizer_of(case, params, **overrides)
    for grads in gradients_of(case, STEPS):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(device, dtype)
        optimizer.step()
    states = [
        {key: value.detach().cpu() for key, value in optimizer.state[param].items()} for param in params
    ]
    return Outcome(before, [param.detach().cpu() for param in params], states)


def outcomes_on_the_cpu(algorithm: str, folder: Path) -> Mapping[str, Outcome]:
    """Those of an algorithm's rows, by `label`: computed by a process that has a CPU."""
    environment = {key: value for key, value in os.environ.items() if key != "OXIDION_TEST_DEVICE"}
    file = folder / algorithm
    command = [sys.executable, str(Path(__file__).resolve()), algorithm, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(file, weights_only=True)
    return {name: Outcome(*parts) for name, parts in found.items()}


def label(case: Case, dtype: torch.dtype) -> str:
    """Under which name an outcome is kept."""
    return f"{case.name} {dtype}"


def signs_of_the_device(case: Case) -> dict[str, str]:
    """Settings by which singular vectors on the CPU have the signs of a device, not those of LAPACK."""
    return {"svd": "gram"} if case.kwargs.get("svd") == "exact" else {}


def main(algorithm: str, file: str) -> None:
    """Takes all steps of an algorithm on the CPU and saves what they leave."""
    torch.set_num_threads(1)
    found = {
        label(case, dtype): outcome(case, dtype, "cpu", **signs_of_the_device(case))
        for case in CASES[algorithm]
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    }
    quantized = QUANTIZED[algorithm]
    found[label(quantized, torch.float32)] = outcome(quantized, torch.float32, "cpu", state_bits=8)
    torch.save({name: (o.before, o.after, o.states) for name, o in found.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
