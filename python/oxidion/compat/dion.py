"""Names, argument order and defaults of microsoft/dion: ``import oxidion.compat.dion as dion``.

Its modules that scripts import from are here too, as ``oxidion.compat.dion.opt_utils``, and ``python -m
oxidion shim dion`` makes ``import dion`` find them. Every class takes the further arguments of the class of
`oxidion` with its name by keyword, and a model instead of parameters.

Results are those of `oxidion`'s classes with what scripts for microsoft/dion rely on:

- ``betas`` of a group are not read, as there, where ``beta1`` and ``beta2`` count; a log line says so. Of
  ``MuonReference`` it is the other way round.
- ``NorMuon`` and ``NorDion2`` take norms of what a process stores: ``norm_scope="shard"``.
- ``Muon``, ``NorMuon``, ``Dion2`` and ``NorDion2`` make their states at once: ``init_state=True``.
- With ``outer_shard_mesh`` the side that it shards is Q's, on every shape.
- ``adjust_lr="keller_muon"`` is ``"original"``, ``matrix_partitions`` is ``split_sizes`` by parameter.
- ``world_mesh``, ``fsdp_mesh_dim``, the group key ``distributed_mesh_name``, and a ``distributed_mesh`` that
  shares ranks with a mesh that shards: left out, since the layouts are read from the DTensors.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from oxidion import functional, optim
from oxidion._core import validate
from oxidion._core.base import OxOptimizer
from oxidion._dist import comm
from oxidion.graph import CudaGraphOptimizer
from oxidion.optim import DionMixedPrecisionConfig

__all__ = [
    "CudaGraphOptimizer",
    "Dion",
    "Dion2",
    "Dion3",
    "DionMixedPrecisionConfig",
    "DionReference",
    "DionSimple",
    "Muon",
    "MuonReference",
    "NorDion2",
    "NorMuon",
]

_GIVEN_BY_LAYOUTS = ("world_mesh", "fsdp_mesh_dim")
"""Arguments of forks that say where parameters lie."""


class _FromDion(OxOptimizer):
    """Base of the classes: arguments and groups as scripts for microsoft/dion and its forks give them."""

    _ORDER: ClassVar[str]
    """Arguments of microsoft/dion behind the parameters, in its order."""
    _USUAL: ClassVar[dict[str, Any]] = {}
    """Defaults that are not those of the class of `oxidion`."""
    _READS_BETAS: ClassVar[bool] = False
    _SIGNATURE: ClassVar[inspect.Signature]
    __signature__: ClassVar[inspect.Signature | None]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__signature__ = None  # a subclass of a user's has that of its own constructor
        if "_ORDER" in cls.__dict__:
            known = {**inspect.signature(cls.__bases__[1]).parameters}
            usual = {name: known[name].default for name in known} | cls._USUAL
            place, rest = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_KEYWORD
            own = [inspect.Parameter(name, place, default=usual[name]) for name in cls._ORDER.split()]
            params = inspect.Parameter("params", place)
            cls._SIGNATURE = inspect.Signature([params, *own, inspect.Parameter("options", rest)])
            cls.__signature__ = cls._SIGNATURE

    def __init__(self, *args: Any, **options: Any) -> None:
        given = self._SIGNATURE.bind(*args, **options)
        given_by_word = {
            word.key for name, word in self._WORDS.items() if name in options
        } - given.arguments.keys()
        given.apply_defaults()
        options = given.arguments.pop("options")
        made = {**self._USUAL, **given.arguments, **options}
        for key in (*_GIVEN_BY_LAYOUTS, *given_by_word):
            made.pop(key, None)
        if "adjust_lr" in made:
            made["adjust_lr"] = validate.own_word(made["adjust_lr"])
        if "rank" in given.arguments:  # DionSimple's: the first multiple of it that a tiny fraction asks for
            made |= {"rank_fraction": 1e-9, "rank_multiple_of": made.pop("rank")}
        partitions = made.pop("matrix_partitions", None) or {}
        made["params"] = self._read_all(made["params"], partitions, made["betas"])
        mesh = made.get("distributed_mesh")
        if mesh is not None and comm.shares_ranks("distributed_mesh", mesh, _tensors(made["params"])):
            made["distributed_mesh"] = None
        if any(param.is_meta for param in _tensors(made["params"])):
            made["init_state"] = False  # there is nothing to make yet
        super().__init__(**made)

    def _read_all(self, params: Any, partitions: Mapping[Tensor, Any], usual: Any) -> Any:
        """Groups with the keys that are read; returns a model and a single parameter unchanged."""
        if not isinstance(partitions, Mapping):
            raise TypeError(f"matrix_partitions maps parameters to sizes, got {type(partitions).__name__}")
        if params is None or isinstance(params, (nn.Module, Tensor, Mapping)):
            if partitions:
                raise ValueError(f"matrix_partitions needs parameters or groups, got {type(params).__name__}")
            return params
        groups = list(params)
        if partitions and not any(isinstance(group, dict) for group in groups):
            groups = [{"params": groups}]
        groups = [self._read_group(number, group, usual) for number, group in enumerate(groups)]
        return _partitioned(groups, partitions) if partitions else groups

    def _read_group(self, number: int, group: Any, usual: Any) -> Any:
        """A copy of a group without the keys that microsoft/dion does not read; a parameter unchanged."""
        if not isinstance(group, dict):
            return group
        made = {key: group[key] for key in group if key != "distributed_mesh_name"}
        if "adjust_lr" in made:
            made["adjust_lr"] = validate.own_word(made["adjust_lr"])
        if isinstance(made.get("params"), Iterator):
            made["params"] = list(made["params"])
        first, second = usual if validate.is_pair(usual) else (None, None)  # the class says what is wrong
        pair = made.get("beta1", first), made.get("beta2", second)
        given = made.get("betas", usual)
        unread, given, read = {"betas"}, tuple(given) if validate.is_pair(given) else given, pair
        if self._READS_BETAS:
            unread, given, read = {"beta1", "beta2"}, pair, given
        if unread & made.keys() and given != read:
            logging.getLogger("oxidion").warning(
                "group %d: %s of %s is not read, as in microsoft/dion, which steps with %s: give the group "
                "%s, or take oxidion's own class, which reads both",
                *(number, " and ".join(sorted(unread & made.keys())), given, read),
                "betas" if self._READS_BETAS else "beta1 and beta2",
            )
        for key in unread & made.keys():
            del made[key]
        return made

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, which is read as those of the constructor are."""
        if self._given_so_far is None:
            usual = self.defaults["beta1"], self.defaults["beta2"]
            param_group = self._read_group(len(self.param_groups), param_group, usual)
        super().add_param_group(param_group)
        made = self.param_groups[-1]
        if made.get("interleaved", 1) is None:  # there all dimensions before the last two number matrices
            made["interleaved"] = 1

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict of this class, of microsoft/dion's or of `oxidion`'s."""
        groups = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
        if isinstance(groups, list) and not self._READS_BETAS:
            # microsoft/dion's may have betas too, which it does not read.
            groups = [
                {
                    key: validate.own_word(group[key]) if key == "adjust_lr" else group[key]
                    for key in group
                    if key != "betas" or not {"beta1", "beta2"} <= group.keys()
                }
                for group in groups
            ]
            state_dict = {**state_dict, "param_groups": groups}
        super().load_state_dict(state_dict)


def _tensors(params: Any) -> Iterator[Tensor]:
    """The parameters of a model, of groups, or of pairs with names; iterators are left unread."""
    if isinstance(params, nn.Module):
        yield from params.parameters()
    for entry in params if isinstance(params, (list, tuple)) else ():
        if isinstance(entry, Tensor):
            yield entry
        elif isinstance(entry, dict):
            yield from _tensors([held] if isinstance(held := entry.get("params"), Tensor) else held)
        elif isinstance(entry, tuple):
            yield from _tensors(entry)


def _partitioned(groups: list[Any], partitions: Mapping[Tensor, Any]) -> list[Any]:
    """The groups, then a group with ``split_sizes`` for each partition of each group."""
    left: list[Any] = []
    others: list[Any] = []
    missing = set(partitions)
    for group in groups:
        cut: dict[tuple[int, ...], list[Any]] = {}
        kept: list[Any] = []
        held = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        for entry in held:
            param = entry[1] if isinstance(entry, tuple) else entry
            at = cut.setdefault(tuple(partitions[param]), []) if param in missing else kept
            at.append(entry)
            missing.discard(param)
        others += [{**group, "params": params, "split_sizes": sizes} for sizes, params in cut.items()]
        left += [{**group, "params": kept}] if kept or not cut else []
    if missing:
        shapes = ", ".join(str(tuple(param.shape)) for param in missing)
        raise ValueError(f"matrix_partitions has parameters that no group has, of the shapes {shapes}")
    return left + others


class Dion(_FromDion, optim.Dion):
    """`oxidion.Dion` with the arguments of microsoft/dion's ``Dion`` and ``DionReference``.

    All values of ``qr_method`` and ``power_iters`` are taken. Without ``outer_shard_mesh`` and
    ``inner_shard_mesh`` Q belongs to the shorter side of a matrix, with them to the side of the outer one.
    """

    _ORDER = (
        "replicate_mesh outer_shard_mesh inner_shard_mesh replicate_mesh_grad_sync rank_fraction "
        "rank_multiple_of lr mu betas weight_decay epsilon power_iters qr_method cqr_warmup_steps "
        "rcqr_oversample mixed_precision_config"
    )


DionReference = Dion


class DionSimple(_FromDion, optim.Dion):
    """`oxidion.Dion` with the arguments of microsoft/dion's ``DionSimple``.

    ``rank`` is bounded by the shape of each matrix; groups keep it as ``rank_multiple_of``. Wide matrices
    have Q on their shorter side; there it is always the second.
    """

    _ORDER = "lr mu betas weight_decay rank epsilon mixed_precision_config"
    _USUAL: ClassVar[dict[str, Any]] = {"rank": 768}


class Muon(_FromDion, optim.Muon):
    """`oxidion.Muon` with the arguments of microsoft/dion's ``Muon`` and of its forks."""

    _ORDER = (
        "distributed_mesh lr mu betas weight_decay cautious_wd epsilon nesterov adjust_lr flatten "
        "use_gram_newton_schulz use_triton use_polar_express newton_schulz_func"
    )
    _USUAL: ClassVar[dict[str, Any]] = {"init_state": True}


