"""Comparisons relative to the size of an update, and in units of the last place."""

from __future__ import annotations

import torch
from torch import Tensor


def update_relative_error(actual: Tensor, initial: Tensor, expected_update: Tensor) -> float:
    """``||(actual - initial) - expected|| / ||expected||`` in float64; 0 for two zero updates."""
    update = actual.detach().double() - initial.detach().double()
    expected = expected_update.detach().double()
    error = (update - expected).norm().item()
    size = expected.norm().item()
    if size == 0.0:
        return 0.0 if error == 0.0 else float("inf")
    return error / size


def assert_updates_close(
    actual: Tensor, initial: Tensor, expected: Tensor, tolerance: float, where: str = ""
) -> None:
    """Assert that ``actual - initial`` is ``expected - initial`` up to ``tolerance`` relative to its norm."""
    assert actual.shape == expected.shape, (
        f"{where}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    assert bool(actual.isfinite().all()), f"{where}: not finite"
    error = update_relative_error(actual, initial, expected.double() - initial.double())
    assert error <= tolerance, f"{where}: update-relative error {error:.3e} > {tolerance:.1e}"


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``||actual - expected|| / ||expected||`` in float64; 0 for equal tensors."""
    return update_relative_error(actual, torch.zeros_like(actual), expected)


def assert_tensors_close(actual: Tensor, expected: Tensor, tolerance: float, where: str = "") -> None:
    """Assert that two tensors are equal up to ``tolerance`` relative to the norm of ``expected``."""
    assert actual.shape == expected.shape, (
        f"{where}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )
    error = relative_error(actual, expected)
    assert error <= tolerance, f"{where}: relative error {error:.3e} > {tolerance:.1e}"


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at the magnitude of each element of ``value``."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(value.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(value, info.eps, dtype=torch.float64), exponent)


def error_in_ulps(actual: Tensor, expected: Tensor, *operands: Tensor) -> float:
    """Largest distance from the float64 tensor ``expected``, in units of the last place of ``actual``.

    The unit of an element is that of the largest of ``expected`` and ``operands`` there, so that a sum whose
    terms cancel is measured against its terms.
    """
    if actual.numel() == 0:
        return 0.0
    scale = torch.stack([t.double().abs() for t in (expected, *operands)]).amax(dim=0)
    return ((actual.double() - expected).abs() / spacing(scale, actual.dtype)).max().item()


def assert_identical(actual: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    assert set(actual) == set(expected), where
    for key, value in expected.items():
        torch.testing.assert_close(
            actual[key], value, rtol=0, atol=0, equal_nan=True, msg=lambda m: f"{where}: {m}"
        )
