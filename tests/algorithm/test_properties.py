"""Identities that hold for every shape and gradient, checked on drawn examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import oxidion
from oxidion._reference.dion import rank_of_q
from support.inputs import gaussian, well_conditioned

drawn = settings(max_examples=25, deadline=None, derandomize=True, database=None)

dims = st.integers(1, 14)
seeds = st.integers(0, 10_000)
fractions = st.sampled_from((0.05, 0.25, 0.5, 0.75, 1.0))
mus = st.sampled_from((0.0, 0.5, 0.95, 1.0))
scales = st.sampled_from((1e-9, 1e-3, 1.0, 1e3, 1e9))


def steps_of(
    cls: type, initial: Tensor, grads: list[Tensor], **kwargs: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Parameter and state after the gradients, from the initial value."""
    param = nn.Parameter(initial.clone())
    optimizer: Any = cls([param], **{"weight_decay": 0.0, **kwargs})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach(), optimizer.state[param]


def assert_same(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = max(expected.abs().max().item(), 1e-300) if expected.numel() else 1.0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)


@drawn
@given(rows=dims, cols=dims, mu=mus, seed=seeds)
def test_dion_full_rank_momentum_is_mu_times_the_sum(rows: int, cols: int, mu: float, seed: int) -> None:
    grads = [well_conditioned((rows, cols), seed, step) for step in range(3)]
    _, state = steps_of(oxidion.Dion, torch.zeros(rows, cols, dtype=torch.float64), grads, mu=mu)
    expected = torch.zeros_like(grads[0])
    for grad in grads:
        expected = mu * (expected + grad)
    # mu = 0 leaves rounding only; otherwise the identity loses the condition of B Q.
    torch.testing.assert_close(state["momentum"], expected, rtol=0, atol=1e-8)


@drawn
@given(rows=dims, cols=dims, fraction=fractions, multiple=st.integers(1, 5), mu=mus, seed=seeds)
def test_dion_step_splits_the_momentum_into_orthonormal_factors(
    rows: int, cols: int, fraction: float, multiple: int, mu: float, seed: int
) -> None:
    grad = well_conditioned((rows, cols), seed)
    initial = torch.zeros(rows, cols, dtype=torch.float64)
    settings_ = {"lr": 1.0, "mu": mu, "rank_fraction": fraction, "rank_multiple_of": multiple, "epsilon": 0.0}
    param, state = steps_of(oxidion.Dion, initial, [grad], **settings_)
    rank = rank_of_q(rows, cols, fraction, multiple)
    b, update = grad, -param / math.sqrt(rows / cols)
    if rows < cols:
        b, update = b.mT, update.mT
    q = state["Q"]
    assert q.shape == (min(rows, cols), rank)
    torch.testing.assert_close(q.norm(dim=0), torch.ones(rank, dtype=torch.float64), rtol=0, atol=1e-9)
    # B = P R^T + rest, and only (1 - mu) of the captured part leaves the momentum.
    momentum = state["momentum"] if rows >= cols else state["momentum"].mT
    p = update @ torch.linalg.pinv(q.mT)
    torch.testing.assert_close(p.mT @ p, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-6)
    torch.testing.assert_close(b - (1 - mu) * p @ (p.mT @ b), momentum, rtol=0, atol=1e-6)
    torch.testing.assert_close(q * (b.mT @ p).norm(dim=0), b.mT @ p, rtol=0, atol=1e-6)


@drawn
@given(rows=dims, cols=dims, fraction=fractions, scale=scales, seed=seeds)
def test_dion_trajectory_ignores_the_scale_of_gradients(
    rows: int, cols: int, fraction: float, scale: float, seed: int
) -> None:
    initial = gaussian((rows, cols), seed, 9)
    grads = [well_conditioned((rows, cols), seed, step) for step in range(2)]
    options = {"rank_fraction": fraction, "epsilon": 0.0}
    plain, _ = steps_of(oxidion.Dion, initial, grads, **options)
    scaled, _ = steps_of(oxidion.Dion, initial, [scale * grad for grad in grads], **options)
    assert_same(scaled - initial, plain - initial, 1e-7)


@drawn
@given(rows=dims, cols=dims, seed=seeds, cautious=st.booleans(), nesterov=st.booleans())
def test_muon_transposed_problem_gives_the_transposed_step(
    rows: int, cols: int, seed: int, cautious: bool, nesterov: bool
) -> None:
    initial = gaussian((rows, cols), seed, 9)
    grads = [gaussian((rows, cols), seed, step) for step in range(2)]
    options = {"adjust_lr": None, "weight_decay": 0.25, "cautious_wd": cautious, "nesterov": nesterov}
    straight, _ = steps_of(oxidion.Muon, initial, grads, **options)
    transposed, _ = steps_of(oxidion.Muon, initial.mT, [grad.mT for grad in grads], **options)
    assert_same(transposed.mT - initial, straight - initial, 1e-9)


