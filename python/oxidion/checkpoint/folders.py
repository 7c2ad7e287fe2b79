"""Folders of torch.distributed.checkpoint that microsoft/dion's training script writes and reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from oxidion._core import loading
from oxidion._core.schema import SCHEDULER_KEYS
from oxidion._core.state import is_own
from oxidion._dist import folders
from oxidion._dist.folders import Entry
from oxidion.checkpoint.sources import import_state_dict
from oxidion.checkpoint.whole import by_all

if TYPE_CHECKING:
    from oxidion._core.base import OxOptimizer

Folder = str | os.PathLike[str]
Found = Mapping[folders.Path, Entry]

FORMATS = ("microsoft-dion", "dion")
"""Two words for the one format that there is."""
KEPT = ("momentum", "variance", "Q", "variance_neuron")
"""States that a run goes on from."""
_STATES = {
    "dion": ("momentum", "Q"),
    "muon": ("momentum",),
    "normuon": ("momentum", "variance_neuron"),
    "dion2": ("momentum",),
    "nordion2": ("momentum", "variance_neuron"),
    "adamw": ("momentum", "variance"),
    "lion": ("momentum",),
}
"""States of a parameter there, by algorithm."""
_COMMON = ("algorithm", "step", "lr", "beta1", "beta2", "betas", "weight_decay", "epsilon")
_FAMILY = ("flatten", "adjust_lr", "num_heads", "split_sizes")
_GROUPS = {
    "dion": ("rank_fraction", "rank_multiple_of", "mu", "oversample"),
    "muon": (*_FAMILY, "mu", "cautious_wd", "nesterov"),
    "normuon": (*_FAMILY, "mu", "muon_beta2", "cautious_wd", "nesterov"),
    "dion2": (*_FAMILY, "ef_decay", "fraction", "selection_scope"),
    "nordion2": (*_FAMILY, "mu", "muon_beta2", "fraction", "selection_scope"),
}
"""Keys of groups there in addition to the common ones, by the algorithm of the class."""


def load_dcp(
    folder: Folder, model: torch.nn.Module, optimizer: OxOptimizer, source: str = "microsoft-dion"
) -> dict[str, Any]:
    """Loads a checkpoint that microsoft/dion's training script wrote: the model and the optimizer.

    The folder is one of ``torch.distributed.checkpoint`` (DCP) with the entries "model" and "optimizer", as
    its ``get_state_dict`` names them. Each rank reads its part of each tensor in place. The mesh may be
    another one than that of the ranks that wrote it. All ranks call this together.

    Parameters go by their names. A group gets the values of the group there that has its parameters, and
    keeps its own values of the keys that microsoft/dion does not know. AdamW and Lion there compute with
    ``beta1`` and ``beta2`` and not with a ``betas`` of a group, so those two count. The states keep the
    dtypes that they were saved with. Everything is compared before the model and the states are read.

        extra = oxidion.checkpoint.load_dcp("checkpoints/checkpoint", model, optimizer)
        first_step = extra["step"] + 1

    DCP unpickles values that are no tensors: load folders that you trust.

    Args:
        folder: that ``dcp.save`` wrote.
        model: with the modules of the model that was saved.
        optimizer: over parameters of the model, of the class that has the name of the one that was saved.
        source: "microsoft-dion", or "dion" for short.

    Returns:
        The other entries of the checkpoint that are no tensors, such as "step".

    Raises:
        TypeError: for an optimizer that is none of `oxidion`'s.
        ValueError: for an unknown source, for a folder that is no such checkpoint, for parameters and states
            that it lacks or that have other shapes there, and for groups that it has otherwise.
    """
    _check_format("source", source)
    _check_class(optimizer)
    where = f"the checkpoint in {os.fspath(folder)!r}"
    weights = folders.model_states(model)
    with by_all():
        found = folders.entries(folder)
        names = _names(model, optimizer)
        _check_weights(found, weights, where)
    is_small = {path: entry for path, entry in found.items() if _is_setting(path, entry)}
    values = folders.read(
        folder,
        {
            entry.key: torch.zeros(entry.shape, dtype=entry.dtype) if entry.shape is not None else None
            for entry in is_small.values()
        },
    )
    settings = {path: values[entry.key] for path, entry in is_small.items()}
    with by_all():
        groups = _own_groups(_groups(settings, where), names, optimizer, where)
        taken = {"state": {}, "param_groups": groups}
        incoming = import_state_dict(taken, "microsoft-dion", optimizer=optimizer)
    optimizer.init_state()
    with by_all():
        states = _states_to_read(found, names, optimizer, where)
        _check_together(incoming, states, optimizer, where)
    read = folders.read(
        folder,
        {
            **{found["model", name].key: value for name, value in weights.items()},
            **{key: value for own in states for key, value in own.values()},
        },
    )
    folders.load_model(model, {name: read[found["model", name].key] for name in weights})
    held = {at: {key: read[entry] for key, (entry, _) in own.items()} for at, own in enumerate(states) if own}
    optimizer.load_state_dict({**incoming, "state": held})
    return _nested({path: value for path, value in settings.items() if path[0] != "optimizer"})


def save_dcp(
    folder: Folder,
    model: torch.nn.Module,
    optimizer: OxOptimizer,
    form: str = "microsoft-dion",
    *,
    extra: Mapping[str, Any] | None = None,
    q_side: Literal["rows", "short"] | None = None,
) -> None:
    """Saves a checkpoint that microsoft/dion's training script can load: the model and the optimizer.

    The folder is one of ``torch.distributed.checkpoint`` (DCP) with the entries "model" and "optimizer". The
    latter has the states and group keys that microsoft/dion's class of the same name asks for. All
    ranks call this together; it calls ``optimizer.synchronize_for_checkpoint()``. Settings that
    microsoft/dion does not know are left out. The AdamW of its Dion counts steps by group: a parameter that
    had fewer gradients than its group has steps gets the count of the group.

        with oxidion.checkpoint.whole_folder("run", step) as place:
            extra = {"step": step, "wandb_id": None}
            oxidion.checkpoint.save_dcp(place, model, optimizer, extra=extra)

    DCP asks for every key that the loading side has. Its ``train.py`` has the entries "train_loader",
    "val_loader", "step" and "wandb_id" besides. ``load_dcp`` returns them: give them here as ``extra``.

    Args:
        folder: to write to.
        model: whose parameters the optimizer has.
        optimizer: a `Dion`, `Muon`, `NorMuon`, `Dion2` or `NorDion2`.
        form: "microsoft-dion", or "dion" for short.
        extra: further entries of the checkpoint.
        q_side: the side of each matrix to which microsoft/dion's Q belongs: "rows" under FSDP2, "short" in
            one process and with DDP. A Q of the other side is replaced by the momentum times Q with columns
            of norm 1, so there must be a momentum: take a step before. None keeps each Q.

    Raises:
        ValueError: for an unknown form or side, for classes, algorithms and states that microsoft/dion does
            not have, and for an ``extra`` with the names "model" or "optimizer".
    """
    _check_format("form", form)
    _check_class(optimizer)
    if q_side not in (None, "rows", "short"):
        raise ValueError(f"q_side must be None, 'rows' or 'short', got {q_side!r}")
    extra = dict(extra or {})
    if taken := extra.keys() & {"model", "optimizer"}:
        raise ValueError(f"extra must not have {sorted(taken)}: save_dcp() writes these entries")
    if optimizer._ALGORITHM not in _GROUPS:
        raise ValueError(
            f"microsoft/dion has no class {type(optimizer).__name__}: it can load checkpoints of Dion, Muon, "
            "NorMuon, Dion2 and NorDion2. Save with dcp.save()"
        )
    names = _names(model, optimizer)
    optimizer.init_state()
    optimizer.synchronize_for_checkpoint()
    saved = folders.optimizer_states(model, optimizer)
    algorithms: dict[str, str] = {}
    groups = []
    for number, group in enumerate(saved["param_groups"]):
        if group["algorithm"] not in _STATES or group["algorithm"] in _GROUPS.keys() - {optimizer._ALGORITHM}:
            raise ValueError(
                f"group {number}: {type(optimizer).__name__} of microsoft/dion has no algorithm "
                f"{group['algorithm']!r}"
            )
        algorithms |= dict.fromkeys(group["params"], group["algorithm"])
        groups.append(_their_group(group, optimizer))
    states = {
        name: _their_state(name, saved["state"][name], algorithms[name], optimizer)
        for name in names
        if saved["state"].get(name)
    }
    for own in states.values():
        if q_side is not None and "Q" in own:
            own["Q"] = _q_of(own["momentum"], own["Q"], q_side)
    state = {"model": folders.model_states(model), "optimizer": {"state": states, "param_groups": groups}}
    folders.write(folder, {**state, **extra})


def _check_format(argument: str, value: object) -> None:
    if value not in FORMATS:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, FORMATS))}, got {value!r}")


def _check_class(optimizer: object) -> None:
    if not hasattr(optimizer, "_ALGORITHM"):
        raise TypeError(
            f"optimizer must be one of oxidion's classes that step all parameters, got "
            f"{type(optimizer).__name__}"
        )


def _names(model: torch.nn.Module, optimizer: OxOptimizer) -> list[str]:
    """The names of an optimizer's parameters in checkpoints, in the order of its groups."""
    params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    known = set(map(id, model.parameters()))
    if any(id(param) not in known for param in params):
        raise ValueError("optimizer has parameters that model does not have: give the model that it trains")
    return folders.names_of(model, params)