class MuonReference(_FromDion, optim.Muon):
    """`oxidion.Muon` with the arguments and defaults of microsoft/dion's ``MuonReference``.

    Its coefficients are those of ``ns_coefficients="keller_jordan"``. Of groups ``betas`` are read and
    ``beta1`` and ``beta2`` are not, as there. Groups have ``mu``; a group key ``momentum`` sets it.
    """

    _ORDER = "lr mu betas weight_decay epsilon nesterov adjust_lr ns_steps"
    _USUAL: ClassVar[dict[str, Any]] = {
        "lr": 1e-3,
        "betas": (0.95, 0.95),
        "weight_decay": 0.1,
        "nesterov": True,
        "ns_steps": 5,
        "ns_coefficients": "keller_jordan",
    }
    _READS_BETAS = True


class NorMuon(_FromDion, optim.NorMuon):
    """`oxidion.NorMuon` with the arguments of microsoft/dion's, and ``norm_scope="shard"`` as there."""

    _ORDER = (
        "distributed_mesh lr mu muon_beta2 betas weight_decay cautious_wd epsilon nesterov adjust_lr flatten "
        "use_gram_newton_schulz use_triton use_polar_express newton_schulz_func"
    )
    _USUAL: ClassVar[dict[str, Any]] = {"init_state": True, "norm_scope": "shard"}


