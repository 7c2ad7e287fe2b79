"""Hyper-parameters are read from the groups at every step (contract.md 4.2 and 4.5)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from .case import MOMENTUM_FACTORS
from .snapshot import assert_params_equal
from .table import CASES, Case, every_case, every_matrix_case, make_model, pairs_of, run_steps, set_grads


@every_case
def test_maximize_equals_the_step_of_the_negated_gradient(case: Case) -> None:
    up, down = make_model(torch.float64), make_model(torch.float64)
    ascent = case.build(up, maximize=True)
    descent = case.build(down)
    for seed in range(3):
        set_grads(up, seed)
        set_grads(down, seed, scale=-1.0)
        ascent.step()
        descent.step()
    assert not torch.equal(up.first.weight, make_model(torch.float64).first.weight)
    # float64: signs may enter a reduction in another order; nothing else differs.
    for left, right in zip(up.parameters(), down.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


every_live_value = pairs_of(lambda case: case.other.items())


def test_every_row_has_live_values() -> None:
    assert all({"lr", "weight_decay"} <= set(case.other) for case in CASES)
    assert {case.cls.__name__ for case in CASES if not case.has_betas} == {"Adafactor", "SOAPMuon"}
    assert {case.cls.__name__ for case in CASES if not case.decoupled} == {"Lamb"}


@every_live_value
def test_written_hyper_parameter_acts_at_the_next_step(case: Case, key: str, value: object) -> None:
    model, same, fresh = (make_model(torch.float64) for _ in range(3))
    optimizer, unchanged = case.build(model), case.build(same)
    run_steps(optimizer, model, range(2))
    run_steps(unchanged, same, range(2))
    expected = case.build(fresh)
    fresh.load_state_dict(model.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    expected.load_state_dict(
        {**saved, "param_groups": [{**group, **_live(group, key, value)} for group in saved["param_groups"]]}
    )
    for group in optimizer.param_groups:
        group[key] = value
    for opt, net in ((optimizer, model), (unchanged, same), (expected, fresh)):
        run_steps(opt, net, range(2, 4))
    assert_params_equal(model.parameters(), fresh.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)]
    assert any(changed)
    if key in ("lr", "weight_decay"):
        assert all(changed)


def _live(group: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    if key == "beta2":
        return {key: value, "betas": (group["betas"][0], value)}
    mirrored = key == "betas" and len(value) == 2
    if not mirrored:
        return {key: value}
    # A first beta that changes is the momentum factor where the algorithm has one.
    factor = MOMENTUM_FACTORS.get(group["algorithm"])
    own = {} if factor is None else {factor: value[0]}
    return {key: value, "beta1": value[0], "beta2": value[1], **own}


@pytest.mark.parametrize("case", [case for case in CASES if case.decoupled], ids=str)
def test_lr_and_decay_scale_the_step_as_decoupled_decay_does(case: Case) -> None:
    lr, decay = 0.05, 0.5
    nets = {name: make_model(torch.float64) for name in ("plain", "double", "decayed")}
    set_ups = {"plain": (lr, 0.0), "double": (2 * lr, 0.0), "decayed": (lr, decay)}
    start = make_model(torch.float64)
    for name, net in nets.items():
        optimizer = case.build(net)
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"] = set_ups[name]
        run_steps(optimizer, net, range(case.idle + 1))
    for x, plain, double, decayed in zip(
        start.parameters(), *(nets[name].parameters() for name in ("plain", "double", "decayed")), strict=True
    ):
        torch.testing.assert_close(double - x, 2 * (plain - x), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(decayed, plain - lr * decay * x, rtol=1e-10, atol=1e-12)


@every_case
@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_tensor_hyper_parameter_equals_the_float_and_is_live(case: Case, key: str) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    start = {key: torch.tensor(0.125, dtype=torch.float64)}
    optimizer, reference = case.build(model, **start), case.build(same, **{key: 0.125})
    for seed, value in enumerate((0.125, 0.25, 0.0625)):
        for group in optimizer.param_groups:
            assert isinstance(group[key], Tensor)
            group[key].fill_(value)
        for group in reference.param_groups:
            group[key] = value
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(reference, same, range(seed, seed + 1))
    assert_params_equal(model.parameters(), same.parameters())
    assert not torch.equal(model.first.weight, make_model(torch.float64).first.weight)


@every_matrix_case
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("form", ["betas", "beta1 and beta2"])
def test_the_form_of_the_betas_that_was_changed_wins(case: Case, steps: int, form: str) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer = case.build(model)
    run_steps(optimizer, model, range(steps))
    vectors = optimizer.param_groups[1]
    if form == "betas":
        vectors["betas"] = (0.5, 0.625)
    else:
        vectors["beta1"], vectors["beta2"] = 0.5, 0.625
    saved = optimizer.state_dict()["param_groups"][1]
    run_steps(optimizer, model, range(steps, steps + 2))
    assert tuple(vectors["betas"]) == (0.5, 0.625)
    assert (vectors["beta1"], vectors["beta2"]) == (0.5, 0.625)
    assert tuple(saved["betas"]) == (saved["beta1"], saved["beta2"]) == (0.5, 0.625), (
        "saved while they differed"
    )

    # An independent AdamW with the same change.
    twins = [param for param in same.parameters() if param.ndim < 2]
    hyper = {"lr": vectors["lr"], "weight_decay": vectors["weight_decay"], "eps": vectors["epsilon"]}
    adamw = torch.optim.AdamW(twins, betas=optimizer.defaults["betas"], **hyper)
    run_steps(adamw, same, range(steps))
    adamw.param_groups[0]["betas"] = (0.5, 0.625)
    run_steps(adamw, same, range(steps, steps + 2))
    for actual, expected in zip((p for p in model.parameters() if p.ndim < 2), twins, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
