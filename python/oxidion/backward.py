"""Steps in the backward pass: a part of the model is stepped as soon as its gradients are there."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from oxidion._core import averages
from oxidion._core.base import HOOKS, OxOptimizer
from oxidion._core.reserve import zeros
from oxidion._core.state import parameters, workspaces
from oxidion._core.table import Table
from oxidion._core.validate import names_of
from oxidion._cuda import device
from oxidion._dist import comm, grid
from oxidion._oxidion import LayoutError, Plan, Session
from oxidion._torch.compat import FLAT, disable_dynamo, is_inside_ddp

logger = logging.getLogger(__name__)

_OF_UNITS = frozenset({"params", "param_names", "seed_by"})
"""Keys that a group of a unit does not take from the group of the whole optimizer."""

Place = tuple[int, int]
"""A parameter's group and its position in it."""

_stepped_by: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By parameter with a hook: a weak reference to the optimizer that steps it."""


class _Workspace:
    """Workspace that units share: they are stepped one after the other, so the largest is enough for all."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}

    def get(self, floats: int, where: torch.device) -> Tensor:
        """Returns the first ``floats`` elements; memory that is too small is replaced for later callers."""
        own = self._memory.get(where)
        if own is None or own.numel() < floats:
            own = self._memory[where] = zeros([floats], torch.float32, where)
        return own[:floats]


class _Unit(OxOptimizer):
    """A part of an optimizer: its own groups and plan, the whole's states. Its steps never communicate."""

    _memory: _Workspace
    places: list[list[Place]]
    arrived: set[int]
    has_stepped: bool

    @override
    def _check_written(self) -> None:
        """Does nothing: `BackwardOptimizer` has checked the groups of the whole."""

    @override
    def _read_groups(self) -> comm.Groups:
        self._groups, self._known = {}, grid.NO_AXES
        return self._groups

    @override
    def _workspace(self, memory: Sequence[tuple[torch.device, int]]) -> list[Tensor]:
        return [self._memory.get(count, where) for where, count in memory]

    @override
    def _make_plan(self) -> Plan:
        plan = super()._make_plan()
        if plan.transfers:
            names = self.names()
            raise LayoutError(
                f"{names[0]}{' and others' * (len(names) > 1)}: a step of {self._described()} takes "
                f"{len(plan.transfers)} collectives on this layout, and in the backward pass they would come "
                "in the order of its hooks. Step after it, or take what sends nothing here: AdamW, AdEMAMix "
                "or Lion, on any layout"
            )
        return plan

    @override
    def _place_gradients(self, session: Session | None) -> bool:
        if session is not None and (misplaced := session.misplaced_gradients()):
            at = misplaced[0][0]
            raise LayoutError(
                f"{self.names()[at]}: its gradient is placed otherwise than the parameter, and bringing it "
                "there is a collective, which has no order in the backward pass. Step after it"
            )
        return super()._place_gradients(session)

    def names(self) -> list[str]:
        """Names of its parameters."""
        return [name for number, group in enumerate(self.param_groups) for name in names_of(group, number)]

    def parameters(self) -> Iterator[Tensor]:
        """Its parameters."""
        for group in self.param_groups:
            yield from group["params"]

    def is_complete(self) -> bool:
        """True where every parameter that requires a gradient has got one since the last step."""
        return all(id(param) in self.arrived for param in self.parameters() if param.requires_grad)

    def _described(self) -> str:
        return " and ".join(sorted({repr(group["algorithm"]) for group in self.param_groups}))


