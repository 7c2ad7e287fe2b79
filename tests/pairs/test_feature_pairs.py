"""Every optional feature with what writes weights, moves states or comes late, for one class of each kind.

A cell compares a training with the same one in the naive order, bit by bit: weights, states and averages.
"""

from __future__ import annotations

import copy
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

import oxidion
from support.features import FEATURES, KINDS

PAIRS = [(name, feature) for feature, own in FEATURES.items() for name in own.classes]
SHAPES = {"a": (12, 8), "b": (8, 10)}


class Model(nn.Module):
    """Two weights; ``pretrained`` gives them other numbers than a new model has."""

    def __init__(self, dtype: torch.dtype, *, pretrained: bool = True) -> None:
        super().__init__()
        for at, (name, shape) in enumerate(SHAPES.items()):
            start = torch.randn(shape, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter((start / 3).to(dtype)))
        if pretrained:
            self.load_state_dict(weights(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a @ self.b).square().mean()


def weights(dtype: torch.dtype, seed: int = 7) -> dict[str, Tensor]:
    """Weights of a checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for name, s in SHAPES.items()
    }


class Case:
    """A class with a feature."""

    def __init__(self, name: str, feature: str) -> None:
        self.name, self.feature = name, FEATURES[feature]
        self.dtype = self.feature.dtype

    def make(self, named: Any, **more: Any) -> Any:
        keys = {**KINDS[self.name], **self.feature.keys}
        arguments = {key: keys.pop(key) for key in KINDS[self.name]}
        return getattr(oxidion, self.name)([{"params": list(named), **keys}], lr=0.02, **arguments, **more)

    def model(self, **more: Any) -> Model:
        return Model(self.dtype, **more)

    def start(self, **more: Any) -> tuple[Model, Any]:
        model = self.model()
        return model, self.make(model.named_parameters(), **more)


def grad(step: int, name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + ord(name))
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64).to(like.dtype)


def train(model: Model, optimizer: Any, steps: range, without: Callable[[int], str] = lambda _: "") -> None:
    """Steps with gradients that depend on the step alone; of ``without`` the parameters have none."""
    for step in steps:
        for name, param in model.named_parameters():
            has_none = name in without(step) or not param.requires_grad
            param.grad = None if has_none else grad(step, name, param)
        optimizer.step()


def found(model: Model, *optimizers: Any) -> dict[str, Tensor]:
    """All that a training has left."""
    kept = {f"weight {name}": param.detach().clone() for name, param in model.named_parameters()}
    for optimizer in optimizers:
        for name, param in model.named_parameters():
            own = optimizer.state.get(param, {})
            kept |= {f"state {name} {key}": v.clone() for key, v in own.items() if isinstance(v, Tensor)}
        averaged = optimizer.averaged_state_dict(model).items()
        kept |= {f"average {name}": v for name, v in averaged if optimizer.state.get(getattr(model, name))}
    return kept


def assert_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    different = [key for key, value in wanted.items() if not torch.equal(got[key], value)]
    assert not different


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield


@pytest.mark.parametrize("way", ["init_state", "init_state()", "template", "template and back", "meta"])
@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_states_may_be_made_before_the_weights_are_there(name: str, feature: str, way: str) -> None:
    case = Case(name, feature)
    naive, expected = case.start()
    train(naive, expected, range(6))
    if way == "meta":
        with torch.device("meta"):
            model = case.model(pretrained=False)
        model.to_empty(device="cpu")
        for param in model.parameters():
            param.data.fill_(torch.nan)
    else:
        model = case.model(pretrained=False)
    optimizer = case.make(model.named_parameters(), init_state=way in ("init_state", "meta"))
    if way == "init_state()":
        optimizer.init_state()
    if "template" in way:
        saved = get_optimizer_state_dict(model, optimizer)
        if way == "template and back":
            set_state_dict(model, optimizer, model_state_dict=model.state_dict(), optim_state_dict=saved)
    model.load_state_dict(weights(case.dtype))
    train(model, optimizer, range(6))
    assert_equal(found(model, optimizer), found(naive, expected))


@pytest.mark.parametrize("way", ["plain", "dcp", "dcp before steps"])
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_a_checkpoint_goes_on_as_the_run_did(name: str, feature: str, mode: str, way: str) -> None:
    """Accelerate and Trainer save in `eval`, and call `train` after loading."""
    case = Case(name, feature)
    naive, expected = case.start()
    train(naive, expected, range(3))
    getattr(expected, mode)()
    model = case.model(pretrained=False)
    optimizer = case.make(model.named_parameters())
    if way != "dcp before steps":
        train(model, optimizer, range(10, 12))
    if way == "plain":
        file = io.BytesIO()
        torch.save({"model": naive.state_dict(), "optimizer": expected.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    else:
        with tempfile.TemporaryDirectory() as folder:
            own = dict(zip(("model", "optimizer"), get_state_dict(naive, expected), strict=True))
            dcp.save(own, checkpoint_id=folder, no_dist=True)
            read = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.load(read, checkpoint_id=folder, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"])
    for one, other in ((model, optimizer), (naive, expected)):
        other.train()
        train(one, other, range(3, 6))
    assert_equal(found(model, optimizer), found(naive, expected))


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_keys_of_states_and_groups_are_there_from_the_beginning(name: str, feature: str) -> None:
    case = Case(name, feature)
    model, optimizer = case.start(init_state=True)

    def keys() -> tuple[Any, ...]:
        saved = optimizer.state_dict()
        return [set(own) for own in saved["state"].values()], [set(group) for group in saved["param_groups"]]

    before = keys()
    assert before[0]
    for act in (
        lambda: train(model, optimizer, range(3)),
        optimizer.eval,
        optimizer.train,
        lambda: optimizer.averaged_state_dict(model),
        lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())),
        lambda: train(model, optimizer, range(3, 5)),
    ):
        act()
        assert keys() == before


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_states_may_be_replaced_between_steps(name: str, feature: str) -> None:
    case = Case(name, feature)
    runs = []
    for is_replaced in (False, True):
        model, optimizer = case.start()
        for steps in (range(2), range(2, 4), range(4, 6)):
            train(model, optimizer, steps)
            for own in optimizer.state.values() if is_replaced else ():
                own.update({key: v.clone() for key, v in own.items() if isinstance(v, Tensor)})
        runs.append(found(model, optimizer))
    assert_equal(*runs)


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_a_model_may_be_loaded_alone(name: str, feature: str) -> None:
    """Copies of weights restart where their counter or norm is 0, as the page on checkpoints says."""
    case = Case(name, feature)
    # In the naive order an optimizer is made over the loaded weights, and gets the states that are no copies.
    naive, expected = case.start()
    train(naive, expected, range(3))
    saved = copy.deepcopy(expected.state_dict())
    for own in saved["state"].values():
        for key in [key for key in own if key.startswith("average") or key in case.feature.copies]:
            del own[key]
    naive.load_state_dict(weights(case.dtype, 8))
    expected = case.make(naive.named_parameters())
    expected.load_state_dict(saved)
    train(naive, expected, range(3, 6))
    wanted = found(naive, expected)
    for restarts in (True, False):
        model, optimizer = case.start()
        train(model, optimizer, range(3))
        model.load_state_dict(weights(case.dtype, 8))
        for own in optimizer.state.values() if restarts else ():
            for key in case.feature.copies:
                own[key].zero_()
        train(model, optimizer, range(3, 6))
        got = found(model, optimizer)
        if restarts or not case.feature.copies:
            assert_equal(got, wanted)
        else:  # an average goes on from the old weights, a norm stays that of the old weights
            assert not torch.equal(got["average a"], wanted["average a"])


@pytest.mark.parametrize("way", ["thawed", "second group", "no gradient"])
@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_a_parameter_has_its_own_history(name: str, feature: str, way: str) -> None:
    """One that comes late, or without some gradients: as if an optimizer of its own had taken its steps."""
    case = Case(name, feature)
    model = case.model()
    if way == "second group":
        optimizer = case.make([("a", model.a)])
        train(model, optimizer, range(3), lambda _: "b")
        keys = {
            key: v for key, v in optimizer.param_groups[0].items() if key not in ("params", "param_names")
        }
        optimizer.add_param_group({**keys, "params": [("b", model.b)]})
        train(model, optimizer, range(3, 7))
    elif way == "thawed":
        model.b.requires_grad_(False)
        optimizer = case.make(model.named_parameters())
        train(model, optimizer, range(3))
        model.b.requires_grad_(True)
        train(model, optimizer, range(3, 7))
    else:
        optimizer = case.make(model.named_parameters())
        train(model, optimizer, range(7), lambda step: "b" if step in (0, 2, 5) else "")
    naive = case.model()
    first, second = case.make([("a", naive.a)]), case.make([("b", naive.b)])
    train(naive, first, range(7))
    for step in [1, 3, 4, 6] if way == "no gradient" else range(3, 7):
        naive.a.grad, naive.b.grad = None, grad(step, "b", naive.b)
        second.param_groups[0]["step"] = step  # by which numbers are rounded at random
        second.step()
    assert_equal(found(model, optimizer), found(naive, first, second))


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_two_optimizers_are_as_one(name: str, feature: str) -> None:
    case = Case(name, feature)
    naive, expected = case.start()
    train(naive, expected, range(5))
    model = case.model()
    one, other = case.make([("b", model.b)]), case.make([("a", model.a)])
    for step in range(5):
        train(model, other, range(step, step + 1))
        one.step()
    assert_equal(found(model, other, one), found(naive, expected))


@pytest.mark.parametrize(("name", "feature"), PAIRS)
def test_steps_in_the_backward_pass_are_those_after_it(name: str, feature: str) -> None:
    case = Case(name, feature)
    runs = []
    for is_within in (False, True):
        model = case.model(pretrained=not is_within)
        if is_within:
            optimizer = oxidion.in_backward(model, case.make)
            model.load_state_dict(weights(case.dtype))  # after its states were made
        else:
            optimizer = case.make(model.named_parameters())
        for step in range(5):
            x = torch.randn(4, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            model(x.to(case.dtype)).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(found(model, optimizer))
    assert_equal(*runs)
