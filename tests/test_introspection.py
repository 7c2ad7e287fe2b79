"""What an optimizer says about itself: explain(), plan(), metrics(), verify()."""

from __future__ import annotations

import copy
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxidion
from contract.case import LOW_RANK_ALGORITHMS
from contract.snapshot import assert_params_equal, assert_same, params_of, snapshot
from contract.table import (
    CASES,
    Case,
    case_of,
    every_case,
    every_matrix_case,
    make_model,
    run_steps,
    set_grads,
)
from oxidion._reference.registry import REFERENCE

COLUMNS = {"name", "shape", "algorithm", "lr_factor", "rank", "state_bytes", "flops"}


def rms(tensor: Tensor) -> float:
    return math.sqrt(float(tensor.detach().double().square().mean()))


def spectral_factor(case: Case, shape: tuple[int, ...]) -> float:
    """The factor of lr, written out: sqrt(fan_out / fan_in) for matrices of the matrix classes, else 1."""
    if not case.is_matrix or len(shape) != 2:
        return 1.0
    # Keller Jordan's, which is that of SOAP-Muon, does not shrink the steps of wide matrices.
    least = 1.0 if case.algorithm == "soap_muon" else 0.0
    return math.sqrt(max(least, shape[0] / shape[1]))


def test_cases_are_not_empty() -> None:
    assert len(CASES) >= 4


@every_case
@pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])
def test_explain_has_one_true_row_per_parameter(case: Case, named: bool) -> None:
    model = make_model()
    optimizer = case.build(model, named=named)
    table = optimizer.explain().to_dict()
    assert set(table) >= COLUMNS
    params = params_of(optimizer)
    assert {len(column) for column in table.values()} == {len(params)}
    assert [tuple(shape) for shape in table["shape"]] == [tuple(param.shape) for param in params]
    assert len(set(table["name"])) == len(params)
    if named:
        by_identity = {id(param): name for name, param in model.named_parameters()}
        assert table["name"] == [by_identity[id(param)] for param in params]
    for param, algorithm, factor, rank in zip(
        params, table["algorithm"], table["lr_factor"], table["rank"], strict=True
    ):
        assert algorithm == (case.algorithm if param.ndim == 2 else case.vector_algorithm)
        assert factor == pytest.approx(spectral_factor(case, tuple(param.shape)), rel=1e-6)
        ranks = {"dion": math.ceil(min(param.shape, default=0) / 2)}
        ranks |= dict.fromkeys(LOW_RANK_ALGORITHMS, optimizer.defaults.get("rank"))
        assert rank == ranks.get(algorithm)


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=["own", "float32"])
def test_explained_state_bytes_are_those_of_the_tensors(
    case: Case, dtype: torch.dtype, state_dtype: torch.dtype | None
) -> None:
    optimizer = case.build(make_model(dtype), state_dtype=state_dtype)
    explained = optimizer.explain().to_dict()["state_bytes"]
    assert not optimizer.state, "explain() must allocate nothing"
    optimizer.init_state()
    actual = [
        sum(value.numel() * value.element_size() for value in optimizer.state[param].values())
        for param in params_of(optimizer)
    ]
    assert explained == actual
    assert all(actual)


@every_case
def test_explain_follows_existing_state_and_changed_groups(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    before = optimizer.explain().to_dict()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(4, 3))]})
    after = optimizer.explain().to_dict()
    assert len(after["name"]) == len(before["name"]) + 1
    assert tuple(after["shape"][-1]) == (4, 3)
    assert after["algorithm"][-1] == case.algorithm


@every_case
def test_explained_flops_are_positive_and_grow_with_the_matrix(case: Case) -> None:
    shapes = [(4, 4), (8, 4), (8, 8), (16, 16), (64, 64)]
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    flops = case.on(*params).explain().to_dict()["flops"]
    assert flops[0] > 0
    assert all(small < large for small, large in itertools.pairwise(flops))
    # Elementwise work grows 16-fold from 16x16 to 64x64, products of matrices 64-fold.
    growth = flops[4] / flops[3]
    if case.is_matrix or case.algorithm == "soap":
        assert growth > 20
    elif case.algorithm == "galore_adamw":
        assert 16 < growth < 64  # decompositions, by steps between two of them
    else:
        assert growth == pytest.approx(16, rel=0.01)


@every_case
def test_explain_prints_and_converts_to_arrays(case: Case) -> None:
    optimizer = case.build(make_model(), named=True)
    explained = optimizer.explain()
    text = str(explained)
    for name in ("first.weight", "norm.bias", case.algorithm, "lr_factor"):
        assert name in text
    assert len(text.splitlines()) >= 1 + len(params_of(optimizer))
    arrays = explained.to_numpy()
    assert set(arrays) == set(explained.to_dict())
    assert all(isinstance(column, np.ndarray) and column.shape == (9,) for column in arrays.values())
    np.testing.assert_array_equal(arrays["state_bytes"], explained.to_dict()["state_bytes"])
    assert arrays["lr_factor"].dtype == np.float64


