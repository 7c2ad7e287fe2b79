"""Spectra that are hard for an iteration: none may end with a singular value far above 1.

Spurious eigenvalues of a rounded Gram matrix make the Gram form explode where restarts are too few. Matrices
of early training (some large directions, much small noise, rows that have seen nothing) show it, and those of
rank 1 plus noise.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from oxidion import functional

SHAPES = [(48, 48), (32, 128), (96, 64), (128, 344), (160, 160)]
PER_SHAPE = 67
"""Of each of the two kinds: 670 matrices in all."""
LARGEST = 1.3

METHODS = {
    "standard five": {"method": "standard"},
    "gram five": {"method": "gram"},
    "standard four": {"method": "standard", "preset": "fast"},
    "gram four": {"method": "gram", "preset": "fast"},
}


def rank_one(m: int, n: int, generator: torch.Generator) -> Tensor:
    """``u vᵀ`` and noise of 0.3 to 1e-4 of its entries."""
    u, v, noise = (torch.randn(PER_SHAPE, *size, generator=generator) for size in ((m, 1), (1, n), (m, n)))
    level = 10.0 ** -torch.linspace(0.5, 4.0, PER_SHAPE)
    return u @ v + level[:, None, None] * noise


def early_momentum(m: int, n: int, generator: torch.Generator) -> Tensor:
    """One to six gradients of rank 3 that keep most directions, small noise, a quarter of the rows zero."""
    level = 10.0 ** -torch.linspace(1.5, 5.0, PER_SHAPE)
    spread = torch.exp(-2.0 * torch.arange(3))
    kept = torch.randn(PER_SHAPE, m, 3, generator=generator)
    steps = torch.arange(PER_SHAPE) % 6
    momentum = torch.zeros(PER_SHAPE, m, n)
    for step in range(6):
        few = kept + 0.1 * torch.randn(PER_SHAPE, m, 3, generator=generator)
        grad = (few * spread) @ torch.randn(PER_SHAPE, 3, n, generator=generator)
        grad += level[:, None, None] * torch.randn(PER_SHAPE, m, n, generator=generator)
        momentum = torch.where((step <= steps)[:, None, None], 0.95 * momentum + grad, momentum)
    momentum[:, : m // 4] = 0.0
    return momentum


def stress() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [kind(m, n, generator) for m, n in SHAPES for kind in (rank_one, early_momentum)]


def largest(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x.double(), 2)


def test_stress_set_has_the_size_that_the_bound_was_measured_on() -> None:
    assert sum(len(batch) for batch in stress()) == 670


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_no_singular_value_explodes(method: str, dtype: torch.dtype) -> None:
    for batch in stress():
        result = functional.polar_express(batch.to(dtype), **METHODS[method])  # type: ignore[arg-type]
        found = largest(result)
        assert found.max() <= LARGEST, (tuple(batch.shape), float(found.max()), int(found.argmax()))
        assert found.min() > 0.8


def of_spectrum(sigma: Tensor, n: int, generator: torch.Generator) -> Tensor:
    k = len(sigma)
    left = torch.linalg.qr(torch.randn(k, k, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(n, k, generator=generator, dtype=torch.float64))[0]
    return (left * sigma) @ right.mT


def momentum_like() -> list[Tensor]:
    """Power laws, logarithmic spectra and eight large values: like the momentum of small GPTs."""
    generator = torch.Generator().manual_seed(3)
    k = 192
    index = torch.arange(1, k + 1, dtype=torch.float64)
    found = []
    for i in range(4):
        heads = torch.full((k,), 0.02, dtype=torch.float64) * (1.0 - 0.9 * index / k)
        heads[:8] = torch.linspace(1.0, 0.2, 8)
        log = torch.logspace(0, -3, k, dtype=torch.float64) + 0.01
        sigmas = (index ** -(0.7 + 0.1 * i), log, heads)
        found.extend(of_spectrum(sigma, (192, 512)[i % 2], generator) for sigma in sigmas)
    return found


def quality(results: list[Tensor], inputs: list[Tensor]) -> tuple[float, float, float]:
    """Largest singular value; means of ``‖U Uᵀ - I‖_F / √k`` and of the cosine to the exact polar factor."""
    top, error, cosine = [], [], []
    for result, x in zip(results, inputs, strict=True):
        sigma = torch.linalg.svdvals(result.double())
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        exact = left @ right
        top.append(float(sigma.max()))
        error.append(float((sigma.square() - 1.0).norm()) / math.sqrt(len(sigma)))
        cosine.append(float((result.double() * exact).sum() / (result.double().norm() * exact.norm())))
    return max(top), sum(error) / len(error), sum(cosine) / len(cosine)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_quality_is_not_below_that_of_five_steps_of_torch(method: str, dtype: torch.dtype) -> None:
    zeropower = pytest.importorskip("torch.optim._muon")._zeropower_via_newtonschulz
    inputs = momentum_like()
    torchs = [zeropower(x.float(), (3.4445, -4.775, 2.0315), 5, 1e-7) for x in inputs]
    ours = [functional.polar_express(x.to(dtype), **METHODS[method]) for x in inputs]  # type: ignore[arg-type]
    theirs, found = quality(torchs, inputs), quality(ours, inputs)
    assert found[0] <= theirs[0], (found, theirs)
    assert found[1] <= theirs[1], (found, theirs)
    assert found[2] >= theirs[2], (found, theirs)


def test_fast_divides_by_the_schatten_norm_and_takes_four_steps() -> None:
    x = momentum_like()[0]
    rows = [(8.177432027476442, -23.178649114408902, 16.505155057584513),
            (3.899994532782065, -2.7943948859580185, 0.5110785364551547),
            (3.262233864007705, -2.351317363641778, 0.4626594052544013),
            (2.308564577776151, -1.675994456278578, 0.41957392878072974)]  # fmt: skip
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    y = sigma / (1.02 * sigma.pow(8).sum() ** 0.125)
    for a, b, c in rows:
        y = y * (a + b * y**2 + c * y**4)
    expected = (u * y) @ vh
    for method in ("standard", "gram"):
        result = functional.polar_express(x, epsilon=0.0, method=method, preset="fast")
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("shape", [(6, 4), (64, 40)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_and_nan_keeps_to_itself(
    method: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    batch = torch.randn(4, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean = functional.polar_express(batch, **METHODS[method])  # type: ignore[arg-type]
    batch[1] = 0.0
    batch[2, 3, 1] = math.nan
    result = functional.polar_express(batch, **METHODS[method])  # type: ignore[arg-type]
    assert not result[1].any()
    assert result[2].isnan().all()
    assert torch.equal(result[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"ns_coefficients": "cans"}, "coefficients of its own"),
        ({"use_polar_express": False}, "coefficients of its own"),
        ({"use_gram_newton_schulz": True}, "coefficients of its own"),
        ({"orth_method": "svd"}, "is a polynomial"),
    ],
    ids=str,
)
def test_fast_with_another_method_is_refused(other: dict[str, Any], message: str) -> None:
    param = torch.nn.Parameter(torch.ones(3, 4))
    param.grad = torch.ones(3, 4)
    optimizer = oxidion.Muon([param], orth_preset="fast", **other)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    with pytest.raises(ValueError, match="preset must be 'exact' or 'fast'"):
        functional.polar_express(torch.eye(4), preset="quick")
