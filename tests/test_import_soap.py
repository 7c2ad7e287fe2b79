"""Checkpoints of the SOAP authors' optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict
from support.inputs import gaussian

GROUP: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "shampoo_beta": -1,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "precondition_frequency": 2,
    "max_precond_dim": 10,
    "merge_dims": False,
    "precondition_1d": False,
    "normalize_grads": False,
    "correct_bias": True,
}
"""Keys of a group as the authors' constructor writes them."""


def rotated(state: dict[str, Tensor]) -> Tensor:
    """The first moment as the authors keep it: in the bases."""
    moment = state["exp_avg"]
    if "Q_L" in state:
        moment = state["Q_L"].mT @ moment
    return moment @ state["Q_R"] if "Q_R" in state else moment


def theirs(optimizer: Any, params: list[nn.Parameter]) -> dict[str, Any]:
    """A state dict of this package in the authors' form."""
    states = {}
    for number, param in enumerate(params):
        state = optimizer.state[param]
        names = ("L", "R") if param.ndim == 2 else ("none",)
        states[number] = {
            "step": int(state["step"]) - 1,
            "exp_avg": rotated(state) if param.ndim == 2 else state["exp_avg"],
            "exp_avg_sq": state["exp_avg_sq"],
            "GG": [state.get(name, []) for name in names],
            "Q": [state.get(f"Q_{name}", []) for name in names],
        }
    return {"state": states, "param_groups": [{**GROUP, "params": list(range(len(params)))}]}


def test_imported_run_goes_on_as_the_one_that_was_saved() -> None:
    shapes = ((8, 8), (10, 6), (6, 12), (5,))
    keys = {key: GROUP[key] for key in ("lr", "betas", "eps", "weight_decay", "precondition_frequency")}
    params = [nn.Parameter(gaussian(shape, 1, i)) for i, shape in enumerate(shapes)]
    optimizer = oxidion.SOAP(params, max_precondition_dim=10, **keys)

    def step(made: Any, own: list[nn.Parameter], number: int) -> None:
        for i, param in enumerate(own):
            param.grad = gaussian(param.shape, 2, number, i)
        made.step()

    for number in range(4):
        step(optimizer, params, number)
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    other = oxidion.SOAP(copies)
    other.load_state_dict(import_state_dict(theirs(optimizer, params), "soap", other))
    assert other.param_groups[0]["max_precondition_dim"] == 10
    assert other.param_groups[0]["shampoo_beta"] is None
    for number in range(4, 8):
        step(optimizer, params, number)
        step(other, copies, number)
    for param, copy in zip(params, copies, strict=True):
        # The first moment went through the bases and back.
        assert torch.allclose(param, copy, rtol=0, atol=1e-12)


@pytest.mark.parametrize("key", ["merge_dims", "precondition_1d"])
def test_settings_without_a_counterpart_are_refused(key: str) -> None:
    saved = {"state": {}, "param_groups": [{**GROUP, key: True, "params": [0]}]}
    with pytest.raises(ValueError, match=f"{key}=True"):
        import_state_dict(saved, "soap")


