"""The recorded trajectories of the classes that work in an eigenbasis."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxidion._reference.registry import REFERENCE
from support.asserts import update_relative_error
from support.golden import GoldenCase, golden_cases

CASES = golden_cases("SOAP", "SOAPMuon")
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def load_bases(case: GoldenCase, index: int, state: dict[str, Tensor]) -> None:
    """Sets the bases of a parameter to those that were recorded after its first step, if any were."""
    for key in ("Q_L", "Q_R"):
        recorded = case.tensor(f"state.{index}.{key}.step1")
        if recorded is not None:
            state[key].copy_(recorded)


def errors(case: GoldenCase, dtype: torch.dtype, **overrides: object) -> dict[tuple[int, int], float]:
    """Errors of updates by (parameter, step)."""
    optimizer, params = case.build(dtype, **overrides)
    found = {}
    for step in range(case.steps):
        for index, param in params.items():
            param.grad = case.grad(step, index).to(dtype)
        optimizer.step()
        for index, param in params.items():
            if step == 0:
                load_bases(case, index, optimizer.state[param])
            expected = case.update(index, step + 1)
            if expected is not None:
                found[index, step + 1] = update_relative_error(param, case.initial(index), expected)
    return found


def test_recorded_runs_cover_classes_sides_frequencies_and_bases() -> None:
    kept = {case.name for case in CASES}
    assert {"soap_f1", "soap_f3_beta", "soap_one_sided", "soap_short", "soap_rect_given"} <= kept
    assert "soap_merged" in kept
    assert {"soap_muon_svd", "soap_muon_f2_svd", "soap_muon_ns12", "soap_muon_rect_given"} <= kept


@every_case
def test_reference_recorded_run_is_reproduced(case: GoldenCase) -> None:
    recorded = 0
    for index in case.indices:
        group = {**case.reference_group(index), "stream": index}
        param, state = case.initial(index), {}
        for step in range(case.steps):
            REFERENCE[str(group["algorithm"])](param, case.grad(step, index), state, group)
            if step == 0:
                load_bases(case, index, state)
            expected = case.update(index, step + 1)
            if expected is not None:
                recorded += 1
                assert update_relative_error(param, case.initial(index), expected) <= 1.2e-7, (index, step)
    assert recorded == 3 * len(case.indices)


@every_case
def test_float64_recorded_run_is_followed_within_1e_6(case: GoldenCase) -> None:
    orth = {"orth_dtype": "float64"} if case.cls == "SOAPMuon" else {}
    found = errors(case, torch.float64, **orth)
    assert len(found) == 3 * len(case.indices)
    assert {key: error for key, error in found.items() if not error <= 1e-6} == {}


@every_case
def test_float32_recorded_run_is_followed_within_2e_4(case: GoldenCase) -> None:
    orth = {"orth_dtype": "float32"} if case.cls == "SOAPMuon" else {}
    found = errors(case, torch.float32, **orth)
    assert len(found) == 3 * len(case.indices)
    assert {key: error for key, error in found.items() if not error <= 2e-4} == {}
