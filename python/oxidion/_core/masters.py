"""float32 weights of bfloat16 parameters: their group key, and weights read and written outside of a step.

A parameter is its weight rounded to the nearest, ties away from zero; the state ``master_remainder`` holds
the low half of the weight. ``src/kernels/cpu/master.rs`` has the format, and why ties go away from zero.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oxidion._dist.comm import from_bytes, in_bytes, local, with_local

SETTING = "master_weights"
"""The group key."""
KEY = "master_remainder"
"""The state with the low halves."""
NARROW = (torch.bfloat16, torch.float16)
"""Dtypes of parameters that lose small updates."""


def check(group: Mapping[str, Any], where: str) -> None:
    """Refuses what masters do not go with.

    Args:
        group: a complete group, whose parameters may be missing.
        where: what an error calls it.

    Raises:
        ValueError: for stochastic rounding in the same group, and for parameters of another dtype.
    """
    if not group.get(SETTING):
        return
    if group.get("stochastic_rounding"):
        raise ValueError(
            f"master_weights does not go with stochastic_rounding ({where}): weights in float32 lose no "
            "update that could be rounded at random. Leave one of them out"
        )
    names = group.get("param_names")
    for at, param in enumerate(group.get("params", ())):
        # A state dict lists numbers instead of parameters.
        if not isinstance(param, Tensor) or param.dtype == torch.bfloat16 or not param.requires_grad:
            continue
        name = names[at] if names else f"parameter {at} of {where}"
        by_name = (
            f"; with a model as the first argument by overrides={{{name!r}: {{'master_weights': False}}}}"
        )
        advice = (
            "is its own master: put it in a group without master_weights" + (by_name if names else "")
            if param.dtype != torch.float16
            else "has neither masters nor random rounding: make it bfloat16 or float32"
        )
        raise ValueError(
            f"{name}: master_weights keeps the float32 weights of bfloat16 parameters ({where}). A parameter "
            f"of {str(param.dtype).removeprefix('torch.')} {advice}"
        )


def weight(param: Tensor, own: Mapping[str, Any]) -> Tensor:
    """The weight that is stored here: of a parameter with a remainder in float32, else the parameter.

    Args:
        param: the parameter.
        own: its states.
    """
    held, low = local(param).detach(), own.get(KEY)
    if not isinstance(low, Tensor) or held.dtype != torch.bfloat16:
        return held
    return joined(held, local(low))


def write(param: Tensor, own: Mapping[str, Any], value: Tensor) -> None:
    """Writes the weight that is stored here, in place: both halves, where there are two.

    Args:
        param: the parameter.
        own: its states.
        value: the new weight.
    """
    held, low = local(param).detach(), own.get(KEY)
    if not isinstance(low, Tensor) or held.dtype != torch.bfloat16:
        held.copy_(value)
        return
    for to, half in zip((held, local(low)), split(value), strict=True):
        to.copy_(half)


def whole_weight(param: Tensor, own: Mapping[str, Any]) -> Tensor:
    """As `weight`, laid out over ranks as the parameter is."""
    return with_local(param.detach(), weight(param, own))


def joined(high: Tensor, low: Tensor) -> Tensor:
    """Returns the float32 weights that bfloat16 parameters and int16 remainders make up."""
    halves = high.contiguous().view(torch.int16).int(), low.int()
    bits = ((halves[0] - (halves[1] < 0).int()) << 16) | (halves[1] & 0xFFFF)
    found = bits.view(torch.float32)
    return torch.where(found.isnan(), high.float(), found)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 parameters and int16 remainders of float32 weights."""
    wide = value.detach().float().contiguous()
    bits, lost = wide.view(torch.int32), wide.isnan()
    high = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    low = bits.to(torch.int16)
    return torch.where(lost, wide.to(torch.bfloat16), high), torch.where(lost, torch.zeros_like(low), low)