def _is_setting(path: folders.Path, entry: Entry) -> bool:
    """True for a value of a group, which may be a tensor, and for what is neither model nor optimizer."""
    if path[0] == "optimizer":
        return path[1:2] == ("param_groups",)
    return path[0] != "model" and entry.shape is None


def _check_weights(found: Found, weights: Mapping[str, Any], where: str) -> None:
    """Refuses a checkpoint without the tensors of a model, or with other shapes of them."""
    heads = sorted({str(path[0]) for path in found})
    for part in ("model", "optimizer"):
        if part not in heads:
            raise ValueError(
                f"{where} must have an entry {part!r}, as that of microsoft/dion's train.py, and has {heads}"
            )
    for name, value in weights.items():
        entry = found.get(("model", name))
        if entry is None:
            raise ValueError(
                f"{where} has no {name!r} of the model. Give the model that was saved, with the same names "
                "of its modules"
            )
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if entry.shape != shape:
            raise ValueError(f"{name}: the model's has shape {shape}, that of {where} {entry.shape}")


def _nested(values: Mapping[folders.Path, Any]) -> dict[str, Any]:
    """The dict in which values lie at their paths; a list is a dict by index."""
    made: dict[str, Any] = {}
    for path, value in values.items():
        at: dict[Any, Any] = made
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return made


