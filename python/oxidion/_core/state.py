"""State tensors: made from the plan's specs, kept in ``Optimizer.state``, loaded with their dtypes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from oxidion._core.reserve import LARGE, Reserve, zeros
from oxidion._core.validate import names_of
from oxidion._dist import collectives
from oxidion._dist.comm import as_state, full, lies_right, local, moved_state
from oxidion._oxidion import LayoutError, Plan, dequantize_blockwise, fill_normal, quantize_blockwise

MOMENTS = {"momentum", "variance", "row", "col", "res_row", "res_col"}
"""Roles without which a state is that of another algorithm."""
SCALES = "_absmax"
"""Ending of the key of an 8-bit state's scales."""

Names = Mapping[str, Mapping[str, str]]


def key_of(role: str, public: Mapping[str, str]) -> str:
    """The key in ``Optimizer.state`` of a role of the core, under a class's names for roles or back."""
    own = role.removesuffix(SCALES)
    return public.get(own, own) + role[len(own) :]


def parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups in plan order."""
    return list(chain.from_iterable(group["params"] for group in groups))


def named_gradients(groups: list[dict[str, Any]]) -> list[tuple[str, Tensor]]:
    """The gradients that there are, each with the name of its parameter."""
    return [
        (name, param.grad)
        for number, group in enumerate(groups)
        for name, param in zip(names_of(group, number), group["params"], strict=True)
        if param.grad is not None
    ]


def materialise(
    plan: Plan,
    groups: list[dict[str, Any]],
    state: dict[Tensor, dict[str, Any]],
    names: Names,
    optional: Mapping[str, frozenset[str]],
    steps_done: list[int],
    reserve: Reserve | None = None,
) -> list[list[Tensor]]:
    """Makes the states that are missing; returns those of every parameter in the order of the plan's specs.

    A state that is there is taken as it is, whatever its dtype. A missing step counter begins at its group's
    entry of ``steps_done``, as checkpoints of optimizers that count by group need it. ``optional`` are the
    moments that an algorithm may lack though it has others. ``reserve`` has memory.
    """
    bound = []
    steps = chain.from_iterable(
        [n] * len(group["params"]) for n, group in zip(steps_done, groups, strict=True)
    )
    rows = zip(parameters(groups), plan.state_specs(), plan.algorithms, steps, strict=True)
    for index, (param, specs, algorithm, steps_taken) in enumerate(rows):
        own = state[param] if specs else {}
        public = names.get(algorithm, {})
        roles = [spec["role"] for spec in specs]
        decisive = MOMENTS - optional[algorithm]
        moments = [public.get(role, role) for role in roles if role in decisive]
        if "step" in roles and not all(key in own for key in moments):
            # What is there belongs to another algorithm: its moments would be taken for this one's.
            own.clear()
        fresh = not own
        tensors = []
        for spec in specs:
            key = key_of(spec["role"], public)
            value = own.get(key)
            if spec["role"] == "step":
                where = torch.device("cpu") if spec["on_host"] else local(param).device
                if value is None or getattr(value, "dtype", None) != torch.float32:
                    done = value if value is not None else (0 if fresh else steps_taken)
                    own[key] = zeros([], torch.float32, where, reserve)
                    if done:
                        own[key].fill_(done)
                elif value.device != where:
                    own[key] = value.to(where)
            elif value is None:
                if spec["role"] == "momentum" and "momentum_buffer" in own:
                    raise ValueError(
                        f"the state of a parameter of shape {tuple(param.shape)} has torch's "
                        f"'momentum_buffer' and no {key!r}: "
                        "oxidion.checkpoint.import_state_dict() makes it of another package's checkpoint"
                    )
                if not fresh and spec["role"] in ("mean", "res_mean"):
                    raise ValueError(
                        f"the state of a parameter of shape {tuple(param.shape)} has factors but no {key!r}: "
                        "oxidion.checkpoint.import_state_dict() makes it of another package's checkpoint"
                    )
                own[key] = as_state(_start(spec, index, local(param).device, reserve), param, spec)
                _complete(spec["role"], own[key], own)
            elif not lies_right(value, param, spec):
                raise LayoutError(
                    f"state {key!r} of a parameter of shape {tuple(param.shape)} lies otherwise than the "
                    "parameter asks for. Load it with load_state_dict(), which moves it"
                )
            tensors.append(own[key])
        bound.append(tensors)
    return bound


def _complete(role: str, value: Tensor, own: Mapping[str, Any]) -> None:
    """Sets what a checkpoint does not say of the projection that it has: since when it is there."""
    if role == "proj_step" and "proj" in own:
        local(value).fill_(float(own["step"]))


def reserve(plan_of: Callable[[], Plan], groups: list[dict[str, Any]]) -> Reserve | None:
    """Memory of the CPU for what the first step makes: the workspace of the plan and the states."""
    held = [local(param) for param in parameters(groups)]
    if sum(own.nbytes for own in held if own.is_cpu) < LARGE:
        return None
    try:
        return Reserve(_wanted(plan_of()))
    except Exception as error:  # what a plan refuses, the first step says
        logging.getLogger("oxidion").debug("no memory is asked for ahead: %s", error)
        return None


def _wanted(plan: Plan) -> Iterable[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the workspace of a plan and of the states that begin as zeros."""
    specs = chain.from_iterable(plan.state_specs())
    states = (_stored(spec) for spec in specs if spec["seed"] is None)
    return chain([((workspace_floats(plan),), torch.float32)], states)


