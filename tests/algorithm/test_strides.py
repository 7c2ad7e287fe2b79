"""Parameters and gradients that are not contiguous."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from support.asserts import assert_updates_close
from support.cases import LOW_RANK_ALGORITHMS, SMALL_CASES, Case, case_named
from support.trajectory import Twin, role_state

by_algorithm = pytest.mark.parametrize("case", SMALL_CASES, ids=str)

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT.contiguous().mT,
    "columns": lambda t: torch.full((*t.shape[:-1], 2 * t.shape[-1]), 7.0, dtype=t.dtype)[..., ::2].copy_(t),
    "rows": lambda t: torch.full((t.shape[0] + 3, *t.shape[1:]), 7.0, dtype=t.dtype)[1:-2].copy_(t),
}
every_view = pytest.mark.parametrize("view", VIEWS)


@by_algorithm
@every_view
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_strided_parameters_equal_contiguous_ones(case: Case, view: str, dtype: torch.dtype) -> None:
    twin = Twin(case, dtype, view=VIEWS[view], orth_dtype=str(dtype).removeprefix("torch."))
    assert any(not param.is_contiguous() or param.storage_offset() for param in twin.params)
    strides = [param.stride() for param in twin.params]
    outside = [storage_of(param) for param in twin.params]
    for grads in twin.gradients(3):
        twin.step(grads)
    # Bases of float32 have its rounding.
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4 if "soap" in case.algorithm else 5e-5
    rows = zip(twin.params, twin.initial, twin.expected, twin.labels(), strides, outside, strict=True)
    for param, initial, expected, label, stride, start in rows:
        assert_updates_close(param, initial, expected, tolerance, label)
        assert param.stride() == stride
        if case.algorithm not in LOW_RANK_ALGORITHMS:
            assert role_state(twin.optimizer, param)["momentum"].shape == param.shape
        # Elements of the storage that the view does not reach still hold their filling.
        end = storage_of(param)
        assert torch.equal(end[start == 7.0], start[start == 7.0]), label


def storage_of(param: Tensor) -> Tensor:
    """A copy of the whole storage of a parameter."""
    size = param.untyped_storage().nbytes() // param.element_size()
    return param.detach().as_strided((size,), (1,), 0).clone()


@by_algorithm
@pytest.mark.parametrize("view", [*VIEWS, "expanded", "reversed-storage"])
def test_strided_gradients_equal_contiguous_ones(case: Case, view: str) -> None:
    views = {
        **VIEWS,
        "expanded": lambda t: t[:1].expand(t.shape),
        "reversed-storage": lambda t: t.flip(0).contiguous().flip(0),
    }
    twin = Twin(case, torch.float64)
    for grads in twin.gradients(3):
        strided = [views[view](grad) for grad in grads]
        copies = [grad.clone() for grad in strided]
        for param, grad in zip(twin.params, strided, strict=True):
            param.grad = grad
        twin.optimizer.step()
        twin.step_reference(strided)
        # The gradient belongs to the caller.
        for grad, copy, param in zip(strided, copies, twin.params, strict=True):
            assert param.grad is grad
            assert torch.equal(grad, copy)
    # An expanded gradient has rank one, so all but one column of Dion's factors are rounding noise.
    tolerance = 1e-6 if view == "expanded" else 1e-10
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        assert_updates_close(param, initial, expected, tolerance, label)


def test_channels_last_kernels_equal_contiguous_ones() -> None:
    case = case_named("muon-flatten")
    twin = Twin(
        case,
        torch.float64,
        view=lambda t: t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t,
    )
    assert not twin.params[0].is_contiguous()
    for grads in twin.gradients(3):
        for param, grad in zip(twin.params, grads, strict=True):
            param.grad = grad.contiguous(memory_format=torch.channels_last) if grad.ndim == 4 else grad
        twin.optimizer.step()
        twin.step_reference(grads)
    for param, initial, expected, label in zip(
        twin.params, twin.initial, twin.expected, twin.labels(), strict=True
    ):
        assert_updates_close(param, initial, expected, 1e-10, label)
    assert twin.params[0].is_contiguous(memory_format=torch.channels_last)
