"""Group keys: what every algorithm shares, what others add, and how the spellings of a key go together."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from oxidion._core import averages, norms, validate
from oxidion._core.validate import Field, Word
from oxidion._oxidion import algorithms

COMMON: dict[str, Field] = {
    "lr": validate.number(1e-3),
    "weight_decay": validate.number(0.0),
    "algorithm": validate.word(None, *algorithms()),
    "step": validate.count(0, low=0),
    "cautious_wd": validate.flag(False),
    "maximize": validate.flag(False),
    "foreach": validate.flag(None),
    "capturable": validate.flag(False),
    "differentiable": validate.flag(False),
    "strict": validate.flag(True),
    "max_batch_bytes": validate.count(None, optional=True),
    "workspace_limit": validate.memory(),
    "state_dtype": validate.dtype(),
    "state_bits": validate.one_of(32, 8, 32),
    "block_size": validate.one_of(256, 8, 16, 32, 64, 128, 256, 512),
    "min_quant_numel": validate.count(4096, low=0),
    "stochastic_rounding": validate.flag(False),
    "master_weights": validate.flag(False),
    "seed_by": validate.word("name", "name", "position"),
    "weight_norm": validate.word("free", "free", "hyperball", "floor", "row_floor"),
    "weight_norm_floor": validate.number(0.35),
    **averages.SCHEMA,
}
"""Group keys of every algorithm, which groups have from their construction on.

``seed_by``: whether the random numbers of a parameter depend on its name or on its position. Groups without
names have "position", and so has a group with names that has loaded a checkpoint of one without.
"""

ONLY_ARGUMENTS: dict[str, Any] = {"init_state": False, "distributed_mesh": None}
"""Defaults of the arguments of every class that are no group keys."""

SCHEDULER_KEYS = {
    "initial_lr",
    "max_lr",
    "min_lr",
    "base_lr",
    "swa_lr",
    "base_momentum",
    "max_momentum",
    "lr_scale",
}
FOREIGN_KEYS = {"params", "param_names", "name", "fused", "decoupled_weight_decay", *SCHEDULER_KEYS}
"""Keys that schedulers, frameworks and checkpoints of other optimizers add."""

SPELLINGS = {"eps": "epsilon", "epsilon": "eps"}
"""torch's and the orthonormal family's word for the same thing."""


def known_keys(schemas: Mapping[str, Mapping[str, Field]]) -> set[str]:
    """Every key that a group may have, whatever its algorithm."""
    return FOREIGN_KEYS.union(COMMON, *schemas.values())


def translate(
    settings: dict[str, Any], words: Mapping[str, Word], where: str, *, latest: bool = False
) -> None:
    """Replaces other optimizers' words for group keys by the keys, in place.

    Args:
        settings: a group, or arguments of a constructor.
        words: words by name.
        where: what an error calls the settings.
        latest: whether a word was written later than its key and wins over it.

    Raises:
        ValueError: for a value out of range, and for a word and its key with different values.
    """
    for name, word in words.items():
        if name not in settings:
            continue
        given = validate.plain(name, settings[name])
        validate.check_group({name: given}, {name: word.field}, set(), where)
        del settings[name]
        value = word.values.get(given, given)
        if not latest and word.key in settings and settings[word.key] != value:
            raise ValueError(
                f"{name} and {word.key} are two words for one setting and must be equal, got "
                f"{name}={given!r} and {word.key}={settings[word.key]!r} ({where}): leave one of them out"
            )
        settings[word.key] = value


def fill_defaults(
    group: dict[str, Any], own: Mapping[str, Field], schemas: Mapping[str, Mapping[str, Field]]
) -> None:
    """Gives a group its algorithm's defaults where the class's are of another kind.

    ``eps`` is a number in one algorithm and two in another, ``beta1`` a mirror of ``betas`` or a setting of
    its own: what the class has as its default would say nothing there. Nor does it for keys of `norms.OWN`.
    """
    schema = schemas.get(group.get("algorithm", ""), own)
    for key in norms.OWN if schema is not own else ():
        group.setdefault(key, COMMON[key].default)
    for key, field in schema.items():
        same = own.get(key, own.get(SPELLINGS.get(key, ""), COMMON.get(key, field)))
        if same.wanted != field.wanted:
            group.setdefault(key, field.default)


def spell(
    group: dict[str, Any],
    defaults: Mapping[str, Any],
    own_schema: Mapping[str, Field],
    schemas: Mapping[str, Mapping[str, Field]],
) -> None:
    """Turns other spellings of keys and values into the class's own; completes betas given in one form."""
    schema = schemas.get(group.get("algorithm", ""), own_schema)
    for other, own in SPELLINGS.items():
        if other in schema and own in schema:
            continue  # two settings
        alien = other in schema and own in own_schema and schema[other].wanted != own_schema[own].wanted
        # The word of the class means something else there.
        taken = other not in schema and own in schema and other in own_schema
        taken = taken and own_schema[other].wanted != schema[own].wanted
        if other in group and ((own in defaults and not alien) or taken):
            group[own] = group.pop(other)
            if other in own_schema and own in own_schema:
                group[other] = group[own]  # the class has both words
    if not mirrors_betas(schema):
        return
    betas = group.get("betas")
    first, second = group.get("beta1"), group.get("beta2")
    if "beta1" not in defaults or (betas is None and first is None and second is None):
        return
    default = defaults["betas"] if validate.is_pair(defaults.get("betas")) else schema["betas"].default
    if betas is None:
        group["betas"] = (default[0] if first is None else first, default[1] if second is None else second)
    elif (first is not None and first != betas[0]) or (second is not None and second != betas[1]):
        warnings.warn(f"betas={betas} wins over beta1={first}, beta2={second}", stacklevel=5)
    if validate.is_pair(group["betas"]):
        group["beta1"], group["beta2"] = group["betas"]


