"""State tensors: made from the plan's specs, kept in ``Optimizer.state``, loaded with their dtypes."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor

from oxidion._core import averages, masters
from oxidion._core.owned import OwnerSharded, collected
from oxidion._core.reserve import LARGE, Reserve, empty_pinned, zeros
from oxidion._core.validate import DTYPES, names_of
from oxidion._cuda.device import stream_of
from oxidion._dist import collectives
from oxidion._dist.comm import Groups, as_state, full, lies_right, local, moved_state, with_local
from oxidion._oxidion import (
    LayoutError,
    Plan,
    dequantize_blockwise,
    fill_normal,
    quantize_blockwise,
    state_names,
)

MOMENTS = {"momentum", "variance", "row", "col", "res_row", "res_col"}
"""Roles without which a state is that of another algorithm."""
SCALES = "_absmax"
"""Ending of the key of an 8-bit state's scales."""
ROLES = MOMENTS | {"mean", "res_mean", "max_variance", "slow_momentum", "variance_neuron", "update_norm"}
ROLES |= {"Q", "proj", "proj_right", "proj_step", "step", "step_dev", "momentum_buffer"}
ROLES |= {"L", "R", "Q_L", "Q_R", "basis_step"}
ROLES |= {"radius", masters.KEY, *averages.STATES}
"""Roles of the core, and keys of other packages that are refused; `is_own` adds the names of classes."""

Names = Mapping[str, Mapping[str, str]]


@functools.cache
def _own_keys() -> frozenset[str]:
    names = chain.from_iterable(by_role.items() for by_role in state_names().values())
    return frozenset(chain(ROLES, *names))


def is_own(key: object) -> bool:
    """True for a key under which optimizers keep states of a parameter; any other is the user's."""
    return isinstance(key, str) and key.removesuffix(SCALES) in _own_keys()


def key_of(role: str, public: Mapping[str, str]) -> str:
    """The key in ``Optimizer.state`` of a role of the core, under a class's names for roles or back."""
    own = role.removesuffix(SCALES)
    return public.get(own, own) + role[len(own) :]


def parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    """The parameters of all groups in plan order."""
    return list(chain.from_iterable(group["params"] for group in groups))


def names(groups: list[dict[str, Any]]) -> list[str]:
    """The names of the parameters of all groups in plan order."""
    return list(chain.from_iterable(names_of(group, number) for number, group in enumerate(groups)))


def entries_of(
    state: Mapping[Any, Any], groups: list[dict[str, Any]]
) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """Name, parameter and entries of every parameter that has some; what belongs to no parameter is left out.

    Raises:
        TypeError: for entries that are no dict.
    """
    found = []
    for name, param in zip(names(groups), parameters(groups), strict=True):
        own = state.get(param, {})
        if not isinstance(own, dict):
            raise TypeError(
                f"{name}: its entry in the optimizer's state must be a dict, got {type(own).__name__}"
            )
        if own:
            found.append((name, param, own))
    return found


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
    public_names: Names,
    optional: Mapping[str, frozenset[str]],
    steps_done: list[int],
    reserve: Reserve | None = None,
    owned: OwnerSharded | None = None,
) -> list[list[Tensor]]:
    """Makes the states that are missing; returns those of every parameter in the order of the plan's specs.

    A state that is there is taken as it is, whatever its dtype. A missing step counter begins at its group's
    entry of ``steps_done``, as checkpoints of optimizers that count by group need it. ``optional`` are the
    moments that an algorithm may lack though it has others. ``reserve`` has memory, ``owned`` knows of the
    owner-sharded states.
    """
    owned = OwnerSharded() if owned is None else owned
    bound = []
    steps = chain.from_iterable(
        [n] * len(group["params"]) for n, group in zip(steps_done, groups, strict=True)
    )
    entries_of(state, groups)
    facts = plan.state_specs(), plan.algorithms, plan.streams
    rows = zip(names(groups), parameters(groups), *facts, steps, strict=True)
    for name, param, specs, algorithm, stream, steps_taken in rows:
        own = state[param] if specs else {}
        public = public_names.get(algorithm, {})
        roles = [spec["role"] for spec in specs]
        decisive = MOMENTS - optional[algorithm]
        moments = [public.get(role, role) for role in roles if role in decisive]
        if "step" in roles and not all(key in own for key in moments):
            # What is there belongs to another algorithm: its moments would be taken for this one's.
            for key in [*filter(is_own, own)]:
                del own[key]
        fresh = not any(map(is_own, own))
        tensors = []
        for spec in specs:
            key = key_of(spec["role"], public)
            value = own.get(key)
            if is_counter(spec):
                begins_at_0 = fresh or spec["role"] != "step"
                own[key] = _counter(value, spec, param, 0 if begins_at_0 else steps_taken, reserve)
            elif value is None:
                check_absent(spec, key, own, name, fresh=fresh)
                if owned.bound(name, param, own, key, spec) is None:
                    own[key] = as_state(_start(spec, stream, local(param), reserve), param, spec)
                _complete(spec["role"], own[key], own)
            else:
                if not owned.is_sharded(param, key, value):
                    check_state(value, key, spec, name)
                    _check_layout(value, key, param, spec, name)
                owned.bound(name, param, own, key, spec)
            tensors.append(own[key])
        bound.append(tensors)
    return bound


