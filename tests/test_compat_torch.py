"""``oxidion.compat.torch``: torch's signature, defaults and group keys on this package's Muon."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.compat.torch import Muon

peer: Any = getattr(torch.optim, "Muon", None)
needs_peer = pytest.mark.skipif(peer is None, reason="torch.optim has no Muon")
WORDS = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
SHAPES = ((20, 8), (8, 20), (16, 16))
CHOICES: list[dict[str, Any]] = [
    {},
    {"nesterov": False, "momentum": 0.8, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    {"adjust_lr_fn": "original", "ns_steps": 3, "ns_coefficients": (3.0, -3.2, 1.2)},
]


def weights(seed: int = 0) -> list[nn.Parameter]:
    made = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=made)) for shape in SHAPES]


def go(params: list[nn.Parameter], optimizer: Any, steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, weights(100 + step), strict=True):
            param.grad = grad.detach()
        optimizer.step()


def distance(left: list[nn.Parameter], right: list[nn.Parameter], start: int = 0) -> float:
    """The largest difference in relation to how far a weight has come."""
    pairs = zip(left, right, weights(start), strict=True)
    return max(float(((a - b).norm() / (b - old).norm()).detach()) for a, b, old in pairs)


def polar(x: Tensor, steps: int, triple: tuple[float, float, float]) -> Tensor:
    """The Newton–Schulz iteration, in float64."""
    a, b, c = triple
    x = x / x.norm()
    for _ in range(steps):
        square = x @ x.T
        x = a * x + b * square @ x + c * square @ square @ x
    return x


@pytest.mark.parametrize("given", CHOICES)
def test_steps_are_those_of_the_equation(given: dict[str, Any]) -> None:
    """Torch's equation with an average of the gradients, in float64."""
    params, wanted = weights(), [param.detach().double() for param in weights()]
    averages = [torch.zeros_like(x) for x in wanted]
    chosen = {
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.775, 2.0315),
        "ns_steps": 5,
        "adjust_lr_fn": None,
    } | given
    mu = chosen["momentum"]
    optimizer = Muon(params, 0.02, **given, orth_dtype="float32")
    go(params, optimizer, range(4))
    for step in range(4):
        for x, average, grad in zip(wanted, averages, weights(100 + step), strict=True):
            g = grad.detach().double()
            average.copy_(mu * average + (1 - mu) * g)
            looked = mu * average + (1 - mu) * g if chosen["nesterov"] else average
            update = polar(looked, chosen["ns_steps"], chosen["ns_coefficients"])
            rows, cols = x.shape
            factor = max(1, rows / cols) ** 0.5
            if chosen["adjust_lr_fn"] == "match_rms_adamw":
                factor = 0.2 * max(rows, cols) ** 0.5
            x.mul_(1 - 0.02 * chosen["weight_decay"]).sub_(0.02 * factor * update)
    for param, x, old in zip(params, wanted, weights(), strict=True):
        assert float((param.detach() - x).norm() / (x - old.detach()).norm()) < 1e-5


@needs_peer
def test_signature_is_torchs_and_more_goes_by_keyword() -> None:
    own, theirs = (list(inspect.signature(cls.__init__).parameters.values())[2:] for cls in (Muon, peer))
    assert [(each.name, each.default) for each in own[:-1]] == [(each.name, each.default) for each in theirs]
    assert own[-1].kind is inspect.Parameter.VAR_KEYWORD
    assert Muon(weights(), master_weights=False, maximize=True).param_groups[0]["maximize"]


@needs_peer
@pytest.mark.parametrize("given", CHOICES)
def test_groups_show_the_values_and_weights_take_steps_of_torch(given: dict[str, Any]) -> None:
    ours, theirs = weights(), weights()
    made, other = Muon(ours, 0.02, **given), peer(theirs, 0.02, **given)
    shown, wanted = ({key: each.param_groups[0][key] for key in WORDS} for each in (made, other))
    if given.get("adjust_lr_fn") == "original":
        wanted["adjust_lr_fn"] = None  # two words for one rule
    assert shown == wanted
    go(ours, made, range(3))
    go(theirs, other, range(3))
    # torch multiplies in bfloat16, five times in a row.
    assert distance(ours, theirs) < 0.05


def test_a_word_and_its_key_follow_the_one_that_was_written() -> None:
    params = weights()
    optimizer = Muon(params)
    group = optimizer.param_groups[0]
    for word, key, value, other in (
        ("momentum", "mu", 0.5, 0.25),
        ("eps", "epsilon", 1e-3, 1e-4),
        ("adjust_lr_fn", "adjust_lr", "match_rms_adamw", "rms_norm"),
    ):
        group[word] = value
        go(params, optimizer, range(1))
        assert (group[word], group[key]) == (value, value)
        group[key] = other
        go(params, optimizer, range(1))
        assert group[key] == other
        assert group[word] == {"rms_norm": "match_rms_adamw"}.get(str(other), other)
    group["momentum"] = 2.0e39
    with pytest.raises(ValueError, match="momentum must be"):
        go(params, optimizer, range(1))


