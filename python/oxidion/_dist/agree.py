"""Agreement of the ranks before a step, so that no rank enters a collective that another never reaches."""

from __future__ import annotations

import hashlib
import math
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oxidion._dist.collectives import Sums, all_gather_object, host, largest, largest_of, my_rank, sums_of
from oxidion._dist.comm import Groups, Meshes, Ranks, local, ordered
from oxidion._dist.grid import PRIME, Known, Weights, weights_of
from oxidion._oxidion import PlanMismatch, Session

SUM, COPY = ":Partial(Sum)/", ":Replicate/"
"""Placements of gradients in the lines of a plan: partial sums, and copies."""


class Agreed(NamedTuple):
    """The outcome of a comparison of the ranks.

    Attributes:
        taken: False when any rank leaves the step out.
        planned: the axes on which a rank has replanned it.
        is_grid: whether the axes of all ranks are those of a grid; False where not all waited.
        pending: what is looked at before the next step, where any rank did not wait for the others.
        moves: False where no rank has anything to step with.
    """

    taken: bool
    planned: list[Ranks]
    is_grid: bool = False
    pending: Pending | None = None
    moves: bool = True


class Totals(NamedTuple):
    """Sums of the numbers that the ranks of an axis have exchanged.

    Attributes:
        failed: ranks that could not begin the step.
        who: the sum of ``rank + 1`` over these.
        skipped: ranks that leave the step out.
        planned: ranks that have replanned it.
        deferred: ranks that read this only before their next step.
        uneven: ranks whose axes are not those of the others' grid.
        moving: ranks whose step could change a weight or a state.
        plan: 0 where the ranks of every axis plan alike.
        gradients: the same of parameters that have gradients.
        scalars: the same of the live scalars.
        shape: the same of the grid.
        axes: 0 where the ranks of this axis know of the same axes.
        grid: 0 where they are on one grid.
        facts: 0 where they agree on plan, gradients and scalars.
    """

    failed: int
    who: int
    skipped: int
    planned: int
    deferred: int
    uneven: int
    moving: int
    plan: int
    gradients: int
    scalars: int
    shape: int
    axes: int
    grid: int
    facts: int

    @classmethod
    def of(cls, totals: Sequence[int]) -> Totals:
        """The meaning of sums."""
        return cls(*totals[:FIRST_WEIGHTED], *(total % PRIME for total in totals[FIRST_WEIGHTED:]))

    @property
    def differ(self) -> bool:
        """True where ranks on a grid disagree. One that skips has nothing to compare; if any does, all do."""
        return bool(self.plan or self.gradients or self.scalars) and not self.skipped

    @property
    def is_uneven(self) -> bool:
        """True where the axes are not those of a grid."""
        return bool(self.uneven or self.grid)


FIRST_WEIGHTED = Totals._fields.index("plan")
CARRIED = Totals._fields.index("axes")
"""Numbers that are added up over one axis after the other, before those of each axis alone."""


