"""Registry of the naive steps, by the name that a parameter group gives its algorithm."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor

from oxidion._oxidion import algorithms
from oxidion._reference.update import Group, State, Step


def _packed(step: Step) -> Step:
    """Wraps a step for tensors of any strides: views as matrices need those of rows."""

    def packed(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
        whole = param.contiguous()
        for key, value in state.items():
            state[key] = value.contiguous()
        step(whole, grad.contiguous(), state, group)
        if whole is not param:
            param.copy_(whole)

    return packed


def _step(algorithm: str) -> Step:
    """The function ``NAME_step`` of the module that has the algorithm's name, less AdamW's."""
    name = algorithm.removesuffix("_adamw")
    step: Step = getattr(import_module(f"oxidion._reference.{name}"), f"{name}_step")
    return _packed(step)


REFERENCE: dict[str, Step] = {algorithm: _step(algorithm) for algorithm in algorithms()}
"""The naive step of each algorithm."""
