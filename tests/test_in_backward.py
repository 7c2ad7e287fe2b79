"""Steps in the backward pass of one process: equal to ordinary ones, with gradients of one unit at a time."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import oxidion
from oxidion._core.base import OxOptimizer
from oxidion._core.runner import DIRECT
from oxidion.backward import BackwardOptimizer

STEPS = 50
KEYS: dict[str, dict[str, Any]] = {
    "APOLLOAdamW": {"rank": 2, "update_proj_gap": 7},
    "APOLLOMini": {"update_proj_gap": 7},
    "Adafactor": {"lr": 0.01, "relative_step": False, "scale_parameter": False},
    "CAME": {"lr": 0.01},
    "Dion": {"rank_fraction": 0.5},
    "MuonH": {"weight_decay": 0.0},
    "GaLoreAdamW": {"rank": 2, "update_proj_gap": 7, "svd": "random"},
    "SOAP": {"precondition_frequency": 5},
    "SOAPMuon": {"precondition_frequency": 5},
}
CLASSES = sorted(
    name
    for name in oxidion.optim.__all__
    if isinstance(cls := getattr(oxidion, name), type) and issubclass(cls, OxOptimizer)
)


class Net(nn.Module):
    """Layers, a tied weight, a frozen one, and a layer that only some batches reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 6)
        self.rare = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, rarely: bool = False) -> Tensor:
        """Logits."""
        hidden: Tensor = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.norm(self.up(hidden))))
        if rarely:
            hidden = hidden + self.rare(self.frozen(hidden))
        logits: Tensor = self.head(hidden)
        return logits


def loss_of(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(0, 7, (2, 9), generator=torch.Generator().manual_seed(step))
    logits = model(tokens[:, :-1], step % 3 == 1)
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def build(name: str, named: Any, quantized: bool = False, **more: Any) -> Any:
    """An optimizer of a class: matrices, but for the embedding, to it and the rest to AdamW, if need be."""
    cls: Any = getattr(oxidion, name)
    keys = {"lr": 0.02, "weight_decay": 0.1, **KEYS.get(name, {}), **more}
    own = {"min_quant_numel": 1} if quantized else {}
    if not cls._MATRIX or cls._TAKES_VECTORS:
        return cls([{"params": list(named), **own}], **keys)
    matrices = [(n, p) for n, p in named if p.ndim > 1 and "embed" not in n]
    rest = [(n, p) for n, p in named if p.ndim < 2 or "embed" in n]
    others = {"params": rest, "algorithm": "adamw", "lr": 0.01}
    return cls([{"params": matrices, **own}, {**others, **own}], **keys)


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


def within(model: nn.Module, name: str = "AdamW", per: str = "module", **more: Any) -> BackwardOptimizer:
    return oxidion.in_backward(model, lambda named: build(name, named, **more), per=per)


def train(model: nn.Module, optimizer: Any, steps: range, schedule: Any = None) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()


def assert_same(some: dict[str, Any], others: dict[str, Any]) -> None:
    """State dicts that are equal bit for bit."""
    assert some["param_groups"] == others["param_groups"]
    assert some["state"].keys() == others["state"].keys()
    for key, own in some["state"].items():
        assert own.keys() == others["state"][key].keys()
        for role, value in own.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(others["state"][key][role])), role


def assert_equal_runs(models: list[nn.Module], optimizers: list[Any], start: nn.Module) -> None:
    pairs = zip(*(trained(model) for model in (*models, start)), strict=True)
    for (name, one), (_, other), (_, old) in pairs:
        assert torch.equal(one, other), name
        assert not torch.equal(one, old), name
    assert_same(*(optimizer.state_dict() for optimizer in optimizers))


def test_every_class_is_among_those_that_are_compared() -> None:
    assert len(CLASSES) >= 16
    assert {"AdamW", "Muon", "Dion", "Lamb", "Adafactor", "CAME", "SOAP", "GaLoreAdamW"} <= {*CLASSES}
    assert KEYS.keys() <= {*CLASSES}


@pytest.mark.parametrize("per", ["module", "parameter"])
@pytest.mark.parametrize("name", CLASSES)
def test_steps_of_every_class_equal_ordinary_ones_bit_for_bit(name: str, per: str) -> None:
    models = [Net(), Net()]
    optimizers = [build(name, trained(models[0])), within(models[1], name, per)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(STEPS))
    assert all(param.grad is None for param in models[1].parameters())
    assert_equal_runs(models, optimizers, Net())


