"""Adapters for torchtitan, axolotl and Megatron: by stand-ins for what they document, and by their code."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.compat import megatron, titan
from oxidion.functional import muon

from . import stubs
from .models import MATRICES, REST, backward, names, peer, tiny

Patch = pytest.MonkeyPatch

LAZY = ("torchtitan", "axolotl", "megatron", "emerging_optimizers", "transformers", "tensorboard", "wandb")


def test_importing_the_package_imports_no_framework_or_adapter() -> None:
    code = "import sys, oxidion, oxidion.compat.titan, oxidion.compat.megatron; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "oxidion.compat.titan" in loaded
    assert not loaded & {*LAZY, "oxidion.compat.axolotl"}
    code = "import sys, oxidion; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"oxidion.compat.titan", "oxidion.compat.megatron", "oxidion.compat.axolotl"} & set(
        done.stdout.split()
    )


# ------------------------------------------------------------------------------------------ functional


def test_muon_takes_what_torch_gives_it_by_the_same_names() -> None:
    module = pytest.importorskip("torch.optim._muon", reason="this torch has no Muon")
    theirs, ours = (inspect.signature(function).parameters for function in (module.muon, muon))
    assert list(theirs) == list(ours)
    assert [p.kind for p in theirs.values()] == [p.kind for p in ours.values()]
    # A call with torch's arguments alone is one of this function.
    empty = inspect.Parameter.empty
    assert not [key for key in ours if ours[key].default is empty and theirs[key].default is not empty]


# ------------------------------------------------------------------------------------------ torchtitan


def titan_groups(config: Any, optimizer: str = "oxidion.Muon") -> list[Any]:
    """Matrices of the block for one optimizer, the rest for AdamW of this package."""
    return [
        config(
            pattern=r"^block\..*weight",
            optimizer_name=optimizer,
            optimizer_kwargs={"lr": 0.02, "weight_decay": 0.1},
        ),
        config(pattern=r".*", optimizer_name="oxidion.AdamW", optimizer_kwargs={"lr": 0.001}),
    ]


@pytest.fixture
def stub_titan(monkeypatch: Patch) -> Any:
    """A stand-in for torchtitan, whose container is as it was before."""

    class Own(stubs.OptimizersContainer):
        pass

    return stubs.installed(monkeypatch, "torchtitan.components.optimizer", OptimizersContainer=Own)


def test_titan_names_are_resolved_and_others_are_torchtitans(stub_titan: Any) -> None:
    found = titan.register()
    assert {"oxidion.Muon", "oxidion.Dion", "oxidion.AdamW", "oxidion.Lion"} <= set(found)
    assert titan.register() == found
    resolve = stub_titan.OptimizersContainer._resolve_optimizer_factory
    assert resolve("AdamW") is torch.optim.AdamW
    with pytest.raises(NotImplementedError, match="Muon"):
        resolve("Muon")
    with pytest.raises(ValueError, match=r"got 'oxidion.Muom'; the nearest is 'oxidion.Muon'"):
        resolve("oxidion.Muom")


@pytest.mark.parametrize("name", titan._factories())
def test_titan_name_makes_the_class_with_states_and_names(name: str, stub_titan: Any) -> None:
    titan.register()
    model = tiny()
    manual = {"relative_step": False} if name == "oxidion.Adafactor" else {}
    group = stubs.ParamGroupConfig("", name, {"lr": 0.01, "strict": False, **manual})
    (made,) = stub_titan.OptimizersContainer([group], model)
    assert type(made) is getattr(oxidion, name.removeprefix("oxidion."))
    assert made.param_groups[0]["param_names"] == [n for n, p in model.named_parameters() if p.requires_grad]
    assert made.state, "a checkpoint of step 0 would need a step of zeros"
    assert made.explain()[0]["name"] == "embed.weight"


def test_titan_without_the_method_is_refused(monkeypatch: Patch) -> None:
    stubs.installed(monkeypatch, "torchtitan.components.optimizer", OptimizersContainer=object)
    with pytest.raises(RuntimeError, match=r"has no OptimizersContainer\._resolve_optimizer_factory"):
        titan.register()


@pytest.fixture
def real_titan(monkeypatch: Patch) -> Any:
    """The real torchtitan, whose container resolves as before when the test is done."""
    module = peer("torchtitan.components.optimizer", monkeypatch)
    container = module.OptimizersContainer
    monkeypatch.setattr(
        container, "_resolve_optimizer_factory", staticmethod(container._resolve_optimizer_factory)
    )
    titan.register()
    return module


@pytest.mark.parametrize("implementation", ["fused", "foreach", "for-loop"])
def test_titan_itself_builds_steps_schedules_and_restores(real_titan: Any, implementation: str) -> None:
    def made(model: nn.Module) -> Any:
        groups = titan_groups(real_titan.ParamGroupConfig)
        config = real_titan.OptimizersContainer.Config(param_groups=groups, implementation=implementation)
        return real_titan.OptimizersContainer(config, model_parts=[model])

    model = tiny()
    container = made(model)
    assert [type(optimizer) for optimizer in container] == [oxidion.Muon, oxidion.AdamW]
    assert names(model, container.optimizers[0].param_groups[0]["params"]) == MATRICES
    saved = container.state_dict()
    assert [saved[f"param_groups.block.{name}.weight.step"] for name in ("attn", "mlp")] == [0, 0]
    config = real_titan.LRSchedulersContainer.Config(warmup_steps=2)
    scheduler = config.build(optimizers=container, training_steps=10)
    for _ in range(3):
        backward(model)
        container.step()
        scheduler.step()
        container.zero_grad()
    saved = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in container.state_dict().items()
    }
    assert saved["param_groups.block.attn.weight.step"] == 3
    assert {"state.block.attn.weight.momentum", "state.norm.bias.exp_avg"} <= saved.keys()
    other = tiny(1)
    other.load_state_dict(model.state_dict())
    restored = made(other)
    config.build(optimizers=restored, training_steps=10)  # writes initial_lr, which a checkpoint has
    restored.load_state_dict(saved)
    for own, optimizers in ((model, container), (other, restored)):
        backward(own)
        optimizers.step()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


# --------------------------------------------------------------------------------------------- axolotl


@pytest.fixture
def plugin(monkeypatch: Patch) -> Any:
    """The module of the plugin over a stand-in for axolotl."""
    stubs.installed(monkeypatch, "axolotl.integrations.base", BasePlugin=stubs.BasePlugin)
    monkeypatch.delitem(sys.modules, "oxidion.compat.axolotl", raising=False)
    yield importlib.import_module("oxidion.compat.axolotl")
    sys.modules.pop("oxidion.compat.axolotl", None)


def trainer_of(model: nn.Module) -> Any:
    return types.SimpleNamespace(model=model, optimizer=None, optimizer_cls_and_kwargs=("theirs", {}))


AXOLOTL = {"learning_rate": "0.02", "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9}


@pytest.mark.parametrize(
    ("name", "cls", "bits"),
    [("muon", oxidion.Muon, 32), ("muon_8bit", oxidion.Muon, 8), ("dion", oxidion.Dion, 32)],
)
def test_axolotl_word_makes_its_class_by_both_doors(name: str, cls: type, bits: int, plugin: Any) -> None:
    cfg = {**AXOLOTL, "optimizer": name, "adam_epsilon": 1e-6, "optim_args": "cautious_wd=True"}
    model = tiny()
    trainer = trainer_of(model)
    own = plugin.Plugin()
    assert isinstance(own, stubs.BasePlugin)
    own.post_trainer_create(cfg, trainer)
    factory, kwargs = trainer.optimizer_cls_and_kwargs
    for made in (
        factory()(model, "training arguments", **kwargs),
        factory()(model, **kwargs),
        own.create_optimizer(cfg, trainer),
    ):
        assert type(made) is cls
        matrices, rest = made.param_groups
        assert names(model, matrices["params"]) == MATRICES
        assert names(model, rest["params"]) == REST
        keys = ("lr", "weight_decay", "state_bits", "cautious_wd")
        assert [matrices[key] for key in keys] == [0.02, 0.1, bits, True]
        assert [rest[key] for key in ("algorithm", "lr", "weight_decay")] == ["adamw", 0.02, 0.0]
        assert (tuple(rest["betas"]), rest.get("eps", rest.get("epsilon"))) == ((0.8, 0.9), 1e-6)
        before = model.block["mlp"].weight.detach().clone()
        backward(model)
        made.step()
        assert not torch.equal(before, model.block["mlp"].weight)


def test_axolotl_keys_of_dion_arrive_and_absent_ones_are_default(plugin: Any) -> None:
    keys = {"dion_lr": 0.03, "dion_momentum": 0.9, "dion_rank_fraction": 0.5, "dion_rank_multiple_of": 2}
    made = plugin.make(tiny(), {**AXOLOTL, "optimizer": "dion", **keys})
    read = [made.param_groups[0][key] for key in ("lr", "mu", "rank_fraction", "rank_multiple_of")]
    assert read == [0.03, 0.9, 0.5, 2]
    assert made.param_groups[1]["lr"] == 0.02
    bare = plugin.make(tiny(), {"optimizer": "dion", "learning_rate": 0.02, "dion_momentum": None})
    usual = oxidion.Dion([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    group = bare.param_groups[0]
    assert [group[key] for key in ("mu", "rank_fraction")] == [usual[key] for key in ("mu", "rank_fraction")]
    assert (group["lr"], group["weight_decay"]) == (0.02, 0.0)
    ignored = plugin.make(tiny(), {**AXOLOTL, "optimizer": "muon", **keys})
    assert ignored.param_groups[0]["lr"] == 0.02


def test_axolotl_optim_args_are_those_of_a_class_with_a_model(plugin: Any) -> None:
    for given in ("scalar_lr=1e-4, head_lr=1e-5, nesterov=True", {"scalar_lr": 1e-4, "nesterov": True}):
        made = plugin.make(tiny(), {**AXOLOTL, "optimizer": "muon", "optim_args": given})
        matrices, rest = made.param_groups[0], made.param_groups[1]
        assert (matrices["lr"], matrices["nesterov"], rest["lr"]) == (0.02, True, 1e-4)
    cfg = {**AXOLOTL, "optimizer": "muon", "adam_epsilon": 1e-6, "optim_args": "scalar_algorithm=lion"}
    rest = plugin.make(tiny(), cfg).param_groups[-1]
    assert (rest["algorithm"], rest["betas"]) == ("lion", (0.8, 0.9))


def test_axolotl_words_foreign_to_the_plugin_are_left_to_axolotl(plugin: Any) -> None:
    for optimizer in ("adamw_torch", None, "sinkgd"):
        trainer = trainer_of(tiny())
        assert plugin.Plugin().create_optimizer({**AXOLOTL, "optimizer": optimizer}, trainer) is None
        plugin.Plugin().post_trainer_create({**AXOLOTL, "optimizer": optimizer}, trainer)
        assert trainer.optimizer_cls_and_kwargs == ("theirs", {})


@pytest.mark.parametrize("key", ["lr_groups", "embedding_lr", "embedding_lr_scale", "loraplus_lr_ratio"])
def test_axolotl_keys_that_ask_for_other_groups_are_refused(key: str, plugin: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} is not read by oxidion.compat.axolotl"):
        plugin.make(tiny(), {**AXOLOTL, "optimizer": "muon", key: 0.5})


def test_axolotl_itself_loads_the_plugin_and_makes_the_optimizer(monkeypatch: Patch) -> None:
    base = peer("axolotl.integrations.base", monkeypatch)
    cfg_of = peer("axolotl.utils.dict", monkeypatch).DictDefault
    mixin = peer("axolotl.core.trainers.mixins.optimizer", monkeypatch).OptimizerMixin
    monkeypatch.delitem(sys.modules, "oxidion.compat.axolotl", raising=False)
    manager = base.PluginManager.get_instance()
    monkeypatch.setattr(manager, "plugins", type(manager.plugins)())
    manager.register("oxidion.compat.axolotl.Plugin")
    (own,) = manager.plugins.values()
    assert isinstance(own, base.BasePlugin)
    cfg = cfg_of({**AXOLOTL, "optimizer": "dion", "dion_lr": 0.05, "dion_rank_fraction": 0.5})
    model = tiny()
    keys = ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups")
    trainer = types.SimpleNamespace(
        model=model, optimizer=None, args=types.SimpleNamespace(**dict.fromkeys(keys))
    )
    manager.post_trainer_create(cfg, trainer)
    made = mixin.create_optimizer(trainer)
    assert type(made) is oxidion.Dion
    assert [made.param_groups[0][key] for key in ("lr", "rank_fraction")] == [0.05, 0.5]
    monkeypatch.setattr(manager, "_cfg", cfg, raising=False)
    assert type(manager.create_optimizer(trainer)) is oxidion.Dion
    sys.modules.pop("oxidion.compat.axolotl", None)


# -------------------------------------------------------------------------------------------- Megatron


def made_by(registry: Any, name: str, config: Any, model: nn.Module, **more: Any) -> Any:
    """The optimizer of an entry, made as Megatron makes it."""
    entry = registry._EMERGING_OPTIMIZERS[name]
    kwargs = entry.config_to_kwargs(config, [model], more.pop("pg_collection", None))
    return entry.optimizer_cls(stubs.groups_of(model, **more), **kwargs)


READY = {"muon_split_qkv": False, "muon_extra_scale_factor": 0.2, "muon_coefficient_type": "simple"}


@pytest.fixture
def registry(monkeypatch: Patch) -> Any:
    """Megatron's registry as a stand-in."""
    return stubs.megatron(monkeypatch)


