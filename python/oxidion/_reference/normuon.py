"""NorMuon: Muon with an update that is normalized by neuron."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.muon import muon_update
from oxidion._reference.neurons import normalize_each, variance_of_neurons
from oxidion._reference.update import Group, State, apply


def normuon_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """NorMuon (arXiv:2510.05491): Muon whose update is normalized by neuron before it is applied."""
    update = muon_update(param, grad, state, group)
    variance = state.setdefault("variance_neuron", variance_of_neurons(param, group))
    normalize_each(update, variance, group)
    apply(param, update, group, state)
