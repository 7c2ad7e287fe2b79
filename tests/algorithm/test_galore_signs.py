"""GaLore with `maximize`: moments outlive a projection, and so do the signs of its vectors."""

from __future__ import annotations

import pytest
import torch

import oxidion
from support.inputs import gaussian, with_singular_values


@pytest.mark.parametrize("svd", ["gram", "exact", "random"])
@pytest.mark.parametrize("shape", [(13, 6), (6, 13)], ids=str)
def test_verify_follows_galore_across_projections_with_maximize(svd: str, shape: tuple[int, int]) -> None:
    param = torch.nn.Parameter(gaussian(shape, 1))
    optimizer = oxidion.GaLoreAdamW([param], lr=0.1, rank=3, update_proj_gap=1, svd=svd, maximize=True)
    for step in range(3):
        param.grad = with_singular_values(shape, torch.tensor([8.0, 4.0, 2.0, 1.0]), 2, step)
        assert optimizer.verify()[0]["update_error"] < 1e-8, step
        optimizer.step()
