"""Stand-ins for Ray Train and torchtune in one process: what scripts call of them, as they document it."""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .stubs import installed

# ------------------------------------------------------------------------------------------- Ray Train


@dataclass
class Checkpoint:
    """A folder."""

    path: str

    @classmethod
    def from_directory(cls, path: str) -> Checkpoint:
        """Takes a folder that the caller may remove once it is reported."""
        return cls(path)


@dataclass
class ScalingConfig:
    """How many workers there are: one, which ``prepare_model`` wraps in nothing."""

    num_workers: int


@dataclass
class CheckpointConfig:
    """Keeps every checkpoint."""

    num_to_keep: int | None = None


@dataclass
class RunConfig:
    """Where reported checkpoints are kept."""

    name: str
    storage_path: str
    checkpoint_config: CheckpointConfig


@dataclass
class TorchTrainer:
    """Calls the function of a worker in this process; it is its own result."""

    train_loop_per_worker: Callable[[dict[str, Any]], None]
    train_loop_config: dict[str, Any]
    scaling_config: ScalingConfig
    run_config: RunConfig
    best_checkpoints: list[tuple[Checkpoint, dict[str, Any]]] = field(default_factory=list)

    def fit(self) -> TorchTrainer:
        """Runs the worker to its end."""
        assert self.scaling_config.num_workers == 1
        train = sys.modules["ray.train"]
        train.report = self.report  # type: ignore[attr-defined]
        self.train_loop_per_worker(self.train_loop_config)
        return self

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None) -> None:
        """Copies the checkpoint into the storage."""
        assert all(isinstance(value, float) for value in metrics.values())
        if checkpoint is not None:
            kept = Path(self.run_config.storage_path) / self.run_config.name / str(len(self.best_checkpoints))
            shutil.copytree(checkpoint.path, kept)
            self.best_checkpoints.append((Checkpoint(str(kept)), metrics))


def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of Ray."""
    context = types.SimpleNamespace(get_world_size=lambda: 1, get_world_rank=lambda: 0)
    classes = (Checkpoint, CheckpointConfig, RunConfig, ScalingConfig)
    train = installed(monkeypatch, "ray.train", **{cls.__name__: cls for cls in classes})
    train.get_context = lambda: context  # type: ignore[attr-defined]
    wrapped = types.ModuleType("ray.train.torch")
    wrapped.prepare_model, wrapped.TorchTrainer = (lambda model: model), TorchTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.train.torch", wrapped)
    top: Any = sys.modules["ray"]
    top.train, train.torch = train, wrapped  # type: ignore[attr-defined]
    top.init, top.shutdown = lambda **_given: None, lambda: None


# ------------------------------------------------------------------------------------------- torchtune


class Config(dict):
    """A mapping whose keys are attributes, as omegaconf makes it."""

    def __getattr__(self, name: str) -> Any:
        """A key."""
        return self[name]


def created(content: Any) -> Any:
    """``OmegaConf.create``."""
    return (
        Config({key: created(value) for key, value in content.items()})
        if isinstance(content, dict)
        else content
    )


class Layer(nn.Module):
    """What a block of a Llama has: a gain, and matrices in and out."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.w1, self.w2 = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Adds the block's output."""
        output: Tensor = inputs + self.w2(F.silu(self.w1(inputs * self.scale)))
        return output


class Llama(nn.Module):
    """A model of tokens with the names that torchtune gives."""

    def __init__(
        self, *, vocab_size: int, num_layers: int, embed_dim: int, intermediate_dim: int, **_: int
    ) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, embed_dim)
        self.layers = nn.ModuleList(Layer(embed_dim, intermediate_dim) for _ in range(num_layers))
        self.output = nn.Linear(embed_dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.output(hidden)
        return logits


def instantiate(config: Config, *args: Any) -> Any:
    """Calls what a dotted path names."""
    settings = dict(config)
    module, _, name = settings.pop("_component_").rpartition(".")
    return getattr(importlib.import_module(module), name)(*args, **settings)


class FullFinetuneRecipeSingleDevice:
    """The recipe's order of calls, checkpoints and log, with what it asks of an optimizer."""

    def __init__(self, cfg: Config) -> None:
        self.cfg, self.folder = cfg, Path(cfg.output_dir)
        self.epochs_run = 0

    def setup(self, cfg: Config) -> None:
        """Model, optimizer and data, from the start or from a checkpoint."""
        held = cfg.checkpointer
        whence = held.output_dir if cfg.resume_from_checkpoint else held.checkpoint_dir
        loaded: dict[str, Any] = {}
        if cfg.resume_from_checkpoint:
            loaded = torch.load(self.folder / "recipe_state" / "recipe_state.pt", weights_only=True)
            self.epochs_run = loaded["epochs_run"]
        self._model = instantiate(cfg.model)
        (file,) = held.checkpoint_files
        self._model.load_state_dict(torch.load(Path(whence) / file, weights_only=True))
        self._optimizer = self._setup_optimizer(
            cfg_optimizer=cfg.optimizer,
            optimizer_in_bwd=cfg.optimizer_in_bwd,
            opt_state_dict=loaded.get("optimizer"),
        )
        data = instantiate(cfg.dataset, instantiate(cfg.tokenizer))
        self.rows = torch.tensor([data[index]["tokens"] for index in range(len(data))])

    def _setup_optimizer(
        self, cfg_optimizer: Config, optimizer_in_bwd: bool = False, opt_state_dict: Any = None
    ) -> torch.optim.Optimizer:
        assert not optimizer_in_bwd
        optimizer: torch.optim.Optimizer = instantiate(cfg_optimizer, self._model.parameters())
        if opt_state_dict:
            optimizer.load_state_dict(opt_state_dict)
        return optimizer

    def train(self) -> None:
        """Epochs, each with an order of its own and a checkpoint at its end."""
        log = Path(self.cfg.metric_logger.log_dir) / self.cfg.metric_logger.filename
        log.parent.mkdir(parents=True, exist_ok=True)
        for epoch in range(self.epochs_run, self.cfg.epochs):
            order = torch.randperm(len(self.rows), generator=torch.Generator().manual_seed(epoch))
            for tokens in self.rows[order].split(self.cfg.batch_size):
                logits = self._model(tokens)[:, :-1]
                loss = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self.cfg.clip_grad_norm)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=True)
                (rate,) = {group["lr"] for group in self._optimizer.param_groups}  # the recipe refuses two
                with log.open("a") as file:
                    file.write(f"Step | loss:{loss.item()} lr:{rate}\n")
            self.epochs_run += 1
            self._save(f"epoch_{epoch}/model-00001-of-00001.bin", self._model.state_dict())
            if self.epochs_run < self.cfg.epochs:
                state = {"optimizer": self._optimizer.state_dict(), "epochs_run": self.epochs_run}
                self._save("recipe_state/recipe_state.pt", state)

    def _save(self, path: str, content: Any) -> None:
        (self.folder / path).parent.mkdir(exist_ok=True)
        torch.save(content, self.folder / path)

    def cleanup(self) -> None:
        """Nothing is held."""


def torchtune(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of torchtune and omegaconf, and the file of the recipe."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds the folder of recipes
    installed(monkeypatch, "omegaconf", OmegaConf=types.SimpleNamespace(create=created))
    installed(monkeypatch, "torchtune.models.llama2", llama2=Llama)
    sys.modules["torchtune"].__file__ = __file__
    recipe = FullFinetuneRecipeSingleDevice
    installed(monkeypatch, "full_finetune_single_device", **{recipe.__name__: recipe})
