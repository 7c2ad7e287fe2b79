"""Table, pages and plot from the result of `convergence.py`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BASELINE = "adamw"
BEGIN, END = "<!-- convergence: begin -->", "<!-- convergence: end -->"

Run = dict[str, Any]


def final_loss(run: Run) -> float:
    """The held-out loss at the end of a run, infinite where it diverged."""
    loss = run["final_held_out_loss"]
    return math.inf if loss is None else float(loss)


def grid(result: dict[str, Any], name: str) -> dict[float, list[Run]]:
    """The runs of an optimizer by learning rate; where a benchmark was cut, those with the most seeds."""
    found: dict[float, list[Run]] = {}
    for run in result["runs"]:
        if run["optimizer"] == name:
            found.setdefault(run["lr"], []).append(run)
    most = max(map(len, found.values()), default=0)
    return {lr: found[lr] for lr in sorted(found) if len(found[lr]) == most}


def best(result: dict[str, Any], name: str) -> tuple[float, list[Run]] | None:
    """The learning rate of the smallest mean loss at the end, and its runs."""
    rates = grid(result, name)
    if not rates:
        return None
    lr = min(rates, key=lambda rate: statistics.fmean(map(final_loss, rates[rate])))
    return lr, rates[lr]


def mean_curve(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Steps and mean held-out loss over the runs, as far as all of them came."""
    curves = [run["curve"]["held_out_loss"] for run in runs]
    means = [
        statistics.fmean(math.inf if loss is None else loss for loss in losses)
        for losses in zip(*curves, strict=False)
    ]
    return runs[0]["curve"]["held_out_step"][: len(means)], means


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for every optimizer that has runs, the smallest loss first; infinite losses are None."""
    base = best(result, BASELINE)
    goal = None if base is None else statistics.fmean(map(final_loss, base[1]))
    table = []
    for name in result["plan"]["learning_rates"]:
        chosen = best(result, name)
        if chosen is None:
            continue
        lr, runs = chosen
        losses = [final_loss(run) for run in runs]
        steps, means = mean_curve(runs)
        reached = None
        if goal is not None and name != BASELINE:
            reached = next((s for s, m in zip(steps, means, strict=True) if m <= goal), None)
        rates = list(grid(result, name))
        # The learning rate does not change the speed, other work on the machine does.
        every = [run for same in grid(result, name).values() for run in same]
        whole = [run for run in every if run["final_held_out_loss"] is not None]
        fastest = max(whole or every, key=lambda run: float(run["tokens_per_second"]))
        table.append(
            {
                "optimizer": name,
                "lr": lr,
                "lr_at_edge_of_grid": lr in (rates[0], rates[-1]),
                "scalar_lr": runs[0]["scalar_lr"],
                "seeds": len(runs),
                "mean_loss": _finite(statistics.fmean(losses)),
                "smallest_loss": _finite(min(losses)),
                "largest_loss": _finite(max(losses)),
                "steps_to_adamw_loss": reached,
                "tokens_per_second": fastest["tokens_per_second"],
                "optimizer_step_share": fastest["optimizer_step_share"],
            }
        )
    return sorted(table, key=lambda row: math.inf if row["mean_loss"] is None else row["mean_loss"])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def how(result: dict[str, Any]) -> str:
    """A paragraph: the machine, the versions, the model and what the runs have in common."""
    machine, settings, plan = result["machine"], result["settings"], result["plan"]
    loads = [run["load"] for run in result["runs"]]
    tokens = settings["batch_size"] * settings["seq_len"]
    rates = sorted({len(values) for values in plan["learning_rates"].values()})
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    text = (
        f"{machine['cpu']}, {machine['cores']} cores, {result['threads']} threads, {versions}, "
        f"{machine['date'][:10]}; one-minute load {min(loads):.1f} to {max(loads):.1f}. "
        f"A GPT of {result['runs'][0]['parameters'] / 1e6:.2f} million parameters ("
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
    if plan["missing"]:
        text += f" Not in this version of the package: {', '.join(plan['missing'])}."
    return text + "\n"


def table(result: dict[str, Any]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| optimizer | learning rate | seeds | held-out loss, mean [min, max] | steps to AdamW's loss "
        "| tokens/s | optimizer's share |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows(result):
        loss = "diverged"
        if row["mean_loss"] is not None:
            loss = f"{row['mean_loss']:.4f} [{row['smallest_loss']:.4f}, {row['largest_loss']:.4f}]"
        steps = row["steps_to_adamw_loss"]
        reached = "" if row["optimizer"] == BASELINE else "not reached" if steps is None else f"{steps}"
        lr = f"{row['lr']:g}" + (" (edge of its grid)" if row["lr_at_edge_of_grid"] else "")
        lines.append(
            f"| {row['optimizer']} | {lr} | {row['seeds']} | {loss} | {reached} "
            f"| {row['tokens_per_second']:.0f} | {row['optimizer_step_share']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def sweep(result: dict[str, Any]) -> str:
    """Mean loss at the end for every learning rate, as a Markdown list."""
    lines = []
    for name in result["plan"]["learning_rates"]:
        means = {lr: statistics.fmean(map(final_loss, runs)) for lr, runs in grid(result, name).items()}
        cells = [
            f"{lr:g}: {mean:.4f}" if math.isfinite(mean) else f"{lr:g}: diverged"
            for lr, mean in means.items()
        ]
        if cells:
            lines.append(f"- {name}: {', '.join(cells)}")
    return "\n".join(lines) + "\n"


def markdown(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    return "\n".join([how(result), table(result), "Mean held-out loss by learning rate:\n", sweep(result)])


def has_marks(page: Path) -> bool:
    """Whether a file is there and holds both marks in order."""
    return page.is_file() and END in page.read_text(encoding="utf-8").partition(BEGIN)[2]


def update_page(page: Path, result: dict[str, Any]) -> None:
    """Puts the result between the two marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n{markdown(result)}{END}{after}", encoding="utf-8")


def dumped(result: dict[str, Any]) -> str:
    """The result as JSON, with a line for every run."""
    head = json.dumps({**result, "runs": []}, indent=1, allow_nan=False)
    lines = ",\n".join("  " + json.dumps(run, allow_nan=False) for run in result["runs"])
    empty = '"runs": []'
    assert head.count(empty) == 1
    return head.replace(empty, f'"runs": [\n{lines}\n ]') + "\n"


def plot(result: dict[str, Any], path: Path, colors: dict[str, str]) -> None:
    """Held-out loss over steps at the best learning rate, and the final loss over learning rates."""
    import matplotlib as mpl

    mpl.use("Agg")  # before pyplot is imported: no display is needed
    from matplotlib import pyplot as plt

    figure, (curves, sensitivity) = plt.subplots(1, 2, figsize=(12, 4.8), sharey=True, layout="constrained")
    lowest, highest = math.inf, -math.inf
    for row in rows(result):
        name = row["optimizer"]
        chosen = best(result, name)
        if chosen is None or row["mean_loss"] is None:
            continue
        steps, means = mean_curve(chosen[1])
        seeds = list(zip(*(run["curve"]["held_out_loss"] for run in chosen[1]), strict=False))
        color = colors.get(name)
        curves.plot(steps, means, color=color, linewidth=1.6, label=f"{name}, lr {row['lr']:g}")
        curves.fill_between(steps, [min(s) for s in seeds], [max(s) for s in seeds], color=color, alpha=0.15)
        rates = grid(result, name)
        ends = {lr: statistics.fmean(map(final_loss, runs)) for lr, runs in rates.items()}
        finite = {lr: loss for lr, loss in ends.items() if math.isfinite(loss)}
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
