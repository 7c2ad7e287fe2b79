"""Entries for Megatron-Core's and Emerging-Optimizers' registries; both are imported when asked for.

What is read of Megatron's configuration:

| field | meaning here |
|---|---|
| ``lr``, ``weight_decay``, and what the scheduler writes into the groups | the same |
| ``adam_beta1``, ``adam_beta2``, ``adam_eps`` | of AdamW and Lamb |
| ``muon_momentum``, ``muon_nesterov`` | the same rule; the momentum is a sum here and an average there |
| ``muon_coefficient_type``, ``muon_num_ns_steps`` | the same triples in the same order |
| ``muon_scale_mode="spectral"``, ``muon_extra_scale_factor=0.2`` | ``adjust_lr="match_rms_adamw"`` |
| ``"shape_scaling"`` with 1 | ``adjust_lr="original"`` |
| ``"unit_rms_norm"`` with 1 | ``adjust_lr="spectral_norm"`` |
| any other factor, as the default ``"spectral"`` with 1 | ValueError: ``register("Muon", adjust_lr=...)`` |
| ``muon_fp32_matmul_prec`` | not read: ``orth_dtype`` says in what Muon iterates |
| ``muon_scalar_optimizer`` | Megatron's: the rest is stepped by its Adam |

What happens on each layout; parts of tensor parallelism are plain tensors with attributes there:

| layout | step |
|---|---|
| data parallelism | the same on every rank, or its share of whole matrices |
| pipeline and expert parallelism | each rank steps what it has |
| tensor parallelism, AdamW, Lion, AdEMAMix | by element, so that parts step as they are |
| tensor parallelism, Muon, "blockwise" (Megatron's default) | each part by itself: depends on the ranks |
| tensor parallelism, Muon, "duplicated" and "distributed" | whole matrices, as in one process |
| tensor parallelism, any other class | refused; ``tp_mode="blockwise"`` takes parts as they are |
| ``muon_split_qkv=True`` (the default) with attention | refused: set it to False (``--muon-no-split-qkv``) |
| GTP (``is_gtp_weight_remat``) | refused for all classes that are not by element |
| Megatron-FSDP and its distributed optimizer | Megatron refuses them for such optimizers |

A refusal is a LayoutError that names the parameter and what to change. Checkpoints in the format
``torch_dist`` need states of the shape of their parameter: those of Muon, AdamW, Lion and AdEMAMix in 32
bits. For others Megatron has the format ``torch``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from oxidion import optim
from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._core.schema import known_keys
from oxidion._core.table import Table
from oxidion._dist import comm
from oxidion._oxidion import LayoutError, Plan, Session

PREFIX = "oxidion_"
"""Start of the names in both registries."""

SCALES = {
    ("shape_scaling", 1.0): "original",
    ("unit_rms_norm", 1.0): "spectral_norm",
    ("spectral", 0.2): "match_rms_adamw",
}
"""Rules of Megatron's Muon for the factor of an update, mode and extra factor, that Muon has here."""

TP_MODES = ("blockwise", "duplicated", "distributed", None)


def classes() -> dict[str, type[OxOptimizer]]:
    """The classes of this package by the names that `register` gives them: "oxidion_muon" and so on."""
    named = {name: getattr(optim, name) for name in optim.__all__}
    return {
        PREFIX + name.lower(): cls
        for name, cls in named.items()
        if isinstance(cls, type) and issubclass(cls, OxOptimizer)
    }


# ------------------------------------------------------------------------------------------ layouts


