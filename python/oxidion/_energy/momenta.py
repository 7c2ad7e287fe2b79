"""Tensors of a checkpoint with matrices: an optimizer's momenta with the settings of groups, or weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxidion._core.base import OxOptimizer
from oxidion._core.state import SCALES
from oxidion._energy.files import Entry, Unfit, entries, printable, whole
from oxidion._oxidion import dequantize_blockwise

KEYS = ("momentum", "momentum_buffer", "exp_avg")
"""State keys of momenta, those of the classes here and of torch's optimizers."""
PROJECTIONS = ("proj", "projector")
"""State keys whose presence means that moments are those of a projected gradient."""
WEIGHTS = "weights"
"""Word that asks for the weights of a model where a state key asks for states."""

States = dict[tuple[str, str], dict[str, Entry]]
"""Entries of state by key, for each optimizer of a checkpoint and each of its parameters."""


class Candidate(NamedTuple):
    """A tensor whose matrices may be looked at.

    Attributes:
        name: of the parameter.
        shape: of the tensor.
        settings: of the parameter's group.
        skipped: reason for which it is left out; None where it is not.
        entries: the values that are kept for the parameter.
        key: of the tensor among these.
    """

    name: str
    shape: tuple[int, ...]
    settings: Mapping[str, Any]
    skipped: str | None
    entries: Mapping[str, Entry]
    key: str

    def value(self) -> Tensor:
        """Returns the tensor, dequantized where it is stored in 8 bits.

        Raises:
            Unfit: for anything but a dense tensor of floating-point numbers or of 8-bit values with scales.
            ValueError: for incomplete tensors, and for settings that do not fit.
        """
        tensor = whole(self.entries[self.key].read(), self.name)
        scales = self.entries.get(self.key + SCALES)
        if scales is not None:
            block = self.settings.get("block_size", 256)
            if type(block) is not int or not 0 < block < 2**31:
                raise ValueError(f"{self.name}: block_size must be a positive integer, got {block!r}")
            found = whole(scales.read(), f"{self.name}, {SCALES}")
            if (tensor.dtype, found.dtype) != (torch.uint8, torch.float32):
                raise ValueError(
                    f"{self.name}: 8-bit values need scales in float32, got {tensor.dtype} with {found.dtype}"
                )
            return dequantize_blockwise(tensor.contiguous(), found.contiguous(), block, True)
        if not tensor.is_floating_point():
            raise Unfit(f"no floating-point numbers: {tensor.dtype}")
        return tensor


def candidates(path: Path, key: str | None, names: Path | None = None) -> tuple[str, list[Candidate]]:
    """The tensors of a checkpoint that may have matrices to look at.

    Args:
        path: of the checkpoint.
        key: of the states; "weights" asks for the tensors of the model. None: the first of `KEYS` that is
            there, else the tensors of the model.
        names: a checkpoint of the model, for the names of parameters where the optimizer's has none.

    Returns:
        The key, and the tensors in the order of the checkpoint.

    Raises:
        OSError: where a checkpoint cannot be read.
        ValueError: for a checkpoint that is none, and one without such tensors.
    """
    found = entries(path)
    states, groups, model = _sorted(found, key)
    if key is None:
        there = {each for own in states.values() for each in own}
        key = next((each for each in KEYS if each in there), WEIGHTS)
    if key == WEIGHTS:
        made = [
            Candidate(name, entry.shape, {}, None, {name: entry}, name)
            for name, entry in model.items()
            if entry.shape is not None
        ]
        if not made:
            raise ValueError(f"{path} holds no tensors of a model")
        return key, made
    made = _momenta(states, groups, key, model if names is None else entries(names))
    if not made:
        keys = sorted({each for own in states.values() for each, entry in own.items() if entry.shape})
        raise ValueError(f"--key: {path} has no states {key!r}; those of its optimizer are {keys}")
    return key, made


Groups = dict[tuple[str, str], dict[str, Entry]]
"""Entries of groups by key, for each optimizer of a checkpoint and each of its groups."""


