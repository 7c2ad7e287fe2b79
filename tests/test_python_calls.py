"""Calls of this package's own Python in a warm step: they cost time however small the weights are."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import oxidion
from support.cases import optimizer_classes

MOST = 40
HOME = str(Path(oxidion.__file__).parent)


@pytest.mark.parametrize("cls", optimizer_classes(), ids=lambda cls: cls.__name__)
def test_warm_step_of_three_weights_makes_forty_calls_at_most(cls: type[torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.ones(8, 8)) for _ in range(3)]
    for weight in weights:
        weight.grad = torch.randn(8, 8)
    optimizer = cls(weights, **({"lr": 1e-3} if cls is oxidion.CAME else {}))
    for _ in range(4):
        optimizer.step()
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HOME):
            calls[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert 10 < calls.total() <= MOST, calls
