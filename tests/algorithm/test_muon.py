"""Muon: recorded and hand-computed steps, views of the parameter, a custom orthogonalizer, conditioning."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.muon import muon_step
from oxidion._reference.orthogonalize import NEWTON_SCHULZ, POLAR_EXPRESS, orthogonalize
from support.appendix import GRADS, INITIAL, SETTINGS, assert_near, two_steps
from support.asserts import assert_updates_close
from support.inputs import gaussian, well_conditioned, with_singular_values

MOMENTUM = ((-0.05, 2.4, -0.7), (2.475, 0.525, 2.35))
EXACT = ((0.449343, -1.127356, 1.993884), (1.389441, 0.229209, -0.868078))
EXACT_NESTEROV = ((0.488347, -1.062256, 2.009735), (1.43045, 0.232931, -0.795288))
POLAR = ((0.444962, -1.146804, 2.002369), (1.38984, 0.225628, -0.876032))
SCHULZ = ((0.449197, -1.126389, 1.993575), (1.388708, 0.229826, -0.865881))


def polar_factor(x: Tensor, epsilon: float = 0.0) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ vh).to(x.dtype)


def one_step(initial: Tensor, grad: Tensor, **kwargs: object) -> Tensor:
    """Update of one step, divided by -lr."""
    param = nn.Parameter(initial.clone())
    param.grad = grad.to(param.dtype)
    keys = {key: kwargs.pop(key) for key in ("num_heads", "split_sizes", "interleaved") if key in kwargs}
    oxidion.Muon([{"params": [param], **keys}], **{"lr": 0.5, "weight_decay": 0.0, **kwargs}).step()
    return (param.detach() - initial) / -0.5


@pytest.mark.parametrize(
    ("kwargs", "expected", "atol"),
    [
        # The recorded numbers carry the bfloat16 roundings of five iterations on updates of 0.1: a tenth of
        # the update through Polar Express.
        ({}, POLAR, 1.5e-2),
        ({"use_polar_express": False}, SCHULZ, 4e-3),
    ],
    ids=["polar-express", "newton-schulz"],
)
@pytest.mark.parametrize("orth_dtype", ["float32", "bfloat16"])
def test_muon_recorded_two_steps_are_reproduced(
    kwargs: dict[str, Any], expected: object, atol: float, orth_dtype: str
) -> None:
    param, state = two_steps(oxidion.Muon, orth_dtype=orth_dtype, **kwargs)
    assert_near(param, expected, atol)
    assert_near(state["momentum"], MOMENTUM, 1e-6)


@pytest.mark.parametrize(
    ("group", "expected"),
    [({}, EXACT), ({"nesterov": True, "adjust_lr": "rms_norm", "cautious_wd": True}, EXACT_NESTEROV)],
    ids=["plain", "nesterov-rms-cautious"],
)
def test_muon_reference_reproduces_recorded_exact_polar_steps(
    group: dict[str, Any], expected: object
) -> None:
    param, state = torch.tensor(INITIAL, dtype=torch.float64), {}
    for grad in GRADS:
        muon_step(
            param,
            torch.tensor(grad, dtype=torch.float64),
            state,
            {**SETTINGS, "mu": 0.95, "newton_schulz_func": polar_factor, **group},
        )
    # The recorded update was rounded to bfloat16: 4e-4 of 0.1, twice.
    assert_near(param, expected, 1e-3)
    assert_near(state["momentum"], MOMENTUM, 1e-6)


@pytest.mark.parametrize(
    ("use_polar_express", "rows", "safety"),
    [(True, POLAR_EXPRESS, 1.02), (False, NEWTON_SCHULZ, 1.0)],
    ids=["polar-express", "newton-schulz"],
)
def test_muon_single_row_by_hand_follows_the_scalar_polynomial(
    use_polar_express: bool, rows: tuple[tuple[float, float, float], ...], safety: float
) -> None:
    grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    sigma = 5.0 / (safety * 5.0 + 1e-8)
    for a, b, c in rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    update = one_step(torch.zeros_like(grad), grad, use_polar_express=use_polar_express)
    torch.testing.assert_close(update, sigma * math.sqrt(0.5) * grad / 5.0, rtol=1e-13, atol=0)
    tall = one_step(torch.zeros(2, 1, dtype=torch.float64), grad.mT, use_polar_express=use_polar_express)
    torch.testing.assert_close(tall, sigma * math.sqrt(2.0) * grad.mT / 5.0, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("adjust_lr", "factor"),
    [("spectral_norm", math.sqrt(4 / 9)), ("rms_norm", 0.2 * 3.0), (None, 1.0)],
    ids=str,
)
def test_muon_adjust_lr_scales_the_orthogonalized_matrix(adjust_lr: str | None, factor: float) -> None:
    grad = gaussian((4, 9), 1)
    update = one_step(torch.zeros(4, 9, dtype=torch.float64), grad, adjust_lr=adjust_lr)
    torch.testing.assert_close(update, factor * orthogonalize(grad, {}), rtol=0, atol=1e-12)


@pytest.mark.parametrize("adjust_lr", ["spectral_norm", "rms_norm", None], ids=str)
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
def test_muon_heads_and_splits_equal_separate_parameters(adjust_lr: str | None, nesterov: bool) -> None:
    initial, kwargs = (
        gaussian((12, 5), 1),
        {"adjust_lr": adjust_lr, "nesterov": nesterov, "weight_decay": 0.25},
    )
    grad = well_conditioned((12, 5), 2)
    for keys, heights in (
        ({"num_heads": 3}, (4, 4, 4)),
        ({"split_sizes": [6, 2, 4]}, (6, 2, 4)),
        ({"num_heads": 1}, (12,)),
    ):
        whole = one_step(initial, grad, **keys, **kwargs)
        pieces = [
            one_step(x, g, **kwargs) for x, g in zip(initial.split(heights), grad.split(heights), strict=True)
        ]
        torch.testing.assert_close(whole, torch.cat(pieces), rtol=0, atol=1e-12)


def test_muon_expert_tensor_equals_separate_matrices() -> None:
    initial, grad = gaussian((2, 3, 6, 4), 1), gaussian((2, 3, 6, 4), 2)
    whole = one_step(initial, grad, interleaved=1)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(whole[i, j], one_step(initial[i, j], grad[i, j]), rtol=0, atol=1e-11)


def test_muon_flattened_kernel_equals_its_matrix() -> None:
    initial, grad = gaussian((6, 2, 3, 3), 1), gaussian((6, 2, 3, 3), 2)
    whole = one_step(initial, grad, flatten=True)
    matrix = one_step(initial.reshape(6, 18), grad.reshape(6, 18))
    torch.testing.assert_close(whole.reshape(6, 18), matrix, rtol=0, atol=1e-11)


def test_muon_flattened_kernels_of_one_shape_do_not_mix() -> None:
    # Two equal shapes share a batch; each must come out as if it were alone.
    grads = [well_conditioned((6, 2, 3, 3), seed, flatten=True) for seed in (1, 2)]
    params = [nn.Parameter(torch.zeros(6, 2, 3, 3, dtype=torch.float64)) for _ in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    oxidion.Muon(params, lr=1.0, weight_decay=0.0, flatten=True, adjust_lr=None).step()
    for param, grad in zip(params, grads, strict=True):
        alone = -one_step(torch.zeros_like(param), grad, flatten=True, adjust_lr=None)
        torch.testing.assert_close(param.detach(), alone, rtol=0, atol=1e-11)
        values = torch.linalg.svdvals(param.detach().reshape(6, 18))
        assert 0.7 < values.min() <= values.max() < 1.25


@pytest.mark.parametrize("orth_dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)], ids=str)
@pytest.mark.parametrize(
    ("polar", "low", "high"), [(True, 0.8, 1.2), (False, 0.9, 1.1)], ids=["polar", "schulz"]
)
def test_muon_update_singular_values_are_near_one(
    orth_dtype: str, shape: tuple[int, int], polar: bool, low: float, high: float
) -> None:
    grad = well_conditioned(shape, 1).float()
    update = one_step(
        torch.zeros(shape), grad, orth_dtype=orth_dtype, adjust_lr=None, use_polar_express=polar
    )
    values = torch.linalg.svdvals(update.double())
    assert low < values.min() <= values.max() < high
    # Directions are kept: the polar factors of update and gradient agree up to the precision.
    cosine = (update.double() * polar_factor(grad.double())).sum() / values.norm() / math.sqrt(min(shape))
    assert cosine > 0.985


@pytest.mark.parametrize("orth_dtype", ["float64", "float32", "bfloat16"])
def test_muon_rank_deficient_gradient_stays_in_its_row_space(orth_dtype: str) -> None:
    grad = with_singular_values((12, 8), torch.tensor([3.0, 2.0, 1.0]), 1).float()
    update = one_step(torch.zeros(12, 8), grad, orth_dtype=orth_dtype, adjust_lr=None).double()
    values = torch.linalg.svdvals(update)
    assert values[:3].min() > 0.75
    # Rounding noise at zero singular values is amplified by at most the product of the linear coefficients.
    amplification = math.prod(a for a, _, _ in POLAR_EXPRESS)
    noise = {"float64": 1e-7, "float32": 1e-7, "bfloat16": 2.0**-8}[orth_dtype]
    assert values[3:].max() <= amplification * noise if orth_dtype != "bfloat16" else values[3:].max() < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_muon_automatic_precision_stays_close_to_float32(dtype: torch.dtype) -> None:
    initial, grad = torch.zeros(24, 16, dtype=dtype), well_conditioned((24, 16), 1).to(dtype)
    automatic = one_step(initial, grad)
    exact = one_step(initial.float(), grad.float(), orth_dtype="float32")
    assert_updates_close(automatic, initial, exact, 0.08)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_muon_state_dtype_is_kept(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.zeros(12, 8, dtype=dtype))
    optimizer: Any = oxidion.Muon([param], state_dtype=state_dtype, mu=0.5)
    grads = [well_conditioned((12, 8), seed).to(dtype) for seed in (1, 2)]
    for grad in grads:
        param.grad = grad
        optimizer.step()
    momentum = optimizer.state[param]["momentum"]
    assert momentum.dtype == state_dtype
    exact = 0.5 * grads[0].double() + grads[1].double()
    atol = 4 * torch.finfo(state_dtype).eps
    torch.testing.assert_close(momentum.double(), exact, rtol=0, atol=atol)


def test_muon_vectors_without_strict_take_adamw_of_their_group() -> None:
    vector, matrix = gaussian((5,), 1), gaussian((4, 3), 2)
    params = [nn.Parameter(vector.clone()), nn.Parameter(matrix.clone())]
    twin = nn.Parameter(vector.clone())
    relaxed: Any = oxidion.Muon(params, lr=0.125, weight_decay=0.25, betas=(0.8, 0.9), strict=False)
    adamw: Any = oxidion.AdamW([twin], lr=0.125, weight_decay=0.25, betas=(0.8, 0.9))
    for step in range(3):
        params[0].grad = twin.grad = gaussian((5,), 3, step)
        params[1].grad = gaussian((4, 3), 4, step)
        relaxed.step()
        adamw.step()
    torch.testing.assert_close(params[0].detach(), twin.detach(), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="0"):
        oxidion.Muon([nn.Parameter(vector.clone())])


@pytest.mark.parametrize("shape", [(64, 40), (40, 64), (48, 48)], ids=str)
def test_matrices_of_one_shape_and_any_size_step_as_each_alone(shape: tuple[int, int]) -> None:
    grads = [10.0**size * gaussian(shape, 4, at).float() for at, size in enumerate((0, 4, -4, 2))]
    together = [nn.Parameter(torch.zeros(shape)) for _ in grads]
    alone = [nn.Parameter(torch.zeros(shape)) for _ in grads]
    for params in (together, *([param] for param in alone)):
        optimizer = oxidion.Muon(params, lr=1.0, orth_dtype="float32")
        for param in params:
            at = next(at for at, own in enumerate((*together, *alone)) if own is param) % len(grads)
            param.grad = grads[at].clone()
        optimizer.step()
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.norm() > 1
