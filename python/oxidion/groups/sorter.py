"""Models in the place of parameters: what a constructor makes of them before it begins."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import OPTIONS, SCALAR, unknown
from oxidion._dist.comm import is_mesh
from oxidion.groups import algorithms
from oxidion.groups.matrices import param_groups
from oxidion.optim._model_options import ModelOptions


def is_option(key: str) -> bool:
    """True for an argument that says how a model is sorted."""
    return key in ModelSorter.options or key.startswith(SCALAR)


class ModelSorter:
    """Groups for constructors, by `param_groups`."""

    options = frozenset(ModelOptions.__annotations__)

    def name_algorithm(self, cls: type[OxOptimizer], group: dict[str, Any]) -> None:
        """Replaces what a group has as its algorithm by the algorithm's name, in place."""
        algorithms.name_in(group, cls)

    def beside(self, cls: type[OxOptimizer]) -> str:
        """The algorithm for what is no matrix, beside that of a class."""
        return algorithms.beside(cls)

    def prepare(
        self, cls: type[OxOptimizer], given: dict[str, Any], options: dict[str, Any]
    ) -> dict[str, Any]:
        """The arguments of a constructor with groups in the place of a model.

        Args:
            cls: the class.
            given: arguments by name.
            options: those of `param_groups`, and ``model`` where parameters are handed over beside it.

        Raises:
            TypeError: for options without a model, and a mesh in the place of another argument.
            ValueError: as `param_groups`, and for parameters that are not the model's.
        """
        _refuse_mesh(cls, given)
        params, model = given.get("params"), options.pop("model", None)
        if isinstance(params, nn.Module):
            params, model = (None, params) if model is None or model is params else (params, model)
        if model is None:
            for key in options:
                if not is_option(key):
                    own = frozenset(inspect.signature(cls).parameters) - {OPTIONS}
                    raise unknown(cls, key, options[key], own, frozenset({key}))
            if options:
                raise TypeError(
                    f"{cls.__name__}(): {min(options)!r} says how the parameters of a model are sorted: pass "
                    f"the model instead of its parameters, oxidion.{cls.__name__}(model, ...), or beside "
                    "them as model=model"
                )
            return given
        if not isinstance(model, nn.Module) or isinstance(params, nn.Module):
            raise TypeError(f"model must be an nn.Module beside its parameters, got {type(model).__name__}")
        if "algorithm" in options:
            raise TypeError(
                f"{cls.__name__} steps the matrices of a model by {cls._ALGORITHM!r}, got "
                f"algorithm={options['algorithm']!r}: take the class of that algorithm, or name parameters "
                "in overrides={pattern: algorithm}"
            )
        usual = inspect.signature(cls).parameters
        lr = given["lr"] if "lr" in given else getattr(usual.get("lr"), "default", None)
        groups: list[dict[str, Any]] = param_groups(
            model, OxOptimizer._registry[cls._ALGORITHM], lr, **options
        )
        _check_rank(cls, given, groups)
        given = {**given, "params": groups if params is None else _only(groups, params)}
        meshes = ("distributed_mesh", "replicate_mesh")
        if isinstance(model, DistributedDataParallel) and all(given.get(key) is None for key in meshes):
            given["distributed_mesh"] = model.process_group
        return given


def _refuse_mesh(cls: type[OxOptimizer], given: Mapping[str, Any]) -> None:
    """Refuses meshes in the place of other arguments: packages put them second, where torch has ``lr``."""
    for key, value in given.items():
        if not key.endswith("_mesh") and is_mesh(value):
            names = [name for name in inspect.signature(cls).parameters if name.endswith("_mesh")]
            raise TypeError(
                f"{cls.__name__}(): {key} cannot be a {type(value).__name__}. Meshes are given by keyword: "
                f"{', '.join(f'{name}=' for name in names)}"
            )


def _check_rank(
    cls: type[OxOptimizer], given: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]
) -> None:
    """Refuses a class that projects on a rank and has none, which would be AdamW throughout."""
    usual = inspect.signature(cls).parameters
    if (
        "rank" not in cls._SCHEMA
        or given.get("rank", getattr(usual.get("rank"), "default", None)) is not None
    ):
        return
    if not any(group.get("rank") for group in groups):
        raise ValueError(
            f"{cls.__name__} projects gradients on a rank, and none is given: "
            f"oxidion.{cls.__name__}(model, rank=128)"
        )


def _only(groups: Iterable[dict[str, Any]], params: Any) -> list[dict[str, Any]]:
    """Groups of a model with the parameters that were handed over, and the keys of these.

    Args:
        groups: of the model.
        params: parameters, groups, or pairs of names and parameters.

    Raises:
        ValueError: for a parameter that is not the model's.
    """
    names = {id(param): name for group in groups for name, param in group["params"]}
    given = list(params)
    handed = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    made = []
    for number, own in enumerate(handed):
        keys = {key: value for key, value in own.items() if key not in ("params", "param_names")}
        held = [own["params"]] if isinstance(own["params"], Tensor) else list(own["params"])
        found = [param[1] if isinstance(param, tuple) else param for param in held]
        for place, param in enumerate(found):
            if id(param) not in names and param.requires_grad:
                raise ValueError(
                    f"parameter {place} of group {number}, of shape {tuple(param.shape)}, is not one of the "
                    "model: pass the model that it was taken from"
                )
        wanted = set(map(id, found))
        for group in groups:
            taken = [(name, param) for name, param in group["params"] if id(param) in wanted]
            if taken:
                made.append({**group, **keys, "params": taken})
    return made