def remainder(master: Tensor) -> Tensor:
    """The remainder of a float32 weight of another package, whose bfloat16 parameter is rounded to even.

    A weight in the middle of two parameters that was rounded towards zero has no remainder here. It gets that
    of the next float32 number, which is smaller by one unit in its last place.

    Args:
        master: the weight, or the int16 remainder of a package that keeps remainders as this one does.
    """
    if master.dtype == torch.int16:
        return master.detach().clone()
    high, low = split(master)
    return torch.where(high == master.to(torch.bfloat16), low, torch.full_like(low, 0x7FFF))


def fits(master: Tensor, param: Tensor) -> bool:
    """False for a float32 weight that does not round to a bfloat16 parameter, ties in either direction.

    Args:
        master: the weight, or an int16 remainder, which fits any parameter.
        param: the parameter. Of a part of one nothing is known.
    """
    held = local(param).detach()
    if held.shape != master.shape or held.dtype != torch.bfloat16 or master.dtype == torch.int16:
        return True
    weight = master.detach().to(held.device)
    is_near = (weight.to(torch.bfloat16) == held) | (split(weight)[0] == held)
    return bool((is_near | (weight.isnan() & held.isnan())).all())


def drop_others(groups: list[dict[str, Any]], state: Mapping[Any, Any]) -> int:
    """Drops the remainders of parameters whose groups ask for none: what they would add later is old.

    Returns:
        How many there were.
    """
    dropped = 0
    for group in groups:
        for param in () if group.get(SETTING) else group["params"]:
            own = state.get(param)
            if isinstance(own, dict):
                dropped += own.pop(KEY, None) is not None
    return dropped


def log_dropped(count: int) -> None:
    """Says how many remainders were dropped."""
    if count:
        logging.getLogger("oxidion").warning(
            "the low halves of the float32 weights of %d parameters are dropped: their groups have "
            "master_weights=False",
            count,
        )


def saved(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """States as a state dict has them: remainders as pairs of bytes, which backends can send."""
    return {
        key: {**own, KEY: in_bytes(own[KEY])}
        if isinstance(own, dict) and _is_remainder(own.get(KEY))
        else own
        for key, own in state.items()
    }


def _is_remainder(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int16


def loaded(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """States of a state dict with remainders as they are kept."""

    def is_saved(value: object) -> bool:
        return isinstance(value, Tensor) and value.dtype == torch.uint8 and value.shape[-1:] == (2,)

    return {
        key: {**own, KEY: from_bytes(own[KEY])} if isinstance(own, dict) and is_saved(own.get(KEY)) else own
        for key, own in state.items()
    }


def keep(incoming: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
    """Has groups that are loaded keep the optimizer's setting, in place: it says how weights are stored.

    Where one of both has masters, random rounding is the optimizer's too: they do not go together.
    """
    for loaded, own in zip(incoming, groups, strict=False):
        if loaded.get(SETTING) or own.get(SETTING):
            loaded["stochastic_rounding"] = own.get("stochastic_rounding", False)
        loaded[SETTING] = own.get(SETTING, False)


def rounding(group: Mapping[str, Any], dtype: torch.dtype) -> str:
    """A word for how a parameter of this dtype is rounded in a group: "exact" where it is not narrower."""
    if dtype == torch.bfloat16 and group.get(SETTING):
        return "master"
    if dtype == torch.bfloat16 and group.get("stochastic_rounding"):
        return "stochastic"
    return "nearest" if dtype in NARROW else "exact"


def warn_of_rounding(groups: list[dict[str, Any]]) -> None:
    """Says how many bfloat16 parameters lose small updates, and what they can have instead."""
    stepped = [(group, param) for group in groups for param in group["params"] if param.grad is not None]
    count = sum(
        param.dtype == torch.bfloat16 and rounding(group, param.dtype) == "nearest"
        for group, param in stepped
    )
    if count:
        logging.getLogger("oxidion").info(
            "%d bfloat16 parameters are rounded to the nearest number, which loses updates below 1/512 of a "
            "weight. master_weights=True keeps all of them, at two more bytes for each weight; "
            "stochastic_rounding=True keeps their mean",
            count,
        )