def is_counter(spec: Mapping[str, Any]) -> bool:
    """True for a number of a parameter that is no DTensor whatever the parameter is: each rank counts."""
    return spec["role"] == "step" or bool(spec["on_host"])


def _counter(
    value: object, spec: Mapping[str, Any], param: Tensor, missing: int, reserve: Reserve | None
) -> Tensor:
    """A counter in its type and place; ``missing`` is its value where there is none."""
    where = torch.device("cpu") if spec["on_host"] else local(param).device
    dtype = getattr(torch, spec["dtype"])
    if isinstance(value, Tensor) and value.dtype == dtype and not value.ndim:
        return value if value.device == where else value.to(where)
    made = zeros([], dtype, where, reserve)
    if done := missing if value is None else float(value):  # type: ignore[arg-type]
        made.fill_(float(done))
    return made


def check_absent(
    spec: Mapping[str, Any], key: str, own: Mapping[str, Any], name: str, *, fresh: bool
) -> None:
    """Refuses to begin a state with zeros where another package's states hold what it should begin with.

    Args:
        spec: of the state, which is not there.
        key: of the state.
        own: the states of the parameter that are there.
        name: of the parameter.
        fresh: whether there are none.

    Raises:
        ValueError: that names the way to convert them.
    """
    advice = "oxidion.checkpoint.import_state_dict() makes it of another package's checkpoint"
    if spec["role"] == "momentum" and "momentum_buffer" in own:
        raise ValueError(f"{name}: its state has torch's 'momentum_buffer' and no {key!r}: {advice}")
    if not fresh and spec["role"] in ("mean", "res_mean"):
        raise ValueError(f"{name}: its state has factors but no {key!r}: {advice}")


def check_quantized(own: Mapping[str, Any], key: str, spec: Mapping[str, Any], name: str, bits: int) -> None:
    """Refuses 8-bit states that the plan does not allow, that lack values or scales, or that are floats.

    Args:
        own: the states of the parameter.
        key: the key of the state.
        spec: the state's spec in the plan.
        name: the name of the parameter.
        bits: ``state_bits`` of the group from which they come.

    Raises:
        ValueError: for such a state; it names the key.
    """
    value, scales = own.get(key), own.get(key + SCALES)
    quantized = isinstance(value, Tensor) and value.dtype == torch.uint8
    if (quantized and not spec["codable"]) or (scales is not None and value is not None and not quantized):
        check_state(value, key, spec, name)
    elif quantized and not isinstance(scales, Tensor):
        raise ValueError(
            f"{name}: state {key!r} is uint8 without {key + SCALES!r}: the values have no scale. Load both"
        )
    elif scales is not None and spec["codable"] and value is None:
        raise ValueError(f"{name}: state {key + SCALES!r} is there without {key!r}. Load both, or neither")
    elif bits == 8 and spec["codable"] and scales is None and _has_quantized_values(value):
        raise ValueError(
            f"{name}: state {key!r} has whole numbers up to 255, no {key + SCALES!r}: they are quantized, "
            "which torch.distributed.checkpoint copies into an optimizer with states of 32 bits as if they "
            "were numbers. Make that optimizer with state_bits=8"
        )


