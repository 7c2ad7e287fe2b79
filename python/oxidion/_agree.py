"""What the ranks tell each other before a step: nobody enters a collective that another never reaches."""

from __future__ import annotations

import warnings
from typing import Any

from oxidion._comm import Groups, Meshes, Ranks, checksum, largest, local, my_rank, tell
from oxidion._oxidion import PlanMismatch, Session
from oxidion._validate import names_of


def agree(groups: Groups, session: Session | None, error: BaseException | None, *, skip: bool) -> bool:
    """Compares plan, gradients and scalars over every axis; one small all-reduce for each.

    Args:
        groups: the process groups of the axes, in the same order on all ranks.
        session: with a step begun; None where it could not begin or is skipped.
        error: why it could not begin.
        skip: whether this rank leaves the step out (a gradient scaler found infinities).

    Returns:
        Whether the step is taken: False when any rank leaves it out.

    Raises:
        PlanMismatch: on every rank when any two disagree or one failed.
    """
    failed = error is not None
    for ranks, group in groups.items():
        numbers = session.summary(list(ranks)) if session is not None else [0, 0, 0]
        flags = [int(failed), int(skip), *numbers, *(-x for x in numbers)]
        any_failed, any_skip, *both = largest(flags, group)
        skip = skip or bool(any_skip)
        differ = any(most + least for most, least in zip(both[:3], both[3:], strict=True))
        # A rank that skips has nothing to compare; if any does, all do.
        failed = failed or bool(any_failed) or (differ and not skip)
    if failed:
        complaint = _complaint(groups, session, error)
        if error is not None:
            raise error
        raise PlanMismatch(complaint)
    return not skip


def check_gradients(params: list[dict[str, Any]], meshes: Meshes, groups: Groups) -> None:
    """Compares the gradients of replicas bit by bit, one all-reduce for each axis. A debugging aid.

    Args:
        params: the parameter groups; the ranks agree on which parameters have gradients.
        meshes: the axes of the replicas.
        groups: the process groups of all axes, in the same order on all ranks.

    Raises:
        PlanMismatch: on every rank when gradients that should be averaged already differ.
    """
    rows = [
        (name, local(param.grad))
        for number, group in enumerate(params)
        for name, param in zip(names_of(group, number), group["params"], strict=True)
        if param.grad is not None
    ]
    sums = [checksum(grad) for _, grad in rows]
    complaint = ""
    for axis, ranks, _, averaged in meshes.replicas:
        if len(ranks) == 1 or not rows:
            continue
        both = largest([*sums, *(-x for x in sums)], meshes.groups[tuple(ranks)])
        equal = [most + least == 0 for most, least in zip(both[: len(rows)], both[len(rows) :], strict=True)]
        if averaged and not all(equal):
            complaint = (
                f"{rows[equal.index(False)][0]}: gradients differ between the ranks {ranks} of {axis}, but "
                "this optimizer does not average them. Average them (DistributedDataParallel, fully_shard "
                "over both axes) or pass replicate_mesh_grad_sync=True"
            )
        if not averaged and all(equal) and any(bool(grad.any()) for _, grad in rows):
            warnings.warn(
                f"gradients are equal on the ranks {ranks} of {axis} before this optimizer averages them: "
                "they were averaged already, which doubles the traffic. Use no_sync(), shard over one axis "
                "only, or pass replicate_mesh_grad_sync=False",
                stacklevel=5,
            )
    told = [text for group in groups.values() for text in tell(complaint, group) if text]
    for group in groups.values():
        told += [text for heard in tell(told, group) for text in heard]
    if told:
        raise PlanMismatch(told[0])


def _complaint(groups: Groups, session: Session | None, error: BaseException | None) -> str:
    """What differs between which ranks. Every rank calls this, and hears what was found on other axes."""
    found: list[str] = []
    me = my_rank()
    for ranks, group in groups.items():
        mine = (
            me,
            None if error is None else f"{type(error).__name__}: {error}",
            _details(session, ranks),
            found,
        )
        told = tell(mine, group)
        for rank, failure, _, heard in told:
            found += [text for text in heard if text not in found]
            if failure is not None:
                found.append(f"rank {rank} could not begin the step: {failure}")
        planned = [(rank, details) for rank, _, details, _ in told if details is not None]
        for other in planned[1:]:
            found += [text for text in _differences(planned[0], other) if text not in found]
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
            if line_a != line_b:
                return [f"the parameters differ: rank {a} has {line_a}, rank {b} has {line_b}"]
        longer, more = (a, plan_a) if len(plan_a) > len(plan_b) else (b, plan_b)
        return [f"the parameters differ: only rank {longer} has {more[min(len(plan_a), len(plan_b))]}"]
    texts = []
    for (name, has_a), (_, has_b) in zip(grads_a, grads_b, strict=True):
        if has_a != has_b:
            owner, lacking = (a, b) if has_a else (b, a)
            texts.append(
                f"{name}: rank {owner} has a gradient, rank {lacking} none. Make the parameter take part in "
                "the loss on all ranks, or give it zeros"
            )
    for (names, values_a), (_, values_b) in zip(scalars_a, scalars_b, strict=True):
        if values_a != values_b:
            texts.append(
                f"the hyper-parameters {names} differ: rank {a} has {values_a}, rank {b} has {values_b}"
            )
    return texts