class Layout:
    """Parts of a parameter that tensor parallelism keeps on other ranks, by the attributes Megatron sets.

    ``partition_dim`` is the dimension that is cut, ``tensor_model_parallel`` whether it is cut at all, and
    ``expert_tp`` whether over the ranks of the experts' groups.
    """

    def __init__(self, tp_mode: str | None, *, split_qkv: bool = False, groups: Any = None) -> None:
        """Sets how parameters are read.

        Args:
            tp_mode: "blockwise" takes each rank's part as a matrix of its own; "duplicated" and "distributed"
                take whole matrices, by one plan; None refuses what is cut.
            split_qkv: whether rows of queries, keys and values, which Megatron interleaves, are to be split.
            groups: a ``ProcessGroupCollection``.
        """
        if tp_mode not in TP_MODES:
            raise ValueError(f"tp_mode must be one of {', '.join(map(repr, TP_MODES))}, got {tp_mode!r}")
        self.tp_mode = tp_mode
        self.split_qkv = split_qkv
        self.groups = groups
        self._meshes: dict[int, Any] = {}

    def cut(self, param: Tensor) -> tuple[int, Any] | None:
        """The dimension along which a parameter is cut and the group of its ranks; None where it is whole."""
        dim = getattr(param, "partition_dim", -1)
        if not getattr(param, "tensor_model_parallel", False) or dim < 0:
            return None
        group = getattr(self.groups, "expt_tp" if getattr(param, "expert_tp", False) else "tp", None)
        return (dim, group) if group is None or group.size() > 1 else None

    def check(self, name: str, param: Tensor, cls: type[OxOptimizer]) -> None:
        """Refuses a parameter whose matrices cannot be determined.

        Raises:
            LayoutError: for such a parameter; it names the parameter and what to change.
        """
        if not (cls._MATRIX or cls._COMMUNICATES):
            return  # an update by element is the same on any part
        if getattr(param, "is_gtp_weight_remat", False):
            raise LayoutError(f"{name}: its rows lie on other ranks by Megatron's GTP: switch that off")
        if self.split_qkv and getattr(param, "is_qkv", False):
            raise LayoutError(
                f"{name}: queries, keys and values are interleaved by head and cannot be separated here: "
                "set muon_split_qkv to False (--muon-no-split-qkv)"
            )
        cut = self.cut(param)
        if cut is None or self.tp_mode == "blockwise":
            return
        if cls is not optim.Muon:
            raise LayoutError(
                f"{name}: {cls.__name__} reads parts of a whole parameter from DTensors only, and tensor "
                f"parallelism has cut this plain tensor along dimension {cut[0]}: pass tp_mode='blockwise' "
                "to register() for steps by part, or shard with torch's FSDP2 and parallelize_module"
            )
        if cut[1] is None:
            raise LayoutError(
                f"{name}: it is cut along dimension {cut[0]}, and nothing says over which ranks: pass the "
                "ProcessGroupCollection, or set muon_tp_mode to 'blockwise' for steps by part"
            )

    def as_dtensor(self, own: Tensor, param: Tensor) -> Tensor:
        """Returns a DTensor with the local part ``own``, sharded as the parameter is."""
        cut = self.cut(param)
        assert cut is not None
        dim, group = cut
        if id(group) not in self._meshes:
            self._meshes[id(group)] = comm.mesh_of(group, own.device.type)
        return comm.sharded(own, self._meshes[id(group)], dim)


class Muon(optim.Muon):
    """Muon on whole matrices whose shards tensor parallelism keeps as plain tensors.

    ``param_groups``, ``state`` and ``state_dict()`` hold what this process has, as Megatron expects; within a
    step, parameters are DTensors over the ranks that have the other shards.

    Arguments are those of ``oxidion.Muon``; see `register`.
    """

    layout: Layout
    _parts: dict[int, tuple[Tensor, Tensor]]
    _whole_states: dict[Tensor, dict[str, Any]]
    _inside: bool = False

    def __init__(self, params: Any, *, layout: Layout, **arguments: Any) -> None:
        self.layout, self._parts, self._whole_states = layout, {}, {}
        super().__init__(params, **arguments)

    def _whole(self, param: Tensor) -> Tensor:
        """Returns the DTensor whose local part a parameter is, with its gradient; or the parameter itself."""
        if self.layout.cut(param) is None:
            return param
        known = self._parts.get(id(param))
        if known is None or known[0] is not param or comm.local(known[1]).data_ptr() != param.data_ptr():
            known = self._parts[id(param)] = (param, self.layout.as_dtensor(param.detach(), param))
        whole = known[1].requires_grad_(param.requires_grad)
        whole.grad = None if param.grad is None else self.layout.as_dtensor(param.grad, param)
        return whole

    def _wrapped(self, own: dict[str, Any], param: Tensor, whole: Tensor) -> dict[str, Any]:
        """States of a parameter with DTensors, the same ones as before where their parts are the same."""
        known = self._whole_states.setdefault(whole, {})
        for key, value in own.items():
            if isinstance(value, Tensor) and value.shape == param.shape:
                if comm.local(known.get(key, param)) is not value:
                    known[key] = self.layout.as_dtensor(value, param)
            else:
                known[key] = value
        for key in known.keys() - own.keys():
            del known[key]
        return known

    @contextmanager
    def _as_dtensors(self) -> Iterator[None]:
        """Parameters and states as DTensors, while something is planned or stepped."""
        if self._inside:
            yield
            return
        kept = [group["params"] for group in self.param_groups]
        pairs = [(param, self._whole(param)) for params in kept for param in params]
        wholes = {id(param): whole for param, whole in pairs}
        self._parts = {key: value for key, value in self._parts.items() if wholes.get(key) is value[1]}
        self._inside = True
        try:
            for param, whole in pairs:  # all of them: the states keep the order in which they were bound
                if (own := self.state.pop(param, None)) is not None:
                    self.state[whole] = own if whole is param else self._wrapped(own, param, whole)
            for group, params in zip(self.param_groups, kept, strict=True):
                group["params"] = [wholes[id(param)] for param in params]
            yield
        finally:
            for group, params in zip(self.param_groups, kept, strict=True):
                group["params"] = params
            self._whole_states = {}
            for param, whole in pairs:
                own = self.state.pop(whole, None)
                if whole is not param:
                    whole.grad = None
                if own is not None and whole is not param:
                    self._whole_states[whole] = own
                    own = {key: comm.local(value) for key, value in own.items()}
                if own is not None:
                    self.state[param] = own
            self._inside = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        own = {"layout": self.layout, "_inside": self._inside, "_parts": {}, "_whole_states": {}}
        return {**super().__getstate__(), **own}

    @override
    def _execute(self, grad_factor: float | None = None) -> None:
        with self._as_dtensors():
            super()._execute(grad_factor)

    @override
    def _bind(self, *, in_step: bool = False, together: bool = False) -> Session:
        with self._as_dtensors():
            return super()._bind(in_step=in_step, together=together)

    @override
    def _make_plan(self) -> Plan:
        with self._as_dtensors():
            return super()._make_plan()

    @override
    def metrics(self) -> Table:
        """Measures one step as `OxOptimizer.metrics`, on whole matrices."""
        with self._as_dtensors():
            return super().metrics()

    @override
    def verify(self) -> Table:
        """Compares one step as `OxOptimizer.verify`, on whole matrices."""
        with self._as_dtensors():
            return super().verify()