def test_bases_of_three_dimensions_are_refused() -> None:
    cube, square = torch.zeros(2, 3, 4), torch.eye(3)
    state = {"step": 1, "exp_avg": cube, "exp_avg_sq": cube, "GG": [square] * 3, "Q": [square] * 3}
    with pytest.raises(ValueError, match="3 dimensions"):
        import_state_dict({"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}, "soap")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("GG", 3, r"GG must be a list of floating-point matrices, .*, got 3 \(the state of parameter 0"),
        ("Q", [torch.eye(3), None], "Q must be a list"),
        ("Q", [torch.eye(3)], "'GG' and 'Q', lists of one entry for each dimension"),
        ("Q", [torch.eye(2), torch.eye(2)], r"basis of side L must have shape \(3, 3\).*got \(2, 2\)"),
        ("GG", [torch.eye(3), []], r"factor of side R must have shape \(2, 2\).*got \(\)"),
    ],
)
def test_bases_that_do_not_fit_are_refused_by_name(key: str, value: Any, message: str) -> None:
    sides = [torch.eye(3), torch.eye(2)]
    state = {"step": 1, "exp_avg": torch.ones(3, 2), "exp_avg_sq": torch.ones(3, 2), "GG": sides, "Q": sides}
    saved = {"state": {0: state}, "param_groups": [{**GROUP, "params": [0]}]}
    assert import_state_dict(saved, "soap")["state"][0]["step"] == 2
    state[key] = value
    with pytest.raises(ValueError, match=message):
        import_state_dict(saved, "soap")


class Peer:
    """SOAP by its formulas in the form of pytorch_optimizer: steps are counted by group, M is not turned."""

    def __init__(self, params: list[nn.Parameter], group: dict[str, Any]) -> None:
        self.params, self.group = params, {**group, "step": 0}
        self.states: list[dict[str, Any]] = [{} for _ in params]

    def step(self, grads: list[Tensor]) -> None:
        """Moves the parameters; the first gradient makes the bases."""
        self.group["step"] += 1
        with torch.no_grad():
            for param, state, grad in zip(self.params, self.states, grads, strict=True):
                self.move(param, state, grad)

    def sides(self, grad: Tensor) -> list[int]:
        """Sides that are not too long."""
        limit = self.group["max_precondition_dim"]
        return [at for at, length in enumerate(grad.shape) if grad.ndim == 2 and length <= limit]

    def move(self, param: Tensor, state: dict[str, Any], grad: Tensor) -> None:
        """A step of one parameter."""
        group, count = self.group, self.group["step"] - 1
        beta1, beta2 = group["betas"]
        beta = beta2 if group["shampoo_beta"] is None else group["shampoo_beta"]
        squares = [grad @ grad.mT, grad.mT @ grad] if grad.ndim == 2 else [grad]
        if count == 0:
            kept = range(max(grad.ndim, 1))
            state.update(exp_avg=torch.zeros_like(grad), exp_avg_sq=torch.zeros_like(grad))
            state["GG"] = [(1 - beta) * squares[i] if i in self.sides(grad) else [] for i in kept]
            state["Q"] = [torch.linalg.eigh(f)[1].flip(1) if len(f) else [] for f in state["GG"]]
            return
        turns = [
            q if len(q) else torch.eye(n, dtype=grad.dtype)
            for q, n in zip(state["Q"], grad.shape, strict=True)
        ]
        left, right = turns if grad.ndim == 2 else (None, None)
        inside = left.mT @ grad @ right if grad.ndim == 2 else grad
        m, v = state["exp_avg"], state["exp_avg_sq"]
        m.lerp_(grad, 1 - beta1)
        v.lerp_(inside.square(), 1 - beta2)
        turned = left.mT @ m @ right if grad.ndim == 2 else m
        update = turned / (v.sqrt() + group["eps"])
        update = left @ update @ right.mT if grad.ndim == 2 else update
        if group["normalize_gradient"]:
            update = update / update.square().mean().sqrt()
        factor = (1 - beta2**count) ** 0.5 / (1 - beta1**count) if group["correct_bias"] else 1.0
        param -= group["lr"] * factor * update
        param *= 1 - group["lr"] * group["weight_decay"]
        for side in self.sides(grad):
            state["GG"][side] = beta * state["GG"][side] + (1 - beta) * squares[side]
            if count % group["precondition_frequency"] == 0:
                factor_, basis = state["GG"][side], state["Q"][side]
                order = (basis.mT @ factor_ @ basis).diagonal().argsort(descending=True)
                state["Q"][side] = torch.linalg.qr(factor_ @ basis[:, order])[0]
                v.copy_(v.index_select(side, order))

    def state_dict(self) -> dict[str, Any]:
        """As torch makes it."""
        places = range(len(self.params))
        own = [{**s, "precondition_frequency": 2, "shampoo_beta": 0.9} for s in self.states]
        return {
            "state": dict(zip(places, own, strict=True)),
            "param_groups": [{**self.group, "params": [*places]}],
        }


PEERS_GROUP: dict[str, Any] = {
    "lr": 0.01,
    "betas": (0.9, 0.95),
    "shampoo_beta": None,
    "weight_decay": 0.1,
    "precondition_frequency": 2,
    "max_precondition_dim": 10,
    "merge_dims": False,
    "precondition_1d": False,
    "correct_bias": True,
    "normalize_gradient": False,
    "eps": 1e-8,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"normalize_gradient": True, "shampoo_beta": 0.8, "precondition_frequency": 3},
        {"correct_bias": False, "max_precondition_dim": 100},
    ],
    ids=["default", "normalized", "plain"],
)
def test_run_of_pytorch_optimizer_goes_on(settings: dict[str, Any]) -> None:
    shapes = ((8, 8), (10, 6), (6, 12), (5,))
    params = [nn.Parameter(gaussian(shape, 1, i)) for i, shape in enumerate(shapes)]

    def grads(number: int) -> list[Tensor]:
        return [gaussian(shape, 2, number, i) for i, shape in enumerate(shapes)]

    peer = Peer(params, {**PEERS_GROUP, **settings})
    for number in range(5):
        peer.step(grads(number))
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer: Any = oxidion.SOAP(copies)
    saved = peer.state_dict()
    optimizer.load_state_dict(import_state_dict(saved, "soap", optimizer))
    [group] = optimizer.param_groups
    assert group["max_precondition_dim"] == peer.group["max_precondition_dim"]
    assert group["normalize_grads"] == peer.group["normalize_gradient"]
    assert "normalize_gradient" not in group
    assert group["shampoo_beta"] == peer.group["shampoo_beta"]
    assert group["step"] == 5
    start = [copy.detach().clone() for copy in copies]
    for number in range(5, 11):
        peer.step(grads(number))
        for copy, grad in zip(copies, grads(number), strict=True):
            copy.grad = grad
        optimizer.step()
    for param, copy, old in zip(params, copies, start, strict=True):
        assert torch.allclose(param, copy, rtol=0, atol=1e-12)
        assert (copy - old).abs().max() > 1e-3
    again = import_state_dict(saved, "soap")
    assert torch.equal(again["state"][0]["exp_avg"], saved["state"][0]["exp_avg"])


