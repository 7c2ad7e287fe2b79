"""8-bit states: steps against float64 ones with states encoded by definition, loading, memory, errors."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.registry import REFERENCE
from support import code_books
from support.case import BASIS_ALGORITHMS, defaults_of
from support.inputs import gaussian
from support.rounding import of_state

SHAPES = [(96, 300), (40, 513), (20, 256)]
UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")

# Epsilon stands above the rounding of rotated gradients, which Adam would make as large as the rest.
DUE: dict[str, Any] = {"lr": 0.01, "precondition_frequency": 2, "eps": 0.25}

CASES: list[tuple[Any, dict[str, Any]]] = [
    (oxidion.AdamW, {"lr": 0.01}),
    (oxidion.AdamW, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1, "cautious_wd": True}),
    (oxidion.AdEMAMix, {"lr": 0.01}),
    (oxidion.Lion, {"lr": 0.01, "weight_decay": 0.1}),
    (oxidion.Muon, {"nesterov": True}),
    (oxidion.NorMuon, {}),
    (oxidion.Dion, {"rank_fraction": 0.5, "qr_method": "qr"}),
    (oxidion.Dion, {"rank_fraction": 0.5, "qr_method": "qr", "cautious_wd": True}),
    (oxidion.Dion2, {"fraction": 0.3}),
    (oxidion.NorDion2, {"fraction": 0.3}),
    (oxidion.Lamb, {"weight_decay": 0.1}),
    (oxidion.Adafactor, {"lr": 0.01, "relative_step": False, "beta1": 0.9}),
    (oxidion.CAME, {"lr": 0.01}),
    (oxidion.GaLoreAdamW, {"rank": 16, "update_proj_gap": 4}),
    (oxidion.GaLoreAdamW, {"rank": 16, "update_proj_gap": 2, "rotate_moments": True}),
    (oxidion.APOLLOAdamW, {"rank": 16, "update_proj_gap": 4}),
    (oxidion.SOAP, DUE),
    (oxidion.SOAP, {**DUE, "sides": "short"}),
    (oxidion.SOAPMuon, DUE),
    (oxidion.Muon, {"weight_decay": 0.0, "weight_norm": "hyperball"}),
]
OF_VECTORS = (oxidion.AdamW, oxidion.Lion, oxidion.Lamb, oxidion.Adafactor, oxidion.CAME)
NAMES = [f"{cls.__name__}-{len(keys)}" for cls, keys in CASES]


def optimizer_of(cls: Any, params: list[nn.Parameter], least: int = 4096, **keys: Any) -> Any:
    """An optimizer with 8-bit states; matrices are multiplied in float32."""
    extra = {"orth_dtype": "float32"} if "orth_dtype" in defaults_of(cls) else {}
    group = {"params": params, "min_quant_numel": least}
    return cls([group], state_bits=8, **extra, **keys)


def parameters(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(gaussian(s, 1, i, scale=0.1).to(dtype)) for i, s in enumerate(shapes)]


def grad_of(shape: tuple[int, ...], step: int, index: int) -> Tensor:
    """A gradient whose rows and columns differ by a factor of thirty, and whose size changes."""
    grad = gaussian(shape, 2, step, index) * 10.0 ** -(step % 3)
    for dim, size in enumerate(shape):
        line = torch.logspace(0, 1.5, size, dtype=torch.float64)
        grad *= line.view([-1 if d == dim else 1 for d in range(len(shape))])
    return grad.float().double()


def set_grads(params: list[nn.Parameter], step: int) -> None:
    for index, param in enumerate(params):
        param.grad = grad_of(tuple(param.shape), step, index).to(param.dtype)


@pytest.mark.parametrize(("cls", "keys"), CASES, ids=NAMES)
def test_six_steps_equal_the_formula_with_quantized_states(cls: Any, keys: dict[str, Any]) -> None:
    params = parameters([*SHAPES, (5000,)] if cls in OF_VECTORS else SHAPES)
    optimizer = optimizer_of(cls, params, **keys)
    optimizer.init_state()
    step_of = REFERENCE[cls._ALGORITHM]
    roles = {key: role for role, key in cls._STATE_NAMES.get(cls._ALGORITHM, {}).items()}
    for index, param in enumerate(params):
        group = {**defaults_of(cls), **keys, "stream": index}
        own = optimizer.state[param]
        quantized = {key for key, value in own.items() if value.dtype == torch.uint8}
        assert quantized
        expected = param.detach().double()
        kept = {k: v.clone() for k, v in own.items() if not k.endswith("_absmax")}
        scales = {k: own[k + "_absmax"].clone() for k in quantized}
        for step in range(6):
            grad = grad_of(tuple(param.shape), step, index)
            before = param.detach().double()
            param.grad = grad.float()
            optimizer.step()
            state = {
                roles.get(k, k): code_books.decode(v, scales[k], signed=k not in UNSIGNED)
                if k in quantized
                else v.double()
                for k, v in kept.items()
            }
            start = expected.clone()
            step_of(expected, grad, state, group)
            moved, wanted = param.detach().double() - before, expected - start
            # Where the other of two neighbours was drawn, the next step differs by their distance.
            bound = 1e-2 if cls._ALGORITHM in BASIS_ALGORITHMS else 1e-3
            assert (moved - wanted).norm() <= bound * wanted.norm(), step
            for key in kept:
                value = state[roles.get(key, key)]
                if key in quantized and not value.any():
                    # Zeros have any code.
                    assert not own[key + "_absmax"].any()
                elif key in quantized:
                    random = of_state(optimizer, param, key)
                    signed = key not in UNSIGNED
                    kept[key], scales[key] = code_books.encode(value, signed=signed, random=random)
                    share = 0.97 if cls._ALGORITHM in BASIS_ALGORITHMS else 0.999
                    assert (kept[key] == own[key]).double().mean() >= share, (step, key)
                    rtol = 1e-2 if cls._ALGORITHM in BASIS_ALGORITHMS else 1e-4
                    torch.testing.assert_close(own[key + "_absmax"], scales[key], rtol=rtol, atol=1e-12)
                    if cls._ALGORITHM in BASIS_ALGORITHMS:
                        kept[key], scales[key] = own[key].clone(), own[key + "_absmax"].clone()
                else:
                    # Rounding of gradients that grow along their sides decides of many directions of a basis.
                    kept[key] = own[key].clone() if cls._ALGORITHM in BASIS_ALGORITHMS else value
        param.grad = None


@pytest.mark.parametrize(("cls", "keys"), CASES, ids=NAMES)
def test_verify_dequantizes_states(cls: Any, keys: dict[str, Any]) -> None:
    params = parameters(SHAPES)
    optimizer = optimizer_of(cls, params, **keys)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    set_grads(params, 2)
    assert max(optimizer.verify().to_dict()["update_error"]) <= 1e-3


@pytest.mark.parametrize(("cls", "keys"), CASES, ids=NAMES)
def test_explain_counts_quantized_values_and_scales(cls: Any, keys: dict[str, Any]) -> None:
    params = parameters([*SHAPES, (16, 16)])
    optimizer = optimizer_of(cls, params, **keys)
    optimizer.init_state()
    for bytes_, param in zip(optimizer.explain().to_dict()["state_bytes"], params, strict=True):
        assert bytes_ == sum(value.nbytes for value in optimizer.state[param].values())


def test_what_is_small_or_no_moment_keeps_its_type() -> None:
    params = parameters([(64, 63), (64, 64), (4096,), ()])
    optimizer = oxidion.AdamW(params, state_bits=8, state_dtype=torch.bfloat16)
    optimizer.init_state()
    kinds = [optimizer.state[param]["exp_avg"].dtype for param in params]
    assert kinds == [torch.bfloat16, torch.uint8, torch.uint8, torch.bfloat16]
    assert all(optimizer.state[param]["step"].dtype == torch.float32 for param in params)
    assert tuple(optimizer.state[params[1]]["exp_avg_absmax"].shape) == (64, 1)
    assert tuple(optimizer.state[params[2]]["exp_avg_absmax"].shape) == (16,)
    # A scale for each three elements of a convolution would take more than float16.
    for dtype, stored in ((torch.float16, torch.float16), (torch.float32, torch.uint8)):
        (param,) = parameters([(64, 64, 3, 3)], torch.float16)
        optimizer = oxidion.AdamW([param], state_bits=8, state_dtype=dtype)
        optimizer.init_state()
        assert optimizer.state[param]["exp_avg"].dtype == stored


NEVER: list[tuple[Any, dict[str, Any], set[str]]] = [
    (oxidion.AdamW, {}, set()),
    (oxidion.AdamW, {"amsgrad": True}, {"exp_avg_sq", "max_exp_avg_sq"}),
    (oxidion.AdEMAMix, {}, {"exp_avg_slow"}),
    (oxidion.Lamb, {}, set()),
    (oxidion.GaLoreAdamW, {"rank": 64}, {"proj"}),
    (oxidion.NorMuon, {}, {"variance_neuron"}),
    (oxidion.SOAP, {}, {"exp_avg", "L", "R", "Q_L", "Q_R"}),
    (oxidion.SOAPMuon, {}, {"L", "R", "Q_L", "Q_R"}),
]


@pytest.mark.parametrize(("cls", "keys", "wide"), NEVER, ids=[f"{c.__name__}-{len(k)}" for c, k, _ in NEVER])
def test_states_that_quantization_harms_are_never_in_8_bits(
    cls: Any, keys: dict[str, Any], wide: set[str]
) -> None:
    (param,) = parameters([(96, 256)], torch.bfloat16)
    optimizer = optimizer_of(cls, [param], 0, **keys)
    optimizer.init_state()
    own = {k: v.dtype for k, v in optimizer.state[param].items() if v.ndim and not k.endswith("_absmax")}
    assert {key for key, dtype in own.items() if dtype != torch.uint8} == wide
    assert {own[key] for key in wide} <= {torch.float32}


@pytest.mark.parametrize(
    ("cls", "keys", "key"),
    [
        (oxidion.AdEMAMix, {}, "exp_avg_slow"),
        (oxidion.AdamW, {"amsgrad": True}, "max_exp_avg_sq"),
        (oxidion.SOAP, {}, "exp_avg"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_8_bit_values_of_such_a_state_are_refused(cls: Any, keys: dict[str, Any], key: str) -> None:
    def made() -> Any:
        return optimizer_of(cls, parameters([(96, 256)]), 0, **keys)

    optimizer = made()
    optimizer.init_state()
    saved = copy.deepcopy(optimizer.state_dict())
    own = saved["state"][0]
    own[key], own[key + "_absmax"] = code_books.encode(torch.zeros(96, 256))
    other = made()
    with pytest.raises(ValueError, match=rf"'{key}' must be of dtype float16.*, got uint8"):
        other.load_state_dict(saved)
    assert not other.state


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_parameters_of_any_type_may_have_8_bit_states(dtype: torch.dtype) -> None:
    params = parameters(SHAPES[:1], dtype)
    optimizer = optimizer_of(oxidion.AdamW, params, lr=0.01)
    (twin,) = parameters(SHAPES[:1])
    twin.data.copy_(params[0].data)
    other = optimizer_of(oxidion.AdamW, [twin], lr=0.01)
    set_grads(params, 0)
    twin.grad = params[0].grad.float()  # type: ignore[union-attr]
    optimizer.step()
    other.step()
    one, two = optimizer.state[params[0]], other.state[twin]
    assert (one["exp_avg"] == two["exp_avg"]).double().mean() >= 0.999
    torch.testing.assert_close(params[0].data, twin.data.to(dtype), rtol=1e-2, atol=1e-3)


def test_a_non_finite_gradient_shows_in_its_block_only() -> None:
    params = parameters([(8, 600)])
    optimizer = optimizer_of(oxidion.AdamW, params)
    params[0].grad = torch.ones(8, 600)
    params[0].grad[3, 300] = math.nan
    optimizer.step()
    lost = torch.zeros(8, 600, dtype=torch.bool)
    lost[3, 300] = True
    assert torch.equal(params[0].isnan(), lost)
    params[0].grad = torch.ones(8, 600)
    optimizer.step()
    lost[3, 256:512] = True
    assert torch.equal(params[0].isnan(), lost)


@pytest.mark.parametrize(("cls", "keys"), CASES, ids=NAMES)
def test_resumed_from_a_file_of_plain_values_steps_are_bit_equal(cls: Any, keys: dict[str, Any]) -> None:
    params = parameters(SHAPES)
    optimizer = optimizer_of(cls, params, **keys)
    for step in range(2):
        set_grads(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = optimizer_of(cls, again, **keys)
    other.load_state_dict(torch.load(file, weights_only=True))
    for step in range(2, 5):
        for own, one in ((params, optimizer), (again, other)):
            set_grads(own, step)
            one.step()
    for one, two in zip(params, again, strict=True):
        assert torch.equal(one, two)
        for key, value in optimizer.state[one].items():
            assert value.dtype == other.state[two][key].dtype
            assert torch.equal(value, other.state[two][key])


@pytest.mark.parametrize("bits", [8, 32])
def test_states_that_exist_are_taken_as_they_are(bits: int) -> None:
    params = parameters(SHAPES[:1])
    optimizer = oxidion.AdamW(params, state_bits=bits)
    set_grads(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["state_bits"] = 40 - bits
    again = [nn.Parameter(p.detach().clone()) for p in params]
    other = oxidion.AdamW(again, state_bits=40 - bits)
    other.load_state_dict(saved)
    for own, one in ((params, optimizer), (again, other)):
        set_grads(own, 1)
        one.step()
    assert torch.equal(params[0], again[0])
    assert other.state[again[0]].keys() == optimizer.state[params[0]].keys()
    assert other.state[again[0]]["exp_avg"].dtype == (torch.uint8 if bits == 8 else torch.float32)


def test_quantized_values_and_scales_need_each_other() -> None:
    params = parameters(SHAPES[:1])
    optimizer = oxidion.AdamW(params, state_bits=8)
    optimizer.init_state()
    for key in ("exp_avg_absmax", "exp_avg"):
        saved = copy.deepcopy(optimizer.state_dict())
        del saved["state"][0][key]
        other = oxidion.AdamW(parameters(SHAPES[:1]), state_bits=8)
        with pytest.raises(ValueError, match=r"state 'exp_avg.*exp_avg"):
            other.load_state_dict(saved)
        assert not other.state


def test_scales_of_another_block_size_raise() -> None:
    params = parameters(SHAPES[:1])
    optimizer = oxidion.AdamW(params, state_bits=8)
    optimizer.init_state()
    optimizer.param_groups[0]["block_size"] = 64
    set_grads(params, 0)
    with pytest.raises(ValueError, match=r"state 'exp_avg_absmax' must have shape \(\d+, 5\), got"):
        optimizer.step()


@pytest.mark.parametrize(
    ("key", "value"), [("state_bits", 16), ("state_bits", True), ("block_size", 100), ("min_quant_numel", -1)]
)
def test_settings_out_of_range_raise(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        oxidion.AdamW([{"params": parameters(SHAPES[:1]), key: value}])


def test_heads_that_begin_inside_blocks_raise_with_a_block_size() -> None:
    (param,) = parameters([(128, 192)])
    keys: dict[str, Any] = {"params": [param], "num_heads": 3, "split_dim": 1}
    optimizer = oxidion.Muon([keys], state_bits=8, orth_dtype="float32")
    with pytest.raises(ValueError, match="block_size=64"):
        optimizer.explain()
    optimizer.param_groups[0]["block_size"] = 64
    set_grads([param], 0)
    optimizer.step()
    assert optimizer.state[param]["momentum"].dtype == torch.uint8
    assert optimizer.verify().to_dict()["update_error"][0] <= 1e-3


def test_blocks_of_any_layout_in_memory_are_worked_on() -> None:
    found = []
    for is_turned in (False, True):
        (param,) = parameters([(96, 300)])
        optimizer = optimizer_of(oxidion.AdamW, [param], lr=0.01)
        optimizer.init_state()
        if is_turned:
            param.data = param.data.t().contiguous().t()
            for key, value in optimizer.state[param].items():
                if value.ndim:
                    optimizer.state[param][key] = value.t().contiguous().t()
        for step in range(3):
            param.grad = grad_of((96, 300), step, 0).float()
            optimizer.step()
        found.append({"param": param.detach(), **optimizer.state[param]})
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key
