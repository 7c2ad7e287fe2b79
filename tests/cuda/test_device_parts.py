"""Parts of the run on a rented GPU, as far as they go without one: tiny sizes, failures, bars."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.forks import ENVIRONMENT, Forks

from .driver import TESTS, Environment, needs_nvrtc

BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPT = BENCHMARKS / "device_parts.py"

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks("torch._dynamo", "oxidion", environment=ENVIRONMENT)
    yield made
    made.stop()


def part(forks: Forks, name: str, file: Path, *words: str, **variables: str) -> dict[str, Any]:
    """What a part leaves in its file."""
    given = ("--seconds", "100", "--into", str(file), *words)
    (ended,) = forks.run(SCRIPT, name, *given, environment=variables)
    assert ended.returncode == 0, ended.stderr
    assert not list(file.parent.glob("*.part"))
    found: dict[str, Any] = json.loads(file.read_text())
    return found


FIGURES = {
    "env": ("copy_gb_per_s", "launch_us"),
    "baseline": ("AdamW float32 off the CPU", "100m adamw oxidion.AdamW ms"),
    "elementwise": ("100m bfloat16 Lion of copy", "4000x3 host torch over ours", "100m 8-bit AdamW of copy"),
    "products": ("2x96x160 oxidion symmetric_wgmma",),
    "muon": ("gpt2-48 torch over libtorch", "4096x4096 torch over best"),
    "dion": ("1x4096x4096 dion r=1/64 TF32 Muon over Dion", "gpt2-48 dion r=1/16 float32 oxidion.Dion ms"),
    "published": ("NorMuon published over ours", "Dion2 published over ours"),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_part_has_its_figures(forks: Forks, tmp_path: Path, name: str) -> None:
    variables = {"OXIDION_CUDA": "libtorch"} if name == "baseline" else {}
    found = part(forks, name, tmp_path / "found.json", "--device", "cpu", **variables)
    assert (found["status"], found["reason"], found["traceback"]) == ("PASS", "", "")
    assert set(FIGURES[name]) <= set(found["figures"])
    assert found["figures"]["left_out"] == 0
    if name == "env":
        assert found["device"]["name"] == "cpu"
        rates = {"copy_gb_per_s", "launch_us", "bfloat16_tflops", "tf32_tflops", "float32_tflops"}
        assert set(found["ceilings"]) == rates
    rows = [row for race in found["races"] for row in race["contenders"].values()]
    assert all(row["status"] == "ok" and min(row["device"]) > 0 for row in rows)
    # Ours has been timed before and after the others.
    first = [next(iter(race["contenders"].values())) for race in found["races"] if "torch" in str(race)]
    assert all("device_medians" in row for row in first)


def test_peers_are_skipped_without_their_folder(forks: Forks, tmp_path: Path) -> None:
    found = part(forks, "peers", tmp_path / "found.json", "--device", "cpu")
    assert (found["status"], found["figures"]) == ("SKIP", {})
    assert "--peer-path" in found["reason"]


def test_baseline_fails_where_kernels_would_compute(forks: Forks, tmp_path: Path) -> None:
    found = part(forks, "baseline", tmp_path / "found.json", "--device", "cpu", OXIDION_CUDA="auto")
    assert (found["status"], found["reason"]) == (
        "FAIL",
        "ValueError: OXIDION_CUDA must be libtorch, got 'auto'",
    )


def test_time_that_is_up_leaves_measurements_out(forks: Forks, tmp_path: Path) -> None:
    found = part(forks, "published", tmp_path / "found.json", "--device", "cpu", "--seconds", "0")
    assert (found["status"], found["figures"]["left_out"]) == ("SKIP", 6)
    assert "6 measurements were left out" in found["reason"]


@needs_nvrtc
def test_kernels_of_the_emulated_device_are_timed(environment: Environment, tmp_path: Path) -> None:
    cubins = tmp_path / "packed"
    cubins.mkdir()
    for kept in Path(environment["OXIDION_CACHE"]).glob("symmetric_*-sm_90a-*.cubin"):
        kernel = kept.name.partition("-")[0]
        for variant in ("",) if kernel == "symmetric_mma" else ("-nvrtc13.0", "-nvrtc13.0-relaxed"):
            (cubins / f"{kernel}-sm_90a{variant}.cubin").write_bytes(kept.read_bytes()[:-32])
    (cubins / "symmetric_wgmma-sm_90a-broken.cubin").write_bytes(b"no machine code")
    given = ("--device", "emulated")
    found = part(environment.forks, "products", tmp_path / "a.json", *given, "--packed", str(cubins))
    rows = found["products"][0]["contenders"]
    kernels = ["mma", "wgmma nvrtc13.0", "wgmma nvrtc13.0-relaxed"]
    expected = {"torch (cuBLAS)": "ok", **{f"oxidion symmetric_{kernel}": "ok" for kernel in kernels}}
    broken = rows.pop("oxidion symmetric_wgmma broken")["status"]
    assert {name: row["status"] for name, row in rows.items()} == expected
    # One that fails is recorded, and the others are timed.
    assert broken.startswith("failed: RuntimeError: cuModule")
    assert found["status"] == "FAIL"
    found = part(environment.forks, "muon", tmp_path / "b.json", *given)
    assert found["status"] == "PASS"
    rows = found["races"][0]["contenders"]
    states = {name: row.get("kernels", {}).get("symmetric_mma.cu", "") for name, row in rows.items()}
    assert states["oxidion.Muon libtorch"].startswith("libtorch")
    assert {states[f"oxidion.Muon {way}"] for way in ("mma", "wgmma", "bfloat16")} == {"kernels"}
    assert all(1 < row["quality"]["sigma_max"] < 1.2 for row in rows.values())


FAILING = """
import json, os, time
import cuda_child
from cuda_child import Item, Refused