@drawn
@given(rows=dims, cols=dims, scale=scales, seed=seeds, polar=st.booleans())
def test_muon_trajectory_ignores_rotations_and_scale(
    rows: int, cols: int, scale: float, seed: int, polar: bool
) -> None:
    left = torch.linalg.qr(gaussian((rows, rows), seed, 1))[0]
    right = torch.linalg.qr(gaussian((cols, cols), seed, 2))[0]
    initial = gaussian((rows, cols), seed, 9)
    grads = [gaussian((rows, cols), seed, step) for step in range(2)]
    options = {"use_polar_express": polar, "epsilon": 0.0, "lr": 0.5, "mu": 0.5}
    plain, _ = steps_of(oxidion.Muon, initial, grads, **options)
    turned, _ = steps_of(
        oxidion.Muon, left @ initial @ right, [scale * (left @ g @ right) for g in grads], **options
    )
    assert_same(turned, left @ plain @ right, 1e-9)


@drawn
@given(size=st.integers(1, 70), seed=seeds, scale=scales, amsgrad=st.booleans())
def test_adamw_trajectory_ignores_the_scale_of_gradients(
    size: int, seed: int, scale: float, amsgrad: bool
) -> None:
    initial = gaussian((size,), seed, 9)
    grads = [gaussian((size,), seed, step) for step in range(3)]
    options = {"lr": 0.5, "eps": 0.0, "amsgrad": amsgrad, "weight_decay": 0.1}
    plain, _ = steps_of(oxidion.AdamW, initial, grads, **options)
    scaled, _ = steps_of(oxidion.AdamW, initial, [scale * grad for grad in grads], **options)
    assert_same(scaled, plain, 1e-12)


@drawn
@given(size=st.integers(1, 70), seed=seeds, lr=st.floats(1e-6, 1.0), cautious=st.booleans())
def test_lion_moves_every_element_by_exactly_lr(size: int, seed: int, lr: float, cautious: bool) -> None:
    initial = gaussian((size,), seed, 9)
    grads = [gaussian((size,), seed, 1)]
    moved, _ = steps_of(oxidion.Lion, initial, grads, lr=lr, cautious_wd=cautious)
    torch.testing.assert_close(moved, initial - lr * grads[0].sign(), rtol=1e-14, atol=1e-15)


@drawn
@given(
    cls=st.sampled_from((oxidion.Dion, oxidion.Muon, oxidion.AdamW, oxidion.Lion)),
    rows=dims,
    cols=dims,
    seed=seeds,
)
def test_maximize_equals_negated_gradients(cls: type, rows: int, cols: int, seed: int) -> None:
    initial = gaussian((rows, cols), seed, 9)
    grads = [well_conditioned((rows, cols), seed, step) for step in range(2)]
    up, _ = steps_of(cls, initial, grads, lr=0.125, weight_decay=0.25, maximize=True)
    down, _ = steps_of(cls, initial, [-grad for grad in grads], lr=0.125, weight_decay=0.25)
    assert_same(up, down, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@drawn
@given(
    cls=st.sampled_from((oxidion.Dion, oxidion.Muon, oxidion.AdamW, oxidion.Lion)),
    shapes=st.lists(st.tuples(dims, dims), min_size=2, max_size=6),
    seed=seeds,
)
def test_parameters_together_equal_parameters_alone(
    dtype: torch.dtype, cls: type, shapes: list[tuple[int, int]], seed: int
) -> None:
    """Batching by shape must not let one parameter touch another; repeated shapes share a batch."""
    shapes = [*shapes, *shapes[:2]]
    values = [gaussian(shape, seed, index, scale=0.1).to(dtype) for index, shape in enumerate(shapes)]
    grads = [well_conditioned(shape, seed, index, 1).to(dtype) for index, shape in enumerate(shapes)]
    together = [nn.Parameter(value.clone()) for value in values]
    everyone: Any = cls(together, lr=0.125)
    everyone.init_state()
    alone = []
    for param, value, grad in zip(together, values, grads, strict=True):
        param.grad = grad.clone()
        single = nn.Parameter(value.clone())
        single.grad = grad.clone()
        optimizer: Any = cls([single], lr=0.125)
        optimizer.init_state()
        if "Q" in optimizer.state[single]:
            q = well_conditioned(optimizer.state[single]["Q"].shape, seed, 3)
            optimizer.state[single]["Q"].copy_(q)
            everyone.state[param]["Q"].copy_(q)
        optimizer.step()
        alone.append(single.detach())
    everyone.step()
    for param, expected in zip(together, alone, strict=True):
        assert_same(
            param.detach(),
            expected,
            1e-9 if dtype == torch.float64 else 2e-3 if cls is oxidion.Muon else 1e-5,
        )


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Lamb", {"max_grad_norm": 0.1}),
        ("APOLLOAdamW", {"rank": 2}),
        ("APOLLOMini", {}),
        ("CAME", {"lr": 0.01}),
        ("Adafactor", {"lr": 0.01, "relative_step": False}),
    ],
)
def test_norms_within_a_step_are_those_of_unscaled_gradients(name: str, keys: dict[str, Any]) -> None:
    moved = []
    for scale in (1.0, 1024.0):
        param = nn.Parameter(torch.linspace(-1, 1, 48).reshape(8, 6))
        optimizer = getattr(oxidion, name)([param], **keys)
        for step in range(2):
            param.grad = scale * torch.cos(torch.arange(48.0) + step).reshape(8, 6)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(0.0)
            optimizer.step()
        moved.append(param.detach())
    torch.testing.assert_close(*moved, rtol=1e-6, atol=1e-7)
