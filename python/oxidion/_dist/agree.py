"""Agreement of the ranks before a step: nobody enters a collective that another never reaches."""

from __future__ import annotations

import hashlib
import math
import warnings
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxidion._dist.collectives import host, largest, largest_of, my_rank, tell
from oxidion._dist.comm import Groups, Meshes, Ranks, RootAxes, local, ordered
from oxidion._oxidion import PlanMismatch, Session

SUM, COPY = ":Partial(Sum)/", ":Replicate/"
"""Placements in the lines of a plan of which gradients are sums of contributions, and of copies."""


class Known(NamedTuple):
    """Axes of a rank's meshes, as it tells the others of them.

    Attributes:
        axes: all axes of the meshes that the parameters are on parts of.
        used: those among them that parameters are on.
        numbers: how many groups are used, and a checksum of ``used``.
    """

    axes: RootAxes
    used: list[Any]
    numbers: tuple[int, int]


class Agreed(NamedTuple):
    """The outcome of a comparison of the ranks.

    Attributes:
        taken: False when any rank leaves the step out.
        planned: the axes on which a rank has planned it anew.
    """

    taken: bool
    planned: list[Ranks]


NOWHERE = Known({}, [], (0, 0))


def known(groups: Groups, axes: RootAxes) -> Known:
    """The entry for these axes, of which ``groups`` are used."""
    used = sorted(key for key, (ranks, _) in axes.items() if ranks in groups)
    return Known(axes, used, (len(groups), zlib.crc32(repr(used).encode())))


def agree(
    groups: Groups,
    own: Known,
    session: Session | None,
    error: BaseException | None,
    *,
    skip: bool,
    planned: bool = False,
    gradients: bool = True,
) -> Agreed:
    """Compares plan, gradients and scalars over every axis; one small all-reduce for each.

    Args:
        groups: the process groups of the axes, in the same order on all ranks.
        own: the axes that this rank knows of.
        session: with a step begun; None where it could not begin or is skipped.
        error: why it could not begin.
        skip: whether this rank leaves the step out (a gradient scaler found infinities).
        planned: whether this rank has planned the step anew.
        gradients: whether the ranks have to agree on which parameters have gradients.

    Raises:
        PlanMismatch: on every rank when any two disagree or one failed.
    """
    failed = error is not None
    groups = dict(groups)
    anew: list[Ranks] = []
    waiting = list(groups)
    while waiting:
        ranks = waiting.pop(0)
        plan, present, scalars = (0, 0, 0) if session is None else session.summary(list(ranks))
        numbers = [plan, present if gradients else 0, scalars, *own.numbers]
        flags = [int(failed), int(skip), int(planned), *numbers, *(-x for x in numbers)]
        any_failed, any_skip, any_planned, *both = _met(flags, ranks, groups[ranks], session)
        skip = skip or bool(any_skip)
        if any_planned:
            anew.append(ranks)
        *differ, counts, kinds = (most + least != 0 for most, least in zip(both[:5], both[5:], strict=True))
        # A rank that skips has nothing to compare; if any does, all do.
        failed = failed or counts or bool(any_failed) or (any(differ) and not skip)
        if counts or kinds:
            told = tell((own.used, list(own.axes)), groups[ranks])
            failed = failed or _unknown(told)
            found = _joined(own, groups, told)
            waiting += found
            groups.update(found)
    groups = ordered(groups)
    # What one line of an axis found the others have to hear before anybody goes on. On a mesh of three axes
    # each line meets all others in one round; more groups are no plain mesh.
    for _ in range(min(len(groups) - 1, 1) if len(groups) <= 3 else len(groups) - 1):
        for ranks, group in groups.items():
            failed, skip = map(bool, _met([int(failed), int(skip)], ranks, group, session))
    if failed:
        complaint = _complaint(groups, session, error)
        if error is not None:
            raise error
        raise PlanMismatch(complaint)
    return Agreed(not skip, anew)


def check_steps(step: int, groups: Groups) -> None:
    """Compares the numbers of steps that the ranks of each axis have taken; one small all-reduce for each.

    Raises:
        PlanMismatch: on every rank of an axis on which they differ.
    """
    for ranks, group in groups.items():
        most, least = largest_of([step, -step], group)
        if most + least:
            raise PlanMismatch(
                f"the ranks {list(ranks)} have taken other numbers of steps: {-least} to {most}, this one "
                f"{step}. A rank has left out a step: load a checkpoint"
            )


