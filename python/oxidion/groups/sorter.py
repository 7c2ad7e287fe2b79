"""Models passed instead of parameters: what a constructor makes of them before it begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import EXTRA, OPTIONS, SCALAR, unknown
from oxidion._core.group_checks import lacks_rank, listed
from oxidion._core.signature import ModelOptions
from oxidion._dist.comm import is_mesh
from oxidion.groups import algorithms
from oxidion.groups.facts import replicas
from oxidion.groups.matrices import param_groups
from oxidion.groups.summary import ParamGroups


def is_option(key: str) -> bool:
    """True for an argument that says how a model is sorted."""
    return key in ModelSorter.options or key.startswith(SCALAR)


class ModelSorter:
    """Groups for constructors, by `param_groups`."""

    options = frozenset(ModelOptions.__annotations__)

    def name_algorithm(self, cls: type[OxOptimizer], group: dict[str, Any], lr: Any) -> None:
        """Replaces what a group has as its algorithm by the algorithm's name, in place."""
        algorithms.name_in(group, cls, lr)

    def scalar_default(self, cls: type[OxOptimizer]) -> str:
        """The algorithm for parameters that are no matrices, for the class of those that are."""
        return algorithms.scalar_default(cls)

    def prepare(
        self,
        cls: type[OxOptimizer],
        given: dict[str, Any],
        options: dict[str, Any],
        usual: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Returns the arguments of a constructor with groups instead of a model.

        Args:
            cls: the class.
            given: arguments by name.
            options: those of `param_groups`, and ``model`` where parameters are passed with it.
            usual: the defaults of the arguments.

        Raises:
            TypeError: for options without a model, and a mesh or a model given for another argument.
            ValueError: as `param_groups`, and for parameters that are not the model's.
        """
        _refuse_others(cls, given)
        params, model = listed(given.get("params")), options.pop("model", None)
        if isinstance(params, list):
            given["params"] = params
        if isinstance(params, nn.Module):
            if model not in (None, params):
                raise TypeError(
                    f"{cls.__name__}(): two models were given, {type(params).__name__} and "
                    f"{type(model).__name__}: pass one, or parameters and model="
                )
            params, model = None, params
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if model is None or isinstance(params, ParamGroups):
            options.pop(EXTRA, None)  # the constructor has read it
            _refuse_options(cls, options)
            if isinstance(params, ParamGroups):  # torch writes into groups, and these may serve again
                given["params"] = [dict(group) for group in params]
            return _with_replicas(given, model)
        own = algorithms.public(cls)
        if (named := options.pop("algorithm", own)) is not own and algorithms.find(named) is not own:
            raise TypeError(
                f"{cls.__name__} steps the matrices of a model by {cls._ALGORITHM!r}, got "
                f"algorithm={named!r}: take the class of that algorithm, or name parameters "
                "in overrides={pattern: algorithm}"
            )
        lr = given.get("lr", usual.get("lr"))
        groups = param_groups(model, own, lr, params=params, **options)
        _check_rank(cls, given.get("rank", usual.get("rank")), groups)
        return _with_replicas({**given, "params": groups}, model)


def _with_replicas(given: dict[str, Any], model: nn.Module | None) -> dict[str, Any]:
    """The arguments with the process group of a model in DDP, if no mesh is given."""
    meshes = ("distributed_mesh", "replicate_mesh")
    group = None if model is None else replicas(model)
    if group is not None and all(given.get(key) is None for key in meshes):
        given["distributed_mesh"] = group
    return given


def _refuse_options(cls: type[OxOptimizer], options: Mapping[str, Any]) -> None:
    """Refuses what says how a model is sorted, where there is none."""
    for key in options:
        if not is_option(key):
            own = frozenset(inspect.signature(cls).parameters) - {OPTIONS}
            raise unknown(cls, key, options[key], own, frozenset({key}))
    if options:
        raise TypeError(
            f"{cls.__name__}(): {min(options)!r} says how the parameters of a model are sorted: pass the "
            f"model instead of its parameters, oxidion.{cls.__name__}(model, ...), or pass both, "
            "the model as model="
        )


def _refuse_others(cls: type[OxOptimizer], given: Mapping[str, Any]) -> None:
    """Refuses meshes and models given for other arguments, and classes and lists of models."""
    for key, value in given.items():
        if not key.endswith("_mesh") and is_mesh(value):
            names = [name for name in inspect.signature(cls).parameters if name.endswith("_mesh")]
            raise TypeError(
                f"{cls.__name__}(): {key} cannot be a {type(value).__name__}. Meshes are given by keyword: "
                f"{', '.join(f'{name}=' for name in names)}"
            )
        if key != "params" and isinstance(value, nn.Module):
            raise TypeError(
                f"{cls.__name__}(): {key} cannot be a model, got {type(value).__name__}. A model is the "
                "first argument, or is given as model= with its parameters first"
            )
    params = given.get("params")
    if isinstance(params, type) and issubclass(params, nn.Module):
        raise TypeError(f"{cls.__name__}() takes a model, got the class {params.__name__} itself")
    if isinstance(params, (list, tuple)) and params and isinstance(params[0], nn.Module):
        raise TypeError(
            f"{cls.__name__}() takes one model, got a list: pass torch.nn.ModuleList(models), or the model "
            "alone"
        )


def _check_rank(cls: type[OxOptimizer], rank: Any, groups: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a class that projects gradients and has no rank, which would be AdamW throughout."""
    if rank is None and lacks_rank(cls._SCHEMA, groups):
        raise ValueError(
            f"{cls.__name__} needs the rank of its projection, and none is given: "
            f"oxidion.{cls.__name__}(model, rank=128)"
        )