def _groups(settings: Mapping[folders.Path, Any], where: str) -> list[dict[str, Any]]:
    """The groups of a checkpoint; their "params" are names."""
    of_groups = {path[2:]: value for path, value in settings.items() if path[:2] == _GROUP_PATH}
    nested: dict[Any, dict[str, Any]] = _nested(of_groups)
    order = sorted(nested, key=lambda number: (len(str(number)), str(number)))
    groups = [nested[number] for number in order if isinstance(nested[number], dict)]
    for number, group in enumerate(groups):
        names = group.get("params")
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(
                f"'params' of group {number} of {where} must be a list of names, as get_state_dict() of "
                f"torch.distributed.checkpoint.state_dict makes it, got {names!r}"
            )
    if not groups:
        raise ValueError(
            f"{where} must have 'param_groups' of the optimizer, one dict each, as get_state_dict() of "
            "torch.distributed.checkpoint.state_dict makes them without flatten_optimizer_state_dict"
        )
    return groups


_GROUP_PATH = ("optimizer", "param_groups")


def _own_groups(
    groups: list[dict[str, Any]], names: list[str], optimizer: OxOptimizer, where: str
) -> list[dict[str, Any]]:
    """For each group of an optimizer the values of the group there that has its parameters, by position."""
    holder = {name: number for number, group in enumerate(groups) for name in group["params"]}
    if lost := [name for name in names if name not in holder]:
        raise ValueError(f"{lost[0]}: {where} has no such parameter in the optimizer's groups")
    if others := sorted(holder.keys() - set(names)):
        raise ValueError(
            f"{where} has a parameter {others[0]!r} in the optimizer's groups, and the optimizer here does "
            "not step it"
        )
    made, first = [], 0
    for number, own in enumerate(optimizer.param_groups):
        count = len(own["params"])
        theirs = {holder[name] for name in names[first : first + count]}
        if len(theirs) > 1:
            raise ValueError(
                f"group {number} of the optimizer has parameters of the groups {sorted(theirs)} of {where}. "
                "Build the optimizer with the groups of the saved run"
            )
        values = dict(groups[theirs.pop()]) if theirs else {"algorithm": own["algorithm"], "lr": own["lr"]}
        for key in ("lr", "weight_decay"):
            if isinstance(values.get(key), Tensor) and not isinstance(own[key], Tensor):
                values[key] = values[key].item()
        made.append({**values, "params": list(range(first, first + count))})
        first += count
    return made


