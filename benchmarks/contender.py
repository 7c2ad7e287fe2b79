"""One optimizer that the benchmarks race, and the settings that all of them have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from workloads import Tensors

Build = Callable[[Tensors], Sequence[Optimizer]]

LR, WD = 1e-4, 0.01
OURS = "oxidion"


@dataclass(frozen=True)
class Contender:
    """One optimizer at one setting.

    Attributes:
        name: Row label.
        source: Key of `contenders.SOURCES`.
        family: The family it belongs to.
        build: Makes its optimizers for a parameter list; all of them are stepped in order.
        note: What sets it apart within its family.
        compiled: Whether the source's own ``torch.compile`` decorators act; otherwise they are run eagerly.
        max_tensors: Longest parameter list it is run on.
    """

    name: str
    source: str
    family: str
    build: Build
    note: str = ""
    compiled: bool = False
    max_tensors: int = 100_000
