from __future__ import annotations

import numpy as np
import pytest
import torch

from oxidion import functional

SHAPES = [(5, 3), (3, 5), (4, 4), (1, 7), (7, 1), (2, 6, 3)]


def polar_factor(x: np.ndarray) -> np.ndarray:
    u, _, vt = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return u @ vt


def matrix(shape: tuple[int, ...], dtype: type = np.float64) -> np.ndarray:
    """A matrix whose singular values lie between 1 and 3."""
    rng = np.random.default_rng(sum(shape))
    u, s, vt = np.linalg.svd(rng.standard_normal(shape), full_matrices=False)
    return ((u * np.linspace(1, 3, s.shape[-1])) @ vt).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "bound"), [("newton_schulz", 0.05), ("polar_express", 0.16)])
def test_polar_functions_come_near_the_polar_factor(shape: tuple[int, ...], name: str, bound: float) -> None:
    x = matrix(shape)
    result = getattr(functional, name)(x)
    # The polynomials map singular values into 1 ± bound; the singular vectors are those of x.
    error = np.linalg.norm(result - polar_factor(x), ord=2, axis=(-2, -1))
    assert np.all(error <= bound)


@pytest.mark.parametrize("name", ["newton_schulz", "polar_express", "cholesky_qr"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_return_the_type_of_array_that_they_are_given(name: str, dtype: type) -> None:
    x = matrix((6, 3), dtype)
    kept = x.copy()
    array = getattr(functional, name)(x)
    tensor = getattr(functional, name)(torch.from_numpy(x))
    assert isinstance(array, np.ndarray)
    assert array.dtype == dtype
    assert array.shape == x.shape
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(array, tensor.numpy())
    np.testing.assert_array_equal(x, kept)


def test_functions_take_strided_arrays_and_tensors() -> None:
    x = matrix((3, 6))
    np.testing.assert_array_equal(functional.cholesky_qr(x.T), functional.cholesky_qr(x.T.copy()))
    wide = torch.from_numpy(matrix((8, 6)))[:, ::2]
    assert torch.equal(functional.polar_express(wide), functional.polar_express(wide.contiguous()))


@pytest.mark.parametrize("shape", [(5, 3), (4, 4), (7, 1), (2, 6, 3)], ids=str)
def test_cholesky_qr_columns_are_orthonormal_and_span_the_input(shape: tuple[int, ...]) -> None:
    x = matrix(shape)
    q = functional.cholesky_qr(x)
    identity = np.swapaxes(q, -1, -2) @ q
    np.testing.assert_allclose(identity, np.broadcast_to(np.eye(shape[-1]), identity.shape), atol=1e-13)
    np.testing.assert_allclose(q @ (np.swapaxes(q, -1, -2) @ x), x, atol=1e-12)


@pytest.mark.parametrize("method", ["cqr", "cqr2", "rcqr", "qr"])
@pytest.mark.parametrize(("dtype", "atol"), [(np.float64, 1e-12), (np.float32, 1e-5)], ids=str)
@pytest.mark.parametrize("decades", [1, 4, 9])
def test_every_qr_method_orthonormalizes_ill_conditioned_input(
    method: str, dtype: type, atol: float, decades: int
) -> None:
    u, _, vt = np.linalg.svd(np.random.default_rng(3).standard_normal((50, 10)), full_matrices=False)
    x = ((u * np.logspace(0, -decades, 10)) @ vt).astype(dtype)
    q = functional.cholesky_qr(x, method=method)
    assert q.dtype == dtype
    q = q.astype(np.float64)
    np.testing.assert_allclose(q.T @ q, np.eye(10), atol=atol)
    outside = np.linalg.norm(x - q @ (q.T @ x), axis=0) / np.linalg.norm(x, axis=0)
    assert np.all(outside < 4 * atol)


def test_power_iteration_captures_low_rank_with_the_right_start() -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((9, 2)), rng.standard_normal((5, 2))
    m = left @ right.T
    p, r = functional.power_iteration(m, rng.standard_normal((5, 2)))
    np.testing.assert_allclose(p.T @ p, np.eye(2), atol=1e-12)
    np.testing.assert_allclose(p @ r.T, m, atol=1e-10)


def test_power_iteration_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"q must be \[n, r\]"):
        functional.power_iteration(np.zeros((4, 3)), np.zeros((4, 2)))


def test_zero_gives_zero() -> None:
    for function in (functional.newton_schulz, functional.polar_express):
        np.testing.assert_array_equal(function(np.zeros((4, 3))), np.zeros((4, 3)))


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (np.zeros(3), ValueError),
        (np.zeros((2, 2), np.int64), TypeError),
        (torch.zeros(2, 2, dtype=torch.complex64), TypeError),
        ([[1.0]], TypeError),
    ],
    ids=["vector", "integers", "complex", "list"],
)
def test_wrong_arguments_are_refused(bad: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        functional.newton_schulz(bad)