def test_words_that_are_written_act_as_given_ones() -> None:
    given, written = weights(), weights()
    first, second = Muon(given, momentum=0.5, adjust_lr_fn="spectral_unclamped"), Muon(written)
    second.param_groups[0].update(momentum=0.5, adjust_lr_fn="spectral_unclamped")
    go(given, first, range(2))
    go(written, second, range(2))
    assert all(map(torch.equal, given, written))


@pytest.mark.parametrize("again", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_keys_that_are_written_into_a_copy_count(again: Any) -> None:
    params = weights()
    optimizer = Muon(params)
    go(params, optimizer, range(1))
    made = again(optimizer)
    own = made.param_groups[0]
    own.update(mu=0.1, adjust_lr="match_rms_adamw")
    go(own["params"], made, range(1))
    assert (own["mu"], own["momentum"], own["adjust_lr_fn"]) == (0.1, 0.1, "match_rms_adamw")


def test_keys_of_the_class_below_may_be_arguments() -> None:
    group = Muon(weights(), mu=0.5, epsilon=1e-3, adjust_lr="rms_norm").param_groups[0]
    assert [group[word] for word in ("momentum", "eps", "adjust_lr_fn")] == [0.5, 1e-3, "match_rms_adamw"]
    with pytest.raises(ValueError, match="two words for one setting"):
        Muon(weights(), momentum=0.7, mu=0.5)


@needs_peer
def test_state_dicts_of_both_are_loaded() -> None:
    theirs, ours = weights(), weights()
    other, made = peer(theirs, 0.02, momentum=0.7), Muon(ours, orth_dtype="float32")
    go(theirs, other, range(3))
    with torch.no_grad():
        for own, param in zip(ours, theirs, strict=True):
            own.copy_(param)
    made.load_state_dict(other.state_dict())
    assert {key: made.param_groups[0][key] for key in ("lr", "momentum")} == {"lr": 0.02, "momentum": 0.7}
    before = [param.detach().clone() for param in ours]
    go(theirs, other, range(3, 5))
    go(ours, made, range(3, 5))
    moved = [float((param.detach() - old).norm()) for param, old in zip(ours, before, strict=True)]
    distances = [float((a - b).detach().norm()) for a, b in zip(ours, theirs, strict=True)]
    assert all(each < 0.02 * way for each, way in zip(distances, moved, strict=True))


@pytest.mark.parametrize("way", ["state_dict", "deepcopy"])
def test_a_run_that_was_saved_goes_on_bit_for_bit(way: str) -> None:
    params = weights()
    optimizer = Muon(params, 0.02, momentum=0.8)
    go(params, optimizer, range(2))
    if way == "deepcopy":
        held: Any = copy.deepcopy({"params": params, "optimizer": optimizer})
        others, again = held["params"], held["optimizer"]
    else:
        others = copy.deepcopy(params)
        again, buffer = Muon(others, 0.5), io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        buffer.seek(0)
        again.load_state_dict(torch.load(buffer, weights_only=True))
    assert again.param_groups[0]["momentum"] == 0.8
    go(params, optimizer, range(2, 4))
    go(others, again, range(2, 4))
    assert all(map(torch.equal, params, others))
    again.add_param_group({"params": [nn.Parameter(torch.ones(4, 4))], "momentum": 0.6})
    assert (again.param_groups[1]["momentum"], again.param_groups[1]["mu"]) == (0.6, 0.6)


def test_schedulers_that_cycle_momentum_are_followed() -> None:
    params = weights()
    optimizer = Muon(params)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
    seen = []
    for _ in range(4):
        go(params, optimizer, range(1))
        seen.append(optimizer.param_groups[0]["momentum"])
        scheduler.step()
    assert seen[0] == pytest.approx(0.95)
    assert min(seen) < 0.9


def test_it_is_muon_to_everything_else() -> None:
    assert issubclass(Muon, oxidion.Muon)
    assert oxidion.optim.Muon is oxidion.Muon
    mixed = Muon([{"params": weights()}, {"params": [nn.Parameter(torch.ones(3))], "algorithm": "adamw"}])
    assert "momentum" in mixed.param_groups[0]
    assert "momentum" not in mixed.param_groups[1]
    with pytest.raises(ValueError, match="takes weight matrices"):
        Muon([nn.Parameter(torch.ones(3))])
