"""Cholesky QR of panels, run on the host by the emulator, against float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .driver import needs_compiler
from .emulator.library import Emulated
from .panel_checks import (
    Shape,
    check_factor_and_solve,
    check_gram,
    check_left_out,
    check_not_finite,
    check_second_pass,
    check_shift,
    check_shift_of_failed_panels,
)
from .panels import Kernels, factor, gram, panels_of_condition

pytestmark = needs_compiler
SHAPES = [(2, 150, 100, False), (1, 97, 64, False), (1, 200, 131, True), (2, 33, 7, True), (1, 5, 1, False)]


ORDERS = {"first order": (0, False), "second order": (1, False), "several blocks": (0, True)}


@pytest.fixture(scope="module", params=ORDERS.values(), ids=ORDERS)
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = Path(tmp_path_factory.mktemp("panels"))
    gram = Emulated("gram.cu", folder / "gram")
    return Kernels(gram, Emulated("cholesky.cu", folder / "cholesky"), *request.param)


def test_several_blocks_have_the_bits_of_one(kernels: Kernels) -> None:
    panels = panels_of_condition([3.0, 800.0, float("inf")], 256, 200)
    grams = gram(kernels, panels, 2)
    one, several = (factor(replace(kernels, by_columns=by), grams, 2) for by in (False, True))
    assert torch.equal(one.status.entries, several.status.entries)
    assert [info > 0 for info in one.status.info] == [False, False, True]
    for z in range(2):
        assert torch.equal(one.factor.matrices[z].tril(), several.factor.matrices[z].tril())
        assert torch.equal(
            one.inverses.matrices[4 * z : 4 * z + 4], several.inverses.matrices[4 * z : 4 * z + 4]
        )


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_product_matches_float64_within_rounding(kernels: Kernels, shape: Shape, parts: int) -> None:
    check_gram(kernels, shape, parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factor_and_solve_have_small_residuals(kernels: Kernels, shape: Shape) -> None:
    check_factor_and_solve(kernels, shape)


def test_second_pass_touches_ill_conditioned_panels_only(kernels: Kernels) -> None:
    check_second_pass(kernels)


def test_shift_factors_what_failed_and_passes_orthonormalize_it(kernels: Kernels) -> None:
    check_shift(kernels)


def test_shift_leaves_alone_what_did_not_fail(kernels: Kernels) -> None:
    check_shift_of_failed_panels(kernels)


def test_columns_that_are_left_out_become_zero(kernels: Kernels) -> None:
    check_left_out(kernels)


def test_non_finite_panel_fails_and_leaves_its_neighbour_alone(kernels: Kernels) -> None:
    check_not_finite(kernels)
