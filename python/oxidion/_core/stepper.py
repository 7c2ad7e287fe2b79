"""Steps: plan and bind when something changed, agree with the other ranks, execute the schedule."""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch

from oxidion._core import averages, counters, driver, masters, norms, runner, schema, validate
from oxidion._core.changes import ChangeTracker, is_still
from oxidion._core.forks import alone
from oxidion._core.interrupts import Deferred
from oxidion._core.owned import OwnerSharded
from oxidion._core.reserve import Reserve, zeros
from oxidion._core.state import (
    Names,
    entries_of,
    existing,
    materialise,
    named_gradients,
    parameters,
    pin,
    reshard_states,
    workspaces,
)
from oxidion._cuda import device, self_check
from oxidion._dist import agree, collectives, comm, grid
from oxidion._oxidion import LayoutError, Plan, PlanMismatch, PoisonedOptimizer, Session, state_names
from oxidion._torch.compat import refuse_modes

QUIET_STEPS = 64
"""Ranks whose steps do not communicate compare so often what they are about to do."""


_Walk = tuple[tuple[tuple[int, int], ...], tuple[Callable[[], Any], ...]]


class _Begun(NamedTuple):
    """A step as this rank has begun it.

    Attributes:
        session: with the step begun; None where it could not begin or is skipped.
        error: why it could not begin.
        skip: whether a gradient scaler found infinities.
        planned: whether it was replanned.
        moves: False where it makes states and changes nothing.
    """

    session: Session | None
    error: Exception | None
    skip: bool
    planned: bool
    moves: bool


