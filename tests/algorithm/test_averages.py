"""Averages of the weights against their formulas, in float64 over many steps."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

STEPS, SHAPE = 200, (6, 5)


def start() -> tuple[nn.Parameter, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    param, *grads = torch.randn(STEPS + 1, *SHAPE, dtype=torch.float64, generator=generator)
    return nn.Parameter(param), list(grads)


def stepped(optimizer: Any, param: nn.Parameter, grads: list[Tensor]) -> list[Tensor]:
    """The parameter after each step."""
    after = []
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
        after.append(param.detach().clone())
    return after


@pytest.mark.parametrize("start_at", [0, 50])
def test_ema_is_that_of_the_formula(start_at: int) -> None:
    param, grads = start()
    plain, _ = start()
    group = {"average": "ema", "average_decay": 0.9, "average_start": start_at}
    optimizer = oxidion.AdamW([{"params": [param], **group}], lr=0.1)
    mean = param.detach().clone()
    expected = stepped(oxidion.AdamW([plain], lr=0.1), plain, grads)
    for step, x in enumerate(expected, start=1):
        mean = x if step <= start_at else 0.9 * mean + 0.1 * x
    found = stepped(optimizer, param, grads)
    assert all(map(torch.equal, found, expected)), "an average that follows changes no step"
    assert (optimizer.state[param]["average"] - mean).abs().max() <= 1e-12
    with optimizer.averaged():
        assert torch.equal(param, optimizer.state[param]["average"])
        with pytest.raises(RuntimeError, match=r"train\(\)"):
            optimizer.step()
    assert torch.equal(param, expected[-1])


@pytest.mark.parametrize("powers", [(2.0, 0.0), (1.0, 1.0)])
def test_schedule_free_adamw_is_that_of_the_formulas(powers: tuple[float, float]) -> None:
    """The formulas of arXiv:2405.15682 with a learning rate that warms up, and decay."""
    param, grads = start()
    group = {"average": "schedule_free", "average_lr_power": powers[0], "average_step_power": powers[1]}
    optimizer = oxidion.AdamW([{"params": [param], **group}], lr=0.0025, betas=(0.0, 0.999), weight_decay=0.1)
    y, z, v = param.detach().clone(), param.detach().clone(), torch.zeros_like(param)
    total = 0.0
    for step, grad in enumerate(grads, start=1):
        lr = 0.0025 * min(step / 20, 1.0)
        optimizer.param_groups[0]["lr"] = lr
        stepped(optimizer, param, [grad])
        v = 0.999 * v + 0.001 * grad**2
        u = grad / ((v / (1 - 0.999**step)).sqrt() + 1e-8) + 0.1 * y
        weight = step ** powers[1] * lr ** powers[0]
        total += weight
        share = weight / total
        y = (1 - share) * y + share * z + lr * (0.9 * (1 - share) - 1) * u
        z = z - lr * u
    assert (param - y).abs().max() <= 1e-12
    x = y + (1 - 1 / 0.9) * (z - y)
    optimizer.eval()
    assert (param - x).abs().max() <= 1e-12
    optimizer.eval()  # no second time
    with optimizer.averaged():
        assert (param - x).abs().max() <= 1e-12
    optimizer.train()
    assert (param - y).abs().max() <= 1e-12
    with optimizer.averaged():
        assert (param - x).abs().max() <= 1e-12
    assert (param - y).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["Lion", "Muon", "SOAP", "Lamb"])
def test_schedule_free_averages_what_a_class_steps(name: str) -> None:
    """What a class subtracts from z, with gradients at y; the weights of steps at one rate are equal."""
    param, grads = start()
    group = {"average": "schedule_free", "average_beta": 0.7}
    optimizer = getattr(oxidion, name)([{"params": [param], **group}], lr=0.01, weight_decay=0.0)
    inner = nn.Parameter(param.detach().clone())
    alone = getattr(oxidion, name)([inner], lr=0.01, weight_decay=0.0)
    x = param.detach().clone()
    for step, grad in enumerate(grads, start=1):
        stepped(optimizer, param, [grad])
        stepped(alone, inner, [grad])
        x = x + (inner.detach() - x) / step
        assert (param - (0.3 * inner + 0.7 * x)).abs().max() <= 1e-12
    optimizer.eval()
    assert (param - x).abs().max() <= 1e-12


def test_a_run_that_resumes_goes_on_in_the_same_way() -> None:
    group = {"average": "schedule_free"}
    (whole, grads), (first, _), (second, _) = start(), start(), start()

    def made(param: nn.Parameter) -> Any:
        return oxidion.AdamW([{"params": [param], **group}], lr=0.01)

    expected = made(whole)
    stepped(expected, whole, grads[:20])
    before, after = made(first), made(second)
    stepped(before, first, grads[:10])
    before.eval()
    memory = io.BytesIO()
    torch.save(before.state_dict(), memory)
    memory.seek(0)
    second.data.copy_(first.data)
    after.load_state_dict(torch.load(memory))
    second.grad = grads[10].clone()
    with pytest.raises(RuntimeError, match=r"train\(\)"):
        after.step()
    after.train()
    stepped(after, second, grads[10:20])
    assert (second - whole).abs().max() <= 1e-13  # y was computed from x
    assert (after.state[second]["average"] - expected.state[whole]["average"]).abs().max() <= 1e-13


def test_parameters_without_a_gradient_keep_their_average() -> None:
    param, grads = start()
    idle = nn.Parameter(torch.ones(3, 2))
    optimizer = oxidion.AdamW([{"params": [param, idle], "average": "schedule_free"}], lr=0.1)
    stepped(optimizer, param, grads[:3])
    assert torch.equal(idle, torch.ones(3, 2))
    optimizer.eval()
    assert torch.equal(idle, torch.ones(3, 2))


def test_state_dict_of_a_model_with_averages() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = oxidion.AdamW(
        [{"params": [*model.parameters()], "average": "ema", "average_decay": 0.5}], lr=0.1
    )
    model(torch.ones(2, 4)).sum().backward()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer.step()
    found = optimizer.averaged_state_dict(model)
    for name, param in model.named_parameters():
        mean = (before[name] + param.detach()) / 2
        assert torch.allclose(found[name], mean)
        assert not torch.allclose(param, mean)


def test_steps_that_a_scaler_skips_average_nothing() -> None:
    param, grads = start()
    optimizer: Any = oxidion.AdamW([{"params": [param], "average": "ema"}], lr=0.1)
    stepped(optimizer, param, grads[:2])
    mean = optimizer.state[param]["average"].clone()
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(1.0), torch.tensor(1.0)
    stepped(optimizer, param, [torch.full(SHAPE, torch.inf, dtype=torch.float64)])
    assert torch.equal(optimizer.state[param]["average"], mean)
    assert float(optimizer.state[param]["average_step"]) == 2


def test_bfloat16_parameters_have_float32_averages() -> None:
    param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = oxidion.Lion([{"params": [param], "average": "ema", "average_decay": 0.999}], lr=2.0**-6)
    for _ in range(10):
        param.grad = torch.ones_like(param)
        optimizer.step()
    mean = optimizer.state[param]["average"]
    assert mean.dtype == torch.float32
    assert bool((mean < 1).all()), "in bfloat16 it would stand still"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"average_decay": 0.9}, "needs average="),
        ({"average": "polyak"}, "average"),
        ({"average": "schedule_free", "average_beta": 0.0}, "above 0"),
        ({"average": "ema", "average_decay": 1.0}, "average_decay"),
        ({"average": "schedule_free", "stochastic_rounding": True}, "stochastic_rounding"),
        ({"average": "schedule_free", "cautious_wd": True}, "cautious_wd"),
        ({"average": "schedule_free", "algorithm": "lamb"}, "lamb"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
    param, _ = start()
    with pytest.raises(ValueError, match=said):
        oxidion.AdamW([{"params": [param], **settings}], lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize(("weight_decay", "warmup"), [(0.0, 0), (0.1, 0), (0.1, 10)])
def test_schedule_free_is_that_of_its_authors(weight_decay: float, warmup: int) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    (param, grads), lr = start(), 0.0025
    theirs = nn.Parameter(param.detach().clone())
    keys = {"weight_decay": weight_decay}
    its = schedulefree.AdamWScheduleFree([theirs], lr=lr, warmup_steps=warmup, **keys)
    group = {"params": [param], "average": "schedule_free"}
    mine = oxidion.AdamW([group], lr=lr, betas=(0.0, 0.999), **keys)
    its.train()
    for step, grad in enumerate(grads):
        param.grad, theirs.grad = grad.clone(), grad.clone()
        mine.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warmup) if warmup else lr
        mine.step()
        its.step()
        torch.testing.assert_close(param, theirs, rtol=0, atol=1e-12)
    mine.eval()
    its.eval()
    torch.testing.assert_close(param, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["ema", "schedule_free"])
def test_steps_at_a_rate_of_0_begin_no_average(rule: str) -> None:
    """A schedule that warms up from 0: the average is that of the steps that follow."""
    runs = []
    for warmup in (0, 2):
        param, grads = start()
        optimizer = oxidion.Lion([{"params": [param], "average": rule}], lr=0.0, betas=(0.0, 0.0))
        stepped(optimizer, param, grads[:warmup])
        assert torch.equal(param, start()[0])
        param.data.add_(1.0)  # as if the weights were loaded here
        optimizer.param_groups[0]["lr"] = 0.1
        stepped(optimizer, param, grads[5:10])
        assert float(optimizer.state[param]["average_step"]) == 5
        runs.append((param.detach(), optimizer.state[param]["average"]))
    assert all(map(torch.equal, *runs))


def test_average_of_other_weights_begins_at_a_counter_of_zero() -> None:
    param, grads = start()
    optimizer = oxidion.Lion([{"params": [param], "average": "schedule_free"}], lr=0.1)
    stepped(optimizer, param, grads[:5])
    other = nn.Parameter(param.detach() + 1)
    param.data.add_(1)
    optimizer.state[param]["average_step"].zero_()
    fresh = oxidion.Lion([{"params": [other], "average": "schedule_free"}], lr=0.1)
    stepped(fresh, other, [torch.zeros_like(other)])  # makes states
    fresh.state[other]["exp_avg"].copy_(optimizer.state[param]["exp_avg"])
    other.data.copy_(param)
    fresh.state[other]["average_step"].zero_()
    stepped(optimizer, param, grads[5:8])
    stepped(fresh, other, grads[5:8])
    assert torch.equal(param, other)
    assert torch.equal(optimizer.state[param]["average_weight_sum"], fresh.state[other]["average_weight_sum"])
