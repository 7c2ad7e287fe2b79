"""State dicts looked at before they are loaded: what does not fit is refused while nothing has changed."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor

from oxidion._core import schema
from oxidion._core.state import (
    MOMENTS,
    SCALES,
    check_absent,
    check_quantized,
    check_state,
    existing,
    is_counter,
    is_own,
    key_of,
    names,
    parameters,
)
from oxidion._core.stepper import Stepper
from oxidion._core.validate import check_group, flag, is_finite, names_of, optional
from oxidion._dist.comm import is_distributed
from oxidion._oxidion import Plan

READ_BY_TORCH = {"fused": optional(flag(False))}
"""Keys of other optimizers that ``Optimizer.load_state_dict`` looks at: what they must be."""


def check_form(
    state_dict: object,
    whose: str = "the state dict",
    advice: str = "Load what state_dict() of an optimizer returned",
) -> None:
    """Refuses anything but a state dict: a dict of states by key, and of groups that list the keys.

    Args:
        state_dict: the value to check.
        whose: its name in an error.
        advice: the advice in an error.
    """

    def refuse(place: str, wanted: str, got: object) -> NoReturn:
        raise ValueError(f"{place} must be {wanted}, got {reprlib.repr(got)}. {advice}")

    if not isinstance(state_dict, Mapping):
        refuse(whose, "a dict", state_dict)
    lists = (list, tuple)
    for key, kind, wanted in (("state", Mapping, "a dict"), ("param_groups", lists, "a list of dicts")):
        if key not in state_dict:
            refuse(whose, f"a dict with {key!r}", list(state_dict))
        if not isinstance(state_dict[key], kind):
            refuse(f"{key!r} of {whose}", wanted, state_dict[key])
    seen: set[Hashable] = set()
    for number, group in enumerate(state_dict["param_groups"]):
        where = f"group {number} of {whose}"
        if not isinstance(group, dict):
            refuse(where, "a dict", group)
        keys = group.get("params")
        if not isinstance(keys, lists) or not all(map(_is_key, keys)):
            refuse(f"'params' of {where}", "a list of keys of states", keys)
        if len(seen) + len(keys) != len(seen := seen.union(keys)):
            refuse(f"'params' of {where}", "keys of states that no other parameter has", keys)


def _is_key(value: object) -> bool:
    """True for what can be a key of a dict of states; a tensor is compared by its elements."""
    if isinstance(value, Tensor):
        return False
    try:
        hash(value)
    except TypeError:  # a tuple is Hashable, whatever is in it
        return False
    return True


def keep_extra(
    groups: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]], extra: Iterable[str]
) -> None:
    """Gives groups the optimizer's values of a user's own keys, in place, where the checkpoint has none.

    So it does of ``interleaved``, which says how a weight is stored, and which other packages do not have.
    """
    for group, target in zip(groups, own, strict=False):
        for key in ("interleaved", *extra):
            if key in target:
                group.setdefault(key, target[key])


def keep_streams(groups: Sequence[dict[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Has random numbers of parameters that had no names go on by position, in place, if they have names."""
    for number, (group, target) in enumerate(zip(groups, own, strict=False)):
        if "param_names" in group:
            continue
        if "param_names" in target:
            group.setdefault("seed_by", "position")
        elif group.get("seed_by") == "name":  # torch's flattened state dicts drop names
            group["seed_by"] = "position"
            logging.getLogger("oxidion").warning(
                "group %d: random numbers of the checkpoint went by names of parameters, and the optimizer "
                "has none: they go by positions from here on. Make it with named_parameters()",
                number,
            )


