"""The optimizers of this package by name in torchtitan's configurations; it is imported when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch.optim import Optimizer

from oxidion import optim
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import nearest

PREFIX = "oxidion."
"""Start of the names, so that none hides one of torchtitan's."""

_MARK = "_knows_oxidion"


def _make(cls: Callable[..., Optimizer], groups: list[dict[str, Any]], **arguments: Any) -> Optimizer:
    """Returns an optimizer over groups that each have all settings, as torchtitan writes them.

    States are made at once, so that a checkpoint of step 0 needs no step of zeros. All ranks take state dicts
    together, so that each gathers its states first.
    """
    if all("lr" in group for group in groups):
        arguments.setdefault("lr", groups[0]["lr"])  # no group takes it, and a constructor may ask for one
    optimizer = cls(groups, **{"init_state": True, **arguments})
    optimizer.register_state_dict_pre_hook(OxOptimizer.synchronize_for_checkpoint)  # type: ignore[arg-type]
    return optimizer


def _factories() -> dict[str, Callable[..., Optimizer]]:
    """Constructors by name."""
    classes: dict[str, Any] = {name: getattr(optim, name) for name in optim.__all__}
    return {
        PREFIX + name: partial(_make, cls)
        for name, cls in classes.items()
        if isinstance(cls, type) and issubclass(cls, OxOptimizer)
    }


def register() -> list[str]:
    """Teaches torchtitan's ``OptimizersContainer`` the names "oxidion.Muon", "oxidion.Dion" and so on.

    To be called before the trainer is built, as at the top of a module of configurations; a second call
    changes nothing. ``ParamGroupConfig(pattern=..., optimizer_name="oxidion.Muon", optimizer_kwargs=...)``
    then has this package step what the pattern matches.

    Returns:
        The names.

    Raises:
        ImportError: without torchtitan.
        RuntimeError: for a torchtitan whose container resolves names otherwise.
    """
    container: Any = importlib.import_module("torchtitan.components.optimizer").OptimizersContainer
    known = getattr(container, "_resolve_optimizer_factory", None)
    if known is None:
        raise RuntimeError(
            "this torchtitan has no OptimizersContainer._resolve_optimizer_factory, which 0.3 has: build the "
            "optimizers of oxidion in a subclass of the container"
        )
    factories = _factories()
    if not hasattr(known, _MARK):

        @wraps(known)
        def resolve(name: str) -> Callable[..., Optimizer]:
            if not name.startswith(PREFIX):
                found: Callable[..., Optimizer] = known(name)
                return found
            if name not in factories:
                raise ValueError(
                    f"optimizer_name must be a class of oxidion, got {name!r}; the nearest is "
                    f"{nearest(name, factories)!r}"
                )
            return factories[name]

        setattr(resolve, _MARK, True)
        container._resolve_optimizer_factory = staticmethod(resolve)
    return list(factories)