@pytest.mark.parametrize("rounding", ["stochastic_rounding", "master_weights"])
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "GaLoreAdamW"])
def test_quantized_states_and_rounding_equal_ordinary_steps(name: str, rounding: str) -> None:
    keys = {"state_bits": 8, rounding: True, "quantized": True}
    models = [Net().bfloat16(), Net().bfloat16()]
    optimizers = [build(name, trained(models[0]), **keys), within(models[1], name, **keys)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(STEPS))
    assert any(value.dtype == torch.uint8 for own in optimizers[1].state.values() for value in own.values())
    assert_equal_runs(models, optimizers, Net().bfloat16())


# ---------------------------------------------------------------------------------------------- memory


@contextmanager
def gradients_watched(model: nn.Module) -> Iterator[Callable[[], int]]:
    """The most bytes of gradients that were alive at once while hooks were called, also without a ``.grad``.

    Its hooks come before those of an optimizer that is made later, so each sees its own gradient.
    """
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    def note(param: Tensor) -> None:
        assert param.grad is not None
        alive.append(weakref.ref(param.grad))
        held = [grad for ref in alive if (grad := ref()) is not None]
        most[0] = max(most[0], sum(grad.nbytes for grad in {id(grad): grad for grad in held}.values()))

    handles = [param.register_post_accumulate_grad_hook(note) for _, param in trained(model)]
    yield lambda: most[0]
    for handle in handles:
        handle.remove()


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))


@pytest.mark.parametrize(("per", "elements"), [("module", 16 * 16 + 16), ("parameter", 16 * 16)])
def test_gradients_of_one_unit_are_alive_at_a_time(per: str, elements: int) -> None:
    found = []
    for inside in (False, True):
        model = deep()
        with gradients_watched(model) as most:
            optimizer: Any = within(model, per=per) if inside else build("AdamW", trained(model))
            for _ in range(3):
                model(torch.ones(4, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append(most())
    assert found == [12 * (16 * 16 + 16) * 4, elements * 4]


def test_units_share_one_workspace_of_the_largest() -> None:
    model = deep()
    optimizer = within(model, "Muon")
    sizes = [unit.plan().arena_bytes for unit in optimizer.units]
    [memory] = optimizer._memory._memory.values()
    assert min(sizes) > 0
    assert memory.nbytes == max(sizes)
    train_once(model, optimizer)
    assert [*optimizer._memory._memory.values()] == [memory]


def train_once(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(4, 16)).square().mean().backward()
    optimizer.step()


# ------------------------------------------------------------------------- schedules, checkpoints, units


@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20),
    ],
    ids=["cosine", "one-cycle"],
)
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_schedules_change_steps_as_for_an_ordinary_optimizer(name: str, schedule: Any) -> None:
    models = [Net(), Net()]
    optimizers = [build(name, trained(models[0])), within(models[1], name)]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(20), schedule(optimizer))
    assert_equal_runs(models, optimizers, Net())


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Dion", "GaLoreAdamW", "SOAP"])
@pytest.mark.parametrize("source", [False, True], ids=["from-ordinary", "from-backward"])
@pytest.mark.parametrize("target", [False, True], ids=["to-ordinary", "to-backward"])
def test_state_dicts_go_on_bit_for_bit_in_either_kind(name: str, source: bool, target: bool) -> None:
    def made(model: nn.Module, inside: bool) -> Any:
        return within(model, name) if inside else build(name, trained(model))

    model, twin = Net(), Net()
    first = made(model, source)
    train(model, first, range(10))
    twin.load_state_dict(model.state_dict())
    second = made(twin, target)
    second.load_state_dict(first.state_dict())
    train(model, first, range(10, 20))
    train(twin, second, range(10, 20))
    assert_equal_runs([model, twin], [first, second], Net())


