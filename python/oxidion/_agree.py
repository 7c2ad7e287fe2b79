"""What the ranks of a step tell each other before it: nobody enters a collective that another rank never reaches."""

from __future__ import annotations

from typing import Any

import torch

from oxidion._comm import Groups, Ranks
from oxidion._oxidion import PlanMismatch, Session


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
        flag = torch.tensor([failed, skip, *numbers, *(-x for x in numbers)], dtype=torch.int64)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX, group=group)
        any_failed, any_skip, *both = flag.tolist()
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


def _complaint(groups: Groups, session: Session | None, error: BaseException | None) -> str:
    """What differs between which ranks. Every rank calls this, and hears on each axis what was found on the others."""
    found: list[str] = []
    me = torch.distributed.get_rank()
    for ranks, group in groups.items():
        told: list[Any] = [None] * len(ranks)
        mine = (me, None if error is None else f"{type(error).__name__}: {error}", _details(session, ranks), found)
        torch.distributed.all_gather_object(told, mine, group=group)
        for rank, failure, _, heard in told:
            found += [text for text in heard if text not in found]
            if failure is not None:
                found.append(f"rank {rank} could not begin the step: {failure}")
        first, *others = [(rank, details) for rank, _, details, _ in told if details is not None] or [None]
        for rank, details in others:
            assert first is not None
            found += [text for text in _differences(first, (rank, details)) if text not in found]
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
                f"{name}: rank {owner} has a gradient, rank {lacking} has none. Make the parameter take part in the "
                "loss on all ranks, or give it zeros"
            )
    for (names, values_a), (_, values_b) in zip(scalars_a, scalars_b, strict=True):
        if values_a != values_b:
            texts.append(f"the hyper-parameters {names} differ: rank {a} has {values_a}, rank {b} has {values_b}")
    return texts
