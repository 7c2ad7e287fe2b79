"""The device run with stand-ins for its parts: whatever happens, the report is there and true.

What the parts do is tested elsewhere; `make device-pack` rehearses all of it on the emulator.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATUSES = {"PASS", "FAIL", "SLOW", "SKIP", "TIMEOUT", "CRASH", "LEFT_OUT"}


def loaded(name: str) -> ModuleType:
    """A script of ``benchmarks``."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


device = loaded("device")
NAMES = [item.name for item in device.ITEMS]


class Trial:
    """A pack without contents, and runs of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out, self.ledger = folder, folder / "out", folder / "ledger"
        self.stretch = 0.1  # limits of 4 to 15 s, for parts that take 0.2 to 1 s
        self.pack = folder / "tree" / ".device"
        (self.pack / "dion").mkdir(parents=True)
        (folder / "tree" / "benchmarks").symlink_to(ROOT / "benchmarks")
        (self.pack / "manifest.json").write_text('{"commit": "abc", "dirty": false, "files": {}}')
        shutil.copyfile(ROOT / "benchmarks" / "device_go.sh", self.pack / "go")
        # Python imports it before every program that `device.py` starts.
        shutil.copyfile(Path(__file__).with_name("stand_in_part.py"), folder / "sitecustomize.py")
        for run in ("1", "2"):
            words = ["--plan", "--run", run, "--pack", str(self.pack), "--out", str(self.pack)]
            subprocess.run(
                [sys.executable, str(ROOT / "benchmarks" / "device.py"), *words],
                check=True,
                env=self.environment(),
            )
            (self.pack / "report.json").rename(self.pack / f"first-{run}.json")

    def environment(self, accidents: dict[str, str] | None = None) -> dict[str, str]:
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith("OXIDION")},
            "PYTHONPATH": str(self.folder),
            "PYTHON": sys.executable,
            "OUT": str(self.out),
            "OXIDION_DEVICE_STATE": str(self.folder / "state"),
            "OXIDION_DEVICE_STRETCH": str(self.stretch),
            "LEDGER": str(self.ledger),
            "STAND_IN": json.dumps(accidents or {}),
        }

    def start(self, run: int = 1, seconds: float = 100, **accidents: str) -> subprocess.Popen[bytes]:
        with (self.folder / "said").open("wb") as said:
            return subprocess.Popen(
                ["bash", str(self.pack / "go"), str(run), str(seconds)],
                env=self.environment(accidents),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, run: int = 1, seconds: float = 100, **accidents: str) -> dict[str, Any]:
        code = self.start(run, seconds, **accidents).wait(timeout=120)
        assert code == 0, (self.folder / "said").read_text()
        return self.report()

    def report(self) -> dict[str, Any]:
        """The report that is there, which is whole and has only words and parts that it may have."""
        found: dict[str, Any] = json.loads((self.out / "report.json").read_text())
        assert found["schema"] == 1
        assert {part["status"] for part in found["parts"]} <= STATUSES
        names = [(part["row"], part["name"]) for part in found["parts"]]
        assert len(names) == len(set(names))
        return found

    def done(self) -> list[str]:
        return self.ledger.read_text().splitlines() if self.ledger.is_file() else []


def by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["name"]: part for part in report["parts"]}


def statuses(report: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["status"] for part in report["parts"] if part["name"] in NAMES}


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


def test_every_part_runs_and_the_second_run_repeats_none(trial: Trial) -> None:
    report = trial.run()
    assert statuses(report) == dict.fromkeys(NAMES, "PASS")
    assert report["ended"] == "all parts have run or were left out"
    assert (report["commit"], report["device"]["name"]) == ("abc", "a GPU")
    assert report["ceilings"] == {"copy_gb_per_s": 1.0}
    assert [race["part"] for race in report["races"]][:2] == ["env", "baseline"]
    assert {part["name"] for part in report["parts"] if part["row"] == 3} == {
        "a.cu one",
        "b.cu two",
        "c.cu three",
    }
    assert 0 < report["seconds"]["used"] < report["seconds"]["given"] == 100
    assert "a line of muon" in (trial.out / "log.txt").read_text()
    second = trial.run(2)
    assert not [name for name in by_name(second) if name.startswith("again")]
    assert {"profile: updates.cu AdamW", "racecheck: symmetric_mma.cu Muon"} <= by_name(second).keys()


ACCIDENTS = [
    ("env", "hang", "TIMEOUT"),
    ("install", "crash", "CRASH"),
    ("baseline", "raise", "CRASH"),
    ("muon", "flood", "PASS"),
    ("dion", "kills its parent", "CRASH"),
    ("peers", "ends by itself", "CRASH"),
    ("suite", "hang", "TIMEOUT"),
]


@pytest.mark.parametrize(("name", "kind", "status"), ACCIDENTS)
def test_an_accident_of_a_part_is_reported_and_the_others_run(
    trial: Trial, name: str, kind: str, status: str
) -> None:
    report = trial.run(seconds=30 if (name, kind) == ("suite", "hang") else 100, **{name: kind})
    found = statuses(report)
    assert found.pop(name) == status
    assert set(found.values()) == {"PASS"}
    files = [file for file in trial.out.iterdir() if not file.name.startswith(".")]
    assert {file.name for file in files} == {"report.json", "log.txt"}
    assert sum(file.stat().st_size for file in files) < 16 << 20


def test_nothing_runs_on_a_device_that_is_lost(trial: Trial) -> None:
    report = trial.run(kernels="lost")
    found = statuses(report)
    at = NAMES.index("kernels")
    assert [found[name] for name in NAMES[:at]] == ["PASS"] * at
    assert found["kernels"] == "CRASH"
    assert {found[name] for name in NAMES[at + 1 :]} == {"LEFT_OUT"}
    assert by_name(report)["muon"]["reason"].startswith("the device does not answer any more")


def test_failed_source_is_off_and_its_parts_run_again_alone(trial: Trial) -> None:
    report = trial.run(**{"b.cu two": "wrong"})
    found = by_name(report)
    assert (found["b.cu two"]["status"], found["kernels"]["status"]) == ("FAIL", "FAIL")
    assert report["off"] == {"b.cu": "planted"}
    assert found["baseline"]["figures"]["off"] == ""
    assert found["muon"]["figures"]["off"] == "b.cu"
    second = by_name(trial.run(2))
    again = second["again: 3 b.cu two"]
    assert (again["status"], again["figures"]) == ("PASS", {"blocking": "1", "off": ""})
    assert again["env"]["CUDA_LAUNCH_BLOCKING"] == "1"
    assert "memcheck: b.cu two" in second
    assert not [name for name in second if name.startswith("profile")]


def test_the_rest_of_a_check_runs_where_a_part_kills_its_parent(trial: Trial) -> None:
    found = by_name(trial.run(**{"b.cu two": "kills its parent"}))
    kernels = [found[name]["status"] for name in ("a.cu one", "b.cu two", "c.cu three")]
    assert kernels == ["PASS", "CRASH", "PASS"]
    assert found["kernels"]["status"] == "CRASH"
    assert found["kernels, resumed"]["status"] == "FAIL"
    assert found["suite"]["status"] == "PASS"


def test_what_a_short_run_leaves_out_the_second_one_takes(trial: Trial) -> None:
    trial.stretch = 0.02  # parts whose limit is longer than the time left do not begin
    report = trial.run(seconds=3.0, baseline="waits")  # so that a fast machine does not get through
    trial.stretch = 0.1
    found = statuses(report)
    left = [name for name in NAMES if found[name] == "LEFT_OUT"]
    assert len(left) > 3
    assert report["seconds"]["used"] <= 3.0
    second = statuses(trial.run(2))
    assert {second[name] for name in left} == {"PASS"}
    assert set(second) - {"install"} == set(left)


def test_check_part_without_time_runs_in_the_second_run(trial: Trial) -> None:
    first = by_name(trial.run(**{"c.cu three": "has no time"}))
    assert (first["c.cu three"]["status"], first["kernels"]["status"]) == ("LEFT_OUT", "PASS")
    before = trial.done().count("b.cu two")
    second = by_name(trial.run(2))
    assert second["c.cu three"]["status"] == "PASS"
    assert trial.done().count("b.cu two") == before, "what has an outcome does not run again"
    assert "muon" not in second


def test_the_second_run_goes_on_where_the_first_was_killed(trial: Trial) -> None:
    process = trial.start(muon="hang")
    until = time.monotonic() + 60
    while "dion" not in trial.done():
        parts = by_name(trial.report())["muon"] if (trial.out / "report.json").is_file() else {}
        if "running" in parts.get("reason", ""):
            break
        assert time.monotonic() < until
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    second = by_name(trial.run(2))
    assert "env" not in second
    assert second["again: muon"]["status"] == "PASS"
    assert {second[name]["status"] for name in ("dion", "published", "peers", "suite")} == {"PASS"}
    assert json.loads((trial.out / "report.json").read_text())["device"] == {"name": "a GPU"}


def test_a_wheel_of_other_code_than_the_checkout_is_refused(trial: Trial) -> None:
    own = sorted((ROOT / "python" / "oxidion" / "_gpu_check").glob("*.py"))
    with zipfile.ZipFile(trial.pack / "oxidion-0-cp310-abi3-linux_x86_64.whl", "w") as wheel:
        for file in own:
            changed = "# older\n" if file.name == "runner.py" else ""
            wheel.writestr(f"oxidion/_gpu_check/{file.name}", changed + file.read_text())
    assert device.other_code(trial.pack) == ["oxidion/_gpu_check/runner.py, which the checkout has otherwise"]
    outcome = trial.folder / "outcome.json"
    device.install(trial.pack, trial.folder, outcome)
    found = json.loads(outcome.read_text())
    assert found["status"] == "FAIL"
    assert "runner.py, which the checkout has otherwise" in found["reason"]


LONG = """
import time

