"""The optimizers of this package as transformers' Trainer builds them; transformers is not needed for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from oxidion import optim
from oxidion._core.base import OxOptimizer
from oxidion.groups import param_groups


class OptimizerFactory:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=...)`` of an optimizer that needs the model.

    Given a class, the Trainer makes two groups without names, with and without decay, so embeddings and the
    output layer would be orthonormalized. Given a factory, it calls ``factory()(model, **kwargs)``. This one
    sorts the parameters with `param_groups`::

        kwargs = {"optimizer": "Dion", "lr": 0.01, "groups": {"scalar_lr": 3e-4}}
        trainer = Trainer(model, args, optimizer_cls_and_kwargs=(hf.OptimizerFactory, kwargs))

    The learning rate is that of ``kwargs``: the Trainer's own does not reach a factory. Its schedulers, which
    scale what the groups have, work as with any optimizer.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: str | type[OxOptimizer] = "Dion",
        *,
        groups: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> OxOptimizer:
        """The optimizer for a model.

        Args:
            model: its parameters that require gradients are sorted into groups.
            optimizer: class of this package, or its name.
            groups: arguments of `param_groups`, as ``scalar_lr`` and ``scalar_patterns``, and keys of the
                groups of matrices. Without ``scalar_algorithm`` the rest is stepped by AdamW where the class
                is for matrices, and by the class itself otherwise.
            **arguments: of the class.

        Raises:
            ValueError: for a name that is none of the classes.
            TypeError: for a class that is none of them.
        """
        cls = getattr(optim, optimizer, None) if isinstance(optimizer, str) else optimizer
        if not (isinstance(cls, type) and issubclass(cls, OxOptimizer)):
            kind: type[Exception] = ValueError if isinstance(optimizer, str) else TypeError
            raise kind(f"optimizer must be a class of oxidion or its name, got {optimizer!r}")
        rest = "adamw" if cls.MATRIX else cls.ALGORITHM
        keys = {"algorithm": cls.ALGORITHM, "scalar_algorithm": rest, **(groups or {})}
        return cls(param_groups(model, **keys), **arguments)
