"""Weights in which the rows of several matrices alternate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._core import masters
from support.cases import BASE, CLASSES

from .test_views import State, close, drawn, initial_q, run

every_algorithm = pytest.mark.parametrize("name", ["muon", "normuon", "dion", "dion2", "nordion2"])


def parts(x: Tensor, count: int) -> list[Tensor]:
    """The matrices whose rows alternate in a matrix, or in ``[out, count, in]``."""
    return [x[first::count] if x.ndim == 2 else x[:, first] for first in range(count)]


@every_algorithm
@pytest.mark.parametrize(
    ("shape", "count"), [((12, 7), 2), ((12, 5), 3), ((8, 9), 2), ((6, 2, 7), 2), ((5, 3, 4), 3)], ids=str
)
def test_rows_that_alternate_equal_separate_parameters(name: str, shape: tuple[int, ...], count: int) -> None:
    start, grads = drawn(shape)
    keys = {"interleaved": count}
    fresh = initial_q(start, keys) if name == "dion" else torch.empty(0)
    rows = start.shape[0] if start.ndim == 3 else shape[0] // count
    own_q = (lambda q: parts(q, count)) if rows < shape[-1] else list

    def same_basis(index: int, state: State) -> None:
        if "Q" in state:
            state["Q"].copy_(own_q(fresh)[index])

    got, (found,) = run(name, [start], [[g] for g in grads], keys)
    wanted, states = run(name, parts(start, count), [parts(g, count) for g in grads], prepare=same_basis)
    for mine, other in zip(parts(got[0], count), wanted, strict=True):
        close(mine, other)
    for key in states[0].keys() - {"Q"}:
        for mine, state in zip(parts(found[key], count), states, strict=True):
            close(mine, state[key])


@pytest.mark.parametrize("name", ["muon", "normuon", "dion2", "nordion2"])
def test_alternating_rows_are_cut_into_heads(name: str) -> None:
    start, grads = drawn((24, 9))
    got, _ = run(name, [start], [[g] for g in grads], {"interleaved": 2, "split_sizes": (3, 9)})
    split = [list(half.split((3, 9))) for half in parts(start, 2)]
    separate = [[part for half in parts(g, 2) for part in half.split((3, 9))] for g in grads]
    wanted, _ = run(name, [part for half in split for part in half], separate)
    for half, own in zip(parts(got[0], 2), (wanted[:2], wanted[2:]), strict=True):
        close(half, torch.cat(own))


EIGHT_BIT = {"state_bits": 8, "min_quant_numel": 0}
SPHERE = {"weight_norm": "hyperball", "weight_decay": 0.0}


@pytest.mark.parametrize("name", ["muon", "normuon"])
@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"master_weights": True}, 1e-5),
        (SPHERE, 1e-5),
        # 8-bit values are rounded at random, by the position of an element in its parameter.
        (EIGHT_BIT, 0.05),
        ({**EIGHT_BIT, "master_weights": True}, 0.05),
    ],
    ids=str,
)
def test_alternating_rows_go_with_other_settings(name: str, settings: dict[str, Any], most: float) -> None:
    dtype = torch.bfloat16 if "master_weights" in settings else torch.float32
    start, grads = drawn((16, 12))
    own = {**BASE, **settings, "orth_dtype": "float32"}
    keys = {"min_quant_numel": own.pop("min_quant_numel")} if "min_quant_numel" in own else {}
    whole = nn.Parameter(start.to(dtype))
    pieces = [nn.Parameter(part.clone()) for part in parts(whole.detach(), 2)]
    one: Any = CLASSES[name]([{"params": [whole], "interleaved": 2, **keys}], **own)
    two: Any = CLASSES[name]([{"params": pieces, **keys}], **own)
    for grad in grads:
        whole.grad = grad.to(dtype)
        for param, own_grad in zip(pieces, parts(whole.grad, 2), strict=True):
            param.grad = own_grad.clone()
        one.step()
        two.step()
    for part, param, before in zip(parts(weights(one, whole), 2), pieces, parts(start, 2), strict=True):
        wanted = weights(two, param)
        assert float((part - wanted).norm() / (wanted - before).norm()) < most
    for row in one.verify():
        assert row["update_error"] < 10 * row["expected"], row


def weights(optimizer: Any, param: nn.Parameter) -> Tensor:
    """The weights in float64, with their low halves where they have some."""
    return masters.weight(param.detach(), optimizer.state[param]).double()


def test_ambiguous_shape_names_the_keys_that_resolve_it() -> None:
    weight = nn.Parameter(torch.randn(3, 6, 2, 4))
    weight.grad = torch.randn_like(weight)
    expected = r"pass flatten=True, interleaved=k or interleaved=1"
    with pytest.raises(ValueError, match=expected):
        oxidion.Muon([weight]).step()
    for keys in ({"flatten": True}, {"interleaved": 2}, {"interleaved": 1}):
        oxidion.Muon([{"params": [weight], **keys}]).step()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"interleaved": 0}, "interleaved must be an integer >= 1"),
        ({"interleaved": 2.0}, "interleaved must be"),
        ({"interleaved": 5}, r"interleaved must divide the rows of each matrix.*\(?12, 4"),
        ({"interleaved": 2, "flatten": True}, "goes with neither flatten nor split_dim=1"),
        ({"interleaved": 2, "num_heads": 2, "split_dim": 1}, "goes with neither flatten nor split_dim=1"),
        ({"interleaved": 2, "split_dim": 1}, "goes with neither flatten nor split_dim=1"),
        ({"interleaved": 2, "num_heads": 4}, "num_heads must divide"),
        ({"interleaved": 2, "split_sizes": (6, 6)}, "split_sizes must sum to"),
    ],
    ids=str,
)
def test_keys_that_cannot_be_meant_are_refused(keys: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.randn(12, 4))
    weight.grad = torch.randn_like(weight)
    with pytest.raises(ValueError, match=message):
        oxidion.Muon([{"params": [weight], **keys}]).step()


def test_a_checkpoint_without_the_key_leaves_it_as_it_is() -> None:
    weight = nn.Parameter(torch.randn(2, 3, 4, 5))
    weight.grad = torch.randn_like(weight)
    groups = [{"params": [weight], "interleaved": 1}]
    optimizer: Any = oxidion.Muon(groups)
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["interleaved"]
    resumed: Any = oxidion.Muon([{"params": [weight], "interleaved": 1}])
    resumed.load_state_dict(saved)
    resumed.step()
    assert resumed.param_groups[0]["interleaved"] == 1


def test_explain_says_that_rows_alternate() -> None:
    weight = nn.Parameter(torch.randn(3, 12, 4))
    weight.grad = torch.randn_like(weight)
    optimizer: Any = oxidion.Muon([{"params": [weight], "interleaved": 2}])
    optimizer.step()
    assert "2 interleaved" in str(optimizer.explain())