def check(optimizer: Stepper, incoming: Mapping[str, Any]) -> None:
    """Refuses groups and states that no step of the optimizer, which is not changed, could use.

    The groups of ``incoming`` have the optimizer's words for their keys.
    """
    groups, own = incoming["param_groups"], optimizer.param_groups
    theirs, ours = ([len(group["params"]) for group in side] for side in (groups, own))
    if theirs != ours:
        other = "has a different number of parameter groups"
        if len(theirs) == len(ours):
            other = "contains a parameter group that doesn't match the size of optimizer's group"
        raise ValueError(
            f"loaded state dict {other}: its groups have {_counts(theirs)} parameters, and the optimizer's "
            f"{_counts(ours)}. Build the optimizer with the groups of the saved run, or load by names, with "
            "torch.distributed.checkpoint.state_dict"
        )
    _check_order(groups, own)
    wanted = []
    for number, (group, target) in enumerate(zip(groups, own, strict=True)):
        where = f"group {number} of the state dict"
        theirs, ours = group.get("algorithm", target["algorithm"]), target["algorithm"]
        if theirs != ours:
            raise ValueError(
                f"{where} has algorithm {theirs!r}, the optimizer's has {ours!r}. Load it into "
                f"{optimizer._class_of(theirs).__name__}, or give the optimizer's group algorithm={theirs!r}"
            )
        made = dict(group)
        optimizer._complete(made, where)
        check_group({key: made[key] for key in READ_BY_TORCH if key in made}, READ_BY_TORCH, set(), where)
        kept = {key: target[key] for key in ("params", "param_names") if key in target}
        wanted.append({**made, **kept})
    schema.mirror_betas(wanted, {})
    keys = chain.from_iterable(group["params"] for group in groups)
    saved = [incoming["state"].get(key, {}) for key in keys]
    if any(states != {} for states in saved):
        _check_states(optimizer, wanted, saved, _hints(groups, own))


def _counts(sizes: Sequence[int]) -> str:
    shown = ", ".join(map(str, sizes[:8]))
    return f"{shown} and {len(sizes) - 8} more" if len(sizes) > 8 else shown