def test_torch_checkpoints_equal_those_of_an_ordinary_optimizer() -> None:
    models = [Net() for _ in range(4)]
    for model in models:  # torch's functions want every parameter in a group
        model.frozen.requires_grad_(True)
    optimizers: list[Any] = [build("Muon", trained(models[0])), *(within(m, "Muon") for m in models[1:3])]
    before = get_optimizer_state_dict(models[1], optimizers[1])
    assert all(bool(value == 0) for key, value in before["state"]["rare.bias"].items() if key == "step")
    for model, optimizer in zip(models[:2], optimizers, strict=False):
        train(model, optimizer, range(4))
    one, other = map(get_optimizer_state_dict, models, optimizers[:2])
    assert one["state"].keys() == other["state"].keys()
    for name, own in one["state"].items():
        assert all(torch.equal(value, other["state"][name][key]) for key, value in own.items())
    models[2].load_state_dict(models[1].state_dict())
    set_optimizer_state_dict(models[2], optimizers[2], other)
    for model, optimizer in zip(models[1:3], optimizers[1:], strict=True):
        train(model, optimizer, range(4, 8))
    assert_equal_runs(models[1:3], optimizers[1:], models[3])


def test_state_dict_without_names_warns_of_other_random_streams(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    plain = oxidion.AdamW([param for _, param in trained(model)])
    train(model, plain, range(2))
    optimizer = oxidion.in_backward(model, oxidion.AdamW)
    with caplog.at_level(logging.WARNING, "oxidion"):
        optimizer.load_state_dict(plain.state_dict())
    assert "random numbers went by their positions" in caplog.text
    assert [float(own["step"]) for own in optimizer.state.values()] == [
        float(own["step"]) for own in plain.state.values()
    ]
    train(model, optimizer, range(2, 4))


def test_units_are_modules_or_parameters_once_and_never_frozen() -> None:
    model = Net()
    modules = within(model, per="module").units
    assert [unit.names() for unit in modules] == [
        ["embed.weight"],
        ["up.weight", "up.bias"],
        ["norm.weight", "norm.bias"],
        ["down.weight", "down.bias"],
        ["rare.weight", "rare.bias"],
        ["head.bias"],
    ]
    other = Net()
    parameters = within(other, per="parameter").units
    assert [unit.names() for unit in parameters] == [[name] for name, _ in trained(other)]


def test_factory_may_sort_parameters_itself_and_drop_names() -> None:
    models = [deep(), deep()]
    sort = partial(oxidion.param_groups, algorithm="muon", lr=0.02, scalar_lr=0.01)
    optimizers: list[Any] = [
        oxidion.Muon(sort(models[0])),
        oxidion.in_backward(models[1], lambda _: oxidion.Muon(sort(models[1]))),
    ]
    for model, optimizer in zip(models, optimizers, strict=True):
        train_once(model, optimizer)
    assert_equal_runs(models, optimizers, deep())
    bare = oxidion.in_backward(deep(), lambda named: oxidion.AdamW([param for _, param in named]))
    assert bare.units[0].names() == ["0.weight", "0.bias"]


def test_added_group_is_stepped_in_the_backward_pass_too() -> None:
    model = Net()
    late = {id(param) for param in model.down.parameters()}
    optimizer = oxidion.in_backward(
        model, lambda named: oxidion.AdamW([(n, p) for n, p in named if id(p) not in late])
    )
    model.down.requires_grad_(False)
    train(model, optimizer, range(1))
    model.down.requires_grad_(True)
    optimizer.add_param_group({"params": [*model.down.named_parameters(prefix="down")], "lr": 0.5})
    before = model.down.weight.detach().clone()
    loss_of(model, 1).backward()
    assert model.down.weight.grad is None
    assert not torch.equal(before, model.down.weight)
    optimizer.step()


def test_added_group_that_is_refused_leaves_everything_as_it_was() -> None:
    models = [Net(), Net()]
    optimizers = [within(model) for model in models]
    train(models[0], optimizers[0], range(2))
    train(models[1], optimizers[1], range(1))
    with pytest.raises(ValueError, match="group 1, parameter 0 'strange' of the optimizer is none of the"):
        optimizers[1].add_param_group({"params": [("strange", nn.Parameter(torch.ones(2)))]})
    train(models[1], optimizers[1], range(1, 2))
    assert_equal_runs(models, optimizers, Net())


def test_backward_pass_of_another_thread_takes_the_same_steps() -> None:
    """As on devices, whose backward passes run in threads of torch."""
    models = [Net(), Net()]
    optimizers = [within(model, "Muon") for model in models]
    train(models[0], optimizers[0], range(5))
    thread = threading.Thread(target=train, args=(models[1], optimizers[1], range(5)))
    thread.start()
    thread.join()
    assert_equal_runs(models, optimizers, Net())


def test_unit_with_one_missing_gradient_is_stepped_by_step() -> None:
    models = [deep(), deep()]
    optimizers: list[Any] = [build("AdamW", trained(models[0])), within(models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        for step in range(4):
            layer = model[0]
            (layer(torch.ones(4, 16)) if step % 2 else torch.ones(4, 16) @ layer.weight.T).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert_same(*(optimizer.state_dict() for optimizer in optimizers))


def test_step_without_any_gradient_counts_as_an_ordinary_one() -> None:
    models = [Net(), Net()]
    optimizers: list[Any] = [build("AdamW", trained(models[0])), within(models[1])]
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.step()
        train(model, optimizer, range(2))
        optimizer.step()
    assert_same(*(optimizer.state_dict() for optimizer in optimizers))
    assert optimizers[1].param_groups[0]["step"] == 4


def test_compiled_and_recomputed_passes_take_the_same_steps() -> None:
    torch.compiler.reset()
    models = [deep(), deep(), deep()]
    optimizers: list[Any] = [build("AdamW", trained(models[0])), *(within(m) for m in models[1:])]
    compiled: Any = torch.compile(models[1], backend="eager", fullgraph=True)

    def recomputed(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(models[2], x, use_reentrant=False)
        return out

    for call, optimizer in zip((models[0], compiled, recomputed), optimizers, strict=True):
        for _ in range(3):
            call(torch.ones(4, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for model, optimizer in zip(models[1:], optimizers[1:], strict=True):
        assert_equal_runs([models[0], model], [optimizers[0], optimizer], deep())


def test_hooks_of_steps_and_state_dicts_are_called_once() -> None:
    model = Net()
    optimizer = within(model)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("saved"))
    train(model, optimizer, range(2))
    optimizer.state_dict()
    assert calls == ["before", "after", "before", "after", "saved"]


def test_repr_and_explain_show_groups_and_every_parameter_once() -> None:
    optimizer = within(Net())
    assert "6 units in the backward pass of AdamW (" in repr(optimizer)
    assert [row["name"] for row in optimizer.explain()] == [name for name, _ in trained(Net())]


# -------------------------------------------------------------------------------------------- refusals


def test_second_gradient_before_step_is_refused_without_changes() -> None:
    model = Net()
    optimizer = within(model)
    loss_of(model, 0).backward()
    before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match=r"a second gradient came before optimizer\.step\(\)"):
        loss_of(model, 0).backward()
    assert all(map(torch.equal, before, model.parameters()))
    with pytest.raises(RuntimeError, match=r"state_dict\(\) in the middle of a step"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) in the middle of a step"):
        optimizer.add_param_group({"params": []})


def test_checkpoint_recovers_from_a_failed_backward_pass() -> None:
    models = [Net(), Net()]
    optimizers = [within(model) for model in models]
    saved = copy.deepcopy(optimizers[0].state_dict())
    loss_of(models[0], 0).backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        loss_of(models[0], 0).backward()
    models[0].load_state_dict(Net().state_dict())
    optimizers[0].load_state_dict(saved)
    optimizers[0].zero_grad()
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer, range(3))
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


def test_nested_backward_passes_over_a_shared_weight_are_refused() -> None:
    layer = nn.Linear(4, 4)
    optimizer = within(layer)
    x = torch.ones(2, 4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="second gradient"):
        x.sum().backward()
    assert len(optimizer.units) == 1


def test_step_refuses_closure_scaler_and_assigned_gradient() -> None:
    model = Net()
    optimizer = within(model)
    with pytest.raises(RuntimeError, match="take no closure"):
        optimizer.step(lambda: None)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="a GradScaler cannot go with steps in the backward pass"):
        scaler.step(optimizer)
    optimizer.step()
    model.up.weight.grad = torch.zeros_like(model.up.weight)
    with pytest.raises(RuntimeError, match=r"up\.weight: there is a gradient that no step was taken with"):
        optimizer.step()
    model.up.weight.grad = None
    optimizer.remove_hooks()
    loss_of(model, 0).backward()
    assert model.up.weight.grad is not None
    with pytest.raises(RuntimeError, match="hooks were removed"):
        optimizer.step()


def test_max_grad_norm_is_refused_at_construction_and_later() -> None:
    with pytest.raises(ValueError, match=r"max_grad_norm must be None in the backward pass, got 1\.0"):
        within(Net(), "Lamb", max_grad_norm=1.0)
    model = Net()
    optimizer = within(model, "Lamb")
    optimizer.param_groups[0]["max_grad_norm"] = 2.0
    with pytest.raises(ValueError, match=r"max_grad_norm must be None in the backward pass, got 2\.0"):
        loss_of(model, 0).backward()


def test_sparse_gradients_are_refused_by_constructor_or_hook() -> None:
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True))
    with pytest.raises(ValueError, match="0: gradients of an embedding with sparse=True"):
        within(sparse)
    late = nn.Sequential(nn.Embedding(5, 4))
    optimizer = within(late)
    late[0].sparse = True
    before = late[0].weight.detach().clone()
    with pytest.raises(TypeError, match="sparse"):
        late(torch.tensor([1])).sum().backward()
    assert torch.equal(before, late[0].weight)
    assert len(optimizer.units) == 1


