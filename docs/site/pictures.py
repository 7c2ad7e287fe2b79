"""Pictures of the pages: what commands and methods print, with numbers where docs/look-inside.md explains it.

    python docs/site/pictures.py            # writes docs/pictures/*.svg
    python docs/site/pictures.py FOLDER     # writes them elsewhere

Everything is measured when the script runs, on a small GPT that learns a random Markov chain, or planned.
"""

from __future__ import annotations

import html
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib.figure import Figure
from torch import Tensor

import oxidion
from oxidion.__main__ import main as command
from oxidion._planning.simulate import Settings, simulate

ROOT = Path(__file__).resolve().parents[2]
SIZE = 12.0
"""Pixels of the letters."""
ADVANCE, LINE, MARGIN = 0.602, 1.75, 14.0
"""Width of a letter and distance of two lines, in sizes; white around the text, in pixels."""
INK, ACCENT = "#222222", "#c0392b"
TOKENS, LENGTH, BATCH = 32, 16, 32
Mark = tuple[int, str]
"""Line and word that get a number."""


def gpt(layers: int) -> Any:
    """A small GPT, the same at each call."""
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from gpt import GPT, GPTShape
    finally:
        sys.path.remove(str(ROOT / "examples"))
    torch.manual_seed(0)
    return GPT(GPTShape(vocabulary=TOKENS, seq_len=LENGTH, layers=layers, dim=64, heads=4, tied=False))


def windows() -> Iterator[Tensor]:
    """Batches of a random Markov chain, whose states have a few successors each."""
    generator = torch.Generator().manual_seed(0)
    chain = torch.rand(TOKENS, TOKENS, generator=generator).pow(12)
    while True:
        columns = [torch.randint(TOKENS, (BATCH,), generator=generator)]
        while len(columns) <= LENGTH:
            columns.append(torch.multinomial(chain[columns[-1]], 1, generator=generator)[:, 0])
        yield torch.stack(columns, dim=1)


def trained(steps: int, layers: int = 2, **settings: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
    """An optimizer after some steps, with gradients for the next one, and its metrics at every tenth step."""
    model = gpt(layers)
    name = settings.pop("name", "Dion")
    optimizer = getattr(oxidion, name)(model, lr=0.01, **settings)
    measured = []
    for step, batch in zip(range(steps + 1), windows(), strict=False):
        optimizer.zero_grad()
        model.loss(batch).backward()
        if step and step % 10 == 0:
            measured.append([dict(row) for row in optimizer.metrics()])
        if step < steps:
            optimizer.step()
    return optimizer, measured


def printed(path: Path, text: str, marks: Sequence[Mark], columns: int) -> None:
    """Draws lines of text as a terminal shows them, with a number at each word that is explained."""
    lines = text.rstrip("\n").splitlines()
    width = 2 * MARGIN + columns * ADVANCE * SIZE
    height = 2 * MARGIN + len(lines) * LINE * SIZE
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="DejaVu Sans Mono, monospace" '
        f'font-size="{SIZE:g}">',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
    ]
    for number, line in enumerate(lines):
        shown = line if len(line) <= columns else f"{line[: columns - 1]}…"
        drawn.append(_letters(shown, 0, number, INK))
    for number, (at, word) in enumerate(marks, 1):
        column = lines[at].index(word)
        drawn.append(_letters(word, column, at, ACCENT))
        x, y = MARGIN + (column + len(word)) * ADVANCE * SIZE, MARGIN + (at + 0.55) * LINE * SIZE
        drawn.append(
            f'<text x="{x:.1f}" y="{y:.1f}" fill="{ACCENT}" font-size="{0.7 * SIZE:.1f}">{number}</text>'
        )
    path.write_text("\n".join([*drawn, "</svg>"]) + "\n", "utf-8")


def columns_of(table: str, names: Sequence[str]) -> str:
    """Some columns of a printed table, the first one with them."""
    head = table.partition("\n")[0]
    starts = [found.start() for found in re.finditer(r"\S+", head)]
    columns = list(zip(starts, [*starts[1:], None], strict=True))
    chosen = [columns[0], *(at for at in columns if head[at[0] : at[1]].strip() in names)]
    return "\n".join("".join(line[first:end] for first, end in chosen) for line in table.splitlines())


def _letters(text: str, column: int, line: int, color: str) -> str:
    """Text in SVG that is as wide in every font."""
    x, y = MARGIN + column * ADVANCE * SIZE, MARGIN + (line + 0.8) * LINE * SIZE
    length = len(text) * ADVANCE * SIZE
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" textLength="{length:.1f}" '
        f'lengthAdjust="spacingAndGlyphs" xml:space="preserve">{html.escape(text)}</text>'
    )


def over_steps(path: Path) -> None:
    """Captured energy and error feedback over steps, for two rank fractions."""
    figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="white")
    panels = dict(zip(("captured_energy", "error_feedback_norm"), figure.subplots(1, 2), strict=True))
    for fraction, color in ((1 / 4, "#2e8b57"), (1 / 16, ACCENT)):
        _, measured = trained(60, rank_fraction=fraction)
        steps = [10 * (n + 1) for n in range(len(measured))]
        for key, axis in panels.items():
            values = [sorted(row[key] for row in rows if row[key] is not None) for rows in measured]
            middle = [each[len(each) // 2] for each in values]
            axis.plot(steps, middle, color=color, label=f"rank_fraction={fraction:g}")
            axis.fill_between(steps, [v[0] for v in values], [v[-1] for v in values], color=color, alpha=0.15)
    for key, axis in panels.items():
        axis.set(title=key, xlabel="step")
        axis.set_ylim(bottom=0)
    panels["captured_energy"].set_ylim(0, 1.02)
    handles = panels["captured_energy"].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, title="median and range of the matrices")
    figure.savefig(path, format="svg")


def muon_on_four_ranks() -> str:
    """The plan of the first of four ranks that share the parameters."""
    sizes = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 4, "hidden": 256, "vocab": 512, "gated": False}
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "model.json")
        file.write_text(json.dumps(sizes))
        return str(simulate(str(file), {"fs": 4}, Settings("muon"))[1])


