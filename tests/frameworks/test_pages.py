"""Scripts of frameworks that not every machine has, run where those are; wandb by a stand-in too."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oxidion
import oxidion.compat.megatron

from . import stubs
from .models import peer

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
Patch = pytest.MonkeyPatch


def script(name: str) -> Any:
    """A script of a framework, imported; what it imports has to be there."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_scalars_name_every_parameter_and_what_was_measured() -> None:
    written: dict[int, dict[str, float]] = {}
    script("with_logging").train(lambda values, step: written.__setitem__(step, values))
    assert [*written] == [0, 50]
    measured = written[0]
    for key in ("update_rms", "param_rms"):
        assert {name for name in NAMES if measured[f"optimizer/{key}/{name}"] > 0} == NAMES
    assert {name for name in measured if "orthogonality_error" in name} == {
        "optimizer/orthogonality_error/0.weight",
        "optimizer/orthogonality_error/2.weight",
    }
    assert measured["optimizer/bytes_sent"] == 0


def test_tensorboard_itself_reads_back_what_the_script_writes(tmp_path: Path, monkeypatch: Patch) -> None:
    peer("tensorboard", monkeypatch)
    peer("torch.utils.tensorboard", monkeypatch)
    reader = peer("tensorboard.backend.event_processing.event_accumulator", monkeypatch)
    script("with_logging").to_tensorboard(str(tmp_path))
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    tags = set(found.Tags()["scalars"])
    assert {f"optimizer/update_rms/{name}" for name in NAMES} <= tags
    events = found.Scalars("optimizer/update_rms/0.weight")
    assert [event.step for event in events] == [0, 50]
    assert all(event.value > 0 for event in events)


