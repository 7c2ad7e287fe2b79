"""An optimizer and the float64 reference side by side on the same parameters and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oxidion._reference.registry import REFERENCE

from .cases import Case
from .inputs import gradients, well_conditioned

FACTORS = {"row", "col", "mean", "res_row", "res_col", "res_mean"}
"""Roles that are averages over dimensions, in float32 at least."""

Grad = Tensor | None


def role_names(cls: Any) -> dict[str, str]:
    """The reference's names of the states that a class calls by others, by those."""
    return {key: role for names in cls._STATE_NAMES.values() for role, key in names.items()}


def role_state(optimizer: Optimizer, param: Tensor) -> dict[str, Tensor]:
    """The live state tensors of a parameter under the reference's role names."""
    roles = role_names(type(optimizer))
    return {roles.get(key, key): value for key, value in optimizer.state[param].items()}


def as_float64(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A float64 copy of a state."""
    return {key: value.detach().double().clone() for key, value in state.items()}


class Twin:
    """An optimizer of one case and the reference's copy of its parameters and state.

    Attributes:
        case: The row of the table.
        params: The optimizer's parameters.
        optimizer: The optimizer.
        initial: Values of the parameters at the start.
        expected: The reference's parameters, float64.
        states: The reference's state of every parameter.
    """

    def __init__(
        self,
        case: Case,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        scale: float = 0.1,
        view: Callable[[Tensor], Tensor] | None = None,
        orth_dtype: str | None = None,
        **overrides: object,
    ) -> None:
        self.case = case
        self.dtype = dtype
        self.seed = seed
        self.params: list[Tensor] = list(case.parameters(dtype, seed, scale))
        if view is not None:
            self.params = [view(param.detach()).requires_grad_() for param in self.params]
        self.optimizer: Any = case.build(self.params, orth_dtype=orth_dtype, **overrides)
        self.groups = case.reference_groups(**overrides)
        self.initial = [param.detach().clone() for param in self.params]
        self.optimizer.init_state()
        for index, param in enumerate(self.params):
            if "Q" in self.optimizer.state[param]:
                q = self.optimizer.state[param]["Q"]
                q.copy_(well_conditioned(q.shape, seed, index, 99))
        self.follow()

    def follow(self) -> None:
        """Set the reference to the optimizer's present parameters and state."""
        self.expected = [param.detach().double().clone() for param in self.params]
        self.states = [as_float64(role_state(self.optimizer, param)) for param in self.params]

    def follow_parameters(self) -> None:
        """Set the reference to the optimizer's present parameters, not to its state."""
        self.expected = [param.detach().double().clone() for param in self.params]

    def gradients(self, steps: int) -> list[list[Tensor]]:
        """Gradients [step][parameter] that the parameters' dtype represents exactly, as float64."""
        flatten = bool(self.case.kwargs.get("flatten", False))
        drawn = gradients(self.case.shapes, steps, self.seed, flatten=flatten)
        return [[grad.to(self.dtype).double() for grad in grads] for grads in drawn]

    def set_grads(self, grads: Sequence[Grad]) -> None:
        """Give the optimizer's parameters these gradients."""
        for param, grad in zip(self.params, grads, strict=True):
            param.grad = None if grad is None else grad.to(param.dtype)

    def step(self, grads: Sequence[Grad]) -> None:
        """Take one step on both sides; a gradient of None leaves its parameter alone."""
        self.set_grads(grads)
        self.optimizer.step()
        self.step_reference(grads)

    def step_reference(self, grads: Sequence[Grad]) -> None:
        """Take one step on the reference's side."""
        groups = self.case.groups_with_norms(self.groups, grads)
        for expected, grad, state, group in zip(self.expected, grads, self.states, groups, strict=True):
            if grad is not None:
                REFERENCE[group["algorithm"]](expected, grad.double(), state, group)

    def labels(self) -> list[str]:
        """A name of every parameter for messages."""
        pairs = zip(self.case.algorithms, self.case.shapes, strict=True)
        return [f"{self.case.name} {algorithm} {list(shape)}" for algorithm, shape in pairs]
