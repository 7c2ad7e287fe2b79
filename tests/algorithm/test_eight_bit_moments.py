"""8-bit moments: small numbers in a block with large ones, and unbiased rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support import code_books
from support.inputs import gaussian

WIDTH = 256
SHORT: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.99)}
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (oxidion.AdamW, SHORT),
    "Lamb": (oxidion.Lamb, SHORT),
    "AdEMAMix": (oxidion.AdEMAMix, {**SHORT, "betas": (0.9, 0.99, 0.999)}),
    "Muon adamw": (oxidion.Muon, SHORT),
    "GaLoreAdamW": (oxidion.GaLoreAdamW, {**SHORT, "rank": 2}),
    "APOLLOAdamW": (oxidion.APOLLOAdamW, {**SHORT, "rank": 2}),
    "SOAP": (oxidion.SOAP, {**SHORT, "sides": "short"}),
    "SOAPMuon": (oxidion.SOAPMuon, {"lr": 1e-3, "beta2": 0.99, "sides": "short"}),
}
"""All that have a second moment of each element, whose average is of some 100 steps."""
SIZES = torch.logspace(0, -6, 13)


def steps(name: str, grads: list[Tensor], bits: int, **group: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Steps of a parameter that is 0 before each, and the states that they leave."""
    cls, keys = CLASSES[name]
    param = nn.Parameter(torch.zeros_like(grads[0]))
    if name == "Muon adamw":
        group |= {"algorithm": "adamw"}
    own = {"params": [param], "min_quant_numel": 0, **group}
    optimizer: Any = cls([own], state_bits=bits, weight_decay=0.0, **keys)
    taken = []
    for grad in grads:
        param.data.zero_()
        param.grad = grad.clone()
        optimizer.step()
        taken.append(param.detach().clone())
    return torch.stack(taken), optimizer.state[param]


def second_moment(state: dict[str, Tensor]) -> Tensor:
    """The quantized second moment."""
    (found,) = (value for key, value in state.items() if key in ("exp_avg_sq", "variance"))
    assert found.dtype == torch.uint8
    return found


def size(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@pytest.mark.parametrize("name", CLASSES)
def test_steps_of_small_elements_among_large_ones_match_float32(name: str) -> None:
    sizes = SIZES[torch.arange(WIDTH) % len(SIZES)]
    grads = [gaussian((4, WIDTH), 1, step).float() * sizes for step in range(300)]
    found, state = steps(name, grads, 8)
    expected, _ = steps(name, grads, 32)
    assert bool((second_moment(state) > 0).all()), "a positive number became 0"
    for index, own in enumerate(SIZES):
        columns = torch.arange(WIDTH) % len(SIZES) == index
        ratio = size(found[200:, :, columns]) / size(expected[200:, :, columns])
        # Of squares the book ends at 2e-11, 5e-6 squared: below it they are too large, and steps too small.
        assert ratio <= 1.15, (float(own), ratio)
        assert ratio >= 0.85 or own < 1e-5, (float(own), ratio)


@pytest.mark.parametrize("beta2", [0.99, 0.999])
@pytest.mark.parametrize("outlier", [300.0, 3e4])
def test_one_large_gradient_leaves_the_steps_of_its_neighbours(outlier: float, beta2: float) -> None:
    grads = [gaussian((8, WIDTH), 2, step).float() for step in range(500)]
    grads[100][:, 0] = outlier
    taken = []
    for bits in (8, 32):
        param = nn.Parameter(torch.zeros_like(grads[0]))
        group = {"params": [param], "min_quant_numel": 0}
        optimizer = oxidion.AdamW([group], lr=1e-3, betas=(0.9, beta2), weight_decay=0.0, state_bits=bits)
        taken.append([])
        for grad in grads:
            param.data.zero_()
            param.grad = grad.clone()
            optimizer.step()
            taken[-1].append(param.detach()[:, 1:].clone())
    found, expected = map(torch.stack, taken)
    for start in (80, 101, 200, 300, 480):
        ratio = size(found[start : start + 20]) / size(expected[start : start + 20])
        # Quantization noise makes the mean of 1 / sqrt(v) larger: by 4 % where a power of two has 4 entries.
        assert abs(ratio - 1) <= 0.06, (start, ratio)


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.95, 0.95), (0.9, 0.999)])
@pytest.mark.parametrize("end", [0.0, 1e-4])
@pytest.mark.parametrize("name", ["AdamW", "Lamb", "Muon adamw", "GaLoreAdamW", "APOLLOAdamW"])
def test_moments_of_gradients_that_fall_or_end_follow_them(
    name: str, end: float, betas: tuple[float, float]
) -> None:
    """With rounding to nearest, a small momentum would never decay, while its second moment would."""
    falls = torch.where(torch.arange(WIDTH) < 128, 1.0, 0.0)
    grads = [gaussian((4, WIDTH), 4, step).float() for step in range(400)]
    for step, grad in enumerate(grads):
        grad[:, 0] = 10.0
        if step >= 50:
            grad *= falls + (1.0 - falls) * end
    taken = []
    for bits in (8, 32):
        cls, keys = CLASSES[name]
        param = nn.Parameter(torch.zeros(4, WIDTH))
        group: dict[str, Any] = {"params": [param], "min_quant_numel": 0}
        group |= {"algorithm": "adamw"} if name == "Muon adamw" else {}
        optimizer: Any = cls([group], state_bits=bits, weight_decay=0.0, **{**keys, "betas": betas})
        steps = []
        for grad in grads:
            param.data.zero_()
            param.grad = grad.clone()
            optimizer.step()
            steps.append(param.detach()[:, 128:].clone())
        taken.append(size(torch.stack(steps[200:])))
    # What is 0 in float32 may be some of a step in 8 bits.
    assert taken[0] <= 1.5 * taken[1] + 2e-5, taken