def workspace_floats(plan: Plan) -> int:
    """Elements of float32 in the workspace of a plan."""
    return -(-plan.arena_bytes // 4)


def _stored(spec: Mapping[str, Any]) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the part of a state that this process holds."""
    return tuple([length for _, length in spec["spans"]]), getattr(torch, spec["dtype"])


def settle(
    plan: Plan, groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]], names: Names
) -> None:
    """Moves the states that exist into the layouts of their parameters. Every rank has to call this."""
    for param, specs, algorithm in zip(parameters(groups), plan.state_specs(), plan.algorithms, strict=True):
        public = names.get(algorithm, {})
        own = state.get(param, {})
        for spec in specs:
            key = key_of(spec["role"], public)
            if spec["role"] != "step" and isinstance(own.get(key), Tensor):
                own[key] = moved_state(own[key], param, spec)


def _start(spec: Mapping[str, Any], index: int, device: torch.device, reserve: Reserve | None) -> Tensor:
    """The part of a new state that this process holds."""
    shape, dtype = _stored(spec)
    if spec["seed"] is None:
        return zeros(shape, dtype, device, reserve)
    normal = torch.empty(shape, dtype=torch.float32, device="cpu")
    fill_normal(normal, spec["seed"], index, spec["shape"], spec["spans"])
    return normal.to(device, dtype)


def own_copies(
    incoming: Mapping[str, Any], groups: list[dict[str, Any]], state: Mapping[Tensor, Any]
) -> None:
    """Undoes what ``Optimizer.load_state_dict`` did to dtypes, and gives the optimizer tensors of its own.

    Args:
        incoming: the state dict, whose groups list the keys of its states in the order of the parameters.
        groups: the groups after loading.
        state: the state after loading, changed in place.
    """
    keys = chain.from_iterable(group["params"] for group in incoming["param_groups"])
    for saved_key, param in zip(keys, parameters(groups), strict=True):
        saved = incoming["state"].get(saved_key)
        if not isinstance(saved, Mapping):
            continue
        own = state.get(param, {})
        for key, value in saved.items():
            loaded = own.get(key)
            if not isinstance(value, Tensor) or not isinstance(loaded, Tensor):
                continue
            if loaded.dtype != value.dtype or _address(loaded) == _address(value):
                own[key] = value.detach().clone().to(device=loaded.device)


def _address(tensor: Tensor) -> int:
    return local(tensor).data_ptr()


def existing(
    groups: list[dict[str, Any]], state: Mapping[Tensor, Mapping[str, Any]], names: Names
) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Dtype and shape of the states that exist, by role, for each parameter: the plan takes them as is."""
    if not state:
        return []
    # Another algorithm than its group's may step a parameter; a key has one role in all of them.
    roles = {key: role for public in names.values() for role, key in public.items()}
    rows = []
    for group in groups:
        for param in group["params"]:
            own = state.get(param, {})
            rows.append(
                {
                    key_of(key, roles): (
                        str(value.dtype).removeprefix("torch."),
                        tuple(value.shape),
                    )
                    for key, value in own.items()
                    if isinstance(value, Tensor)
                    and (value.is_floating_point() or value.dtype == torch.uint8)
                    and not key.startswith("step")
                }
            )
    return rows


def whole(own: Mapping[str, Any], key: str, spec: Mapping[str, Any]) -> Tensor:
    """All of a state on every rank; the numbers that codes stand for."""
    if spec["coded"] is None:
        return full(own[key]).detach()
    return dequantize_blockwise(full(own[key]).detach(), full(own[key + SCALES]).detach(), *spec["coded"])


def average_momenta(
    states: Iterable[dict[str, Any]], specs: Iterable[list[dict[str, Any]]], groups: Iterable[Any]
) -> None:
    """Replaces momenta by their means over process groups, in place; every rank of them has to call this."""
    plain, coded = [], []
    for own, listed in zip(states, specs, strict=True):
        for spec in listed:
            if spec["role"] == "momentum" and "momentum" in own:
                if spec["coded"] is None:
                    plain.append(local(own["momentum"]))
                else:
                    codes, scales = local(own["momentum"]), local(own["momentum" + SCALES])
                    coded.append((codes, scales, spec["coded"]))
    means = [dequantize_blockwise(codes, scales, *how) for codes, scales, how in coded]
    groups = list(groups)
    collectives.average(plain, groups)
    collectives.average(means, groups)
    for (codes, scales, how), mean in zip(coded, means, strict=True):
        for target, value in zip((codes, scales), quantize_blockwise(mean, *how), strict=True):
            target.copy_(value)