SAMPLE, COPY_TOLERANCE = 16, 0.05
"""Elements of a parameter that are compared among its copies, and their largest difference relative to the
largest of them. Copies differ by roundings; what only seems to be a copy, by all of its size."""


def check_copies(
    rows: Sequence[tuple[str, Tensor]],
    ranks: Ranks,
    group: Any,
    hint: str,
    *,
    what: str,
    error: type[Exception],
) -> None:
    """Compares a few elements of tensors among the ranks that hold copies of them: one all-reduce.

    Args:
        rows: tensors with the names of their parameters; the same parameters on all ranks.
        ranks: the ranks that hold copies.
        group: their process group.
        hint: the way out.
        what: what the tensors are.
        error: raised on every rank when the tensors of a parameter differ.
    """
    samples = [_sample(local(tensor)) for _, tensor in rows]
    sizes = [sample.numel() for sample in samples]
    if not any(sizes):
        return
    values = torch.cat([sample.double() for sample in samples])
    most, least = largest(torch.stack([values, -values]).to(host(group)), group).cpu()
    for (name, _), high, low in zip(rows, most.split(sizes), least.split(sizes), strict=True):
        size = float(torch.maximum(high.abs(), low.abs()).max()) if high.numel() else 0.0
        if size and float((high + low).max()) > COPY_TOLERANCE * size:
            raise error(f"{name}: {what} should be the same on the ranks {list(ranks)}, and differ. {hint}")


def _sample(tensor: Tensor) -> Tensor:
    """Elements at equal distances; 0 for what is not finite."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLE)][:SAMPLE].nan_to_num(0.0, 0.0, 0.0)


def _unknown(told: Sequence[tuple[list[Any], list[Any]]]) -> bool:
    """True where a rank does not use an axis that another uses, though its meshes have it."""
    named = {key for used, _ in told for key in used}
    return any(key in axes and key not in used for used, axes in told for key in named)


def _joined(own: Known, groups: Groups, told: Sequence[tuple[list[Any], list[Any]]]) -> Groups:
    """The groups of axes on which others wait, for this process too, though it has no parameters there."""
    named = {key for used, _ in told for key in used}
    lines = [own.axes[key] for key in sorted(named & own.axes.keys())]
    return ordered({ranks: find() for ranks, find in lines if ranks not in groups})


def _met(numbers: list[int], ranks: Ranks, group: Any, session: Session | None) -> list[int]:
    """The largest of each number over the ranks of an axis.

    Raises:
        PlanMismatch: if they did not all come within the timeout of their process group.
    """
    try:
        return largest_of(numbers, group)
    except RuntimeError as failure:
        names = [] if session is None else [name for name, _ in session.details(list(ranks))[0]]
        what = ", ".join(names[:3]) or "their parameters"
        raise PlanMismatch(
            f"the ranks {list(ranks)} did not all come to compare the step of {what}: one has ended, takes "
            f"fewer steps, or holds these parameters in another layout ({failure})"
        ) from failure


def checksum(tensor: Tensor) -> int:
    """A number of 62 bits that depends on every bit of a tensor."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 2