def test_megatron_entry_makes_configured_muon_and_keeps_its_keys(registry: Any) -> None:
    assert megatron.register("Muon") == "oxidion_muon"
    assert megatron.register("Muon") == "oxidion_muon"
    config = stubs.Config(**READY, lr=0.03, weight_decay=0.2, muon_momentum=0.9, muon_nesterov=True)
    made = made_by(registry, "oxidion_muon", config, nn.Linear(6, 8))
    assert type(made) is oxidion.Muon
    group, empty = made.param_groups
    keys = ("lr", "weight_decay", "mu", "nesterov", "adjust_lr", "ns_steps")
    assert [group[key] for key in keys] == [0.03, 0.2, 0.9, True, "match_rms_adamw", 5]
    assert [tuple(row) for row in group["ns_coefficients"]] == [(3.4445, -4.775, 2.0315)] * 5
    assert (group["wd_mult"], empty["wd_mult"], group["max_lr"]) == (1.0, 0.0, 0.01)
    assert empty["params"] == []
    assert registry._EMERGING_OPTIMIZERS["oxidion_muon"].default_param_overrides == {
        "matrices": {"optimizer": "adam"}
    }


def test_megatron_steps_are_those_of_the_formula(registry: Any) -> None:
    megatron.register("Muon")
    config = stubs.Config(**READY, weight_decay=0.1, muon_nesterov=True)
    model = nn.Linear(6, 8, bias=False, dtype=torch.float64)
    made = made_by(registry, "oxidion_muon", config, model)
    expected, average = model.weight.detach().clone(), torch.zeros(8, 6, dtype=torch.float64)
    for seed in range(3):
        torch.manual_seed(seed)
        grad = torch.randn(8, 6, dtype=torch.float64)
        model.weight.grad = grad
        made.step()
        average.lerp_(grad, 0.05)
        x = grad.lerp(average, 0.95).T
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
        expected = expected * (1 - 0.01 * 0.1) - 0.01 * 0.2 * 8**0.5 * x.T
    torch.testing.assert_close(model.weight.detach(), expected, rtol=0, atol=1e-8)