class BackwardOptimizer(Optimizer):
    """Optimizer whose steps are taken within the backward pass: `in_backward` returns it.

    ``param_groups`` and ``state`` are those of the optimizer that the factory made, so schedulers, state
    dicts and checkpoints are too: what an ordinary run has saved is loaded here, and the other way round.

    Attributes:
        optimizer: the optimizer that the factory made. It plans no step of its own.
        units: what is stepped at once, an optimizer each, which shares its states.
    """

    _step_supports_amp_scaling = True

    def __init__(self, model: nn.Module, optimizer: OxOptimizer, per: str) -> None:
        self.optimizer = optimizer
        self.defaults = optimizer.defaults
        for registry in HOOKS:
            setattr(self, registry, getattr(optimizer, registry))
        self._patch_step_function()
        self._model, self._per = model, per
        self._memory, self._turn = _Workspace(), device.InTurn()
        self._hooks: list[RemovableHandle] = []
        self._guard: RemovableHandle | None = None
        weakref.finalize(self, _remove, self._hooks)
        self.units: list[_Unit] = []
        self._is_checked = False
        self._frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
        optimizer._reserve, optimizer._init_states = None, False
        self._make_units()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all units."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of all units, by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state
        for unit in self.units:
            unit.state = state
            unit._forget()

    def _refuse_scaler(self, _value: object) -> NoReturn:
        raise RuntimeError(
            "a GradScaler cannot go with steps in the backward pass: they have been taken with the scaled "
            "gradients before it looked for infinities. Train in bfloat16 without a scaler, or step after "
            "the backward pass"
        )

    grad_scale = property(fset=_refuse_scaler, doc="Refused: what a ``GradScaler`` would tell a step.")
    found_inf = property(fset=_refuse_scaler, doc="Refused: what a ``GradScaler`` would tell a step.")

    # ------------------------------------------------------------------- units

    def _make_units(self) -> None:
        """Splits the groups by module or parameter; every parameter that requires a gradient gets a hook."""
        self.remove_hooks()
        whole = self.optimizer
        whole._forget()
        for number, group in enumerate(whole.param_groups):
            _check_group(group, number)
        self.units = self._units_of(parameters(whole.param_groups))
        for unit in self.units:
            self._report(unit)
            _refuse_others(unit)
        self._start()
        for unit in self.units:
            for param in unit.parameters():
                handle = param.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _hook(weakref.ref(self), weakref.ref(unit))
                )
                self._hooks.append(handle)
                _stepped_by[param] = weakref.ref(self)
        own: list[RemovableHandle] = []
        self._guard = self._model.register_forward_pre_hook(_refuse_ddp(weakref.ref(self), own))
        own.append(self._guard)
        taken = {id(param) for unit in self.units for param in unit.parameters()}
        self._left_out = [param for param in parameters(whole.param_groups) if id(param) not in taken]

    def _units_of(self, params: list[Tensor]) -> list[_Unit]:
        """Units of those of these parameters that require a gradient."""
        owners, wanted = _owners(self._model, self._per), set(map(id, params))
        split: dict[Any, dict[int, list[Place]]] = {}
        for number, group in enumerate(self.param_groups):
            if "param_names" not in group:
                group["seed_by"] = "name"
                group["param_names"] = [owners[id(p)][1] if id(p) in owners else "" for p in group["params"]]
            for at, (name, param) in enumerate(zip(group["param_names"], group["params"], strict=True)):
                if id(param) not in owners:
                    raise ValueError(
                        f"group {number}, parameter {at} {name!r} of the optimizer is none of the model's: "
                        "the factory has to take the parameters that it is given, or those of this model"
                    )
                if param.requires_grad and id(param) in wanted:
                    split.setdefault(owners[id(param)][0], {}).setdefault(number, []).append((number, at))
        return [self._unit([*places.values()]) for places in split.values()]

    def _check_gradients(self) -> None:
        """Refuses gradients that no step was taken with, or that came after it.

        Raises:
            RuntimeError: for such a gradient; it names the parameter and the cause.
        """
        self._refuse_unfrozen()
        for unit in self.units:
            for name, param in zip(unit.names(), unit.parameters(), strict=True):
                if param.grad is not None and id(param) not in unit.arrived:
                    raise RuntimeError(
                        f"{name}: there is a gradient that no step was taken with. The hook of the parameter "
                        "was not called: the gradient was assigned, hooks were removed, or the backward pass "
                        "ran under compiled autograd"
                    )
                if param.grad is not None and unit.has_stepped:
                    raise RuntimeError(
                        f"{name}: a second gradient came, and a step was taken with the first. Call "
                        "zero_grad() to drop it, then step()"
                    )

    def _refuse_unfrozen(self) -> None:
        """Refuses gradients of parameters that were frozen when the optimizer was made, and are in no group.

        Raises:
            RuntimeError: for such a gradient; it says what to do.
        """
        unfrozen = [(name, p) for name, p in self._frozen if p.requires_grad and p.grad is not None]
        held = set(map(id, parameters(self.param_groups))) if unfrozen else set()
        for name, param in unfrozen:
            if id(param) not in held:
                raise RuntimeError(
                    f"{name}: there is a gradient, and no group has the parameter, which was frozen when the "
                    "optimizer was made. Add it by add_param_group(), or drop its gradient before step() "
                    "where another optimizer steps it"
                )

    def _step_unfrozen(self, params: list[Tensor]) -> None:
        """Steps parameters of the groups that have no hook, as they were frozen when units were made."""
        for unit in self._units_of(params):
            self._report(unit)
            unit.init_state()
            self._step(unit)

    def _unit(self, places: list[list[Place]]) -> _Unit:
        """A unit of the parameters at these places, one list for each of its groups."""
        whole = self.optimizer
        cls = type(whole)
        made: type[_Unit] = type(cls.__name__, (_Unit, cls), {"__module__": cls.__module__})
        unit = made.__new__(made)
        unit.__dict__.update(whole.__dict__)
        unit.places, unit.arrived, unit._memory, unit._last_betas = places, set(), self._memory, {}
        unit.has_stepped = False
        unit.param_groups = [{} for _ in places]
        unit._forget()
        return unit

    def _start(self) -> None:
        """Makes the states of all units and binds their plans, with one workspace for all."""
        for unit in self.units:
            unit.state, unit._poison, unit._pending = self.state, None, None
            unit.has_stepped = False
            unit.arrived.clear()
            unit._forget()
            self._report(unit)
        largest: dict[torch.device, int] = {}
        for unit in self.units:
            for where, count in workspaces(unit._make_plan(), list(parameters(unit.param_groups))):
                largest[where] = max(count, largest.get(where, 0))
        for where, count in largest.items():
            self._memory.get(count, where)
        for unit in self.units:
            unit.init_state()

    def _report(self, unit: _Unit) -> None:
        """Gives a unit's groups the settings that those of the whole optimizer have now."""
        self.optimizer._normalize_keys()
        for own, places in zip(unit.param_groups, unit.places, strict=True):
            number = places[0][0]
            group = self.param_groups[number]
            _check_group(group, number)
            for key in own.keys() - group.keys() - _OF_UNITS:
                del own[key]
            own.update((key, value) for key, value in group.items() if key not in _OF_UNITS)
            for key in ("params", "param_names"):
                own[key] = [group[key][at] for _, at in places]

    @disable_dynamo
    def _arrived(self, unit: _Unit, param: Tensor) -> None:
        """Steps a unit whose last gradient has come: the hook of its parameters."""
        if id(param) in unit.arrived:
            at = [id(other) for other in unit.parameters()].index(id(param))
            raise RuntimeError(
                f"{unit.names()[at]}: a second gradient came before optimizer.step(). Call step() after each "
                "backward pass: a step within it cannot wait for gradients that are accumulated. (FSDP2 does "
                "so with set_requires_gradient_sync(False); checkpointing that runs backward passes of its "
                "own needs use_reentrant=False)"
            )
        unit.arrived.add(id(param))
        if unit.is_complete():
            self._step(unit)

    def _step(self, unit: _Unit) -> None:
        """Steps a unit and drops its gradients."""
        if not self._is_checked:
            self._check_all()
        self._report(unit)
        held = [param for param in unit.parameters() if param.grad is not None]
        for kind in {_copied_from(param) for param in held} - {None}:
            device.finish_copies(str(kind))
        with self._turn:
            unit._take_step()
            for param in held:
                device.keep_for_stream(comm.local(param.grad))  # type: ignore[arg-type]
                param.grad = None
        unit.has_stepped = True

    def _check_all(self) -> None:
        """Refuses what the step of any unit would refuse, before one of them is taken.

        Raises:
            RuntimeError: while parameters hold their averages.
            ValueError: for settings that were written into the groups and do not go together.
        """
        whole, self._is_checked = self.optimizer, False
        whole._normalize_keys()
        whole._check_written()
        if whole._inside_averaged:
            raise RuntimeError(averages.IN_EVAL)
        averages.refuse_eval(self.param_groups, self.state)
        self._is_checked = True

    # -------------------------------------------------------------------- step

    @override
    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Ends a step: checks that every gradient has been stepped with, and counts it.

        A unit with gradients for only some of its parameters is stepped here, as it would be after the
        backward pass. Units without any are skipped. Parameters of the groups that were frozen before are
        stepped here once: from the next backward pass on they are stepped within it.

        Raises:
            RuntimeError: for a closure, for gradients that came without the backward pass or whose hooks were
                not called, for those of parameters that were frozen and are in no group, and with a
                ``GradScaler``.
        """
        if closure is not None:
            raise RuntimeError(
                "steps in the backward pass take no closure: each of its backward passes would be a step"
            )
        self._check_gradients()
        self._check_all()
        for unit in self.units:
            if unit.arrived and any(param.grad is not None for param in unit.parameters()):
                self._step(unit)
            elif not unit.has_stepped:
                self._report(unit)
                if averages.is_missing(unit.param_groups, self.state):
                    unit.init_state()
        unfrozen = [param for param in self._left_out if param.requires_grad] if self._hooks else []
        self._step_unfrozen([param for param in unfrozen if param.grad is not None])
        with self._turn:  # what comes next on this stream sees the steps
            for group in self.param_groups:
                group["step"] += 1
        for unit in self.units:
            unit.arrived.clear()
            unit.has_stepped = False
        self._is_checked = False
        if unfrozen:
            self._make_units()

    @override
    @disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients, those of units that have not been stepped, too: they may come again.

        Args:
            set_to_none: accepted for compatibility; they are set to None in any case, as by steps.
        """
        del set_to_none
        super().zero_grad(set_to_none=True)
        for unit in self.units:
            if not unit.has_stepped:
                unit.arrived.clear()
        self._is_checked = False

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters of the model, and hooks for them.

        Raises:
            ValueError: for parameters that are not the model's, and as the optimizer's own.
        """
        self._refuse_open("add_param_group()")
        self.optimizer.add_param_group(param_group)
        try:
            self._make_units()
        except BaseException:
            self.param_groups.pop()
            self._make_units()
            raise

    def remove_hooks(self) -> None:
        """Ends steps in the backward pass: gradients then remain in ``.grad``.

        Another optimizer may then step the parameters, `in_backward` too. An optimizer that is
        garbage-collected removes its hooks itself.
        """
        _remove(self._hooks)
        if self._guard is not None:
            self._guard.remove()
        for unit in self.units:
            for param in unit.parameters():
                if _owner_of(param) is self:
                    del _stepped_by[param]

    # ------------------------------------------------------------- checkpoints

    def _refuse_open(self, what: str) -> None:
        if any(unit.arrived for unit in self.units):
            raise RuntimeError(f"{what} in the middle of a step: call optimizer.step() before it")

    @override
    def state_dict(self) -> dict[str, Any]:
        """The state dict that the optimizer would have if it stepped after the backward pass.

        Raises:
            RuntimeError: between a backward pass and ``step()``.
            PoisonedOptimizer: after a step that failed half way.
        """
        self._refuse_open("state_dict()")
        for unit in self.units:
            unit._refuse_poison()
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of such an optimizer or of an ordinary one of the same groups.

        Random numbers go by the names of the parameters also where the state dict has none; this is logged.

        Raises:
            ValueError: for groups and states that no step could use; nothing has changed then.
        """
        names = [group["param_names"] for group in self.param_groups]
        self.optimizer.load_state_dict(state_dict)
        self.optimizer._warn_of_cold_states()
        for group, own in zip(self.param_groups, names, strict=True):
            group.setdefault("param_names", own)
        if any(group.get("seed_by") == "position" for group in self.param_groups):
            logger.warning(
                "the state dict has no names of parameters: random numbers went by their positions and go by "
                "names from here on"
            )
        self._start()

    def __getstate__(self) -> NoReturn:
        """Refuses to be pickled or copied."""
        raise TypeError("an optimizer with hooks in a model cannot be pickled or copied: save state_dict()")

    def eval(self) -> None:
        """Has the parameters hold their averages, as ``OxOptimizer.eval``."""
        self._refuse_open("eval()")
        self.optimizer.eval()

    def train(self) -> None:
        """Has the parameters hold the weights at which gradients are taken, as ``OxOptimizer.train``."""
        self.optimizer.train()

    def averaged(self) -> AbstractContextManager[None]:
        """A context in which the parameters hold their averages, as ``OxOptimizer.averaged``."""
        self._refuse_open("averaged()")
        return self.optimizer.averaged()

    def averaged_state_dict(self, model: nn.Module) -> dict[str, Any]:
        """A copy of ``model.state_dict()`` with the averages, as ``OxOptimizer.averaged_state_dict``."""
        self._refuse_open("averaged_state_dict()")
        return self.optimizer.averaged_state_dict(model)

    def init_state(self) -> None:
        """Makes states that are missing; `in_backward` has made all."""
        for unit in self.units:
            self._report(unit)
            unit.init_state()

    def synchronize_for_checkpoint(self) -> None:
        """Compares on all ranks how many steps were taken: to be called before a checkpoint.

        Raises:
            PlanMismatch: on every rank when ranks have taken other numbers of steps.
        """
        self.optimizer.synchronize_for_checkpoint()

    # ----------------------------------------------------------- introspection

    def explain(self) -> Table:
        """Describes each parameter in one row, with the columns of ``OxOptimizer.explain``."""
        return self.optimizer.explain()

    def plan(self) -> list[Plan]:
        """The schedules in force, one for each of ``units``."""
        for unit in self.units:
            self._report(unit)
        return [unit.plan() for unit in self.units]

    @override
    def __repr__(self) -> str:
        return f"{len(self.units)} units in the backward pass of {self.optimizer!r}"


