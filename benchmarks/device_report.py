"""Takes the report of a run on a GPU into the repository: report, tables, what was measured, what is proven.

    python benchmarks/device_report.py report.json

Writes ``docs/gpu-reports/<gpu>-<driver>-<date>.json``, the table between markers in docs/cuda.md, and
`PROVEN` in the self-check. Prints the differences from the last report of such a GPU; `cuda.py --show` prints
the races of a report.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
Report = Mapping[str, Any]
NONE = "No report of a device yet."
#: Share by which a figure has to differ to be reported.
CHANGED = 0.05


@dataclass(frozen=True)
class Target:
    """A row of the table in docs/cuda.md: what is aimed at, and the figure of a part that says how it is.

    The bound is what the operations allow. Where both sides need the same products, it is that of a kernel as
    fast as cuBLAS that computes one triangle of what is symmetric (``src/kernels/ops/symmetric/mod.rs``).
    """

    what: str
    against: str
    bound: str
    target: str
    part: str
    figure: str

    def measured(self, report: Report) -> str:
        """The figure of a report; empty if it has none."""
        value = figures(report, self.part).get(self.figure)
        return f"{value:.3g}" if isinstance(value, (int, float)) else ""


_ROWS = """
`AdamW`, float32, 100 M elements | rate of a copy | 1 | 0.85 | elementwise | 100m float32 AdamW of copy
`Lion`, float32, 100 M elements | rate of a copy | 1 | 0.85 | elementwise | 100m float32 Lion of copy
`AdamW`, bfloat16, 100 M elements | rate of a copy | 1 | 0.75 | elementwise | 100m bfloat16 AdamW of copy
`AdamW`, 4000 tensors, time of the host | torch, fused | - | 3 | elementwise | 4000x3 host torch over ours
`XXᵀ`, 4 of 4096 × 4096 | cuBLAS | 2.0 | 1.25 | products | 4x4096x4096 cuBLAS over wgmma
`XXᵀ`, 32 of 2048 × 2048 | cuBLAS | 2.0 | 1.25 | products | 32x2048x2048 cuBLAS over wgmma
`Muon`, 4 of 4096 × 4096 | torch.optim.Muon | 1.5 | 1.2 | muon | 4096x4096 torch over best
`Muon`, 3 of 4096 × 11008 | torch.optim.Muon | 2.1 | 1.2 | muon | 4096x11008 torch over best
`Muon`, 48 matrices of GPT-2 | torch.optim.Muon | - | 1.2 | muon | gpt2-48 torch over best
`Muon`, GPT-2, by libtorch alone | torch.optim.Muon | - | 1.0 | muon | gpt2-48 torch over libtorch
`Muon`, 4 of 4096 × 4096 | DION, compiled | 1.5 | - | peers | 4096x4096 muon compiled over ours
`Dion`, r = 1/4, float32, 4 of 4096 × 4096 | DION, eager | - | 1.5 | dion | QUARTER float32 eager over ours
`Dion`, r = 1/4, TF32, 4 of 4096 × 4096 | DION, eager | - | 1.5 | dion | QUARTER TF32 eager over ours
`NorMuon`, a model of a billion parameters | 85.5 ms, PUBLISHED | NorMuon published over ours
`Dion2`, 1/2, the same | 36.5 ms, PUBLISHED | Dion2 published over ours
`NorDion2`, 1/2, the same | 47.6 ms, PUBLISHED | NorDion2 published over ours
`Muon`, four small matrices, as a graph | the same without one | - | 1.1 | 9 Muon | ratio
"""
_SHORT = {
    "DION": "microsoft/dion",
    "QUARTER": "4096x4096 dion r=1/4",
    "PUBLISHED": "published | - | 1.0 | published",
}
TARGETS = [
    Target(*re.sub("|".join(_SHORT), lambda found: _SHORT[found[0]], line).split(" | "))
    for line in _ROWS.strip().splitlines()
]


def figures(report: Report, name: str) -> dict[str, Any]:
    """Figures of a part by its name, or by its row and name."""
    row, _, rest = name.partition(" ")
    wanted = (int(row), rest) if row.isdigit() else (0, name)
    for part in report["parts"]:
        if (part["row"], part["name"]) == wanted:
            return dict(part["figures"])
    return {}


def words(text: str) -> str:
    """Text as a part of a file's name."""
    return "-".join(re.findall(r"[a-z0-9.]+", text.lower()))


def stem_of(device: str) -> str:
    """The name of a device in those of files: ``h200`` of "NVIDIA H200"."""
    words = re.split(r"[^a-z0-9]+", device.lower())
    return "-".join(word for word in words if word not in ("nvidia", "geforce", ""))


def gpu(report: Report) -> str:
    """The device as files are named by it."""
    return stem_of(report["device"].get("name", ""))


