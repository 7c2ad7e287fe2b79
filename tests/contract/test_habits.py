"""What users do with an optimizer beyond the plain loop: steps in the backward pass, clipping, odd groups."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

CASES: tuple[tuple[Any, dict[str, Any]], ...] = (
    (oxidion.Dion, {"rank_fraction": 0.5}),
    (oxidion.Muon, {}),
    (oxidion.NorMuon, {}),
    (oxidion.AdamW, {}),
    (oxidion.GaLoreAdamW, {"rank": 4}),
    (oxidion.APOLLOAdamW, {"rank": 4}),
)
every_case = pytest.mark.parametrize(("cls", "keys"), CASES, ids=[cls.__name__ for cls, _ in CASES])


def model_and_batches() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 8))
    return model, [torch.randn(16, 12) for _ in range(4)]


def groups_of(model: nn.Module, cls: Any) -> list[dict[str, Any]]:
    return oxidion.param_groups(model, algorithm=cls._ALGORITHM, lr=0.01)


@every_case
def test_steps_in_the_backward_pass_equal_those_after_it(cls: Any, keys: dict[str, Any]) -> None:
    model, batches = model_and_batches()
    twin = copy.deepcopy(model)
    after = cls(groups_of(model, cls), **keys)
    within = {
        param: cls([{**group, "params": [(name, param)]}], **keys)
        for group in groups_of(twin, cls)
        for name, param in group["params"]
    }

    def step_now(param: nn.Parameter) -> None:
        within[param].step()
        param.grad = None

    for param in within:
        param.register_post_accumulate_grad_hook(step_now)
    start = [param.detach().clone() for param in model.parameters()]
    for batch in batches:
        model(batch).square().mean().backward()
        after.step()
        after.zero_grad()
        twin(batch).square().mean().backward()
        assert all(param.grad is None for param in twin.parameters())
    # A gradient is that of the weights before the step, also where the step comes in the middle of the pass.
    for one, other, old in zip(model.parameters(), twin.parameters(), start, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, old)


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Dion", "Dion2", "NorDion2"])
def test_gradients_that_are_all_scaled_alike_give_the_same_steps(name: str) -> None:
    """Clipping to a norm that every gradient exceeds by the same factor changes nothing: no eps acts."""
    weights = [nn.Parameter(torch.eye(16, 12) + 0.5) for _ in range(2)]
    optimizers = [getattr(oxidion, name)([weight], lr=0.01, orth_dtype="float32") for weight in weights]
    for step in range(3):
        grad = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        for weight, optimizer, factor in zip(weights, optimizers, (1.0, 2.0**-12), strict=True):
            weight.grad = grad * factor
            optimizer.step()
    # epsilon = 1e-8 relative to a norm of 14 * 2^-12, and float32 rounding.
    torch.testing.assert_close(*weights, rtol=2e-5, atol=2e-6)


def test_embedding_in_a_group_of_muon_is_orthonormalized() -> None:
    table = nn.Embedding(10, 6)
    optimizer = oxidion.Muon(
        [("table", table.weight)],
        lr=1.0,
        weight_decay=0.0,
        adjust_lr=None,
        orth_method="svd",
        orth_dtype="float32",
    )
    start = table.weight.detach().clone()
    table(torch.arange(10)).square().sum().backward()
    optimizer.step()
    update = start - table.weight.detach()
    torch.testing.assert_close(update.T @ update, torch.eye(6), rtol=0, atol=1e-5)


def test_every_layer_may_have_a_learning_rate_of_its_own() -> None:
    model, (batch, *_) = model_and_batches()
    rates = {"0.weight": 0.01, "2.weight": 0.02, "4.weight": 0.04}
    weights = {name: param for name, param in model.named_parameters() if name in rates}
    groups = [{"params": [(name, param)], "lr": rates[name]} for name, param in weights.items()]
    optimizer = oxidion.Muon(
        groups, weight_decay=0.0, adjust_lr=None, orth_method="svd", orth_dtype="float32"
    )
    before = {name: param.detach().clone() for name, param in weights.items()}
    model(batch).square().mean().backward()
    optimizer.step()
    for name, param in weights.items():
        longest = torch.linalg.matrix_norm(param.detach() - before[name], 2)
        torch.testing.assert_close(longest, torch.tensor(rates[name]), rtol=1e-4, atol=0)


def test_parameters_in_8_bits_are_refused_by_name() -> None:
    param = nn.Parameter(torch.zeros(4, 4).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        TypeError, match="w: parameters must be float16, bfloat16, float32 or float64, got Float8"
    ):
        oxidion.AdamW([("w", param)]).plan()
