"""Bad gradients: refused before anything is written, or contained in their own parameter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from support.cases import LOW_RANK_ALGORITHMS

from .snapshot import assert_params_equal, assert_same, snapshot
from .table import Case, every_case, make_model, run_steps, set_grads


def _sparse(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param).to_sparse()


def _other_shape(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    param.grad.data = torch.ones(*param.shape, 2)


def _same_size_other_shape(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    param.grad.data = torch.ones(param.numel(), 1)


def _other_dtype(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    param.grad.data = param.grad.data.double()


def _complex(param: nn.Parameter) -> None:
    param.grad = torch.ones_like(param)
    param.grad.data = param.grad.data.to(torch.complex64)


BAD_GRADIENTS = (_sparse, _other_shape, _same_size_other_shape, _other_dtype, _complex)
every_bad_gradient = pytest.mark.parametrize("spoil", BAD_GRADIENTS, ids=lambda spoil: spoil.__name__[1:])


@every_case
@every_bad_gradient
@pytest.mark.parametrize("victim", ["again.weight", "norm.bias"])
@pytest.mark.parametrize("warm", [False, True], ids=["first", "later"])
def test_bad_gradient_names_the_parameter_and_changes_nothing(
    case: Case, spoil: Callable[[nn.Parameter], None], victim: str, warm: bool
) -> None:
    model, clean = make_model(), make_model()
    optimizer, reference = (case.build(net, named=True) for net in (model, clean))
    if warm:
        run_steps(optimizer, model, range(2))
        run_steps(reference, clean, range(2))
    set_grads(model, 2)
    spoil(model.get_parameter(victim))
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError), match=victim.replace(".", r"\.")):
        optimizer.step()
    after = snapshot(optimizer)
    assert_same(after["params"], before["params"])
    assert_same(after["groups"], before["groups"])
    if warm:
        assert_same(after["state"], before["state"])
    # The optimizer is as usable as one that never saw the gradient.
    run_steps(optimizer, model, range(2, 4))
    run_steps(reference, clean, range(2, 4))
    assert_params_equal(model.parameters(), clean.parameters())
    assert_same(snapshot(optimizer)["state"], snapshot(reference)["state"])


@every_case
@pytest.mark.cuda  # a gradient can be moved to another device only where there is one
def test_gradient_on_another_device_raises(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, named=True)
    set_grads(model, 0)
    victim = model.get_parameter("again.weight")
    victim.grad.data = victim.grad.data.cuda()
    before = snapshot(optimizer)
    with pytest.raises((TypeError, ValueError), match=r"again\.weight"):
        optimizer.step()
    assert_same(snapshot(optimizer)["params"], before["params"])


@every_case
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("victim", ["again.weight", "square.bias", "last.weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_non_finite_gradient_spoils_its_own_parameter_only(
    case: Case, value: float, victim: str, dtype: torch.dtype
) -> None:
    model, clean = make_model(dtype), make_model(dtype)
    optimizer, reference = case.build(model), case.build(clean)
    for seed in range(3):
        set_grads(model, seed)
        set_grads(clean, seed)
        if seed == 1:
            model.get_parameter(victim).grad.view(-1)[1] = value
        optimizer.step()
        reference.step()
    spoilt = model.get_parameter(victim)
    assert not _all_finite(spoilt, *optimizer.state[spoilt].values()), "the bad gradient left no trace"
    # Lion takes torch.sign, which is finite: its state alone shows it.
    if value != value and case.algorithm != "lion":
        assert spoilt.isnan().any()
    for (name, param), expected in zip(model.named_parameters(), clean.parameters(), strict=True):
        if name == victim:
            continue
        assert torch.equal(param, expected), name
        assert_same(dict(optimizer.state[param]), dict(reference.state[expected]), name)


def _all_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@every_case
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_gradient_of_any_strides_steps_as_its_contiguous_copy(case: Case, layout: str) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer, reference = case.build(model), case.build(same)
    for seed in range(3):
        set_grads(model, seed)
        for param, twin in zip(model.parameters(), same.parameters(), strict=True):
            param.grad = _with_layout(param.grad, layout)
            assert param.grad.ndim < 2 or layout == "offset" or not param.grad.is_contiguous()
            twin.grad = param.grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        reference.step()
    if layout == "offset" and case.algorithm in LOW_RANK_ALGORITHMS:
        # A library multiplies the gradient where it lies, and may sum otherwise where that is not aligned.
        for param, twin in zip(model.parameters(), same.parameters(), strict=True):
            torch.testing.assert_close(param, twin, rtol=1e-12, atol=1e-15)
        return
    assert_params_equal(model.parameters(), same.parameters())


def _with_layout(grad: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return grad.mT.contiguous().mT if grad.ndim == 2 else grad
    if layout == "expanded":
        return grad[..., :1].expand_as(grad)
    if layout == "strided":
        return torch.stack([grad, grad], dim=-1)[..., 0]
    padded = torch.cat([torch.zeros(3, dtype=grad.dtype), grad.reshape(-1)])
    return padded[3:].view(grad.shape)


@every_case
def test_gradient_that_requires_grad_is_used_as_its_value(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    set_grads(model, 0)
    set_grads(same, 0)
    for param in model.parameters():
        param.grad.requires_grad_()
    optimizer.step()
    reference.step()
    assert_params_equal(model.parameters(), same.parameters())


PAIRS = [
    (param, grad)
    for param in (torch.float32, torch.float64, torch.bfloat16)
    for grad in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if param != grad
]


@every_case
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and newer allow it")
@pytest.mark.parametrize(("dtype", "grad_dtype"), PAIRS, ids=str)
def test_gradient_of_another_dtype_steps_as_its_cast_copy(
    case: Case, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    model, same = make_model(dtype), make_model(dtype)
    for param in model.parameters():
        param.grad_dtype = grad_dtype
    optimizer, reference = case.build(model), case.build(same)
    for seed in range(3):
        set_grads(same, seed)
        for param, twin in zip(model.parameters(), same.parameters(), strict=True):
            assert twin.grad is not None
            # Numbers of all types.
            exact = (twin.grad.double() * 16).round().clamp(-64, 64) / 16
            param.grad, twin.grad = exact.to(grad_dtype), exact.to(dtype)
        optimizer.step()
        reference.step()
    # A float64 gradient is not rounded before it is used; elsewhere sums may be in another order.
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    if case.algorithm in ("adafactor", "came"):
        tolerance = max(tolerance, 1e-6)  # squares are taken in float32 where no gradient is wider
    for param, twin in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(param, twin, rtol=tolerance, atol=tolerance)
