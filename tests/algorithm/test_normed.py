"""Lamb, Adafactor and CAME: the bar in float32, degenerate gradients, what the classes promise."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.registry import REFERENCE
from support.asserts import assert_tensors_close, update_relative_error
from support.case import Case, Group
from support.inputs import Shape, gaussian
from support.trajectory import Twin

SHAPES: tuple[Shape, ...] = (
    *((16, 12), (18, 12), (17, 5), (7, 5), (3, 12), (1, 8), (8, 1), (13,), (), (4, 6, 10), (64, 3, 3, 3)),
    (70, 130),
)
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "lamb": (oxidion.Lamb, {"lr": 0.05, "weight_decay": 0.125}),
    "lamb-step": (oxidion.Lamb, {"lr": 0.05, "debias": "step", "always_adapt": True}),
    "adafactor": (oxidion.Adafactor, {"lr": 0.05, "relative_step": False, "scale_parameter": False}),
    "adafactor-scaled": (oxidion.Adafactor, {"lr": 0.5, "relative_step": False, "beta1": 0.9}),
    "came": (oxidion.CAME, {"lr": 0.1, "weight_decay": 0.125}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
factored = pytest.mark.parametrize("kind", ["adafactor", "adafactor-scaled", "came"])


def case_of(kind: str, shapes: tuple[Shape, ...] = SHAPES) -> Case:
    cls, kwargs = KINDS[kind]
    return Case(kind, cls, kind.partition("-")[0], kwargs, (Group(shapes),))


def uneven(shape: Shape, step: int, index: int) -> Tensor:
    """A full-rank gradient whose rows and columns differ by 1.5 decades, of changing magnitude."""
    grad = gaussian(shape, 11, step, index) * 10.0 ** -(step % 3)
    for dim, size in enumerate(shape[-2:], start=max(len(shape) - 2, 0)):
        scale = 10.0 ** torch.linspace(-1.5, 0.0, size, dtype=torch.float64)
        order = torch.randperm(size, generator=torch.Generator().manual_seed(dim + index))
        grad = grad * scale[order].reshape([size if at == dim else 1 for at in range(len(shape))])
    return grad


@every_kind
def test_six_float32_updates_are_within_1e_5_of_float64(kind: str) -> None:
    twin = Twin(case_of(kind), torch.float32)
    for step in range(6):
        twin.follow_parameters()
        before = [param.clone() for param in twin.expected]
        twin.step([uneven(shape, step, index).float().double() for index, shape in enumerate(SHAPES)])
        for param, old, expected, label in zip(
            twin.params, before, twin.expected, twin.labels(), strict=True
        ):
            error = update_relative_error(param, old, expected - old)
            assert error <= 1e-5, f"{label} step {step}: {error:.1e}"


DEGENERATE = {
    "zero-row": lambda g: g.index_fill(-2, torch.tensor([1]), 0.0),
    "zero-column": lambda g: g.index_fill(-1, torch.tensor([0]), 0.0),
    "all-zero": torch.zeros_like,
    "one-hot": lambda g: torch.zeros_like(g).index_fill(-1, torch.tensor([2]), 1.0) * one_row(g),
    "rank-one": lambda g: g.mean(dim=-1, keepdim=True) * g.mean(dim=-2, keepdim=True),
}


def one_row(grad: Tensor) -> Tensor:
    rows = torch.zeros(grad.shape[-2], 1, dtype=grad.dtype)
    rows[0] = 1.0
    return rows


@every_kind
@pytest.mark.parametrize("name", DEGENERATE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_degenerate_gradients_give_finite_reference_steps(kind: str, name: str, dtype: torch.dtype) -> None:
    shapes = ((16, 12), (7, 5), (4, 6, 10))
    twin = Twin(case_of(kind, shapes), dtype)
    for step in range(4):
        # Steps with whole gradients before and after.
        spoil = DEGENERATE[name] if step in (0, 2) else (lambda g: g)
        grads = [spoil(gaussian(shape, 5, step, index)) for index, shape in enumerate(shapes)]
        twin.step([grad.to(dtype).double() for grad in grads])
        for index, (param, expected, label) in enumerate(
            zip(twin.params, twin.expected, twin.labels(), strict=True)
        ):
            assert param.isfinite().all(), label
            assert all(bool(value.isfinite().all()) for value in twin.optimizer.state[param].values()), label
            error = update_relative_error(param, twin.initial[index], expected - twin.initial[index].double())
            assert error <= (1e-9 if dtype == torch.float64 else 1e-4), f"{label} step {step}: {error:.1e}"


@every_kind
@pytest.mark.parametrize("shape", [(6, 5), (7,), (2, 3, 4)], ids=str)
def test_nan_spreads_over_its_parameter_where_norms_are_shared(kind: str, shape: Shape) -> None:
    hit, other = (nn.Parameter(gaussian(shape, 1, index)) for index in range(2))
    cls, kwargs = KINDS[kind]
    optimizer: Any = cls([hit, other], **kwargs)
    for param in (hit, other):
        param.grad = gaussian(shape, 2)
    assert hit.grad is not None
    hit.grad.view(-1)[1] = math.nan
    optimizer.step()
    assert hit.isnan().all()
    assert other.isfinite().all()


@every_kind
def test_every_state_has_memory_of_its_own_and_is_finite(kind: str) -> None:
    twin = Twin(case_of(kind), torch.float32)
    for step in range(3):
        twin.step([uneven(shape, step, index) for index, shape in enumerate(SHAPES)])
    seen: dict[int, str] = {}
    for param, label in zip(twin.params, twin.labels(), strict=True):
        for key, value in twin.optimizer.state[param].items():
            assert value.isfinite().all(), f"{label} {key}"
            if value.numel():
                owner = seen.setdefault(value.untyped_storage().data_ptr(), f"{label} {key}")
                assert owner == f"{label} {key}"
    assert len(seen) == sum(len(state) for state in twin.optimizer.state.values())


@factored
def test_means_equal_the_means_of_the_row_factors(kind: str) -> None:
    twin = Twin(case_of(kind), torch.float32)
    for step in range(4):
        twin.step([uneven(shape, step, index) for index, shape in enumerate(SHAPES)])
    found = 0
    for param in twin.params:
        state = twin.optimizer.state[param]
        for key in {"exp_avg_sq_mean", "exp_avg_res_mean"} & set(state):
            row, col = (state[key.replace("mean", part)] for part in ("row", "col"))
            assert row.shape == param.shape[:-1]
            assert col.shape == (*param.shape[:-2], param.shape[-1])
            assert_tensors_close(state[key], row.double().mean(dim=-1), 1e-5, key)
            assert_tensors_close(state[key], col.double().mean(dim=-1), 1e-5, key)
            found += 1
    assert found == (9 if kind != "came" else 18) + (1 if kind != "came" else 2)


def step_once(cls: type, kwargs: dict[str, Any], start: Tensor, grad: Tensor, steps: int = 1) -> Tensor:
    """How far the parameter has moved."""
    param = nn.Parameter(start.clone())
    optimizer: Any = cls([param], **kwargs)
    for _ in range(steps):
        param.grad = grad.clone()
        optimizer.step()
    return param.detach() - start


START, GRAD = gaussian((9, 7), 1), gaussian((9, 7), 2)


def test_lamb_step_has_the_norm_of_the_parameter_times_lr() -> None:
    for debias in ("moments", "none"):
        kwargs = {"lr": 0.01, "weight_decay": 0.1, "debias": debias}
        moved = step_once(oxidion.Lamb, kwargs, START, GRAD)
        assert float(moved.norm() / START.norm()) == pytest.approx(0.01, rel=1e-9)
    moved = step_once(oxidion.Lamb, {"lr": 0.01, "weight_decay": 0.1, "debias": "step"}, START, GRAD)
    assert float(moved.norm() / START.norm()) == pytest.approx(0.01 * math.sqrt(0.001) / 0.1, rel=1e-9)


def test_lamb_without_decay_is_adam_unless_it_always_adapts() -> None:
    twin = nn.Parameter(START.clone())
    adam = torch.optim.Adam([twin], lr=0.01, eps=1e-6)
    for _ in range(3):
        twin.grad = GRAD.clone()
        adam.step()
    plain = step_once(oxidion.Lamb, {"lr": 0.01}, START, GRAD, 3)
    assert_tensors_close(plain, twin.detach() - START, 1e-10)
    adapted = step_once(oxidion.Lamb, {"lr": 0.01, "always_adapt": True}, START, GRAD)
    assert float(adapted.norm() / START.norm()) == pytest.approx(0.01, rel=1e-9)


def test_lamb_bounds_act_on_the_norm_and_on_the_ratio() -> None:
    base = {"lr": 0.01, "weight_decay": 0.1}
    bounded = step_once(oxidion.Lamb, {**base, "phi": (0.0, 0.5)}, START, GRAD)
    assert float(bounded.norm()) == pytest.approx(0.005, rel=1e-9)
    lifted = step_once(oxidion.Lamb, {**base, "phi": (100.0, 200.0)}, START, GRAD)
    assert float(lifted.norm()) == pytest.approx(1.0, rel=1e-9)
    free = step_once(oxidion.Lamb, base, START, GRAD)
    clipped = step_once(oxidion.Lamb, {**base, "trust_clip": 0.25}, START, GRAD)
    assert_tensors_close(clipped / clipped.norm(), free / free.norm(), 1e-10)
    direction = GRAD / (GRAD.abs() + 1e-6) + 0.1 * START
    assert_tensors_close(clipped, -0.01 * 0.25 * direction, 1e-9)


def test_lamb_clips_each_group_by_the_norm_of_its_own_gradients() -> None:
    params = [nn.Parameter(gaussian(shape, 1, i)) for i, shape in enumerate(((6, 5), (7,), (3, 4)))]
    grads = [gaussian(tuple(param.shape), 2, i) for i, param in enumerate(params)]
    kwargs = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5, "eps": 0.1}
    optimizer: Any = oxidion.Lamb([{"params": params[:2]}, {"params": params[2:]}], **kwargs)
    norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads[:2]))
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    before = [param.detach().clone() for param in params]
    optimizer.step()
    for index, (param, grad, start) in enumerate(zip(params, grads, before, strict=True)):
        own = norm if index < 2 else float(grad.norm())
        scaled = grad * (0.5 / own)
        alone = step_once(oxidion.Lamb, {**kwargs, "max_grad_norm": None}, start, scaled)
        assert_tensors_close(param.detach() - start, alone, 1e-9)


def test_adafactor_scaled_step_and_decay_are_relative_to_the_rms() -> None:
    rms = float(START.square().mean().sqrt())
    moved = step_once(oxidion.Adafactor, {"lr": 0.01, "relative_step": False}, START, gaussian((9, 7), 2))
    plain = {"lr": 0.01 * rms, "relative_step": False, "scale_parameter": False}
    assert_tensors_close(moved, step_once(oxidion.Adafactor, plain, START, GRAD), 1e-12)
    decayed = step_once(
        oxidion.Adafactor, {"lr": 0.01, "relative_step": False, "weight_decay": 0.5}, START, GRAD
    )
    assert_tensors_close(decayed, moved - 0.01 * rms * 0.5 * START, 1e-10)


def test_adafactor_relative_step_falls_with_time_and_warms_up() -> None:
    for kwargs, rates in (({}, [1e-2] * 3), ({"warmup_init": True}, [1e-6, 2e-6, 3e-6])):
        param = nn.Parameter(torch.full((4, 4), 2.0, dtype=torch.float64))
        optimizer: Any = oxidion.Adafactor([param], **kwargs)
        for rate in rates:
            before = param.detach().clone()
            param.grad = torch.ones_like(param)
            optimizer.step()
            # A constant gradient gives an update of ones.
            assert_tensors_close(before - param.detach(), rate * before, 1e-9)


def test_adafactor_relative_step_follows_root_time_beyond_10_000() -> None:
    param = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))
    optimizer: Any = oxidion.Adafactor([param], scale_parameter=False)
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.state[param]["step"].fill_(39_999)
    before = param.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), torch.full_like(before, 1 / 200), rtol=1e-9, atol=0)


def test_adafactor_moves_nothing_at_lr_zero_with_relative_steps() -> None:
    param = nn.Parameter(START.clone())
    optimizer: Any = oxidion.Adafactor([param], weight_decay=0.5)
    optimizer.param_groups[0]["lr"] = 0.0  # as torch.distributed.checkpoint does to make states
    param.grad = GRAD.clone()
    optimizer.step()
    assert torch.equal(param, START)
    assert optimizer.state[param]["step"].item() == 1
    optimizer.param_groups[0]["lr"] = None
    optimizer.step()
    assert not torch.equal(param, START)


def test_came_first_update_has_rms_11_lr_or_a_tenth_for_vectors() -> None:
    moved = step_once(oxidion.CAME, {"lr": 1e-3}, gaussian((64, 48), 1), gaussian((64, 48), 2))
    assert float(moved.square().mean().sqrt()) / 1e-3 == pytest.approx(11.1, rel=0.1)
    vector = step_once(oxidion.CAME, {"lr": 1e-3}, gaussian((64,), 1), gaussian((64,), 2))
    torch.testing.assert_close(vector.abs(), torch.full_like(vector, 1e-4), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_verify_compares_with_the_naive_step(kind: str) -> None:
    twin = Twin(case_of(kind), torch.float32)
    for step in range(2):
        twin.step([uneven(shape, step, index) for index, shape in enumerate(SHAPES)])
    twin.set_grads([uneven(shape, 2, index) for index, shape in enumerate(SHAPES)])
    held = [param.detach().clone() for param in twin.params]
    errors = [row["update_error"] for row in twin.optimizer.verify()]
    assert max(errors) <= 1e-5
    assert all(torch.equal(param, old) for param, old in zip(twin.params, held, strict=True))


def test_verify_of_clipped_gradients_knows_the_norm_of_the_group() -> None:
    twin = Twin(case_of("lamb"), torch.float64, max_grad_norm=0.01)
    twin.set_grads([uneven(shape, 0, index) for index, shape in enumerate(SHAPES)])
    assert max(row["update_error"] for row in twin.optimizer.verify()) <= 1e-10


def test_references_are_registered() -> None:
    assert {"lamb", "adafactor", "came"} <= set(REFERENCE)