class Dion2(_FromDion, optim.Dion2):
    """`oxidion.Dion2` with the arguments of microsoft/dion's."""

    _ORDER = (
        "distributed_mesh lr fraction ef_decay betas weight_decay epsilon adjust_lr flatten use_triton "
        "use_polar_express use_gram_newton_schulz newton_schulz_func verbose triton_post_ortho "
        "selection_scope"
    )
    _USUAL: ClassVar[dict[str, Any]] = {"init_state": True}


class NorDion2(_FromDion, optim.NorDion2):
    """`oxidion.NorDion2` with the arguments of microsoft/dion's, and ``norm_scope="shard"`` as there."""

    _ORDER = (
        "distributed_mesh lr fraction mu muon_beta2 betas weight_decay epsilon adjust_lr flatten use_triton "
        "use_polar_express use_gram_newton_schulz newton_schulz_func triton_post_ortho selection_scope"
    )
    _USUAL: ClassVar[dict[str, Any]] = {"init_state": True, "norm_scope": "shard"}


Dion3 = NorDion2


def lm_head_lr_scale(scalar_opt: str, model_dim: int) -> float:
    """The factor of the learning rate of an output layer: 1/√model_dim for "lion", else 1."""
    return 1 / math.sqrt(model_dim) if scalar_opt == "lion" else 1.0


