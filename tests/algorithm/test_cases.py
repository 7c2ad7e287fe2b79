"""Every setting of every class against the float64 reference, over several steps and in every dtype."""

from __future__ import annotations

import pytest
import torch

from support.asserts import assert_updates_close, error_in_ulps, relative_error
from support.cases import (
    ALL_CASES,
    BASIS_ALGORITHMS,
    EMPTY,
    LOW_RANK_ALGORITHMS,
    MATRIX_ALGORITHMS,
    Case,
    Group,
    case_named,
    optimizer_classes,
)
from support.trajectory import FACTORS, Twin, as_float64, role_state

STEPS = 4
NORMED = ("lamb", "adafactor", "came")
ELEMENTWISE = {
    algorithm
    for case in ALL_CASES
    for algorithm in case.algorithms
    if algorithm not in (*NORMED, *MATRIX_ALGORITHMS, *LOW_RANK_ALGORITHMS, *BASIS_ALGORITHMS)
}

every_case = pytest.mark.parametrize("case", ALL_CASES, ids=str)


def assert_follows_reference(
    case: Case, dtype: torch.dtype, tolerance: dict[str, float], orth_dtype: str
) -> None:
    """Compare after every step; errors are relative to the way that parameter and state have come so far."""
    twin = Twin(case, dtype, orth_dtype=orth_dtype)
    travelled = [0.0 for _ in twin.params]
    largest = [dict.fromkeys(state, 0.0) for state in twin.states]
    for number, grads in enumerate(twin.gradients(STEPS), start=1):
        before = [expected.clone() for expected in twin.expected]
        twin.step(grads)
        for index, (param, expected, state) in enumerate(
            zip(twin.params, twin.expected, twin.states, strict=True)
        ):
            where, limit = f"{twin.labels()[index]} step {number}", tolerance[case.algorithms[index]]
            assert param.dtype == dtype
            travelled[index] += (expected - before[index]).norm().item()
            assert (param.detach().double() - expected).norm().item() <= limit * travelled[index], where
            actual = as_float64(role_state(twin.optimizer, param))
            assert set(actual) == set(state), where
            for key in state.keys() - {"Q", "Q_L", "Q_R"}:
                largest[index][key] = max(largest[index][key], state[key].norm().item())
                error = (actual[key] - state[key]).norm().item()
                assert error <= limit * largest[index][key], f"{where} {key}: {error:.2e}"


def test_case_table_covers_every_exported_optimizer() -> None:
    covered = {case.cls for case in ALL_CASES}
    assert covered
    assert set(optimizer_classes()) == covered
    assert len({case.name for case in ALL_CASES}) == len(ALL_CASES)


@every_case
def test_float64_steps_equal_the_reference(case: Case) -> None:
    # Only the order of summation differs; Dion and Muon pass it through a QR or a steep polynomial.
    tolerance = dict.fromkeys((*MATRIX_ALGORITHMS, *LOW_RANK_ALGORITHMS, *BASIS_ALGORITHMS), 1e-10)
    tolerance |= dict.fromkeys((*ELEMENTWISE, *NORMED), 1e-12)
    assert_follows_reference(case, torch.float64, tolerance, "auto")


