"""Names of transformers' optimizers as classes and arguments: by the Trainer's protocol and by its code."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion.backward import BackwardOptimizer
from oxidion.compat.hf import LowRankFactory, OptimizerFactory, from_name, read_optim_args

from .models import MATRICES, REST, backward, names, peer, tiny


def arguments(**given: Any) -> Any:
    """What is read of ``TrainingArguments``, with its defaults."""
    defaults = {
        "learning_rate": 5e-5,
        "weight_decay": 0.0,
        "adam_beta1": 0.9,
        "adam_beta2": 0.999,
        "adam_epsilon": 1e-8,
        "optim_args": None,
        "optim_target_modules": None,
    }
    return types.SimpleNamespace(**{**defaults, **given})


def create(model: nn.Module, args: Any, cls: Any, kwargs: dict[str, Any]) -> Any:
    """What a Trainer makes of a class or a factory."""
    if not issubclass(cls, torch.optim.Optimizer):
        return cls()(model, **kwargs)
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]
    return cls(groups, **kwargs)


CLASSES = {
    "adamw_torch": (oxidion.AdamW, 32),
    "adamw_torch_fused": (oxidion.AdamW, 32),
    "adamw_torch_8bit": (oxidion.AdamW, 8),
    "adamw_8bit": (oxidion.AdamW, 8),
    "adamw_bnb_8bit": (oxidion.AdamW, 8),
    "schedule_free_adamw": (oxidion.AdamW, 32),
    "adafactor": (oxidion.Adafactor, 32),
    "ademamix": (oxidion.AdEMAMix, 32),
    "ademamix_8bit": (oxidion.AdEMAMix, 8),
    "lion_32bit": (oxidion.Lion, 32),
    "lion_8bit": (oxidion.Lion, 8),
    "galore_adamw": (oxidion.GaLoreAdamW, 32),
    "galore_adamw_8bit": (oxidion.GaLoreAdamW, 8),
    "apollo_adamw": (oxidion.APOLLOAdamW, 32),
    "muon": (oxidion.Muon, 32),
    "normuon": (oxidion.NorMuon, 32),
    "dion": (oxidion.Dion, 32),
    "dion2": (oxidion.Dion2, 32),
}


@pytest.mark.parametrize("name", CLASSES)
def test_name_makes_an_optimizer_that_steps_every_parameter(name: str) -> None:
    low_rank = name.startswith(("galore", "apollo"))
    targets = {"optim_target_modules": "all-linear", "optim_args": "rank=2"} if low_rank else {}
    args = arguments(learning_rate=0.01, weight_decay=0.125, **targets)
    model = tiny()
    made = create(model, args, *from_name(name, args))
    assert (type(made), made.param_groups[0]["state_bits"]) == CLASSES[name]
    assert {group["lr"] for group in made.param_groups} == {0.01}
    assert {group["weight_decay"] for group in made.param_groups} == {0.0, 0.125}
    held = [param for group in made.param_groups for param in group["params"]]
    assert names(model, held) == MATRICES | REST
    before = [param.detach().clone() for param in held]
    backward(model)
    made.step()
    assert not any(map(torch.equal, before, held))


def test_arguments_of_adam_count_and_more_arguments_win() -> None:
    args = arguments(adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, learning_rate=0.1, weight_decay=0.5)
    cls, kwargs = from_name("adamw_torch", args, lr=0.2)
    assert cls is oxidion.AdamW
    assert kwargs == {"lr": 0.2, "weight_decay": 0.5, "betas": (0.8, 0.95), "eps": 1e-6}
    assert from_name("lion_32bit", args)[1]["betas"] == (0.8, 0.95)


def test_low_rank_groups_have_targets_and_what_optim_args_say() -> None:
    args = arguments(
        optim_target_modules=["attn", r"lm_.*"],
        optim_args="rank=3, update_proj_gap=50, scale=0.5, proj_type=right, svd=gram",
        weight_decay=0.1,
        adam_epsilon=1e-7,
    )
    model = tiny()
    cls, kwargs = from_name("galore_adamw", args)
    assert cls is LowRankFactory
    made = cls()(model, **kwargs)
    projected, others, bare = made.param_groups
    assert names(model, projected["params"]) == {"block.attn.weight", "lm_head.weight"}
    assert names(model, others["params"]) == {"embed.weight", "block.mlp.weight"}
    assert names(model, bare["params"]) == {name for name in REST if "bias" in name or "norm" in name}
    keys = ("rank", "update_proj_gap", "scale", "proj_type", "svd", "weight_decay", "eps")
    assert [projected[key] for key in keys] == [3, 50, 0.5, "right", "gram", 0.1, 1e-7]
    assert [group["rank"] for group in (others, bare)] == [None, None]
    assert [group["weight_decay"] for group in (others, bare)] == [0.1, 0.0]
    assert projected["param_names"] == ["block.attn.weight", "lm_head.weight"]


@pytest.mark.parametrize(
    ("targets", "found"),
    [
        ("all-linear", MATRICES | {"lm_head.weight"}),
        ("all_linear", MATRICES | {"lm_head.weight"}),
        (r".*\.mlp", {"block.mlp.weight"}),
        (["mlp"], {"block.mlp.weight"}),
        (["embed", "attn"], {"block.attn.weight"}),
    ],
)
def test_targets_name_linear_layers_as_in_transformers(targets: Any, found: set[str]) -> None:
    model = tiny()
    cls, kwargs = from_name("apollo_adamw", arguments(optim_target_modules=targets, optim_args="rank=2"))
    assert names(model, cls()(model, **kwargs).param_groups[0]["params"]) == found


def test_targets_that_are_missing_or_name_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="GaLoreAdamW needs optim_target_modules"):
        from_name("galore_adamw", arguments())
    cls, kwargs = from_name("galore_adamw", arguments(optim_target_modules=["embed"]))
    with pytest.raises(ValueError, match=r"optim_target_modules=\['embed'\] names no nn.Linear"):
        cls()(tiny(), **kwargs)


def test_matrices_by_name_come_with_adamw_for_the_rest() -> None:
    args = arguments(learning_rate=0.02, weight_decay=0.1, optim_args={"mu": 0.9})
    cls, kwargs = from_name("dion", args, groups={"scalar_lr": 0.001, "rank_fraction": 0.5})
    assert cls is OptimizerFactory
    matrices, rest = cls()(tiny(), **kwargs).param_groups
    assert [matrices[key] for key in ("mu", "rank_fraction", "lr")] == [0.9, 0.5, 0.02]
    assert [rest[key] for key in ("algorithm", "lr", "weight_decay")] == ["adamw", 0.001, 0.0]


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, {}),
        ("", {}),
        ("a=1, b=2.5,c=True,d=left,e=1e-3", {"a": 1, "b": 2.5, "c": True, "d": "left", "e": 1e-3}),
        ({"a": "0.5", "b": 3}, {"a": 0.5, "b": 3}),
    ],
)
def test_optim_args_are_read_as_text_and_as_mapping(given: Any, read: dict[str, Any]) -> None:
    assert read_optim_args(given) == read


def test_optim_args_without_a_value_are_refused() -> None:
    with pytest.raises(ValueError, match="'rank' has no value"):
        from_name("adamw_torch", arguments(optim_args="rank"))


def test_settings_of_other_packages_are_those_of_this_one() -> None:
    rounded = arguments(optim_args="bf16_stochastic_round=True")
    assert from_name("adamw_torch_8bit", rounded)[1]["stochastic_rounding"] is True
    kept = arguments(optim_args="master_weights=True")
    assert from_name("adamw_torch", kept)[1]["master_weights"] is True
    slow = arguments(optim_args="beta3=0.999,alpha=8,t_alpha=100,t_beta3=100")
    settings = from_name("ademamix", slow)[1]
    assert (settings["betas"], settings["alpha"]) == ((0.9, 0.999, 0.999), 8)
    assert settings["t_alpha_beta3"] == 100
    with pytest.raises(
        ValueError, match="t_alpha and t_beta3 of AdEMAMix must be equal here, got 100 and 50"
    ):
        from_name("ademamix", arguments(optim_args="t_alpha=100,t_beta3=50"))
    with pytest.raises(ValueError, match="proj must be 'random'"):
        from_name("apollo_adamw", arguments(optim_target_modules="all-linear", optim_args="proj=svd"))


LAYERWISE = ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "apollo_adamw_layerwise")
TARGETS = {"optim_target_modules": "all-linear", "optim_args": "rank=2"}


@pytest.mark.parametrize("name", LAYERWISE)
def test_layerwise_names_step_in_backward_as_others_after_it(name: str) -> None:
    args = arguments(learning_rate=0.01, max_grad_norm=0.0, **TARGETS)
    models = [tiny(), tiny()]
    models[1].load_state_dict(models[0].state_dict())
    made = [
        create(model, args, *from_name(word, args))
        for model, word in zip(models, (name.removesuffix("_layerwise"), name), strict=True)
    ]
    for model, optimizer in zip(models, made, strict=True):
        for _ in range(3):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(made[1], BackwardOptimizer)
    assert type(made[1].optimizer) is type(made[0])
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    backward(models[1])
    assert all(param.grad is None for param in models[1].parameters())


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_grad_norm": 1.0}, r"needs max_grad_norm=0, got 1\.0: the norm of all gradients is not known"),
        ({"gradient_accumulation_steps": 4}, "needs gradient_accumulation_steps=1, got 4"),
        ({"fp16": True}, "needs fp16=False, got True: its GradScaler"),
    ],
    ids=["clipping", "accumulation", "scaler"],
)
def test_layerwise_names_refuse_what_changes_gradients_later(
    name: str, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=f"^{name} {text}"):
        from_name(name, arguments(**TARGETS, **given))


REFUSED = {
    "schedule_free_radam": "that algorithm. Use 'schedule_free_adamw'",
    "galore_adafactor": "GaLore with Adafactor's moments. Use 'galore_adamw_8bit'",
    "galore_adafactor_layerwise": "GaLore with Adafactor's moments. Use 'galore_adamw_8bit'",
    "paged_adamw_8bit": "states paged between host and device. Use 'adamw_8bit'",
    "adamw_torch_4bit": "states of 4 bits. Use 'adamw_torch_8bit'",
    "adamw_torch_xla": "devices other than CPUs",
    "rmsprop_bnb_8bit": "that algorithm. Use transformers' own",
    "lomo": "that algorithm. Use transformers' own",
}


@pytest.mark.parametrize("name", REFUSED)
def test_name_without_a_counterpart_says_what_to_take_instead(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^optim='{name}': oxidion does not have {REFUSED[name]}"):
        from_name(name, arguments())


def test_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="got 'adamw_torh'; the nearest is 'adamw_torch'"):
        from_name("adamw_torh", arguments())


def test_every_transformers_name_is_taken_or_refused_with_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = peer("transformers.training_args", monkeypatch).OptimizerNames
    args = arguments(optim_target_modules="all-linear")
    taken = {*CLASSES, *LAYERWISE}

    def is_taken(member: Any) -> bool:
        with (
            pytest.raises(ValueError, match="oxidion does not have")
            if member.value not in taken
            else nullcontext()
        ):
            from_name(member, args)
        return member.value in taken

    own = {"muon", "normuon", "dion", "dion2"}
    assert {member.value for member in known if is_taken(member)} == taken - own


@pytest.mark.parametrize(
    "name", ["adamw_torch", "adafactor", "galore_adamw", "galore_adamw_layerwise", "dion"]
)
def test_trainer_of_transformers_makes_it_and_schedules_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = peer("transformers.trainer", monkeypatch)
    args = arguments(learning_rate=0.02, weight_decay=0.1, optim_target_modules=["attn"])
    args.optim_args = "rank=2" if name.startswith("galore_adamw") else None
    model = tiny()
    part = types.SimpleNamespace(
        model=model,
        optimizer=None,
        optimizer_cls_and_kwargs=from_name(name, args),
        args=args,
        get_decay_parameter_names=lambda _: [*MATRICES, "lm_head.weight", "embed.weight"],
    )
    made = trainer.Trainer.create_optimizer(part)
    assert type(made) is (BackwardOptimizer if "layerwise" in name else CLASSES[name][0])
    held = [param for group in made.param_groups for param in group["params"]]
    assert names(model, held) == MATRICES | REST
    assert {group["weight_decay"] for group in made.param_groups} == {0.0, 0.1}
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda done: 1.0 / (1 + done))
    backward(model)
    made.step()
    scheduler.step()
    assert {group["lr"] for group in made.param_groups} == {0.01}


@pytest.mark.parametrize(("name", "module"), [("galore_adamw", "galore_torch"), ("adafactor", None)])
def test_steps_are_those_of_the_class_that_transformers_takes(
    name: str, module: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = peer("transformers.trainer", monkeypatch)
    if module:
        peer(module, monkeypatch)
    args = arguments(learning_rate=0.01, optim=name, optim_target_modules=["mlp"], parallel_mode=None)
    args.optim_args = "rank=2,update_proj_gap=10" if module else None
    models = tiny(), tiny()
    kept = {key: param.detach().clone() for key, param in models[0].named_parameters()}
    theirs, kwargs = trainer.Trainer.get_optimizer_cls_and_kwargs(args, models[0])
    if module:  # it adds epsilon before the correction of the bias: so small that it does not show
        args.adam_epsilon = kwargs["eps"] = 1e-14
        kwargs["no_deprecation_warning"] = True
    trained = [param for param in models[0].parameters() if param.requires_grad]
    optimizers = (
        theirs(kwargs.pop("params", trained), **kwargs),
        create(models[1], args, *from_name(name, args)),
    )
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
    states = models[0].state_dict(), models[1].state_dict()
    for key, start in kept.items():
        one, other = states[0][key], states[1][key]
        # Adam divides by sizes of gradients: roundings of small ones are seen in full. Measured: 1.7e-6.
        assert float((one - other).norm()) <= 2e-5 * float((one - start).norm()), key


@pytest.mark.parametrize("decay", [0.0, 0.125])
def test_schedule_free_adamw_is_that_of_its_authors(decay: float) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    args = arguments(learning_rate=0.01, weight_decay=decay, optim_args="weight_lr_power=1.0,r=0.5")
    args.lr_scheduler_type = types.SimpleNamespace(value="constant")
    models = [tiny().double(), tiny().double()]
    models[1].load_state_dict(models[0].state_dict())
    mine = create(models[0], args, *from_name("schedule_free_adamw", args))
    trained = [param for param in models[1].parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": decay},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]
    its = schedulefree.AdamWScheduleFree(groups, lr=0.01, weight_lr_power=1.0, r=0.5)
    its.train()
    for _ in range(10):
        for model, optimizer in zip(models, (mine, its), strict=True):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
    for optimizer in (mine, its):
        optimizer.eval()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("keys", "advice"),
    [
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type='linear'.*'constant'"),
        ({"lr_scheduler_type": "constant", "warmup_steps": 10}, "'constant_with_warmup'"),
    ],
)
def test_schedule_free_adamw_refuses_a_schedule(keys: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        from_name("schedule_free_adamw", arguments(**keys))
