"""Stochastic rounding of bfloat16 parameters: unbiased, repeatable, and only where something is rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._oxidion import Plan
from support.inputs import gaussian
from support.rounding import assert_bits_go_by_seed_parameter_and_step, neighbours
from support.sim_mesh import Layout, R, S, SimMesh, T, cut, spans

EVERY: list[tuple[Any, dict[str, Any]]] = [
    (oxidion.AdamW, {"state_dtype": torch.float32}),
    # Shapes of at least 4096 elements: smaller states are not stored in 8 bits.
    (oxidion.AdamW, {"cautious_wd": True, "state_bits": 8, "shape": (64, 64)}),
    (oxidion.Lion, {"weight_decay": 0.1}),
    (oxidion.Muon, {"state_dtype": torch.float32}),
    (oxidion.NorMuon, {"cautious_wd": True}),
    (oxidion.Dion, {"rank_fraction": 0.5}),
    (oxidion.Dion, {"rank_fraction": 0.5, "cautious_wd": True}),
    (oxidion.Dion2, {}),
    (oxidion.Dion2, {"cautious_wd": True, "shape": (64, 40)}),
    (oxidion.NorDion2, {}),
    (oxidion.Lamb, {"weight_decay": 0.1}),
    (oxidion.Lamb, {"weight_decay": 0.1, "cautious_wd": True, "state_bits": 8, "shape": (64, 64)}),
    (oxidion.Adafactor, {"relative_step": False}),
    (
        oxidion.Adafactor,
        {"relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1},
    ),
    (oxidion.CAME, {}),
    (oxidion.CAME, {"weight_decay": 0.1, "cautious_wd": True, "state_bits": 8, "shape": (64, 64)}),
    (oxidion.GaLoreAdamW, {"rank": 8, "cautious_wd": True, "state_bits": 32}),
    (oxidion.GaLoreAdamW, {"rank": 8, "decay_order": "galore", "shape": (40, 512)}),
    (oxidion.APOLLOAdamW, {"rank": 8, "weight_decay": 0.1}),
    (oxidion.APOLLOAdamW, {"rank": 8, "cautious_wd": True, "state_bits": 8, "shape": (40, 512)}),
    (oxidion.APOLLOMini, {"weight_decay": 0.1}),
    (oxidion.SOAP, {}),
    (oxidion.SOAP, {"sides": "short", "cautious_wd": True, "state_bits": 8, "shape": (64, 64)}),
    (oxidion.SOAPMuon, {}),
    (oxidion.MuonH, {}),
]
IDS = [f"{cls.__name__}-{n}" for n, (cls, _) in enumerate(EVERY)]


def built(cls: Any, keys: dict[str, Any], dtype: torch.dtype, **more: Any) -> tuple[nn.Parameter, Any]:
    keys = dict(keys)
    shape = keys.pop("shape", (40, 64))
    # The weights are bfloat16 numbers: rounding begins with the first step.
    param = nn.Parameter(gaussian(shape, 3).bfloat16().to(dtype))
    param.grad = gaussian(shape, 4).bfloat16().to(dtype)
    return param, cls([param], **{"lr": 1e-3, **keys, **more})


def test_rows_of_8_bits_are_quantized() -> None:
    for cls, keys in EVERY:
        param, optimizer = built(cls, keys, torch.bfloat16, stochastic_rounding=True)
        optimizer.step()
        eight = keys.get("state_bits", 8 if cls is oxidion.GaLoreAdamW else 32) == 8
        assert eight == any(value.dtype == torch.uint8 for value in optimizer.state[param].values())


@pytest.mark.parametrize(("cls", "keys"), EVERY, ids=IDS)
def test_a_step_is_rounded_once_to_a_neighbour_of_the_exact_one(cls: Any, keys: dict[str, Any]) -> None:
    param, optimizer = built(cls, keys, torch.bfloat16, stochastic_rounding=True)
    twin, exact = built(cls, keys, torch.float32)
    if cls is oxidion.SOAP:  # the first gradient makes bases and moves nothing
        for own, stepping in ((param, optimizer), (twin, exact)):
            stepping.step()
            own.grad = gaussian(own.shape, 5).bfloat16().to(own.dtype)
    optimizer.step()
    exact.step()
    # States of the parameter's dtype differ in the last bits: a little more than a unit is allowed.
    unit = 2.0 ** (torch.frexp(twin.detach())[1] - 8).float()
    distance = ((param.detach().float() - twin.detach()).abs() / unit).max()
    assert distance <= 1.05
    nearest = twin.detach().bfloat16().float()
    assert (param.detach().float() != nearest).any(), "nothing was rounded at random"


def test_rounding_is_unbiased_over_steps() -> None:
    # Lion moves by lr exactly; 1/64 of a unit of 1.0 is lost by rounding to nearest.
    rate = 2.0**-13
    param = nn.Parameter(torch.ones(64, 512, dtype=torch.bfloat16))
    optimizer = oxidion.Lion([param], lr=rate, stochastic_rounding=True)
    lost = nn.Parameter(param.detach().clone())
    plain = oxidion.Lion([lost], lr=rate)
    for _ in range(64):
        for p, o in ((param, optimizer), (lost, plain)):
            p.grad = torch.full_like(p, -1.0)
            o.step()
    assert torch.equal(lost, torch.ones_like(lost))
    mean, count = param.detach().double().mean(), param.numel()
    # A step rounds by 2⁻⁷ with probability 1/64: variance 2⁻¹⁴·(1/64)·(63/64).
    deviation = (64 * 2.0**-14 / 64 * 63 / 64 / count) ** 0.5
    assert abs(float(mean) - (1.0 + 64 * rate)) <= 5 * deviation


def test_mean_over_seeds_is_the_exact_step() -> None:
    def stepped(dtype: torch.dtype, **keys: Any) -> Tensor:
        param = nn.Parameter(gaussian((40, 64), 3).bfloat16().to(dtype))
        group = {"params": [param], "algorithm": "adamw", "state_dtype": "float32"}
        optimizer = oxidion.Dion([group], lr=1e-3, **keys)
        param.grad = gaussian((40, 64), 4).bfloat16().to(dtype)
        optimizer.step()
        return param.detach()

    exact, seeds = stepped(torch.float32), 400
    steps = [stepped(torch.bfloat16, seed=seed, stochastic_rounding=True).double() for seed in range(seeds)]
    low, high = (t.double() for t in neighbours(exact))
    assert all(((step == low) | (step == high)).all() for step in steps)
    width = (high - low).abs()
    share = (exact.double() - low).abs() / torch.where(width > 0, width, 1.0)
    error = (torch.stack(steps).mean(0) - exact.double()).abs()
    # Six deviations of the mean; the share is known to 2⁻¹⁶ of the distance.
    assert (error <= 6 * width * (share * (1 - share) / seeds).sqrt() + 2.0**-15 * width).all()


@pytest.mark.parametrize(("cls", "keys"), EVERY, ids=IDS)
@pytest.mark.parametrize("how", ["lr", "grad"])
def test_what_does_not_move_stays_bit_equal(cls: Any, keys: dict[str, Any], how: str) -> None:
    more = {"lr": 0.0} if how == "lr" else {"weight_decay": 0.0}
    param, optimizer = built(cls, keys, torch.bfloat16, stochastic_rounding=True, **more)
    if how == "grad":
        param.grad = torch.zeros_like(param)
    before = param.detach().clone()
    for _ in range(3):
        optimizer.step()
    assert torch.equal(param.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_other_types_are_not_touched(dtype: torch.dtype) -> None:
    one, first = built(oxidion.AdamW, {}, dtype)
    two, second = built(oxidion.AdamW, {}, dtype, stochastic_rounding=True)
    first.step()
    second.step()
    assert torch.equal(one, two)


def test_results_are_a_function_of_seed_parameter_step_and_place() -> None:
    def run(*, seed: int = 0, skip: int = 0) -> list[Tensor]:
        params = [nn.Parameter(gaussian((300, 512), 3).bfloat16()) for _ in range(2)]
        optimizer = oxidion.Dion(
            [{"params": params, "algorithm": "adamw"}], lr=1e-3, seed=seed, stochastic_rounding=True
        )
        optimizer.param_groups[0]["step"] = skip
        for param in params:
            param.grad = gaussian((300, 512), 4).bfloat16()
        optimizer.step()
        return [param.detach() for param in params]

    assert_bits_go_by_seed_parameter_and_step(run)


LAYOUTS: list[tuple[dict[str, int], Layout]] = [
    ({"fs": 3}, {"fs": S(0)}),
    ({"fs": 4}, {"fs": S(1)}),
    ({"fs": 3}, {"fs": S(2)}),
    ({"dp": 2, "fs": 2}, {"dp": R, "fs": S(0)}),
    ({"fs": 2, "tp": 3}, {"fs": S(0), "tp": S(2)}),
    ({"fs": 2, "tp": 2}, {"fs": T(1), "tp": S(1)}),
    ({"a": 2, "b": 2, "c": 2}, {"a": S(0), "b": S(1), "c": S(2)}),
]


ALIKE: list[tuple[Any, dict[str, Any], float]] = [
    (oxidion.AdamW, {}, 0.0),
    # Their sums over ranks have another order, so what lies at a threshold may go to either side of it.
    (oxidion.Lamb, {"weight_decay": 0.1}, 0.003),
    (oxidion.CAME, {}, 0.003),
    (oxidion.GaLoreAdamW, {"rank": 4, "update_proj_gap": 2}, 0.003),
    (oxidion.SOAP, {"precondition_frequency": 2}, 0.003),
    (oxidion.SOAPMuon, {"precondition_frequency": 2, "orth_dtype": "float32"}, 0.003),
]


@pytest.mark.parametrize(("cls", "keys", "share"), ALIKE, ids=[cls.__name__ for cls, _, _ in ALIKE])
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_every_layout_rounds_alike(
    axes: dict[str, int], layout: Layout, cls: Any, keys: dict[str, Any], share: float
) -> None:
    full = gaussian((5, 9, 30), 5).bfloat16()
    grads = [gaussian((5, 9, 30), 6, step).bfloat16() for step in range(3)]

    def make(params: list[Tensor]) -> Any:
        return cls(params, lr=1e-3, stochastic_rounding=True, **keys)

    param = nn.Parameter(full.clone())
    single = make([param])
    mesh = SimMesh(axes, make, [layout])
    mesh.build([full])
    for grad in grads:
        param.grad = grad
        single.step()
        mesh.step(lambda _rank, grad=grad: [grad])
    assert (param.detach() != full).double().mean() >= 0.05
    for rank in mesh.ranks:
        differing = rank.params[0] != cut(param.detach(), spans(full.shape, layout, axes, rank.at))
        assert differing.sum() <= share * full.numel()


def test_verify_looks_at_the_step_not_at_chance() -> None:
    param, optimizer = built(
        oxidion.AdamW, {"state_dtype": torch.float32}, torch.bfloat16, stochastic_rounding=True
    )
    assert isinstance(optimizer.plan(), Plan)
    before = param.detach().clone()
    assert optimizer.verify().to_dict()["update_error"][0] == 0.0
    assert torch.equal(param.detach(), before)


def test_bfloat16_weights_with_float32_states_resume_bit_equal() -> None:
    one, first = built(
        oxidion.AdamW, {"state_dtype": torch.float32}, torch.bfloat16, stochastic_rounding=True
    )
    first.step()
    two, second = built(oxidion.AdamW, {}, torch.bfloat16)
    second.load_state_dict(first.state_dict())
    two.data.copy_(one.data)
    assert second.state[two]["exp_avg"].dtype == torch.float32
    for _ in range(3):
        first.step()
        second.step()
    assert torch.equal(one, two)