# ---------------------------------------------------------------------------------------- registries


def _build(
    cls: type[OxOptimizer], groups: Sequence[dict[str, Any]], *, layout: Layout, **arguments: Any
) -> OxOptimizer:
    """An optimizer over groups of Megatron, whose own keys they keep."""
    known = known_keys(OxOptimizer._schemas())
    own = [{key: value for key, value in group.items() if key in known} for group in groups]
    for number, group in enumerate(own):
        for index, param in enumerate(group["params"]):
            layout.check(f"parameter {index} of group {number}", param, cls)
    cut = any(layout.cut(param) for group in own for param in group["params"])
    whole = cut and layout.tp_mode != "blockwise" and cls is optim.Muon
    make: Callable[..., OxOptimizer] = partial(Muon, layout=layout) if whole else cls
    optimizer = make(own, **arguments)
    for made, group in zip(optimizer.param_groups, groups, strict=True):
        made.update({key: value for key, value in group.items() if key not in known})
    return optimizer


def _muon_arguments(config: Any) -> dict[str, Any]:
    """Arguments of Muon from Megatron's own settings of it.

    Raises:
        ValueError: for rules that Muon has not here, with those that it has.
    """
    scale = (config.muon_scale_mode, float(config.muon_extra_scale_factor))
    if scale not in SCALES:
        shown = ", ".join(f"{mode!r} with {factor}" for mode, factor in SCALES)
        raise ValueError(
            f"muon_scale_mode={scale[0]!r} with muon_extra_scale_factor={scale[1]} has no counterpart: take "
            f"{shown}, or pass adjust_lr to register()"
        )
    return {
        "momentum": config.muon_momentum,
        "nesterov": config.muon_nesterov,
        "adjust_lr": SCALES[scale],
    }


def _coefficients(config: Any) -> dict[str, Any]:
    """The triples of the iteration that a configuration names, as many as it has steps."""
    utils: Any = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    kind, steps = config.muon_coefficient_type, config.muon_num_ns_steps
    if kind not in utils._COEFFICIENT_SETS:
        raise ValueError(
            f"muon_coefficient_type must be one of {', '.join(map(repr, utils._COEFFICIENT_SETS))}, got "
            f"{kind!r}; or pass ns_coefficients to register()"
        )
    rows = utils._COEFFICIENT_SETS[kind]
    repeats = kind in ("polar_express", "cans", "deepseekv4")
    at = [min(step, len(rows) - 1) if repeats else step % len(rows) for step in range(steps)]
    return {"ns_coefficients": [rows[index] for index in at], "ns_steps": steps}


