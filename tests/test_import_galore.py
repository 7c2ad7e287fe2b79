"""Checkpoints of galore-torch, whose projections are pickled objects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict
from support.asserts import update_relative_error
from support.inputs import Shape, gaussian


class Projector:
    """The attributes of ``galore_torch.galore_projector.GaLoreProjector``, which checkpoints hold."""

    def __init__(self, ortho_matrix: Any, proj_type: str = "std") -> None:
        self.rank, self.verbose, self.update_proj_gap, self.scale = 3, False, 100, 0.25
        self.ortho_matrix, self.proj_type = ortho_matrix, proj_type


def galore(matrices: dict[Shape, Any], kind: str = "std") -> dict[str, Any]:
    """State dict of a ``galore_torch.GaLoreAdamW`` over matrices with their bases, and a vector."""
    adam = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.125, "correct_bias": True}
    states: dict[int, dict[str, Any]] = {}
    for index, (shape, basis) in enumerate(matrices.items()):
        low = gaussian(shape, 3, index)
        if isinstance(basis, list):
            low = basis[0].mT @ low @ basis[1].mT
        else:
            low = low @ basis.mT if basis.shape[0] <= basis.shape[1] else basis.mT @ low
        projector = Projector(basis, kind)
        states[index] = {"step": 5, "projector": projector, "exp_avg": low, "exp_avg_sq": low.square()}
    vector = len(matrices)
    states[vector] = {"step": 5, "exp_avg": gaussian((6,), 4), "exp_avg_sq": gaussian((6,), 4).square()}
    low_rank = {"rank": 3, "update_proj_gap": 100, "scale": 0.25, "proj_type": kind, **adam}
    groups = [{**low_rank, "params": list(range(vector))}, {**adam, "params": [vector]}]
    return {"state": states, "param_groups": groups}


def basis_of(size: int, rank: int) -> Tensor:
    return torch.linalg.qr(gaussian((size, rank), size, rank))[0]


def test_galore_bases_become_tensors_of_the_projected_side() -> None:
    columns, rows, square = basis_of(5, 3), basis_of(4, 3), basis_of(6, 3)
    saved = galore({(8, 5): columns.mT, (4, 9): rows, (6, 6): square.mT})
    made = import_state_dict(saved, "galore-torch")
    for index, basis in enumerate((columns, rows, square)):
        state = made["state"][index]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", "proj"}
        assert torch.equal(state["proj"], basis)
        assert state["proj"].is_contiguous()
        assert torch.equal(state["exp_avg"], saved["state"][index]["exp_avg"])
    assert set(made["state"][3]) == {"step", "exp_avg", "exp_avg_sq"}
    first, second = made["param_groups"]
    expected = {"rank": 3, "update_proj_gap": 100, "scale": 0.25, "proj_type": "std", "lr": 0.01, "eps": 1e-8}
    assert {key: first[key] for key in expected} == expected
    assert second["rank"] is None
    for group in (first, second):
        assert group["algorithm"] == "galore_adamw"
        assert group["decay_order"] == "galore"
        assert group["state_bits"] == 32
        assert "correct_bias" not in group


def test_galore_bases_of_both_sides_become_two_tensors() -> None:
    left, right = basis_of(8, 3), basis_of(5, 3)
    made = import_state_dict(galore({(8, 5): [left, right.mT]}, "full"), "galore-torch")["state"][0]
    assert torch.equal(made["proj"], left)
    assert torch.equal(made["proj_right"], right)


def test_galore_states_that_have_no_counterpart_raise() -> None:
    saved = galore({(8, 5): basis_of(5, 3).mT})
    saved["param_groups"][0]["correct_bias"] = False
    with pytest.raises(ValueError, match="correct_bias=False"):
        import_state_dict(saved, "galore-torch")
    with pytest.raises(ValueError, match="rank 5 on a side of 5 projects nothing"):
        import_state_dict(galore({(8, 5): basis_of(5, 5)}), "galore-torch")
    saved = galore({(8, 5): basis_of(5, 3).mT})
    del saved["state"][0]["projector"]
    with pytest.raises(ValueError, match="expected 'projector'"):
        import_state_dict(saved, "galore-torch")
    saved = galore({(8, 5): basis_of(5, 3).mT})
    del saved["param_groups"][0]["scale"]
    with pytest.raises(ValueError, match="'scale'"):
        import_state_dict(saved, "galore-torch")


@pytest.mark.parametrize(
    ("basis", "kind"),
    [
        (None, "std"),
        (3, "std"),
        (torch.ones(3), "std"),
        (torch.ones(3, 5), "full"),
        ([torch.ones(8, 3)], "full"),
        (torch.ones(3, 5), None),
    ],
)
def test_galore_projectors_of_another_form_are_refused(basis: Any, kind: Any) -> None:
    saved = galore({(8, 5): basis_of(5, 3).mT})
    saved["state"][0]["projector"] = Projector(basis, kind)
    with pytest.raises(ValueError, match=r"projector must be .* ortho_matrix.*\(the state of parameter 0"):
        import_state_dict(saved, "galore-torch")


def project_back(update: Tensor, index: int, columns: Tensor, rows: Tensor) -> Tensor:
    if index == 2:
        return update
    return 0.25 * (update @ columns.mT if index == 0 else rows @ update)


def test_galore_training_goes_on_in_the_imported_subspaces() -> None:
    columns, rows = basis_of(5, 3), basis_of(4, 3)
    saved = galore({(8, 5): columns.mT, (4, 9): rows})
    start = [gaussian(shape, 9, index) for index, shape in enumerate(((8, 5), (4, 9), (6,)))]
    params = [nn.Parameter(value.clone()) for value in start]
    optimizer = oxidion.GaLoreAdamW([{"params": params[:2], "rank": 3}, {"params": params[2:]}])
    optimizer.load_state_dict(import_state_dict(saved, "galore-torch", optimizer=optimizer))
    expected = [value.clone() for value in start]
    moments = [
        (saved["state"][i]["exp_avg"].clone(), saved["state"][i]["exp_avg_sq"].clone()) for i in range(3)
    ]
    for step in range(6, 9):
        for index, (param, x, (m, v)) in enumerate(zip(params, expected, moments, strict=True)):
            grad = gaussian(tuple(x.shape), 10, step, index)
            param.grad = grad.clone()
            low = grad if index == 2 else grad @ columns if index == 0 else rows.mT @ grad
            m.mul_(0.9).add_(low, alpha=0.1)
            v.mul_(0.999).addcmul_(low, low, value=0.001)
            update = m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            x -= 0.01 * project_back(update, index, columns, rows)
            x *= 1 - 0.01 * 0.125
        optimizer.step()
    for param, x, old in zip(params, expected, start, strict=True):
        assert update_relative_error(param, old, x - old) <= 1e-9
