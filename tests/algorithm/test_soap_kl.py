"""SOAP whose factors are whitened by each other: equations, the least eigenvalue, and one basis alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.asserts import update_relative_error
from support.inputs import gaussian

KL: dict[str, Any] = {
    "variant": "kl",
    "betas": (0.95, 0.9),
    "precondition_frequency": 1,
    "correct_bias": False,
}
NAMES = ("L", "R", "eigen_left", "eigen_right")


def steps(shape: tuple[int, ...], count: int, **kwargs: Any) -> tuple[nn.Parameter, Any]:
    """A parameter after some steps, and its optimizer."""
    param = nn.Parameter(gaussian(shape, 1))
    optimizer = oxidion.SOAP([param], **{**KL, **kwargs})
    for step in range(count):
        param.grad = gaussian(shape, 2, step)
        optimizer.step()
    return param, optimizer


def test_first_gradient_makes_whole_factors_and_moves_nothing() -> None:
    param, optimizer = steps((12, 8), 1)
    state, grad = optimizer.state[param], gaussian((12, 8), 2, 0)
    assert torch.equal(param.detach(), gaussian((12, 8), 1))
    torch.testing.assert_close(state["L"], grad @ grad.mT / 8)
    torch.testing.assert_close(state["R"], grad.mT @ grad / 12)
    assert state["eigen_left"].shape == (12,)
    assert state["eigen_right"].shape == (8,)
    # A zero stands for the start, 0.1.
    assert not state["eigen_left"].any()
    assert not state["eigen_right"].any()
    for name in ("L", "R"):
        basis = state[f"Q_{name}"]
        torch.testing.assert_close(basis.mT @ basis, torch.eye(len(basis), dtype=torch.float64))


def test_each_factor_takes_what_the_other_one_whitens() -> None:
    m, n, beta = 12, 8, 0.9
    param, optimizer = steps((m, n), 1, precondition_frequency=100)
    state = optimizer.state[param]
    left, right = torch.full((m,), 0.1).double(), torch.full((n,), 0.1).double()
    for step in range(1, 6):
        before = {key: value.clone() for key, value in state.items()}
        param.grad = gaussian((m, n), 2, step)
        optimizer.step()
        y = before["Q_L"].mT @ param.grad @ before["Q_R"]
        a = param.grad @ before["Q_R"] / right.sqrt()
        b = (before["Q_L"].mT @ param.grad) / left.sqrt()[:, None]
        torch.testing.assert_close(state["L"], beta * before["L"] + (1.0 - beta) / n * a @ a.mT)
        torch.testing.assert_close(state["R"], beta * before["R"] + (1.0 - beta) / m * b.mT @ b)
        left, right = (
            beta * left + (1.0 - beta) * (y**2 / right).mean(1),
            beta * right + (1.0 - beta) * (y**2 / left[:, None]).mean(0),
        )
        torch.testing.assert_close(state["eigen_left"], left)
        torch.testing.assert_close(state["eigen_right"], right)


def turn(size: int, seed: int) -> Tensor:
    """An orthogonal matrix."""
    return torch.linalg.qr(gaussian((size, size), seed))[0]


def run(start: Tensor, grads: list[Tensor], **kwargs: Any) -> Tensor:
    """The parameter after these gradients."""
    param = nn.Parameter(start.clone())
    optimizer = oxidion.SOAP([param], lr=0.01, **{**KL, **kwargs})
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


def test_rotated_gradients_give_the_rotated_run() -> None:
    start, grads = gaussian((24, 24), 1), [gaussian((24, 24), 2, step) for step in range(8)]
    a, b = turn(24, 3), turn(24, 4)
    plain, turned = run(start, grads), run(a @ start @ b.mT, [a @ grad @ b.mT for grad in grads])
    # Rounding grows by the condition of the first factors, as in SOAP: 3e-14 to 1e-12 on eight sets.
    assert update_relative_error(turned, a @ start @ b.mT, a @ (plain - start) @ b.mT) <= 5e-12
    assert update_relative_error(run(start, grads, variant="soap"), start, plain - start) > 0.1


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)], ids=str)
@pytest.mark.parametrize("frequency", [1, 3])
def test_rounding_of_gradients_changes_a_run_by_rounding(shape: tuple[int, int], frequency: int) -> None:
    start, grads = gaussian(shape, 1), [gaussian(shape, 2, step) for step in range(12)]
    noisy = [grad * (1.0 + 2.0**-52 * gaussian(shape, 3, i).sign()) for i, grad in enumerate(grads)]
    first, second = (run(start, own, precondition_frequency=frequency) for own in (grads, noisy))
    assert update_relative_error(second, start, first - start) <= 1e-12


def test_nothing_is_whitened_by_more_than_4000() -> None:
    param = nn.Parameter(gaussian((6, 5), 1))
    optimizer = oxidion.SOAP([param], **{**KL, "shampoo_beta": 0.1})
    for step in range(12):
        param.grad = 2.0**-40 * gaussian((6, 5), 2, step)
        optimizer.step()
    for name in ("eigen_left", "eigen_right"):
        assert optimizer.state[param][name].tolist() == [1.0 / (4000.0 * 4000.0)] * len(
            optimizer.state[param][name]
        )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradient_that_is_not_finite_changes_no_factor_and_no_eigenvalue(bad: float) -> None:
    param, optimizer = steps((6, 5), 3)
    state = optimizer.state[param]
    before = {key: state[key].clone() for key in NAMES}
    param.grad = gaussian((6, 5), 2, 3)
    param.grad[1, 2] = bad
    optimizer.step()
    assert all(torch.equal(state[key], before[key]) for key in NAMES)
    assert all(value.any() for value in before.values())


def test_zero_gradients_make_no_basis_and_leave_eigenvalues_at_their_start() -> None:
    # Of a square all directions of the first bases are told by the gradient.
    param = nn.Parameter(gaussian((2, 6, 6), 1))
    optimizer: Any = oxidion.SOAP([param], weight_decay=0.0, **KL)
    alone: Any = oxidion.SOAP([nn.Parameter(param[1].detach().clone())], weight_decay=0.0, **KL)
    (other,) = alone.param_groups[0]["params"]
    for step in range(6):
        grad = gaussian((2, 6, 6), 2, step)
        grad[1] *= step >= 2
        param.grad = grad
        optimizer.step()
        if step >= 2:
            other.grad = grad[1].clone()
            alone.step()
    assert optimizer.state[param]["basis_step"].tolist() == [1.0, 3.0]
    for key in NAMES:
        torch.testing.assert_close(optimizer.state[param][key][1], alone.state[other][key])
    torch.testing.assert_close(param.detach()[1], other.detach())


@pytest.mark.parametrize("shape", [(12, 8), (8, 12)], ids=str)
def test_one_basis_has_nothing_to_be_whitened_by(shape: tuple[int, int]) -> None:
    settings = {"max_precondition_dim": 8, "precondition_frequency": 100}
    param, optimizer = steps(shape, 5, **settings)
    assert not {"eigen_left", "eigen_right"} & optimizer.state[param].keys()
    # One basis, made by the first gradient: the run is that of SOAP.
    plain, _ = steps(shape, 5, variant="soap", **settings)
    torch.testing.assert_close(param.detach(), plain.detach(), rtol=1e-12, atol=1e-12)
    name, length, across = ("R", 1, 12) if shape[0] > 8 else ("L", 0, 12)
    grads = [gaussian(shape, 2, step) for step in range(5)]
    squares = [grad.mT @ grad if length else grad @ grad.mT for grad in grads]
    expected = squares[0]
    for square in squares[1:]:
        expected = 0.9 * expected + 0.1 * square
    torch.testing.assert_close(optimizer.state[param][name], expected / across)


@pytest.mark.parametrize("sides", ["short", "unsharded"])
def test_one_side_alone_is_refused(sides: str) -> None:
    param = nn.Parameter(torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"sides must be 'both'.*there is no one-sided KL"):
        oxidion.SOAP([param], variant="kl", sides=sides)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"there is no one-sided KL"):
        oxidion.SOAP([{"params": [param], "variant": "kl"}], sides=sides)  # type: ignore[arg-type]
    optimizer = oxidion.SOAP([param], variant="kl")
    optimizer.param_groups[0]["sides"] = sides
    param.grad = torch.ones_like(param)
    with pytest.raises(ValueError, match=r"there is no one-sided KL"):
        optimizer.step()


@pytest.mark.parametrize("bits", [32, 8])
def test_checkpoint_goes_on_bit_equal(bits: int) -> None:
    shapes = ((80, 64), (6, 5), (3, 4, 5), (7,))
    runs = []
    for resumes in (False, True):
        params = [nn.Parameter(gaussian(shape, 1).float()) for shape in shapes]
        optimizer: Any = oxidion.SOAP(params, state_bits=bits, **KL)
        for step in range(6):
            if resumes and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = oxidion.SOAP(params)
                optimizer.load_state_dict(saved)
                assert optimizer.param_groups[0]["variant"] == "kl"
            for param, shape in zip(params, shapes, strict=True):
                param.grad = gaussian(shape, 2, step).float()
            optimizer.step()
        runs.append([param.detach() for param in params])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_steps_of_soap_may_go_on_as_those_of_the_variant() -> None:
    param, optimizer = steps((6, 5), 3, variant="soap")
    optimizer.param_groups[0]["variant"] = "kl"
    param.grad = gaussian((6, 5), 2, 3)
    y = optimizer.state[param]["Q_L"].mT @ param.grad @ optimizer.state[param]["Q_R"]
    optimizer.step()
    expected = 0.09 + 0.1 * (y**2 / 0.1).mean(1)
    torch.testing.assert_close(optimizer.state[param]["eigen_left"], expected)


def test_verify_and_explain() -> None:
    param, optimizer = steps((12, 8), 3)
    param.grad = gaussian((12, 8), 2, 3)
    assert optimizer.verify()[0]["update_error"] <= 1e-9
    flops = optimizer.explain()[0]["flops"]
    _, plain = steps((12, 8), 1, variant="soap")
    # Two products more: G Q_R and Q_L^T G.
    assert flops - plain.explain()[0]["flops"] == 2 * 12 * 8 * (12 + 8)
