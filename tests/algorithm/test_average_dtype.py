"""Averages of the weights in bfloat16, which are rounded at random."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.inputs import gaussian
from support.rounding import assert_bits_go_by_seed_parameter_and_step, neighbours
from support.sim_mesh import Layout, R, S, SimMesh, T, cut, spans

NARROW: dict[str, Any] = {"average_dtype": torch.bfloat16}
RULES: dict[str, dict[str, Any]] = {
    "ema": {"average": "ema", "average_decay": 0.9},
    "schedule_free": {"average": "schedule_free"},
}


def made(params: list[Tensor], rule: str, cls: Any = oxidion.AdamW, **keys: Any) -> Any:
    return cls([{"params": params, **RULES[rule], **NARROW, **keys}], lr=0.01)


def stepped(optimizer: Any, grads: list[Tensor]) -> None:
    for grad in grads:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = grad.clone().to(param.dtype)
        optimizer.step()


def test_average_advances_where_nearest_rounding_stands_still() -> None:
    """E from 1 to 1.5: a step of 1/2048 of the way is 1/32 of the distance of two numbers there."""
    share, steps = 2.0**-11, 400
    param = nn.Parameter(torch.ones(64, 256))
    group = {"params": [param], "average": "ema", "average_decay": 1 - share, **NARROW}
    optimizer = oxidion.Lion([group], lr=1e-3, weight_decay=0.0)  # along the signs of zeros
    stepped(optimizer, [torch.zeros(64, 256)])
    nearest = optimizer.state[param]["average"].clone()
    assert nearest.dtype == torch.bfloat16
    assert bool((nearest == 1).all())
    param.data.fill_(1.5)
    stepped(optimizer, [torch.zeros(64, 256)] * steps)
    for _ in range(steps):
        nearest = (nearest.float() + share * (param.detach() - nearest.float())).bfloat16()
    assert bool((nearest == 1).all()), "the trap that this is about"
    expected = 1.5 - 0.5 * (1 - share) ** steps
    # A step goes up by 2⁻⁷ with a probability of at most 1/32.
    deviation = (steps * 2.0**-14 / 32 / param.numel()) ** 0.5
    mean = float(optimizer.state[param]["average"].double().mean())
    assert abs(mean - expected) <= 5 * deviation
    assert expected - 1 >= 50 * deviation


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_average_is_a_neighbour_of_the_exact_one(dtype: torch.dtype) -> None:
    before = gaussian((40, 64), 3).bfloat16()
    params = [nn.Parameter(before.clone().to(dtype)) for _ in range(2)]
    grads = [gaussian((40, 64), 4, step) for step in range(2)]
    narrow, wide = made([params[0]], "ema"), made([params[1]], "ema", average_dtype=None)
    stepped(narrow, grads[:1])
    stepped(wide, grads[:1])
    exact = wide.state[params[1]]["average"].float()
    low, high = neighbours(exact)
    found = narrow.state[params[0]]["average"].float()
    assert bool(((found == low) | (found == high)).all())
    assert not torch.equal(found, exact.bfloat16().float()), "it was rounded to the nearest"
    assert torch.equal(*params), "an average that follows changes no step"


@pytest.mark.parametrize("rule", RULES)
def test_average_of_constant_weights_is_exact(rule: str) -> None:
    param = nn.Parameter(gaussian((7, 9), 1).bfloat16().float())
    before = param.detach().clone()
    group = {"params": [param], **RULES[rule], **NARROW}
    optimizer = oxidion.Lion([group], lr=0.1, weight_decay=0.0)
    stepped(optimizer, [torch.zeros(7, 9)] * 20)
    assert torch.equal(optimizer.state[param]["average"].float(), before)
    assert torch.equal(param.detach(), before)


def test_stepped_weights_follow_steps_below_bfloat16_spacing() -> None:
    """Lion moves z by lr, 1/64 of that distance; x is its mean by the formulas."""
    rate, steps = 2.0**-13, 64
    param = nn.Parameter(torch.ones(64, 512))
    optimizer = oxidion.Lion([{"params": [param], **RULES["schedule_free"], **NARROW}], lr=rate)
    stepped(optimizer, [torch.full((64, 512), -1.0)] * steps)
    z = x = 1.0
    for step in range(1, steps + 1):
        z += rate
        x += (z - x) / step
    # As of parameters that are rounded at random: variance 2⁻¹⁴ / 64 in each step.
    deviation = (steps * 2.0**-14 / 64 / param.numel()) ** 0.5
    kept = optimizer.state[param]["average"]
    assert kept.dtype == torch.bfloat16
    assert abs(float(kept.double().mean()) - z) <= 5 * deviation
    optimizer.eval()
    # x is rounded in every step too, and is a mean of what has the deviation of z.
    assert abs(float(param.detach().double().mean()) - x) <= 10 * deviation
    assert x - 1 >= 20 * deviation


def test_random_bits_depend_on_seed_parameter_step_and_place() -> None:
    def run(*, seed: int = 0, skip: int = 0) -> list[Tensor]:
        params = [nn.Parameter(gaussian((300, 512), 3)) for _ in range(2)]
        group = {"params": params, "algorithm": "adamw", **RULES["ema"], **NARROW}
        optimizer = oxidion.Dion([group], lr=1e-3, seed=seed)
        optimizer.param_groups[0]["step"] = skip
        stepped(optimizer, [gaussian((300, 512), 4)])
        return [optimizer.state[param]["average"] for param in params]

    assert_bits_go_by_seed_parameter_and_step(run)


LAYOUTS: list[tuple[dict[str, int], Layout]] = [
    ({"fs": 3}, {"fs": S(0)}),
    ({"fs": 4}, {"fs": S(1)}),
    ({"dp": 2, "fs": 2}, {"dp": R, "fs": S(2)}),
    ({"fs": 2, "tp": 3}, {"fs": S(0), "tp": S(2)}),
    ({"fs": 2, "tp": 2}, {"fs": T(1), "tp": S(1)}),
    ({"a": 2, "b": 2, "c": 2}, {"a": S(0), "b": S(1), "c": S(2)}),
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_every_layout_has_the_same_bits(axes: dict[str, int], layout: Layout, rule: str) -> None:
    full = gaussian((5, 9, 30), 5).float()
    grads = [gaussian((5, 9, 30), 6, step).float() for step in range(3)]
    param = nn.Parameter(full.clone())
    single = made([param], rule)
    mesh = SimMesh(axes, lambda params: made(params, rule), [layout])
    mesh.build([full])
    for grad in grads:
        stepped(single, [grad])
        mesh.step(lambda _rank, grad=grad: [grad])
    whole = single.state[param]["average"]
    for rank in mesh.ranks:
        own = spans(full.shape, layout, axes, rank.at)
        kept = rank.optimizer.state[rank.params[0]]["average"]
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept, cut(whole, own))
        assert torch.equal(rank.params[0], cut(param.detach(), own))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.Muon, oxidion.SOAP, oxidion.Lamb])
def test_a_run_that_resumes_has_the_same_bits(rule: str, cls: Any) -> None:
    keys = {"weight_decay": 0.0}
    grads = [gaussian((12, 8), 1, step) for step in range(8)]
    one, two = (nn.Parameter(gaussian((12, 8), 2).float()) for _ in range(2))
    first, second = made([one], rule, cls, **keys), made([two], rule, cls, **keys)
    stepped(first, grads[:4])
    memory = io.BytesIO()
    torch.save(first.state_dict(), memory)
    memory.seek(0)
    second.load_state_dict(torch.load(memory))
    two.data.copy_(one.data)
    for optimizer in (first, second):
        stepped(optimizer, grads[4:])
    assert torch.equal(one, two)
    assert second.state[two]["average"].dtype == torch.bfloat16
    assert torch.equal(first.state[one]["average"], second.state[two]["average"])


def test_memory_is_two_bytes_an_element() -> None:
    found = {}
    for dtype in (None, torch.float32, torch.bfloat16):
        param = nn.Parameter(torch.ones(30, 20))
        optimizer = made([param], "ema", average_dtype=dtype)
        stepped(optimizer, [torch.ones(30, 20)])
        assert optimizer.state[param]["average"].nbytes == 600 * (2 if dtype == torch.bfloat16 else 4)
        assert optimizer.state_dict()["state"][0]["average"].dtype == (dtype or torch.float32)
        found[dtype] = int(optimizer.explain().to_dict()["state_bytes"][0])
    assert found[None] == found[torch.float32]
    assert found[torch.float32] - found[torch.bfloat16] == 2 * 600


def test_average_that_is_there_is_taken_as_it_is() -> None:
    one, two = (nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    wide, narrow = made([one], "ema", average_dtype=None), made([two], "ema")
    stepped(wide, [torch.ones(6, 4)])
    saved = wide.state_dict()
    saved["param_groups"][0]["average_dtype"] = "bfloat16"
    narrow.load_state_dict(saved)
    stepped(narrow, [torch.ones(6, 4)])
    assert narrow.state[two]["average"].dtype == torch.float32


def test_weights_to_evaluate_with_are_those_of_bfloat16() -> None:
    param = nn.Parameter(gaussian((6, 5), 1).float())
    optimizer = made([param], "ema")
    stepped(optimizer, [gaussian((6, 5), 2)] * 3)
    before = param.detach().clone()
    with optimizer.averaged():
        assert torch.equal(param.detach(), optimizer.state[param]["average"].float())
    assert torch.equal(param.detach(), before)
    param.grad = gaussian((6, 5), 3).float()
    assert optimizer.verify().to_dict()["update_error"][0] <= 1e-5


def test_mode_comes_and_goes() -> None:
    param = nn.Parameter(gaussian((6, 5), 1).float())
    optimizer = made([param], "schedule_free")
    stepped(optimizer, [gaussian((6, 5), 2)] * 3)
    y, z = param.detach().clone(), optimizer.state[param]["average"].float()
    optimizer.eval()
    torch.testing.assert_close(param.detach(), y + (1 - 1 / 0.9) * (z - y))
    optimizer.train()
    torch.testing.assert_close(param.detach(), y)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"average": "ema", "average_dtype": torch.float16}, "average_dtype must be .*'float16'"),
        ({"average": "ema", "average_dtype": "float64"}, "average_dtype must be"),
        ({"average": "ema", "average_dtype": torch.int8}, "average_dtype must be"),
        ({"average_dtype": torch.bfloat16}, "average_dtype needs average="),
    ],
)
def test_other_types_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        oxidion.AdamW([{"params": [nn.Parameter(torch.ones(3))], **settings}])


def test_settings_changed_during_training_are_read_and_checked() -> None:
    param = nn.Parameter(torch.ones(8))
    optimizer = oxidion.AdamW([param])
    param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.param_groups[0].update(average="ema", average_dtype=torch.bfloat16)
    optimizer.step()
    assert optimizer.state[param]["average"].dtype == torch.bfloat16
    for wrong in ("float16", torch.float64):
        optimizer.param_groups[0]["average_dtype"] = wrong
        with pytest.raises(ValueError, match="average_dtype must be one of None, 'bfloat16', 'float32', got"):
            optimizer.step()