def test_megatron_parameters_may_be_replaced_by_float32_copies(registry: Any) -> None:
    megatron.register("Muon")
    model = nn.Linear(6, 8, bias=False, dtype=torch.bfloat16)
    made = made_by(registry, "oxidion_muon", stubs.Config(**READY), model)
    main = model.weight.detach().clone().float()
    made.param_groups[0]["params"][0] = main
    registry._EMERGING_OPTIMIZERS["oxidion_muon"].init_state_fn(made, None)
    assert made.state[main]["momentum"].dtype == torch.float32
    main.grad = torch.ones_like(main)
    before = main.clone()
    made.step()
    assert not torch.equal(before, main)
    made.param_groups[0]["params"][:] = []  # whole parameters are shared out over ranks
    made.step()


def test_megatron_state_is_saved_and_loaded_with_its_group_keys(registry: Any) -> None:
    megatron.register("Muon")
    models = nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)
    models[1].load_state_dict(models[0].state_dict())
    one, two = (made_by(registry, "oxidion_muon", stubs.Config(**READY), model) for model in models)
    models[0].weight.grad = torch.ones(8, 6)
    one.step()
    models[1].load_state_dict(models[0].state_dict())
    two.load_state_dict(one.state_dict())
    assert two.param_groups[0]["lr_mult"] == 1.0
    for model, optimizer in zip(models, (one, two), strict=True):
        model.weight.grad = torch.arange(48.0).reshape(8, 6)
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize(
    ("mode", "factor", "rule"),
    [
        ("spectral", 0.2, "match_rms_adamw"),
        ("shape_scaling", 1.0, "original"),
        ("unit_rms_norm", 1.0, "spectral_norm"),
        ("spectral", 1.0, None),
        ("unit_rms_norm", 0.2, None),
    ],
)
def test_megatron_scales_that_muon_lacks_are_refused(
    mode: str, factor: float, rule: str | None, registry: Any
) -> None:
    megatron.register("Muon")
    config = stubs.Config(**{**READY, "muon_scale_mode": mode, "muon_extra_scale_factor": factor})
    if rule is not None:
        assert made_by(registry, "oxidion_muon", config, nn.Linear(2, 3)).param_groups[0]["adjust_lr"] == rule
        return
    with pytest.raises(ValueError, match=f"muon_scale_mode='{mode}' with muon_extra_scale_factor={factor}"):
        made_by(registry, "oxidion_muon", config, nn.Linear(2, 3))
    megatron.register("Muon", adjust_lr=None)
    assert made_by(registry, "oxidion_muon", config, nn.Linear(2, 3)).param_groups[0]["adjust_lr"] is None


