"""Counters that a checkpoint does not have, where DCP fills the states of a new optimizer."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import oxidion

from .table import CASES, STEP_KEYS, Case, every_case, make_model, run_steps, set_grads

STEPS = 3


def _counters(optimizer: Any) -> list[float]:
    return [float(own[key]) for own in optimizer.state.values() for key in sorted(STEP_KEYS & own.keys())]


def _without_counts(saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict as a partial load leaves it: the counters are those of a new optimizer."""
    made = copy.deepcopy(saved)
    for own in made["state"].values():
        own.update({key: torch.zeros_like(own[key]) for key in STEP_KEYS & own.keys()})
    return made


@every_case
@pytest.mark.parametrize("eager", [False, True], ids=["", "init_state"])
def test_counters_of_0_with_moments_are_those_of_their_group(
    case: Case, eager: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other, init_state=eager)
    run_steps(optimizer, model, range(STEPS))
    other.load_state_dict(model.state_dict())
    caplog.clear()
    resumed.load_state_dict(_without_counts(optimizer.state_dict()))
    for seed in range(STEPS, STEPS + 2):
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(resumed, other, range(seed, seed + 1))
    assert _counters(resumed) == _counters(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    said = [record for record in caplog.records if "moments and no step counters" in record.getMessage()]
    counting = {
        number
        for number, group in enumerate(optimizer.param_groups)
        for param in group["params"]
        if STEP_KEYS & optimizer.state[param].keys()
    }
    assert len(said) == len(counting), "once for each group that counts, at the first step alone"


@every_case
def test_counters_of_parameters_without_gradients_do_not_change(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    """One never had a gradient; another one had one in the last step alone."""
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other)
    late = {
        "again.weight": STEPS + 9,
        "again.bias": STEPS + 9,
        "square.weight": STEPS - 1,
        "norm.bias": STEPS - 1,
    }

    def steps(net: nn.Module, taker: Any, seeds: range) -> None:
        for seed in seeds:
            set_grads(net, seed)
            for name, param in net.named_parameters():
                if seed < late.get(name, 0):
                    param.grad = None
            taker.step()

    steps(model, optimizer, range(STEPS))
    before = _counters(optimizer)
    assert not before or len(set(before)) > 1
    other.load_state_dict(model.state_dict())
    caplog.clear()
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, range(STEPS, STEPS + 2))
    steps(other, resumed, range(STEPS, STEPS + 2))
    assert _counters(resumed) == _counters(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert not [record for record in caplog.records if "step counters" in record.getMessage()]


@pytest.mark.parametrize("bits", [32, 8])
def test_steps_after_the_first_do_not_look_at_counters(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bits: int
) -> None:
    calls: list[int] = []
    real = oxidion._core.counters.uncounted

    def counted(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(oxidion._core.counters, "uncounted", counted)
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters(), state_bits=bits)  # type: ignore[arg-type]
    optimizer.param_groups[0]["min_quant_numel"] = 1
    run_steps(optimizer, model, range(2))
    assert not calls
    optimizer.load_state_dict(_without_counts(optimizer.state_dict()))
    with caplog.at_level(logging.WARNING, "oxidion"):
        run_steps(optimizer, model, range(4))
    assert len(calls) == 1
    assert set(_counters(optimizer)) == {6.0}
    assert len([r for r in caplog.records if "step counters" in r.getMessage()]) == 1


def test_every_class_that_counts_is_in_the_table() -> None:
    assert {"AdamW", "Lamb", "Adafactor", "CAME", "SOAP", "Dion", "Muon"} <= {c.cls.__name__ for c in CASES}