def _states_to_read(
    found: Found, names: list[str], optimizer: OxOptimizer, where: str
) -> list[dict[str, tuple[str, Tensor]]]:
    """For each parameter, by its state's key, the key of the entry and the tensor to be filled."""
    there: dict[str, dict[str, Entry]] = {}
    for path, entry in found.items():
        if path[:2] == ("optimizer", "state") and len(path) == 4:
            there.setdefault(str(path[2]), {})[str(path[3])] = entry
    made, at = [], 0
    for number, group in enumerate(optimizer.param_groups):
        own_names = names[at : at + len(group["params"])]
        at += len(own_names)
        stepped = [name for name, p in zip(own_names, group["params"], strict=True) if optimizer.state.get(p)]
        lost = [name for name in stepped if name not in there]
        if lost and len(lost) < len(stepped):
            raise ValueError(
                f"{lost[0]}: {where} has no states of it, and has some of other parameters of group "
                f"{number}. It was frozen or unused in that run. To begin it again, set its requires_grad to "
                "False while the checkpoint is loaded"
            )
        idle = [name for name in own_names if name in there and name not in stepped]
        if idle:
            logging.getLogger("oxidion").warning(
                "group %d: the checkpoint has states of %d parameters that require no gradient here, the "
                "first of them %s: they are left out",
                *(number, len(idle), idle[0]),
            )
        for name, param in zip(own_names, group["params"], strict=True):
            own = optimizer.state.get(param, {})
            held = there.get(name, {}) if own else {}
            rows = _of_parameter(name, param, own, held, where) if held else ()
            made.append({key: (entry.key, tensor) for key, entry, tensor in rows})
    return made


def _check_together(
    incoming: Mapping[str, Any],
    states: list[dict[str, tuple[str, Tensor]]],
    optimizer: OxOptimizer,
    where: str,
) -> None:
    """Refuses groups with states that no step could use, while nothing has been read."""
    held = {at: {key: tensor for key, (_, tensor) in own.items()} for at, own in enumerate(states) if own}
    groups = [dict(group) for group in incoming["param_groups"]]
    try:
        loading.check(optimizer, {**incoming, "param_groups": groups, "state": held})
    except ValueError as error:
        raise ValueError(f"{where} cannot be loaded: {error}") from error