def test_megatron_coefficients_repeat_as_in_emerging_optimizers(registry: Any) -> None:
    megatron.register("Muon")
    config = stubs.Config(**{**READY, "muon_coefficient_type": "polar_express", "muon_num_ns_steps": 4})
    group = made_by(registry, "oxidion_muon", config, nn.Linear(2, 3)).param_groups[0]
    assert [row[0] for row in group["ns_coefficients"]] == [8.0, 2.0, 2.0, 2.0]
    wrong = stubs.Config(**{**READY, "muon_coefficient_type": "custom"})
    with pytest.raises(
        ValueError, match="muon_coefficient_type must be one of 'simple', 'polar_express', got"
    ):
        made_by(registry, "oxidion_muon", wrong, nn.Linear(2, 3))


@pytest.mark.parametrize("optimizer", ["Dion", "NorMuon", "AdamW", "Lion", "Adafactor", "CAME"])
def test_megatron_entry_of_a_class_takes_register_arguments(optimizer: str, registry: Any) -> None:
    matrix = optimizer in {"Dion", "NorMuon"}
    more = {"rank_fraction": 0.5} if optimizer == "Dion" else {}
    more = {"relative_step": False} if optimizer == "Adafactor" else more
    name = megatron.register(optimizer, **more)
    config = stubs.Config(lr=0.02, weight_decay=0.1, adam_beta1=0.8, adam_eps=1e-7)
    model = nn.Linear(6, 8)
    made = made_by(registry, name, config, model, matrices=matrix)
    assert type(made) is getattr(oxidion, optimizer)
    group = made.param_groups[0]
    assert [group["lr"], group["weight_decay"]] == [0.02, 0.1]
    assert all(group[key] == value for key, value in more.items())
    if optimizer == "AdamW":
        assert (tuple(group["betas"]), group["eps"]) == ((0.8, 0.999), 1e-7)
    overrides = registry._EMERGING_OPTIMIZERS[name].default_param_overrides
    assert bool(overrides) == matrix
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    made.step()


