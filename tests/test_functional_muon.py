"""A step of Muon as a function, with the arguments and the momenta of torch's."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import oxidion
from oxidion.functional import muon
from support.inputs import gaussian
from support.torch_muon import RULES, TRIPLE, torch_step

SHAPES = ((9, 5), (4, 11), (6, 6), (1, 7))
SETTINGS: dict[str, Any] = {
    "lr": 0.05,
    "weight_decay": 0.2,
    "momentum": 0.9,
    "nesterov": True,
    "ns_coefficients": TRIPLE,
    "ns_steps": 5,
    "eps": 0.0,
    "adjust_lr_fn": None,
}


def matrices(seed: int, *more: int) -> list[Tensor]:
    return [gaussian(shape, seed, index, *more) for index, shape in enumerate(SHAPES)]


def largest(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_torchs_formulas(rule: str | None, nesterov: bool, momentum: float) -> None:
    settings = {**SETTINGS, "momentum": momentum}
    params, averages = matrices(1), [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    expected, others = [x.clone() for x in params], [x.clone() for x in averages]
    for step in range(3):
        grads = matrices(2, step)
        kept = [grad.clone() for grad in grads]
        muon(params, grads, averages, **{**settings, "nesterov": nesterov, "adjust_lr_fn": rule})
        assert all(map(torch.equal, grads, kept))
        del settings["adjust_lr_fn"], settings["nesterov"]
        for x, grad, average in zip(expected, grads, others, strict=True):
            torch_step(x, grad, average, rule=rule, nesterov=nesterov, **settings)
        settings = {**SETTINGS, "momentum": momentum}
        assert largest(averages, others) < 1e-14
        assert largest(params, expected) < 1e-13


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_momenta_go_from_torchs_function_to_this_one(dtype: torch.dtype) -> None:
    from torch.optim._muon import muon as torchs

    params, averages = [x.to(dtype) for x in matrices(1)], [x.to(dtype) * 0 for x in matrices(1)]
    kept = [x.clone() for x in params]
    theirs, others = [x.clone() for x in params], [x.clone() for x in averages]
    for step in range(4):
        grads = [x.to(dtype) for x in matrices(2, step)]
        torchs(theirs, grads, others, has_complex=False, **SETTINGS)
        (torchs if step < 2 else muon)(params, grads, averages, has_complex=False, **SETTINGS)
    # torch multiplies in bfloat16; in bfloat16 parameters an update has some ten units of rounding.
    of_averages, of_updates = (1e-6, 0.03) if dtype == torch.float32 else (0.02, 0.2)
    assert largest(averages, others) < of_averages
    for x, y, old in zip(params, theirs, kept, strict=True):
        assert not torch.equal(x, y)
        assert float((x - y).norm() / (y - old).norm()) < of_updates


def test_parameters_change_in_place_and_gradients_are_left_alone() -> None:
    weight = nn.Parameter(matrices(1)[0])
    weight.grad = own = torch.full_like(weight, 7.0)
    grad, average = matrices(2)[0].requires_grad_(), torch.zeros_like(weight).detach()
    memory, versions = weight.data_ptr(), (weight._version, average._version, own._version)
    loss = (weight * weight).sum()
    muon([weight], [grad], [average], **SETTINGS)
    assert weight.grad is own
    assert torch.equal(own, torch.full_like(weight, 7.0))
    assert grad.grad is None
    assert weight.data_ptr() == memory
    assert weight.requires_grad
    assert weight.is_leaf
    assert (weight._version > versions[0], average._version > versions[1], own._version) == (
        True,
        True,
        versions[2],
    )
    torch.testing.assert_close(average, 0.1 * grad.detach(), rtol=0, atol=1e-15)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_strided_and_stacked_tensors_and_a_tensor_lr() -> None:
    whole, stack = gaussian((5, 9), 1), gaussian((3, 4, 6), 2)
    average, averages = torch.zeros(5, 9, dtype=torch.float64).mT, torch.zeros_like(stack)
    grad, grads = gaussian((9, 5), 3), gaussian((3, 4, 6), 4)
    singly = [whole.mT.clone(), *stack.clone()]
    others = [torch.zeros_like(x) for x in singly]
    settings = {**SETTINGS, "lr": torch.tensor(0.05, dtype=torch.float64)}
    muon([whole.mT, stack], [grad, grads], [average, averages], foreach=True, **settings)
    muon(singly, [grad, *grads], others, **SETTINGS)
    assert largest([whole.mT, *stack, average, *averages], [*singly, *others]) < 1e-14


def test_global_hooks_of_optimizers_are_not_called() -> None:
    calls: list[Any] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *given: calls.append(given)),
        register_optimizer_step_post_hook(lambda *given: calls.append(given)),
    ]
    try:
        muon(matrices(1), matrices(2), [0 * x for x in matrices(1)], **SETTINGS)
        assert not calls
        weight = nn.Parameter(matrices(1)[0])
        weight.grad = matrices(2)[0]
        oxidion.Muon([weight]).step()
        assert len(calls) == 2
    finally:
        for hook in hooks:
            hook.remove()


def test_nothing_is_kept() -> None:
    params, averages = matrices(1), [0 * x for x in matrices(1)]
    muon(params, matrices(2), averages, **SETTINGS)
    watched = [weakref.ref(x) for x in [*params, *averages]]
    storages = [weakref.ref(x.untyped_storage()) for x in params]
    del params, averages
    gc.collect()
    assert not any(ref() is not None for ref in [*watched, *storages])


def test_no_parameters_are_no_step() -> None:
    muon([], [], [], **SETTINGS)


@pytest.mark.parametrize("short", ["params", "grads", "muon_momentum_bufs"])
def test_lists_of_different_lengths_are_named(short: str) -> None:
    lists = {"params": matrices(1), "grads": matrices(2), "muon_momentum_bufs": matrices(3)}
    lists[short] = lists[short][:-1]
    shown = ", ".join(f"{name} of {3 if name == short else 4}" for name in lists)
    with pytest.raises(ValueError, match=f"must have equal lengths, got {shown}"):
        muon(**lists, **SETTINGS)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"momentum": 1.0}, "momentum must be a number >= 0 and < 1: an average, got 1.0"),
        ({"momentum": -0.5}, "momentum must be a number >= 0 and < 1"),
        ({"momentum": None}, "momentum must be a number >= 0 and < 1"),
        ({"lr": -1.0}, "lr must be a finite number >= 0, got -1.0"),
        ({"lr": torch.zeros(2)}, "Tensor lr must be 1-element"),
        ({"ns_steps": 0}, "ns_steps must be an integer >= 1"),
        ({"eps": -1.0}, "eps must be a finite number >= 0, got -1.0"),
        (
            {"adjust_lr_fn": "spectral_unclampt"},
            "adjust_lr_fn must be .*; the nearest is 'spectral_unclamped'",
        ),
        ({"has_complex": True}, "has_complex must be False"),
        (
            {"grads": [gaussian((5, 9), 1)]},
            r"grads\[0\] must have the shape \(9, 5\) of params\[0\], got \(5, 9\)",
        ),
        (
            {"muon_momentum_bufs": [gaussian((9,), 1)]},
            r"muon_momentum_bufs\[0\] must have the shape \(9, 5\)",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_values_are_named_and_nothing_is_written(change: dict[str, Any], says: str) -> None:
    lists = {"params": [matrices(1)[0]], "grads": [matrices(2)[0]], "muon_momentum_bufs": [matrices(3)[0]]}
    given = {**lists, **SETTINGS, **change}
    kept = {name: given[name][0].clone() for name in lists}
    with pytest.raises(ValueError, match=says):
        muon(**given)
    assert all(torch.equal(given[name][0], kept[name]) for name in lists)


def test_vectors_other_dtypes_and_shared_memory_are_refused() -> None:
    vector = gaussian((5,), 1)
    with pytest.raises(ValueError, match=r"params\[0\]: Muon takes weight matrices"):
        muon([vector], [vector.clone()], [vector.clone()], **SETTINGS)
    x = matrices(1)[0]
    with pytest.raises(
        TypeError, match=r"grads\[0\] must be torch.float64 as params\[0\], got torch.float32"
    ):
        muon([x], [x.float()], [x.clone()], **SETTINGS)
    for strange in (x.long(), x.to(torch.complex128)):
        with pytest.raises(TypeError, match=r"params\[0\]"):
            muon([strange], [strange.clone()], [x.clone()], **SETTINGS)
    with pytest.raises(oxidion.LayoutError, match="share memory"):
        muon([x, x], [x.clone(), x.clone()], [x.clone(), x.clone()], **SETTINGS)
    with pytest.raises(oxidion.LayoutError, match="share memory"):
        muon([x], [x.clone()], [x], **SETTINGS)
