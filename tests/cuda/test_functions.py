"""`oxidion.functional` on a device, against the same functions of arrays, which the CPU computes.

Needs a CUDA device, or with ``OXIDION_TEST_DEVICE=emulated`` what `driver.build` makes, or libtorch alone:
``test_functions_there.py`` runs it in both ways.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oxidion import functional
from support.cases import EMULATED
from support.inputs import gaussian

from .device_steps import DEVICE

pytestmark = [] if EMULATED else pytest.mark.cuda

BY_LIBTORCH = os.environ.get("OXIDION_CUDA") == "libtorch"
SHAPES = [(40, 24), (24, 40), (17, 17), (3, 20, 9), (2, 150, 140)]
TALL = [(40, 24), (3, 20, 9), (150, 140)]
POLAR: dict[str, Callable[..., Any]] = {
    "newton_schulz": functional.newton_schulz,
    "newton_schulz by the Gram matrix": lambda x: functional.newton_schulz(x, method="gram"),
    "aol": lambda x: functional.newton_schulz(x, coefficients="aol"),
    "polar_express": functional.polar_express,
    "polar_express, fast": lambda x: functional.polar_express(x, preset="fast"),
    "gram_newton_schulz": functional.gram_newton_schulz,
    "polar": functional.polar,
}
#: Five steps of four products each, at slopes of up to 4: 80 roundings of what is stored between the
#: products, of 2^-9 in bfloat16 and 2^-12 in float16. Sums of 150 products add as many roundings in the wider
#: types, times the 4 that the Gram form may lose of them.
BARS = {
    torch.float64: 80 * 600 * 2.0**-53,
    torch.float32: 80 * 600 * 2.0**-24,
    torch.bfloat16: 80 * 2.0**-9,
    torch.float16: 80 * 2.0**-12,
}
DTYPES = list(BARS)


def there(x: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor on the device."""
    return x.to(DEVICE, dtype)


def by_the_cpu(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """What a function gives for arrays of what the tensors hold: of float64 unless they are float32."""
    kept = [x.detach().cpu() for x in tensors]
    return function(
        *(x.numpy() if x.dtype in (torch.float32, torch.uint8) else x.double().numpy() for x in kept)
    )


def difference(found: Tensor, expected: np.ndarray) -> float:
    """Relative to the norm."""
    other = torch.from_numpy(expected).double()
    return float((found.detach().cpu().double() - other).norm() / other.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", POLAR)
def test_polar_factors_are_those_of_the_cpu(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if DEVICE == "cpu" and dtype == torch.float16:
        pytest.skip("not every CPU multiplies float16 fast")
    x = there(gaussian(shape, 7) + 3 * torch.eye(*shape[-2:], dtype=torch.float64), dtype)
    kept = x.clone()
    found = POLAR[name](x)
    assert (found.dtype, found.shape, found.device) == (x.dtype, x.shape, x.device)
    assert torch.equal(x, kept)
    assert difference(found, by_the_cpu(POLAR[name], x)) < BARS[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", ["cqr", "cqr2", "rcqr", "qr"])
@pytest.mark.parametrize("shape", TALL, ids=str)
def test_columns_are_orthonormal_and_span_what_the_cpus_span(
    shape: tuple[int, ...], method: Any, dtype: torch.dtype
) -> None:
    x = there(gaussian(shape, 3), dtype)
    found = functional.cholesky_qr(x, method=method)
    assert (found.dtype, found.device) == (x.dtype, x.device)
    q = found.detach().cpu().double()
    other = torch.from_numpy(by_the_cpu(lambda a: functional.cholesky_qr(a, method=method), x)).double()
    bar = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    identity = torch.eye(shape[-1], dtype=torch.float64).expand(*shape[:-2], -1, -1)
    torch.testing.assert_close(q.mT @ q, identity, rtol=0.0, atol=bar)
    torch.testing.assert_close(q @ q.mT, other @ other.mT, rtol=0.0, atol=20 * bar)


def test_power_iteration_is_that_of_the_cpu() -> None:
    m, q = there(gaussian((30, 20), 1)), there(gaussian((20, 5), 2))
    (p, r), (expected_p, expected_r) = (
        functional.power_iteration(m, q),
        by_the_cpu(functional.power_iteration, m, q),
    )
    assert p.device == r.device == m.device
    # The signs of columns are the method's.
    assert difference(p @ r.mT, expected_p @ expected_r.T) < 1e-12


@pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "block"), [((1000,), 256), ((7, 300), 64), ((2, 3, 5), 2), ((4, 0), 16)], ids=str
)
def test_quantized_values_are_those_of_the_cpu(
    shape: tuple[int, ...], block: int, dtype: torch.dtype, signed: bool
) -> None:
    x = there(gaussian(shape, 5), dtype)
    quantized, absmax = functional.quantize_blockwise(x, block, signed)
    expected = by_the_cpu(lambda a: functional.quantize_blockwise(a, block, signed), x)
    assert quantized.device == absmax.device == x.device
    np.testing.assert_array_equal(quantized.cpu().numpy(), expected[0])
    np.testing.assert_array_equal(absmax.cpu().numpy(), expected[1])
    numbers = functional.dequantize_blockwise(quantized, absmax, block, signed)
    others = by_the_cpu(lambda c, a: functional.dequantize_blockwise(c, a, block, signed), quantized, absmax)
    assert (numbers.device, numbers.dtype) == (x.device, torch.float32)
    np.testing.assert_array_equal(numbers.cpu().numpy(), others)


def test_step_of_muon_is_that_of_the_reference() -> None:
    settings: dict[str, Any] = {
        "lr": 0.05,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "nesterov": True,
        "ns_coefficients": "newton_schulz",
        "ns_steps": 5,
        "eps": 0.0,
        "adjust_lr_fn": None,
    }
    shapes = ((9, 5), (4, 11))
    params, grads, averages = ([there(gaussian(shape, seed)) for shape in shapes] for seed in (1, 2, 3))
    expected = []
    for x, grad, average in zip(params, grads, averages, strict=True):
        mean = 0.9 * average + 0.1 * grad
        update = by_the_cpu(lambda a: functional.newton_schulz(a, epsilon=0.0), 0.9 * mean + 0.1 * grad)
        scale = max(1.0, x.shape[0] / x.shape[1]) ** 0.5
        expected.append((1 - 0.05 * 0.1) * x.detach().cpu().numpy() - 0.05 * scale * update)
    functional.muon(params, grads, averages, **settings)
    for x, other in zip(params, expected, strict=True):
        assert difference(x, other) < 1e-12


@pytest.mark.skipif(not BY_LIBTORCH, reason="kernels are launched without libtorch")
def test_libtorch_computes_there() -> None:
    """As on a device: on the CPU, values are quantized without libtorch."""
    x = there(gaussian((64, 64), 5), torch.float32)
    operations = []
    for argument in (x, x.cpu().numpy()):
        with torch.autograd.profiler.profile() as profile:
            functional.quantize_blockwise(argument)
        operations.append({event.key for event in profile.key_averages()})
    assert "aten::amax" in operations[0] - operations[1]


@pytest.mark.skipif(EMULATED, reason="memory of the host is all that there is")
def test_quantized_values_and_scales_on_two_devices_are_refused() -> None:
    quantized, absmax = functional.quantize_blockwise(there(gaussian((8, 8), 1)))
    with pytest.raises(ValueError, match="quantized and absmax must be on one device"):
        functional.dequantize_blockwise(quantized, absmax.cpu())
