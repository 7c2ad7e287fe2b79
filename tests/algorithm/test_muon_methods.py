"""How Muon orthonormalizes: both forms, coefficients, the exact factor, a user's function."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.orthogonalize import orthogonalize
from support.inputs import gaussian

LR = 0.5
ROWS = [(1.5, -0.5, 0.0), (1.875, -1.25, 0.375)]


def polar(x: Tensor, epsilon: float = 0.0) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return ((u @ vh) / (1.0 + epsilon)).to(x.dtype)


def parameter(
    shape: tuple[int, ...] = (6, 9), seed: int = 1, dtype: torch.dtype = torch.float64
) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(shape, dtype=dtype))
    param.grad = gaussian(shape, seed).to(dtype)
    return param


def update(param: nn.Parameter, **kwargs: Any) -> Tensor:
    """The direction of one step from zero."""
    oxidion.Muon([param], **{"lr": LR, "weight_decay": 0.0, "adjust_lr": None, **kwargs}).step()
    return param.detach() / -LR


@pytest.mark.parametrize(
    "kwargs",
    [
        {"use_gram_newton_schulz": True},
        {"orth_method": "svd"},
        {"orth_method": "gram"},
        {"orth_method": "standard", "ns_coefficients": "keller_jordan"},
        {"ns_coefficients": "cans", "ns_steps": 3},
        {"ns_coefficients": "aol", "use_polar_express": False},
        {"ns_coefficients": ROWS, "ns_steps": 6},
        {"ns_coefficients": tuple(ROWS), "orth_method": "gram"},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (150, 400)], ids=str)
def test_muon_method_is_the_one_asked_for(kwargs: dict[str, Any], shape: tuple[int, int]) -> None:
    param = parameter(shape)
    expected = orthogonalize(param.grad, kwargs)
    torch.testing.assert_close(update(param, **kwargs), expected, rtol=0, atol=1e-10)
    # No two of the settings give the same matrix.
    default = update(parameter(shape))
    same = kwargs in ({"orth_method": "gram"},)
    assert ((default - expected).abs().max() < 1e-9) == same


def test_muon_groups_have_methods_of_their_own_that_may_change() -> None:
    params = [parameter() for _ in range(3)]
    keys: list[dict[str, Any]] = [{"orth_method": "svd"}, {"ns_coefficients": ROWS}, {}]
    groups = [{"params": [param], **key} for param, key in zip(params, keys, strict=True)]
    optimizer = oxidion.Muon(groups, lr=LR, mu=0.0, weight_decay=0.0, adjust_lr=None)
    optimizer.step()
    for param, key in zip(params, keys, strict=True):
        torch.testing.assert_close(param / -LR, orthogonalize(param.grad, key), rtol=0, atol=1e-11)
    optimizer.param_groups[2]["ns_coefficients"] = [list(row) for row in ROWS]
    before = params[2].detach().clone()
    optimizer.step()
    expected = orthogonalize(params[2].grad, {"ns_coefficients": ROWS})
    torch.testing.assert_close((params[2] - before) / -LR, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"use_gram_newton_schulz": True, "orth_method": "svd"}, ValueError, "leave both out"),
        ({"use_gram_newton_schulz": True, "ns_coefficients": "cans"}, ValueError, "leave both out"),
        ({"use_gram_newton_schulz": 1}, ValueError, "use_gram_newton_schulz must be True or False"),
        ({"newton_schulz_func": "polar"}, TypeError, "newton_schulz_func must be a function"),
        ({"newton_schulz_func": 3}, TypeError, "newton_schulz_func must be a function"),
        ({"ns_coefficients": [(1.0, 2.0)]}, ValueError, "ns_coefficients must be one of"),
        ({"ns_coefficients": []}, ValueError, "ns_coefficients must be one of"),
        ({"ns_coefficients": ROWS * 17}, ValueError, "ns_coefficients must be one of"),
        ({"ns_coefficients": [(1.0, float("nan"), 0.0)]}, ValueError, "ns_coefficients must be one of"),
        ({"ns_coefficients": [("a", 1.0, 0.0)]}, ValueError, "ns_coefficients must be one of"),
        ({"ns_steps": 33}, ValueError, "ns_steps must be"),
        ({"ns_steps": True}, ValueError, "ns_steps must be"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_muon_method_that_cannot_be_is_refused(
    kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        oxidion.Muon([parameter()], **kwargs)


def test_muon_gram_form_needs_positive_linear_coefficients() -> None:
    rows = [(-1.5, 0.5, 0.0)]
    torch.testing.assert_close(
        update(parameter(), ns_coefficients=rows),
        orthogonalize(parameter().grad, {"ns_coefficients": rows}),
        rtol=0,
        atol=1e-12,
    )
    optimizer = oxidion.Muon([parameter()], ns_coefficients=rows, orth_method="gram")
    with pytest.raises(ValueError, match="a > 0 in every triple"):
        optimizer.step()


def test_coefficients_survive_a_weights_only_checkpoint(tmp_path: Path) -> None:
    param = parameter()
    optimizer = oxidion.Muon([param], ns_coefficients=ROWS, ns_steps=3, newton_schulz_func=polar)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert loaded["param_groups"][0]["ns_coefficients"] == ROWS
    assert not any("func" in key for key in loaded["param_groups"][0])
    twin = oxidion.Muon([parameter()], newton_schulz_func=polar)
    twin.load_state_dict(loaded)
    assert twin.param_groups[0]["ns_steps"] == 3
    assert twin._functions == {"newton_schulz_func": polar}


# ---------------------------------------------------------------------------- a user's function


@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (3, 4, 5), (1, 7)], ids=str)
def test_function_goes_first_and_replaces_orth(shape: tuple[int, ...]) -> None:
    param = parameter(shape)
    result = update(param, newton_schulz_func=polar, orth_method="standard", epsilon=0.25)
    torch.testing.assert_close(result, polar(param.grad) / 1.25, rtol=0, atol=1e-13)


@pytest.mark.parametrize("orth_dtype", ["float32", "bfloat16", "float64"])
def test_function_gets_batches_of_its_own_in_orth_dtype(orth_dtype: str) -> None:
    seen: list[tuple[Tensor, Any]] = []

    def keep(x: Tensor, epsilon: object) -> Tensor:
        seen.append((x, epsilon))
        assert not torch.is_grad_enabled()
        return torch.ones_like(x)

    params = [parameter(dtype=torch.float32, seed=seed) for seed in range(3)]
    optimizer = oxidion.Muon(params, orth_dtype=orth_dtype, newton_schulz_func=keep, mu=0.0, epsilon=1e-3)
    optimizer.step()
    optimizer.step()
    assert all(epsilon == 1e-3 for _, epsilon in seen)
    assert all(x.dtype == getattr(torch, orth_dtype) and x.shape[1:] == (6, 9) for x, _ in seen)
    # What was kept from the first step is not overwritten by the second, nor after the optimizer is gone.
    del optimizer
    first = torch.cat([x for x, _ in seen])[:3].float()
    expected = torch.stack([param.grad for param in params])
    torch.testing.assert_close(first, expected, rtol=1e-2, atol=0)


def test_function_that_writes_its_argument_writes_a_copy() -> None:
    def twice(x: Tensor, epsilon: float) -> Tensor:
        assert epsilon > 0
        return x.mul_(2.0)

    param = parameter()
    grad = param.grad.clone()
    optimizer = oxidion.Muon([param], lr=LR, adjust_lr=None, newton_schulz_func=twice)
    optimizer.step()
    torch.testing.assert_close(param / -LR, 2.0 * grad, rtol=0, atol=1e-14)
    assert torch.equal(param.grad, grad)
    assert torch.equal(optimizer.state[param]["momentum"], grad)


class OwnError(Exception):
    """Raised by a function of the test."""


def _raise(x: Tensor, epsilon: float) -> Tensor:
    raise OwnError(f"{tuple(x.shape)} {epsilon}")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (_raise, OwnError, r"\(1, 6, 9\) 1e-08"),
        (lambda x, epsilon: x[..., :-1] + epsilon, ValueError, "must return a tensor of the shape"),
        (lambda x, epsilon: x[0] + epsilon, ValueError, "must return a tensor of the shape"),
        (lambda x, epsilon: x.long(), TypeError, "real floating-point tensor"),
        (lambda x, epsilon: None, TypeError, "result of newton_schulz_func must be a torch.Tensor"),
        (lambda x: x, TypeError, "unexpected keyword argument 'epsilon'"),
    ],
    ids=["raises", "columns", "no-batch", "integers", "none", "signature"],
)
def test_function_that_fails_stops_the_step_with_its_own_error(
    function: Callable[..., Any], error: type[Exception], message: str
) -> None:
    param = parameter()
    optimizer = oxidion.Muon([param], newton_schulz_func=function)
    saved = optimizer.state_dict()
    with pytest.raises(error, match=message) as caught:
        optimizer.step()
    assert type(caught.value) is error
    assert not param.detach().any()
    with pytest.raises(oxidion.PoisonedOptimizer, match=error.__name__):
        optimizer.step()
    optimizer.load_state_dict(saved)
    with pytest.raises(error, match=message):
        optimizer.step()


def test_function_may_use_torch_and_other_threads() -> None:
    def threaded(x: Tensor, epsilon: float) -> Tensor:
        results: list[Tensor] = []
        worker = threading.Thread(target=lambda: results.append(polar(x, epsilon)))
        worker.start()
        worker.join()
        return results[0]

    param = parameter()
    torch.testing.assert_close(
        update(param, newton_schulz_func=threaded), polar(param.grad), rtol=0, atol=1e-7
    )


def test_verify_and_metrics_call_the_function_on_copies() -> None:
    kinds: list[torch.dtype] = []

    def noted(x: Tensor, epsilon: float) -> Tensor:
        kinds.append(x.dtype)
        return polar(x, epsilon)

    params = [parameter(dtype=torch.float32), parameter((6, 4, 5), dtype=torch.float32)]
    optimizer = oxidion.Muon(params, newton_schulz_func=noted, orth_dtype="float32")
    table = optimizer.verify()
    assert {torch.float64, torch.float32} == set(kinds)
    assert all(row["update_error"] < 1e-5 for row in table)
    assert not any(param.detach().any() for param in params)
    metrics = optimizer.metrics()
    assert all(row["orthogonality_error"] < 1e-5 for row in metrics)
    # The comparison does depend on the function: another one is another step.
    wrong = oxidion.Muon([parameter(dtype=torch.float32)], newton_schulz_func=Drifting())
    assert wrong.verify()[0]["update_error"] > 0.1


class Drifting:
    """Gives another multiple of its argument at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor, epsilon: float) -> Tensor:
        self.calls += 1
        return x * (self.calls + epsilon)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_of_the_optimizer_have_the_function(duplicate: Callable[[Any], Any]) -> None:
    param = parameter()
    optimizer = oxidion.Muon([param], lr=LR, adjust_lr=None, weight_decay=0.0, newton_schulz_func=polar)
    _, twin = duplicate((param, optimizer))
    (copied,) = twin.param_groups[0]["params"]
    copied.grad = param.grad.clone()
    twin.step()
    torch.testing.assert_close(copied / -LR, polar(param.grad), rtol=0, atol=1e-7)
    assert not param.detach().any()


def test_function_that_does_not_pickle_says_so() -> None:
    optimizer = oxidion.Muon([parameter()], newton_schulz_func=lambda x, epsilon: x + epsilon)
    optimizer.step()
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dump(optimizer, io.BytesIO())
    torch.save(optimizer.state_dict(), io.BytesIO())


def test_function_is_no_group_key() -> None:
    with pytest.raises(ValueError, match="unknown group key 'newton_schulz_func'"):
        oxidion.Muon([{"params": [parameter()], "newton_schulz_func": polar}])
    optimizer = oxidion.Muon([parameter()], newton_schulz_func=polar)
    assert "newton_schulz_func" not in optimizer.param_groups[0]
    assert "newton_schulz_func" not in optimizer.defaults