def _owners(model: nn.Module, per: str) -> dict[int, tuple[Any, str]]:
    """By parameter: what it is stepped with, the first module that has it or itself, and its name."""
    found: dict[int, tuple[Any, str]] = {}
    for path, module in model.named_modules():
        for own, param in module.named_parameters(prefix=path, recurse=False):
            found.setdefault(id(param), (id(param) if per == "parameter" else path, own))
    return found


def _hook(whole: weakref.ref[BackwardOptimizer], part: weakref.ref[_Unit]) -> Callable[[Tensor], None]:
    """A hook of a parameter that does not keep its optimizer alive."""

    def arrived(param: Tensor) -> None:
        optimizer, unit = whole(), part()
        if optimizer is not None and unit is not None:
            optimizer._arrived(unit, param)

    return arrived


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _owner_of(param: Tensor) -> BackwardOptimizer | None:
    """The optimizer that steps a parameter in the backward pass, if there is one."""
    found: weakref.ref[BackwardOptimizer] | None = _stepped_by.get(param)  # type: ignore[no-untyped-call]
    return None if found is None else found()


def _refuse_others(unit: _Unit) -> None:
    """Refuses parameters that another optimizer steps in the backward pass.

    Raises:
        ValueError: for such a parameter; it names the parameter and says what to do.
    """
    for name, param in zip(unit.names(), unit.parameters(), strict=True):
        if _owner_of(param) is not None:
            gc.collect()  # reference cycles of schedulers keep an optimizer alive that is no longer in use
        if _owner_of(param) is not None:
            raise ValueError(
                f"{name}: another optimizer of in_backward() steps it already, and would drop its gradient. "
                "Call remove_hooks() of that one first, or delete it and the schedulers that have it"
            )