def _polar_express(G: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Polar Express of matrices in bfloat16, for ``newton_schulz_func``."""
    return functional.polar_express(G.to(torch.bfloat16), epsilon=float(epsilon))


def _newton_schulz(G: Tensor, epsilon: float = 1e-7) -> Tensor:
    """Five steps of Newton-Schulz of matrices in bfloat16, for ``newton_schulz_func``."""
    return functional.newton_schulz(G.to(torch.bfloat16), epsilon=float(epsilon))


_ITERATIONS = {"newton_schulz_triton": _newton_schulz, "zeropower_via_newtonschulz5": _newton_schulz}
_CONTENTS: dict[str, dict[str, Any]] = {
    "cuda_graph": {"CudaGraphOptimizer": CudaGraphOptimizer},
    "dion": {"Dion": Dion, "DionMixedPrecisionConfig": DionMixedPrecisionConfig},
    "dion2": {"Dion2": Dion2},
    "dion3": {"Dion3": NorDion2},
    "dion_reference": {"Dion": Dion, "DionMixedPrecisionConfig": DionMixedPrecisionConfig},
    "dion_simple": {"Dion": DionSimple, "DionMixedPrecisionConfig": DionMixedPrecisionConfig},
    "megabatch_base": {},
    "muon": {"Muon": Muon, "zeropower_via_newtonschulz5": _newton_schulz},
    "muon_reference": {"Muon": MuonReference},
    "newton_schulz_triton": _ITERATIONS,
    "nordion2": {"NorDion2": NorDion2},
    "normuon": {"NorMuon": NorMuon},
    "opt_utils": {"lm_head_lr_scale": lm_head_lr_scale},
    "polar_express": {"polar_express": _polar_express, "polar_express_triton": _polar_express},
    "scalar_opts": {},
}
"""Public names of microsoft/dion's modules, by module."""

_INTERNAL = frozenset(
    {
        *("AsyncRuntime", "AsyncTask", "DionParamConfig", "DistributedOrthoBase", "_DionParamConfig"),
        *("adamw_update_foreach", "create_param_batches", "dtensor_from_local", "lion_update_foreach"),
        *("ns_line_1", "ns_line_2"),
        *("orthogonalize", "pad_batch", "to_local"),
    }
)


def _missing(module: str, name: str) -> Any:
    """Refuses internal names of microsoft/dion, which code that subclasses its optimizers imports.

    Raises:
        ImportError: that says what to do; an AttributeError in an import would lose its text.
        AttributeError: for other names.
    """
    if name in _INTERNAL:
        raise ImportError(
            f"{module} has no {name!r}: it is a part of microsoft/dion's steps, which run in Rust here. Code "
            "that builds a step of its own on it needs microsoft/dion",
            name=module,
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def register(package: str) -> dict[str, ModuleType]:
    """Makes the modules of microsoft/dion importable below a name.

    Args:
        package: the name, as "dion".

    Returns:
        The modules by their names below it.
    """
    made: dict[str, ModuleType] = {}
    for name, contents in _CONTENTS.items():
        path = f"{package}.{name}"
        module = ModuleType(path, f"Names of microsoft/dion's module {name!r}.")
        vars(module).update(contents, __getattr__=lambda key, path=path: _missing(path, key))
        sys.modules[path] = made[name] = module
    return made


globals().update(register(__name__))


def __getattr__(name: str) -> Any:
    return _missing(__name__, name)