def _arguments(cls: type[OxOptimizer], config: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a class: those given to `register`, then those of the configuration."""
    made: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if cls is optim.Muon:
        if "adjust_lr" not in given:
            made.update(_muon_arguments(config))
        if not given.keys() & {"ns_coefficients", "ns_steps", "newton_schulz_func"}:
            made.update(_coefficients(config))
    elif "eps" in cls._SCHEMA and "betas" in cls._SCHEMA and validate.is_pair(cls._SCHEMA["betas"].default):
        made.update(betas=(config.adam_beta1, config.adam_beta2), eps=config.adam_eps)
    return {**made, **given}


def _init_state(optimizer: OxOptimizer, config: Any = None) -> None:
    """Makes the states of all parameters, as a checkpoint that is loaded needs them.

    Megatron's float32 copies require no gradient, though they get one: until then they would count as frozen.
    """
    del config
    frozen = [p for group in optimizer.param_groups for p in group["params"] if not p.requires_grad]
    try:
        for param in frozen:
            param.requires_grad_(True)
        optimizer.init_state()
    finally:
        for param in frozen:
            param.requires_grad_(False)


def register(optimizer: str, *, name: str | None = None, tp_mode: str | None = None, **arguments: Any) -> str:
    """Adds a class of this package to Megatron-Core's registry of emerging optimizers.

    ``OptimizerConfig(optimizer="oxidion_muon")`` then makes it: matrices are stepped by the class,
    embeddings, the output layer, norms and biases by Megatron's Adam. Classes for parameters of any shape, as
    "AdamW", step everything.

    Learning rate, weight decay, betas and epsilon of Adam are those of the configuration. For "Muon" so are
    momentum, ``muon_scale_mode`` with its factor, the coefficients and ``muon_tp_mode``.

    Args:
        optimizer: name of the class.
        name: in the registry; None for "oxidion_" and the name in lower case.
        tp_mode: for matrices that tensor parallelism cuts: "blockwise" steps each rank's part as a matrix of
            its own; "duplicated" and "distributed", for Muon alone, step whole matrices. None is
            ``muon_tp_mode`` for Muon; for other classes that are not by element it refuses them.
        **arguments: of the class; they win over the configuration.

    Returns:
        The name in the registry.

    Raises:
        ImportError: without Megatron-Core.
        ValueError: for a class that is none, and for a name that Megatron has already.
    """
    key = PREFIX + optimizer.lower()
    cls = classes().get(key)
    if cls is None:
        shown = ", ".join(sorted(found.__name__ for found in classes().values()))
        raise ValueError(f"optimizer must be one of {shown}, got {optimizer!r}")
    registry: Any = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    name = key if name is None else name
    entries = registry._EMERGING_OPTIMIZERS
    if name in entries and not name.startswith(PREFIX):
        raise ValueError(
            f"name must be none of Megatron's optimizers, got {name!r}: leave it out for {key!r}"
        )

    muon = cls is optim.Muon

    def settings(config: Any, model_chunks: Any, pg_collection: Any) -> dict[str, Any]:
        del model_chunks
        mode = config.muon_tp_mode if tp_mode is None and muon else tp_mode
        layout = Layout(mode, split_qkv=muon and config.muon_split_qkv, groups=pg_collection)
        return {**_arguments(cls, config, arguments), "layout": layout}

    rest: dict[str, Any] = {} if cls._MATRIX else {"default_param_overrides": {}}
    entries[name] = registry.EmergingOptimizerEntry(
        optimizer_cls=partial(_build, cls), init_state_fn=_init_state, config_to_kwargs=settings, **rest
    )
    return name


def extra_args(parser: Any) -> Any:
    """Registers Muon and has ``--optimizer`` take it: for Megatron-LM's ``extra_args_provider``.

    Args:
        parser: of Megatron-LM's arguments; its choices of ``--optimizer`` become more.

    Returns:
        The parser.
    """
    known = importlib.import_module("megatron.core.optimizer.emerging_optimizers")._EMERGING_OPTIMIZERS
    names = [register("Muon")] if PREFIX + "muon" not in known else []
    names = sorted({*names, *(name for name in known if name.startswith(PREFIX))})
    for action in vars(parser)["_actions"]:  # argparse has no public list of its arguments
        if action.dest == "optimizer" and action.choices is not None:
            action.choices = [*action.choices, *(name for name in names if name not in action.choices)]
    return parser


def register_emerging() -> list[str]:
    """Adds every class of this package to Emerging-Optimizers' registry: "oxidion_muon" and so on.

    ``registry.get_optimizer_cls("oxidion_dion")`` finds it then. A second call changes nothing.

    Returns:
        The names.

    Raises:
        ImportError: without Emerging-Optimizers.
    """
    registry: Any = importlib.import_module("emerging_optimizers.registry")
    there = set(registry.get_optimizer_name_list())
    found = classes()
    for name, cls in found.items():
        if name not in there:
            add: Callable[[type[Optimizer]], type[Optimizer]] = registry.register_optimizer(name)
            add(cls)
    return list(found)
