"""Running means: what is old and large leaves no rounding error behind in what is new and small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.inputs import gaussian

SMALL = (0.3, -0.7, 0.11, 0.9)


def adamw(params: list[nn.Parameter], beta1: float, **keys: Any) -> Any:
    return oxidion.AdamW(params, betas=(beta1, 0.99), **keys)


def ademamix_fast(params: list[nn.Parameter], beta1: float, **keys: Any) -> Any:
    return oxidion.AdEMAMix(params, betas=(beta1, 0.99, 0.999), **keys)


def ademamix_slow(params: list[nn.Parameter], beta3: float, **keys: Any) -> Any:
    return oxidion.AdEMAMix(params, betas=(0.9, 0.99, beta3), **keys)


def lion(params: list[nn.Parameter], beta2: float, **keys: Any) -> Any:
    return oxidion.Lion(params, betas=(0.9, beta2), **keys)


def lamb(params: list[nn.Parameter], beta1: float, **keys: Any) -> Any:
    return oxidion.Lamb(params, betas=(beta1, 0.99), **keys)


OF_GRADIENTS = {
    "adamw": (adamw, "exp_avg"),
    "ademamix-fast": (ademamix_fast, "exp_avg_fast"),
    "ademamix-slow": (ademamix_slow, "exp_avg_slow"),
    "lion": (lion, "exp_avg"),
    "lamb": (lamb, "exp_avg"),
}
every_mean = pytest.mark.parametrize("kind", OF_GRADIENTS)


def mean_of(kind: str, beta: float, grads: list[Tensor], **keys: Any) -> Tensor:
    """The running mean of gradients."""
    make, name = OF_GRADIENTS[kind]
    param = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = make([param], beta, **keys)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    mean: Tensor = optimizer.state[param][name]
    return mean


@every_mean
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("large", [1e3, -1e3, 1e7, 1e18])
def test_mean_without_memory_is_the_last_gradient(kind: str, dtype: torch.dtype, large: float) -> None:
    small = torch.tensor(SMALL, dtype=dtype).repeat(9)
    mean = mean_of(kind, 0.0, [torch.full_like(small, large), small])
    assert torch.equal(mean, small)


@every_mean
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.6, 0.9, 0.999])
@pytest.mark.parametrize("sizes", [(1e7, 1.0), (1.0, 1e7), (1.0, 1.0), (1e-9, 1e9)], ids=str)
def test_mean_of_float32_is_within_three_units_of_its_parts(
    kind: str, beta: float, sizes: tuple[float, float]
) -> None:
    first, second = (size * gaussian((77,), 3, at).float() for at, size in enumerate(sizes))
    mean = mean_of(kind, beta, [first, second])
    parts = [(1 - beta) * beta * first.double(), (1 - beta) * second.double()]
    # Of beta and 1 - beta too float32 has the nearest number; twice for what is two steps old.
    bound = 3 * torch.finfo(torch.float32).eps * (parts[0].abs() + parts[1].abs())
    assert bool(((mean.double() - sum(parts)).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["adamw", "ademamix-fast", "ademamix-slow"])
def test_mean_of_equal_gradients_ends_at_the_gradient(kind: str) -> None:
    grad = gaussian((33,), 5).float()
    mean = mean_of(kind, 0.5, [grad] * 60)
    # No further than where a step of half the distance rounds to nothing.
    assert bool(((mean - grad).abs() <= 2 * torch.finfo(torch.float32).eps * grad.abs()).all())


@pytest.mark.parametrize("kind", ["adamw", "ademamix-fast", "ademamix-slow"])
@pytest.mark.parametrize("beta", [0.5, 0.9])  # with 0.5 the distance of two numbers is beyond float32
def test_mean_of_the_largest_numbers_of_either_sign_is_finite(kind: str, beta: float) -> None:
    grad = torch.full((4,), 3e38)
    mean = mean_of(kind, beta, [grad, -grad, grad])
    expected = 3e38 * (1 - beta) * (beta**2 - beta + 1)
    torch.testing.assert_close(mean, torch.full((4,), expected), rtol=1e-6, atol=0)


def test_memoryless_8_bit_mean_is_the_last_gradient_in_8_bits() -> None:
    small = gaussian((5000,), 8).float()
    param = nn.Parameter(torch.zeros_like(small))
    ends = []
    # As many steps: with a step go its random bits.
    for grads in ([torch.full_like(small, 1e7), small], [small, small]):
        optimizer: Any = adamw([param], 0.0, state_bits=8)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        state = optimizer.state[param]
        assert state["exp_avg"].dtype == torch.uint8
        ends.append((state["exp_avg"], state["exp_avg_absmax"]))
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


@pytest.mark.parametrize("cls", [oxidion.Adafactor, oxidion.CAME], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("shape", [(4, 3), (5,)], ids=str)
def test_memoryless_second_moments_come_from_the_last_gradient(cls: Any, shape: tuple[int, ...]) -> None:
    keys = {"betas": (0.9, 0.0, 0.99)} if cls is oxidion.CAME else {"relative_step": False, "decay_rate": 0.0}
    param = nn.Parameter(torch.zeros(shape))
    optimizer = cls([param], lr=1e-3, **keys)
    small = gaussian(shape, 2).float()
    for grad in (torch.full(shape, 1e9), small):
        param.grad = grad.clone()
        optimizer.step()
    squares, state = small.double().square(), optimizer.state[param]
    if len(shape) == 1:
        torch.testing.assert_close(state["exp_avg_sq"].double(), squares, rtol=1e-6, atol=0)
    else:
        torch.testing.assert_close(state["exp_avg_sq_row"].double(), squares.mean(-1), rtol=1e-6, atol=0)
        torch.testing.assert_close(state["exp_avg_sq_col"].double(), squares.mean(-2), rtol=1e-6, atol=0)


def test_memoryless_neuron_variance_is_that_of_the_last_update() -> None:
    param = nn.Parameter(torch.zeros(6, 4))
    optimizer: Any = oxidion.NorMuon([param], muon_beta2=0.0)
    param.grad = gaussian((6, 4), 1).float()
    optimizer.step()
    key = next(key for key in optimizer.state[param] if "variance" in key)
    wanted = optimizer.state[param][key].clone()
    optimizer.state[param][key].fill_(1e20)
    optimizer.state[param]["momentum"].zero_()
    param.grad = gaussian((6, 4), 1).float()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[param][key], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cls", [oxidion.GaLoreAdamW, oxidion.APOLLOAdamW], ids=lambda cls: cls.__name__)
def test_memoryless_low_rank_mean_is_that_of_the_last_gradient(cls: Any) -> None:
    means = []
    for first in (1e7, None):
        param = nn.Parameter(torch.zeros(12, 8))
        optimizer = cls([{"params": [param], "rank": 4}], betas=(0.0, 0.99), update_proj_gap=1000)
        # One direction, so that both runs project on the same basis.
        direction = gaussian((12, 8), 4).float()
        param.grad = (first or 1.0) * direction
        optimizer.step()
        param.grad = 0.3 * direction
        optimizer.step()
        means.append(optimizer.state[param]["exp_avg"])
    torch.testing.assert_close(means[0], means[1], rtol=1e-4, atol=1e-6)
