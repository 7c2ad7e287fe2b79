"""Figures of finished runs: the table on the terminal, the JSON file and the plot of the loss curves."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

import oxidion
from training import Training

mpl.use("Agg")  # before pyplot is imported: no display is needed
from matplotlib import pyplot as plt

SMOOTHING = 0.9
"""Decay of the moving average that smooths the plotted training loss."""

BASELINE = "adamw"
"""The optimizer that the others are set against."""

COLORS = {
    "dion": "#0072b2",
    "muon": "#e69f00",
    "adamw": "#d55e00",
    "lion": "#009e73",
    "normuon": "#cc79a7",
    "dion2": "#56b4e9",
    "nordion2": "#000000",
}
"""Line colours (Okabe-Ito palette); other names take matplotlib's cycle."""


def figures(run: Training) -> dict[str, Any]:
    """Everything measured in one run, ready for JSON; a number that is not finite becomes None."""
    record, settings = run.record, run.settings
    kept = record.last_weights_loss
    tokens = run.step * settings.batch_size * settings.seq_len
    return {
        "optimizer": settings.optimizer,
        "lr": settings.lr,
        "scalar_lr": settings.scalar_lr,
        "steps": run.step,
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "final_held_out_loss": _finite(math.nan if run.diverged else record.held_out_loss[-1]),
        "best_held_out_loss": _finite(min(record.held_out_loss)),
        "wall_seconds": record.wall_seconds,
        "train_seconds": record.train_seconds,
        "tokens_per_second": tokens / record.train_seconds if record.train_seconds else 0.0,
        "optimizer_step_share": record.optimizer_seconds / record.train_seconds
        if record.train_seconds
        else 0.0,
        "initial_weights_sha256": record.initial_weights_sha256,
        "batches_sha256": record.batches_sha256,
        "curve": {
            **({"last_weights_loss": [_finite(loss) for loss in kept]} if kept else {}),
            "train_loss": [_finite(loss) for loss in record.train_loss],
            "held_out_step": record.held_out_step,
            "held_out_loss": [_finite(loss) for loss in record.held_out_loss],
            "held_out_train_seconds": record.held_out_seconds,
        },
    }


def write_json(path: Path, runs: Sequence[Training]) -> None:
    """Writes the settings of the first run, the versions and the figures of every run."""
    content = {
        "settings": asdict(runs[0].settings),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "oxidion": oxidion.__version__,
        },
        "device": str(runs[0].device),
        "threads": torch.get_num_threads(),
        "runs": [figures(run) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")


def table(runs: Sequence[Training]) -> str:
    """A line for every run: learning rates, held-out losses, time, speed and the optimizer's share of it."""
    header = (
        f"{'optimizer':<10}{'lr':>9}{'scalar lr':>11}{'held-out':>10}{'best':>8}"
        f"{'seconds':>9}{'tokens/s':>10}{'optimizer share':>17}"
    )
    lines = [header, "-" * len(header)]
    for run in runs:
        row = figures(run)
        lines.append(
            f"{row['optimizer']:<10}{row['lr']:>9.4g}{row['scalar_lr']:>11.4g}"
            f"{_number(row['final_held_out_loss']):>10}{_number(row['best_held_out_loss']):>8}"
            f"{row['wall_seconds']:>9.1f}{row['tokens_per_second']:>10.0f}{row['optimizer_step_share']:>17.1%}"
        )
    return "\n".join(lines)


def against_baseline(runs: Sequence[Training]) -> list[str]:
    """Returns a line for each other run than :data:`BASELINE`: its difference, and when it passed it."""
    baseline = next((run for run in runs if run.settings.optimizer == BASELINE), None)
    if baseline is None or any(run.diverged or run.step != baseline.step for run in runs):
        return []
    goal, goal_seconds = baseline.record.held_out_loss[-1], baseline.record.held_out_seconds[-1]
    lines = []
    for run in runs:
        if run is baseline:
            continue
        record = run.record
        difference = record.held_out_loss[-1] - goal
        line = f"{run.settings.optimizer}: {difference:+.3f} nats per byte against {BASELINE}"
        passed = next((index for index, loss in enumerate(record.held_out_loss) if loss <= goal), None)
        if passed is not None:
            line += (
                f"; at its final loss by step {record.held_out_step[passed]} of {baseline.step}, "
                f"{record.held_out_seconds[passed]:.0f} s against {goal_seconds:.0f} s of training"
            )
        lines.append(line)
    return lines


def plot(path: Path, runs: Sequence[Training]) -> None:
    """Draws the loss over steps and the held-out loss over training seconds."""
    figure, (by_step, by_time) = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    lowest, highest = math.inf, -math.inf
    for run in runs:
        record, settings = run.record, run.settings
        label = f"{settings.optimizer}, lr {settings.lr:g}"
        color = (
            COLORS.get(settings.optimizer) if len({r.settings.optimizer for r in runs}) == len(runs) else None
        )
        smooth = _smoothed(record.train_loss)
        (line,) = by_step.plot(range(1, len(smooth) + 1), smooth, color=color, alpha=0.45, linewidth=1)
        held_out = {"color": line.get_color(), "marker": "o", "markersize": 3.5, "linewidth": 1.6}
        by_step.plot(record.held_out_step, record.held_out_loss, label=label, **held_out)
        by_time.plot(record.held_out_seconds, record.held_out_loss, label=label, **held_out)
        losses = [loss for loss in record.held_out_loss if math.isfinite(loss)]
        lowest = min([lowest, *losses, *smooth])
        highest = max([highest, *(losses[1:] or losses)])
    if math.isfinite(lowest) and highest > lowest:
        margin = 0.06 * (highest - lowest)
        by_step.set_ylim(lowest - margin, highest + margin)
    by_step.set(
        xlabel="step", ylabel="loss (nats per byte)", title="dots: held out · thin lines: training, smoothed"
    )
    by_time.set(xlabel="training seconds (evaluation left out)", title="held out, by time")
    for axes in (by_step, by_time):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _smoothed(values: Sequence[float]) -> list[float]:
    average, weight, smooth = 0.0, 0.0, []
    for value in values:
        if not math.isfinite(value):
            break
        average = SMOOTHING * average + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        smooth.append(average / weight)
    return smooth


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "diverged" if value is None else f"{value:.3f}"
