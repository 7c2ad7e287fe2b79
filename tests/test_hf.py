"""The factory that transformers' Trainer calls: by its protocol, and by its code where it is installed."""

from __future__ import annotations

import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.compat import hf
from oxidion.compat.hf import OptimizerFactory


class Tiny(nn.Module):
    """What a language model has: an embedding, a block, a norm, an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.block = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.lm_head(self.norm(self.block(self.embed(tokens))))
        return logits


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    held = {id(param) for param in group["params"]}
    return {name for name, param in model.named_parameters() if id(param) in held}


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(10)).square().sum().backward()
    optimizer.step()


SCALARS = {"embed.weight", "block.bias", "norm.weight", "norm.bias", "lm_head.weight"}


@pytest.mark.parametrize("optimizer", ["Dion", oxidion.Muon], ids=["by name", "by class"])
def test_matrices_go_to_the_class_and_the_rest_to_adamw(optimizer: Any) -> None:
    model = Tiny()
    made = OptimizerFactory()(model, optimizer=optimizer, lr=0.02, groups={"scalar_lr": 0.001})
    assert type(made) is (oxidion.Dion if optimizer == "Dion" else oxidion.Muon)
    matrices, rest = made.param_groups
    assert names(model, matrices) == {"block.weight"}
    assert names(model, rest) == SCALARS
    assert (matrices["algorithm"], matrices["lr"]) == (made._ALGORITHM, 0.02)
    assert (rest["algorithm"], rest["lr"], rest["weight_decay"]) == ("adamw", 0.001, 0.0)
    before = model.block.weight.detach().clone()
    step(model, made)
    assert not torch.equal(before, model.block.weight)


def test_classes_for_any_shape_step_everything_themselves() -> None:
    made = OptimizerFactory()(Tiny(), "Lion", lr=0.01, weight_decay=0.5)
    assert [group["algorithm"] for group in made.param_groups] == ["lion", "lion"]
    assert [group["weight_decay"] for group in made.param_groups] == [0.5, 0.0]
    assert [group["lr"] for group in made.param_groups] == [0.01, 0.01]


def test_keys_of_the_groups_and_arguments_of_the_class_arrive() -> None:
    groups = {"scalar_algorithm": "lion", "scalar_patterns": ["block"], "scalar_lr": 0.01}
    model = Tiny()
    made = OptimizerFactory()(model, lr=0.01, groups=groups)
    (rest,) = made.param_groups
    assert (rest["algorithm"], names(model, rest)) == ("lion", SCALARS | {"block.weight"})
    matrices, _ = OptimizerFactory()(model, lr=0.01, mu=0.5, groups={"rank_fraction": 0.5}).param_groups
    assert (matrices["mu"], matrices["rank_fraction"]) == (0.5, 0.5)
    assert "scalar_patterns" in groups


@pytest.mark.parametrize(
    ("optimizer", "error"), [("Sgd", ValueError), ("LayoutError", ValueError), (torch.optim.SGD, TypeError)]
)
def test_class_of_another_package_is_refused(optimizer: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"optimizer must be (one|a class) of"):
        OptimizerFactory()(Tiny(), optimizer, lr=0.01)


def test_trainer_of_transformers_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if folder := os.environ.get("OXIDION_PEERS"):
        monkeypatch.setattr(sys, "path", [*sys.path, str(Path(folder).expanduser().resolve())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytest.importorskip(
            "transformers.trainer", exc_type=ImportError, reason="no transformers: see test_import_peers.py"
        )
    model, kwargs = Tiny(), {"optimizer": "Muon", "lr": 0.02, "groups": {"scalar_lr": 0.001}}
    # What the method reads of a Trainer, whose constructor needs accelerate.
    part = types.SimpleNamespace(
        model=model,
        optimizer=None,
        optimizer_cls_and_kwargs=(OptimizerFactory, kwargs),
        args=types.SimpleNamespace(weight_decay=0.1),
        get_decay_parameter_names=lambda _: ["block.weight"],
    )
    made = trainer.Trainer.create_optimizer(part)
    assert type(made) is oxidion.Muon
    assert [names(model, group) for group in made.param_groups] == [{"block.weight"}, SCALARS]
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda done: 1.0 / (1 + done))
    step(model, made)
    scheduler.step()
    assert [group["lr"] for group in made.param_groups] == [0.01, 0.0005]


CLASSES = [name for name in oxidion.optim.__all__ if hasattr(getattr(oxidion, name), "_ALGORITHM")]


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_has_a_name_and_gets_the_settings_of_adam(name: str) -> None:
    adam = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    given = {"learning_rate": 1e-3, "weight_decay": 0.0, "optim_args": None, "optim_target_modules": None}
    cls, kwargs = hf.from_name(name.lower(), types.SimpleNamespace(**given, **adam))
    made = cls(Tiny().parameters(), **kwargs) if issubclass(cls, torch.optim.Optimizer) else None
    made = made or cls()(Tiny(), **({**kwargs, "summary": False} if "optimizer" in kwargs else kwargs))
    assert type(made) is getattr(oxidion, name)
    rest = made.param_groups[-1]
    assert rest["lr"] == 1e-3
    if made._MATRIX:
        assert (rest["algorithm"], rest["betas"], rest.get("eps", rest.get("epsilon"))) == (
            "adamw",
            (0.5, 0.6),
            1e-3,
        )
    elif "betas" in rest:
        assert rest["betas"][:2] == (0.5, 0.6)


def arguments(**more: Any) -> types.SimpleNamespace:
    """Arguments of a training."""
    adam = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_epsilon": 1e-3}
    given = {"learning_rate": 1e-3, "weight_decay": 0.0, "optim_args": None, "optim_target_modules": None}
    return types.SimpleNamespace(**{**given, **adam, **more})


@pytest.mark.parametrize("name", ["adamw", "lion", "adamw_torch", "ademamix", "adafactor", "muon", "soap"])
@pytest.mark.parametrize("by_args", [True, False])
def test_rates_of_parts_reach_every_name_that_is_a_class(name: str, by_args: bool) -> None:
    args = arguments(optim_args="scalar_lr=3e-4" if by_args else None)
    cls, kwargs = hf.from_name(name, args, **({} if by_args else {"scalar_lr": 3e-4}))
    groups = cls()(Tiny(), summary=False, **kwargs).param_groups
    assert {group["lr"] for group in groups} == {1e-3, 3e-4}


def test_lion_with_matrices_has_training_betas_and_no_epsilon() -> None:
    cls, kwargs = hf.from_name("muon", arguments(optim_args="scalar_algorithm=lion"))
    rest = cls()(Tiny(), summary=False, **kwargs).param_groups[-1]
    assert (rest["algorithm"], rest["betas"]) == ("lion", (0.5, 0.6))


@pytest.mark.parametrize("name", ["galore_adamw", "schedule_free_adamw"])
def test_names_sorting_like_transformers_refuse_rates_of_parts(name: str) -> None:
    args = arguments(
        optim_target_modules="all-linear", optim_args="scalar_lr=3e-4", lr_scheduler_type="constant"
    )
    with pytest.raises(ValueError, match=f"optim='{name}' .* does not read 'scalar_lr'.*'galoreadamw'"):
        hf.from_name(name, args)


def test_error_for_a_name_like_no_other_lists_all() -> None:
    with pytest.raises(ValueError, match=r"got 'm'; it has adafactor, .*soapmuon"):
        hf.from_name("m", arguments())
    with pytest.raises(ValueError, match="the nearest is 'muon'"):
        hf.from_name("mun", arguments())


def test_schedule_free_share_is_asked_for_by_the_trainers_word() -> None:
    given = {"learning_rate": 1e-3, "weight_decay": 0.0, "optim_args": None, "adam_epsilon": 1e-8}
    args = types.SimpleNamespace(**given, adam_beta1=0.0, adam_beta2=0.9)
    with pytest.raises(ValueError, match=r"schedule_free_adamw needs adam_beta1 above 0, got 0\.0"):
        hf.from_name("schedule_free_adamw", args)


@pytest.mark.parametrize("spelled", ["true", "True", "TRUE"])
def test_flags_of_optim_args_are_flags_in_any_case(spelled: str) -> None:
    cls, kwargs = hf.from_name("muon", arguments(optim_args=f"master_weights={spelled},cautious_wd=false"))
    groups = cls()(Tiny().bfloat16(), summary=False, **kwargs).param_groups
    assert {(group["master_weights"], group["cautious_wd"]) for group in groups} == {(True, False)}
