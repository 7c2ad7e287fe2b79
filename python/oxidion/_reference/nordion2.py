"""NorDion2 (Dion3): Dion2 on rows, with an update that is normalized by neuron."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.dion2 import dion2_step
from oxidion._reference.update import Group, State


def nordion2_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """NorDion2 (Dion3): see `dion2_step`."""
    dion2_step(param, grad, state, group, normalized=True)
