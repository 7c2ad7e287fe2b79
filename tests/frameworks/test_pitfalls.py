"""Sentences of ``examples/frameworks`` about what does not happen by itself."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.compat.hf import OptimizerFactory

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the packages about themselves


def package(name: str) -> Any:
    """A package of the dependency group ``frameworks``, or a skip."""
    if importlib.util.find_spec(name.partition(".")[0]) is None and not os.environ.get(
        "OXIDION_REQUIRE_FRAMEWORKS"
    ):
        pytest.skip(f"no {name}: pip install --group frameworks")
    return importlib.import_module(name)


def tiny_llama() -> nn.Module:
    """A Llama of one layer."""
    transformers = package("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=32, **sizes))


def algorithms(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Which algorithm steps each parameter, by name."""
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        names[id(param)]: group["algorithm"] for group in optimizer.param_groups for param in group["params"]
    }


def trainer_with(kwargs: tuple[Any, dict[str, Any]], folder: object) -> Any:
    """A Trainer whose own learning rate and decay are none that the tests give elsewhere."""
    transformers = package("transformers")
    args = transformers.TrainingArguments(
        output_dir=str(folder), learning_rate=0.5, weight_decay=0.25, use_cpu=True, report_to="none"
    )
    return transformers.Trainer(tiny_llama(), args, optimizer_cls_and_kwargs=kwargs)


def test_trainer_rate_and_decay_do_not_reach_the_factory(tmp_path: object) -> None:
    kwargs = {"optimizer": "Muon", "lr": 0.02, "weight_decay": 0.01, "groups": {"scalar_lr": 3e-3}}
    optimizer = trainer_with((OptimizerFactory, kwargs), tmp_path).create_optimizer()
    found = {(group["algorithm"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {("muon", 0.02, 0.01), ("adamw", 3e-3, 0.0)}


def test_trainer_given_a_class_orthonormalizes_embeddings_too(
    tmp_path: object,
) -> None:
    trainer = trainer_with((oxidion.Muon, {"lr": 0.02, "strict": False}), tmp_path)
    found = algorithms(trainer.model, trainer.create_optimizer())
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == "muon"


@pytest.mark.parametrize("unscales", [False, True])
def test_lightning_clips_mixed_precision_only_where_it_unscales(unscales: bool) -> None:
    amp = package("lightning.pytorch.plugins.precision.amp")
    plugin = amp.MixedPrecision("bf16-mixed", "cpu")
    layer = nn.Linear(4, 4)
    optimizer = oxidion.Muon(oxidion.param_groups(layer, algorithm="muon", lr=0.02))
    layer(torch.ones(2, 4)).sum().mul(100).backward()
    if not unscales:
        with pytest.raises(RuntimeError, match="does not allow for gradient clipping because it performs"):
            plugin.clip_gradients(optimizer, 1.0)
        return
    optimizer._step_supports_amp_scaling = False
    plugin.clip_gradients(optimizer, 1.0)
    norms = [param.grad.norm() for param in layer.parameters() if param.grad is not None]
    assert torch.stack(norms).norm().item() == pytest.approx(1.0, abs=1e-4)


def test_timm_scheduler_multiplies_by_the_scale_of_a_muon_group() -> None:
    scheduler = package("timm.scheduler")
    layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    groups = [{"params": [layer.weight], "lr_scale": 0.5**at} for at, layer in enumerate(layers)]
    optimizer = oxidion.Muon(groups, lr=0.25)
    schedule = scheduler.CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    schedule.step_update(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in optimizer.param_groups] == [1.0, 0.5]


def test_timm_layer_decay_groups_are_taken_by_adamw() -> None:
    package("timm")
    timm_optim = package("timm.optim")
    sizes = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    model = package("timm").create_model("vit_tiny_patch16_224", **sizes)
    groups = timm_optim.param_groups_layer_decay(model, weight_decay=0.05, layer_decay=0.5)
    optimizer = oxidion.AdamW(groups, lr=0.1)
    assert {group["lr_scale"] for group in optimizer.param_groups} == {0.25, 0.5, 1.0}


def adapted() -> Any:
    """LoRA of an embedding and of a projection."""
    peft = package("peft")
    return peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]))


def test_peft_adapters_of_embeddings_are_no_matrices() -> None:
    model = adapted()
    optimizer = oxidion.Muon(oxidion.param_groups(model, algorithm="muon", lr=0.02))
    found = {name.rpartition("lora_")[2]: used for name, used in algorithms(model, optimizer).items()}
    assert found == {
        "A.default.weight": "muon",
        "B.default.weight": "muon",
        "embedding_A.default": "adamw",
        "embedding_B.default": "adamw",
    }


def test_peft_first_step_moves_b_and_not_a() -> None:
    model = adapted()
    optimizer = oxidion.Muon(oxidion.param_groups(model, algorithm="muon", lr=0.02, weight_decay=0.0))
    layer = next(module for name, module in model.named_modules() if name.endswith("q_proj"))
    thin: list[Tensor] = [layer.lora_A["default"].weight, layer.lora_B["default"].weight]

    def moved() -> list[bool]:
        before = [weight.detach().clone() for weight in thin]
        optimizer.zero_grad()
        tokens = torch.arange(12).view(2, 6)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        return [not torch.equal(weight, old) for weight, old in zip(thin, before, strict=True)]

    assert moved() == [False, True]
    assert moved() == [True, True]
