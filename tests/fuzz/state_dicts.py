"""State dicts with anything in any place: loaded whole, or refused before anything is changed."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

from support.cases import ALL_CASES, Case, Group

from .draw import Draw

LEAST_WORDS = 30
"""Letters of a message that says key, value and what is wanted."""
NUMBERS = [0, 1, -1, 2**63, -(2**70), 0.5, -0.0, 1e308, -1e-320, math.inf, -math.inf, math.nan, True]
OTHERS: list[Any] = [
    None,
    "",
    "adamw",
    "\0",
    "step" * 1000,
    [],
    {},
    (),
    [1],
    (0.9,),
    {"a": 1},
    b"x",
    1j,
    object,
]


def tensors(draw: Draw, like: Any) -> Any:
    """A tensor that is not what belongs there."""
    kinds = [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.uint8,
    ]
    shape = draw.choice([(), (0,), (1,), (3,), (2, 3), (7, 1, 2)])
    made = torch.ones(shape).to(draw.choice(kinds))
    if not isinstance(like, Tensor) or like.is_meta or like.is_sparse:
        return made
    like = like.detach()
    forms = [
        lambda: made,
        lambda: like.to("meta"),
        lambda: like.to_sparse() if like.ndim else made,
        lambda: like.unsqueeze(0),
        lambda: like.flatten()[:-1] if like.numel() > 1 else made,
        lambda: like.mT if like.ndim > 1 else made,
        lambda: like.to(draw.choice(kinds)),
        lambda: torch.full_like(like, math.nan) if like.is_floating_point() else made,
        lambda: like.clone().requires_grad_() if like.is_floating_point() else made,
        lambda: torch.zeros(()).expand(like.shape),
        lambda: torch.empty(2**33 // 8, device="meta"),
    ]
    return draw.choice(forms)()


def spoil(draw: Draw, place: Any) -> str:
    """Changes one thing anywhere below ``place``; returns what."""
    path = "state dict"
    while True:
        if isinstance(place, dict):
            keys: list[Any] = list(place)
        elif isinstance(place, list):
            keys = list(range(len(place)))
        else:
            return f"{path} is left"
        if not keys or draw.often(0.05):
            if isinstance(place, dict):
                key = draw.choice(["more", 0, -1, 99, 2**65, None, (1,), "params", "state", "exp_avg"])
                place[key] = copy.deepcopy(draw.choice([*NUMBERS, *OTHERS, torch.ones(2)]))
                return f"{path}[{key!r}] is added"
            place.append(copy.deepcopy(draw.choice([*NUMBERS, *OTHERS])))
            return f"{path} is longer"
        key = draw.choice(keys)
        path += f"[{key!r}]"
        value = place[key]
        if isinstance(value, dict | list) and value and draw.often(0.9):
            place = value
            continue
        if draw.often(0.15):
            del place[key]
            return f"{path} is left out"
        wrong = [*NUMBERS, *OTHERS, *[tensors(draw, value) for _ in range(12)]]
        place[key] = copy.deepcopy(draw.choice(wrong))  # another change may go into it
        return f"{path} = {str(place[key])[:60]!r} of type {type(place[key]).__name__}"


def snapshot(optimizer: Any, params: list[nn.Parameter]) -> Any:
    """Values of all that loading may touch."""
    groups = [{key: value for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    states = [{k: v.clone() for k, v in optimizer.state.get(p, {}).items()} for p in params]
    return [p.detach().clone() for p in params], copy.deepcopy(groups), states


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """All but the values."""
    return tensor.dtype, tensor.shape, tensor.layout, tensor.device


def equal(one: Any, other: Any) -> bool:
    """True for equal values, with tensors in them and NaN equal to itself."""
    if isinstance(one, Tensor):
        if not isinstance(other, Tensor) or kind_of(one) != kind_of(other):
            return False
        dense = (x.detach().to_dense() if x.is_sparse else x.detach() for x in (one, other))
        return one.is_meta or torch.allclose(*dense, 0, 0, equal_nan=True)
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(one[k], other[k]) for k in one)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other or (one != one and other != other))


def case(draw: Draw) -> None:
    """A state dict of a random optimizer, spoilt in one to three places, then loaded and stepped with."""
    template = draw.choice(ALL_CASES)
    groups = [
        Group(tuple(draw.choices(group.shapes, k=min(2, len(group.shapes)))), group.keys)
        for group in template.groups
    ]
    row = Case(template.name, template.cls, template.algorithm, template.kwargs, tuple(groups))
    params = row.parameters(
        draw.choice([torch.float64, torch.float32, torch.bfloat16]), draw.randrange(1 << 20)
    )
    optimizer = row.build(params)

    def step() -> None:
        for param in params:
            param.grad = draw.normal(param.shape, 0.1).to(param.dtype)
        optimizer.step()

    step()
    saved = copy.deepcopy(optimizer.state_dict())
    before = snapshot(optimizer, params)
    label = "; ".join(spoil(draw, saved) for _ in range(draw.choice([1, 1, 2, 3])))
    given = copy.deepcopy(saved)
    refused = None
    try:
        optimizer.load_state_dict(saved)
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{row.name}, {label}: {error!r}") from error
    assert equal(saved, given), f"{row.name}, {label}: loading changed what was given"
    if refused is not None:
        assert len(refused) >= LEAST_WORDS, f"{row.name}, {label}: no words in {refused!r}"
        assert equal(snapshot(optimizer, params), before), (
            f"{row.name}, {label}: refused and changed something"
        )
        step()
        return
    try:
        step()
        optimizer.load_state_dict(optimizer.state_dict())
    except Exception as error:
        raise AssertionError(f"{row.name}, {label}: loaded, and then {error!r}") from error
