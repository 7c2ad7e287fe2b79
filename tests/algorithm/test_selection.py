"""Dion2 and NorDion2: which rows or columns are selected, and what stays untouched."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.cases import LR, WEIGHT_DECAY
from support.inputs import gaussian

KEEP = 0.5
CLASSES: dict[str, tuple[type, dict[str, Any]]] = {
    "dion2": (oxidion.Dion2, {"ef_decay": KEEP}),
    "nordion2": (oxidion.NorDion2, {"mu": KEEP, "muon_beta2": 0.5}),
}
every_class = pytest.mark.parametrize("name", CLASSES)
every_scope = pytest.mark.parametrize("scope", ["local", "global"])
every_dtype = pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)


class Selecting:
    """An optimizer over one parameter."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, **kwargs: Any) -> None:
        cls, own = CLASSES[name]
        self.param = nn.Parameter(gaussian(shape, 5).to(dtype))
        self.optimizer: Any = cls([self.param], lr=LR, weight_decay=WEIGHT_DECAY, **{**own, **kwargs})
        self.optimizer.init_state()
        self.state = self.optimizer.state[self.param]

    def step(self, grad: Tensor) -> Tensor:
        """Step; which rows of the momentum were released."""
        before = self.state["momentum"].double() + grad.double()
        self.param.grad = grad.to(self.param.dtype)
        self.optimizer.step()
        # Only what is released shrinks; a row of zeros counts as kept.
        return (self.state["momentum"].double().abs() < 0.75 * before.abs()).any(dim=1)


def rows(released: Tensor) -> list[int]:
    return released.nonzero().flatten().tolist()


def equal_rows(count: int, width: int) -> Tensor:
    """Rows of ±1 that are linearly independent and have equal sums of absolute values."""
    signs = gaussian((count, width), 3).sign()
    assert torch.linalg.matrix_rank(signs) == min(count, width)
    return signs


@every_class
@every_scope
@every_dtype
def test_equal_sums_go_to_the_lowest_rows(name: str, scope: str, dtype: torch.dtype) -> None:
    one = Selecting(name, (10, 24), dtype, fraction=0.3, selection_scope=scope)
    assert rows(one.step(equal_rows(10, 24))) == [0, 1, 2]
    # Those are half as strong now, twice as strong are the next ones.
    assert rows(one.step(equal_rows(10, 24))) == [3, 4, 5]


@every_scope
def test_equal_columns_go_to_the_lowest(scope: str) -> None:
    one = Selecting("dion2", (24, 10), torch.float32, fraction=0.25, selection_scope=scope)
    one.param.grad = equal_rows(24, 10).float()
    one.optimizer.step()
    released = (one.state["momentum"].abs() == KEEP).all(dim=0)
    assert rows(released) == [0, 1, 2]
    assert bool((one.state["momentum"].abs() == 1)[:, 3:].all())


@every_class
@pytest.mark.parametrize(("excess", "chosen"), [(1e-10, 1), (-1e-10, 1), (1e-5, 4)])
def test_sums_that_float32_cannot_distinguish_are_equal(name: str, excess: float, chosen: int) -> None:
    grad = 0.5 * equal_rows(6, 8)
    grad[1], grad[4] = 2 * grad[1], 2 * grad[4]
    grad[4, 0] += math.copysign(excess, float(grad[4, 0]))
    one = Selecting(name, (6, 8), torch.float64, fraction=0.1)
    assert rows(one.step(grad)) == [chosen]


@every_class
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_sums_are_not_rounded_to_half_precision(name: str, dtype: torch.dtype) -> None:
    grad = equal_rows(6, 256)
    # Neither type can represent 256 + 1/64.
    grad[3, 17] *= 1 + 2.0**-6
    one = Selecting(name, (6, 256), dtype, fraction=0.1)
    assert rows(one.step(grad)) == [3]


@every_class
@every_dtype
@pytest.mark.parametrize("shape", [(9, 12), (12, 9), (3, 9, 12)], ids=str)
def test_what_is_not_selected_only_decays_and_keeps_its_states(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    one = Selecting(name, shape, dtype, fraction=0.3, orth_dtype="float32")
    for number in range(3):
        start = one.param.detach().clone()
        state = {key: value.clone() for key, value in one.state.items()}
        grad = gaussian(shape, number).to(dtype)
        one.param.grad = grad
        one.optimizer.step()
        added = (state["momentum"].double() + grad.double()).to(state["momentum"].dtype)
        kept, halved = one.state["momentum"] == added, one.state["momentum"] == KEEP * added
        dim = -2 if shape[-2] <= shape[-1] or name == "nordion2" else -1
        unselected = kept.all(dim=-3 - dim, keepdim=True).expand(shape)
        assert bool(halved[~unselected].all())
        per_matrix = math.prod(shape[:-2])
        chosen = math.ceil(0.3 * shape[dim])
        assert int((~unselected).sum()) == per_matrix * chosen * shape[-3 - dim]
        decayed = (start.double() * (1 - LR * WEIGHT_DECAY)).to(dtype)
        assert torch.equal(one.param[unselected], decayed[unselected])
        # An update may be less than half a unit of bfloat16.
        assert bool((one.param != decayed)[~unselected].double().mean() > 0.5)
        if name == "nordion2":
            still = unselected[..., :1]
            assert torch.equal(one.state["variance_neuron"][still], state["variance_neuron"][still])
            assert bool((one.state["variance_neuron"] != state["variance_neuron"])[~still].all())


@every_class
@every_scope
def test_smallest_fraction_selects_one_and_an_integer_all(name: str, scope: str) -> None:
    few = Selecting(name, (7, 11), torch.float32, fraction=1e-9, selection_scope=scope)
    assert len(rows(few.step(gaussian((7, 11), 1)))) == 1
    every = Selecting(name, (7, 11), torch.float32, fraction=1, selection_scope=scope)
    assert len(rows(every.step(gaussian((7, 11), 1)))) == 7
    if name == "nordion2":
        assert bool((every.state["variance_neuron"] > 0).all())


@every_class
@every_scope
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf], ids=str)
def test_bad_gradients_are_selected_first_and_touch_no_other_row(name: str, scope: str, bad: float) -> None:
    one = Selecting(name, (8, 12), torch.float32, fraction=0.25, selection_scope=scope)
    grad = gaussian((8, 12), 1)
    for row, col in ((6, 0), (3, 5), (5, 7)):
        grad[row, col] = bad
    start = one.param.detach().clone()
    one.param.grad = grad.float()
    one.optimizer.step()
    # The lowest two of the three.
    assert rows(one.param.isnan().all(dim=1)) == [3, 5]
    rest = [0, 1, 2, 4, 6, 7]
    assert torch.equal(one.param[rest], start[rest] * (1 - LR * WEIGHT_DECAY))
    assert rows(~one.state["momentum"].isfinite().all(dim=1)) == [3, 5, 6]


