"""Gradients at the edges: missing, zero, huge, tiny and non-finite."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from oxidion._oxidion import state_names
from support.asserts import assert_identical, assert_updates_close
from support.cases import ALL_CASES, SMALL_CASES, Case
from support.trajectory import Twin, role_state

every_case = pytest.mark.parametrize("case", ALL_CASES, ids=str)
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["float64", "float32", "bfloat16"]
)

by_algorithm = pytest.mark.parametrize("case", SMALL_CASES, ids=str)


def snapshot(twin: Twin) -> list[dict[str, Tensor]]:
    return [
        {
            "param": param.detach().clone(),
            **{k: v.clone() for k, v in role_state(twin.optimizer, param).items()},
        }
        for param in twin.params
    ]


@every_case
def test_missing_gradients_leave_parameter_and_state_alone(case: Case) -> None:
    twin = Twin(case, torch.float64)
    first, second, third = twin.gradients(3)
    twin.step(first)
    before = snapshot(twin)
    skipped = range(0, len(second), 2)
    twin.step([None if index in skipped else grad for index, grad in enumerate(second)])
    after = snapshot(twin)
    for index, label in enumerate(twin.labels()):
        if index in skipped:
            assert_identical(after[index], before[index], label)
    twin.step(third)
    rows = zip(twin.params, twin.initial, twin.expected, twin.labels(), strict=True)
    for param, initial, expected, label in rows:
        assert_updates_close(param, initial, expected, 1e-10, label)


@every_case
def test_step_without_any_gradient_changes_only_the_counter(case: Case) -> None:
    twin = Twin(case, torch.float32)
    twin.step(twin.gradients(1)[0])
    before = snapshot(twin)
    counts = [group["step"] for group in twin.optimizer.param_groups]
    twin.step([None] * len(twin.params))
    for after, expected, label in zip(snapshot(twin), before, twin.labels(), strict=True):
        assert_identical(after, expected, label)
    assert [group["step"] for group in twin.optimizer.param_groups] == [count + 1 for count in counts]


@by_algorithm
@every_dtype
def test_zero_gradients_from_the_start_only_decay(case: Case, dtype: torch.dtype) -> None:
    twin = Twin(case, dtype, lr=0.5, weight_decay=0.5)
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in case.shapes]
    start = snapshot(twin)
    for _ in range(2):
        twin.step(zeros)
    # LAMB scales the decay to the norm of the parameter: 0.5 of it in each step. SOAP's first moves nothing.
    left = {"lamb": 0.25, "soap": 0.75}.get(case.algorithm, 0.5625)
    # What is added to squared gradients shows in their averages.
    floor = 1e-16 if case.algorithm in ("adafactor", "came") else 0.0
    for param, initial, end, begin in zip(twin.params, twin.initial, snapshot(twin), start, strict=True):
        unit = torch.finfo(dtype).eps
        torch.testing.assert_close(param.detach(), left * initial, rtol=2 * unit, atol=0)
        for key in end.keys() - {"param", "step"}:
            assert torch.equal(end[key], begin[key]) or end[key].abs().max() <= floor, key


@by_algorithm
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_non_finite_gradient_shows_in_its_own_parameter_only(
    case: Case, bad: float, dtype: torch.dtype
) -> None:
    clean, dirty = Twin(case, dtype), Twin(case, dtype)
    for step, grads in enumerate(clean.gradients(3)):
        clean.set_grads(grads)
        clean.optimizer.step()
        dirty.set_grads(grads)
        if step == 1:
            grad = dirty.params[0].grad
            assert grad is not None
            grad[2, 3] = bad
        dirty.optimizer.step()
        ends = list(zip(snapshot(dirty), snapshot(clean), clean.labels(), strict=True))
        for actual, expected, label in ends[1:]:
            assert_identical(actual, expected, f"{label} step {step}")
        if step >= 1:
            hit = ends[0][0]
            assert not bool(hit["momentum"].isfinite().all()), f"step {step}"
            # A sign is finite, as torch.sign has it: Lion shows it in the momentum alone.
            if case.algorithm != "lion":
                assert not bool(hit["param"].isfinite().all()), f"step {step}"


@by_algorithm
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e20], ids=str)
def test_float64_gradients_of_any_scale_follow_the_reference(case: Case, scale: float) -> None:
    twin = Twin(case, torch.float64, scale=0.0)
    for grads in twin.gradients(3):
        twin.step([scale * grad for grad in grads])
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        assert_updates_close(param, initial, expected, 1e-9, label)


@pytest.mark.parametrize(
    ("case", "scale"),
    [
        (case, scale)
        for case in SMALL_CASES
        for scale in (1e-12, 1e-6, 1e6, 1e18, 1e20)
        # The second moment of 1e20 is no float32 number.
        if not (scale > 1e18 and any("exp_avg_sq" in key for key in state_names()[case.algorithm].values()))
    ],
    ids=str,
)
def test_float32_gradients_of_any_scale_follow_the_reference(case: Case, scale: float) -> None:
    twin = Twin(case, torch.float32, scale=0.0, orth_dtype="float32")
    for grads in twin.gradients(3):
        exact = [(scale * grad).float().double() for grad in grads]
        twin.step(exact)
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        # Bases of float32 have its rounding, and what is divided by its own size in a basis has all of it.
        assert_updates_close(param, initial, expected, 5e-4 if "soap" in case.algorithm else 1e-4, label)


@pytest.mark.parametrize("case", [case for case in SMALL_CASES if case.algorithm == "dion"], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_dion_vanishing_gradients_leave_later_steps_at_full_size(case: Case, dtype: torch.dtype) -> None:
    # 1e-30 squared is no float32 number: norms underflow although nothing is zero.
    twin = Twin(case, dtype, scale=0.0, weight_decay=0.0)
    first, second, third = twin.gradients(3)
    nominal = [
        2.0**-6 * (q.shape[1] * param.shape[0] / param.shape[1]) ** 0.5
        for param in twin.params
        for q in (twin.optimizer.state[param]["Q"],)
    ]
    for grads, low in (([1e-30 * grad for grad in first], 0.0), (second, 0.95), (third, 0.95)):
        before = [param.detach().double().clone() for param in twin.params]
        twin.set_grads(grads)
        twin.optimizer.step()
        for param, old, size, label in zip(twin.params, before, nominal, twin.labels(), strict=True):
            moved = (param.detach().double() - old).norm().item()
            assert low * size <= moved <= 1.05 * size, label