def _check_group(group: dict[str, Any], number: int) -> None:
    if group.get("max_grad_norm"):
        raise ValueError(
            f"max_grad_norm must be None in the backward pass, got {group['max_grad_norm']!r} (group "
            f"{number}): the norm of all gradients is not known before the last of them"
        )


def _copied_from(param: Tensor) -> str | None:
    """Type of the device from which gradients of an offloaded parameter are copied; None for any other."""
    mesh = getattr(param, "device_mesh", None)
    return None if mesh is None or mesh.device_type == comm.local(param).device.type else mesh.device_type


def _refuse_ddp(whole: weakref.ref[BackwardOptimizer], own: list[RemovableHandle]) -> Callable[..., None]:
    """A hook of a model, with its handle in ``own``, that refuses DDP; once, where the optimizer is gone."""

    def refuse(*_call: object) -> None:
        if not is_inside_ddp():
            return
        if whole() is not None:
            raise TypeError(_DDP)
        _remove(own)
        raise TypeError(
            f"{_DDP}. The optimizer that in_backward() returned is gone, and its hooks with it: if that is "
            "meant, call the model again"
        )

    return refuse


_DDP = (
    "DistributedDataParallel has not averaged a gradient yet when the hook of its parameter is called, so "
    "each rank would step with its own. Use FSDP2 (torch.distributed.fsdp.fully_shard), or step after the "
    "backward pass"
)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(_DDP)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ValueError(
                f"{path}: gradients of an embedding with sparse=True are sparse, which no optimizer here "
                "takes; use sparse=False"
            )
    for name, param in model.named_parameters():
        if any(getattr(param, flat, False) for flat in FLAT):
            raise TypeError(
                f"{name}: FullyShardedDataParallel (FSDP1) has not reduced a gradient yet when the hook of "
                "its parameter is called; use FSDP2 (torch.distributed.fsdp.fully_shard)"
            )