def test_megatron_names_and_classes_that_are_none_are_refused(registry: Any) -> None:
    with pytest.raises(ValueError, match=r"optimizer must be one of APOLLOAdamW, .*, got 'Sgd'"):
        megatron.register("Sgd")
    with pytest.raises(ValueError, match="name must be none of Megatron's optimizers, got 'muon'"):
        megatron.register("Muon", name="muon")
    assert megatron.register("Muon", name="mine") == "mine"


def test_megatron_lm_takes_the_name_on_its_command_line(registry: Any) -> None:
    made = megatron.extra_args(stubs.parser())
    assert made.parse_args(["--optimizer", "oxidion_muon"]).optimizer == "oxidion_muon"
    megatron.register("Dion")
    assert megatron.extra_args(stubs.parser()).parse_args(["--optimizer", "oxidion_dion"]).optimizer
    assert made.parse_args(["--optimizer", "adam"]).optimizer == "adam"


class Group:
    """A process group that has nothing but its size."""

    def __init__(self, size: int) -> None:
        self.count = size

    def size(self) -> int:
        """Number of ranks."""
        return self.count


def cut(model: nn.Module, dim: int = 0) -> nn.Module:
    """The model with the attributes of tensor parallelism on its weights."""
    for param in model.parameters():
        param.tensor_model_parallel, param.partition_dim = True, dim
        param.partition_stride = 1
    return model


