"""Orthonormalizers against float64 singular value decompositions: bounds, scale, zero, rank, stress."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oxidion import functional
from oxidion._reference.orthogonalize import POLYNOMIALS, orthogonalize, polynomial_of

SHAPES = [(12, 8), (8, 12), (9, 9), (1, 7), (7, 1), (1, 1), (3, 10, 6), (2, 3, 4, 5), (130, 300)]
SQUEEZE = {
    "newton_schulz": (0.02, 0.95, 1.05),
    "polar_express": (0.02, 0.85, 1.15),
    "keller_jordan": (0.02, 0.68, 1.16),
    "cans": (0.0055, 0.999, 1.001),
    "polar_express_gram": (0.02, 0.84, 1.13),
}
"""Share of the Frobenius norm from which on singular values end in this range."""
FORMS: dict[str, Callable[..., Tensor]] = {
    "standard": functional.newton_schulz,
    "gram": functional.gram_newton_schulz,
}
every_form = pytest.mark.parametrize("form", FORMS)


def gaussian(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of_spectrum(sigma: Tensor, m: int, n: int, seed: int = 0) -> Tensor:
    """An ``m x n`` matrix with these singular values."""
    k = len(sigma)
    left = torch.linalg.qr(gaussian((m, k), seed))[0]
    right = torch.linalg.qr(gaussian((n, k), seed + 1))[0]
    return (left * sigma) @ right.mT


def exact(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def spectrum(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x.double())


def distance(x: Tensor, y: Tensor) -> float:
    """Largest singular value of the difference."""
    return float(spectrum(x.double() - y.double()).max())


@every_form
@pytest.mark.parametrize("name", SQUEEZE)
@pytest.mark.parametrize(("m", "n"), [(24, 24), (16, 60), (60, 16)])
@pytest.mark.parametrize(
    ("dtype", "slack"),
    # Eigenvalues of a Gram matrix have errors of about u = 2^-24 (float32), 2^-8 (bfloat16), where the
    # smallest is 0.0055² times what the steps before the last restart made of it: 1000 in float32.
    [(torch.float64, 1e-9), (torch.float32, 2e-4), (torch.bfloat16, 0.16)],
    ids=str,
)
def test_singular_values_end_in_the_documented_range(
    form: str, name: str, m: int, n: int, dtype: torch.dtype, slack: float
) -> None:
    smallest, low, high = SQUEEZE[name]
    k = min(m, n)
    sigma = torch.logspace(math.log10(smallest), 0.0, k, dtype=torch.float64)
    # The largest of them takes most of the norm: divided by it, all are still above the share.
    sigma = torch.where(torch.arange(k) == k - 1, 1.0, sigma.clamp(min=1.5 * smallest) * 0.5)
    sigma = sigma.clamp(min=1.01 * smallest * float(sigma.norm()))
    x = of_spectrum(sigma, m, n).to(dtype)
    result = FORMS[form](x, coefficients=name)
    assert result.dtype == dtype
    values = spectrum(result)
    assert values.min() > low - slack
    assert values.max() < high + slack
    # The singular vectors are those of the input: what is left is the singular values.
    assert distance(result, exact(x)) < max(1.0 - low, high - 1.0) + slack


@every_form
@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_iteration_is_the_polynomial_in_float64(form: str, name: str, shape: tuple[int, ...]) -> None:
    x = gaussian(shape)
    result = FORMS[form](x, coefficients=name)
    expected = orthogonalize(x, {"ns_coefficients": name})
    # Roundings of 1e-16 times the slope of the polynomial, some thousands where a singular value is small.
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("steps", [1, 3, 5, 8])
def test_steps_take_the_first_rows_and_repeat_the_last(steps: int) -> None:
    x = gaussian((6, 9))
    sigma = spectrum(x)
    expected = sigma / (sigma.norm() + 1e-8)
    rows = POLYNOMIALS["newton_schulz"][0]
    for i in range(steps):
        a, b, c = rows[min(i, 4)]
        expected = a * expected + b * expected**3 + c * expected**5
    got = spectrum(functional.newton_schulz(x, steps=steps))
    torch.testing.assert_close(got, expected.sort(descending=True).values, rtol=0, atol=1e-12)
    assert len(polynomial_of({"use_polar_express": False, "ns_steps": steps})[1]) == steps


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e30])
@pytest.mark.parametrize(
    ("dtype", "atol"),
    # Not a power of two: the scaled matrix is another one by half a unit in the last place, times the slope.
    [(torch.float64, 1e-11), (torch.float32, 2e-3), (torch.bfloat16, 0.2)],
    ids=str,
)
@pytest.mark.parametrize("method", ["standard", "gram", "aol", "svd"])
def test_scale_does_not_matter_without_epsilon(
    method: str, dtype: torch.dtype, atol: float, scale: float
) -> None:
    def run(x: Tensor) -> Tensor:
        if method == "svd":
            return functional.polar(x)
        if method == "aol":
            return functional.newton_schulz(x, coefficients="aol", epsilon=0.0)
        return functional.newton_schulz(x, coefficients="cans", epsilon=0.0, method=method)

    x = gaussian((8, 13), 4)
    assert distance(run((x * scale).to(dtype)), run(x.to(dtype))) < atol


def test_default_epsilon_shrinks_only_matrices_of_its_own_size() -> None:
    x = gaussian((5, 7))
    x = x / x.norm()
    expected = functional.newton_schulz(x, epsilon=0.0)
    for scale in (1e-3, 1e3, 1e12):
        assert distance(functional.newton_schulz(x * scale), expected) < 1e-4
    # At a norm of 1e-8 the divisor is twice the norm.
    half = functional.newton_schulz(x * 1e-8)
    torch.testing.assert_close(half, functional.newton_schulz(x, epsilon=1.0), rtol=0, atol=1e-12)
    assert distance(half, expected) > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (1, 5), (3, 6, 2), (256, 600)], ids=str)
def test_zero_gives_exactly_zero_and_only_zero_does(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    zero = torch.zeros(shape, dtype=dtype)
    one = zero.clone()
    one[..., 0, 0] = 1e-30
    functions: list[Callable[[Tensor], Tensor]] = [
        functional.polar,
        *(lambda x, f=f: f(x, epsilon=0.0) for f in FORMS.values()),
        lambda x: functional.newton_schulz(x, coefficients="aol", epsilon=0.0),
    ]
    for function in functions:
        assert torch.equal(function(zero), zero)
        result = function(one)
        assert torch.count_nonzero(result) == result[..., 0, 0].numel()
        assert (result[..., 0, 0] > 0.6).all()


@every_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rank", [1, 3])
def test_rank_deficient_input_gives_a_result_of_that_rank(form: str, dtype: torch.dtype, rank: int) -> None:
    x = of_spectrum(torch.linspace(1.0, 0.5, rank, dtype=torch.float64), 40, 64).to(dtype)
    values = spectrum(FORMS[form](x, coefficients="polar_express"))
    assert values[:rank].min() > 0.8
    assert values.max() < 1.2
    if dtype != torch.bfloat16:
        # Rounding adds directions of 2^-24 of the norm in float32, and five steps multiply them by 1000.
        own = float(spectrum(x)[rank] / spectrum(x).norm())
        assert values[rank] <= 1000 * (own + torch.finfo(dtype).eps / 2)
        assert spectrum(functional.polar(x))[rank] < 1e-6


@pytest.mark.parametrize("condition", [1e1, 1e3, 1e6, 1e10])
def test_polar_is_the_exact_factor_of_ill_conditioned_input(condition: float) -> None:
    sigma = torch.logspace(0.0, -math.log10(condition), 12, dtype=torch.float64)
    x = of_spectrum(sigma, 30, 12)
    # Sensitivity of the polar factor is the inverse of the smallest singular value.
    assert distance(functional.polar(x), exact(x)) < 1e-14 * condition
    values = spectrum(functional.polar(x))
    assert torch.allclose(values, torch.ones_like(values), rtol=0, atol=1e-12)


def test_polar_leaves_out_directions_at_rounding_level() -> None:
    x = of_spectrum(torch.tensor([2.0, 1.0, 1e-17], dtype=torch.float64), 9, 6)
    values = spectrum(functional.polar(x))
    torch.testing.assert_close(values, torch.tensor([1.0, 1.0, 0, 0, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_one_row_or_column_is_scaled_by_the_scalar_polynomial(name: str, m: int) -> None:
    x = gaussian((1, m), 9)
    rows, factor = POLYNOMIALS[name]
    y = 1.0 if name == "aol" else 1.0 / factor
    for a, b, c in rows:
        y = a * y + b * y**3 + c * y**5
    for form in FORMS.values():
        expected = x / x.norm() * y
        torch.testing.assert_close(form(x, coefficients=name, epsilon=0.0), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(
            form(x.mT, coefficients=name, epsilon=0.0), expected.mT, rtol=0, atol=1e-12
        )
    torch.testing.assert_close(functional.polar(x), x / x.norm(), rtol=0, atol=1e-14)


@settings(max_examples=40, deadline=None)
@given(
    m=st.integers(1, 24),
    n=st.integers(1, 24),
    seed=st.integers(0, 2**20),
    name=st.sampled_from(sorted(POLYNOMIALS)),
    decades=st.floats(0.0, 6.0),
)
def test_forms_layouts_and_batches_agree(m: int, n: int, seed: int, name: str, decades: float) -> None:
    k = min(m, n)
    x = of_spectrum(torch.logspace(0.0, -decades, k, dtype=torch.float64), m, n, seed)
    standard = functional.newton_schulz(x, coefficients=name)
    gram = functional.gram_newton_schulz(x, coefficients=name)
    # 1e-16 times the product of all linear coefficients, below 3000, and the slopes of the steps that follow.
    torch.testing.assert_close(gram, standard, rtol=0, atol=2e-11)
    for form in FORMS.values():
        alone = form(x, coefficients=name)
        batch = torch.stack([gaussian((m, n), seed + 7), x, 1e6 * gaussian((m, n), seed + 8)])
        torch.testing.assert_close(form(batch, coefficients=name)[1], alone, rtol=0, atol=2e-11)
        columns_first = x.mT.contiguous().mT
        assert torch.equal(form(columns_first, coefficients=name), alone)
        # "aol" balances the rows of the short side: in a square matrix those, not the columns.
        if name != "aol" or m != n:
            turned = form(x.mT.contiguous(), coefficients=name).mT
            torch.testing.assert_close(turned, alone, rtol=0, atol=2e-11)


def stress(seed: int) -> Tensor:
    """Rank 1 plus noise, or few steps of momentum with three strong directions and rows without gradient."""
    shape = [(64, 64), (48, 160), (160, 48)][seed % 3]
    level = 10.0 ** -(seed % 7 / 2)
    if seed % 2:
        return gaussian((shape[0], 1), seed) @ gaussian((1, shape[1]), -seed) + level * gaussian(
            shape, seed + 1
        )
    momentum = torch.zeros(shape, dtype=torch.float64)
    strong = gaussian((shape[0], 3), seed)
    for step in range(seed % 5 + 1):
        few = strong + 0.1 * gaussian((shape[0], 3), 97 * seed + step)
        few = few * torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
        grad = few @ gaussian((3, shape[1]), 89 * seed + step)
        momentum = 0.95 * momentum + grad + 0.01 * level * gaussian(shape, 83 * seed + step)
    momentum[: shape[0] // 5] = 0.0
    return momentum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["polar_express", "polar_express_gram", "cans", "newton_schulz", "aol"])
def test_gram_form_keeps_stressed_matrices_bounded(dtype: torch.dtype, name: str) -> None:
    largest = [
        float(spectrum(functional.gram_newton_schulz(stress(seed).to(dtype), coefficients=name)).max())
        for seed in range(40)
    ]
    assert min(largest) > 0.8
    assert max(largest) <= 1.3


def test_arrays_and_wrong_arguments() -> None:
    x = gaussian((4, 6))
    for function in (functional.polar, functional.gram_newton_schulz):
        np.testing.assert_array_equal(function(x.numpy()), function(x).numpy())
    triples = [(1.5, -0.5, 0.0)] * 4
    for form in FORMS.values():
        torch.testing.assert_close(
            form(x, coefficients=triples), orthogonalize(x, {"ns_coefficients": triples}), rtol=0, atol=1e-13
        )
    for wrong, message in (
        ({"coefficients": "jordan"}, "ns_coefficients must be one of"),
        ({"coefficients": [(1.0, 2.0)]}, "triples"),
        ({"coefficients": [(1.0, math.nan, 0.0)]}, "finite"),
        ({"coefficients": []}, "1 to 32 triples"),
        ({"steps": 0}, "ns_steps must be"),
        ({"method": "svd"}, "method must be one of"),
        ({"epsilon": -1.0}, "epsilon must be"),
        ({"coefficients": [(-1.0, 1.0, 0.0)], "method": "gram"}, "a > 0"),
    ):
        with pytest.raises(ValueError, match=message):
            functional.newton_schulz(x, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="qr_method must be one of"):
        functional.cholesky_qr(x.mT, method="lq")
