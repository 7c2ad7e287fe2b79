"""A step inside torch.compile: no error, equal results, no recompilation (contract.md 4.7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import oxidion
from support.versions import IS_OLD_TORCH

from .snapshot import assert_same, snapshot
from .table import Case, every_case, make_model, set_grads


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    """Start and leave without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@every_case
def test_compiled_step_equals_eager_and_lr_recompiles_nothing(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def compiled_step(scale: Tensor) -> Tensor:
        doubled = scale * 2
        optimizer.step()
        return doubled + 1

    for seed in range(6):
        set_grads(model, seed)
        set_grads(same, seed)
        for opt in (optimizer, reference):
            for group in opt.param_groups:
                group["lr"] = 0.01 / (seed + 1)
        if seed == 2:  # The first calls may specialise; from here on nothing may compile.
            frames = counter.frame_count
            assert frames >= 1, "nothing was compiled"
        if seed >= 2:
            with torch._dynamo.config.patch(error_on_recompile=True):
                out = compiled_step(torch.tensor(3.0))
        else:
            out = compiled_step(torch.tensor(3.0))
        reference.step()
        assert out == 7.0
    assert counter.frame_count == frames
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_compiled_bound_step_equals_the_eager_one(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    step = torch.compile(optimizer.step, backend="eager")
    for seed in range(3):
        set_grads(model, seed)
        set_grads(same, seed)
        step()
        reference.step()
    assert_same(snapshot(optimizer), snapshot(reference))


@every_case
def test_step_after_a_compiled_forward_and_backward_trains(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    x = torch.randn(5, 6)
    forward: Any = torch.compile(model, backend="aot_eager")
    for _ in range(3):
        for opt, run in ((optimizer, forward), (reference, same)):
            opt.zero_grad()
            run(x).square().mean().backward()
            opt.step()
    # aot_eager runs the same kernels; the gradients may be summed in another order.
    for left, right in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-3)
    assert not torch.equal(model.first.weight, make_model().first.weight)


@pytest.mark.parametrize("method", ["step", "state_dict"])
def test_full_graph_refuses_an_optimizer_method_with_a_remedy(method: str) -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    set_grads(model, 0)

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(scale: Tensor) -> Tensor:
        getattr(optimizer, method)()
        return scale + 1

    said = rf"(?s)optimizer\.{method}\(\) of oxidion computes outside of the graph.*without fullgraph"
    said = "" if IS_OLD_TORCH else said  # older ones do not show the reason
    with pytest.raises(torch._dynamo.exc.Unsupported, match=said):
        compiled(torch.tensor(1.0))


@every_case
def test_full_graph_of_the_loss_before_a_step_never_recompiles(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    x, counter = torch.randn(5, 6), CompileCounter()
    loss = torch.compile(lambda batch: model(batch).square().mean(), backend=counter, fullgraph=True)
    for step in range(4):
        for opt, run in ((optimizer, loss), (reference, lambda batch: same(batch).square().mean())):
            opt.zero_grad()
            run(x).backward()
            opt.param_groups[0]["lr"] = 0.01 / (step + 1)
            opt.step()
    assert counter.frame_count == 1
    assert_same(snapshot(optimizer), snapshot(reference))
