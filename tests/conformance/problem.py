"""The problem that the conformance tests solve, and the constructor arguments they solve it with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
)


def inputs(info: OptimizerInfo, device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Constructor arguments of every input of a class, with the flags that the framework adds."""
    found = _get_optim_inputs_including_global_cliquey_kwargs(device, dtype, info)
    assert len(found) >= 10
    for given in found:
        yield copy.deepcopy(given.kwargs)


class Linear:
    """Least squares on one weight and one bias: the model that the framework's direction tests use."""

    def __init__(self, device: str, dtype: torch.dtype, *, strided: bool = False) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            values = torch.randn(*shape, 2, generator=generator, device=device, dtype=dtype)
            return values[..., 0] if strided else values[..., 0].contiguous()

        self.weight = Parameter(normal(10, 5))
        self.bias = Parameter(normal(10))
        self.input = normal(5)

    @property
    def params(self) -> list[Parameter]:
        """Weight and bias."""
        return [self.weight, self.bias]

    def loss(self) -> Tensor:
        """Squared residual."""
        return (self.weight.mv(self.input) + self.bias).pow(2).sum()

    def closure(self, optimizer: Optimizer) -> Callable[[], Tensor]:
        """What `Optimizer.step` evaluates."""

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return evaluate


def train(optimizer: Optimizer, problem: Linear, steps: int) -> None:
    """Take steps with the closure of the problem."""
    for _ in range(steps):
        optimizer.step(problem.closure(optimizer))
