"""Seeds, random generators and thread counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from support.asserts import assert_identical, assert_updates_close
from support.cases import MATRIX_ALGORITHMS, SMALL_CASES, Case, Group
from support.inputs import gaussian, well_conditioned
from support.threads import computing_threads
from support.trajectory import Twin, role_state

by_algorithm = pytest.mark.parametrize("case", SMALL_CASES, ids=str)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)


@by_algorithm
@every_dtype
def test_equal_runs_are_bit_equal_and_keep_the_global_generator(case: Case, dtype: torch.dtype) -> None:
    ends = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        before = torch.get_rng_state()
        params = case.parameters(dtype)
        optimizer: Any = case.build(params)
        for step in range(3):
            for index, param in enumerate(params):
                param.grad = gaussian(param.shape, 9, step, index).to(dtype)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), before)
        ends.append([{"param": p.detach(), **role_state(optimizer, p)} for p in params])
    for first, second in zip(*ends, strict=True):
        assert_identical(first, second, str(case))


def test_dion_seed_chooses_q() -> None:
    drawn = []
    for seed in (0, 0, 1):
        param = nn.Parameter(torch.zeros(12, 8))
        optimizer: Any = oxidion.Dion([param], seed=seed)
        optimizer.init_state()
        drawn.append(optimizer.state[param]["Q"].clone())
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("case", SMALL_CASES[::2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_two_threads_follow_the_reference_as_one_does(case: Case, dtype: torch.dtype) -> None:
    is_of_matrices = case.algorithm in {*MATRIX_ALGORITHMS, "soap_muon"}
    shapes = ((161, 139), (70, 161), (70, 161)) if is_of_matrices else ((70_001,), (301, 259))
    large = Case(case.name, case.cls, case.algorithm, case.kwargs, (Group(shapes),))
    tolerance = 1e-4 if dtype == torch.float32 else 4e-2
    if dtype == torch.bfloat16 and case.algorithm == "lamb":
        # An update is 0.01 of the parameter, which is rounded by 2^-9 of itself.
        tolerance = 2.0**-9 / 0.01
    for threads in (1, 2):
        twin = Twin(large, dtype, scale=0.01, orth_dtype="float32")
        grads = [well_conditioned(param.shape, 5, index).to(dtype) for index, param in enumerate(twin.params)]
        twin.set_grads(grads)
        with computing_threads(threads):
            twin.optimizer.step()
        twin.step_reference(grads)
        rows = zip(twin.params, twin.initial, twin.expected, twin.labels(), strict=True)
        for param, initial, expected, label in rows:
            assert_updates_close(param, initial, expected, tolerance, f"{label}, {threads} threads")
