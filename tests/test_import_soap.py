"""Checkpoints of the SOAP authors' optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict
from support.inputs import gaussian

GROUP: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "shampoo_beta": -1,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "precondition_frequency": 2,
    "max_precond_dim": 10,
    "merge_dims": False,
    "precondition_1d": False,
    "normalize_grads": False,
    "correct_bias": True,
}
"""Keys of a group as the authors' constructor writes them."""


def rotated(state: dict[str, Tensor]) -> Tensor:
    """The first moment as the authors keep it: in the bases."""
    moment = state["exp_avg"]
    if "Q_L" in state:
        moment = state["Q_L"].mT @ moment
    return moment @ state["Q_R"] if "Q_R" in state else moment


def theirs(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Any]:
    """A state dict of this package in the authors' form."""
    states = {}
    for number, param in enumerate(params):
        state = optimizer.state[param]
        names = ("L", "R") if param.ndim == 2 else ("none",)
        states[number] = {
            "step": int(state["step"]) - 1,
            "exp_avg": rotated(state) if param.ndim == 2 else state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "GG": [state.get(name, []) for name in names],
            "Q": [state.get(f"Q_{name}", []) for name in names],
        }
    return {"state": states, "param_groups": [{**GROUP, "params": list(range(len(params)))}]}


def test_imported_run_goes_on_as_the_one_that_was_saved() -> None:
    shapes = ((8, 8), (10, 6), (6, 12), (5,))
    keys = {key: GROUP[key] for key in ("lr", "betas", "eps", "weight_decay", "precondition_frequency")}
    params = [nn.Parameter(gaussian(shape, 1, i)) for i, shape in enumerate(shapes)]
    optimizer = oxidion.SOAP(params, max_precondition_dim=10, **keys)

    def step(made: Any, own: list[nn.Parameter], number: int) -> None:
        for i, param in enumerate(own):
            param.grad = gaussian(param.shape, 2, number, i)
        made.step()

    for number in range(4):
        step(optimizer, params, number)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    other = oxidion.SOAP(copies)
    other.load_state_dict(import_state_dict(theirs(optimizer, params), "soap", other))
    assert other.param_groups[0]["max_precondition_dim"] == 10
    assert other.param_groups[0]["shampoo_beta"] is None
    for number in range(4, 8):
        step(optimizer, params, number)
        step(other, copies, number)
    for param, copy in zip(params, copies, strict=True):
        # The first moment went through the bases and back.
        assert torch.allclose(param, copy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["merge_dims", "precondition_1d"])
def test_settings_without_a_counterpart_are_refused(key: str) -> None:
    saved = {"state": {}, "param_groups": [{**GROUP, key: True, "params": [0]}]}
    with pytest.raises(ValueError, match=f"{key}=True"):
        import_state_dict(saved, "soap")


def test_bases_of_three_dimensions_are_refused() -> None:
    cube, square = torch.zeros(2, 3, 4), torch.eye(3)
    state = {"step": 1, "exp_avg": cube, "exp_avg_sq": cube, "GG": [square] * 3, "Q": [square] * 3}
    with pytest.raises(ValueError, match="3 dimensions"):
        import_state_dict({"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}, "soap")