@pytest.mark.parametrize("least", [0.3, 0.03])
def test_momentum_of_lion_turns_with_the_gradient(least: float) -> None:
    """A step changes it by 1 %, less than half of the distance of two entries."""
    param = nn.Parameter(torch.zeros(4, WIDTH))
    group = {"params": [param], "min_quant_numel": 0}
    optimizer = oxidion.Lion([group], lr=1e-3, weight_decay=0.0, state_bits=8)
    for step in range(900):
        param.grad = torch.full((4, WIDTH), least if step < 300 else -least)
        param.grad[:, 0] = 1.0
        optimizer.step()
    # The last 600 of 900 steps go upwards, but for some 70: by noise, which has no bias, not all of them.
    assert float(param.detach()[:, 1:].mean()) > 0.05


@pytest.mark.parametrize("least", [1e-3, 1e-6])
def test_soap_steps_in_a_basis_of_falling_sizes_match_float32(least: float) -> None:
    rows, cols = 16, 64
    left, right = (torch.linalg.qr(gaussian((n, n), n)).Q.float() for n in (rows, cols))
    along, across = (
        torch.logspace(0, 0.5 * torch.log10(torch.tensor(least)).item(), n) for n in (rows, cols)
    )
    grads = [
        left @ (along[:, None] * gaussian((rows, cols), 3, step).float() * across) @ right
        for step in range(250)
    ]
    taken = []
    for bits in (8, 32):
        param = nn.Parameter(torch.zeros(rows, cols))
        group = {"params": [param], "min_quant_numel": 0, "block_size": 64}
        optimizer = oxidion.SOAP([group], lr=1e-3, weight_decay=0.0, state_bits=bits)
        taken.append([])
        for grad in grads:
            param.data.zero_()
            param.grad = grad.clone()
            optimizer.step()
            taken[-1].append(param.detach().clone())
        assert (optimizer.state[param]["exp_avg_sq"].dtype == torch.uint8) == (bits == 8)
    found, expected = (torch.stack(own)[150:] for own in taken)
    assert size(found) <= 1.05 * size(expected)
    assert size(found - expected) <= 0.15 * size(expected)


