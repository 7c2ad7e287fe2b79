"""Weights that keep their norm."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from support.cases import optimizer_classes


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
    "Dion": lambda p: oxidion.Dion(p, rank_fraction=0.5, **SPHERE),
    "Dion2": lambda p: oxidion.Dion2(p, **SPHERE),
    "NorDion2": lambda p: oxidion.NorDion2(p, **SPHERE),
    "AdamW": lambda p: oxidion.AdamW(p, **SPHERE),
    "AMSGrad": lambda p: oxidion.AdamW(p, amsgrad=True, **SPHERE),
    "AdEMAMix": lambda p: oxidion.AdEMAMix(p, **SPHERE),
    "Lion": lambda p: oxidion.Lion(p, **SPHERE),
    "SOAP": lambda p: oxidion.SOAP(p, **SPHERE),
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


FLOORS = [
    (oxidion.Muon, {}),
    (oxidion.NorMuon, {}),
    (oxidion.Dion, {"cautious_wd": True}),  # without, a free step does not form U
    (oxidion.Dion2, {}),
    (oxidion.Dion2, {"cautious_wd": True, "state_bits": 8}),
    (oxidion.NorDion2, {}),
    (oxidion.SOAP, {}),
    (oxidion.SOAP, {"cautious_wd": True}),
    (oxidion.SOAP, {"cautious_wd": True, "decay_order": "torch"}),
    (oxidion.SOAP, {"normalize_grads": True, "sides": "short"}),
    (oxidion.SOAPMuon, {}),
    (oxidion.SOAPMuon, {"cautious_wd": True}),
]
# A free step of these is one pass: AdamW multiplies by the rate before it divides, Dion adds a product to the
# weights. A bound step has U in memory, and rounds it.
IN_ONE_PASS = [
    (oxidion.AdamW, {}),
    (oxidion.AdamW, {"cautious_wd": True}),
    (oxidion.AdamW, {"amsgrad": True}),
    (oxidion.AdEMAMix, {}),
    (oxidion.AdEMAMix, {"cautious_wd": True}),
    (oxidion.Lion, {}),
    (oxidion.Lion, {"cautious_wd": True}),
    (oxidion.Dion, {}),
    (oxidion.Dion, {"rank_fraction": 0.5, "right_factor": "orthonormal"}),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", None) or "-".join(value)


@pytest.mark.parametrize(("cls", "keys"), FLOORS, ids=named)
def test_floor_of_zero_is_a_free_step(cls: Any, keys: dict[str, Any]) -> None:
    def make(**settings: Any) -> Any:
        return lambda p: cls(p, lr=0.1, weight_decay=0.1, **keys, **settings)

    _, free, _ = trained(make(), torch.float64, 20)
    for rule in ("floor", "row_floor"):
        _, bound, _ = trained(make(weight_norm=rule, weight_norm_floor=0.0), torch.float64, 20)
        assert torch.equal(free, bound)


@pytest.mark.parametrize(("cls", "keys"), IN_ONE_PASS, ids=named)
def test_floor_of_zero_equals_a_free_step_but_for_rounding(cls: Any, keys: dict[str, Any]) -> None:
    def make(**settings: Any) -> Any:
        return lambda p: cls(p, lr=0.1, weight_decay=0.1, **keys, **settings)

    _, free, _ = trained(make(), torch.float64, 20)
    for rule in ("floor", "row_floor"):
        _, bound, _ = trained(make(weight_norm=rule, weight_norm_floor=0.0), torch.float64, 20)
        torch.testing.assert_close(free, bound, rtol=1e-13, atol=1e-13)
    _, other, _ = trained(make(weight_norm="floor", weight_norm_floor=4.0), torch.float64, 20)
    assert not torch.allclose(free, other), "four times the norm is more than a free update"


def test_every_class_that_holds_norms_is_compared_to_free_steps() -> None:
    held = {cls for cls in optimizer_classes() if cls._LEAVES_UPDATE and cls is not oxidion.MuonH}
    assert held == {cls for cls, _ in (*FLOORS, *IN_ONE_PASS)}


@pytest.mark.parametrize("cls", [cls for cls in optimizer_classes() if not cls._LEAVES_UPDATE])
def test_classes_whose_update_has_a_length_of_its_own_refuse_it(cls: Any) -> None:
    own = {"lr": 1e-3} if cls is oxidion.CAME else {}
    for rule in ("hyperball", "floor", "row_floor"):
        with pytest.raises(ValueError, match=f"{cls._ALGORITHM} takes weight_norm='free' only"):
            cls([nn.Parameter(torch.ones(4, 4))], weight_norm=rule, **own)


def test_adamw_turns_by_its_learning_rate_on_the_sphere() -> None:
    """The first update is the signs of the gradient: X' = X - lr (R / |U|) U, scaled back to R."""
    torch.manual_seed(0)
    before = torch.randn(6, 5, dtype=torch.float64)
    param = nn.Parameter(before.clone())
    param.grad = torch.randn(6, 5, dtype=torch.float64)
    update = param.grad.sign()
    oxidion.AdamW([param], eps=0.0, **SPHERE).step()
    moved = before - 0.1 * before.norm() / update.norm() * update
    torch.testing.assert_close(param.detach(), moved * before.norm() / moved.norm(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.AdEMAMix, oxidion.Lion])