@pytest.mark.parametrize("key", ["merge_dims", "precondition_1d"])
def test_unmatched_pytorch_optimizer_settings_are_refused(key: str) -> None:
    saved = {"state": {}, "param_groups": [{**PEERS_GROUP, key: True, "params": [0]}]}
    with pytest.raises(ValueError, match=f"{key}=True"):
        import_state_dict(saved, "soap")


EMERGING: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize(
    "more", [{}, {"shampoo_beta": 0.8}, {"shampoo_beta": -1.0}], ids=["left-out", "set", "none"]
)
def test_states_of_emerging_optimizers_are_taken_as_they_are(more: dict[str, Any]) -> None:
    """Flat names, the first moment in the bases, steps without the one that is to come."""
    (m, n), beta = (6, 4), 0.95
    grad, moment = gaussian((m, n), 1, 0), gaussian((m, n), 1, 1)
    left, right = grad @ grad.mT, grad.mT @ grad
    state: dict[str, Any] = {"step": 7, "L": left, "R": right, "exp_avg_sq": gaussian((m, n), 1, 2).square()}
    state |= {"Q_L": torch.linalg.eigh(left)[1], "Q_R": torch.linalg.eigh(right)[1]}
    state |= {"exp_avg": state["Q_L"].mT @ moment @ state["Q_R"]}
    state |= {"eigvals_L": torch.ones(m), "eigvals_R": torch.ones(n)}
    saved = {"state": {0: state}, "param_groups": [{**EMERGING, **more, "params": [0]}]}
    param = nn.Parameter(gaussian((m, n), 1, 3))
    optimizer: Any = oxidion.SOAP([param], max_precondition_dim=3, sides="short")
    optimizer.load_state_dict(import_state_dict(saved, "soap", optimizer))
    [group], own = optimizer.param_groups, optimizer.state[param]
    for key in ("L", "R", "Q_L", "Q_R", "exp_avg_sq"):
        assert torch.equal(own[key], state[key]), key
    assert (own["exp_avg"] - moment).abs().max() <= 1e-14
    assert float(own["step"]) == 8
    wanted = {"sides": "both", "precondition_frequency": 1, "decay_order": "torch"}
    assert {key: group[key] for key in wanted} == wanted
    assert group["shampoo_beta"] == (0.8 if more.get("shampoo_beta", -1) > 0 else None)

    # A step here from these states, by the formulas: decay, the moments, and the bases that were imported.
    new, x = gaussian((m, n), 1, 4), param.detach().clone()
    param.grad = new.clone()
    optimizer.step()
    moment = 0.9 * moment + 0.1 * new
    square = beta * state["exp_avg_sq"] + (1 - beta) * (state["Q_L"].mT @ new @ state["Q_R"]) ** 2
    inside = (state["Q_L"].mT @ moment @ state["Q_R"]) / (square.sqrt() + 1e-8)
    factor = (1 - beta**8) ** 0.5 / (1 - 0.9**8)
    x = (1 - 0.01 * 0.1) * x - 0.01 * factor * state["Q_L"] @ inside @ state["Q_R"].mT
    assert (param - x).abs().max() <= 1e-12


def test_emerging_optimizers_states_without_gradients_start_over() -> None:
    zeros = torch.zeros(4, 4, dtype=torch.float64)
    state = {"step": 0, "exp_avg": zeros, "exp_avg_sq": zeros, "L": zeros, "R": zeros}
    state |= {"Q_L": torch.eye(4), "Q_R": torch.eye(4)}
    saved = {"state": {0: state}, "param_groups": [{**EMERGING, "params": [0]}]}
    params = [nn.Parameter(gaussian((4, 4), 1, 0)) for _ in range(2)]
    optimizers: list[Any] = [
        oxidion.SOAP([params[0]]),
        oxidion.SOAP(
            [params[1]],
            precondition_frequency=1,
            decay_order="torch",
            weight_decay=0.1,
            **{key: EMERGING[key] for key in ("lr", "betas", "eps")},
        ),
    ]
    optimizers[0].load_state_dict(import_state_dict(saved, "soap", optimizers[0]))
    for number in range(3):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = gaussian((4, 4), 2, number)
            optimizer.step()
    assert torch.equal(*params)


@pytest.mark.parametrize(
    ("group", "missing"),
    [
        ({**GROUP, "max_precond_dim": None}, "max_precond_dim"),
        ({**PEERS_GROUP, "shampoo_beta": None}, "shampoo_beta"),
        ({**EMERGING, "eps": None}, "eps"),
    ],
    ids=["authors", "pytorch_optimizer", "emerging"],
)
def test_groups_that_lack_a_key_are_refused(group: dict[str, Any], missing: str) -> None:
    lacking = {key: value for key, value in group.items() if key != missing}
    with pytest.raises(ValueError, match=rf"must have \['{missing}'\]"):
        import_state_dict({"state": {}, "param_groups": [{**lacking, "params": [0]}]}, "soap")
