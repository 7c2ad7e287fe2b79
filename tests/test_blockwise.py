"""``quantize_blockwise`` and ``dequantize_blockwise`` against the definition of the quantization."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from oxidion.functional import dequantize_blockwise, quantize_blockwise
from support import code_books
from support.inputs import gaussian

both = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def in_blocks(values: Tensor) -> Tensor:
    """Rows of 256 elements whose scale is 1."""
    short = -values.numel() % 255
    rows = torch.cat([values, values.new_zeros(short)]).view(-1, 255)
    return torch.cat([torch.ones(len(rows), 1), rows], dim=1)


@both
def test_code_book_is_the_definition_rounded_once(signed: bool) -> None:
    entries = dequantize_blockwise(torch.arange(256, dtype=torch.uint8), torch.ones(1), 256, signed)
    expected = code_books.book(signed)
    assert (len(expected), len(expected.unique())) == (256, 255 if signed else 256)
    torch.testing.assert_close(entries.double(), expected, rtol=2**-24, atol=0.0)
    assert entries[127 if signed else 0] == 0.0
    assert entries[255] == 1.0
    assert entries[0] == (-1.0 if signed else 0.0)
    assert entries[128 if signed else 1] == (2.0**-23 if signed else 1.5 * 2.0**-36)
    if signed:
        assert torch.equal(entries[:127], -entries[128:255].flip(0))


def test_unsigned_book_has_the_entries_that_the_page_names() -> None:
    entries = dequantize_blockwise(torch.arange(256, dtype=torch.uint8), torch.ones(1), 256, False)
    for code, value in (
        (254, 63 / 64),
        (223, 0.5),
        (191, 0.25),
        (190, 15 / 64),
        (79, 2.0**-16),
        (78, 7 * 2.0**-19),
    ):
        assert float(entries[code]) == value, code
    # The largest distance of neighbours, of the lower one.
    ratio = (entries[2:] / entries[1:-1]).double() - 1
    assert float(ratio[190:].max()) == 1 / 32
    assert float(ratio[78:190].max()) == 1 / 8
    assert float(ratio[:78].max()) <= 1 / 4


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # by vectors, and one by one
def test_quantization_of_a_dense_sweep_takes_the_nearest_entry(signed: bool, dtype: torch.dtype) -> None:
    entries = code_books.book(signed).float()
    middles = ((entries[1:].double() + entries[:-1].double()) / 2).float()
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    around = [
        entries,
        middles,
        middles.nextafter(up),
        middles.nextafter(down),
        middles.nextafter(up).nextafter(up),
    ]
    spread = [torch.linspace(-1.0 if signed else 0.0, 1.0, 20_001), torch.logspace(-13, 0, 8_001)]
    values = torch.cat([*around, *spread])
    x = in_blocks(values[values.abs() <= 1.0])
    got, scales = quantize_blockwise(x.to(dtype), 256, signed)
    assert torch.equal(scales, torch.ones(len(x), 1))
    assert torch.equal(got.long(), code_books.find(x, signed))


def test_positive_number_has_no_code_of_zero_however_small() -> None:
    x = torch.ones(3, 256)
    x[0, 1:] = torch.logspace(-44, -8, 255)
    x[1, ::2], x[1, 1] = 0.0, -0.0
    x[2] = torch.finfo(torch.float32).smallest_normal * 2.0**-23  # the smallest number of all
    got, scales = quantize_blockwise(x, 256, False)
    assert torch.equal(got == 0, x <= 0)
    back = dequantize_blockwise(got, scales, 256, False)
    assert bool((back[0] >= 1.5 * 2.0**-36).all())
    assert torch.equal(back[2], x[2])


@both
@pytest.mark.parametrize("scale", [1e-44, 1e-39, 1e-20, 3.7, 1e30, 3e38])
def test_quantization_does_not_depend_on_the_size_of_the_block(signed: bool, scale: float) -> None:
    x = gaussian((3, 256), 1, 2, 3).float()
    x = (x if signed else x.abs()) / x.abs().amax(dim=1, keepdim=True)
    got, scales = quantize_blockwise((x.double() * scale).float(), 256, signed)
    expected, expected_scales = code_books.encode((x.double() * scale).float(), signed=signed)
    assert torch.equal(scales, expected_scales)
    # Quotients are rounded: next to a middle either neighbour may be found.
    assert (got != expected).double().mean() <= 1e-3


@both
@pytest.mark.parametrize("width", [1, 3, 255, 256, 257, 511, 513, 1030])
@pytest.mark.parametrize("block", [64, 256, 512])
def test_every_row_begins_a_new_block(signed: bool, width: int, block: int) -> None:
    x = gaussian((5, width), 4, 5).float() * torch.logspace(-3, 3, 5)[:, None]
    x = x if signed else x.square()
    got, scales = quantize_blockwise(x, block, signed)
    expected, expected_scales = code_books.encode(x, block, signed=signed)
    assert scales.shape == (5, -(-width // block))
    assert torch.equal(scales, expected_scales)
    assert (got != expected).sum() <= 1
    back = dequantize_blockwise(got, scales, block, signed)
    assert torch.equal(back.double(), code_books.decode(got, scales, block, signed=signed))


@pytest.mark.parametrize(
    ("signed", "ends"),
    [
        (True, ((0.25, 32), (0.125, 16), (2.0**-4, 8), (2.0**-23, 2))),
        (False, ((0.25, 32), (2.0**-16, 8), (2.0**-33, 4))),
    ],
)
def test_round_trip_error_is_half_the_distance_of_entries(
    signed: bool, ends: tuple[tuple[float, int], ...]
) -> None:
    x = torch.logspace(-10, 0, 256 * 20).view(20, 256).repeat(1, 2)
    x[:, 256:] = gaussian((20, 256), 6).float()
    x = x * torch.where(torch.arange(512) % 2 == 0, 1.0, -1.0) if signed else x.abs()
    x[:, [0, 256]] = 1.0
    got, scales = quantize_blockwise(x, 512, signed)
    error = (dequantize_blockwise(got, scales, 512, signed).double() - x.double()).abs() / x.abs().double()
    q = x.abs() / scales
    for least, parts in ends:
        assert float(error[q >= least].max()) <= 1 / (2 * parts) * (1 + 1e-4), least


def test_large_tensors_use_threads_and_give_the_same() -> None:
    x = gaussian((300, 777), 8).float()
    whole = quantize_blockwise(x)
    for row in (0, 150, 299):
        for got, one in zip(whole, quantize_blockwise(x[row]), strict=True):
            assert torch.equal(got[row], one)


@both
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_number_makes_its_block_nan_and_no_other(signed: bool, bad: float) -> None:
    x = torch.ones(2, 600)
    x[1, 300] = bad
    back = dequantize_blockwise(*quantize_blockwise(x, 256, signed), 256, signed)
    lost = torch.zeros(2, 600, dtype=torch.bool)
    lost[1, 256:512] = True
    assert torch.equal(back.isnan(), lost)
    assert torch.equal(back[~lost], x[~lost])


@both
def test_zeros_stay_zeros(signed: bool) -> None:
    got, scales = quantize_blockwise(torch.zeros(2, 300), 256, signed)
    assert torch.equal(got, torch.full((2, 300), 127 if signed else 0, dtype=torch.uint8))
    assert not dequantize_blockwise(got, scales, 256, signed).any()


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_any_floating_point_type_is_rounded_to_float32(dtype: str) -> None:
    x = gaussian((4, 300), 9).to(getattr(torch, dtype))
    for got, expected in zip(quantize_blockwise(x), quantize_blockwise(x.float()), strict=True):
        assert torch.equal(got, expected)


def test_arrays_give_arrays() -> None:
    x = gaussian((4, 300), 9).float()
    expected, expected_scales = quantize_blockwise(x)
    got, scales = quantize_blockwise(x.numpy())
    assert isinstance(got, np.ndarray)
    assert got.dtype == np.uint8
    assert np.array_equal(got, expected.numpy())
    assert np.array_equal(scales, expected_scales.numpy())
    back = dequantize_blockwise(got, scales)
    assert np.array_equal(back, dequantize_blockwise(expected, expected_scales).numpy())


def test_empty_tensors_have_no_quantized_values() -> None:
    got, scales = quantize_blockwise(torch.zeros(0, 300))
    assert got.shape == (0, 300)
    assert scales.shape == (0, 2)
    got, scales = quantize_blockwise(torch.zeros(3, 0))
    assert scales.shape == (3, 0)


def test_wrong_arguments_raise() -> None:
    x = torch.zeros(4, 300)
    for block in (0, 100, 1024):
        with pytest.raises(ValueError, match="block_size"):
            quantize_blockwise(x, block)
    with pytest.raises(ValueError, match="dimension"):
        quantize_blockwise(torch.tensor(1.0))
    with pytest.raises(TypeError):
        quantize_blockwise(torch.zeros(3, dtype=torch.int64))
    got, scales = quantize_blockwise(x)
    with pytest.raises(ValueError, match="absmax"):
        dequantize_blockwise(got, scales[:, :1])
    with pytest.raises(ValueError, match="absmax"):
        dequantize_blockwise(got, scales, 64)
    with pytest.raises(TypeError, match="uint8"):
        dequantize_blockwise(got.float(), scales)