def test_capturable_steps_that_are_bound_are_refused(cls: Any) -> None:
    with pytest.raises(ValueError, match="capturable needs weight_norm='free'"):
        cls([nn.Parameter(torch.ones(2, 2))], weight_norm="floor", capturable=True)


def test_adamw_with_norm_constrained_matrices_is_unconstrained() -> None:
    """The norm of embeddings is held only where their group says so; vectors that go to AdamW are free."""
    found = []
    for make, keys in ((oxidion.MuonH, {}), (oxidion.AdamW, {}), (oxidion.MuonH, SPHERE)):
        torch.manual_seed(0)
        embedding, matrix = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(4, 4))
        group = {"params": [embedding], "algorithm": "adamw", "lr": 0.1, "betas": (0.9, 0.999), **keys}
        group |= {"weight_decay": 0.0, "eps": 1e-8}
        optimizer = make([group] if make is oxidion.AdamW else [{"params": [matrix]}, group])
        norm = float(embedding.detach().norm())
        for param in (embedding, matrix):
            param.grad = torch.randn_like(param)
        optimizer.step()
        assert (float(embedding.detach().norm()) == pytest.approx(norm, rel=1e-6)) == bool(keys)
        found.append(embedding.detach())
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("name", ["MuonH", "AdamW", "AdEMAMix", "Lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_run_that_resumes_keeps_the_norm_of_its_start(dtype: torch.dtype, name: str) -> None:
    optimizer, param, norm = trained(MAKERS[name], dtype, 5)
    memory = io.BytesIO()
    torch.save(optimizer.state_dict(), memory)
    memory.seek(0)
    other = nn.Parameter(param.detach().clone())
    resumed = MAKERS[name]([other])
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


@pytest.mark.parametrize("name", ["MuonH", "AdamW"])
def test_a_matrix_of_zeros_in_a_stack_is_refused(name: str) -> None:
    for zero in range(2):
        stack = nn.Parameter(torch.ones(2, 3, 4))
        stack.data[zero] = 0.0
        stack.grad = torch.ones_like(stack)
        optimizer = MAKERS[name]([stack])
        with pytest.raises(ValueError, match="one is all zero"):
            optimizer.step()
        stack.data[zero] = 1.0
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 1, "nothing was half done"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["hyperball", "floor", "row_floor"])
@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"Lion"}))  # which takes signs, 0 for NaN
def test_gradient_that_is_not_finite_shows_in_the_weights(name: str, rule: str, bad: float) -> None:
    """No finite number may come of it: of a row where that has a norm of its own, else of the matrix."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(6, 8))
    optimizer = MAKERS[name]([{"params": [param], "weight_norm": rule}])
    for step in range(3):
        before = param.detach().clone()
        param.grad = torch.randn_like(param)
        if step == 2:
            param.grad[1, 3] = bad
        optimizer.step()
    after = param.detach()
    assert not after[1, 3].isfinite()
    moved = after.isfinite() & (after != before)
    if rule == "row_floor":
        assert bool(((after - before)[moved].abs() < 10).all()), after
        moved = moved[1]
    assert not moved.any(), after


@pytest.mark.parametrize("name", ["MuonH", "AdamW"])
def test_matrices_of_one_element_are_refused(name: str) -> None:
    """The weights of a pointwise convolution: each number would keep its absolute value."""
    kernel = nn.Parameter(torch.ones(16, 8, 1, 1))
    kernel.grad = torch.ones_like(kernel)
    keys = {"interleaved": 1} if name == "MuonH" else {}
    with pytest.raises(ValueError, match=r"those of .* of shape \[16, 8, 1, 1\] have one element each"):
        MAKERS[name]([{"params": [kernel], **keys}]).step()
    wide = nn.Parameter(torch.randn(4, 8, 3, 3))
    wide.grad = torch.ones_like(wide)
    MAKERS[name]([{"params": [wide], **keys}]).step()


@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.Muon, oxidion.Dion, oxidion.Dion2, oxidion.SOAP])
def test_decay_is_refused(cls: Any) -> None:
    for settings in ({"weight_decay": 0.1}, {"weight_norm": "hyperball"}):
        with pytest.raises(ValueError, match="weight_decay must be 0"):
            cls([nn.Parameter(torch.ones(2, 2))], **{"weight_norm": "hyperball", **settings})


@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.AdEMAMix, oxidion.Lion, oxidion.SOAP])
def test_vectors_are_free(cls: Any) -> None:
    """Biases start at zero; those of a layer with norm-constrained weights move as usual."""
    found = []
    for weight_norm in ("hyperball", "free"):
        layer = nn.Linear(4, 3)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        optimizer = cls(layer.parameters(), weight_norm=weight_norm, weight_decay=0.0)
        for step in range(1, 4):
            layer.weight.grad, layer.bias.grad = torch.ones(3, 4), torch.full((3,), float(step))
            optimizer.step()
        found.append(layer.bias.detach())
        assert ("radius" in optimizer.state[layer.weight]) == (weight_norm == "hyperball")
        assert "radius" not in optimizer.state[layer.bias]
    assert found[0].all()
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["Dion2", "NorDion2"])
def test_a_part_that_moves_turns_all_of_a_matrix(name: str) -> None:
    """X' = X - lr (R/|U|) U with U of one row; then all rows are scaled by the same factor."""
    before = torch.ones(4, 5, dtype=torch.float64)
    param = nn.Parameter(before.clone())
    param.grad = torch.zeros_like(param)
    param.grad[2] = torch.tensor([0.0, 3.0, 0.0, 4.0, 0.0])
    cls = getattr(oxidion, name)
    cls([param], fraction=0.25, orth_method="svd", **SPHERE).step()
    moved = before.clone()
    # orth of a row is the row over its norm; NorDion2 scales it and brings that norm back.
    row = torch.tensor([0.0, 0.6, 0.0, 0.8, 0.0], dtype=torch.float64)
    moved[2] -= 0.1 * before.norm() * row
    moved *= before.norm() / moved.norm()
    torch.testing.assert_close(param.detach(), moved, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    "name", ["MuonH", "Dion", "Dion2", "NorDion2", "AdamW", "AdEMAMix", "Lion", "SOAP", "SOAPMuon"]
)
def test_norm_is_constant_with_states_of_eight_bits(name: str) -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(80, 64))
    keys = {} if name in ("AdamW", "AdEMAMix", "Lion", "SOAP") else {"orth_dtype": "float32"}
    cls = getattr(oxidion, name)
    optimizer = cls([param], state_bits=8, **keys, **{k: v for k, v in SPHERE.items() if name != "MuonH"})
    norm = float(param.detach().double().norm())
    for _ in range(20):
        param.grad = torch.randn_like(param)
        optimizer.step()
    assert any("absmax" in key for key in optimizer.state[param]), "no state is quantized"
    assert abs(float(param.detach().double().norm()) / norm - 1) <= 1e-6


@pytest.mark.parametrize("name", MAKERS)
def test_steps_at_a_rate_of_0_take_no_norm(name: str) -> None:
    """Steps at a rate of 0, with gradients or without, take no norm, move no bit and refuse no zeros."""
    param = nn.Parameter(torch.zeros(12, 20, dtype=torch.float64))
    optimizer = MAKERS[name]([param])
    optimizer.param_groups[0]["lr"] = 0.0
    for grad in (torch.zeros(12, 20), torch.ones(12, 20)):
        param.grad = grad.double()
        optimizer.step()
        assert not param.any()
        assert not optimizer.state[param]["radius"].any()
    optimizer.param_groups[0]["lr"] = 0.1
    with pytest.raises(ValueError, match="all zero"):
        optimizer.step()
    torch.manual_seed(1)
    param.data.copy_(torch.randn(12, 20))
    before, norm = param.detach().clone(), float(param.detach().norm())
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert torch.equal(param, before)
    optimizer.param_groups[0]["lr"] = 0.1
    for _ in range(3):
        param.grad = torch.randn(12, 20, dtype=torch.float64)
        optimizer.step()
    assert not torch.equal(param, before)
    assert float(param.detach().norm()) == pytest.approx(norm, rel=1e-12)