def work(what):
    if what == "raises":
        raise ValueError("a reason")
    if what == "is refused":
        raise Refused("not installed")
    if what == "crashes":
        os.abort()
    if what == "hangs":
        time.sleep(1000)
    return {"pid": os.getpid(), "variable": os.environ.get("SOME", "")}

rows = []
def item(group, what, subject="", **keys):
    rows.append(row := {"what": what})
    return Item(group, subject or what, lambda: work(what), row.update, **keys)

def broken():
    if os.environ.get("SOME") == "broken":
        raise OSError("no device")

some = {"variables": {"SOME": "thing"}}
items = [
    item("a", "measures"), item("a", "raises"), item("a", "is refused"), item("a", "measures"),
    item("a", "crashes"), item("a", "measures", "crashes"),
    item("a", "hangs", limit=0.3), item("a", "measures"),
    item("b", "measures", **some), item("c", "measures", variables={"SOME": "broken"}), item("c", "raises"),
]
left_out = cuda_child.run(items, 60, lambda: None, broken, lambda: None)
print(json.dumps([left_out, rows]))
"""


def test_one_that_raises_crashes_or_hangs_ends_alone(forks: Forks) -> None:
    (ended,) = forks.run(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{FAILING}")
    assert ended.returncode == 0, ended.stderr
    left_out, rows = json.loads(ended.stdout)
    assert left_out == 0
    assert [row["status"] for row in rows] == [
        "ok",
        "failed: ValueError: a reason",
        "not installed",
        "ok",
        "crashed: signal SIGABRT",
        "left out: crashed: signal SIGABRT",
        "no answer within 0 s",
        "ok",
        "ok",
        "failed: OSError: no device",
        "left out: failed: OSError: no device",
    ]
    assert "raise ValueError" in rows[1]["traceback"]
    assert rows[0]["pid"] == rows[3]["pid"] != rows[7]["pid"] != rows[8]["pid"]
    assert (rows[7]["variable"], rows[8]["variable"]) == ("", "thing")


def test_measurements_begin_while_their_time_is_left() -> None:
    """By a clock that counts seconds of the last one of a subject, grown with the cost."""
    from cuda_child import Item, _Expected

    def item(subject: str, cost: float) -> Item:
        return Item("", subject, dict, lambda row: None, cost=cost)

    expected = _Expected()
    assert expected.seconds(item("a", 1.0)) == 0.0
    expected.note(item("a", 1.0), 3.0, 0.5)
    assert expected.seconds(item("a", 1.0)) == 3.0
    assert expected.seconds(item("a", 8.0)) == 2.5 + 8 * 0.5
    assert expected.seconds(item("a", 0.1)) == 3.0
    assert expected.seconds(item("b", 8.0)) == 3.0  # the median of all


def test_a_part_that_is_killed_leaves_what_it_has_measured(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    code = f"""
import sys, time
sys.path.insert(0, {str(BENCHMARKS)!r})
import device_parts
device_parts.launch_us = lambda clock: time.sleep(1000)
sys.argv = ["device_parts.py", "env", "--device", "cpu", "--into", {str(file)!r}]
device_parts.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    end = time.monotonic() + 60
    while not (file.exists() and "float32_tflops" in json.loads(file.read_text())["figures"]):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    found = json.loads(file.read_text())
    assert "status" not in found
    assert found["device"]["name"] == "cpu"
    assert found["figures"]["copy_gb_per_s"] > 0