def _has_quantized_values(value: object) -> bool:
    """Returns True for floats that are all integers in 0..255, and not only 0 and 1: 8-bit values."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    if str(value.dtype).removeprefix("torch.") not in DTYPES:
        return False
    held = local(value).detach()
    q8 = held.clamp(0, 255).round()
    return held.numel() > 0 and bool((q8 == held).all()) and bool(q8.max() > 1)


def check_state(value: object, key: str, spec: Mapping[str, Any], name: str, hint: str = "") -> None:
    """Refuses a state that does not fit its parameter.

    Args:
        value: what is there.
        key: of the state.
        spec: that the plan asks for; its dtype is the state's own where that is one for states.
        name: of the parameter.
        hint: what an error says besides.

    Raises:
        ValueError: for anything but a dense tensor of the right dtype and shape.
    """
    shape = tuple(spec["shape"])
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        got = type(value).__name__ if not isinstance(value, Tensor) else f"one with layout {value.layout}"
        raise ValueError(f"{name}: state {key!r} must be a dense tensor of shape {shape}, got {got}{hint}")
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype != spec["dtype"]:
        is_fixed = key.endswith(SCALES) or spec["dtype"] in ("uint8", "int16")
        allowed = spec["dtype"] if is_fixed else ", ".join(DTYPES)
        quantized = " or uint8 with their absmax" if spec["codable"] and dtype == "uint8" else ""
        raise ValueError(f"{name}: state {key!r} must be of dtype {allowed}{quantized}, got {dtype}{hint}")
    if tuple(value.shape) != shape:
        raise ValueError(
            f"{name}: state {key!r} must have shape {shape}, got {tuple(value.shape)}{hint}. States go by "
            "the position of their parameter: load those of the same model, its parameters in the same order"
        )


def _check_layout(value: Tensor, key: str, param: Tensor, spec: Mapping[str, Any], name: str) -> None:
    """Refuses a state that lies on other ranks, or in other pieces, than the plan asks for."""
    if not lies_right(value, param, spec):
        raise LayoutError(
            f"{name}: state {key!r} lies otherwise than the parameter asks for. Load it with "
            "load_state_dict(), which moves it"
        )


def _complete(role: str, value: Tensor, own: Mapping[str, Any]) -> None:
    """Sets since when a projection is there, where a checkpoint says nothing; new bases are not there yet."""
    if role == "proj_step" and "proj" in own:
        local(value).fill_(float(own["step"]))
    if role in ("Q_L", "Q_R") and "basis_step" in own:
        local(own["basis_step"]).zero_()


def reserve(plan_of: Callable[[], Plan], groups: list[dict[str, Any]]) -> Reserve | None:
    """Memory of the CPU for what the first step makes: the workspace of the plan and the states."""
    held = [local(param) for param in parameters(groups)]
    if sum(own.nbytes for own in held if own.is_cpu) < LARGE:
        return None
    # Pinned memory cannot be asked for ahead. It is looked for once: once for each parameter is quadratic.
    has_pinned = any(own.is_pinned() for own in held)
    ahead = [own.is_cpu and not has_pinned for own in held]
    try:
        with _uncollected():
            return Reserve(_wanted(plan_of(), held, ahead))
    except Exception as error:  # what a plan refuses, the first step says
        logging.getLogger("oxidion").debug("no memory is asked for ahead: %s", error)
        return None


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A context without garbage collection, for many objects that are gone after it.

    The specs of 10,000 parameters are 150,000 objects. They make Python look at all objects there are, which
    takes longer than the construction.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _wanted(
    plan: Plan, held: list[Tensor], ahead: list[bool]
) -> Iterable[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of the workspace on the CPU, and of states of some parameters that begin as zeros."""
    specs = chain.from_iterable(compress(plan.state_specs(), ahead))
    zeroed = (
        (tuple(spec["stored"]), getattr(torch, spec["dtype"])) for spec in specs if spec["seed"] is None
    )
    own = [((count,), torch.float32) for where, count in workspaces(plan, held) if where.type == "cpu"]
    return chain(own, zeroed)