def stored_again_and_again(q: Tensor, rounds: int) -> Tensor:
    """Second moments of these sizes as each of ``rounds`` steps stores them again; the largest are 1."""
    param = nn.Parameter(torch.zeros_like(q))
    group = {"params": [param], "min_quant_numel": 0, "block_size": WIDTH}
    optimizer = oxidion.AdamW([group], betas=(0.9, 0.0), state_bits=8)
    found = []
    for _ in range(rounds):
        param.grad = q.sqrt()
        optimizer.step()
        state = optimizer.state[param]
        assert bool((state["exp_avg_sq_absmax"] == 1.0).all())
        found.append(code_books.decode(state["exp_avg_sq"], state["exp_avg_sq_absmax"], signed=False))
    return torch.stack(found)


def test_mean_of_what_is_stored_is_the_number() -> None:
    """By size, over elements and steps: the distance of entries is 1/32, 1/8 and 1/4 of a power of two."""
    sizes = torch.tensor([0.99, 0.71, 0.26, 0.24, 0.03, 1.1e-3, 1.7e-5, 1.3e-5, 1e-7, 7.7e-9, 3.1e-11])
    rows, rounds = 64, 32
    q = sizes[:, None, None].expand(-1, rows, WIDTH).reshape(-1, WIDTH).clone()
    q[:, 0] = 1.0
    exact = q.sqrt().square()[::rows, 1].double()  # as the step squares it
    found = stored_again_and_again(q, rounds)[:, :, 1:].reshape(rounds, len(sizes), rows, WIDTH - 1)
    entries = code_books.book(False)
    low = entries[(exact[:, None] >= entries).sum(1) - 1]
    high = entries[(exact[:, None] >= entries).sum(1)]
    assert bool(((found == low[None, :, None, None]) | (found == high[None, :, None, None])).all())
    share = (exact - low) / (high - low)
    deviation = (high - low) * (share * (1 - share) / (rounds * rows * (WIDTH - 1))).sqrt()
    mean = found.mean((0, 2, 3))
    assert bool(((mean - exact).abs() <= 5 * deviation + 2.0**-16 * (high - low)).all())
    # Of one element over the steps too: each has random numbers of its own in each step.
    ups = (found == high[None, :, None, None]).double().mean(0)
    spread = (share * (1 - share) / rounds).sqrt()
    assert bool(((ups.std((1, 2)) / spread - 1).abs() <= 0.05).all())


def test_random_numbers_of_elements_and_of_steps_are_not_related() -> None:
    q = torch.full((256, WIDTH), 0.3)
    q[:, 0] = 1.0
    found = stored_again_and_again(q, 6)[:, :, 1:]
    ups = (found > 0.3).double()
    ups -= ups.mean()
    variance = float(ups.square().mean())
    assert variance >= 0.2
    shifts = {
        "steps": ups[1:] * ups[:-1],
        "neighbours": ups[:, :, 1:] * ups[:, :, :-1],
        "pairs": ups[:, :, 2:] * ups[:, :, :-2],
        "rows": ups[:, 1:] * ups[:, :-1],
    }
    for name, products in shifts.items():
        # Means of products of numbers that are not related have this deviation.
        assert abs(float(products.mean())) <= 5 * variance / products.numel() ** 0.5, name


def test_second_moments_that_stay_do_not_drift() -> None:
    """A constant gradient: the average of its squares stays what it is, over many steps that round it."""
    grad = torch.logspace(0, -4, WIDTH).repeat(16, 1)
    param = nn.Parameter(torch.zeros_like(grad))
    group = {"params": [param], "min_quant_numel": 0}
    optimizer = oxidion.AdamW([group], betas=(0.9, 0.99), state_bits=8, lr=0.0)
    total = torch.zeros_like(grad, dtype=torch.float64)
    for step in range(900):
        param.grad = grad.clone()
        optimizer.step()
        if step >= 500:
            state = optimizer.state[param]
            total += code_books.decode(state["exp_avg_sq"], state["exp_avg_sq_absmax"], signed=False)
    ratio = (total / 400 / grad.double().square()).mean(0)
    # Rounded to the nearest it would stand still up to half of the distance of entries away: 6 % and more.
    assert bool(((ratio.view(-1, 16).mean(1) - 1).abs() <= 0.03).all()), ratio.view(-1, 16).mean(1)
