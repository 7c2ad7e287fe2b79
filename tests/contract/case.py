"""What a row of the table of optimizer classes says, and how an optimizer is built from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import oxidion

MATRIX_ALGORITHMS = frozenset({"dion", "dion2", "muon", "nordion2", "normuon", "soap_muon"})
LOW_RANK_ALGORITHMS = frozenset({"apollo_adamw", "galore_adamw"})
BASIS_STATES = frozenset({"L", "R", "Q_L", "Q_R", "basis_step"})
STEP_KEYS = frozenset({"step", "step_dev"})
MOMENTUM_FACTORS = {**dict.fromkeys(MATRIX_ALGORITHMS, "mu"), "dion2": "ef_decay"}
"""Group key of the momentum factor by algorithm."""


@dataclass(frozen=True)
class Case:
    """One optimizer class.

    Attributes:
        cls: The class.
        algorithm: The algorithm of a group that names none.
        positional: Names and defaults of the constructor's positional arguments after ``params``.
        keyword_only: Names of its keyword-only arguments.
        state: State keys of a parameter, by the algorithm that it gets.
        bad: Pairs of a hyper-parameter and a value that is refused, in the constructor and in a group.
        other: A second legal value of every hyper-parameter that a running optimizer reads at each step.
        kwargs: Arguments that make the tests exercise more than the defaults do.
        required: Arguments without which the tests cannot run: an ``lr`` that the class has no default of.
        decoupled: Whether decay adds ``-lr * weight_decay * x`` to the step, whatever else is in it.
        factors: State keys of matrices that hold averages, by the dimensions that they average over.
        idle: Number of first gradients of a parameter that leave it where it is.
    """

    cls: type[Optimizer]
    algorithm: str
    positional: tuple[tuple[str, object], ...]
    keyword_only: frozenset[str]
    state: Mapping[str, frozenset[str]]
    bad: tuple[tuple[str, object], ...]
    other: Mapping[str, object]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, Any] = field(default_factory=dict)
    decoupled: bool = True
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    idle: int = 0

    def __str__(self) -> str:
        return self.cls.__name__

    @property
    def is_matrix(self) -> bool:
        """Whether the class's own algorithm takes matrices only."""
        return self.algorithm in MATRIX_ALGORITHMS

    @property
    def vector_algorithm(self) -> str:
        """Algorithm of the one-dimensional parameters in `groups`."""
        return "adamw" if self.is_matrix or self.algorithm in LOW_RANK_ALGORITHMS else self.algorithm

    def groups(self, model: nn.Module, *, named: bool = False, **overrides: object) -> list[dict[str, Any]]:
        """Split a model into a group of matrices and a group of vectors."""
        split: tuple[list[Any], list[Any]] = ([], [])
        for name, param in model.named_parameters():
            split[param.ndim < 2].append((name, param) if named else param)
        matrices, vectors = ({"params": params, **overrides} for params in split)
        if self.is_matrix:
            vectors["algorithm"] = self.vector_algorithm
        return [matrices, vectors]

    def build(self, model: nn.Module, *, named: bool = False, **kwargs: object) -> Any:
        """Build the optimizer over `groups` of the model."""
        return self.new(self.groups(model, named=named), **{**self.kwargs, **kwargs})

    def new(self, params: Any, **kwargs: object) -> Any:
        """Build the optimizer over ``params`` with these arguments and those that are required."""
        return self.cls(params, **{**self.required, **kwargs})

    def step(self, optimizer: Any) -> None:
        """Step until every parameter has moved that began with this gradient."""
        for _ in range(self.idle + 1):
            optimizer.step()

    @property
    def float32_state(self) -> dict[str, Any]:
        """Arguments that keep every state tensor in float32."""
        if self.algorithm != "dion":
            return {"state_dtype": torch.float32}
        config = oxidion.DionMixedPrecisionConfig(
            momentum_dtype=torch.float32, Q_dtype=torch.float32, variance_dtype=torch.float32
        )
        return {"mixed_precision_config": config}

    def on(self, *params: Tensor, **kwargs: object) -> Any:
        """Build the optimizer over the given parameters in one group, not strict: vectors are legal."""
        return self.new(list(params), **{**self.kwargs, "strict": False, **kwargs})

    def state_keys(self, param: Tensor) -> frozenset[str]:
        """State keys of a parameter of `build`."""
        key = self.algorithm if param.ndim >= 2 else self.vector_algorithm
        return self.state.get(f"{key}, vectors", self.state[key]) if param.ndim < 2 else self.state[key]

    def state_shape(self, key: str, param: Tensor) -> tuple[int, ...]:
        """Shape of a state of a parameter, other than Q."""
        if key == "variance_neuron":
            return (*param.shape[:-1], 1)
        if key in BASIS_STATES:
            sides = {"L": param.shape[-2:-1], "R": param.shape[-1:]}.get(key[-1], ())
            return (*param.shape[:-2], *sides, *sides)
        averaged = {param.ndim + dim for dim in self.factors.get(key, ())}
        return tuple(size for at, size in enumerate(param.shape) if at not in averaged)

    def state_type(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the states of a parameter of this dtype."""
        return torch.promote_types(dtype, torch.float32)

    @property
    def has_betas(self) -> bool:
        """Whether the hyper-parameters include ``betas``."""
        return "betas" in self.other
