"""Step counters that a checkpoint has left at 0 with moments: the count of the group replaces them.

An optimizer makes states for torch.distributed.checkpoint (DCP) to fill. Where the checkpoint counts steps by
group and the load is partial, DCP fills the moments and leaves the counters of parameters at 0. A parameter
that had no gradient yet has a counter of 0 too, but its moments are zeros. So a moment that is not zero shows
which of the two it is.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxidion._core.state import MOMENTS, Names, key_of
from oxidion._core.validate import names_of
from oxidion._dist import collectives
from oxidion._dist.comm import Groups, lines_of, local


class Uncounted(NamedTuple):
    """A parameter whose counter is 0 in a group that has taken steps.

    Attributes:
        number: of the group.
        name: of the parameter.
        param: the parameter.
        counter: its counter.
        has_moments: whether a moment is not zero, in what this process has of it.
    """

    number: int
    name: str
    param: Tensor
    counter: Tensor
    has_moments: bool


def uncounted(
    groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any], public_names: Names
) -> list[Uncounted]:
    """The parameters with a counter of 0 in groups that have taken steps."""
    # A key has one role in all algorithms of a class.
    roles = {key: role for public in public_names.values() for role, key in public.items()}
    found = []
    for number, group in enumerate(groups):
        if group["step"] <= 0:
            continue
        for name, param in zip(names_of(group, number), group["params"], strict=True):
            own = {
                key_of(key, roles): value for key, value in state.get(param, {}).items() if type(key) is str
            }
            counter = own.get("step")
            if isinstance(counter, Tensor) and counter.numel() == 1 and float(counter) == 0:
                moments = [value for role, value in own.items() if role in MOMENTS]
                is_some = any(bool(local(m).any()) for m in moments if isinstance(m, Tensor))
                found.append(Uncounted(number, name, param, counter, is_some))
    return found


def take_from_groups(
    found: Sequence[Uncounted], param_groups: Sequence[Mapping[str, Any]], groups: Groups
) -> None:
    """Sets counters of 0 with moments to the steps of their groups, and says so once.

    Args:
        found: what `uncounted` returned, the same parameters on all ranks that share them.
        param_groups: those of the optimizer.
        groups: process groups by ranks.
    """
    flags = [int(row.has_moments) for row in found]
    lines = [set(lines_of(row.param)) for row in found]
    for ranks, line in groups.items():
        # One rank may have only zeros of a moment, and another rank has more.
        at = [index for index, own in enumerate(lines) if ranks in own]
        if at:
            for index, flag in zip(at, collectives.largest_of([flags[i] for i in at], line), strict=True):
                flags[index] = flag
    lost = [row for row, flag in zip(found, flags, strict=True) if flag]
    with torch.no_grad():
        for row in lost:
            row.counter.fill_(float(param_groups[row.number]["step"]))
    for number in sorted({row.number for row in lost}):
        names = [row.name for row in lost if row.number == number]
        logging.getLogger("oxidion").warning(
            "group %d: the checkpoint has moments and no step counters of %d parameters, the first of them "
            "%s: they go on from the %d steps of their group. Load a checkpoint of another package with "
            "oxidion.checkpoint.load_dcp() or import_state_dict()",
            number,
            len(names),
            names[0],
            param_groups[number]["step"],
        )