class Stepper:
    """Steps of an optimizer with ``param_groups`` and ``state``.

    Attributes:
        compare_every: Ranks compare what they are about to do once in this number of steps, and whenever
            a step is replanned; 0 means only the latter. None means 1 where steps communicate, else 64. It
            has to be the same on all ranks. With process groups of NCCL alone the host does not wait for the
            device to compare: a difference is reported at the next step.
    """

    _STATE_NAMES: ClassVar[Names] = state_names()
    """By algorithm: keys under which ``state`` holds roles of the core, torch's where a class says no others.

    A key has one role in all of them.
    """
    _IS_DECOUPLED: ClassVar[bool] = True
    """True if the decay of this class's algorithm is no part of its update."""
    _LEAVES_UPDATE: ClassVar[bool] = True
    """True if the core can bind the update of this class's algorithm, so that norms of weights are held."""
    _OPTIONAL_ROLES: ClassVar[frozenset[str]] = frozenset()
    """Moments of this class's algorithm that a setting may switch on between two steps."""
    _LAYOUT_SETTINGS: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings under which a step of this class's algorithm depends on how a parameter is sharded."""
    _WORDS: ClassVar[Mapping[str, validate.Word]] = MappingProxyType({})
    """Other optimizers' words for arguments and group keys of this class, for groups of its algorithm."""

    compare_every: int | None = None

    param_groups: list[dict[str, Any]]
    state: Any
    _last_betas: dict[int, schema.Seen]
    _momenta: ClassVar[dict[str, str]] = {}
    _meshes = comm.NO_MESHES
    _functions: Mapping[str, Callable[..., Any]] = MappingProxyType({})
    _session: Session | None = None
    _places: tuple[torch.device, ...] = ()
    _reserve: Reserve | None = None
    _owned: OwnerSharded
    _changes: ChangeTracker
    _inside_averaged: int = 0
    _has_logged: bool = False
    _cold: Sequence[int] = ()
    _is_loaded: bool = False
    _looked: frozenset[int] = frozenset()
    _schedule: tuple[tuple[int, int], ...] = ()
    _comms: tuple[Callable[[], Any], ...] = ()
    _groups: comm.Groups | None = None
    _known: grid.Known = grid.NO_AXES
    _agreed: bool = False
    _pending: agree.Pending | None = None
    _evidence: agree.Evidence | None = None
    _replanned: bool = False
    _is_unchecked: bool = False
    _waits: bool = True
    _is_grid: bool = False
    _poison: str | None = None
    _redistributes: bool = False
    _runner: runner.Runner = runner.DIRECT

    @abstractmethod
    def _communicates(self) -> bool:
        """True where steps on several ranks communicate; the same on all of them."""

    @abstractmethod
    def _class_of(self, algorithm: str) -> type[Stepper]:
        """The class of the optimizer whose algorithm this is."""

    @abstractmethod
    def _words(self, group: Mapping[str, Any]) -> Mapping[str, validate.Word]:
        """Other words that a group may have for its keys."""

    @abstractmethod
    def _assign_algorithm(self, group: dict[str, Any], number: int) -> None:
        """Replaces an algorithm that was written into a group by its name; refuses what is none."""

    @abstractmethod
    def _check_written(self) -> None:
        """Refuses settings that were written into the groups and that no group could be made with."""

    @abstractmethod
    def _complete(self, group: dict[str, Any], where: str) -> None:
        """Completes a group of a state dict in place and checks it."""

    def _execute(self, grad_factor: float | None = None) -> None:
        """Takes one step: the runner wraps what is prepared, executed and finished."""
        found_inf = getattr(self, "found_inf", None)
        skip = found_inf is not None and float(found_inf) > 0
        if grad_factor is None:
            scale = getattr(self, "grad_scale", None)
            grad_factor = 1.0 if scale is None else 1.0 / float(scale)
        self._normalize_keys()
        if self._inside_averaged:
            raise RuntimeError(averages.IN_EVAL)
        if self._cold:
            self._warn_of_cold_states()
        if self._is_loaded:
            self._count_loaded()
        if not self._has_logged:
            self._has_logged = True
            masters.warn_of_rounding(self.param_groups)
        with self._runner.wrap(), Deferred():
            session = self._prepare(grad_factor, skip=skip)
            if session is not None:
                self._finish(session)

    def _prepare(self, grad_factor: float, *, skip: bool) -> Session | None:
        """Begins a step and agrees on it with the other ranks; None where it is skipped."""
        self._look_back()
        for group in self.param_groups:
            group["step"] += 1
        walk, taken, put_back = (self._schedule, self._comms), False, self._owned.undo
        begun = self._begin(grad_factor, skip=skip)
        try:
            groups = self._to_agree(planned=begun.planned)
            agreed = self._agreed_with(groups, begun, walk) if groups else self._agreed_alone(begun)
            if agreed and self._owned.scatter(self.state, self._groups or {}) and begun.session:
                # The work scheduled in this step depends on states that were missing before.
                begun.session.abandon()
                session = self._begin_session(grad_factor)
                self._runner.prepare(session)
                begun = begun._replace(session=session)
            taken = agreed and self._place_gradients(begun.session)
            put_back = self._owned.put_back  # a step that all leave out has made its states all the same
            if taken:
                self._looked |= frozenset(self._unlooked())
        finally:
            if not taken:
                for group in self.param_groups:
                    group["step"] -= 1
                if begun.session is not None:
                    begun.session.abandon()
                if put_back(self.state):
                    self._session = None
        return begun.session if taken else None

    def _begin(self, grad_factor: float, *, skip: bool) -> _Begun:
        """Begins a step on this rank alone."""
        session, error, before = None, None, self._session
        has_states = before is not None or any(map(self.state.get, parameters(self.param_groups)))
        try:
            if not skip:
                session = self._begin_session(grad_factor)
                self._runner.prepare(session)
        except Exception as raised:  # reported to the other ranks first
            error = raised
        planned = self._session is not before or self._replanned or self._is_unchecked
        planned = planned or bool(self._unlooked())
        moves = has_states or session is None or error is not None or self._moves()
        return _Begun(session, error, skip, planned, moves)

    def _agreed_alone(self, begun: _Begun) -> bool:
        """Returns True if a step that involves no other rank is taken."""
        if begun.error is not None:
            raise begun.error
        return begun.moves and not begun.skip

    def _agreed_with(self, groups: comm.Groups, begun: _Begun, walk: _Walk) -> bool:
        """True where all ranks take a step; ``walk`` is that of the last one."""
        agreed = self._agree(groups, begun)
        if agreed.pending is not None and not agreed.taken:
            # Those who did not wait are on their way through the collectives of the last plan.
            with contextlib.suppress(driver.CommunicationError):
                driver.execute(driver.Absent(), *walk)
            if begun.error is not None:
                raise begun.error
        if agreed.pending is None and agreed.taken and agreed.moves:
            self._check_agreed(groups, agreed.planned, begun.session)
            self._is_unchecked = self._is_unchecked and begun.session is None
        return agreed.taken and agreed.moves

    def _agree(self, groups: comm.Groups, begun: _Begun) -> agree.Agreed:
        """Compares the step with the other ranks; what none waits for is looked at before the next."""
        session, error, planned = begun.session, begun.error, begun.planned
        deferred = session is not None and error is None and not planned and self._may_defer(groups, session)
        agreed = agree.agree(
            groups,
            self._known,
            session,
            error,
            step=self.param_groups[0]["step"],
            skip=begun.skip,
            planned=planned,
            moves=begun.moves,
            gradients=self._communicates() or self._always_agrees(),
            deferred=deferred,
            before=self._evidence,
            device=device.device_of(self.param_groups).type,
            states=self._owned.gathered,
        )
        self._pending = agreed.pending
        if agreed.pending is None:
            self._is_grid = agreed.is_grid
        self._agreed = agreed.taken or agreed.pending is not None
        self._replanned = False
        return agreed

    def _may_defer(self, groups: comm.Groups, session: Session) -> bool:
        """True where a difference among the ranks changes no collective of the step that has begun.

        It does where a part of the step waits for the number of the step or for a gradient, where gradients
        are redistributed, and where a rank alone may leave the step out.
        """
        alike = self._agreed and self._is_grid and not self._waits and not self._always_agrees()
        return alike and collectives.run_ahead(groups.values()) and not session.misplaced_gradients()

    def _look_back(self) -> None:
        """Evaluates the comparison of ranks before the last step, if this rank did not wait for it then.

        Raises:
            PoisonedOptimizer: on every rank, where they disagreed.
        """
        if self._pending is None or device.is_capturing(device.device_of(self.param_groups)):
            return
        pending, self._pending = self._pending, None
        self._evidence = pending.evidence
        complaint = pending.complaint(together=True)
        if complaint:
            self._forget()
            self._poison = self._disagreed(pending, complaint)
            raise PoisonedOptimizer(self._advice())
        self._replanned = pending.is_planned

    @staticmethod
    def _disagreed(pending: agree.Pending, complaint: str) -> str:
        return (
            f"the ranks disagreed about step {pending.step} ({complaint}), which was taken: parameters and "
            "states are those of such a step"
        )

    def _check_agreed(
        self, groups: comm.Groups, planned: Sequence[comm.Ranks], session: Session | None
    ) -> None:
        """Compares copies on the axes where the step was replanned, and all gradients if asked to."""
        if self._meshes.check:
            agree.check_gradients(named_gradients(self.param_groups), self._meshes, groups)
        if session is None or not planned:
            return
        self._compute_alike(groups, planned)
        params = list(parameters(self.param_groups))
        names = [name for i, group in enumerate(self.param_groups) for name in validate.names_of(group, i)]
        averaged = [tuple(ranks) for _, ranks, _, is_averaged in self._meshes.replicas if is_averaged]
        hint = (
            "Parameters that are meant to differ, as those of each rank's experts, need DTensors on a mesh "
            f"of their own, or an optimizer of their own without {self._meshes.argument}; others have to be "
            "broadcast before training and their gradients averaged"
        )
        for ranks in planned:
            if ranks not in groups:
                continue
            arguments = (ranks, groups[ranks], hint)
            rows = [(names[i], params[i]) for i in session.copies(list(ranks))]
            agree.check_copies(rows, *arguments, what="values", error=LayoutError)
            if ranks in averaged:
                rows = [(name, param.grad) for name, param in rows if param.grad is not None]
                agree.check_copies(rows, *arguments, what="gradients", error=PlanMismatch)
        self._look_for_zeros(groups)

    def _moves(self) -> bool:
        """False for a first step at a rate of 0 with gradients of zeros: it makes states, and counts nowhere.

        torch's ``get_optimizer_state_dict`` takes such a step for the states that a checkpoint fills, before
        there are weights or gradients.
        """
        if not all(map(is_still, self.param_groups)):
            return True
        return any(bool(comm.local(grad).any()) for _, grad in named_gradients(self.param_groups))

    def _unlooked(self) -> list[int]:
        """The groups that refuse zeros, have a rate above 0, and were not looked at since they were bound."""
        found = []
        for number, group in enumerate(self.param_groups):
            if number not in self._looked and norms.keep(group) and not is_still(group):
                found.append(number)
        return found

    def _look_for_zeros(self, groups: comm.Groups | None) -> None:
        """Refuses matrices of zeros that no step could change, before anything is written.

        A step at a rate of 0 changes no weight, so it refuses none: torch takes such steps to make the states
        that a checkpoint fills, before there are weights.

        Args:
            groups: by axis. None looks at tensors that this process has whole, others at those that ranks
                share.

        Raises:
            ValueError: for such a parameter, on all ranks. Of stacks that are sharded only for one that is
                zero as a whole: the step itself looks at each matrix.
        """
        found: list[tuple[str, torch.Tensor, bool]] = []
        for number, group in enumerate(self.param_groups):
            if norms.keep(group) and not is_still(group):
                own = zip(validate.names_of(group, number), group["params"], strict=True)
                by_matrix = groups is None and norms.is_by_matrix(group)
                matrices = [(name, p) for name, p in own if p.ndim > 1 and p.requires_grad and p.numel()]
                found += [(name, p, by_matrix) for name, p in matrices]
        lines = [set(comm.lines_of(param)) for _, param, _ in found]
        found = [row for row, own in zip(found, lines, strict=True) if bool(own) == (groups is not None)]
        lines = [own for own in lines if bool(own) == (groups is not None)]
        flags = [int(norms.can_move(comm.local(param).detach(), by_matrix)) for _, param, by_matrix in found]
        for ranks, line in (groups or {}).items():
            # The ranks of an axis have the same parameters on it, and may have others besides.
            at = [index for index, own in enumerate(lines) if ranks in own]
            if at:
                largest = collectives.largest_of([flags[index] for index in at], line)
                for index, flag in zip(at, largest, strict=True):
                    flags[index] = flag
        is_zero, axes = int(not all(flags)), set(groups or {})
        if not self._is_grid or any(own != axes for own in lines):
            for line in (groups or {}).values():  # ranks may have other parameters, as of experts
                is_zero = collectives.largest_of([is_zero], line)[0]
        for flag, (name, *_) in zip(flags, found, strict=True):
            if not flag:
                norms.refuse_zeros(name)
        if is_zero:
            raise ValueError(
                "another rank has weights of zeros that no step could change: its error names them"
            )

    def _compute_alike(self, groups: comm.Groups, planned: Sequence[comm.Ranks]) -> None:
        """Turns a source of kernels off on all ranks if it is off on one: replicas would diverge."""
        where = device.device_of(self.param_groups)
        if device.number_of(where) is not None:
            off = agree.union(self_check.flags(where), groups, planned)
            if complaint := self_check.turn_off(where, off):
                raise PlanMismatch(complaint)

    def _place_gradients(self, session: Session | None) -> bool:
        """Redistributes gradients of other placements than their parameters'; true when they are there."""
        if session is not None and self._groups:
            for at, param in session.misplaced_gradients():
                self._redistributes = True
                session.place_gradient(at, comm.gradient_like(param))
        return True

    def _finish(self, session: Session) -> None:
        """Executes the schedule of a step that was prepared and ends it; a failure poisons the optimizer."""
        try:
            session.average(False)
            self._runner.execute(session, self._schedule, self._comms)
            session.average(True)
            uncounted = session.end()
            self._owned.is_fresh = False
        except BaseException as failure:
            step = self.param_groups[0]["step"]
            lost = isinstance(failure, driver.CommunicationError)
            text = str(failure) if lost else f"{type(failure).__name__}: {failure}"
            self._poison = f"step {step} failed half way ({text}): parameters and states are half new"
            self._session = self._evidence = None
            if lost:
                self._pending = None  # its sums may not have come either
                raise PoisonedOptimizer(self._advice()) from failure.__cause__
            if hasattr(failure, "add_note"):  # from Python 3.11 on
                failure.add_note(self._advice())
            raise
        if uncounted:  # the core counts the changes of plain tensors
            torch.autograd.graph.increment_version(uncounted)

    def _always_agrees(self) -> bool:
        return getattr(self, "found_inf", None) is not None or self._meshes.check

    def _to_agree(self, *, planned: bool) -> comm.Groups:
        """The axes whose ranks agree on the step; the same on all ranks, also where planning failed."""
        groups = self._read_groups() if self._groups is None else self._groups
        if not groups:
            return groups
        comm.check_alive(groups, self._meshes)
        communicates, done = self._communicates(), self.param_groups[0]["step"] - 1
        every = (1 if communicates else QUIET_STEPS) if self.compare_every is None else self.compare_every
        due = self._always_agrees() or not self._agreed or (planned and communicates)
        due = due or self._replanned or (every > 0 and done % every == 0)
        if due and device.is_capturing(device.device_of(self.param_groups)):
            # A capture cannot wait for what a device has compared.
            due = not any(map(collectives.needs_device, groups.values()))
        return groups if due else {}

    def _begin_session(self, grad_factor: float) -> Session:
        """Returns the session with this step begun, replanned and rebound where something changed."""

        def begins(session: Session) -> bool:
            streams = device.current_streams(self._places)
            return session.begin(self._settings(), self.state, grad_factor, torch.get_num_threads(), streams)

        refuse_modes()
        if self._poison is not None or self._pending is not None:
            self._refuse_poison()
        self._check_written()
        session = self._session
        if session is None or not begins(session):
            session = self._bind(in_step=True)
            if not begins(session):
                raise RuntimeError("parameters or states changed while the step was being planned")
        if self._unlooked():
            try:
                self._look_for_zeros(None)
            except BaseException:
                session.abandon()
                raise
        return session

    def _advice(self) -> str:
        return f"{self._poison}. Load a checkpoint of both, the model's first, on all ranks"

    def _refuse_poison(self) -> None:
        """Raises `PoisonedOptimizer` after a step that failed half way, or about which the ranks disagreed.

        For the latter it waits; the ranks tell each other more at the next step.
        """
        if self._poison is not None:
            raise PoisonedOptimizer(self._advice())
        if self._pending is None or device.is_capturing(device.device_of(self.param_groups)):
            return
        complaint = self._pending.complaint(together=False)
        if complaint:
            self._poison = self._disagreed(self._pending, complaint)
            raise PoisonedOptimizer(self._advice())

    def _normalize_keys(self) -> None:
        """Reads what was written into the groups since the last step under other words for their keys."""
        for number, group in enumerate(self.param_groups):
            self._assign_algorithm(group, number)
            words = self._words(group)
            if not words.keys().isdisjoint(group):
                schema.translate(group, words, f"group {number}", latest=True)
        schema.mirror_betas(self.param_groups, self._last_betas, self._momenta)

    def _make_plan(self) -> Plan:
        self._normalize_keys()
        found = existing(self.param_groups, self.state, self._STATE_NAMES)
        return Plan(self._settings(), found, self._meshes)

    def _settings(self) -> list[dict[str, Any]]:
        """The groups as the core reads them: with the user's functions, which no checkpoint should hold."""
        if not self._functions:
            return self.param_groups
        return [{**group, **self._functions} for group in self.param_groups]

    def _bind(self, *, in_step: bool = False, together: bool = False) -> Session:
        """Compiles the plan, makes missing states and binds both.

        Args:
            in_step: whether the groups count a step that begins.
            together: whether all ranks do this at the same time, so that states can be brought to owners.
        """
        refuse_modes()
        self._session = self._evidence = None
        self._is_unchecked = True  # also where no step has it bound
        self._looked = frozenset()
        groups = self._read_groups()
        averages.drop_others(self.param_groups, self.state)
        masters.log_dropped(masters.drop_others(self.param_groups, self.state))
        plan = self._make_plan()
        memory = workspaces(plan, list(parameters(self.param_groups)))
        self._places = tuple(where for where, _ in memory)
        for where in self._places:
            device.refuse_capture(where)
            self_check.approve(where, plan.sources())
        plan.preflight(self.param_groups, in_step)
        done = [group["step"] - in_step for group in self.param_groups]
        optional = {name: self._class_of(name)._OPTIONAL_ROLES for name in plan.algorithms}
        with alone():
            arena = self._workspace(memory)
            try:
                states = materialise(
                    plan,
                    self.param_groups,
                    self.state,
                    self._STATE_NAMES,
                    optional,
                    done,
                    self._reserve,
                    self._owned,
                )
            except BaseException:
                self._owned.undo(self.state)
                raise
        comms = tuple(collectives.bind(plan.transfers, arena[0], groups))  # none where there are several
        self._reserve = None
        self._session = Session(plan, self.param_groups, states, self.state, arena)
        self._schedule, self._comms = tuple(plan.schedule), comms
        self._waits = any(transfer["when_due"] for transfer in plan.transfers)
        session = self._session
        if together:
            self._owned.scatter(self.state, groups)
        elif not in_step and self._owned.put_back(self.state):
            self._session = None  # the next step scatters them
        return session

    def _warn_of_cold_states(self) -> None:
        """Warns once about groups whose checkpoint had steps and no states."""
        for number in self._cold:
            logging.getLogger("oxidion").warning(
                "group %d: its checkpoint has %d steps and no states, which start from zero. An optimizer "
                "that has not stepped has no states for torch.distributed.checkpoint to fill: call "
                "init_state() before its state_dict()",
                number,
                self.param_groups[number]["step"],
            )
        self._cold = ()

    def _count_loaded(self) -> None:
        """Looks once, at the first step after a state dict was loaded, for counters that it did not have."""
        if device.is_capturing(device.device_of(self.param_groups)):
            return
        self._is_loaded = False
        found = counters.uncounted(self.param_groups, self.state, self._STATE_NAMES)
        if found:
            groups = self._read_groups() if self._groups is None else self._groups
            counters.take_from_groups(found, self.param_groups, groups)

    def _workspace(self, memory: Sequence[tuple[torch.device, int]]) -> list[torch.Tensor]:
        """Memory of float32 on each device for what a step keeps for itself alone."""
        return [zeros([count], torch.float32, where, self._reserve) for where, count in memory]

    def _read_groups(self) -> comm.Groups:
        params = list(parameters(self.param_groups))
        self._groups = comm.groups_of(params, self._meshes)
        self._known = grid.known(self._groups, comm.root_axes(params))
        return self._groups

    def _forget(self) -> None:
        """Drops the plan, so that the next step is replanned."""
        self._session = self._evidence = None
        self._groups = None
        self._agreed = False

    def _reshard_states(self) -> None:
        """Moves states that were loaded into the layouts of their parameters; every rank does it."""
        held = entries_of(self.state, self.param_groups)
        values = [value for _, _, own in held for value in own.values()]
        self._owned = OwnerSharded()
        self._owned.is_fresh = not held
        everything = [*(param for _, param, _ in held), *values]
        if self._meshes.groups or any(map(comm.is_distributed, everything)):
            reshard_states(self._make_plan(), self.param_groups, self.state, self._STATE_NAMES)
        pin(self.param_groups, self.state)
