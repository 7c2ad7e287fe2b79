"""Cholesky QR of panels, run on the host by the emulator, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest

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
from .panels import Kernels

pytestmark = needs_compiler
SHAPES = [(2, 150, 100, False), (1, 97, 64, False), (1, 200, 131, True), (2, 33, 7, True), (1, 5, 1, False)]


@pytest.fixture(scope="module", params=[0, 1], ids=["first order", "second order"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    folder = Path(tmp_path_factory.mktemp("panels"))
    gram = Emulated("gram.cu", folder / "gram")
    return Kernels(gram, Emulated("cholesky.cu", folder / "cholesky"), request.param)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gram_product_matches_float64_within_rounding(kernels: Kernels, shape: Shape, parts: int) -> None:
    check_gram(kernels, shape, parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_factor_and_solve_have_small_residuals(kernels: Kernels, shape: Shape) -> None:
    check_factor_and_solve(kernels, shape)


def test_second_pass_touches_ill_conditioned_panels_only(kernels: Kernels) -> None:
    check_second_pass(kernels)


def test_shift_factors_what_failed_and_repeated_passes_orthonormalize_it(kernels: Kernels) -> None:
    check_shift(kernels)


def test_shift_leaves_alone_what_did_not_fail(kernels: Kernels) -> None:
    check_shift_of_failed_panels(kernels)


def test_columns_that_are_left_out_become_zero(kernels: Kernels) -> None:
    check_left_out(kernels)


def test_panel_that_is_not_finite_fails_and_leaves_its_neighbour_alone(kernels: Kernels) -> None:
    check_not_finite(kernels)
