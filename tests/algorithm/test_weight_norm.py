"""Weights that keep their norm."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import oxidion


def trained(make: Any, dtype: torch.dtype, steps: int) -> tuple[Any, nn.Parameter, float]:
    """An optimizer after some steps, its parameter, and the norm before."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(12, 20, dtype=dtype))
    norm, optimizer = float(param.detach().double().norm()), make([param])
    for _ in range(steps):
        param.grad = torch.randn_like(param)
        optimizer.step()
    return optimizer, param, norm


SPHERE: dict[str, Any] = {"weight_norm": "hyperball", "weight_decay": 0.0, "lr": 0.1}
MAKERS = {
    "MuonH": lambda p: oxidion.MuonH(p, lr=0.1),
    "NorMuon": lambda p: oxidion.NorMuon(p, **SPHERE),
    "SOAPMuon": lambda p: oxidion.SOAPMuon(p, **SPHERE),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize(
    ("dtype", "bar"), [(torch.float32, 1e-6), (torch.float64, 1e-13), (torch.bfloat16, 2.0**-9)]
)
def test_norm_is_constant_over_a_thousand_steps(name: str, dtype: torch.dtype, bar: float) -> None:
    optimizer, param, norm = trained(MAKERS[name], dtype, 1000)
    assert abs(float(param.detach().double().norm()) / norm - 1) <= bar
    assert float(optimizer.state[param]["radius"]) == pytest.approx(norm, rel=1e-7)


def test_a_step_turns_by_the_angle_of_its_learning_rate() -> None:
    """An update that is orthogonal to the weights: the angle is arctan(lr)."""
    param = nn.Parameter(torch.diag(torch.tensor([3.0, 3.0, 0.0, 0.0], dtype=torch.float64)))
    before = param.detach().clone()
    param.grad = torch.diag(torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64))
    oxidion.MuonH([param], lr=0.25, orth_method="svd").step()
    cosine = torch.cosine_similarity(before.flatten(), param.detach().flatten(), dim=0)
    assert float(cosine.arccos().tan()) == pytest.approx(0.25)


def test_floor_of_zero_is_a_free_step() -> None:
    def make(**settings: Any) -> Any:
        return lambda p: oxidion.Muon(p, lr=0.1, **settings)

    _, free, _ = trained(make(), torch.float64, 20)
    for rule in ("floor", "row_floor"):
        _, bound, _ = trained(make(weight_norm=rule, weight_norm_floor=0.0), torch.float64, 20)
        assert torch.equal(free, bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_run_that_resumes_keeps_the_norm_of_its_start(dtype: torch.dtype) -> None:
    optimizer, param, norm = trained(MAKERS["MuonH"], dtype, 5)
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    memory.seek(0)
    other = nn.Parameter(param.detach().clone())
    resumed = oxidion.MuonH([other], lr=0.1)
    resumed.load_state_dict(torch.load(memory))
    for one, own in ((optimizer, param), (resumed, other)):
        own.grad = torch.ones_like(own)
        one.step()
    assert torch.equal(param, other)
    assert torch.equal(resumed.state[other]["radius"], optimizer.state[param]["radius"])
    assert float(resumed.state[other]["radius"]) == pytest.approx(norm, rel=1e-7)


def test_weights_of_zeros_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    nn.init.zeros_(model[1].weight)
    matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2]
    optimizer = oxidion.MuonH(matrices)
    model(torch.ones(1, 4)).sum().backward()
    before = model[0].weight.detach().clone()
    with pytest.raises(ValueError, match=r"1\.weight: weight_norm='hyperball' .* all zero"):
        optimizer.step()
    assert torch.equal(model[0].weight, before), "nothing is half done"
    nn.init.ones_(model[1].weight)
    optimizer.step()


def test_a_matrix_of_zeros_in_a_stack_is_refused() -> None:
    stack = nn.Parameter(torch.stack([torch.zeros(3, 4), torch.ones(3, 4)]))
    stack.grad = torch.ones_like(stack)
    with pytest.raises(ValueError, match="all zero"):
        oxidion.MuonH([stack]).step()


def test_decay_is_refused() -> None:
    for settings in ({"weight_decay": 0.1}, {"weight_norm": "hyperball"}):
        with pytest.raises(ValueError, match="weight_decay must be 0"):
            oxidion.Muon([nn.Parameter(torch.ones(2, 2))], **{"weight_norm": "hyperball", **settings})