class Evidence:
    """Facts about a step that are exchanged only once ranks are found to disagree about it.

    Args:
        session: with the step begun; None where it could not begin or is skipped.
        gradients: whether the ranks have to agree on which parameters have gradients.
        device: the type of the parameters' device.
        states: the states that all ranks of an axis gather, by these ranks.
    """

    def __init__(
        self,
        session: Session | None,
        *,
        gradients: bool,
        device: str = "cpu",
        states: Callable[[Ranks], Sequence[str]] = lambda _ranks: (),
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._device = device
        self._states = states
        self._facts: dict[Ranks, tuple[int, int, int]] = {}
        self._kept: dict[Ranks, Any] = {}

    def facts(self, ranks: Ranks) -> tuple[int, int, int]:
        """Plan, gradients and scalars, as far as they concern an axis, in a number each."""
        if self._session is None:
            return 0, 0, 0
        if ranks not in self._facts:
            plan, present, scalars = self._session.summary(list(ranks))
            plan += int.from_bytes(self._device.encode(), "little")
            if states := self._states(ranks):
                plan += zlib.crc32("\n".join(states).encode())
            self._facts[ranks] = plan, present if self._gradients else 0, scalars
        return self._facts[ranks]

    def keep(self, ranks: Ranks, before: Evidence | None) -> None:
        """Keeps the details of gradients, which a session forgets; unchanged ones come from ``before``."""
        if self._session is None or not self._gradients:
            return
        known = before._kept if before is not None and before._session is self._session else {}
        if before is not None and ranks in known and before._facts[ranks][1] == self._facts[ranks][1]:
            self._kept[ranks] = known[ranks]
        else:
            self._kept[ranks] = self._session.details(list(ranks))[0]

    def details(self, ranks: Ranks) -> tuple[Any, Any, Any] | None:
        """Lines of the plan, parameters with whether they have gradients, and scalars, in words."""
        if self._session is None:
            return None
        gradients, scalars = self._session.details(list(ranks))
        plan = [f"parameters on {self._device}", *self._session.agreed(list(ranks))]
        plan += [f"{name} was loaded or replaced" for name in self._states(ranks)]
        return plan, self._kept.get(ranks, gradients), scalars

    def names(self, ranks: Ranks) -> list[str]:
        """The parameters on an axis."""
        return [] if self._session is None else [name for name, _ in self._session.details(list(ranks))[0]]


class Pending:
    """A comparison that is looked at before the next step.

    Attributes:
        step: the number of the step before which it was begun.
        evidence: facts about that step.
    """

    def __init__(self, step: int, groups: Groups, evidence: Evidence, sums: Sums | list[Totals]) -> None:
        self.step = step
        self.evidence = evidence
        self._groups = groups
        self._sums = sums

    def read(self) -> list[Totals]:
        """Returns the sums of each axis; waits for them."""
        if isinstance(self._sums, Sums):
            self._sums = [Totals.of(totals) for totals in self._sums.read()]
        return self._sums

    @property
    def is_planned(self) -> bool:
        """Returns True if a rank replanned the step."""
        return self.read()[-1].planned > 0

    def complaint(self, *, together: bool) -> str:
        """Says what was wrong with the step, which other ranks have taken; nothing where all was well.

        Args:
            together: whether all ranks ask at the same moment, so that each can report what it had.
        """
        sums = self.read()
        last = sums[-1]
        if last.uneven or last.shape:
            return "a rank has parameters on other axes than before"
        if last.failed:
            who = f"rank {last.who - 1}" if last.failed == 1 else f"{last.failed} ranks"
            return f"{who} could not begin it"
        if last.skipped:
            return "a gradient scaler found infinities on some ranks, and others have none"
        if not last.differ:
            return ""
        if together:
            return _complaint(self._groups, self.evidence, None)
        words = {
            "plans": last.plan,
            "parameters that have gradients": last.gradients,
            "learning rates or other scalars, or the number of the step": last.scalars,
        }
        return "they differ in " + ", and in ".join(word for word, differs in words.items() if differs)


def agree(
    groups: Groups,
    own: Known,
    session: Session | None,
    error: BaseException | None,
    *,
    step: int = 0,
    skip: bool,
    planned: bool = False,
    moves: bool = True,
    gradients: bool = True,
    deferred: bool = False,
    before: Evidence | None = None,
    device: str = "cpu",
    states: Callable[[Ranks], Sequence[str]] = lambda _ranks: (),
) -> Agreed:
    """Compares plan, gradients and scalars over every axis; one small all-reduce for each.

    Args:
        groups: the process groups of the axes, in the same order on all ranks.
        own: the axes that this rank knows of.
        session: with a step begun; None where it could not begin or is skipped.
        error: why it could not begin.
        step: the number of the step.
        skip: whether this rank leaves the step out (a gradient scaler found infinities).
        planned: whether this rank has replanned the step.
        moves: whether the step could change a weight or a state of this rank.
        gradients: whether the ranks have to agree on which parameters have gradients.
        deferred: whether this rank takes the step without waiting for the others: on a grid, after they have
            agreed on its plan.
        before: facts about the step before, where this rank did not wait there either.
        device: the type of the parameters' device.
        states: the states that all ranks of an axis gather, by these ranks.

    Returns:
        An outcome that is pending where any rank is deferred. One that waited does not take the step then if
        there is anything wrong with it.

    Raises:
        PlanMismatch: on every rank when any two disagree or one failed, and none is deferred.
    """
    evidence = Evidence(session, gradients=gradients, device=device, states=states)
    facts = {ranks: evidence.facts(ranks) for ranks in groups}
    weighted = [
        sum(own.weights[ranks][at] * numbers[at] for ranks, numbers in facts.items()) % PRIME
        for at in range(3)
    ]
    weighted.append(sum(own.weights[ranks][-1] for ranks in groups) * own.grid % PRIME)
    failed = int(error is not None)
    carried = [failed, failed and my_rank() + 1, int(skip), int(planned), int(deferred)]
    carried += [int(not own.is_grid), int(moves)]
    carried += weighted
    if deferred:
        rows = [_facts_of_axis(own, ranks, own.weights[ranks], numbers) for ranks, numbers in facts.items()]
        first = [carried, *([0] * CARRIED for _ in rows[1:])]
        sums = _start_sums([head + row for head, row in zip(first, rows, strict=True)], groups, evidence)
        for ranks in groups:
            evidence.keep(ranks, before)
        return Agreed(True, [], pending=Pending(step, groups, evidence, sums))
    return _agree_axis_by_axis(dict(groups), own, evidence, error, carried, step)


def _facts_of_axis(own: Known, ranks: Ranks, weights: Weights, facts: tuple[int, int, int]) -> list[int]:
    """The numbers of one axis alone."""
    plan, present, scalars, axes, grid = weights
    both = plan * facts[0] + present * facts[1] + scalars * facts[2]
    return [axes * own.kinds % PRIME, grid * own.grid % PRIME, both % PRIME]


def _agree_axis_by_axis(
    groups: Groups,
    own: Known,
    evidence: Evidence,
    error: BaseException | None,
    carried: list[int],
    step: int,
) -> Agreed:
    """Goes over one axis after the other, and to those on which others are found to wait."""
    replanned: list[Ranks] = []
    summaries: list[Totals] = []
    disagreed = False
    waiting = list(groups)
    while waiting:
        ranks = waiting.pop(0)
        weights = own.weights[ranks] if ranks in own.weights else weights_of(ranks, my_rank())
        row = carried + _facts_of_axis(own, ranks, weights, evidence.facts(ranks))
        axis_sum = Totals.of(_summed(row, ranks, groups[ranks], evidence))
        summaries.append(axis_sum)
        if axis_sum.planned:
            replanned.append(ranks)
        disagreed = disagreed or (bool(axis_sum.facts) and not axis_sum.skipped)
        failed = bool(axis_sum.axes) or (disagreed and axis_sum.is_uneven)
        uneven = axis_sum.uneven + bool(axis_sum.grid)
        carried = [axis_sum.failed + failed, *axis_sum[1:CARRIED]]
        carried[Totals._fields.index("uneven")] = uneven
        if axis_sum.axes and not axis_sum.deferred:
            others = all_gather_object((own.used, list(own.axes)), groups[ranks])
            carried[0] += _unknown(others)
            found = _joined(own, groups, others)
            waiting += found
            groups.update(found)
    last = summaries[-1]
    wrong = bool(carried[0]) or last.differ
    if last.deferred:
        taken = not (wrong or last.skipped or any(axis_sum.is_uneven for axis_sum in summaries))
        return Agreed(taken, [], pending=Pending(step, groups, evidence, summaries))
    groups = ordered(groups)
    skip, moves = bool(last.skipped), bool(last.moving)
    is_grid = not carried[Totals._fields.index("uneven")]
    if not is_grid:
        # What one line of an axis found the others have to hear before anybody goes on. On three axes each
        # line meets all others in one round; more groups are no plain mesh.
        wrong = bool(carried[0])
        for _ in range(min(len(groups) - 1, 1) if len(groups) <= 3 else len(groups) - 1):
            for ranks, group in groups.items():
                summed = _summed([int(wrong), int(skip), int(moves)], ranks, group, evidence)
                wrong, skip, moves = map(bool, summed)
    if wrong:
        complaint = _complaint(groups, evidence, error)
        if error is not None:
            raise error
        raise PlanMismatch(complaint)
    return Agreed(not skip, replanned, is_grid, moves=moves)


def union(flags: Sequence[int], groups: Groups, replanned: Sequence[Ranks]) -> list[int]:
    """Returns the maximum of each number over all ranks connected by axes on which a rank replanned.

    It reduces over these axes twice: on a mesh of two or three axes every number then reaches all ranks.
    """
    found = list(flags)
    for _ in range(2):
        for ranks in ordered({ranks: groups[ranks] for ranks in replanned if ranks in groups}):
            found = largest_of(found, groups[ranks])
    return found


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
        hint: the advice in the error.
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


def _unknown(answers: Sequence[tuple[list[Any], list[Any]]]) -> bool:
    """True where a rank does not use an axis that another uses, though its meshes have it."""
    named = {key for used, _ in answers for key in used}
    return any(key in axes and key not in used for used, axes in answers for key in named)


def _joined(own: Known, groups: Groups, answers: Sequence[tuple[list[Any], list[Any]]]) -> Groups:
    """The groups of axes on which others wait, for this process too, though it has no parameters there."""
    named = {key for used, _ in answers for key in used}
    lines = [own.axes[key] for key in sorted(named & own.axes.keys())]
    return ordered({ranks: find() for ranks, find in lines if ranks not in groups})


def _summed(numbers: list[int], ranks: Ranks, group: Any, evidence: Evidence) -> list[int]:
    """The sum of each number over the ranks of an axis.

    Raises:
        PlanMismatch: if they did not all come within the timeout of their process group.
    """
    try:
        return sums_of(numbers, group)
    except RuntimeError as failure:
        raise _missed(ranks, evidence, failure) from failure


def _start_sums(rows: list[list[int]], groups: Groups, evidence: Evidence) -> Sums:
    """Starts the sums of all axes.

    Raises:
        PlanMismatch: if a process group says that its ranks did not all come to those of an earlier step.
    """
    try:
        return Sums(rows, CARRIED, list(groups.values()))
    except RuntimeError as failure:
        raise _missed(next(iter(groups)), evidence, failure) from failure


def _missed(ranks: Ranks, evidence: Evidence, failure: Exception) -> PlanMismatch:
    what = ", ".join(evidence.names(ranks)[:3]) or "their parameters"
    return PlanMismatch(
        f"the ranks {list(ranks)} did not all come to compare the step of {what}: one has ended, takes "
        f"fewer steps, or holds these parameters in another layout ({failure})"
    )


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
            found = [text for texts in all_gather_object(found, group) for text in texts][:1]
    if found:
        raise PlanMismatch(found[0])
    if doubled:
        warnings.warn(doubled, stacklevel=5)


def _complaint(groups: Groups, evidence: Evidence, error: BaseException | None) -> str:
    """Differences between ranks. Every rank calls this, and hears what was found on other axes."""
    found: list[str] = []
    me = my_rank()
    failure = None if error is None else f"{type(error).__name__}: {error}"
    for ranks, group in groups.items():
        answers = all_gather_object((me, failure, evidence.details(ranks)), group)
        found += [
            f"rank {rank} could not begin the step: {why}" for rank, why, _ in answers if why is not None
        ]
        planned = [(rank, details) for rank, _, details in answers if details is not None]
        for other in planned[1:]:
            found += _differences(planned[0], other)
    for _ in groups:
        for group in groups.values():
            found += [text for texts in all_gather_object(found, group) for text in texts]
            found = list(dict.fromkeys(found))
    return "; ".join(found[:8]) or "the ranks of this optimizer disagree about the step"


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
