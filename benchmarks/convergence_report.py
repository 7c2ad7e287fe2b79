"""Summary, table, page and plot from the runs of `convergence.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import table

BASELINE = "adamw"

Run = dict[str, Any]


def summary(result: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """A result without its runs, its optimizers in an order.

    It has ``losses`` at the end by optimizer, learning rate and seed, ``curves`` of held-out losses at the
    best learning rate of each optimizer, of its average and last weights where it has one, and the ``table``.
    """
    losses: dict[str, dict[str, dict[str, float | None]]] = {}
    for run in result["runs"]:
        of_rate = losses.setdefault(run["optimizer"], {}).setdefault(repr(run["lr"]), {})
        of_rate[str(run["seed"])] = run["final_held_out_loss"]
    names = [name for name in order if name in losses]
    curves = {name: _curve(best(result, name)) for name in names}
    rates = {name: sorted(map(float, losses[name])) for name in names}
    seeds = sorted({run["seed"] for run in result["runs"]})
    loads = [run["load"] for run in result["runs"]]
    about = {key: value for key, value in result.items() if key != "runs"}
    about |= {"load": [min(loads), max(loads)], "parameters": result["runs"][0]["parameters"]}
    about["plan"] = {"learning_rates": rates, "seeds": seeds}
    return {**about, "table": rows(result, curves), "losses": losses, "curves": curves}


def grid(result: dict[str, Any], name: str) -> dict[float, list[Run]]:
    """The runs of an optimizer by learning rate; where a benchmark was cut, those with the most seeds."""
    found: dict[float, list[Run]] = {}
    for run in result["runs"]:
        if run["optimizer"] == name:
            found.setdefault(run["lr"], []).append(run)
    most = max(map(len, found.values()), default=0)
    return {lr: found[lr] for lr in sorted(found) if len(found[lr]) == most}


def best(result: dict[str, Any], name: str) -> list[Run]:
    """The runs at the learning rate of the smallest mean loss at the end."""
    return min(grid(result, name).values(), key=lambda runs: statistics.fmean(map(_final, runs)))


def _final(run: Run) -> float:
    loss = run["final_held_out_loss"]
    return math.inf if loss is None else float(loss)


def _curve(runs: Sequence[Run]) -> dict[str, Any]:
    """Steps, and mean, least and largest loss over runs, as far as all of them came."""
    columns = [*zip(*(run["curve"]["held_out_loss"] for run in runs), strict=False)]
    columns = [column for column in columns if None not in column]
    curve = {"step": runs[0]["curve"]["held_out_step"][: len(columns)]}
    for name, of in (("mean", statistics.fmean), ("low", min), ("high", max)):
        curve[name] = [of(column) for column in columns]
    if "last_weights_loss" in runs[0]["curve"]:
        last = zip(*(run["curve"]["last_weights_loss"] for run in runs), strict=False)
        curve["last_weights"] = [statistics.fmean(column) for column in last if None not in column]
    return {"lr": runs[0]["lr"], **curve}


def rows(result: dict[str, Any], curves: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for every optimizer that has runs, the smallest loss first; infinite losses are None."""
    goal = statistics.fmean(map(_final, best(result, BASELINE))) if BASELINE in curves else -math.inf
    found = []
    for name, curve in curves.items():
        runs, rates = best(result, name), grid(result, name)
        ends = [_final(run) for run in runs]
        points = zip(curve["step"], curve["mean"], strict=True) if name != BASELINE else ()
        # The learning rate does not change the speed, other work on the machine does.
        every = [run for same in rates.values() for run in same]
        whole = [run for run in every if run["final_held_out_loss"] is not None]
        fastest = max(whole or every, key=lambda run: float(run["tokens_per_second"]))
        figures = {"mean_loss": statistics.fmean(ends), "smallest_loss": min(ends), "largest_loss": max(ends)}
        row = {"optimizer": name, "lr": curve["lr"], "seeds": len(runs)}
        row["lr_at_edge_of_grid"] = curve["lr"] in (min(rates), max(rates))
        row |= {key: loss if math.isfinite(loss) else None for key, loss in figures.items()}
        row["steps_to_adamw_loss"] = next((step for step, loss in points if loss <= goal), None)
        found.append({**row, **{key: fastest[key] for key in ("tokens_per_second", "optimizer_step_share")}})
    return sorted(found, key=lambda row: math.inf if row["mean_loss"] is None else row["mean_loss"])


def by_rate(kept: dict[str, Any], name: str) -> dict[float, float]:
    """Mean loss at the end of each learning rate of an optimizer, infinite where a run diverged."""
    rates = {float(lr): [*seeds.values()] for lr, seeds in kept["losses"][name].items()}
    return {lr: math.inf if None in rates[lr] else statistics.fmean(rates[lr]) for lr in sorted(rates)}


