"""Bitwise snapshots of an optimizer: parameters, gradients, state and groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def params_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of the groups."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def frozen_copy(value: Any) -> Any:
    """A copy that later writes to the original do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: frozen_copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(frozen_copy(item) for item in value)
    return value


def snapshot(optimizer: Optimizer) -> dict[str, Any]:
    """Everything that a step may change, by value."""
    params = params_of(optimizer)
    return {
        "params": frozen_copy(params),
        "state": [frozen_copy(optimizer.state.get(param, {})) for param in params],
        "groups": [
            {key: frozen_copy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
    }


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Assert that two nested values are equal, tensors bit by bit (NaN equals NaN) and with equal dtypes."""
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{where}: expected a tensor, got {type(actual)}"
        torch.testing.assert_close(
            actual.detach(),
            expected.detach(),
            rtol=0,
            atol=0,
            equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )
    elif isinstance(expected, Mapping):
        assert set(actual) == set(expected), (
            f"{where}: keys {sorted(map(str, set(actual) ^ set(expected)))} differ"
        )
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert type(actual) is type(expected), f"{where}: expected {type(expected)}, got {type(actual)}"
        assert len(actual) == len(expected), f"{where}: lengths differ"
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert actual == expected, f"{where}: {actual!r} is not {expected!r}"


def assert_params_equal(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Assert that two sequences of parameters are bitwise equal."""
    assert_same([p.detach() for p in actual], [p.detach() for p in expected], "parameters")


def storages(value: Any) -> set[int]:
    """Addresses of the storages of all non-empty tensors in a nested value."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()} if value.numel() else set()
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return set().union(*(storages(item) for item in value)) if value else set()
    return set()
