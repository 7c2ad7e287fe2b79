"""One training run of the small GPT: steps, held-out evaluation, checkpoints and the figures of the run."""

from __future__ import annotations

import hashlib
import math
import time
import zipfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import oxidion
from corpus import VOCABULARY, Corpus, Windows
from gpt import GPT, GPTShape
from recipes import Settings, build_optimizer, build_scheduler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
"""Parameter dtypes by the name that the command line takes."""


class CheckpointMismatch(ValueError):
    """A file that holds no checkpoint of this run's settings."""


@dataclass
class Record:
    """Measurements of a run so far, all plain numbers and text, so that checkpoints and JSON can store them.

    Attributes:
        train_loss: loss of every batch, in nats per byte, before the step on it.
        held_out_step: steps done at each held-out evaluation.
        held_out_loss: mean loss on the held-out windows, in nats per byte; of the average where one is kept.
        last_weights_loss: the same of the weights as they are trained, where an average is kept.
        held_out_seconds: training seconds (evaluation left out) at each held-out evaluation.
        train_seconds: time in training steps.
        optimizer_seconds: part of it that went into ``optimizer.step()``.
        wall_seconds: time of the run with evaluations and checkpoints.
        initial_weights_sha256: digest of the initial parameters.
        batches_sha256: chained digest of every batch so far.
    """

    train_loss: list[float] = field(default_factory=list)
    held_out_step: list[int] = field(default_factory=list)
    held_out_loss: list[float] = field(default_factory=list)
    last_weights_loss: list[float] = field(default_factory=list)
    held_out_seconds: list[float] = field(default_factory=list)
    train_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    wall_seconds: float = 0.0
    initial_weights_sha256: str = ""
    batches_sha256: str = ""


class Training:
    """Model, optimizer, scheduler, data position and record of one run.

    Runs whose settings differ only in the optimizer and its learning rates start from equal weights and see
    the same batches: weights depend on ``seed`` and the model's sizes, batches on ``seed`` and their sizes.
    """

    def __init__(self, settings: Settings, corpus: Corpus, device: torch.device) -> None:
        """Builds everything from the settings.

        Raises:
            ValueError: sizes that the model or the text cannot serve.
        """
        self.settings = settings
        self.device = device
        self.step = 0
        torch.manual_seed(settings.seed)
        shape = GPTShape(
            VOCABULARY, settings.seq_len, settings.layers, settings.dim, settings.heads, settings.tied
        )
        self.model = GPT(shape).to(device=device, dtype=DTYPES[settings.dtype])
        with torch.no_grad():
            for block in self.model.blocks:
                for parameter in block.parameters():
                    if parameter.ndim == 2:
                        parameter.mul_(settings.initial_scale)
        self.optimizer = build_optimizer(self.model, settings)
        self.scheduler = build_scheduler(self.optimizer, settings)
        self.windows = Windows(corpus.train, settings.seq_len, settings.seed)
        self.held_out = Windows(corpus.held_out, settings.seq_len, 0).spread(settings.eval_windows)
        self.record = Record(initial_weights_sha256=_digest(*self.model.parameters()))

    @property
    def diverged(self) -> bool:
        """The last training loss is not finite."""
        return bool(self.record.train_loss) and not math.isfinite(self.record.train_loss[-1])

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on the held-out windows, in nats per byte."""
        total = 0.0
        for batch in self.held_out.split(self.settings.batch_size):
            total += self.model.loss(batch.to(self.device)).item() * len(batch)
        return total / len(self.held_out)

    def run(self, stop_at: int, checkpoint: Path | None, save_every: int, quiet: bool) -> None:
        """Trains until ``stop_at`` steps are done or the loss is not finite.

        Args:
            stop_at: number of steps, counted from the start of the run.
            checkpoint: file to write at the end and every ``save_every`` steps; None writes none.
            save_every: steps between two checkpoints; 0 writes one at the end only.
            quiet: no progress bar.
        """
        began = time.perf_counter() - self.record.wall_seconds
        with tqdm(
            total=self.settings.steps,
            initial=self.step,
            desc=f"{self.settings.optimizer:>6}",
            unit="step",
            disable=quiet,
        ) as bar:
            if self.step == 0:
                self._evaluate_into_record()
            while self.step < stop_at and not self.diverged:
                lr = float(self.optimizer.param_groups[0]["lr"])
                self._train_step()
                if self.step % self.settings.eval_every == 0 or self.step == self.settings.steps:
                    self._evaluate_into_record()
                tokens = self.step * self.settings.batch_size * self.settings.seq_len
                bar.set_postfix_str(
                    f"loss {self.record.train_loss[-1]:.3f}, held-out {self.record.held_out_loss[-1]:.3f}, "
                    f"lr {lr:.1e}, {tokens / self.record.train_seconds:.0f} tokens/s",
                    refresh=False,
                )
                bar.update()
                self.record.wall_seconds = time.perf_counter() - began
                if checkpoint is not None and (
                    self.step == stop_at or (save_every and self.step % save_every == 0)
                ):
                    self.save(checkpoint)

    def _train_step(self) -> None:
        began = self._now()
        windows = self.windows.next_batch(self.settings.batch_size)
        self.record.batches_sha256 = _digest(windows, start=self.record.batches_sha256)
        loss = self.model.loss(windows.to(self.device))
        loss.backward()
        if self.settings.clip_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        before = self._now()
        self.optimizer.step()
        after = self._now()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.record.train_loss.append(loss.item())
        self.record.optimizer_seconds += after - before
        self.record.train_seconds += self._now() - began
        self.step += 1

    def _evaluate_into_record(self) -> None:
        self.record.held_out_step.append(self.step)
        loss = self.evaluate()
        if any(group.get("average") for group in self.optimizer.param_groups):
            self.record.last_weights_loss.append(loss)
            with self.optimizer.averaged():
                loss = self.evaluate()
        self.record.held_out_loss.append(loss)
        self.record.held_out_seconds.append(self.record.train_seconds)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def save(self, path: Path) -> None:
        """Writes a checkpoint; a run that is killed meanwhile leaves the file that was there before."""
        state = {
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "step": self.step,
            "data_position": self.windows.position,
            "record": asdict(self.record),
        }
        with oxidion.checkpoint.whole_file(path) as file:
            torch.save(state, file)

    def load(self, path: Path) -> None:
        """Continues from a checkpoint: the steps that follow are those of the run that wrote it.

        Raises:
            CheckpointMismatch: the file is no checkpoint, or one that was written under other settings.
        """
        if not zipfile.is_zipfile(path):  # the container of torch.save
            raise CheckpointMismatch(f"{path} is not a checkpoint of this script")
        saved: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        wanted = asdict(self.settings)
        differences = [
            f"{key}: checkpoint {saved['settings'].get(key)!r}, asked for {value!r}"
            for key, value in wanted.items()
            if saved["settings"].get(key) != value
        ]
        if differences:
            raise CheckpointMismatch(f"{path} was written under other settings ({'; '.join(differences)})")
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.scheduler.load_state_dict(saved["scheduler"])
        self.step = saved["step"]
        self.windows.position = saved["data_position"]
        self.record = Record(**saved["record"])


def _digest(*tensors: Tensor, start: str = "") -> str:
    digest = hashlib.sha256(start.encode())
    for tensor in tensors:
        digest.update(tensor.detach().cpu().double().numpy().tobytes())
    return digest.hexdigest()
