"""What a row of the table of optimizers says, and how parameters and an optimizer are built from it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from oxidion._core.constructor import LEFT_OUT
from oxidion._reference.update import grad_norm

from .inputs import Shape, gaussian

# lr * weight_decay is a power of two: the decay factor is the same number in float32 and float64.
LR = 2.0**-6
WEIGHT_DECAY = 2.0**-3
BASE = {"lr": LR, "weight_decay": WEIGHT_DECAY}

EMULATED = os.environ.get("OXIDION_TEST_DEVICE") == "emulated"
"""Whether memory of the host counts as that of the emulated CUDA device."""

MATRIX_ALGORITHMS = ("dion", "dion2", "muon", "nordion2", "normuon")
LOW_RANK_ALGORITHMS = ("galore_adamw", "apollo_adamw")
BASIS_ALGORITHMS = ("soap", "soap_muon")
ONLY_OF_MATRICES = (*MATRIX_ALGORITHMS, *LOW_RANK_ALGORITHMS, "soap_muon")
"""Algorithms that take no vector."""


def defaults_of(cls: type) -> dict[str, Any]:
    """Default values of a constructor's arguments, without other words for them."""
    parameters = inspect.signature(cls).parameters.values()
    none = (inspect.Parameter.empty, LEFT_OUT)
    return {p.name: p.default for p in parameters if p.default not in none}


@dataclass(frozen=True)
class Group:
    """Parameters of one group: their shapes and the keys that the group sets itself."""

    shapes: tuple[Shape, ...]
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """One setting of one optimizer class.

    Attributes:
        name: Identifier in test ids.
        cls: The optimizer class.
        algorithm: Algorithm of groups that name none.
        kwargs: Constructor arguments.
        groups: Parameter groups.
    """

    name: str
    cls: type[Optimizer]
    algorithm: str
    kwargs: Mapping[str, Any]
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return self.name

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of all parameters, in the order of the groups."""
        return [shape for group in self.groups for shape in group.shapes]

    @property
    def algorithms(self) -> list[str]:
        """Algorithm of every parameter, in the order of the groups."""
        return [group.keys.get("algorithm", self.algorithm) for group in self.groups for _ in group.shapes]

    def parameters(
        self, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 0.1
    ) -> list[nn.Parameter]:
        """New parameters of the case, normal with standard deviation ``scale``."""
        return [
            nn.Parameter(gaussian(shape, seed, index, 77, scale=scale).to(dtype))
            for index, shape in enumerate(self.shapes)
        ]

    def build(self, params: Sequence[Tensor], *, orth_dtype: str | None = None, **overrides: object) -> Any:
        """Optimizer of the case over ``params``, which are in the order of `shapes`.

        ``orth_dtype`` goes to the groups of matrix algorithms, ``overrides`` to the constructor.
        """
        remaining = iter(params)
        groups = []
        for group in self.groups:
            keys = dict(group.keys)
            orthonormal = (*MATRIX_ALGORITHMS, "soap_muon")
            if orth_dtype is not None and keys.get("algorithm", self.algorithm) in orthonormal:
                keys["orth_dtype"] = orth_dtype
            groups.append({"params": [next(remaining) for _ in group.shapes], **keys})
        return self.cls(groups, **{**self.kwargs, **overrides})

    def groups_with_norms(
        self, groups: Sequence[dict[str, Any]], grads: Sequence[Tensor | None]
    ) -> list[dict[str, Any]]:
        """The groups of every parameter, with the norm of all gradients of its group where that matters."""
        found: list[dict[str, Any]] = []
        for group in self.groups:
            at = slice(len(found), len(found) + len(group.shapes))
            norm = grad_norm([grad for grad in grads[at] if grad is not None])
            found += [{**own, "grad_norm": norm} for own in groups[at]]
        return found

    def reference_groups(self, **overrides: object) -> list[dict[str, Any]]:
        """Hyper-parameters of every parameter: the signature's defaults, the arguments, the group's keys."""
        found: list[dict[str, Any]] = []
        for group in self.groups:
            defaults, given = defaults_of(self.cls), {**self.kwargs, **overrides, **group.keys}
            own = {"algorithm": self.algorithm, **defaults, **given}
            if "betas" in given and "beta2" in defaults.keys() - given.keys():
                own["beta2"] = given["betas"][1]  # of a class with both the second one is it
            if "epsilon" in group.keys:
                own.pop("eps", None)  # of the class, in its own spelling
            found += [own for _ in group.shapes]
        return [{**group, "stream": index} for index, group in enumerate(found)]