def name_of(report: Report) -> str:
    """The name of the file in docs/gpu-reports."""
    own = [gpu(report), words(report["device"].get("driver", "") or "unknown"), report["date"]]
    return "-".join([*own, *(["2"] if report["run"] == 2 else [])]) + ".json"


def table(reports: Sequence[Report]) -> Iterator[str]:
    """Lines between the markers of docs/cuda.md, from the newest report of each figure."""
    if not reports:
        yield NONE
        return
    for report in reports:
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts(report).items()))
        name, driver = (report["device"][key] for key in ("name", "driver"))
        yield f"- {name}, driver {driver}, {report['date']}, run {report['run']}: {summary}"
    yield ""
    yield "| what | against | bound | target | measured |"
    yield "|---|---|---|---|---|"
    for row in TARGETS:
        found = [value for value in (row.measured(report) for report in reports) if value]
        cells = [row.what, row.against, row.bound, row.target, found[-1] if found else "not yet measured"]
        yield f"| {' | '.join(cells)} |"


def counts(report: Report) -> dict[str, int]:
    """How many parts have which status."""
    found: dict[str, int] = {}
    for part in report["parts"]:
        found[part["status"]] = found.get(part["status"], 0) + 1
    return found


def between(text: str, lines: Sequence[str]) -> str:
    """A page with other lines between the markers."""
    begin, end = "<!-- reports -->\n", "<!-- end of reports -->\n"
    head, _, rest = text.partition(begin)
    _, found, tail = rest.partition(end)
    if not found:
        raise ValueError(f"the page must have the lines {begin.strip()} and {end.strip()}")
    return head + begin + "".join(f"{line}\n" for line in lines) + end + tail


def proven_line(capabilities: Sequence[str]) -> str:
    """The line of the self-check for what reports prove."""
    inside = ", ".join(f'"{one}"' for one in capabilities)
    return f"PROVEN: frozenset[str] = frozenset({f'{{{inside}}}' if inside else ''})"


def changes(old: Report, new: Report) -> Iterator[str]:
    """What a report has otherwise than an older one."""
    before = {(part["row"], part["name"]): part for part in old["parts"]}
    for part in new["parts"]:
        known = before.pop((part["row"], part["name"]), None)
        if known is None:
            yield f"new: {part['name']} {part['status']}"
            continue
        if known["status"] != part["status"]:
            yield f"{part['name']}: {known['status']}, now {part['status']} {part['reason'][:200]}"
        for key, value in part["figures"].items():
            was = known["figures"].get(key)
            if all(isinstance(v, (int, float)) for v in (was, value)) and abs(value - was) > CHANGED * abs(
                was
            ):
                yield f"{part['name']}, {key}: {was:.4g}, now {value:.4g}"
    for _, name in before:
        yield f"gone: {name}"


def read(folder: Path) -> list[dict[str, Any]]:
    """All reports of device runs in a folder, the oldest first."""
    found = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    return sorted((one for one in found if "device" in one), key=lambda one: (one["date"], one["run"]))


def take(
    report: dict[str, Any],
    root: Path,
    proven: Callable[[Report], bool],
    capability: Callable[[Report], str],
) -> list[str]:
    """Writes all files below a root; returns what changed against the last report of such a GPU."""
    if not report.get("device", {}).get("name"):
        raise ValueError(
            "the report names no device: its part env has not run, so that it says nothing of a GPU"
        )
    folder = root / "docs" / "gpu-reports"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name_of(report)
    same = [old for old in read(folder) if gpu(old) == gpu(report) and old["run"] == report["run"]]
    lines = list(changes(same[-1], report)) if same else ["this is the first report of such a GPU"]
    file.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    reports = read(folder)
    page = root / "docs" / "cuda.md"
    page.write_text(between(page.read_text("utf-8"), [*table(reports)]), "utf-8")
    everything = [json.loads(one.read_text("utf-8")) for one in folder.glob("*.json")]
    capabilities = sorted({capability(one) for one in everything if proven(one)})
    check = root / "python" / "oxidion" / "_cuda" / "self_check.py"
    text = re.sub(r"^PROVEN: .*$", proven_line(capabilities), check.read_text("utf-8"), flags=re.MULTILINE)
    check.write_text(text, "utf-8")
    return [str(file.relative_to(root)), *lines, f"proven: {', '.join(capabilities) or 'nothing'}"]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("report", type=Path)
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout that gets it")
    given = parser.parse_args()
    # Without the package: torch need not be there.
    sys.path.append(str(ROOT / "python" / "oxidion" / "_cuda"))
    from proof import capability, proven

    report = json.loads(given.report.read_text("utf-8"))
    print("\n".join(take(report, given.root, proven, capability)))


if __name__ == "__main__":
    main()