def test_short():
    pass

def test_wrong():
    assert 1 == 2

def test_long():
    time.sleep(100)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_the_suite_ends_in_its_time_and_keeps_what_it_has(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_long.py").write_text(LONG)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    file = tmp_path / "outcome.json"
    words = [str(file), "10", "test_long.py", *workers]
    began = time.monotonic()
    suite = str(ROOT / "benchmarks" / "device_suite.py")
    subprocess.run([sys.executable, suite, *words], cwd=tmp_path, check=True, capture_output=True)
    assert time.monotonic() - began < 40
    found = json.loads(file.read_text())
    assert (found["status"], found["figures"]) == ("FAIL", {"passed": 1, "failed": 1, "left_out": 1})
    assert found["failures"][0]["test"].endswith("test_long.py::test_wrong")
    assert "assert 1 == 2" in found["failures"][0]["traceback"]


@pytest.mark.parametrize("moment", range(20))
def test_a_run_that_is_cut_leaves_a_true_report(trial: Trial, moment: int) -> None:
    at = random.Random(moment).uniform(0.03, 4.0)
    process = trial.start()
    while not (trial.out / "report.json").is_file():  # there is one before the first part
        time.sleep(0.005)
    time.sleep(at)
    # As a limit of time does it, the first half of the times; else all at once.
    number = signal.SIGTERM if moment % 2 else signal.SIGKILL
    os.killpg(process.pid, number)
    process.wait(timeout=30)
    time.sleep(0.3)
    report, done = trial.report(), set(trial.done())
    assert set(NAMES) <= {part["name"] for part in report["parts"]}
    passed = {part["name"] for part in report["parts"] if part["status"] == "PASS"}
    of_checks = {"load", "kernels", "steps", "first", "graph"}
    assert passed - of_checks <= done
    # Only what was running at the cut can be done and not in it: one item, with the parts of a check.
    running = {part["name"] for part in report["parts"] if "was running" in part["reason"]} & set(NAMES)
    assert len(running) <= 1
    inner = {"a.cu one", "b.cu two", "c.cu three"} if running & of_checks else set()
    assert done - passed <= running | inner
    if number == signal.SIGTERM and report["ended"]:
        assert report["ended"] in ("ended by SIGTERM", "all parts have run or were left out")