@every_case
def test_float32_steps_stay_at_rounding_level(case: Case) -> None:
    # Parameters of 0.1 are rounded to 6e-9, over updates of 1e-3 or more. Polar Express has a slope of 160 at
    # the largest singular value that its normalisation allows (1 / 1.02, a single row): 6e-8 becomes 1e-5.
    # Adam divides small elements of a projected gradient, which has the rounding of the large ones, by
    # themselves.
    tolerance = dict.fromkeys((*MATRIX_ALGORITHMS, *LOW_RANK_ALGORITHMS), 5e-5)
    # The first update is the signs of the elements in the basis; rounding moves the smallest elements most.
    tolerance |= dict.fromkeys(BASIS_ALGORITHMS, 5e-4)
    tolerance |= dict.fromkeys((*NORMED, "dion"), 1e-5)
    tolerance |= dict.fromkeys(ELEMENTWISE, 2e-6)
    if "weight_norm" in case.kwargs:
        # A step on the sphere is 1/64 of the norm, and factors are rounded to 6e-8 of that norm.
        tolerance |= dict.fromkeys(ELEMENTWISE, 64 * 2.0**-23)
    assert_follows_reference(case, torch.float32, tolerance, "float32")


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_low_precision_step_is_the_float64_step_rounded_once(case: Case, dtype: torch.dtype) -> None:
    lr = {} if case.kwargs.get("relative_step") else {"lr": 2.0**-4}
    twin = Twin(case, dtype, orth_dtype="float32", **lr)
    for number, grads in enumerate(twin.gradients(3), start=1):
        twin.follow()
        before = [param.clone() for param in twin.expected]
        twin.step(grads)
        rows = zip(twin.params, twin.expected, before, twin.states, case.algorithms, strict=True)
        for (param, expected, old, state, algorithm), label in zip(rows, twin.labels(), strict=True):
            where = f"{label} step {number}"
            # A matrix update also carries the rounding of the stored Q.
            limit = 1.0 if algorithm in (*ELEMENTWISE, "adafactor", "lamb", "came") else 2.0
            # Rounding in float32 moves the smallest elements in a basis by some 1e-4 of an update.
            limit = 8.0 if algorithm in BASIS_ALGORITHMS else limit
            wide_roles = (
                {*FACTORS, "variance", "L", "R", "basis_step", "radius"}
                if algorithm in ("adafactor", "came", *BASIS_ALGORITHMS)
                else {"radius"}
            )
            assert error_in_ulps(param.detach(), expected, old) <= limit, where
            for key, actual in role_state(twin.optimizer, param).items():
                if key == "step":
                    assert actual.dtype == torch.float32
                    assert actual.item() == number, where
                elif key in wide_roles:
                    assert actual.dtype == torch.float32, f"{where} {key}"
                    assert relative_error(actual, state[key]) <= 1e-5, f"{where} {key}"
                elif key not in ("Q", "Q_L", "Q_R"):
                    assert actual.dtype == torch.float32, f"{where} {key}"
                    assert relative_error(actual, state[key]) <= 1e-4, f"{where} {key}"


EMPTY_CASES = [
    Case(
        f"{name}-empty",
        case_named(name).cls,
        case_named(name).algorithm,
        case_named(name).kwargs,
        (Group(shapes),),
    )
    for name, shapes in (
        ("dion-default", (*EMPTY, (4, 3))),
        ("dion-quarter", (*EMPTY, (4, 3))),
        ("muon-nesterov", (*EMPTY, (4, 3), (0, 3, 4), (3, 0, 4))),
        ("muon-flatten", (*EMPTY, (0, 3, 3), (4, 3))),
        ("adamw-default", (*EMPTY, (0,), (3,))),
        ("lion-default", (*EMPTY, (0,), (3,))),
        *((f"{name}-default", (*EMPTY, (0,), (3,), (2, 0, 3), (4, 3))) for name in NORMED),
    )
]


@pytest.mark.parametrize("case", EMPTY_CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_empty_parameters_among_others_are_left_alone(case: Case, dtype: torch.dtype) -> None:
    twin = Twin(case, dtype, orth_dtype=str(dtype).removeprefix("torch."))
    for grads in twin.gradients(2):
        twin.step(grads)
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        assert param.shape == initial.shape
        assert_updates_close(param, initial, expected, 1e-10 if dtype == torch.float64 else 5e-5, label)
    assert any(param.numel() == 0 for param in twin.params)


@pytest.mark.parametrize(
    ("name", "lr_per_step"),
    [
        ("adamw-default", (0.5, 0.0, 0.25)),
        ("muon-nesterov", (0.5, 0.0, 0.25)),
        ("dion-quarter", (0.5, 0.0, 0.25)),
        *((f"{name}-default", (0.5, 0.0, 0.25)) for name in NORMED),
    ],
)
def test_hyper_parameters_are_read_at_every_step(name: str, lr_per_step: tuple[float, ...]) -> None:
    twin = Twin(case_named(name), torch.float64)
    for lr, grads in zip(lr_per_step, twin.gradients(len(lr_per_step)), strict=True):
        for group in (*twin.optimizer.param_groups, *twin.groups):
            group["lr"] = lr
        before = [param.detach().clone() for param in twin.params]
        twin.step(grads)
        if lr == 0.0:
            assert all(
                torch.equal(param.detach(), old) for param, old in zip(twin.params, before, strict=True)
            )
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        assert_updates_close(param, initial, expected, 1e-10, label)


def test_error_in_ulps_known_distances_are_counted() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    assert error_in_ulps((one + 2.0**-6).bfloat16(), one) == 2.0
    assert error_in_ulps(one.bfloat16(), one + 2.0**-8) == 0.5
    assert error_in_ulps((one - 2.0**-8).bfloat16(), one) == 0.5
    assert error_in_ulps(one.half(), one + 2.0**-9) == 2.0
    assert error_in_ulps((0.125 * one).bfloat16(), 0.1875 * one, 8.0 * one) == 1.0