def _check_order(groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Refuses names of the wrong kind, and the optimizer's names in another order."""
    for number, group in enumerate(groups):
        found = group.get("param_names")
        strings = isinstance(found, (list, tuple)) and all(isinstance(name, str) for name in found)
        if found is not None and not (strings and len(found) == len(group["params"])):
            wanted = f"{len(group['params'])} strings"
            where = f"group {number} of the state dict"
            raise ValueError(f"param_names must be {wanted}, got {found!r} ({where})")
    theirs, ours = ([name for g in side for name in g.get("param_names") or ()] for side in (groups, own))
    if theirs != ours and sorted(theirs) == sorted(ours):
        at = next(at for at, (a, b) in enumerate(zip(theirs, ours, strict=True)) if a != b)
        raise ValueError(
            f"the state dict has the parameters in another order: {theirs[at]!r} where the optimizer has "
            f"{ours[at]!r}, and states go by position. Make the groups in the order of the state dict, or "
            "reorder it in a load_state_dict pre-hook"
        )


def _hints(groups: Sequence[Mapping[str, Any]], own: list[dict[str, Any]]) -> Iterator[str]:
    """Yields for each parameter the name that the state dict has at its position, where it differs."""
    for group, target in zip(groups, own, strict=True):
        here = target.get("param_names") or [None] * len(group["params"])
        for name, ours in zip(group.get("param_names") or here, here, strict=True):
            yield "" if name == ours or name is None else f" for {name!r} of the state dict"


def _check_states(
    optimizer: Stepper, groups: list[dict[str, Any]], saved: list[Any], hints: Iterator[str]
) -> None:
    """Compares the states with those that the plan of these groups asks for."""
    given = zip(parameters(groups), names(groups), saved, strict=True)
    held = {param: _entries(name, states) for param, name, states in given}
    public = optimizer._STATE_NAMES
    # The plan is made without quantized states: its error about wrong ones would name roles of the core.
    numbers = {param: dict(filter(_is_number, own.items())) for param, own in held.items()}
    plan = _plan(optimizer, groups, numbers)
    listed = plan.state_specs()
    bits_of = [group.get("state_bits", 32) for group in groups for _ in group["params"]]
    found = zip(names(groups), held.values(), listed, plan.algorithms, bits_of, strict=True)
    for name, own, specs, algorithm, bits in found:
        for spec in specs:
            check_quantized(own, key_of(spec["role"], public.get(algorithm, {})), spec, name, bits)
    if any(len(own) < len(held[param]) for param, own in numbers.items()):
        plan = _plan(optimizer, groups, held)
        listed = plan.state_specs()
    _check_all_there(groups, held, listed)
    rows = zip(names(groups), held.values(), listed, plan.algorithms, hints, strict=True)
    for name, own, specs, algorithm, hint in rows:
        fresh = not any(map(is_own, own))
        decisive = MOMENTS - optimizer._class_of(algorithm)._OPTIONAL_ROLES
        for spec in specs:
            key = key_of(spec["role"], public.get(algorithm, {}))
            value = own.get(key)
            if value is None and not is_counter(spec):
                check_absent(spec, key, own, name, fresh=fresh)
                if not fresh and spec["role"] in decisive:
                    raise ValueError(
                        f"{name}: algorithm {algorithm!r} goes on from a state {key!r}, and the state dict "
                        f"has {', '.join(map(repr, filter(is_own, own)))}, those of another optimizer. Load "
                        "them into its class; oxidion.checkpoint.import_state_dict() converts those of other "
                        "packages"
                    )
            elif is_counter(spec):
                _check_step(value, key, name)
            else:
                check_state(value, key, spec, name, hint)


def _entries(name: str, states: object) -> dict[Any, Any]:
    """Returns a copy of a parameter's states; refuses anything but a dict, and tensors on meta."""
    if not isinstance(states, dict):
        raise ValueError(f"{name}: its state must be a dict, got {reprlib.repr(states)}")  # noqa: TRY004
    for key, value in states.items():
        if is_own(key) and isinstance(value, Tensor) and value.is_meta:
            raise ValueError(f"{name}: state {key!r} is on meta, where it has no values to load")
    return {**states}


def _check_all_there(
    groups: list[dict[str, Any]], held: Mapping[Tensor, Any], listed: Sequence[Sequence[object]]
) -> None:
    """Refuses a parameter without states in a group that has some: they would start from zero.

    ``listed`` holds the specs of each parameter's states.
    """
    stepped = {param for param, specs in zip(held, listed, strict=True) if specs}
    for number, group in enumerate(groups):
        rows = zip(names_of(group, number), group["params"], strict=True)
        found = {name: any(map(is_own, held[param])) for name, param in rows if param in stepped}
        if any(found.values()) and not all(found.values()):
            lost = next(name for name, is_there in found.items() if not is_there)
            raise ValueError(
                f"{lost}: the state dict has no states of it, and has some of other parameters of "
                f"group {number}. It was frozen or unused in that run, or its states were cleared. To begin "
                "it again, set its grad to None and requires_grad to False while the state dict is loaded"
            )


def without_states(groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> list[int]:
    """The groups that have taken steps and have no states of what they step, as they were loaded."""
    stepped = [[param for param in group["params"] if param.requires_grad] for group in groups]
    lost = [own and not any(map(state.get, own)) for own in stepped]
    return [number for number, group in enumerate(groups) if group["step"] > 0 and lost[number]]


def _is_number(entry: tuple[Any, Any]) -> bool:
    """Returns True for an entry that is neither a quantized state nor its scales."""
    key, value = entry
    quantized = isinstance(value, Tensor) and value.dtype == torch.uint8
    return not quantized and not (isinstance(key, str) and key.endswith(SCALES))


def _plan(optimizer: Stepper, groups: list[dict[str, Any]], held: Mapping[Tensor, Any]) -> Plan:
    settings = [{**group, **optimizer._functions} for group in groups]
    return Plan(settings, existing(groups, held, optimizer._STATE_NAMES), optimizer._meshes)


def _check_step(value: object, key: str, name: str) -> None:
    """Refuses a counter that is no count."""
    if value is None or is_distributed(value):
        return
    dense = not isinstance(value, Tensor) or value.layout == torch.strided
    if not dense or not is_finite(value) or float(value) < 0:  # type: ignore[arg-type]
        raise ValueError(f"{name}: state {key!r} must be a finite number >= 0, got {value!r}")