def _of_parameter(
    name: str, param: Tensor, own: Mapping[str, Any], held: Mapping[str, Entry], where: str
) -> Iterator[tuple[str, Entry, Tensor]]:
    """The states of a parameter that are to be read: the key, the entry and the tensor to be filled."""
    for key in KEPT:
        if key in own and key not in held:
            raise ValueError(
                f"{name}: {where} has no state {key!r}, which the optimizer goes on from. It has "
                f"{sorted(held)}, those of another algorithm"
            )
    for key, entry in held.items():
        if entry.shape is None or entry.dtype is None or not is_own(key):
            continue
        value = own.get(key)
        if key in KEPT and entry.shape not in (wanted := _shapes(key, param, value)):
            raise ValueError(
                f"{name}: state {key!r} must have shape {wanted[0]}, that of {where} has {entry.shape}"
            )
        if isinstance(value, Tensor) and value.dtype == entry.dtype and tuple(value.shape) == entry.shape:
            yield key, entry, value
        else:
            has_own_layout = isinstance(value, Tensor) and value.ndim and entry.shape != tuple(param.shape)
            like: Any = value if has_own_layout else param
            yield key, entry, folders.to_fill(entry.shape, entry.dtype, like)


def _shapes(key: str, param: Tensor, value: Any) -> list[tuple[int, ...]]:
    """The shapes that a state may have; Q belongs to either side, and its rank is checked with the group."""
    if key in ("momentum", "variance"):
        return [tuple(param.shape)]
    own = tuple(value.shape) if isinstance(value, Tensor) else ()
    if key != "Q" or len(own) < 2:
        return [own]
    ranks = range(1, min(param.shape[-2:]) + 1)
    return [own, *((*own[:-2], side, rank) for side in param.shape[-2:] for rank in ranks)]


def _their_group(group: Mapping[str, Any], optimizer: OxOptimizer) -> dict[str, Any]:
    """A group with the keys that microsoft/dion's may have; "initial_lr" is what its scheduler adds."""
    keys = (*_COMMON, *_GROUPS[optimizer._ALGORITHM])
    made = {key: group[key] for key in keys if group.get(key) is not None or key == "adjust_lr"}
    for key in keys:
        if key not in made and optimizer.defaults.get(key) is not None:
            made[key] = optimizer.defaults[key]
    by_schedulers = {key: group[key] for key in sorted(SCHEDULER_KEYS & group.keys())}
    return {"initial_lr": group["lr"], **by_schedulers, **made, "params": list(group["params"])}


def _their_state(
    name: str, state: Mapping[str, Any], algorithm: str, optimizer: OxOptimizer
) -> dict[str, Any]:
    """The states that microsoft/dion has of a parameter; refuses what has no place there."""
    keys = _STATES[algorithm]
    counters = {"step", "step_dev"}
    alien = [key for key in state if is_own(key) and key not in {*keys, *counters}]
    quantized = [key for key in keys if state[key].dtype == torch.uint8]
    if alien or quantized:
        raise ValueError(
            f"{name}: microsoft/dion has no place for the state {(alien or quantized)[0]!r}. Save with "
            "dcp.save(), or train without the setting that needs it (average, master_weights, state_bits, or "
            "norms of weights that are held)"
        )
    made = {key: state[key] for key in keys}
    if algorithm == "adamw" and optimizer._ALGORITHM != "dion":
        made["step_dev"] = state["step_dev"]
    return made


def _q_of(momentum: Tensor, q: Tensor, side: str) -> Tensor:
    """Q of a matrix on a side: itself, or the momentum times Q with columns of norm 1."""
    rows, columns = momentum.shape
    wanted = rows if side == "rows" else min(rows, columns)
    if q.shape[0] == wanted:
        return q
    return folders.product(momentum if wanted == rows else momentum.mT, q)