def test_a_figure_below_its_bar_is_slow() -> None:
    from device_parts import PARTS, Results, outcome

    def row(seconds: float, source: str = "oxidion", sigma: float = 1.1) -> dict[str, Any]:
        times = {"device": [seconds] * 4, "host": [seconds] * 4, "quality": {"sigma_max": sigma}}
        return {"source": source, "status": "ok", **times}

    def found(**contenders: dict[str, Any]) -> dict[str, Any]:
        rows = {"torch.optim.Muon": row(0.012, "torch")}
        rows |= {f"oxidion.Muon {name}": own for name, own in contenders.items()}
        race = {"workload": "4096x4096", "family": "muon", "numel": 1, "contenders": rows}
        return outcome(PARTS["muon"], Results(races=[race]), is_device=True, left_out=0)

    fast = found(libtorch=row(0.012), mma=row(0.01))
    assert (fast["status"], fast["reason"]) == ("PASS", "")
    assert list(fast["figures"].items())[:2] == [
        ("4096x4096 torch over libtorch", 1.0),
        ("4096x4096 torch over best", 1.2),
    ]
    slow = found(libtorch=row(0.012), mma=row(0.0101))
    assert slow["status"] == "SLOW"
    assert slow["reason"] == "4096x4096 torch over best is 1.19, at least 1.2 is wanted"
    for sigma in (1.31, float("nan")):
        wrong = found(libtorch=row(0.012), mma=row(0.01, sigma=sigma))
        assert wrong["status"] == "FAIL"
        assert "mma largest singular value" in wrong["reason"]
    failed = {"source": "oxidion", "status": "failed: ValueError: x", "traceback": "Traceback: x"}
    one = found(libtorch=row(0.012), mma=row(0.01), wgmma=failed)
    assert (one["status"], one["reason"]) == (
        "FAIL",
        "4096x4096 muon oxidion.Muon wgmma: failed: ValueError: x",
    )
    assert one["traceback"].endswith("Traceback: x")


@pytest.mark.parametrize(("seconds", "status"), [(0.8, "PASS"), (0.81, "SLOW")])
def test_the_best_product_by_warpgroups_has_a_bar(seconds: float, status: str) -> None:
    from device_parts import PARTS, Results, outcome

    times = {"torch (cuBLAS)": 1.0, "oxidion symmetric_wgmma a": 3.0, "oxidion symmetric_wgmma b": seconds}
    rows = {
        name: {"source": "oxidion", "status": "ok", "seconds": [time] * 4} for name, time in times.items()
    }
    race = {"shape": [4, 4096, 4096], "flops": 1e12, "contenders": rows}
    found = outcome(PARTS["products"], Results(products=[race]), is_device=True, left_out=0)
    assert found["status"] == status
    name, ratio = next(iter(found["figures"].items()))
    assert (name, ratio) == ("4x4096x4096 cuBLAS over wgmma", float(f"{1 / seconds:.4g}"))


def test_without_a_gpu_a_part_fails(forks: Forks, tmp_path: Path) -> None:
    found = part(forks, "env", tmp_path / "found.json", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert found["status"] == "FAIL"
    assert found["reason"].startswith("device: failed: RuntimeError: torch finds no GPU")


@pytest.mark.parametrize(
    ("device", "rate", "status"),
    [
        ("NVIDIA H100 80GB HBM3", 2700.0, "PASS"),
        ("NVIDIA H100 80GB HBM3", 2600.0, "SLOW"),
        ("NVIDIA H200", 3800.0, "SLOW"),
        ("NVIDIA A100", 1500.0, "PASS"),
    ],
)
def test_a_slow_copy_is_said_of_a_known_device(device: str, rate: float, status: str) -> None:
    from device_parts import PARTS, Results, outcome

    values = {
        "device": {"status": "ok", "value": {"name": device}},
        "copy_gb_per_s": {"status": "ok", "value": rate},
    }
    found = outcome(PARTS["env"], Results(values=values), is_device=True, left_out=0)
    assert (found["status"], found["ceilings"]) == (status, {"copy_gb_per_s": rate})
