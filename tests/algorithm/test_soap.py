"""SOAP and SOAP-Muon: rotated problems, first gradients, directions without gradients, bad gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.asserts import update_relative_error
from support.inputs import gaussian

SOAP_SETTINGS: dict[str, dict[str, Any]] = {
    "both": {"precondition_frequency": 2},
    "every-step": {"precondition_frequency": 1},
    "short": {"precondition_frequency": 2, "sides": "short"},
}


def turn(size: int, seed: int) -> Tensor:
    """An orthogonal matrix."""
    return torch.linalg.qr(gaussian((size, size), seed))[0]


def trajectory(cls: Any, start: Tensor, grads: list[Tensor], **kwargs: Any) -> tuple[Tensor, Any]:
    """The parameter after these gradients, and the optimizer."""
    param = nn.Parameter(start.clone())
    optimizer = cls([param], **kwargs)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer


@pytest.mark.parametrize("name", SOAP_SETTINGS)
def test_rotated_gradients_give_the_rotated_run(name: str) -> None:
    settings = SOAP_SETTINGS[name]
    # Of the longer side of a matrix the first basis is drawn at random, in no rotated frame.
    shapes = ((24, 24), (24, 16), (16, 24)) if name == "short" else ((24, 24),)
    for m, n in shapes:
        start, grads = gaussian((m, n), 1), [gaussian((m, n), 2, step) for step in range(8)]
        # Where the other side has no basis its frame is that of the parameter.
        a = turn(m, 3) if name != "short" or m < n else torch.eye(m, dtype=torch.float64)
        b = turn(n, 4) if name != "short" or m >= n else torch.eye(n, dtype=torch.float64)
        plain, _ = trajectory(oxidion.SOAP, start, grads, lr=0.01, **settings)
        turned, _ = trajectory(
            oxidion.SOAP, a @ start @ b.mT, [a @ g @ b.mT for g in grads], lr=0.01, **settings
        )
        # cond(L) = cond(G)^2 amplifies rounding: 9e-15 to 7e-14 on four sets of gradients, and up to 4e-13
        # where each step has another basis.
        bar = 2e-12 if name == "every-step" else 5e-13
        assert update_relative_error(turned, a @ start @ b.mT, a @ (plain - start) @ b.mT) <= bar
        adam, _ = trajectory(oxidion.AdamW, start, grads, lr=0.01, weight_decay=0.0)
        other, _ = trajectory(
            oxidion.AdamW, a @ start @ b.mT, [a @ g @ b.mT for g in grads], lr=0.01, weight_decay=0.0
        )
        assert update_relative_error(other, a @ start @ b.mT, a @ (adam - start) @ b.mT) > 0.1


def test_rotated_gradients_give_the_rotated_run_of_soap_muon() -> None:
    start, grads = gaussian((20, 20), 1), [gaussian((20, 20), 2, step) for step in range(6)]
    a, b = turn(20, 3), turn(20, 4)
    kwargs = {"lr": 0.01, "precondition_frequency": 2, "orth_method": "svd", "orth_dtype": "float64"}
    plain, _ = trajectory(oxidion.SOAPMuon, start, grads, **kwargs)
    turned, _ = trajectory(oxidion.SOAPMuon, a @ start @ b.mT, [a @ g @ b.mT for g in grads], **kwargs)
    assert update_relative_error(turned, a @ start @ b.mT, a @ (plain - start) @ b.mT) <= 5e-13


def test_first_gradient_makes_the_bases_and_moves_nothing() -> None:
    start, grad = gaussian((12, 8), 1), gaussian((12, 8), 2)
    param, optimizer = trajectory(oxidion.SOAP, start, [grad], lr=0.01)
    (state,) = optimizer.state.values()
    assert torch.equal(param, start)
    assert not state["exp_avg"].any()
    assert not state["exp_avg_sq"].any()
    assert float(state["step"]) == float(state["basis_step"]) == 1
    for factor, basis in (("L", "Q_L"), ("R", "Q_R")):
        square = grad @ grad.mT if factor == "L" else grad.mT @ grad
        torch.testing.assert_close(state[factor], 0.05 * square)
        size = len(square)
        torch.testing.assert_close(state[basis].mT @ state[basis], torch.eye(size, dtype=torch.float64))
        turned = state[basis].mT @ square @ state[basis]
        assert (turned - turned.diag().diag()).abs().max() <= 1e-12 * turned.max()
        assert (turned.diag().diff() <= 1e-12 * turned.max()).all()


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("frequency", [1, 3])
def test_rounding_of_gradients_changes_a_run_by_rounding(shape: tuple[int, int], frequency: int) -> None:
    start, grads = gaussian(shape, 1), [gaussian(shape, 2, step) for step in range(12)]
    noisy = [grad * (1.0 + 2.0**-52 * gaussian(shape, 3, i).sign()) for i, grad in enumerate(grads)]
    first, _ = trajectory(oxidion.SOAP, start, grads, precondition_frequency=frequency)
    second, _ = trajectory(oxidion.SOAP, start, noisy, precondition_frequency=frequency)
    # Without the completion and the wait: 0.1 to 0.9. With them 6e-14 at most on eight sets of gradients.
    assert update_relative_error(second, start, first - start) <= 1e-12


def test_completion_of_a_basis_goes_by_seed_and_position() -> None:
    start, grad = gaussian((16, 4), 1), gaussian((16, 4), 2)
    runs = [trajectory(oxidion.SOAP, start, [grad], seed=seed)[1] for seed in (0, 0, 1)]
    bases = [next(iter(optimizer.state.values()))["Q_L"] for optimizer in runs]
    assert torch.equal(bases[0], bases[1])
    assert torch.allclose(bases[0][:, :4].abs(), bases[2][:, :4].abs())
    assert not torch.allclose(bases[0][:, 4:].abs(), bases[2][:, 4:].abs())


def test_a_side_waits_until_its_factor_has_full_rank() -> None:
    param = nn.Parameter(gaussian((24, 8), 1))
    optimizer = oxidion.SOAP([param], precondition_frequency=1)
    changed = []
    for step in range(8):
        before = {key: value.clone() for key, value in optimizer.state[param].items() if key[:2] == "Q_"}
        param.grad = gaussian((24, 8), 2, step)
        optimizer.step()
        changed.append([key for key in before if not torch.equal(before[key], optimizer.state[param][key])])
    # 2 * 24 / 8 = 6 gradients.
    assert changed == [[], *[["Q_R"]] * 4, *[["Q_L", "Q_R"]] * 3]


@pytest.mark.parametrize("cls", [oxidion.SOAP, oxidion.SOAPMuon])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradient_changes_no_factor_and_warns_once(
    cls: Any, bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    param, other = nn.Parameter(gaussian((6, 5), 1)), nn.Parameter(gaussian((6, 5), 2))
    optimizer = cls([param, other], precondition_frequency=2)
    for step in range(5):
        before = {
            key: optimizer.state[param].get(key, torch.zeros(())).clone() for key in ("L", "R", "Q_L", "Q_R")
        }
        for number, p in enumerate((param, other)):
            p.grad = gaussian((6, 5), 3, step, number)
        if step in (2, 4):
            assert param.grad is not None
            param.grad[1, 2] = bad
        optimizer.step()
        if step in (2, 4):
            state = optimizer.state[param]
            assert all(torch.equal(state[key], before[key]) for key in ("L", "R")), step
            assert all(state[key].isfinite().all() for key in ("Q_L", "Q_R"))
    assert sum("not finite" in record.message for record in caplog.records) == 1
    assert not param.isfinite().all()
    assert other.isfinite().all()


def test_zero_or_non_finite_first_gradients_make_no_basis() -> None:
    param = nn.Parameter(gaussian((2, 6, 5), 1))
    start = param.detach().clone()
    optimizer: Any = oxidion.SOAP([param], precondition_frequency=4, weight_decay=0.0)
    for step in range(6):
        grad = gaussian((2, 6, 5), 2, step)
        if step < 2:
            grad[1] = math.nan if step == 1 else 0.0
        param.grad = grad
        optimizer.step()
        state = optimizer.state[param]
        assert state["basis_step"].tolist() == [1.0, 0.0 if step < 2 else 3.0]
        if step < 3:
            assert torch.equal(param[1].detach(), start[1])
    assert param.isfinite().all()
    assert not torch.equal(param[1].detach(), start[1])


def test_vectors_take_adams_step_without_the_first_gradient() -> None:
    start, grads = gaussian((7,), 1), [gaussian((7,), 2, step) for step in range(5)]
    # Epsilon is 0, as SOAP adds it to the root without bias correction.
    kwargs = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 0.0}
    found, optimizer = trajectory(oxidion.SOAP, start, grads, **kwargs)
    expected, _ = trajectory(oxidion.AdamW, start, grads[1:], **kwargs)
    late = expected - start
    assert set(next(iter(optimizer.state.values()))) == {"exp_avg", "exp_avg_sq", "step"}
    # Decay after the update instead of before it: of second order in lr.
    assert update_relative_error(found, start, late) <= 0.02


def test_soap_muon_without_exponent_is_muon_on_mean_gradients() -> None:
    start, grads = gaussian((12, 8), 1), [gaussian((12, 8), 2, step) for step in range(5)]
    common = {"lr": 0.02, "mu": 0.9, "adjust_lr": "original", "orth_method": "svd", "orth_dtype": "float64"}
    found, _ = trajectory(oxidion.SOAPMuon, start, grads, denom_power=0.0, **common)
    # Muon's momentum is a sum: (1 - mu) times it is the mean, and the polar factor cancels scale.
    expected, _ = trajectory(oxidion.Muon, start, grads, nesterov=True, **common)
    assert update_relative_error(found, start, expected - start) <= 1e-12


def test_authors_words_are_taken() -> None:
    param = nn.Parameter(gaussian((6, 5), 1))
    optimizer = oxidion.SOAP([param], shampoo_beta=-1, max_precond_dim=5, normalize_gradient=True)
    (group,) = optimizer.param_groups
    assert (group["shampoo_beta"], group["max_precondition_dim"], group["normalize_grads"]) == (None, 5, True)
    param.grad = gaussian((6, 5), 2)
    optimizer.step()
    assert {"R", "Q_R"} <= optimizer.state[param].keys()
    assert "L" not in optimizer.state[param]
    with pytest.raises(ValueError, match="max_precond_dim and max_precondition_dim"):
        oxidion.SOAP([param], max_precond_dim=5, max_precondition_dim=6)