PARTS = types.SimpleNamespace(tp=Group(2), expt_tp=Group(1))


def test_megatron_parts_step_separately_only_where_asked_for(registry: Any) -> None:
    megatron.register("Muon")
    by_part = stubs.Config(**READY)
    made = made_by(registry, "oxidion_muon", by_part, cut(nn.Linear(6, 8)), pg_collection=PARTS)
    assert type(made) is oxidion.Muon
    for optimizer in ("Dion", "Lamb", "Adafactor"):
        name = megatron.register(optimizer, relative_step=False) if optimizer == "Adafactor" else None
        name = name or megatron.register(optimizer)
        with pytest.raises(
            oxidion.LayoutError, match=rf"{optimizer} reads parts .* along dimension 1: pass tp_mode"
        ):
            made_by(registry, name, by_part, cut(nn.Linear(6, 8), 1), pg_collection=PARTS)
    name = megatron.register("Dion", tp_mode="blockwise")
    assert type(made_by(registry, name, by_part, cut(nn.Linear(6, 8)), pg_collection=PARTS)) is oxidion.Dion
    name = megatron.register("Lion")
    assert type(made_by(registry, name, by_part, cut(nn.Linear(6, 8)), pg_collection=PARTS)) is oxidion.Lion
    name = megatron.register("Dion")
    alone = types.SimpleNamespace(tp=Group(1), expt_tp=Group(2))
    assert made_by(registry, name, by_part, cut(nn.Linear(6, 8)), pg_collection=alone)
    expert = cut(nn.Linear(6, 8))
    expert.weight.expert_tp = True
    with pytest.raises(oxidion.LayoutError, match="Dion reads parts"):
        made_by(registry, name, by_part, expert, pg_collection=alone)


def test_megatron_layouts_that_are_ambiguous_are_refused(registry: Any) -> None:
    megatron.register("Muon")
    whole = stubs.Config(**READY, muon_tp_mode="duplicated")
    with pytest.raises(oxidion.LayoutError, match=r"parameter 0 of group 0: it is cut along .* pass the"):
        made_by(registry, "oxidion_muon", whole, cut(nn.Linear(6, 8)))
    heads = nn.Linear(6, 9)
    heads.weight.is_qkv = True
    with pytest.raises(oxidion.LayoutError, match=r"interleaved by head .*--muon-no-split-qkv"):
        made_by(registry, "oxidion_muon", stubs.Config(**{**READY, "muon_split_qkv": True}), heads)
    assert made_by(registry, "oxidion_muon", stubs.Config(**READY), heads)
    spread = nn.Linear(6, 8)
    spread.weight.is_gtp_weight_remat = True
    with pytest.raises(oxidion.LayoutError, match="GTP"):
        made_by(registry, "oxidion_muon", stubs.Config(**READY), spread)
    with pytest.raises(ValueError, match="tp_mode must be one of 'blockwise'"):
        made_by(registry, "oxidion_muon", stubs.Config(**READY, muon_tp_mode="spread"), nn.Linear(6, 8))


