"""Base class of all optimizers: groups, state, one step through the core."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from oxidion._core import (
    averages,
    constructor,
    group_checks,
    loading,
    masters,
    norms,
    schema,
    signature,
    summary,
    validate,
)
from oxidion._core.changes import ChangeTracker, device_keys
from oxidion._core.owned import OwnerSharded
from oxidion._core.state import average_momenta, own_copies, parameters, reserve, stored
from oxidion._core.stepper import Stepper
from oxidion._core.table import Table
from oxidion._cuda import self_check
from oxidion._cuda.device import device_of, devices_of
from oxidion._dist import comm
from oxidion._dist.agree import check_steps
from oxidion._oxidion import Plan, set_defaults
from oxidion._torch.compat import FLAT, PRIVATE, check_capture, disable_dynamo

HOOKS = PRIVATE["torch.optim.Optimizer()"]
"""Registries of hooks, which an optimizer that is made without torch's constructor has to be given."""


class OxOptimizer(Stepper, Optimizer):
    """A ``torch.optim.Optimizer`` whose step is planned and computed in Rust.

    ``param_groups`` may mix algorithms: the group key ``algorithm`` says which one optimizes the group.
    `CommonOptions` describes the arguments of every class.

    Args:
        params: a model, whose parameters `param_groups` sorts; or parameters, groups (dicts with a key
            "params"), or pairs of names and parameters. With names random numbers come from the name, without
            them from the position.
        model_options: with a model, the arguments of `param_groups` by keyword, as ``scalar_lr``,
            ``head_lr``, ``overrides`` and ``summary``, and group keys. Pass ``model=`` where a framework
            supplies parameters or groups: only those are stepped, and keys of the groups override. Of them
            ``extra_keys`` goes without a model too: names of group keys of your own, as ``("lr_mult",)``,
            which groups keep, checkpoints have and no step reads.

    Raises:
        ValueError: for hyper-parameters out of range, unknown group keys, and parameters that the algorithm
            does not take.
        TypeError: for parameters that are not real floating-point tensors, unknown arguments, and meshes that
            are none.
        RuntimeError: for ``differentiable=True``.
    """

    _ALGORITHM: ClassVar[str]
    _MATRIX: ClassVar[bool] = True
    _COMMUNICATES: ClassVar[bool] = True
    _TAKES_VECTORS: ClassVar[bool] = False
    _SCHEMA: ClassVar[dict[str, validate.Field]]
    _ABSENT: ClassVar[Mapping[str, Any]] = {}
    """Settings that the core reads for the class's algorithm and that its groups do not have, with values."""
    _OWN_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    """Defaults of common arguments that are not those of the schema."""
    _registry: ClassVar[dict[str, type[OxOptimizer]]] = {}
    _sorter: ClassVar[constructor.Sorter]
    """The sorting of models into groups, which `oxidion.groups` provides."""

    _step_supports_amp_scaling = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_MATRIX" in cls.__dict__ and "_COMMUNICATES" not in cls.__dict__:
            cls._COMMUNICATES = cls._MATRIX
        if "_ALGORITHM" in cls.__dict__:
            if OxOptimizer._registry.setdefault(cls._ALGORITHM, cls) is cls:
                fields = schema.COMMON | cls._SCHEMA
                usual = {key: field.default for key, field in fields.items()}
                set_defaults(cls._ALGORITHM, {**usual, **cls._ABSENT})
            factor = next((key for key in schema.MOMENTA if key in cls._SCHEMA), None)
            if factor is not None:
                cls._momenta[cls._ALGORITHM] = factor
        if "__init__" in cls.__dict__ and hasattr(cls, "_ALGORITHM"):
            words = cls.__dict__.get("_WORDS", {})
            rename = functools.partial(schema.translate, words=words, where="arguments")
            constructor.complete(
                cls,
                OxOptimizer,
                words,
                rename,
                {*schema.COMMON, *cls._SCHEMA},
                lambda: OxOptimizer._sorter,
                signature.gathered(cls._OWN_DEFAULTS),
            )

    _init_states: bool = False
    _extra_keys: frozenset[str] = frozenset()
    """Keys of groups that are the user's own."""
    _given: frozenset[tuple[int, ...]] = frozenset()
    _names_so_far: set[str] | None = None
    _given_so_far: set[Tensor] | None = None
    """Parameters of the groups that the constructor has made; None when it is done."""

    def __init__(self, params: Any, arguments: Mapping[str, Any]) -> None:
        """Checks the arguments and builds the groups.

        Args:
            params: whatever torch's optimizers take.
            arguments: the ``locals()`` of a constructor; those that are group keys are the defaults.
        """
        group_checks.refuse_known(self._extra_keys, self._registry.values())
        arguments = signature.spread(arguments)
        init_state, distributed_mesh = arguments["init_state"], arguments["distributed_mesh"]
        if not validate.flag(False).check(init_state):
            raise ValueError(f"init_state must be True or False, got {init_state!r}")
        defaults = schema.defaults(arguments, self._SCHEMA)
        self._refuse_differentiable(defaults)
        if distributed_mesh is not None:
            self._meshes = comm.read_meshes(("distributed_mesh", distributed_mesh, True))
        defaults = {**validate.plain_group(defaults), "algorithm": self._ALGORITHM, "step": 0}
        dtype = defaults.get("state_dtype")
        defaults["state_dtype"] = validate.dtype_name(dtype, "state_dtype")
        if "beta2" in self._SCHEMA and validate.is_pair(defaults["betas"]):
            defaults["beta1"], defaults["beta2"] = defaults["betas"]
        lr = defaults["lr"]
        if isinstance(lr, Tensor) and defaults.get("foreach") and not defaults.get("capturable"):
            raise ValueError("lr as a Tensor is not supported for capturable=False and foreach=True")
        validate.check_group(defaults, schema.COMMON | self._SCHEMA, schema.FOREIGN_KEYS, "defaults")
        self._last_betas: dict[int, schema.Seen] = {}
        self._owned, self._changes = OwnerSharded(), ChangeTracker()
        self._given_so_far, self._names_so_far = set(), set()
        try:
            super().__init__(params, defaults)
        finally:
            self._given_so_far = self._names_so_far = None
        name = type(self).__name__
        group_checks.log_other_algorithms(name, self._ALGORITHM, self.param_groups, self._SCHEMA)
        takers = {self._registry[group["algorithm"]] for group in self.param_groups}
        if any(taker._MATRIX for taker in takers) and not self._read_groups():
            group_checks.log_repeated_work(name)
        schema.mirror_betas(self.param_groups, self._last_betas, self._momenta)
        if init_state:
            self._init_states = True
            self.init_state()
        else:
            self._reserve = reserve(self._make_plan, self.param_groups)

    # ------------------------------------------------------------------ groups

    @classmethod
    def _schemas(cls) -> dict[str, dict[str, validate.Field]]:
        return {name: other._SCHEMA for name, other in OxOptimizer._registry.items()}

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group. Missing keys get the class's defaults, then those of the group's algorithm.

        Raises:
            ValueError: for unknown keys, values out of range, or parameters that the algorithm does not take.
            TypeError: for parameters that are not real floating-point tensors.
        """
        number, is_bare = len(self.param_groups) if hasattr(self, "param_groups") else 0, True
        if isinstance(param_group, dict):
            schemas = self._schemas()
            is_bare = "algorithm" not in param_group
            self._sorter.name_algorithm(type(self), param_group, self.defaults["lr"])
            param_group.update(validate.plain_group(param_group, self._extra_keys))
            self._refuse_differentiable(param_group)
            schema.translate(param_group, self._words(param_group), f"group {number}")
            own = self._registry.get(param_group.get("algorithm", self._ALGORITHM), type(self))
            mirrors = "beta1" in self.defaults and schema.mirrors_betas(own._SCHEMA)
            words = {*own._WORDS, *(("beta1", "beta2") if mirrors else ())}
            group_checks.refuse_alien(param_group, own._ALGORITHM, schemas, words, f"group {number}")
            schema.spell(param_group, self.defaults, self._SCHEMA, schemas)
            schema.fill_defaults(param_group, self._SCHEMA, schemas)
            self._check(param_group, number)
            group_checks.name(param_group, number, self.param_groups, self._names_so_far)
        self._append(param_group)
        try:
            if "param_names" not in param_group:
                param_group["seed_by"] = "position"
            schema.complete(param_group, self.defaults, self._schemas())
            schema.resolve_memory_fraction(param_group)
            self._check(param_group, number)
            averages.check_new(param_group, f"group {number}")
            self._check_together(param_group, f"group {number}")
            self._check_params(param_group, number, is_bare=is_bare)
            self._given |= {tuple(param.shape) for param in param_group["params"]}
            if self._given_so_far is None:
                schema.mirror_betas(self.param_groups, self._last_betas, self._momenta)
            self._forget()
            self._reserve = None
            # Where matrices have other owners now, the next step says so.
            if self._init_states and self._owned.first_unsynced(self.state) is None:
                self.init_state()
        except BaseException:
            self.param_groups.pop()
            self._forget()
            raise

    def _append(self, group: dict[str, Any]) -> None:
        """Appends a group by torch's method, which compares its parameters with those of all groups.

        In a constructor that is quadratic in the groups: 65 s for 20,000. There torch sees the first group
        alone, and a set has the parameters of the others.

        Raises:
            ValueError: for a parameter that another group has.
        """
        if self._given_so_far is None:
            super().add_param_group(group)
            return
        groups, self.param_groups = self.param_groups, self.param_groups[:1]
        try:
            super().add_param_group(group)
        finally:
            self.param_groups = groups
        if not self._given_so_far.isdisjoint(group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        self._given_so_far.update(group["params"])
        groups.append(group)
        if self._names_so_far is not None:
            self._names_so_far.update(group.get("param_names", ()))

    def _refuse_differentiable(self, settings: Mapping[str, Any]) -> None:
        if settings.get("differentiable"):
            raise RuntimeError(
                f"{type(self).__name__} does not support differentiable=True: its step is not recorded"
            )

    def _check(self, group: dict[str, Any], number: int) -> None:
        schemas = self._schemas()
        own = schemas.get(group.get("algorithm", self._ALGORITHM), self._SCHEMA)
        fields = self._SCHEMA | schema.COMMON | own
        where = f"group {number}"
        known = schema.known_keys(schemas) | self._extra_keys
        validate.check_group(group, fields, known, where, self._words(group))
        validate.check_decay(group, where)

    def _check_together(self, group: dict[str, Any], where: str) -> None:
        own = self._registry[group["algorithm"]]
        own._check_settings(group, where)
        averages.check(group, where, is_decoupled=own._IS_DECOUPLED)
        masters.check(group, where)
        norms.check(group, where, leaves_update=own._LEAVES_UPDATE, by_element=not own._MATRIX)

    @override
    def _check_written(self) -> None:
        for number, group in enumerate(self.param_groups):
            if "algorithm" in group and self._changes.is_new(number, group):  # else the core says so
                made, where = validate.plain_group(group, self._extra_keys), f"group {number}"
                group.update({key: value for key, value in made.items() if value is not group[key]})
                away = device_keys(made)
                self._check_values({key: made[key] for key in made if key not in away}, where)
                fields = schema.COMMON | self._registry[made["algorithm"]]._SCHEMA
                own = {key: field.default for key, field in fields.items()}
                if away <= {"lr"}:
                    self._check_together({**own, **made}, where)
                self._changes.note(number, group)
            elif "algorithm" in group and self._changes.has_other_rate(number, group):
                if validate.is_finite(group["lr"]):  # what is none the core refuses
                    validate.check_decay(group, f"group {number}")
                self._changes.note_rate(number, group)

    def _check_values(self, group: dict[str, Any], where: str) -> None:
        """Checks the values of a group that may have keys of its user."""
        own = self._schemas().get(group.get("algorithm", ""), self._SCHEMA)
        fields = self._SCHEMA | schema.COMMON | own
        validate.check_group(group, fields, set(group), where)
        validate.check_decay(group, where)

    @classmethod
    def _check_settings(cls, group: dict[str, Any], where: str) -> None:
        """Checks the settings of a complete group that exclude or need each other; most classes have none.

        Raises:
            ValueError: for settings that do not go together.
        """

    def _check_params(self, group: dict[str, Any], number: int, *, is_bare: bool) -> None:
        cls = self._registry[group["algorithm"]]
        matrix = cls._MATRIX and not cls._TAKES_VECTORS
        for name, param in zip(validate.names_of(group, number), group["params"], strict=True):
            if not param.is_floating_point():
                raise TypeError(f"{name}: parameters must be real floating-point tensors, got {param.dtype}")
            if hasattr(param, "ds_id"):
                raise TypeError(
                    f"{name}: DeepSpeed ZeRO-3 flattens its parameters; use FSDP2, which keeps their shape"
                )
            cls._check_shape_is_kept(name, param)
            if matrix and group["strict"] and param.ndim < 2:
                rest, own = self._sorter.scalar_default(cls), type(self).__name__
                taker = own if cls._ALGORITHM == self._ALGORITHM else cls.__name__
                raise group_checks.no_matrix(name, taker, own, tuple(param.shape), rest, is_bare=is_bare)
            cls._advise(name, tuple(param.shape), group)
        if matrix and is_bare and not group["strict"]:
            group_checks.warn_of_tables(type(self).__name__, group, number)

    @classmethod
    def _check_shape_is_kept(cls, name: str, param: Tensor) -> None:
        """Refuses parameters that FSDP1 flattened, where the shape means something to the algorithm.

        Raises:
            TypeError: for such a parameter.
        """
        if cls._COMMUNICATES and any(getattr(param, name, False) for name in FLAT):
            raise TypeError(
                f"{name}: FullyShardedDataParallel (FSDP1) flattens its parameters, so {cls._ALGORITHM!r} "
                "cannot tell their rows; use FSDP2 (torch.distributed.fsdp.fully_shard), which keeps them"
            )

    def _make_plan(self) -> Plan:
        self._refuse_flattened()
        return super()._make_plan()

    def _refuse_flattened(self) -> None:
        """Refuses what FSDP1 or ZeRO flattened after the groups were made, where shapes mean something."""
        for number, group in enumerate(self.param_groups):
            cls, held = self._registry[group["algorithm"]], group["params"]
            for name, param in zip(validate.names_of(group, number), held, strict=True):
                cls._check_shape_is_kept(name, param)
            if cls._COMMUNICATES and self._is_flat_partition(held):
                raise TypeError(
                    f"group {number}: a vector of {held[0].numel()} elements replaces its "
                    f"parameters, as in DeepSpeed's ZeRO, so {cls._ALGORITHM!r} cannot tell their "
                    "shapes; use stage 0, or FSDP2 (torch.distributed.fsdp.fully_shard), which keeps them"
                )

    def _is_flat_partition(self, held: list[Tensor]) -> bool:
        """True for one vector of a size that no parameter was given with: ZeRO marks it by nothing else."""
        if len(held) != 1 or held[0].ndim != 1 or comm.is_distributed(held[0]):
            return False
        return tuple(held[0].shape) not in self._given

    @classmethod
    def _advise(cls, name: str, shape: tuple[int, ...], group: dict[str, Any]) -> None:
        """Logs advice on settings that do not do what a user may expect; by default nothing."""

    # -------------------------------------------------------------------- step

    @override
    @disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step from the gradients in ``.grad``; parameters and state are written in place.

        Args:
            closure: evaluates the model again with gradients enabled and returns the loss.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            TypeError: for sparse, complex or otherwise unusable gradients; nothing has been written.
            ValueError: for gradients of another shape or device; nothing has been written.
            PlanMismatch: for ranks that would not take the same step; nothing has been written.
            PoisonedOptimizer: after a step that failed half way, or that was taken though ranks disagreed.
        """
        check_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    def _take_step(self, grad_factor: float | None = None) -> None:
        """Takes one step as `step` does, without the hooks that torch calls around a step.

        Args:
            grad_factor: what gradients are multiplied by as they are read; None is what AMP asks for.
        """
        places = [*(self._places or devices_of(self.param_groups)), device_of(self.param_groups)]  # may move
        kinds = {"cuda" if where.type == "cuda" else "cpu" for where in places}
        with ExitStack() as around:
            around.enter_context(torch.no_grad())
            for kind in kinds:
                around.enter_context(torch.autocast(kind, enabled=False))
            self._execute(grad_factor)

    @override
    def _communicates(self) -> bool:
        for group in self.param_groups:
            if self._registry.get(group["algorithm"], OxOptimizer)._COMMUNICATES:
                return True
        return bool(self._meshes.pending) or bool(self._comms) or self._redistributes

    @override
    def _words(self, group: Mapping[str, Any]) -> Mapping[str, validate.Word]:
        words = self._registry.get(group.get("algorithm", self._ALGORITHM), OxOptimizer)._WORDS
        return {name: word for name, word in words.items() if name not in self.defaults} if words else words

    @override
    def _assign_algorithm(self, group: dict[str, Any], number: int) -> None:
        if group.get("algorithm") not in self._registry:
            self._sorter.name_algorithm(type(self), group, self.defaults["lr"])
            field = {"algorithm": schema.COMMON["algorithm"]}
            validate.check_group(group, field, set(group), f"group {number}")

    @override
    def _class_of(self, algorithm: str) -> type[OxOptimizer]:
        return self._registry[algorithm]

    def init_state(self) -> None:
        """Allocates the state of every parameter, with or without a gradient; what is there stays."""
        self._bind()

    def _init_group(self, _group: dict[str, Any], *_lists: Any, skip_non_grad_params: bool = True) -> bool:
        """Allocates state for frameworks that ask before the first step. Returns False: nothing complex."""
        del skip_non_grad_params
        self.init_state()
        return False

    # ------------------------------------------------------------- checkpoints

    @override
    @disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict; every state keeps the dtype that it was saved with.

        Raises:
            ValueError: for groups and states that no step could use; nothing has changed then.
        """
        if not isinstance(state_dict, Mapping):
            loading.check_form(state_dict)
        incoming: dict[str, Any] = {}

        def capture(_self: Optimizer, final: dict[str, Any]) -> dict[str, Any]:
            loading.check_form(final)
            groups = [dict(group) for group in final["param_groups"]]
            for number, group in enumerate(groups):
                where = f"group {number} of the state dict"
                validate.check_group(group, {"algorithm": schema.COMMON["algorithm"]}, set(group), where)
                schema.translate(group, self._words(group), where)
            loading.keep_extra(groups, self.param_groups, self._extra_keys)
            loading.keep_streams(groups, self.param_groups)
            masters.keep(groups, self.param_groups)
            lost.extend(averages.lost(groups, self.param_groups))
            incoming.update(final, param_groups=groups, state=masters.loaded(final["state"]))
            loading.check(self, incoming)
            return {**incoming, "state": own_copies(incoming, self.param_groups)}

        def restore(_self: Optimizer) -> None:
            self.state.update(aside)

        aside, lost = self._unsaved(), list[str]()
        before = dict(self.__dict__)
        hooks = [
            self.register_load_state_dict_pre_hook(capture),
            self.register_load_state_dict_post_hook(restore, prepend=True),
        ]
        try:
            super().load_state_dict(state_dict)
            self._forget()
            self._poison = self._pending = self._reserve = None
            self._replanned = False
            self._is_loaded = True
            self._cold = loading.without_states(self.param_groups, self.state)
            self._reshard_states()
            if self._init_states:
                self.init_state()
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise
        finally:
            for hook in hooks:
                hook.remove()
        for text in lost:
            logging.getLogger("oxidion").warning("%s", text)

    def _unsaved(self) -> dict[Any, Any]:
        """Entries of ``state`` that a state dict cannot hold: of other tensors, or under their numbers."""
        known = set(map(id, parameters(self.param_groups)))
        numbers = range(len(known))

        def is_unsaved(key: object) -> bool:
            if isinstance(key, Tensor):
                return id(key) not in known
            return isinstance(key, (int, float)) and key in numbers

        return {key: value for key, value in self.state.items() if is_unsaved(key)}

    def _fill(self, group: dict[str, Any]) -> None:
        """Completes a group that comes from a checkpoint or a pickle of another version, in place."""
        if "betas" not in group and "beta2" in group:
            group["betas"] = (group.get("beta1", self.defaults.get("beta1")), group["beta2"])
        schema.fill_defaults(group, self._SCHEMA, self._schemas())
        for key, value in self.defaults.items():
            group.setdefault(key, value)
        schema.complete(group, self.defaults, self._schemas())

    @override
    def _complete(self, group: dict[str, Any], where: str) -> None:
        """Completes a group of a state dict in place and checks it; unknown keys are kept.

        Raises:
            ValueError: for values out of range, and for settings that do not go together.
        """
        self._fill(group)
        self._check_values(group, where)
        self._check_together(group, where)

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Completes groups that come from a checkpoint or a pickle of another version."""
        super().__setstate__(state)
        self._last_betas = {}
        self._owned, self._changes = OwnerSharded(), ChangeTracker()
        self._given = frozenset(tuple(param.shape) for param in parameters(self.param_groups))
        self._forget()
        for group in self.param_groups:
            self._fill(group)
        schema.mirror_betas(self.param_groups, self._last_betas, self._momenta)

    @override
    @disable_dynamo
    def state_dict(self) -> dict[str, Any]:
        """Returns the state and groups, as ``torch.optim.Optimizer.state_dict`` does.

        Entries of ``state`` that belong to no parameter are kept. Those under tensors that are no parameters,
        and under numbers that are positions of parameters, are left out with a warning in the log.

        SOAP states that are owner-sharded because a side is sharded are gathered: call it on all ranks.

        Raises:
            PoisonedOptimizer: after a step that failed half way, whose states are half new, or that was taken
                though ranks disagreed.
            RuntimeError: for states sharded by ``owned_states`` and for partial sums over ranks, without
                ``synchronize_for_checkpoint()``.
        """
        self._refuse_poison()
        self._normalize_keys()
        aside = self._unsaved()
        if aside:
            shown = [
                f"a tensor of shape {tuple(k.shape)}" if isinstance(k, Tensor) else repr(k) for k in aside
            ]
            logging.getLogger("oxidion").warning(
                "state_dict() leaves out the entries of the optimizer's state under %s: no group has that "
                "parameter, or the number is that of a parameter in a state dict",
                ", ".join(shown),
            )
        with self._owned.zeros_shown(self.state):
            for key in aside:
                del self.state[key]
            # Runs after all other hooks: these may gather the states.
            last = self.register_state_dict_pre_hook(lambda _: self._make_whole())
            try:
                saved = super().state_dict()
            finally:
                last.remove()
                self.state.update(aside)
            if self._owned:  # the next step replaces these entries
                saved["state"] = {
                    key: dict(own) if isinstance(own, dict) else own for key, own in saved["state"].items()
                }
            saved["state"] = masters.saved(saved["state"])
        groups = saved["param_groups"]
        saved["param_groups"] = [validate.plain_group(group, self._extra_keys) for group in groups]
        return saved

    def _make_whole(self) -> None:
        """Gathers states that are owner-sharded without ``owned_states``; refuses all others.

        Raises:
            RuntimeError: for states sharded by ``owned_states`` and for partial sums; it says what to call.
        """
        asked = parameters([group for group in self.param_groups if group.get("owned_states")])
        self._refuse_owned(frozenset(asked))
        if self._owned.first_unsynced(self.state) is not None:
            self.synchronize_for_checkpoint()

    def _refuse_owned(self, asked: frozenset[Tensor] | None = None) -> None:
        """Refuses owner-sharded states: a rank would save only its own shard of them.

        Args:
            asked: parameters whose states are refused, besides partial sums of all others; None means all.

        Raises:
            RuntimeError: for such a state; it says what to call.
        """
        key = self._owned.first_unsynced(self.state, asked)
        if key is not None:
            raise RuntimeError(
                f"state {key!r} is sharded by the owners of matrices, or is a sum to which ranks add: call "
                "synchronize_for_checkpoint() on all ranks before state_dict()"
            )

    @override
    def __getstate__(self) -> dict[str, Any]:
        self._refuse_poison()
        self._normalize_keys()
        with self._owned.zeros_shown(self.state):
            self._refuse_owned()
            state: dict[str, Any] = super().__getstate__()
            if self._owned:
                held = ((key, dict(own) if isinstance(own, dict) else own) for key, own in self.state.items())
                state["state"] = defaultdict(dict, held)
        own = {} if self._meshes is comm.NO_MESHES else {"_meshes": self._meshes}
        kept = ("_init_states", "_extra_keys", "_functions")
        return {**state, **own, **{key: getattr(self, key) for key in kept if getattr(self, key)}}

    def synchronize_for_checkpoint(self) -> None:
        """Gathers states and makes them equal on all replicas: call it on all ranks before a checkpoint.

        Owner-sharded states and partial sums over ranks are gathered; the next step shards them again.
        Where Dion averages its factors P and R instead of the gradient, each replica keeps a momentum of
        its own. Their mean, which is the momentum of a single process, replaces them. Nothing else is
        changed.

        Raises:
            PlanMismatch: on every rank when ranks have taken other numbers of steps.
            PoisonedOptimizer: after a step that failed half way, or that was taken though ranks disagreed.
        """
        self._refuse_poison()
        check_steps(max(int(group["step"]) for group in self.param_groups), self._read_groups())
        if self._owned.first_unsynced(self.state) is not None:
            self._owned.gather(self.state, self._read_groups())
        groups = self._meshes.pending.values()
        if not groups:
            return
        params, plan = parameters(self.param_groups), self._make_plan()
        own, specs = [self.state.get(params[i], {}) for i in plan.decoupled], plan.state_specs()
        average_momenta(own, [specs[i] for i in plan.decoupled], groups)

    # ----------------------------------------------------------- introspection

    @override
    def __repr__(self) -> str:
        """A line for each group: algorithm, parameters, elements, ``lr``, and what differs from the defaults.

        ``torch.optim.Optimizer.__repr__(optimizer)`` lists every setting of every group, as torch does.
        """
        return summary.text(self._summary())

    def _repr_html_(self) -> str:
        """The groups as an HTML table, for notebooks."""
        return self._summary()._repr_html_()

    def __rich__(self) -> Table:
        """The groups for rich."""
        return self._summary()

    def _summary(self) -> Table:
        return summary.summary(type(self), self.defaults, self._SCHEMA, self._schemas(), self.param_groups)

    def plan(self) -> Plan:
        """The schedule in force: ``print(optimizer.plan())`` shows buckets, instructions and workspace.

        Raises:
            LayoutError: for parameters that are laid out over ranks in a way that the algorithm cannot take.
            ValueError: for group keys that do not fit the shape of a parameter.
        """
        return self._make_plan()

    def eval(self) -> None:
        """Has the parameters of groups with ``average="schedule_free"`` hold their averages.

        Call it before an evaluation or before the model is saved, and `train` before the next step.
        Parameters are written in place; their states say so, in every checkpoint. Other groups do not
        change: see `averaged`.
        """
        self._normalize_keys()
        self._check_written()
        averages.switch(self.param_groups, self.state, "eval")

    def train(self) -> None:
        """Has the parameters hold the weights at which gradients are taken, after `eval`."""
        self._normalize_keys()
        self._check_written()
        averages.switch(self.param_groups, self.state, "train")

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the parameters of groups with an ``average`` hold it, by any rule.

        Parameters are written in place and brought back at the end, from copies that are kept meanwhile.
        ``step`` raises inside.
        """
        self._normalize_keys()
        self._check_written()
        with averages.averaged(self.param_groups, self.state):
            self._inside_averaged += 1
            try:
                yield
            finally:
                self._inside_averaged -= 1

    def averaged_state_dict(self, model: torch.nn.Module) -> dict[str, Any]:
        """A copy of ``model.state_dict()`` with the averages in place of the parameters that have one."""
        with self.averaged():
            return {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in model.state_dict().items()
            }

    def explain(self) -> Table:
        """Describes each parameter, its states and its part of the step in one row.

        Returns:
            Columns name, shape, dtype, device, rounding (of a step's result: "exact" in the type of the
            arithmetic, else "nearest", "stochastic" or "master"), states (the dtype of each, or "8 bits",
            with "at random" where 16 bits are rounded at random), placements, group, algorithm, view
            (how it is read as matrices), transposed, lr_factor (multiplies ``lr``), rank, owner (the rank
            that computes on whole matrices), route, state_bytes (on this rank), flops (of a step) and
            wire_bytes (what a step gives to collectives). On a device, the table's attribute ``kernels``
            maps each source of kernels to what computes: "kernels", "libtorch (reason)", or "not loaded"
            before the first step. A line below the table repeats it.
        """
        first = ("name", "shape", "dtype")
        own = [
            {
                "device": str(comm.local(param).device),
                "rounding": masters.rounding(group, param.dtype),
            }
            for group in self.param_groups
            for param in group["params"]
        ]
        plan = self._make_plan()
        for here, specs, algorithm in zip(own, plan.state_specs(), plan.algorithms, strict=True):
            here["states"] = stored(specs, self._STATE_NAMES.get(algorithm, {}))
        rows = zip(plan.rows(), own, strict=True)
        kernels = self_check.states(device_of(self.param_groups), plan.sources())
        said = ", ".join(f"{name} {word}" for name, word in kernels.items())
        return Table(
            [{**{key: row[key] for key in first}, **here, **row} for row, here in rows],
            kernels=kernels,
            note=f"sources: {said}" if said else "",
        )

    def metrics(self) -> Table:
        """Measures one step with the present gradients, taken on copies: this optimizer does not change.

        Columns: update and parameter RMS; with parameters of 16 bits ``lost_updates``, the share of their
        elements whose update is not zero and leaves the stored weight as it was; orthogonality error where
        the algorithm has it, and the error that is ``expected`` for the dtype and the rank of the momentum;
        captured energy and error-feedback norm where all of the matrix is stored on this rank. ``.stages``
        holds milliseconds by compute instruction, ``.bytes_sent`` what a step gives to collectives. Call it
        on all ranks.
        """
        from oxidion._core.verify import metrics

        return metrics(self)

    def verify(self) -> Table:
        """Takes one step on copies and compares it with a naive float64 step, one row per parameter.

        ``update_error`` is ``‖step - reference‖ / ‖update of the reference‖``, the reference rounded to the
        parameter's dtype; None without a gradient, and where a step depends on the layout. ``expected`` is
        the size that rounding explains: the change of the reference when the operands of its products change
        by one rounding of their dtype, and the rounding of the result. Nothing changes.
        """
        from oxidion._core.verify import verify

        return verify(self)