class Run:
    """What ``wandb.init`` returns, as far as it is called."""

    def __init__(self) -> None:
        self.logged: dict[int, dict[str, float]] = {}
        self.table: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Keeps values, which have to be plain numbers where they belong to a step."""
        if step is None:
            self.table = values
            return
        assert all(isinstance(value, (int, float)) for value in values.values())
        self.logged[step] = values

    def finish(self) -> None:
        """Ends the run."""
        self.finished = True


def test_wandb_by_a_stand_in_gets_numbers_by_step_and_a_table(monkeypatch: Patch) -> None:
    made, settings = Run(), {}

    def init(**given: Any) -> Run:
        settings.update(given)
        return made

    stubs.installed(monkeypatch, "wandb", init=init, Table=lambda **given: given)
    script("with_logging").to_wandb()
    assert settings["mode"] == "offline"
    assert list(made.logged) == [0, 50]
    assert f"optimizer/update_rms/{min(NAMES)}" in made.logged[50]
    table = made.table["parameters"]
    assert len(table["data"]) == len(NAMES)
    assert {len(row) for row in table["data"]} == {len(table["columns"])}
    assert made.finished


@pytest.mark.filterwarnings("default")  # of wandb and what it imports
def test_wandb_itself_keeps_an_offline_run(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.chdir(tmp_path)
    for key in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = peer("wandb", monkeypatch)
    if not hasattr(wandb, "init"):
        pytest.skip("a folder of that name, and no wandb")
    script("with_logging").to_wandb()
    (kept,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert os.path.getsize(kept) > 0


def test_torchtitan_itself_takes_the_configuration_of_the_script(monkeypatch: Patch) -> None:
    module = peer("torchtitan.components.optimizer", monkeypatch)
    container = module.OptimizersContainer
    monkeypatch.setattr(
        container, "_resolve_optimizer_factory", staticmethod(container._resolve_optimizer_factory)
    )
    made = script("with_torchtitan")
    model = made.model()
    matrices, rest = container(made.config, model_parts=[model])
    assert (type(matrices), type(rest)) == (oxidion.Muon, oxidion.AdamW)
    assert matrices.param_groups[0]["param_names"] == ["layers.0.wq.weight"]
    assert len(rest.param_groups[0]["params"]) == 2


def test_megatron_itself_takes_the_configuration_of_the_script(monkeypatch: Patch) -> None:
    monkeypatch.setenv("RANK", "0")
    registry = peer("megatron.core.optimizer.emerging_optimizers", monkeypatch)
    if not registry.HAVE_EMERGING_OPTIMIZERS:
        pytest.skip("no Emerging-Optimizers")
    monkeypatch.setattr(registry, "_EMERGING_OPTIMIZERS", dict(registry._EMERGING_OPTIMIZERS))
    names = script("with_megatron")
    model = nn.Linear(6, 8, bias=False)
    groups = stubs.groups_of(model)
    made, _ = registry._create_emerging_optimizer(names.config, groups, names.name, [model], None)
    assert type(made) is oxidion.Muon
    keys = ("lr", "weight_decay", "mu", "nesterov", "adjust_lr")
    assert [made.param_groups[0][key] for key in keys] == [3e-4, 0.1, 0.95, True, "match_rms_adamw"]


def test_emerging_optimizers_itself_finds_the_classes(monkeypatch: Patch) -> None:
    found = peer("emerging_optimizers.registry", monkeypatch)
    monkeypatch.setattr(found, "_OPTIMIZERS", dict(found._OPTIMIZERS))
    assert "oxidion_dion" in oxidion.compat.megatron.register_emerging()
    assert found.get_optimizer_cls("oxidion_dion") is oxidion.Dion


@pytest.mark.filterwarnings("ignore")  # Composer is made for older packages
def test_composer_itself_trains_and_goes_on(tmp_path: Path, monkeypatch: Patch) -> None:
    peer("composer", monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert script("with_composer").main() == 0


def test_groups_may_be_given_again_with_other_parameters() -> None:
    """Composer does so once it has sharded the model."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    optimizer = oxidion.Muon(oxidion.param_groups(model, algorithm="muon", lr=0.02))
    others = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
    groups = [
        {**group, "params": [others[name] for name in group["param_names"]]}
        for group in optimizer.param_groups
    ]
    optimizer.state.clear()
    optimizer.param_groups.clear()
    for group in groups:
        optimizer.add_param_group(group)
    for param in others.values():
        param.grad = torch.ones_like(param)
    before = {name: param.detach().clone() for name, param in others.items()}
    optimizer.step()
    assert not any(torch.equal(before[name], param) for name, param in others.items())
    assert [row["name"] for row in optimizer.explain()] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_parameters_flattened_by_zero_3_raise_with_a_remedy() -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    weight.ds_id = 0  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"DeepSpeed ZeRO-3 flattens its parameters; use FSDP2"):
        oxidion.AdamW([weight])


ZERO = """
import deepspeed, torch, oxidion
from torch import nn
deepspeed.ops.__compatible_ops__ = {}  # nothing is compiled
def run(stage, make):
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
    config["zero_allow_untested_optimizer"] = True
    optimizer = make(list(model.named_parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(4, 8)).square().sum())
    engine.step()
for stage in (1, 2, 3):
    run(stage, lambda named: oxidion.AdamW(named))
    for make in (oxidion.Lamb, oxidion.GaLoreAdamW, lambda named: oxidion.Muon(named, strict=False)):
        try:
            run(stage, make)
        except TypeError as error:
            print("refused", stage, str(error))
"""
"""Stages of ZeRO over a class that steps by element, with names, and over three that do not."""


def test_flat_partitions_of_deepspeed_are_refused_at_every_stage(
    tmp_path: Path,
) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("no deepspeed: pip install --group frameworks")
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", ZERO],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env=os.environ | alone | {"OMP_NUM_THREADS": "1"},
    )
    refused = re.findall(r"^refused (\d) .*a vector of 212 elements .*'(\w+)'", done.stdout, re.MULTILINE)
    expected = [(stage, name) for stage in "123" for name in ("lamb", "galore_adamw", "muon")]
    assert refused == expected, done.stdout + done.stderr[-4000:]
