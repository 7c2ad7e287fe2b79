"""Registry of the naive steps, by the name that a parameter group gives its algorithm."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.adafactor import adafactor_step
from oxidion._reference.adamw import adamw_step
from oxidion._reference.apollo import apollo_step
from oxidion._reference.came import came_step
from oxidion._reference.dion import dion_step
from oxidion._reference.dion2 import dion2_step
from oxidion._reference.galore import galore_step
from oxidion._reference.lamb import lamb_step
from oxidion._reference.lion import lion_step
from oxidion._reference.muon import muon_step
from oxidion._reference.nordion2 import nordion2_step
from oxidion._reference.normuon import normuon_step
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


REFERENCE: dict[str, Step] = {
    "dion": _packed(dion_step),
    "dion2": _packed(dion2_step),
    "nordion2": _packed(nordion2_step),
    "muon": _packed(muon_step),
    "normuon": _packed(normuon_step),
    "adamw": adamw_step,
    "lion": lion_step,
    "lamb": lamb_step,
    "adafactor": adafactor_step,
    "came": came_step,
    "galore_adamw": _packed(galore_step),
    "apollo_adamw": _packed(apollo_step),
}
"""The naive step of each algorithm."""