def _sorted(found: Mapping[str, Entry], key: str | None) -> tuple[States, Groups, dict[str, Entry]]:
    """States by parameter, settings by group, and whatever else there is: the model."""
    kinds: dict[str, dict[tuple[str, str], dict[str, Entry]]] = {"state": {}, "param_groups": {}}
    places = {name: _place(name) for name in found}
    optimizers = {
        place[1]
        for place in places.values()
        if place and (place[0] == "param_groups" or place[3] in (*KEYS, key))
    }
    model = {}
    for name, entry in found.items():
        place = places[name]
        if place is None or place[1] not in optimizers:
            model[name] = entry
        else:
            kind, optimizer, of, last = place
            kinds[kind].setdefault((optimizer, of), {})[last] = entry
    return kinds["state"], kinds["param_groups"], model


def _place(name: str) -> tuple[str, str, str, str] | None:
    """Kind, optimizer, parameter or group, and key of what an optimizer's state dict would have there."""
    words = name.split(".")
    for at, word in enumerate(words[:-2]):
        if word in ("state", "param_groups"):
            return word, "".join(f"{each}." for each in words[:at]), ".".join(words[at + 1 : -1]), words[-1]
    return None


def _momenta(states: States, groups: Groups, key: str, model: Mapping[str, Entry]) -> list[Candidate]:
    settings, names, order = _of_groups(groups)
    names = names or _names_by_order(states, key, order, model)
    several = len({optimizer for optimizer, _ in states}) > 1
    chosen = _of_matrices([settings.get(param, {}).get("algorithm") for param in states])
    made = []
    for (optimizer, param), own in states.items():
        shape = own[key].shape if key in own else None
        if shape is None:
            continue
        about = settings.get((optimizer, param), {})
        name = names.get((optimizer, param), f"parameter {param}" if param.isdigit() else param)
        reason = None
        if any(each in own for each in PROJECTIONS) or any(
            f"{each}.ortho_matrix" in own for each in PROJECTIONS
        ):
            reason = "of a projected gradient"
        elif chosen and str(about.get("algorithm")) not in chosen:
            reason = f"of {about.get('algorithm')}"
        made.append(Candidate(f"{optimizer}{name}" if several else name, shape, about, reason, own, key))
    return made


def _of_matrices(algorithms: Iterable[Any]) -> set[str]:
    """The algorithms of matrices, where a checkpoint has such and others."""
    there = {each for each in algorithms if isinstance(each, str)}
    known = OxOptimizer._registry
    found = {each for each in there if each in known and known[each]._MATRIX}
    return found if found != there else set()


WANTED = (
    "params",
    "param_names",
    "algorithm",
    "flatten",
    "interleaved",
    "num_heads",
    "split_sizes",
    "split_dim",
    "block_size",
)
"""Settings of a group that say something about its matrices."""


def _of_groups(
    groups: Groups,
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], str], list[tuple[str, str]]]:
    """Settings and names by parameter, and the parameters in order."""
    settings: dict[tuple[str, str], dict[str, Any]] = {}
    names = {}
    for (optimizer, group), held in groups.items():
        read = {key: value for key in WANTED if key in held and _is_plain(value := held[key].read())}
        listed = read.pop("params", None)
        # Where each parameter has its own settings, as in a flattened state dict, the group is its name.
        params = [str(param) for param in listed] if isinstance(listed, (list, tuple)) else [group]
        given = read.pop("param_names", None)
        for param in params:
            settings[optimizer, param] = read
        if isinstance(given, (list, tuple)) and len(given) == len(params):
            names.update(
                {(optimizer, param): printable(str(name)) for param, name in zip(params, given, strict=True)}
            )
    return settings, names, list(settings)


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, str, list, tuple))


def _names_by_order(
    states: States, key: str, order: list[tuple[str, str]], model: Mapping[str, Entry]
) -> dict[tuple[str, str], str]:
    """Names of the model's parameters, if there are as many and all shapes agree in order."""
    tensors = [(name, entry.shape) for name, entry in model.items() if entry.shape is not None]
    if not order or len(tensors) != len(order) or not all(param.isdigit() for _, param in order):
        return {}
    for param, (_, shape) in zip(order, tensors, strict=True):
        own = states.get(param, {}).get(key)
        if own is not None and own.shape != shape:
            return {}
    return {param: name for param, (name, _) in zip(order, tensors, strict=True)}
