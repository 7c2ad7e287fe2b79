"""Parameters and settings of Lamb and Adafactor that change between steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import oxidion
from support.asserts import assert_tensors_close
from support.inputs import gaussian


def test_clipping_counts_no_gradient_that_is_missing() -> None:
    def updates(groups: list[dict[str, Any]]) -> Tensor:
        gone, kept = groups[-1]["params"]
        optimizer = oxidion.Lamb(groups, lr=0.1)
        start = kept.detach().clone()
        for step in range(3):
            for param in (p for group in groups for p in group["params"]):
                param.grad = gaussian(tuple(param.shape), 7, step)
            if step:
                gone.grad = None
            optimizer.step()
        return kept.detach() - start

    def clipped() -> dict[str, Any]:
        params = [torch.nn.Parameter(gaussian(shape, 6, 0)) for shape in ((30, 30), (40, 40))]
        return {"params": params, "max_grad_norm": 1.0}

    other = {"params": [torch.nn.Parameter(gaussian((64, 64), 6, 1))], "algorithm": "came"}
    assert torch.equal(updates([other, clipped()]), updates([clipped()]))


def test_adafactor_keeps_its_moments_when_momentum_is_enabled() -> None:
    param = torch.nn.Parameter(gaussian((6, 4), 1))
    optimizer = oxidion.Adafactor([param])
    for step in range(3):
        param.grad = gaussian((6, 4), 2, step)
        optimizer.step()
    row = optimizer.state[param]["exp_avg_sq_row"].clone()
    optimizer.param_groups[0]["beta1"] = 0.9
    param.grad = gaussian((6, 4), 2, 3)
    optimizer.step()
    assert optimizer.state[param]["step"].item() == 4
    assert optimizer.state[param]["exp_avg"].count_nonzero() == 24
    weight = 4.0**-0.8
    expected = row + weight * (param.grad.square().mean(dim=1) - row)
    assert_tensors_close(optimizer.state[param]["exp_avg_sq_row"], expected, 1e-6, "row")