def workspaces(plan: Plan, params: list[Tensor]) -> list[tuple[torch.device, int]]:
    """The devices of a plan's parameters, each with the elements of float32 in its workspace there."""
    if not params:
        return [(torch.device("cpu"), 0)]
    return [(local(params[first]).device, -(-size // 4)) for first, size in plan.arena_parts]


def stored(specs: Iterable[Mapping[str, Any]], public: Mapping[str, str]) -> str:
    """Names and dtypes, or 8 bits, of the states of a parameter; counters and scales are left out."""
    words = []
    for spec in specs:
        if is_counter(spec) or not spec["shape"] or spec["role"].endswith(SCALES):
            continue
        at_random = " at random" if spec["rounded"] and spec["quantized"] is None else ""
        kind = "8 bits" if spec["quantized"] is not None else spec["dtype"] + at_random
        words.append(f"{key_of(spec['role'], public)} {kind}")
    return ", ".join(words)


def reshard_states(
    plan: Plan,
    groups: list[dict[str, Any]],
    state: Mapping[Tensor, dict[str, Any]],
    public_names: Names,
) -> None:
    """Moves the states that exist into the layouts of their parameters. Every rank has to call this."""
    for param, specs, algorithm in zip(parameters(groups), plan.state_specs(), plan.algorithms, strict=True):
        public = public_names.get(algorithm, {})
        own = state.get(param, {})
        for spec in specs:
            key = key_of(spec["role"], public)
            if not is_counter(spec) and isinstance(own.get(key), Tensor):
                own[key] = moved_state(own[key], param, spec)


def _start(spec: Mapping[str, Any], stream: int, param: Tensor, reserve: Reserve | None) -> Tensor:
    """The part of a new state that this process holds, in the kind of memory in which its parameter is."""
    shape, dtype = tuple(spec["stored"]), getattr(torch, spec["dtype"])
    if spec["seed"] is None:
        return zeros(shape, dtype, param.device, reserve, pin=param.is_pinned())
    normal = torch.empty(shape, dtype=torch.float32, device="cpu")
    fill_normal(normal, spec["seed"], stream, spec["shape"], spec["spans"])
    return _pinned(normal.to(param.device, dtype)) if param.is_pinned() else normal.to(param.device, dtype)


def _pinned(own: Tensor) -> Tensor:
    """A tensor of the CPU in pinned memory; the same one where it is there, or none can be had."""
    made = None if own.is_pinned() else empty_pinned(own.shape, own.dtype)
    return own if made is None else made.copy_(own)


def pin(groups: list[dict[str, Any]], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Moves the states of parameters in pinned memory into pinned memory, except counters."""
    for _, param, own in entries_of(state, groups):
        if not local(param).is_pinned():
            continue
        for key, value in own.items():
            if is_own(key) and isinstance(value, Tensor) and value.ndim and _is_pageable(local(value)):
                held = _pinned(local(value))
                own[key] = value if held is local(value) else with_local(value, held)


def _is_pageable(own: Tensor) -> bool:
    """Returns True for a non-empty tensor of the CPU, whose memory might be pinned."""
    return own.is_cpu and own.numel() > 0


def own_copies(incoming: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[Any, Any]:
    """Copies the states of a state dict: by parameter, on its device, in the dtypes that were saved.

    ``Optimizer.load_state_dict`` takes entries under parameters as they are. Those under the keys of a state
    dict it casts to the parameter's dtype, and for each tensor it searches the groups, which is quadratic.

    Args:
        incoming: the state dict, whose groups list the keys of its states in the order of the parameters.
        groups: those of the optimizer. Where they have another number of parameters, torch says so.
    """
    targets = {}
    for group, target in zip(incoming["param_groups"], groups, strict=False):
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for key, param in zip(group["params"], target["params"], strict=False):
            targets[key] = param, counts_there

    def copied(key: Any, value: Any) -> tuple[Any, Any]:
        if key not in targets:
            return key, value
        param, counts_there = targets[key]
        return param, _copied(value, param.device, counts_there=counts_there)

    return dict(copied(key, value) for key, value in incoming["state"].items())


def has_memory(value: Tensor) -> bool:
    """False for a tensor of torch's own class whose storage is shorter than its elements need."""
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout != torch.strided or value.is_meta:
        return True
    if value.is_nested or value.numel() == 0:
        return True
    last = value.storage_offset() + sum(
        (n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True)
    )
    return (last + 1) * value.element_size() <= value.untyped_storage().nbytes()


def _copied(value: Any, where: torch.device, key: object = None, *, counts_there: bool) -> Any:
    """Copies a state or a container of states to a device; counters keep theirs unless ``counts_there``."""
    if isinstance(value, Tensor):
        if not has_memory(value):
            raise ValueError(
                f"a state of shape {tuple(value.shape)} has no memory: its storage was freed or cut"
            )
        own = value.detach()
        stays = own.device == where or (key == "step" and not counts_there)
        return own.clone() if stays else own.to(device=where)
    if isinstance(value, dict):
        return {k: _copied(v, where, k, counts_there=counts_there) for k, v in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        kind: Any = type(value)
        return kind(_copied(v, where, counts_there=counts_there) for v in value)
    return value


def existing(
    groups: list[dict[str, Any]], state: Mapping[Tensor, Mapping[str, Any]], public_names: Names
) -> list[dict[str, tuple[str, tuple[int, ...]]]]:
    """Dtype and shape of the states that exist, by role, for each parameter: the plan takes them as is."""
    if not state:
        return []
    entries_of(state, groups)
    # Another algorithm than its group's may step a parameter; a key has one role in all of them.
    roles = {key: role for public in public_names.values() for role, key in public.items()}
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
                    and is_own(key)
                    and (value.is_floating_point() or value.dtype == torch.uint8)
                    and not key.startswith("step")
                    and key != masters.KEY  # of one dtype
                }
            )
    return rows


def whole(
    own: Mapping[str, Any], key: str, specs: Mapping[str, Mapping[str, Any]], role: str, groups: Groups
) -> Tensor:
    """Gathers a state on every rank and dequantizes it. ``specs`` are those of all roles."""

    def part(ending: str) -> Tensor:
        value, spec = own[key + ending], specs[role + ending]
        return full(value).detach() if spec["owned"] is None else collected(value, spec, groups)

    if specs[role]["quantized"] is None:
        return part("")
    (block, signed), q8 = specs[role]["quantized"], part("")
    return dequantize_blockwise(q8, part(SCALES), block, signed, stream_of(q8))


def average_momenta(
    states: Iterable[dict[str, Any]], specs: Iterable[list[dict[str, Any]]], groups: Iterable[Any]
) -> None:
    """Replaces momenta by their means over process groups, in place; every rank of them has to call this."""
    plain, quantized = [], []
    for own, listed in zip(states, specs, strict=True):
        for spec in listed:
            if spec["role"] == "momentum" and "momentum" in own:
                if spec["quantized"] is None:
                    plain.append(local(own["momentum"]))
                else:
                    q8, scales = local(own["momentum"]), local(own["momentum" + SCALES])
                    quantized.append((q8, scales, spec["quantized"]))
    means = [
        dequantize_blockwise(q8, scales, block, signed, stream_of(q8))
        for q8, scales, (block, signed) in quantized
    ]
    groups = list(groups)
    collectives.average(plain, groups)
    collectives.average(means, groups)
    for (q8, scales, (block, signed)), mean in zip(quantized, means, strict=True):
        quantized_mean = quantize_blockwise(mean, block, signed, stream_of(mean))
        for target, value in zip((q8, scales), quantized_mean, strict=True):
            target.copy_(value)
