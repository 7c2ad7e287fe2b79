"""float32 weights of bfloat16 parameters: the steps of a float32 run, bit by bit, at two more bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.cases import ALL_CASES, Case
from support.inputs import gaussian

STEPS = 50
EXACT: dict[str, Any] = {"state_dtype": torch.float32}


def joined(param: Tensor, remainder: Tensor) -> Tensor:
    """The weight by its definition: its high half is the parameter's, less one where that was rounded up."""
    high = param.detach().contiguous().view(torch.int16).numpy().astype(np.uint16).astype(np.uint32)
    low = remainder.numpy()
    bits = ((high - (low < 0)) << 16).astype(np.uint32) | low.astype(np.uint16)
    return torch.from_numpy(np.atleast_1d(bits).view(np.float32).copy()).reshape(param.shape)


def nearest(weight: Tensor) -> Tensor:
    """The bfloat16 numbers nearest to finite weights, ties away from zero."""
    bits = weight.detach().contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def weights_of(optimizer: Any, params: Sequence[Tensor]) -> list[Tensor]:
    return [joined(param, optimizer.state[param]["master_remainder"]) for param in params]


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits."""
    return one.dtype == other.dtype and torch.equal(
        one.detach().contiguous().flatten().view(torch.uint8),
        other.detach().contiguous().flatten().view(torch.uint8),
    )


def twins(shapes: Sequence[tuple[int, ...]], seed: int = 3) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """bfloat16 parameters, and float32 ones of the same values."""
    starts = [gaussian(shape, seed, at, scale=0.1).bfloat16() for at, shape in enumerate(shapes)]
    return [nn.Parameter(start.clone()) for start in starts], [
        nn.Parameter(start.float()) for start in starts
    ]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    """bfloat16 gradients, which do not depend on the weights."""
    return [gaussian(tuple(p.shape), 11, step, at).bfloat16() for at, p in enumerate(params)]


def step(optimizer: Any, params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.dtype)
    optimizer.step()


def assert_equal_runs(
    half: Any, halves: Sequence[Tensor], full: Any, fulls: Sequence[Tensor], what: str
) -> None:
    """Weights and states of both runs have equal bits, and parameters are the roundings of weights."""
    for at, (param, weight, other) in enumerate(zip(halves, weights_of(half, halves), fulls, strict=True)):
        assert same(weight, other), f"{what}: weight {at}"
        if bool(other.isfinite().all()):
            assert same(param, nearest(other)), f"{what}: parameter {at}"
        own, theirs = half.state[param], full.state[other]
        assert own.keys() - {"master_remainder"} == theirs.keys()
        for key, value in theirs.items():
            assert same(own[key], value), f"{what}: state {key} of {at}"


def run_both(case: Case, steps: int, **more: Any) -> None:
    halves, fulls = twins(case.shapes)
    half = case.build(halves, master_weights=True, **EXACT, **more)
    full = case.build(fulls, **EXACT, **more)
    for number in range(steps):
        grads = gradients(halves, number)
        step(half, halves, grads)
        step(full, fulls, grads)
    assert_equal_runs(half, halves, full, fulls, str(case))
    moved = [
        not torch.equal(p, start) for p, start in zip(halves, twins(case.shapes)[0], strict=True) if p.numel()
    ]
    assert any(moved)


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_run_equals_that_of_float32_weights(case: Case) -> None:
    run_both(case, STEPS)


LARGE: list[tuple[Any, dict[str, Any]]] = [
    (oxidion.AdamW, {"weight_decay": 0.1}),
    (oxidion.AdamW, {"weight_decay": 0.1, "state_bits": 8}),
    (oxidion.AdamW, {"weight_norm": "hyperball", "weight_decay": 0.0}),
    (oxidion.AdamW, {"weight_norm": "row_floor"}),
    (oxidion.Lion, {"state_bits": 8}),
    (oxidion.Lamb, {"weight_decay": 0.1, "state_bits": 8}),
    (oxidion.Adafactor, {"lr": None}),
    (oxidion.CAME, {"state_bits": 8}),
    (oxidion.Muon, {"state_bits": 8}),
    (oxidion.Muon, {"orth_dtype": "bfloat16"}),
    (oxidion.MuonH, {}),
    (oxidion.Dion, {"rank_fraction": 0.25}),
    (oxidion.Dion, {"rank_fraction": 0.25, "orth_dtype": "bfloat16"}),
    (oxidion.Dion, {"rank_fraction": 0.25, "momentum_dtype": "bfloat16", "orth_dtype": "bfloat16"}),
    (oxidion.Dion, {"rank_fraction": 0.25, "state_bits": 8, "cautious_wd": True}),
    (oxidion.Dion2, {"selection_scope": "global", "cautious_wd": True}),
    (oxidion.GaLoreAdamW, {"rank": 16, "update_proj_gap": 3, "weight_decay": 0.1}),
    (oxidion.GaLoreAdamW, {"rank": 16, "weight_decay": 0.1, "decay_order": "galore", "state_bits": 32}),
    (oxidion.APOLLOAdamW, {"rank": 16, "state_bits": 8}),
    (oxidion.SOAP, {"precondition_frequency": 3, "state_bits": 8}),
    (oxidion.SOAPMuon, {"precondition_frequency": 3}),
    (oxidion.AdEMAMix, {"state_bits": 8}),
    *[
        (cls, {"average": "ema", "average_decay": 0.9, **more})
        for cls, more in ((oxidion.AdamW, {}), (oxidion.Muon, {}), (oxidion.Dion, {"rank_fraction": 0.25}))
    ],
    (oxidion.AdamW, {"average": "ema", "average_dtype": "bfloat16", "state_bits": 8}),
    (oxidion.AdamW, {"average": "schedule_free", "weight_decay": 0.1}),
    (oxidion.Muon, {"average": "schedule_free"}),
]
IDS = [f"{cls.__name__}-{'-'.join(map(str, keys.values()))}" for cls, keys in LARGE]
SHAPES = ((300, 260), (129, 1030))
GROUP_KEYS = ("average", "average_decay", "average_dtype", "momentum_dtype")


def made(cls: Any, params: Sequence[Tensor], keys: dict[str, Any], **more: Any) -> Any:
    own = {key: value for key, value in keys.items() if key in GROUP_KEYS}
    rest = {key: value for key, value in keys.items() if key not in GROUP_KEYS}
    return cls([{"params": list(params), **own}], **{"lr": 0.01, **EXACT, **rest, **more})


@pytest.mark.parametrize(("cls", "keys"), LARGE, ids=IDS)
def test_large_matrices_equal_those_of_a_float32_run(cls: Any, keys: dict[str, Any]) -> None:
    """Products and sums of many elements, cut for threads and tiles, with 8-bit states and averages."""
    halves, fulls = twins(SHAPES)
    half, full = made(cls, halves, keys, master_weights=True), made(cls, fulls, keys)
    for number in range(7):
        grads = gradients(halves, number)
        step(half, halves, grads)
        step(full, fulls, grads)
    assert_equal_runs(half, halves, full, fulls, cls.__name__)


def test_float32_gradients_are_taken_as_they_are() -> None:
    halves, fulls = twins(SHAPES[:1])
    half = oxidion.AdamW(halves, master_weights=True, **EXACT)
    full = oxidion.AdamW(fulls, **EXACT)
    halves[0].grad_dtype = torch.float32
    for number in range(5):
        grad = gaussian(SHAPES[0], 5, number).float()
        halves[0].grad, fulls[0].grad = grad.clone(), grad.clone()
        half.step()
        full.step()
    assert_equal_runs(half, halves, full, fulls, "AdamW")


def test_small_updates_add_up() -> None:
    """Steps of 1e-3 of a weight of 1 are below half of the distance of two bfloat16 numbers."""
    halves = [nn.Parameter(torch.ones(64, dtype=torch.bfloat16)) for _ in range(2)]
    kept = oxidion.Lion(halves[:1], lr=1e-3, master_weights=True)
    lost = oxidion.Lion(halves[1:], lr=1e-3)
    for _ in range(300):
        step(kept, halves[:1], [torch.ones(64)])
        step(lost, halves[1:], [torch.ones(64)])
    assert torch.equal(halves[1], torch.ones_like(halves[1]))
    assert same(halves[0], torch.full_like(halves[0], 0.7))
    weight = weights_of(kept, halves[:1])[0]
    assert float((weight.double() - 0.7).abs().max()) < 300 * 2.0**-25


@pytest.mark.parametrize(
    "bits", [0x3F808000, 0x3F818000, 0x00008000, 0x80008000, 0x7F7F8000, 0x7F7FFFFF, 0x00000001]
)
def test_ties_and_overflow_keep_the_weight(bits: int) -> None:
    """A weight that a step does not change: ties are rounded away from zero, where torch rounds to even."""
    target = torch.tensor([bits if bits < 2**31 else bits - 2**32], dtype=torch.int32).view(torch.float32)
    param = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = oxidion.AdamW([param], lr=0.0, master_weights=True)
    step(optimizer, [param], [torch.ones(1)])
    high = nearest(target)
    with torch.no_grad():
        param.copy_(high)
    optimizer.state[param]["master_remainder"].copy_(target.view(torch.int32).to(torch.int16))
    before = weights_of(optimizer, [param])[0]
    assert same(before, target)
    step(optimizer, [param], [torch.ones(1)])
    assert same(weights_of(optimizer, [param])[0], target), "read and written with no update, it changed"
    assert same(param, high)


def test_not_a_number_and_infinity_stay() -> None:
    start = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0, -0.0, 0.0]).bfloat16()
    param = nn.Parameter(start.clone())
    optimizer = oxidion.AdamW([param], lr=2.0**-12, weight_decay=0.0, master_weights=True, **EXACT)
    for _ in range(3):
        step(optimizer, [param], [torch.tensor([1.0, 1.0, 1.0, float("nan"), 0.0, 0.0])])
    found = weights_of(optimizer, [param])[0]
    assert found.isnan().tolist() == [True, False, False, True, False, False]
    assert same(param[1:3], start[1:3])
    assert same(param[4:], start[4:])
    assert param.isnan().tolist() == found.isnan().tolist()


def test_states_and_bytes() -> None:
    param = nn.Parameter(torch.ones(6, 5, dtype=torch.bfloat16))
    plain = oxidion.AdamW([nn.Parameter(param.detach().clone())])
    optimizer = oxidion.AdamW([param], master_weights=True, init_state=True)
    state = optimizer.state[param]["master_remainder"]
    assert (state.dtype, state.shape, bool((state == 0).all())) == (torch.int16, param.shape, True)
    assert optimizer.explain()[0]["state_bytes"] - plain.explain()[0]["state_bytes"] == 2 * param.numel()


# ------------------------------------------------------------- written by others


def trained(steps: int = 5, **keys: Any) -> tuple[list[nn.Parameter], Any]:
    halves, _ = twins(((20, 16), (7,)))
    optimizer = oxidion.AdamW(halves, lr=0.01, master_weights=True, **EXACT, **keys)
    for number in range(steps):
        step(optimizer, halves, gradients(halves, number))
    return halves, optimizer


@pytest.mark.parametrize("how", ["copy_", "data", "mul_", "qk_clip_"])
def test_weights_written_from_outside_start_the_next_step(how: str) -> None:
    """The remainder moves them by half a unit in the last place at most, and nothing walks back."""
    halves, optimizer = trained()
    other = gaussian((20, 16), 99).bfloat16()
    with torch.no_grad():
        if how == "data":
            halves[0].data = other.clone()
        elif how == "copy_":
            halves[0].copy_(other)
        elif how == "mul_":
            halves[0].mul_(0.5)
        else:
            keys, before = other.clone(), halves[0].detach().clone()
            oxidion.qk_clip.qk_clip_(halves[0], keys, torch.tensor([50.0, 200.0, 400.0, 90.0]), num_heads=4)
            assert not torch.equal(halves[0], before)
        if how in ("mul_", "qk_clip_"):
            other = halves[0].detach().clone()
    found = weights_of(optimizer, halves)[0].double()
    unit = 2.0 ** (torch.frexp(other.double())[1] - 8).double()
    assert bool(((found - other.double()).abs() <= unit / 2).all())
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    for number in range(3):
        step(optimizer, halves, gradients(halves, number))
    assert same(halves[0], other), "a step of 0 changes nothing"


def test_zeros_that_others_write_stay_zeros() -> None:
    halves, optimizer = trained()
    with torch.no_grad():
        halves[0].zero_()
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    step(optimizer, halves, gradients(halves, 0))
    assert float(halves[0].detach().abs().max()) == 0.0
    assert float(weights_of(optimizer, halves)[0].abs().max()) < 1e-40


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (
            torch.float32,
            r"norm\.weight: master_weights.*bfloat16.*group 0.*float32 is its own master.*overrides=",
        ),
        (torch.float64, r"float64 is its own master"),
        (torch.float16, r"float16 has neither masters nor random rounding: make it bfloat16 or float32"),
    ],
)
def test_parameters_of_other_types_are_refused(dtype: torch.dtype, said: str) -> None:
    other = nn.Parameter(torch.ones(4, dtype=dtype))
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=said):
        oxidion.AdamW([("weight", param), ("norm.weight", other)], master_weights=True)
    frozen = nn.Parameter(torch.ones(4, dtype=dtype), requires_grad=False)
    oxidion.AdamW([("weight", param), ("norm.weight", frozen)], master_weights=True)


def test_group_of_another_type_goes_without_the_key() -> None:
    other = nn.Parameter(torch.ones(4))
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = oxidion.AdamW([{"params": [param], "master_weights": True}, {"params": [other]}])
    step(optimizer, [param, other], [torch.ones(4, 4), torch.ones(4)])
    assert ["master_remainder" in optimizer.state[p] for p in (param, other)] == [True, False]


def test_model_says_by_overrides_which_parameters_go_without() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.LayerNorm(4))
    with pytest.raises(ValueError, match=r"1\.weight: .*overrides=\{'1\.weight'"):
        oxidion.AdamW(model, lr=1e-3, master_weights=True)
    keys = {"1.*": {"master_weights": False}}
    optimizer = oxidion.AdamW(model, lr=1e-3, master_weights=True, overrides=keys)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert {name: "master_remainder" in optimizer.state[p] for name, p in model.named_parameters()} == {
        "0.weight": True,
        "0.bias": True,
        "1.weight": False,
        "1.bias": False,
    }


def test_random_rounding_with_masters_is_refused() -> None:
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"master_weights does not go with stochastic_rounding \(group 0\)"):
        oxidion.AdamW([param], master_weights=True, stochastic_rounding=True)
    optimizer = oxidion.AdamW([param], master_weights=True)
    optimizer.param_groups[0]["stochastic_rounding"] = True
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="does not go with stochastic_rounding"):
        optimizer.step()


def test_type_that_changes_later_is_refused() -> None:
    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = oxidion.AdamW([("w", param)], master_weights=True)
    step(optimizer, [param], [torch.ones(4, 4)])
    param.data, param.grad = param.data.float(), None
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match="w: master_weights needs a bfloat16 parameter, got float32"):
        optimizer.step()
