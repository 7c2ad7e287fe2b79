"""Dtypes of states in `explain()`: what a class cannot keep in 8 bits, and what is rounded at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion


@pytest.mark.parametrize(
    ("cls", "keys", "dtype", "expected"),
    [
        (oxidion.AdamW, {}, torch.bfloat16, "exp_avg float32, exp_avg_sq float32"),
        (oxidion.AdamW, {}, torch.float16, "exp_avg float32, exp_avg_sq float32"),
        (
            oxidion.AdamW,
            {"state_dtype": torch.bfloat16},
            torch.float32,
            "exp_avg bfloat16 at random, exp_avg_sq bfloat16 at random",
        ),
        (oxidion.Muon, {}, torch.bfloat16, "momentum float32"),
        (oxidion.Dion, {}, torch.bfloat16, "momentum float32, Q float32"),
        (
            oxidion.NorMuon,
            {"state_dtype": torch.bfloat16},
            torch.bfloat16,
            "momentum bfloat16 at random, variance_neuron float32",
        ),
        (
            oxidion.AdamW,
            {"state_bits": 8, "amsgrad": True},
            torch.float32,
            "exp_avg 8 bits, exp_avg_sq float32, max_exp_avg_sq float32",
        ),
        (
            oxidion.AdEMAMix,
            {"state_bits": 8},
            torch.float32,
            "exp_avg_fast 8 bits, exp_avg_slow float32, exp_avg_sq 8 bits",
        ),
        (
            oxidion.AdamW,
            {"master_weights": True},
            torch.bfloat16,
            "exp_avg float32, exp_avg_sq float32, master_remainder int16",
        ),
        (
            oxidion.SOAP,
            {"state_bits": 8},
            torch.float32,
            "exp_avg float32, exp_avg_sq 8 bits, L float32, Q_L float32, R float32, Q_R float32",
        ),
    ],
)
def test_explain_says_how_states_are_stored(
    cls: Any, keys: dict[str, Any], dtype: torch.dtype, expected: str
) -> None:
    param = nn.Parameter(torch.zeros(64, 96, dtype=dtype))
    optimizer = cls([param], lr=1e-3, **keys)
    before = optimizer.explain().to_dict()["states"]
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert before == optimizer.explain().to_dict()["states"] == [expected]