def mean_sent(settings: Settings, shards: int) -> float:
    """Bytes that a rank of Llama 8B sends in a step, on average over the ranks.

    Raises:
        ValueError: for collectives whose mean one plan does not contain.
    """
    result, plan = simulate("llama-8b", {"fs": shards}, settings)
    if result.routes:
        return result.routes["chosen"]
    total, gathered = 0.0, set[tuple[int, str]]()
    for transfer in plan.transfers:
        buffer = transfer["bucket"], transfer["buffer"]
        if transfer["kind"] != "all_to_all":
            raise ValueError(f"no mean of {transfer['kind']} of {transfer['buffer']}")
        # All ranks have equal shards of what goes to owners and comes back, not equally many matrices.
        shard = transfer["recv" if buffer in gathered else "send"][1]
        gathered.add(buffer)
        total += shard * (shards - 1) / shards
    return total


def over_shards(path: Path) -> None:
    """Bytes that a rank sends in a step against the number of shards."""
    figure = Figure(figsize=(8, 4.8), layout="constrained", facecolor="white")
    axis = figure.subplots()
    shards = [2**k for k in range(1, 11)]
    lines = {
        "Dion 1/4, keep": (Settings("dion", 1 / 4, route="keep"), "#2e8b57", "-"),
        "Dion 1/4, gather": (Settings("dion", 1 / 4, route="gather"), "#2e8b57", "--"),
        "Dion 1/16, keep": (Settings("dion", 1 / 16, route="keep"), ACCENT, "-"),
        "Dion 1/16, gather": (Settings("dion", 1 / 16, route="gather"), ACCENT, "--"),
        "Muon": (Settings("muon"), "#1f4e9c", ":"),
        "Dion2 1/4": (Settings("dion2", fraction=1 / 4), "#8a6d00", "-."),
    }
    for label, (settings, color, style) in lines.items():
        sent = [mean_sent(settings, each) / 1e9 for each in shards]
        axis.plot(shards, sent, style, color=color, label=label, marker="o", markersize=3)
    axis.plot([], [], " ", label="AdamW: sends nothing")
    axis.set(title="Llama 8B: bytes that a rank sends in a step", xlabel="shards (fs)", ylabel="GB")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(shards, [str(each) for each in shards])
    axis.grid(alpha=0.3)
    figure.legend(loc="outside right center")
    figure.savefig(path, format="svg")


def draw(folder: Path) -> None:
    """Writes all pictures into a folder."""
    mpl.rcParams["svg.hashsalt"] = "oxidion"  # the same names in every run
    folder.mkdir(parents=True, exist_ok=True)
    optimizer, _ = trained(20, layers=1, rank_fraction=0.25)
    explained = (
        "states",
        "placements",
        "algorithm",
        "view",
        "lr_factor",
        "rank",
        "owner",
        "route",
        "state_bytes",
        "flops",
        "wire_bytes",
    )
    rows = columns_of(str(optimizer.explain()), explained)
    printed(folder / "explain.svg", rows, [(0, word) for word in explained], len(rows.partition("\n")[0]))
    plan = muon_on_four_ranks()
    lines = plan.splitlines()

    def first(text: str) -> int:
        return next(number for number, line in enumerate(lines) if text in line)

    marks = [(0, "bucket 0"), (0, "4 × [64, 64] bfloat16"), (0, "fs rows/4"), (0, "whole matrices over (fs)")]
    marks += [(first("  0  "), "compute"), (first("issue"), "issue"), (first("issue"), "8.2 kB per rank")]
    marks += [(first("wait"), "wait"), (first("orthonormalize[1]"), "orthonormalize[1]")]
    marks += [(len(lines) - 1, "arena"), (len(lines) - 1, "hazards 0")]
    printed(folder / "plan.svg", plan, marks, 95)
    columns = ("update_rms", "param_rms", "captured_energy", "error_feedback_norm", "orthogonality_error")
    printed(folder / "metrics.svg", str(optimizer.metrics()), [(0, word) for word in columns], 130)
    printed(folder / "verify.svg", str(optimizer.verify()), [(0, "algorithm"), (0, "update_error")], 75)
    over_steps(folder / "metrics-steps.svg")
    mesh = ["--model", "llama-8b", "--mesh", "fs=32", "fs=8,tp=4", "--rank-fraction", "0.25"]
    command(["plan", *mesh, "--plot", str(folder / "plan-plot.svg")])
    over_shards(folder / "bytes-shards.svg")
    momenta, _ = trained(60, name="Muon")
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary, "checkpoint.pt")
        torch.save(momenta.state_dict(), file)
        command(["rank", str(file), "--plot", str(folder / "rank-plot.svg")])
    for path in sorted(folder.glob("*.svg")):
        # The time of drawing is no part of a picture.
        text = path.read_text()
        start, found, rest = text.partition("<dc:date>")
        path.write_text(start + found + rest[rest.index("</dc:date>") :] if found else text)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "pictures")