def in_backward(
    model: nn.Module,
    factory: Callable[[list[tuple[str, Tensor]]], OxOptimizer],
    *,
    per: str = "module",
) -> BackwardOptimizer:
    r"""Steps each module as soon as its gradients are there, within the backward pass, and drops them.

    ::

        optimizer = oxidion.in_backward(model, partial(oxidion.AdamW, lr=1e-3))
        for inputs, targets in batches:
            loss(model(inputs), targets).backward()  # steps are taken in here
            optimizer.step()                         # checks, and counts the step
            scheduler.step()

    The gradients that exist at once are those of one module instead of the model's: :math:`\max_u e |u|`
    bytes instead of :math:`e \sum_u |u|`, where unit u has :math:`|u|` elements of e bytes. The results are
    those of an ordinary step, bit for bit: a parameter's gradient is complete when its hook is called, and
    nothing in this pass reads the weights after it. Parameters, states and ``.grad`` are written in place
    during ``backward()``.

    A parameter that several modules share belongs to the first of them; one that requires no gradient is left
    out until it does. States are made at once. Hooks go with the optimizer: keep it while training.

    Args:
        model: module whose parameters are stepped, after ``fully_shard`` where that is used.
        factory: called once with names and parameters of all that require gradients; returns an optimizer of
            this package over them or over groups made of them. ``functools.partial(oxidion.AdamW, lr=1e-3)``,
            or ``lambda named: oxidion.Muon(named, model=model)``.
        per: "module", what a module itself has, or "parameter".

    Returns:
        An optimizer with all groups and states. Its ``step()`` is called after each backward pass.

    Raises:
        ValueError: for another word for ``per``, ``max_grad_norm``, meshes or process groups given to the
            optimizer, parameters that are not the model's or that another optimizer steps in the backward
            pass, and embeddings with sparse gradients.
        TypeError: for a model that is no module, an optimizer of another package, DDP, and FSDP1. DDP around
            the model is found in the first forward pass.
        LayoutError: where a step communicates on the layout of a parameter; in the hook, where a layout or a
            gradient has changed since.
        RuntimeError: from the hook, for a second gradient before ``step()``.
    """
    if per not in ("module", "parameter"):
        raise ValueError(f"per must be 'module' or 'parameter', got {per!r}")
    _check_model(model)
    optimizer = factory([(name, p) for name, p in model.named_parameters() if p.requires_grad])
    if not isinstance(optimizer, OxOptimizer):
        raise TypeError(f"the factory must return an optimizer of oxidion, got {type(optimizer).__name__}")
    if optimizer._meshes is not comm.NO_MESHES:
        raise ValueError(
            f"{optimizer._meshes.argument} and other meshes of the constructor must be left out in the "
            "backward pass: gradients of copies are compared or averaged after it. Layouts of DTensors are "
            "read from the parameters"
        )
    return BackwardOptimizer(model, optimizer, per)
