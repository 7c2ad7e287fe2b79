"""States of 16-bit parameters: their dtypes, and 16-bit moments that follow what they average."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.case import defaults_of
from support.inputs import gaussian

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq_mean")
RESIDUES = ("exp_avg_res_row", "exp_avg_res_col", "exp_avg_res_mean")
BASES = ("L", "R", "Q_L", "Q_R")
FIXED: dict[str, Any] = {"lr": 1e-3, "relative_step": False, "beta1": 0.9}

# By class: arguments, and the states of a matrix but counters.
TABLE: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "AdamW": (oxidion.AdamW, {}, ("exp_avg", "exp_avg_sq")),
    "AdamW amsgrad": (oxidion.AdamW, {"amsgrad": True}, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "AdEMAMix": (oxidion.AdEMAMix, {}, ("exp_avg_fast", "exp_avg_slow", "exp_avg_sq")),
    "Lamb": (oxidion.Lamb, {}, ("exp_avg", "exp_avg_sq")),
    "Lion": (oxidion.Lion, {}, ("exp_avg",)),
    "Adafactor": (oxidion.Adafactor, FIXED, ("exp_avg", *FACTORS)),
    "CAME": (oxidion.CAME, {"lr": 1e-3}, ("exp_avg", *FACTORS, *RESIDUES)),
    "Muon": (oxidion.Muon, {}, ("momentum",)),
    "MuonH": (oxidion.MuonH, {}, ("momentum", "radius")),
    "NorMuon": (oxidion.NorMuon, {}, ("momentum", "variance_neuron")),
    "Dion": (oxidion.Dion, {}, ("momentum", "Q")),
    "Dion2": (oxidion.Dion2, {}, ("momentum",)),
    "NorDion2": (oxidion.NorDion2, {}, ("momentum", "variance_neuron")),
    "SOAP": (oxidion.SOAP, {}, ("exp_avg", "exp_avg_sq", *BASES)),
    "SOAPMuon": (oxidion.SOAPMuon, {}, ("momentum", "exp_avg_sq", *BASES)),
    "GaLoreAdamW": (oxidion.GaLoreAdamW, {"rank": 4, "state_bits": 32}, ("exp_avg", "exp_avg_sq", "proj")),
    "APOLLOAdamW": (oxidion.APOLLOAdamW, {"rank": 4}, ("exp_avg", "exp_avg_sq")),
    "APOLLOMini": (oxidion.APOLLOMini, {}, ("exp_avg", "exp_avg_sq")),
    "AdamW in Muon": (oxidion.Muon, {"algorithm": "adamw"}, ("momentum", "variance")),
    "Lion in Muon": (oxidion.Muon, {"algorithm": "lion"}, ("momentum",)),
}
every_row = pytest.mark.parametrize("name", TABLE)


def made(name: str, param: Tensor, **more: Any) -> Any:
    """An optimizer of a row over one parameter."""
    cls, keys, _ = TABLE[name]
    given = {**keys, **more}
    group = {"params": [param], **{key: given.pop(key) for key in ("algorithm",) if key in given}}
    return cls([group], **given)


def test_table_has_all_classes() -> None:
    classes = {value for value in vars(oxidion).values() if isinstance(value, type)}
    wanted = {cls for cls in classes if issubclass(cls, torch.optim.Optimizer) and "lr" in defaults_of(cls)}
    assert {cls for cls, *_ in TABLE.values()} >= {cls for cls in wanted if hasattr(cls, "_ALGORITHM")}


@every_row
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64], ids=str)
def test_types_of_states_by_default(name: str, dtype: torch.dtype) -> None:
    """As wide as the arithmetic, whatever the parameter's dtype is."""
    param = nn.Parameter(torch.zeros(16, 24, dtype=dtype))
    optimizer = made(name, param)
    optimizer.init_state()
    _, _, states = TABLE[name]
    expected = dict.fromkeys(states, F64 if dtype == F64 else F32)
    found = {key: value.dtype for key, value in optimizer.state[param].items()}
    counters = {"step", "step_dev", "basis_step", "proj_step", "update_norm"}
    assert {key: value for key, value in found.items() if key not in counters} == expected


RATIO = 2e-2
FALLING: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW amsgrad": {},
    "Lamb": {},
    "AdEMAMix": {},
    "AdamW in Muon": {"betas": (0.9, 0.999)},
    "GaLoreAdamW": {},
    "APOLLOAdamW": {},
}
"""Classes with slow averages, all at rates of about 1/1000."""