def check_gradients(named: Sequence[tuple[str, Tensor]], meshes: Meshes, groups: Groups) -> None:
    """Compares the gradients of replicas bit by bit, one all-reduce for each axis. A debugging aid.

    Args:
        named: gradients with the names of their parameters; the ranks agree on which there are.
        meshes: the axes of the replicas.
        groups: the process groups of all axes, in the same order on all ranks.

    Raises:
        PlanMismatch: on every rank when gradients that should be averaged already differ.
    """
    rows = [(name, local(grad)) for name, grad in named]
    sums = [checksum(grad) for _, grad in rows]
    complaint = doubled = ""
    averages = "" if meshes.argument != "replicate_mesh" else " or pass replicate_mesh_grad_sync=True"
    for axis, ranks, _, averaged in meshes.replicas:
        if len(ranks) == 1 or not rows:
            continue
        both = largest_of([*sums, *(-x for x in sums)], meshes.groups[tuple(ranks)])
        equal = [most + least == 0 for most, least in zip(both[: len(rows)], both[len(rows) :], strict=True)]
        if averaged and not all(equal):
            complaint = (
                f"{rows[equal.index(False)][0]}: gradients differ between the ranks {ranks} of {axis}, but "
                "this optimizer does not average them. Average them (DistributedDataParallel, fully_shard "
                f"over both axes){averages}"
            )
        if not averaged and all(equal) and any(bool(grad.any()) for _, grad in rows):
            doubled = (
                f"gradients are equal on the ranks {ranks} of {axis} before this optimizer averages them: "
                "they were averaged already, which doubles the traffic. Use no_sync(), shard over one axis "
                "only, or pass replicate_mesh_grad_sync=False"
            )
    found = [complaint] if complaint else []
    for _ in groups:
        for group in groups.values():
            found = [text for heard in tell(found, group) for text in heard][:1]
    if found:
        raise PlanMismatch(found[0])
    if doubled:
        warnings.warn(doubled, stacklevel=5)


def _complaint(groups: Groups, session: Session | None, error: BaseException | None) -> str:
    """Differences between ranks. Every rank calls this, and hears what was found on other axes."""
    found: list[str] = []
    me = my_rank()
    failure = None if error is None else f"{type(error).__name__}: {error}"
    for ranks, group in groups.items():
        told = tell((me, failure, _details(session, ranks)), group)
        found += [f"rank {rank} could not begin the step: {why}" for rank, why, _ in told if why is not None]
        planned = [(rank, details) for rank, _, details in told if details is not None]
        for other in planned[1:]:
            found += _differences(planned[0], other)
    for _ in groups:
        for group in groups.values():
            found += [text for heard in tell(found, group) for text in heard]
            found = list(dict.fromkeys(found))
    return "; ".join(found[:8]) or "the ranks of this optimizer disagree about the step"


def _details(session: Session | None, ranks: Ranks) -> tuple[Any, Any, Any] | None:
    if session is None:
        return None
    gradients, scalars = session.details(list(ranks))
    return session.agreed(list(ranks)), gradients, scalars


def _differences(one: tuple[int, Any], other: tuple[int, Any]) -> list[str]:
    (a, (plan_a, grads_a, scalars_a)), (b, (plan_b, grads_b, scalars_b)) = one, other
    if plan_a != plan_b:
        for line_a, line_b in zip(plan_a, plan_b, strict=False):
            if line_a.replace(SUM, COPY) == line_b.replace(SUM, COPY) != line_a:
                has, lacks = (a, b) if SUM in line_a else (b, a)
                return [
                    f"{line_a.split(':')[0]}: its gradient is a sum of contributions on rank {has}, and on "
                    f"rank {lacks} there is none or it is not. Let the ranks compute it alike"
                ]
            if line_a != line_b:
                return [f"the plans differ: rank {a} has {line_a}; rank {b} has {line_b}"]
        longer, more = (a, plan_a) if len(plan_a) > len(plan_b) else (b, plan_b)
        return [f"the plans differ: only rank {longer} has {more[min(len(plan_a), len(plan_b))]}"]
    texts = []
    for (name, has_a), (name_b, has_b) in zip(grads_a, grads_b, strict=False):
        if name != name_b:
            there, here = (a, b) if len(name) > len(name_b) else (b, a)
            texts.append(
                f"{min(name, name_b, key=len)}: rank {there} has a gradient of other placements than the "
                f"parameter, rank {here} not. Let the ranks compute it alike"
            )
        if has_a != has_b:
            owner, lacking = (a, b) if has_a else (b, a)
            texts.append(
                f"{name}: rank {owner} has a gradient, rank {lacking} none. Make the parameter take part in "
                "the loss on all ranks, or give it zeros"
            )
    for (group, values_a), (_, values_b) in zip(scalars_a, scalars_b, strict=False):
        for (name, own), (_, theirs) in zip(values_a, values_b, strict=False):
            if own != theirs and not (math.isnan(own) and math.isnan(theirs)):
                hint = ". A rank has left out a step" if name == "step" else ""
                texts.append(
                    f"{name} of group {group} differs: rank {a} has {own:g}, rank {b} has {theirs:g}{hint}"
                )
    return texts