@pytest.fixture
def real_megatron(monkeypatch: Patch) -> Any:
    """Megatron's own registry, as it was when the test is done."""
    module = peer("megatron.core.optimizer.emerging_optimizers", monkeypatch)
    if not module.HAVE_EMERGING_OPTIMIZERS:
        pytest.skip("no Emerging-Optimizers")
    monkeypatch.setattr(module, "_EMERGING_OPTIMIZERS", dict(module._EMERGING_OPTIMIZERS))
    return module


@pytest.mark.parametrize("coefficients", ["quintic", "polar_express"])
def test_megatron_itself_steps_alike_with_its_muon_and_this_one(
    coefficients: str, real_megatron: Any, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("RANK", "0")
    config_cls = importlib.import_module("megatron.core.optimizer").OptimizerConfig
    megatron.register("Muon", orth_dtype="float32")
    config = config_cls(
        lr=0.01,
        weight_decay=0.1,
        muon_split_qkv=False,
        muon_extra_scale_factor=0.2,
        muon_fp32_matmul_prec="highest",
        muon_coefficient_type=coefficients,
        muon_nesterov=True,
    )
    models = [nn.Linear(6, 8, bias=False), nn.Linear(6, 8, bias=False)]
    start = models[0].weight.detach().clone()
    for model in models:
        model.weight.data.copy_(start)
        model.config = types.SimpleNamespace(num_attention_heads=2, num_query_groups=2, kv_channels=2)
    made = [
        real_megatron._create_emerging_optimizer(config, stubs.groups_of(model), name, [model], None)
        for name, model in zip(("muon", "oxidion_muon"), models, strict=True)
    ]
    (theirs, _), (ours, init) = made
    assert (type(theirs), type(ours)) == (real_megatron.TensorParallelMuon, oxidion.Muon)
    init(ours, config)
    assert ours.state[models[1].weight]["momentum"].shape == (8, 6)
    for seed in range(3):
        torch.manual_seed(seed)
        grad = torch.randn(8, 6)
        for model, optimizer in zip(models, (theirs, ours), strict=True):
            model.weight.grad = grad.clone()
            optimizer.step()
    one, two = (model.weight.detach() for model in models)
    # Both in float32; the division by the norm differs by an epsilon. Measured: 2e-7.
    assert float((one - two).norm()) <= 1e-5 * float((one - start).norm())


def test_emerging_optimizers_itself_finds_the_classes(monkeypatch: Patch) -> None:
    found = peer("emerging_optimizers.registry", monkeypatch)
    monkeypatch.setattr(found, "_OPTIMIZERS", dict(found._OPTIMIZERS))
    made = megatron.register_emerging()
    assert (
        {"oxidion_muon", "oxidion_dion", "oxidion_adamw"} <= set(made) <= set(found.get_optimizer_name_list())
    )
    assert megatron.register_emerging() == made
    assert found.get_optimizer_cls("oxidion_dion") is oxidion.Dion
    configured = found.get_configured_optimizer_cls("oxidion_muon", momentum=0.9)
    assert configured([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]["mu"] == 0.9


def test_emerging_optimizers_registry_by_a_stand_in(monkeypatch: Patch) -> None:
    kept: dict[str, type] = {}
    stubs.installed(
        monkeypatch,
        "emerging_optimizers.registry",
        get_optimizer_name_list=lambda: list(kept),
        register_optimizer=lambda name: lambda cls: kept.setdefault(name, cls),
    )
    assert megatron.register_emerging() == list(kept) == megatron.register_emerging()
    assert kept["oxidion_normuon"] is oxidion.NorMuon