@every_class
@every_dtype
@pytest.mark.parametrize("shape", [(8, 12), (12, 8)], ids=str)
def test_zero_gradients_from_the_start_only_decay(
    name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    one = Selecting(name, shape, dtype)
    wanted = one.param.detach().clone()
    for _ in range(3):
        one.param.grad = torch.zeros_like(one.param)
        one.optimizer.step()
        wanted = (wanted.double() * (1 - LR * WEIGHT_DECAY)).to(dtype)
        assert torch.equal(one.param.detach(), wanted)
        assert all(bool((value == 0).all()) for value in one.state.values())


@pytest.mark.parametrize("cls", [oxidion.Dion2, oxidion.NorDion2], ids=lambda c: c.__name__)
@pytest.mark.parametrize("way", ["argument", "group"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fraction", 0.0),
        ("fraction", -0.25),
        ("fraction", 1.5),
        ("fraction", math.nan),
        ("fraction", "half"),
        ("selection_scope", "here"),
        ("cautious_wd", 3),
        ("lr", -1.0),
        ("weight_decay", -1.0),
    ],
)
def test_wrong_settings_are_refused_by_name(cls: type, way: str, key: str, value: object) -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    keys, arguments = ({}, {key: value}) if way == "argument" else ({key: value}, {})
    with pytest.raises(ValueError, match=key):
        cls([{"params": [param], **keys}], **arguments)


@pytest.mark.parametrize("cls", [oxidion.NorMuon, oxidion.NorDion2], ids=lambda c: c.__name__)
@pytest.mark.parametrize(
    ("key", "value"), [("muon_beta2", 1.0), ("muon_beta2", -0.1), ("norm_scope", "row"), ("mu", -0.5)]
)
def test_wrong_settings_of_neurons_are_refused_by_name(cls: type, key: str, value: object) -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    for keys, arguments in (({}, {key: value}), ({key: value}, {})):
        with pytest.raises(ValueError, match=key):
            cls([{"params": [param], **keys}], **arguments)


@every_class
def test_tensors_for_lr_and_weight_decay_are_read_at_every_step(name: str) -> None:
    lr, decay = torch.tensor(LR), torch.tensor(WEIGHT_DECAY)
    live = Selecting(name, (6, 9), torch.float32)
    live.optimizer.param_groups[0].update(lr=lr, weight_decay=decay)
    plain = Selecting(name, (6, 9), torch.float32)
    for number in range(3):
        lr.fill_(LR / (1 + number))
        decay.fill_(WEIGHT_DECAY * number)
        plain.optimizer.param_groups[0].update(lr=LR / (1 + number), weight_decay=WEIGHT_DECAY * number)
        for one in (live, plain):
            one.step(gaussian((6, 9), number))
        torch.testing.assert_close(live.param, plain.param, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (oxidion.Dion, "rank_fraction", 0.0),
        (oxidion.Dion, "rank_fraction", 2.0),
        (oxidion.Dion2, "fraction", 7.5),
        (oxidion.Dion2, "fraction", -1.0),
        (oxidion.Dion2, "selection_scope", "here"),
        (oxidion.Dion2, "ef_decay", -0.5),
        (oxidion.NorDion2, "fraction", 0),
        (oxidion.NorDion2, "norm_scope", "here"),
        (oxidion.NorMuon, "muon_beta2", 1.5),
        (oxidion.NorMuon, "muon_beta2", 1.0),
    ],
)
def test_wrong_values_set_later_are_refused_before_any_change(cls: type, key: str, value: object) -> None:
    param = nn.Parameter(gaussian((6, 4), 1))
    optimizer: Any = cls([param])
    param.grad = gaussian((6, 4), 2)
    optimizer.step()
    good, before = optimizer.param_groups[0][key], param.detach().clone()
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=f"{key} must be"):
        optimizer.step()
    assert torch.equal(param.detach(), before)
    optimizer.param_groups[0][key] = good
    optimizer.step()
    assert not torch.equal(param.detach(), before)