@every_case
def test_plan_prints_every_bucket_and_its_computations(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    text = str(optimizer.plan())
    assert not optimizer.state, "plan() must allocate nothing"
    heads = re.findall(r"^bucket (\d+)\s+(\w+)\s+(\d+)", text, flags=re.MULTILINE)
    assert heads, text
    assert {algorithm for _, algorithm, _ in heads} == {case.algorithm, case.vector_algorithm}
    assert sum(int(count) for *_, count in heads) == len(params_of(optimizer))
    computed = {int(bucket) for bucket in re.findall(r"compute\s+b(\d+)\.\w+", text)}
    assert computed == {int(bucket) for bucket, *_ in heads}
    run_steps(optimizer, model, range(1))
    assert str(optimizer.plan()) == text


@every_matrix_case
def test_plan_puts_matrices_of_one_shape_into_one_bucket(case: Case) -> None:
    text = str(case.build(make_model()).plan())
    matrices = {line for line in text.splitlines() if re.match(rf"bucket \d+\s+{case.algorithm}\b", line)}
    assert len(matrices) == 3
    assert sum("2 × [8, 8]" in line for line in matrices) == 1


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("steps", [0, 2])
def test_verify_reports_small_errors_and_changes_nothing(case: Case, dtype: torch.dtype, steps: int) -> None:
    model, same = make_model(dtype), make_model(dtype)
    exact = {"orth_dtype": str(dtype).removeprefix("torch.")} if case.is_matrix else {}
    optimizer, reference = case.build(model, **exact), case.build(same, **exact)
    run_steps(optimizer, model, range(steps))
    run_steps(reference, same, range(steps))
    set_grads(model, steps)
    before = snapshot(optimizer)
    grads = [param.grad.clone() for param in model.parameters()]
    table = optimizer.verify().to_dict()
    assert_same(snapshot(optimizer), before)
    assert_same([param.grad for param in model.parameters()], grads, "gradients")
    assert len(table["name"]) == len(params_of(optimizer))
    # The smallest update, Lion's 1e-4 of weights of 1, is known to 1e-3 in float32 and to 1e-12 in float64.
    bound = 5e-3 if dtype == torch.float32 else 1e-9
    assert all(0 <= error < bound for error in table["update_error"]), table
    run_steps(optimizer, model, range(steps, steps + 2))
    run_steps(reference, same, range(steps, steps + 2))
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_verify_compares_with_a_step_that_it_computes_itself(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oxidion._reference.registry import REFERENCE

    honest = REFERENCE[case.algorithm]

    def twice(param: Tensor, *rest: Any) -> None:
        start = param.clone()
        honest(param, *rest)
        param.add_(param - start)

    model = make_model(torch.float64)
    optimizer = case.build(model)
    for step in range(case.idle):
        set_grads(model, step)
        optimizer.step()
    set_grads(model, case.idle)
    monkeypatch.setitem(REFERENCE, case.algorithm, twice)
    table = optimizer.verify().to_dict()
    for algorithm, error in zip(table["algorithm"], table["update_error"], strict=True):
        if algorithm == case.algorithm:
            assert error == pytest.approx(0.5, abs=1e-6)  # half of the doubled update is missing


@every_case
def test_verify_skips_parameters_without_gradient(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, named=True)
    set_grads(model, 0)
    model.again.weight.grad = None
    rows = dict(zip(*(optimizer.verify().to_dict()[key] for key in ("name", "update_error")), strict=True))
    assert rows["again.weight"] is None
    assert rows["square.weight"] is not None


@every_case
def test_metrics_are_those_of_the_next_step_and_change_nothing(case: Case) -> None:
    model = make_model(torch.float64)
    optimizer = case.build(model, named=True)
    run_steps(optimizer, model, range(2))
    set_grads(model, 2)
    twin_model, twin = copy.deepcopy((model, optimizer))
    before = snapshot(optimizer)
    table = optimizer.metrics()
    assert_same(snapshot(optimizer), before)
    set_grads(twin_model, 2)
    twin.step()
    stepped = dict(twin_model.named_parameters())
    columns = table.to_dict()
    assert set(columns["name"]) == set(stepped)
    old = dict(model.named_parameters())
    for name, update, size in zip(columns["name"], columns["update_rms"], columns["param_rms"], strict=True):
        assert update == pytest.approx(rms(stepped[name] - old[name]), rel=1e-9)
        assert update > 0
        assert size == pytest.approx(rms(old[name]), rel=1e-9)
    assert table.bytes_sent == 0
    assert table.stages
    assert all(milliseconds >= 0 for milliseconds in table.stages.values())
    optimizer.step()
    assert_params_equal(model.parameters(), twin_model.parameters())


def test_orthogonality_error_of_muon_is_that_of_its_update() -> None:
    model = make_model(torch.float64)
    optimizer = case_of("Muon").build(model, named=True, weight_decay=0.0)
    set_grads(model, 0)
    table = optimizer.metrics().to_dict()
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.step()
    errors = dict(zip(table["name"], table["orthogonality_error"], strict=True))
    lr = optimizer.param_groups[0]["lr"]
    for name, param in model.named_parameters():
        if param.ndim < 2:
            assert errors[name] is None
            continue
        u = (start[name] - param.detach()) / (lr * math.sqrt(param.shape[0] / param.shape[1]))
        gram = u.mT @ u if u.shape[0] >= u.shape[1] else u @ u.mT
        short = gram.shape[0]
        expected = float((gram - torch.eye(short, dtype=torch.float64)).norm()) / math.sqrt(short)
        # The subtraction of the weights loses the digits that an update of 1e-2 lacks.
        assert errors[name] == pytest.approx(expected, rel=1e-9, abs=1e-10)
        assert expected > 1e-3, "Polar Express does not converge that far"


def test_dion_measures_its_low_rank_part() -> None:
    model = make_model(torch.float64)
    optimizer = case_of("Dion").build(model, named=True)
    run_steps(optimizer, model, range(2))
    set_grads(model, 2)
    table = optimizer.metrics().to_dict()
    energy = dict(zip(table["name"], table["captured_energy"], strict=True))
    error = dict(zip(table["name"], table["orthogonality_error"], strict=True))
    residual = dict(zip(table["name"], table["error_feedback_norm"], strict=True))
    for name, param in model.named_parameters():
        if param.ndim < 2:
            assert energy[name] is None
            assert residual[name] is None
            continue
        m = optimizer.state[param]["momentum"] + param.grad
        m = m if m.shape[0] >= m.shape[1] else m.mT
        p = torch.linalg.qr(m @ optimizer.state[param]["Q"]).Q
        r = m.mT @ p
        assert energy[name] == pytest.approx(float(r.square().sum() / m.square().sum()), rel=1e-9)
        assert residual[name] == pytest.approx(float((m - 0.05 * p @ r.mT).norm()), rel=1e-9)
        assert 0 <= error[name] < 1e-9


@every_case
def test_synchronize_for_checkpoint_is_a_no_op_on_one_device(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    optimizer.synchronize_for_checkpoint()
    assert not optimizer.state
    run_steps(optimizer, model, range(2))
    before = snapshot(optimizer)
    optimizer.synchronize_for_checkpoint()
    assert_same(snapshot(optimizer), before)


def of_tokens(tokens: int, **settings: Any) -> Any:
    """Muon with the gradient of ``tokens`` tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    model(torch.randn(tokens, 64)).square().mean().backward()
    return oxidion.Muon(model, lr=0.02, scalar_lr=1e-3, summary=False, **settings)


@pytest.mark.parametrize(("dtype", "tokens"), [*itertools.product(("bfloat16", "float32"), (8, 512))])
def test_errors_of_rounding_are_expected_by_dtype_and_rank(dtype: str, tokens: int) -> None:
    for row in of_tokens(tokens, orth_dtype=dtype).verify():
        assert row["update_error"] < 10 * row["expected"]
        if row["algorithm"] == "muon":
            # Few tokens give few directions; in the others the iteration enlarges the noise of bfloat16.
            low, high = {
                ("bfloat16", 8): (0.3, 10.0),
                ("bfloat16", 512): (1e-3, 0.3),
                ("float32", 8): (1e-6, 0.01),
                ("float32", 512): (1e-7, 1e-3),
            }[dtype, tokens]
            assert low < row["expected"] < high


def test_a_wrong_step_is_not_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = of_tokens(512, orth_dtype="float32")
    wrong = REFERENCE["muon"]

    def longer(x: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """A step that is one percent longer."""
        wrong(x, grad, state, {**group, "lr": 1.01 * group["lr"]})

    monkeypatch.setitem(REFERENCE, "muon", longer)
    rows = [row for row in optimizer.verify() if row["algorithm"] == "muon"]
    assert all(row["update_error"] > 50 * row["expected"] for row in rows)


@pytest.mark.parametrize("tokens", [4, 8, 32, 512])
def test_orthogonality_error_expects_missing_directions(tokens: int) -> None:
    for row in of_tokens(tokens, orth_dtype="float32").metrics():
        assert list(row)[-1] == "expected"
        if row["algorithm"] == "muon":
            assert row["expected"] == pytest.approx(math.sqrt(max(64 - tokens, 0) / 64), abs=1e-9)
            assert row["orthogonality_error"] == pytest.approx(row["expected"], abs=0.3)
        else:
            assert row["expected"] is None