def markdown(kept: dict[str, Any]) -> str:
    """A summary as Markdown: what was run, the table, and the losses by learning rate."""
    head = ["optimizer", "learning rate", "seeds", "held-out loss, mean [min, max]", "steps to AdamW's loss"]
    cells = table([*head, "tokens/s", "optimizer's share"], map(_cells, kept["table"]))
    lines = []
    for name, rates in kept["losses"].items():
        most = max(map(len, rates.values()))
        means = {lr: mean for lr, mean in by_rate(kept, name).items() if len(rates[repr(lr)]) == most}
        texts = [
            f"{lr:g}: " + (f"{mean:.4f}" if mean < math.inf else "diverged") for lr, mean in means.items()
        ]
        lines.append((name, f"- {name}: {', '.join(texts)}"))
    order = [*kept["plan"]["learning_rates"]]
    swept = "\n".join(line for _, line in sorted(lines, key=lambda pair: order.index(pair[0])))
    return "\n\n".join([_about(kept), cells, "Mean held-out loss by learning rate:", swept]) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    loss, steps = "diverged", row["steps_to_adamw_loss"]
    if row["mean_loss"] is not None:
        loss = f"{row['mean_loss']:.4f} [{row['smallest_loss']:.4f}, {row['largest_loss']:.4f}]"
    reached = "" if row["optimizer"] == BASELINE else "not reached" if steps is None else f"{steps}"
    lr = f"{row['lr']:g}" + (" (edge of its grid)" if row["lr_at_edge_of_grid"] else "")
    speed = [f"{row['tokens_per_second']:.0f}", f"{row['optimizer_step_share']:.1%}"]
    return [row["optimizer"], lr, str(row["seeds"]), loss, reached, *speed]


def _about(kept: dict[str, Any]) -> str:
    """A paragraph: the machine, the versions, the model and what the runs have in common."""
    machine, settings, plan = kept["machine"], kept["settings"], kept["plan"]
    tokens = settings["batch_size"] * settings["seq_len"]
    rates = sorted({len(values) for values in plan["learning_rates"].values()})
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {kept['threads']} threads, {versions}, "
        f"{machine['date'][:10]}; one-minute load {kept['load'][0]:.1f} to {kept['load'][1]:.1f}. "
        f"A GPT of {kept['parameters'] / 1e6:.2f} million parameters ("
        f"{settings['layers']} layers of width {settings['dim']}, {settings['heads']} heads, "
        f"{settings['dtype']}) on bytes; "
        f"{settings['steps']} steps of {settings['batch_size']} x {settings['seq_len']} = {tokens} tokens, "
        f"{settings['schedule']} schedule after {settings['warmup']:.0%} warm-up, weight decay "
        f"{settings['weight_decay']:g}, gradients clipped to {settings['clip_norm']:g}, Dion with rank "
        f"fraction {settings['rank_fraction']:g}, Dion2 and NorDion2 with fraction {settings['fraction']:g}; "
        f"{' or '.join(map(str, rates))} learning rates with seeds {', '.join(map(str, plan['seeds']))}. "
        f"Held-out loss on {settings['eval_windows']} windows every {settings['eval_every']} steps."
    )
    if settings.get("initial_scale", 1.0) != 1.0:
        text += f" The matrices of the blocks start {settings['initial_scale']:g} times as large."
    return text


def plot(kept: dict[str, Any], path: Path, colors: dict[str, str]) -> None:
    """Held-out loss over steps at the best learning rate, and the final loss over learning rates."""
    import matplotlib as mpl

    mpl.use("Agg")  # before pyplot is imported: no display is needed
    from matplotlib import pyplot as plt

    figure, (curves, sensitivity) = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    lowest, highest = math.inf, -math.inf
    for row in kept["table"]:
        name = row["optimizer"]
        curve, color = kept["curves"][name], colors.get(name)
        if row["mean_loss"] is None:
            continue
        steps, means = curve["step"], curve["mean"]
        curves.plot(steps, means, color=color, linewidth=1.6, label=f"{name}, lr {row['lr']:g}")
        curves.fill_between(steps, curve["low"], curve["high"], color=color, alpha=0.15)
        finite = {lr: loss for lr, loss in by_rate(kept, name).items() if math.isfinite(loss)}
        sensitivity.plot(list(finite), list(finite.values()), color=color, marker="o", label=name)
        lowest = min([lowest, *means, *finite.values()])
        highest = max([highest, *finite.values(), means[min(len(means) - 1, max(1, len(means) // 8))]])
    if math.isfinite(lowest) and highest > lowest:
        margin = 0.06 * (highest - lowest)
        curves.set_ylim(lowest - margin, highest + margin)
    curves.set(xlabel="step", ylabel="held-out loss (nats per byte)", title="mean and range over seeds")
    sensitivity.set(xlabel="learning rate", xscale="log", title="at the end, mean over seeds")
    for axes in (curves, sensitivity):
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper right", fontsize="small")
    figure.savefig(path, dpi=110)
    plt.close(figure)
