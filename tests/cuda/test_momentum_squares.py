"""The momentum with the norm of its update: the kernels of every form, and what a step launches."""

from __future__ import annotations

import pytest

from .driver import needs_compiler, needs_nvrtc, run
from .emulator.library import Emulated
from .sum_checks import Kernels, check_momentum


@needs_compiler
@pytest.mark.parametrize("form", ["few", "many", "wide"])
def test_momentum_leaves_the_squares_of_what_it_stores(
    tmp_path_factory: pytest.TempPathFactory, form: str
) -> None:
    sums, totals = (
        Emulated(source, tmp_path_factory.mktemp(form), kernels=[kernel])
        for source, kernel in (("sums.cu", f"momentum_squares_{form}"), ("totals.cu", "add_pieces"))
    )
    check_momentum(Kernels(sums, totals), form)


@needs_nvrtc
def test_momentum_update_and_norm_are_one_pass(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        for dtype in (torch.float32, torch.bfloat16):
            for make in (oxidion.Muon, oxidion.NorMuon):
                optimizer = make(parameters(*[(40, 64)] * 3, *[(64, 40)] * 2, (96, 96), dtype=dtype))
                names = [b"momentum_squares", b"momentum_", b"sum_of_squares"]
                before = [driver.emulator_launches_of(name) for name in names]
                optimizer.step()
                print(*(driver.emulator_launches_of(name) - old for name, old in zip(names, before)))
        """,
    )
    # A launch for each shape, and no other pass for the momentum or for norms.
    assert said.splitlines() == ["3 3 0"] * 4


@needs_nvrtc
def test_gradients_of_any_stride_have_the_same_step(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        for make in (oxidion.Muon, oxidion.NorMuon):
            plain, turned = parameters((40, 64), (40, 64)), parameters((40, 64), (40, 64))
            for one, other in zip(plain, turned):
                other.data.copy_(one.data)
                other.grad = one.grad.t().contiguous().t()
            turned[1].grad = plain[1].grad  # a unit of one run of memory next to one of rows
            for params in (plain, turned):
                optimizer = make(params, lr=0.1, orth_dtype="float32")
                for _ in range(3):
                    optimizer.step()
            for one, other in zip(plain, turned):
                assert (one - other).norm() <= 1e-6 * one.norm()
        """,
    )


@needs_nvrtc
def test_zero_and_broken_gradients_are_separated(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        for dtype in (torch.float32, torch.bfloat16):
            params = parameters(*[(40, 64)] * 3, dtype=dtype)
            before = [param.detach().clone() for param in params]
            params[0].grad.zero_()
            params[1].grad[3, 5] = float("nan")
            oxidion.Muon(params, lr=0.1, weight_decay=0.0).step()
            assert torch.equal(params[0], before[0])
            assert params[1].isnan().all() and params[2].isfinite().all()
            assert not torch.equal(params[2], before[2])
        """,
    )