def sizes_of_steps(name: str, dtype: torch.dtype, grads: list[Tensor], **keys: Any) -> float:
    """The size of the last steps of a parameter that is 0 before each."""
    param = nn.Parameter(torch.zeros_like(grads[0]))
    decay = {} if name.startswith("Lamb") else {"weight_decay": 0.0}
    optimizer = made(name, param, state_dtype=dtype, **{"lr": 1e-3, **decay, **keys})
    total = 0.0
    for step, grad in enumerate(grads):
        param.data.zero_()
        param.grad = grad.clone()
        optimizer.step()
        if step >= len(grads) - 60:
            total += float(param.detach().double().square().mean())
    return (total / 60) ** 0.5


@pytest.mark.parametrize("name", FALLING)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("end", [0.1, 1.0], ids=["falling", "constant"])
def test_moments_of_16_bits_follow_what_they_average(name: str, dtype: torch.dtype, end: float) -> None:
    """Rounded to the nearest number second moments would stand still: a step changes them by 1/1000."""
    count = 1200
    grads = [gaussian((16, 24), 1, step).float() * end ** (step / count) for step in range(count)]
    if end == 1.0:  # one large gradient first, which has to be forgotten
        grads[0] *= 10.0
    found, expected = (sizes_of_steps(name, own, grads, **FALLING[name]) for own in (dtype, F32))
    assert abs(found / expected - 1) <= RATIO, found / expected


@pytest.mark.parametrize("name", ["NorMuon", "NorDion2"])
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_second_moments_of_neurons_are_never_of_16_bits(name: str, dtype: torch.dtype) -> None:
    """One number for each row, by which the update is divided: 16 bits of it would save nothing."""
    param = nn.Parameter(torch.zeros(24, 8, dtype=dtype))
    optimizer = made(name, param, state_dtype=dtype)
    param.grad = torch.ones_like(param)
    optimizer.step()
    found = {key: value.dtype for key, value in optimizer.state[param].items()}
    assert found == {"momentum": dtype, "variance_neuron": F32}


@every_row
def test_float16_parameters_step_along_small_gradients(name: str) -> None:
    """Gradients of 1e-4, whose squares are 0 in float16, compared with float32 states."""
    grads = [(gaussian((16, 24), 2, step) * 1e-4).half() for step in range(80)]
    taken = []
    for dtype in (F16, F32):
        # Weights of a norm that is kept have one.
        start = 2.0**-6 * gaussian((16, 24), 6).sign() * (name == "MuonH")
        param = nn.Parameter(start.to(dtype))
        keys = {"state_dtype": F32} if dtype == F32 else {}
        optimizer = made(name, param, weight_decay=0.0, **keys)
        total = 0.0
        for step, grad in enumerate(grads):
            param.data.copy_(start)
            param.grad = grad.to(dtype)
            optimizer.step()
            total += float((param.detach().double() - start).square().mean()) if step >= 40 else 0.0
        taken.append(total**0.5)
    assert taken[1] > 0
    assert abs(taken[0] / taken[1] - 1) <= 0.05, taken


def test_second_moments_in_float16_never_become_zero() -> None:
    param = nn.Parameter(torch.zeros(64, 64))
    optimizer = oxidion.AdamW([param], lr=1e-3, state_dtype=F16, weight_decay=0.0)
    for step in range(60):
        param.grad = gaussian((64, 64), 3, step).float() * 1e-5  # squares of 1e-10, of 6e-8 at least
        optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg_sq"].dtype == F16
        assert bool((state["exp_avg_sq"] > 0).all())
    # Too large a second moment makes steps too small, not too large.
    assert float(param.detach().abs().max()) <= 60 * 1e-3


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "AdEMAMix", "Lamb", "Muon", "NorMuon", "SOAP", "APOLLOAdamW"])
def test_resumed_run_with_moments_of_16_bits_is_bit_equal(name: str, dtype: torch.dtype) -> None:
    def stepped(optimizer: Any, param: Tensor, steps: range) -> None:
        for step in steps:
            param.grad = gaussian((16, 24), 4, step).to(param.dtype)
            optimizer.step()

    param = nn.Parameter(gaussian((16, 24), 5).to(BF16))
    optimizer = made(name, param, state_dtype=dtype)
    stepped(optimizer, param, range(3))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = nn.Parameter(param.detach().clone())
    other = made(name, again, state_dtype=dtype)
    other.load_state_dict(torch.load(file, weights_only=True))
    stepped(optimizer, param, range(3, 7))
    stepped(other, again, range(3, 7))
    assert torch.equal(param, again)
    for key, value in optimizer.state[param].items():
        assert torch.equal(value, other.state[again][key]), key