def mirrors_betas(schema: Mapping[str, Field]) -> bool:
    """Returns True for algorithms whose groups mirror ``betas`` in ``beta1`` and ``beta2``."""
    return "betas" in schema and validate.is_pair(schema["betas"].default)


def complete(
    group: dict[str, Any], defaults: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Field]]
) -> None:
    """Fills in the keys that the group's algorithm needs and the class's defaults lack.

    Keys of the class that mean something else to the algorithm go.
    """
    schema = schemas.get(group["algorithm"], {})
    pair = mirrors_betas(schema)
    for key, field in {**COMMON, **schema}.items():
        mirrored = pair and key in ("beta1", "beta2") and "beta1" not in defaults
        other = SPELLINGS.get(key)
        if (other is None or other not in group or other in schema) and not mirrored:
            group.setdefault(key, field.default)
    if pair and group.get("betas") is None and group.get("beta1") is not None:
        group["betas"] = (group["beta1"], group["beta2"])
    alien = [
        key
        for key, other in SPELLINGS.items()
        if key not in schema and other in schema and other in group and not {key, other} <= defaults.keys()
    ]
    if schema and not pair:
        alien += [key for key in ("betas", "beta1", "beta2") if key not in schema]
    for key in alien:
        group.pop(key, None)


MOMENTA = ("mu", "ef_decay")
"""Group keys of the momentum factor."""

Seen = tuple[dict[str, Any], tuple[Any, ...], Any, bool]
"""A group with its betas, its momentum factor and whether a scheduler cycles momentum, as last seen."""


def _keeps_beta(group: Mapping[str, Any], factor: object) -> bool:
    """True where the first beta cannot show the factor: AdamW takes vectors of the group, or it is none."""
    if not validate.is_number(factor) or not validate.beta(None).check(factor):
        return True
    return not group.get("strict", True) and any(param.ndim < 2 for param in group["params"])


_BETAS = {
    "beta1": validate.beta(None),
    "beta2": validate.beta(None),
    "betas": validate.betas((0.9, 0.95)),
}


def mirror_betas(
    groups: list[dict[str, Any]], last: dict[int, Seen], momenta: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Keeps ``betas`` equal to ``beta1`` and ``beta2`` in groups that have both: the one that changed wins.

    torch's schedulers and fastai cycle momentum as the first beta of every group, also of those whose
    algorithm has a momentum factor instead: there a first beta that was changed is the new factor, unless
    that changed too. What shows the momentum (Lightning's ``LearningRateMonitor``) reads the first beta as
    well: it is kept equal to the factor where no parameter of the group has another use for it.

    Args:
        groups: changed in place.
        last: the groups at the last call, kept by the caller.
        momenta: the key of the momentum factor by algorithm, for those that have one.

    Raises:
        ValueError: for what was written and is none of these.
    """
    for number, group in enumerate(groups):
        if "beta2" not in group or "beta1" not in group:
            continue
        found = last.get(id(group))
        pair, betas = (group["beta1"], group["beta2"]), group["betas"]
        if pair != betas:
            validate.check_group(group, _BETAS, set(group), f"group {number}")
            betas = tuple(betas)
        if pair != betas:
            if found is not None and found[1] == betas:
                group["betas"] = betas = pair
            else:
                group["beta1"], group["beta2"] = betas
        factor, cycled = None, False
        key = momenta.get(group.get("algorithm", ""))
        if key is not None and key in group:
            factor, cycled = group[key], "max_momentum" in group
            if found is not None and factor == found[2] and (betas[0] != found[1][0] or cycled > found[3]):
                group[key] = factor = betas[0]
            elif betas[0] != factor and not _keeps_beta(group, factor):
                group["betas"] = betas = (factor, betas[1])
                group["beta1"] = factor
        last[id(group)] = (group, betas, factor, cycled)
    if len(last) > len(groups):
        for number in last.keys() - set(map(id, groups)):
            del last[number]


def defaults(values: Mapping[str, Any], schema: Mapping[str, Field]) -> dict[str, Any]:
    """The ``locals()`` of a constructor as defaults: those of its variables that are group keys."""
    keys = FOREIGN_KEYS.union(COMMON, schema) - {"params"}
    return {key: value for key, value in values.items() if key in keys}


def resolve_memory_fraction(group: dict[str, Any]) -> None:
    """Replaces a share of the memory of the device of a group's parameters by bytes, in place."""
    share = group.get("workspace_limit")
    if isinstance(share, float) and group["params"]:
        group["workspace_limit"] = max(int(share * memory_of(group["params"][0].device)), 1)


def memory_of(device: torch.device) -> int:
    """Bytes of memory of a device; of the host, of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