def test_parameters_that_fsdp1_flattened_are_refused() -> None:
    model = deep()
    model[3].weight._is_flat_param = True  # type: ignore[union-attr]
    with pytest.raises(TypeError, match=r"3\.weight: FullyShardedDataParallel \(FSDP1\) has not reduced"):
        within(model)


def stranger(_named: Any) -> Any:
    return oxidion.AdamW([nn.Parameter(torch.ones(2))])


@pytest.mark.parametrize(
    ("model", "factory", "per", "error", "text"),
    [
        (deep(), oxidion.AdamW, "layer", ValueError, "per must be 'module' or 'parameter', got 'layer'"),
        ([], oxidion.AdamW, "module", TypeError, "model must be an nn.Module, got list"),
        (deep(), torch.optim.AdamW, "module", TypeError, "must return an optimizer of oxidion, got AdamW"),
        (deep(), stranger, "module", ValueError, "group 0, parameter 0 '' of the optimizer is none of the"),
    ],
    ids=["per", "model", "class", "parameter"],
)
def test_arguments_that_are_none_are_refused(
    model: Any, factory: Any, per: str, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        oxidion.in_backward(model, factory, per=per)


def test_failed_unit_poisons_the_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = within(model)
    unit: Any = optimizer.units[1]

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(DIRECT, name)

        def execute(self, *_arguments: object) -> None:
            raise MemoryError("no more")

    monkeypatch.setattr(unit, "_runner", Failing(), raising=False)
    with pytest.raises(MemoryError):
        loss_of(model, 0).backward()
    monkeypatch.undo()
    with pytest.raises(oxidion.PoisonedOptimizer, match="failed half way"):
        optimizer.step()
    for other in optimizer.units:
        other.arrived.clear()
    with pytest.raises(oxidion.PoisonedOptimizer, match="failed half way"):
        optimizer.state_dict()


def test_optimizer_with_hooks_cannot_be_copied() -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied: save state_dict\(\)"):
        copy.deepcopy(within(Net()))


@pytest.mark.parametrize("rule", ["ema", "schedule_free"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_averages_are_those_of_ordinary_steps(rule: str, dtype: str | None) -> None:
    one, other = Net(), Net()
    group = {"average": rule, "average_dtype": dtype}
    ordinary = oxidion.AdamW([{"params": trained(one), **group}], lr=0.02)
    backward = oxidion.in_backward(
        other, lambda named: oxidion.AdamW([{"params": [*named], **group}], lr=0.02)
    )
    for optimizer, model in ((ordinary, one), (backward, other)):
        train(model, optimizer, range(10))
    assert_same(backward.state_dict(), ordinary.state_dict())
    for optimizer in (ordinary, backward):
        optimizer.eval()
    for param, expected in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(param, expected)
    if rule == "schedule_free":
        with pytest.raises(RuntimeError, match=r"train\(\)"):
            train(other, backward, range(1))
