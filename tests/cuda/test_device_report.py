"""A report of a device run is taken into the repository: one that is made up of all measurements."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

#: Every measurement of the parts on a GPU, with times that are made up: figures have the names of a real run.
MADE_UP = """
import json, sys
from pathlib import Path
import device_parts as parts
from cuda_race import Place

def row(item):
    times = {"device": [1e-3] * 4, "host": [1e-4] * 4, "seconds": [1e-3] * 4, "state_bytes": 8}
    return {"status": "ok", "value": 1.0, **times, "quality": {"sigma_max": 1.1}}

found = {}
for name, part in parts.PARTS.items():
    given = parts.Given(Place("cuda"), parts.Results(), True, None)
    for item in part.items(given):
        item.keep(row(item))
    if name == "env":
        device = {"name": "NVIDIA H100 80GB HBM3", "capability": "9.0", "driver": "580.159.04"}
        given.results.values["device"]["value"] = {**device, "torch": "2.11"}
    for race in given.results.products:
        for which in ("nvrtc13.0", "nvrtc13.0-relaxed"):
            race["contenders"][f"oxidion symmetric_wgmma-sm_90a-{which}"] = {
                "source": "oxidion", "status": "ok", "seconds": [5e-4] * 4
            }
    found[name] = parts.outcome(part, given.results, is_device=True, left_out=0)
print(json.dumps(found))
"""
NAMES = {1: "env", 2: "updates.cu", 3: "symmetric_wgmma.cu products", 4: "AdamW", 8: "first", 9: "Muon"}
"""A part of each row of `gpu-check`."""


def record(name: str, row: int = 0, **more: Any) -> dict[str, Any]:
    fields = {"status": "PASS", "seconds": 1.0, "limit": 2, "bar": "", "figures": {}, "reason": ""}
    return {"row": row, "name": name, **fields, "traceback": "", "env": {}, **more}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """A report of a run in which all went well."""
    code = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n" + MADE_UP
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment()
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    parts = [record(name, figures=found["figures"]) for name, found in outcomes.items()]
    # Of the rows that the run has.
    listed = subprocess.run(
        [sys.executable, str(BENCHMARKS / "device.py"), "--list"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    rows = [int(row) for line in listed if " check " in line for row in line.split()[-1].split(",")]
    parts += [record(NAMES[row], row) for row in rows]
    parts[-1]["figures"] = {"ratio": 1.25}
    assert (parts[-1]["row"], parts[-1]["name"]) == (9, "Muon")
    lists = {
        key: [{"part": name, **race} for name, found in outcomes.items() for race in found[key]]
        for key in ("races", "products")
    }
    env = outcomes["env"]
    facts = {"schema": 1, "run": 1, "commit": "abc", "dirty": False, "date": "2026-12-01", "pack": {}}
    seconds = {"used": 500, "given": 540}
    device = {"device": env["device"], "ceilings": env["ceilings"], "off": {}, "ended": "all"}
    return {**facts, **device, "parts": parts, **lists, "seconds": seconds}


def environment() -> dict[str, str]:
    return {**os.environ, "OXIDION_CUDA": "libtorch", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What of a checkout a report is written into, without the reports that there are."""
    for name in ("docs/cuda.md", "python/oxidion/_cuda/self_check.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def taken(report: dict[str, Any], checkout: Path) -> str:
    file = checkout / "report.json"
    file.write_text(json.dumps(report))
    command = [sys.executable, str(BENCHMARKS / "device_report.py"), str(file), "--root", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_everything_that_is_aimed_at_has_its_figure(report: dict[str, Any], checkout: Path) -> None:
    said = taken(report, checkout)
    page = (checkout / "docs" / "cuda.md").read_text()
    assert "No report of a device yet" not in page
    assert "not yet measured" not in page[page.index("<!-- reports -->") :]
    assert "- NVIDIA H100 80GB HBM3, driver 580.159.04, 2026-12-01, run 1: 14 PASS" in page
    assert "| `Muon`, four small matrices, as a graph | the same without one | - | 1.1 | 1.25 |" in page
    assert "this is the first report of such a GPU" in said
    kept = checkout / "docs" / "gpu-reports" / "h100-80gb-hbm3-580.159.04-2026-12-01.json"
    assert json.loads(kept.read_text()) == report
    command = [sys.executable, str(BENCHMARKS / "cuda.py"), "--show", str(kept)]
    tables = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 4 x 4096 x 4096 | torch (cuBLAS) |" in tables
    assert "oxidion.Muon libtorch bfloat16" in tables


def test_a_report_proves_the_products_of_its_architecture(report: dict[str, Any], checkout: Path) -> None:
    check = checkout / "python" / "oxidion" / "_cuda" / "self_check.py"
    assert "proven: 9.0" in taken(report, checkout)
    assert 'PROVEN: frozenset[str] = frozenset({"9.0"})\n' in check.read_text()
    wrong = [
        p if p["name"] != "symmetric_wgmma.cu products" else {**p, "status": "FAIL"} for p in report["parts"]
    ]
    said = taken({**report, "parts": wrong}, checkout)
    assert "proven: nothing" in said
    assert "symmetric_wgmma.cu products: PASS, now FAIL" in said
    assert "PROVEN: frozenset[str] = frozenset()\n" in check.read_text()


def test_a_report_says_what_changed_since_the_last_one(report: dict[str, Any], checkout: Path) -> None:
    taken(report, checkout)
    parts = [{**part, "figures": dict(part["figures"])} for part in report["parts"][:-1]]
    for part in parts:
        if part["name"] == "muon":
            part["figures"]["4096x4096 torch over best"] *= 2
        if part["name"] == "dion":
            part |= {"status": "TIMEOUT", "reason": "no answer within 60 s"}
    said = taken({**report, "date": "2026-12-02", "parts": parts}, checkout).splitlines()
    assert said == [
        "docs/gpu-reports/h100-80gb-hbm3-580.159.04-2026-12-02.json",
        "muon, 4096x4096 torch over best: 1, now 2",
        "dion: PASS, now TIMEOUT no answer within 60 s",
        "gone: Muon",
        "proven: 9.0",
    ]
    page = (checkout / "docs" / "cuda.md").read_text()
    assert "| `Muon`, 4 of 4096 × 4096 | torch.optim.Muon | 1.5 | 1.2 | 2 |" in page
    assert "| `Muon`, four small matrices, as a graph | the same without one | - | 1.1 | 1.25 |" in page, (
        "of the older one"
    )


def test_a_report_that_was_cut_before_its_first_part_is_refused(checkout: Path) -> None:
    file = checkout / "report.json"
    file.write_text('{"schema": 1, "device": {}, "parts": []}')
    command = [sys.executable, str(BENCHMARKS / "device_report.py"), str(file), "--root", str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "names no device" in done.stderr


def test_the_page_has_what_the_reports_have() -> None:
    """What `make device-report` has written is what its reports say, and without one the page says so."""
    code = (
        "import json, device_report as r; print(json.dumps([*r.table(r.read(r.ROOT / 'docs/gpu-reports'))]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=BENCHMARKS, capture_output=True, text=True, check=True
    )
    page = (ROOT / "docs" / "cuda.md").read_text("utf-8")
    inside = page.partition("<!-- reports -->\n")[2].partition("<!-- end of reports -->")[0]
    assert inside.splitlines() == json.loads(done.stdout)
