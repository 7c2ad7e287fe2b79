"""Sides that get a basis while SOAP and SOAP-Muon run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from support.inputs import gaussian


@pytest.mark.parametrize("cls", [oxidion.SOAP, oxidion.SOAPMuon])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"sides": "short"}, {"sides": "both"}),
        ({"max_precondition_dim": 15}, {"max_precondition_dim": 20}),
        ({"max_precondition_dim": 3}, {"max_precondition_dim": 20}),
    ],
    ids=["another-side", "the-longer-side", "both-sides"],
)
def test_side_that_gets_a_basis_moves_weights_from_the_next_step(
    cls: Any, before: dict[str, Any], after: dict[str, Any]
) -> None:
    param = nn.Parameter(gaussian((12, 20), 0))
    optimizer = cls([param], weight_decay=0.0, precondition_frequency=100, **before)
    for step in range(8):
        if step == 5:
            optimizer.param_groups[0].update(after)
        old = param.detach().clone()
        param.grad = gaussian((12, 20), 1, step)
        optimizer.step()
        # The first gradient makes bases, as at the beginning.
        assert step in (0, 5) or not torch.equal(param, old)
    for key in ("Q_L", "Q_R"):
        basis = optimizer.state[param][key].double()
        torch.testing.assert_close(
            basis.T @ basis, torch.eye(len(basis), dtype=torch.double), rtol=0, atol=1e-5
        )
