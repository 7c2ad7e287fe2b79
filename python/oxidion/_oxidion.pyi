"""The border between Python and the core."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np
from torch import Tensor

__all__ = [
    "LayoutError",
    "Plan",
    "PlanMismatch",
    "PoisonedOptimizer",
    "Session",
    "__version__",
    "algorithms",
    "cpu_features",
    "fill_normal",
    "forget_threads_after_fork",
    "orthonormal_columns",
    "polar_iteration",
]

__version__: str

_M = TypeVar("_M")
_SpelledAxis = tuple[str, Sequence[int], int, str, int]

class LayoutError(ValueError): ...
class PlanMismatch(RuntimeError): ...
class PoisonedOptimizer(RuntimeError): ...

@final
class Plan:
    """The schedule of one step: buckets, buffers, instructions."""

    def __new__(
        cls,
        groups: Sequence[dict[str, Any]],
        states: Sequence[Mapping[str, tuple[str, Sequence[int]]]],
        meshes: object = None,
        layouts: Sequence[tuple[Sequence[int], Sequence[_SpelledAxis]]] | None = None,
    ) -> Plan: ...
    @staticmethod
    def of_shapes(
        groups: Sequence[dict[str, Any]],
        params: Sequence[tuple[str, Sequence[int], str, int, Sequence[_SpelledAxis]]],
        meshes: object = None,
    ) -> Plan: ...
    def work(self) -> tuple[float, float, float, float]: ...
    @property
    def schedule(self) -> list[tuple[int, int]]: ...
    @property
    def arena_bytes(self) -> int: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def algorithms(self) -> list[str]: ...
    @property
    def transfers(self) -> list[dict[str, Any]]: ...
    @property
    def decoupled(self) -> list[int]: ...
    def agreed(self, ranks: Sequence[int]) -> list[str]: ...
    def preflight(self, groups: Sequence[dict[str, Any]]) -> None: ...
    def state_specs(self) -> list[list[dict[str, Any]]]: ...
    def rows(self) -> list[dict[str, Any]]: ...
    def column(self, key: str) -> np.ndarray[Any, np.dtype[np.float64]]: ...

@final
class Session:
    """A plan bound to the parameters and states of an optimizer."""

    def __new__(
        cls,
        plan: Plan,
        groups: Sequence[dict[str, Any]],
        states: Sequence[Sequence[Tensor]],
        state: Mapping[Tensor, dict[str, Any]],
        arena: Tensor,
    ) -> Session: ...
    def begin(
        self,
        groups: Sequence[dict[str, Any]],
        state: Mapping[Tensor, dict[str, Any]],
        grad_factor: float,
        num_threads: int,
    ) -> bool: ...
    def summary(self, ranks: Sequence[int]) -> list[int]: ...
    def details(
        self, ranks: Sequence[int]
    ) -> tuple[list[tuple[str, bool]], list[tuple[str, list[float]]]]: ...
    def agreed(self, ranks: Sequence[int]) -> list[str]: ...
    def abandon(self) -> None: ...
    def compute(self, k: int) -> None: ...
    def end(self) -> list[Tensor]: ...
    def measure(self, on: bool) -> None: ...
    def measurements(self) -> tuple[dict[str, list[tuple[int, float]]], list[float]]: ...

def algorithms() -> list[str]: ...
def fill_normal(
    tensor: Tensor,
    seed: int,
    stream: int,
    shape: Sequence[int] | None = None,
    spans: Sequence[tuple[int, int]] | None = None,
) -> None: ...
def forget_threads_after_fork() -> None: ...
def cpu_features() -> list[str]: ...
def polar_iteration(x: _M, polynomial: str, epsilon: float) -> _M: ...
def orthonormal_columns(x: _M, method: str) -> _M: ...
