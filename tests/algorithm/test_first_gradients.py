"""Gradients that are zero or tiny at first: what is made of the first one waits for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import oxidion
from oxidion._reference.registry import REFERENCE
from support.inputs import gaussian, with_singular_values

SHAPE = (24, 16)
APOLLO: tuple[Any, ...] = (
    (oxidion.APOLLOAdamW, {"rank": 4}),
    (oxidion.APOLLOAdamW, {"rank": 4, "scale_type": "tensor"}),
    (oxidion.APOLLOMini, {}),
)
GALORE: tuple[dict[str, Any], ...] = (
    {},
    {"svd": "exact"},
    {"svd": "random"},
    {"rotate_moments": True},
    {"proj_type": "full", "eps": 0.25},
    {"proj_type": "reverse_std"},
)
MATRIX: tuple[Any, ...] = (
    *((getattr(oxidion, name), {}) for name in ("Muon", "NorMuon", "Dion", "Dion2", "NorDion2")),
    (oxidion.Dion, {"rank_fraction": 0.25}),
    *((oxidion.GaLoreAdamW, {"rank": 4, **kwargs}) for kwargs in GALORE),
    *APOLLO,
)


def moved(optimizer: Any, param: nn.Parameter, grads: list[Tensor]) -> list[float]:
    """The norm of each step."""
    found = []
    for grad in grads:
        before = param.detach().clone()
        param.grad = grad.to(param.dtype)
        optimizer.step()
        found.append(float((param.detach() - before).norm()))
    return found


def usual(count: int) -> list[Tensor]:
    return [gaussian(SHAPE, 1) + 0.3 * gaussian(SHAPE, 2, step) for step in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-20, 1e-12, 1e-10])
@pytest.mark.parametrize(("cls", "kwargs"), APOLLO)
def test_limiter_starts_at_the_first_non_negligible_update(
    cls: Any, kwargs: dict[str, Any], size: float, dtype: torch.dtype
) -> None:
    param, twin = (nn.Parameter(gaussian(SHAPE, 3).to(dtype)) for _ in range(2))
    first = [size * gaussian(SHAPE, 4, step) for step in range(3)]
    steps = moved(cls([param], **kwargs), param, [*first, *usual(5)])[3:]
    expected = moved(cls([twin], **kwargs), twin, usual(5))
    # Three steps more have other corrections of the start: at most sqrt(1 - b2^8) / (1 - b1^8) of them.
    assert all(0.5 * e <= s <= 2.0 * e for s, e in zip(steps, expected, strict=True)), (steps, expected)


@pytest.mark.parametrize(("cls", "kwargs"), APOLLO)
def test_limiter_equals_the_reference_and_limits_jumps(cls: Any, kwargs: dict[str, Any]) -> None:
    # With a large eps the update grows as the gradient does.
    keys = {"lr": 0.1, "weight_decay": 0.0, "eps": 1.0, "betas": (0.9, 0.999), **kwargs}
    param = nn.Parameter(gaussian(SHAPE, 3))
    optimizer, expected = cls([param], **keys), param.detach().clone()
    group = {**optimizer.param_groups[0], "stream": 0}
    state: dict[str, Tensor] = {}
    sizes, norms = (0.0, 1.0, 100.0, 0.0, 1e-3, 1.0), []
    for number, size in enumerate(sizes):
        grad = size * gaussian(SHAPE, 5, number)
        param.grad = grad
        optimizer.step()
        REFERENCE["apollo_adamw"](expected, grad, state, group)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-11, atol=1e-13)
        norms.append(float(optimizer.state[param]["update_norm"]))
    assert norms[0] == 0.0
    assert abs(norms[2] / norms[1] - 1.01) < 1e-6, "a jump is limited"
    assert norms[3] == norms[2], "a gradient of zero says nothing"


@pytest.mark.parametrize("stack", [(), (3,)], ids=["matrix", "stack"])
@pytest.mark.parametrize("kwargs", GALORE, ids=str)
def test_projection_of_a_gradient_of_zero_waits_for_the_next(
    kwargs: dict[str, Any], stack: tuple[int, ...]
) -> None:
    shape = (*stack, *SHAPE)
    param = nn.Parameter(gaussian(shape, 1))
    keys = {"lr": 0.1, "weight_decay": 0.125, "rank": 4, "update_proj_gap": 4, "eps": 1e-8, **kwargs}
    optimizer: Any = oxidion.GaLoreAdamW([param], state_bits=32, **keys)
    group = {**optimizer.param_groups[0], "stream": 0, "algorithm": "galore_adamw"}
    expected, state = param.detach().clone(), {}
    for step in range(10):
        grad = gaussian(shape, 2, step)
        if step in (0, 1, 8):
            grad.zero_()
        elif stack and step < 4:
            grad[1] = 0.0
        before, held = param.detach().clone(), dict(optimizer.state[param])
        held = {key: value.clone() for key, value in held.items()}
        param.grad = grad
        optimizer.step()
        REFERENCE["galore_adamw"](expected, grad, state, group)
        torch.testing.assert_close(param.detach(), expected, rtol=1e-9, atol=1e-11)
        moves = (param.detach() - (1.0 - 0.1 * 0.125) * before).abs().amax((-2, -1)) > 1e-6
        if step < 2:
            assert not moves.any()
        elif stack and step < 4:
            assert moves.tolist() == [True, False, True]
        else:
            assert moves.all(), "the first gradient that is not zero moves"
        if step == 8:
            assert torch.equal(optimizer.state[param]["proj"], held["proj"]), "due, and seen nothing"
    since = optimizer.state[param]["proj_step"]
    assert since.flatten().tolist() == [5.0] * since.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("svd", ["gram", "exact", "random"])
@pytest.mark.parametrize("rank", [1, 2, 5])
def test_columns_of_a_projection_are_orthonormal_or_zero(svd: str, dtype: torch.dtype, rank: int) -> None:
    shape = (60, 50)
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    optimizer: Any = oxidion.GaLoreAdamW([param], rank=8, svd=svd)
    param.grad = with_singular_values(shape, torch.linspace(1.0, 0.5, rank), 6).to(dtype)
    optimizer.step()
    proj = optimizer.state[param]["proj"].double()
    kept = proj[:, proj.norm(dim=0) > 0]
    assert kept.shape[1] == rank
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    assert float((kept.mT @ kept - torch.eye(rank, dtype=torch.float64)).abs().max()) <= tolerance


@pytest.mark.parametrize(("cls", "kwargs"), MATRIX)
def test_training_is_the_same_after_checkpoint_states_were_made(cls: Any, kwargs: dict[str, Any]) -> None:
    def train(init: bool) -> Tensor:
        model = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        with torch.no_grad():
            model.weight.copy_(gaussian(SHAPE, 3))
        optimizer = cls(model.parameters(), lr=0.01, **kwargs)
        if init:
            states = get_optimizer_state_dict(model, optimizer)
            assert torch.equal(model.weight.detach(), gaussian(SHAPE, 3).float())
            set_optimizer_state_dict(model, optimizer, states)
        start = model.weight.detach().clone()
        moved(optimizer, model.weight, usual(8))
        return model.weight.detach() - start

    without, after = train(False), train(True)
    # Adam's corrections of the start differ by the one step that was counted, as torch.optim.AdamW's do.
    if cls._ALGORITHM in ("galore_adamw", "apollo_adamw"):
        assert torch.nn.functional.cosine_similarity(without.flatten(), after.flatten(), dim=0) > 0.95
        assert 0.7 <= float(after.norm() / without.norm()) <= 1.4
    else:
        torch.testing.assert_close(after, without, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rank_fraction", [0.25, 1.0])
def test_q_of_dion_outlasts_gradients_of_zero(rank_fraction: float) -> None:
    param = nn.Parameter(gaussian(SHAPE, 1).float())
    optimizer: Any = oxidion.Dion([param], lr=0.1, weight_decay=0.0, rank_fraction=rank_fraction, mu=0.5)
    usual_step = moved(optimizer, param, usual(2))[-1]
    moved(optimizer, param, [torch.zeros(SHAPE)] * 400)
    assert bool((optimizer.state[param]["Q"].norm(dim=0) > 1e-7).all())
    assert moved(optimizer, param, usual(1))[0] >= 0.5 * usual_step
