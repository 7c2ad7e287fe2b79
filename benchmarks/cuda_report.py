"""Tables and plots from the result of `cuda.py`.

``python benchmarks/cuda_report.py RESULT.json`` redoes them.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuda_clock import rates_of
from cuda_lists import device_lists, lists
from floors import floor_seconds
from harness import Series, ratio

TRIAL = "cuda"
"""The name of results without a device."""


def stem_of(device: str) -> str:
    """How the files of a device begin: ``h200`` of "NVIDIA H200"."""
    words = [
        word for word in re.split(r"[^a-z0-9]+", device.lower()) if word not in ("nvidia", "geforce", "")
    ]
    return "-".join(words) or TRIAL


def table(result: dict[str, Any]) -> Iterator[str]:
    """The page of a result."""
    yield f"# On {result['device']}\n"
    sources = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"{result['machine']['date']}; {sources}.\n"
    yield "; ".join(f"{name} {value:.1f}" for name, value in result["ceilings"].items()) + ".\n"
    if result["races"]:
        yield "Device and host times are medians; a ratio is a contender's time over that of our first row, "
        yield "with a 95 % interval: above 1, ours is faster. The floor is the time of operations and "
        yield "traffic at the rates above (`floors.py`); quality is that of `cuda_quality.py`.\n"
        yield from _races(result)
    if result.get("products"):
        yield "\n## Symmetric products, bfloat16\n"
        yield "Rates of the whole product, 2 m² n operations a matrix.\n"
        yield from _products(result["products"])


def _races(result: dict[str, Any]) -> Iterator[str]:
    yield (
        "| list | family | contender | device, ms | host, ms | device, of ours | host, of ours | of floor "
        "| sigma max | ortho error | cosine |"
    )
    yield "|---" * 11 + "|"
    by_name = {workload.name: workload for workload in (*lists(), *device_lists())}
    rates = rates_of(result["ceilings"])
    for race in result["races"]:
        rows, ours = race["contenders"], ours_of(race["contenders"])
        workload = by_name.get(race["workload"])
        floor = floor_seconds(workload, race["family"], rates) if workload else None
        for name, row in rows.items():
            cells = [race["workload"], race["family"], name]
            if row["status"] != "ok" or ours is None:
                yield _line([*cells, row["status"], *[""] * 7])
                continue
            device, host = (statistics.median(row[which]) for which in ("device", "host"))
            cells += [f"{device * 1e3:.3f}", f"{host * 1e3:.3f}"]
            cells += [compared(row, ours, "device"), compared(row, ours, "host")]
            cells.append("" if floor is None or floor != floor else f"{100 * floor / device:.0f} %")
            yield _line([*cells, *_quality(row.get("quality", {}))])


def _quality(found: dict[str, Any]) -> list[str]:
    if "status" in found:
        return [found["status"], "", ""]
    return [f"{found[key]:.4f}" if key in found else "" for key in ("sigma_max", "orthogonality", "cosine")]


def _products(products: list[dict[str, Any]]) -> Iterator[str]:
    yield "| batch x rows x columns | contender | us | TFLOP/s | rate, of cuBLAS |"
    yield "|---" * 5 + "|"
    for race in products:
        base = next((row for row in race["contenders"].values() if row["source"] == "torch"), None)
        for name, row in race["contenders"].items():
            cells = [" x ".join(map(str, race["shape"])), name]
            if row["status"] != "ok":
                yield _line([*cells, row["status"], "", ""])
                continue
            seconds = statistics.median(row["seconds"])
            cells += [f"{seconds * 1e6:.1f}", f"{race['flops'] / seconds / 1e12:.1f}"]
            known = base is not None and base["status"] == "ok"
            yield _line([*cells, rate_of(row, base) if known and base is not None else ""])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def ours_of(rows: dict[str, Any]) -> dict[str, Any] | None:
    """Our first contender that ran."""
    return next((row for row in rows.values() if row["source"] == "oxidion" and row["status"] == "ok"), None)


def figures(row: dict[str, Any], base: dict[str, Any], which: str) -> dict[str, float]:
    """The time of a row over that of another: median of pairs of samples and its interval."""
    count = min(len(row[which]), len(base[which])) // 2 * 2
    return ratio(Series(1, wall=row[which][:count]), Series(1, wall=base[which][:count]), "wall")


def compared(row: dict[str, Any], ours: dict[str, Any], which: str) -> str:
    """A ratio of times with its interval."""
    found = figures(row, ours, which)
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def rate_of(row: dict[str, Any], base: dict[str, Any]) -> str:
    """A ratio of rates with its interval."""
    found = figures(base, row, "seconds")
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def bars(result: dict[str, Any]) -> list[tuple[str, float, float, float]]:
    """Label, ratio on the device and its interval, of every contender that is not ours first one."""
    found = []
    for race in result["races"]:
        ours = ours_of(race["contenders"])
        for name, row in race["contenders"].items():
            if ours is not None and row["status"] == "ok" and row is not ours:
                spread = figures(row, ours, "device")
                label = f"{race['workload']} · {race['family']} · {name}"
                found.append((label, spread["median"], spread["low"], spread["high"]))
    return found


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of the ratios on a logarithmic axis, and rates of symmetric products beside them."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows, products = bars(result), result.get("products", [])
    if not rows and not products:
        return
    figure, axes = plt.subplots(1, 2, figsize=(16, 2 + 0.22 * max(len(rows), 2 * len(products))))
    for at, (_, median, low, high) in enumerate(rows):
        colour = "tab:green" if low > 1 else "tab:red" if high < 1 else "tab:gray"
        axes[0].barh(at, median - 1, left=1, color=colour, height=0.7)
        axes[0].plot([low, high], [at, at], color="black", linewidth=1.5)
    axes[0].set_yticks(range(len(rows)), [label for label, *_ in rows], fontsize=7)
    axes[0].invert_yaxis()
    axes[0].set_xscale("log")
    axes[0].axvline(1.0, color="black", linewidth=1)
    axes[0].set_xlabel("device time of the contender / ours")
    names = sorted({name for race in products for name in race["contenders"]})
    for name in names:
        rates = [_rate(race, name) for race in products]
        axes[1].plot(range(len(rates)), rates, marker="o", label=name)
    axes[1].set_xticks(range(len(products)), [" x ".join(map(str, race["shape"])) for race in products])
    axes[1].tick_params(axis="x", rotation=60, labelsize=7)
    axes[1].set_ylabel("TFLOP/s of the whole product")
    if names:
        axes[1].legend(fontsize=7)
    figure.suptitle(f"{result['device']}, {result['machine']['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _rate(race: dict[str, Any], name: str) -> float:
    row = race["contenders"].get(name, {"status": ""})
    if row["status"] != "ok":
        return float("nan")
    return float(race["flops"] / statistics.median(row["seconds"]) / 1e12)


def write(result: dict[str, Any], folder: Path, stem: str) -> None:
    """The result, its page and its plot."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{stem}.md").write_text("\n".join(table(result)) + "\n")
    plot(result, folder / f"{stem}.png")


def main() -> None:
    """Redo page and plot of the results in ``argv``."""
    for name in sys.argv[1:]:
        path = Path(name)
        write(json.loads(path.read_text()), path.parent, path.stem)


if __name__ == "__main__":
    main()
