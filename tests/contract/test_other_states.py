"""Checkpoints of another optimizer than the one that loads them: an error, and nothing has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import oxidion

from .snapshot import assert_same, snapshot

ARGUMENTS: dict[str, dict[str, Any]] = {
    "CAME": {"lr": 0.1},
    "GaLoreAdamW": {"rank": 4, "min_quant_numel": 1},
    "APOLLOAdamW": {"rank": 4},
}
CLASSES: dict[str, type[oxidion.optim.AdamW]] = {
    cls._ALGORITHM: cls
    for cls in (getattr(oxidion, name) for name in oxidion.optim.__all__)
    if isinstance(cls, type) and cls.__dict__.get("_ALGORITHM")
}
TORCH: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {}),
    "Muon": (getattr(torch.optim, "Muon", torch.optim.SGD), {"lr": 0.1}),
}


def made(cls: Any, keys: dict[str, Any]) -> tuple[nn.Parameter, Any]:
    param = nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(0)))
    return param, cls([param], **keys)


def stepped(cls: Any, keys: dict[str, Any]) -> Any:
    param, optimizer = made(cls, keys)
    param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def own(algorithm: str) -> tuple[Any, dict[str, Any]]:
    cls = CLASSES[algorithm]
    return cls, ARGUMENTS.get(cls.__name__, {})


def test_every_class_is_tried() -> None:
    assert len(CLASSES) >= 13


@pytest.mark.parametrize("algorithm", CLASSES)
def test_every_class_refuses_a_checkpoint_of_another_algorithm(algorithm: str) -> None:
    optimizer = stepped(*own(algorithm))
    before = copy.deepcopy(snapshot(optimizer))
    for other in CLASSES.keys() - {algorithm}:
        saved = stepped(*own(other)).state_dict()
        message = (
            f"group 0 of the state dict has algorithm '{other}', the optimizer's has '{algorithm}'. "
            f"Load it into {CLASSES[other].__name__}, or give the optimizer's group algorithm='{other}'"
        )
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        assert_same(snapshot(optimizer), before)
    optimizer.load_state_dict(stepped(*own(algorithm)).state_dict())


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("algorithm", ["muon", "normuon", "dion", "dion2", "nordion2"])
def test_torch_states_are_refused_where_training_would_restart(algorithm: str, name: str) -> None:
    saved = stepped(*TORCH[name]).state_dict()
    optimizer = stepped(*own(algorithm))
    before = copy.deepcopy(snapshot(optimizer))
    advice = r"another optimizer\. Load them into its class|import_state_dict\(\) makes it"
    with pytest.raises(ValueError, match=rf"parameter 0 of group 0: .*({advice})"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer), before)


def test_message_names_what_is_there_and_what_is_not() -> None:
    saved = stepped(torch.optim.AdamW, {}).state_dict()
    found = "'step', 'exp_avg', 'exp_avg_sq'"
    with pytest.raises(
        ValueError, match=f"'muon' goes on from a state 'momentum', .* dict has {found}, those"
    ):
        stepped(oxidion.Muon, {}).load_state_dict(saved)


def test_moments_under_the_names_of_another_class_are_refused() -> None:
    """Groups of AdamW have other keys in classes for matrices: states that are not found would restart."""
    saved = stepped(oxidion.AdamW, {}).state_dict()
    param = nn.Parameter(torch.zeros(24, 16))
    optimizer = oxidion.Muon([{"params": [param], "algorithm": "adamw"}])
    with pytest.raises(ValueError, match="goes on from a state 'momentum'"):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_group_that_is_given_the_algorithm_takes_the_checkpoint() -> None:
    saved = stepped(oxidion.Dion, {}).state_dict()
    param = nn.Parameter(torch.zeros(24, 16))
    optimizer = oxidion.Muon([{"params": [param], "algorithm": "dion"}])
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[param]["Q"], saved["state"][0]["Q"])


def test_states_of_torch_adamw_load_where_they_belong() -> None:
    saved = stepped(torch.optim.AdamW, {}).state_dict()
    param, optimizer = made(oxidion.AdamW, {})
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[param]["exp_avg"], saved["state"][0]["exp_avg"])


def test_states_that_only_users_have_are_no_other_optimizers() -> None:
    optimizer = stepped(oxidion.Muon, {})
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0] = {"note": torch.ones(2)}
    optimizer.load_state_dict(saved)
