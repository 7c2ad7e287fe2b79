"""The runner of checks: whatever a part does, the report is there and says what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxidion._gpu_check import runner
from oxidion._gpu_check.runner import Part, Report, Runner, forked, started


def passes(_: Any) -> dict[str, Any]:
    return {"status": "PASS", "figures": {"one": 1}}


def hangs(write: Callable[[Any], None]) -> dict[str, Any]:
    write({"figures": {"first": 1}})
    time.sleep(100)
    return {}


def crashes(_: Any) -> dict[str, Any]:
    print("about to crash", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def raises(_: Any) -> dict[str, Any]:
    raise ValueError("planted\nand more")


def floods(_: Any) -> dict[str, Any]:
    line = b"x" * 65535 + b"\n"
    for _n in range(300):
        os.write(2, line)
    return {"status": "PASS", "figures": {}}


def ends_with_one(write: Callable[[Any], None]) -> dict[str, Any]:
    write({"status": "FAIL", "figures": {}, "reason": "a part failed"})
    os._exit(1)


def leaves_a_child(_: Any) -> dict[str, Any]:
    subprocess.Popen(["sleep", "100"])
    return {"status": "PASS", "figures": {}}


def ran(
    tmp_path: Path, *works: Any, jobs: int = 1, limit: float = 2.0, **keys: Any
) -> dict[str, dict[str, Any]]:
    """Runs functions as parts of their names; returns the records as the file has them."""
    file = tmp_path / "report.json"
    report = Report(file, {"schema": 1})
    parts = [Part(work.__name__, limit, forked(work)) for work in works]
    Runner(report, spare=0.0, log=tmp_path / "log.txt", **keys).run(parts, jobs)
    content = json.loads(file.read_text())
    assert content["schema"] == 1
    assert all(tuple(part) == runner.FIELDS for part in content["parts"])
    assert [part["name"] for part in content["parts"]] == [part.name for part in parts]
    return {part["name"]: part for part in content["parts"]}


@pytest.mark.parametrize("jobs", [1, 8])
def test_accidents_of_parts_are_named_and_stop_no_other(tmp_path: Path, jobs: int) -> None:
    works = (hangs, crashes, raises, floods, leaves_a_child, passes)
    began = time.monotonic()
    found = ran(tmp_path, *works, jobs=jobs)
    assert time.monotonic() - began < 30
    assert {name: part["status"] for name, part in found.items()} == {
        "hangs": "TIMEOUT",
        "crashes": "CRASH",
        "raises": "FAIL",
        "floods": "PASS",
        "leaves_a_child": "PASS",
        "passes": "PASS",
    }
    assert found["hangs"]["figures"] == {"first": 1}
    assert found["crashes"]["reason"] == "the process ended by SIGSEGV"
    assert "about to crash" in found["crashes"]["traceback"]
    assert "crashes" in found["crashes"]["traceback"], "faulthandler names the function"
    assert found["raises"]["reason"] == "ValueError: planted"
    assert "<here>/" in found["raises"]["traceback"], "no folder names a user"
    assert str(Path.cwd()) not in json.dumps(found)
    assert "in raises" in found["raises"]["traceback"]
    log = (tmp_path / "log.txt").read_text()
    assert len(log) < 2 * runner.LOG_OF_A_PART
    assert "bytes are left out" in log


def test_an_exit_code_that_a_part_may_have_is_no_crash(tmp_path: Path) -> None:
    report = Report(None, {})
    parts = [
        Part(f"statuses {statuses}", 2.0, forked(ends_with_one), statuses=statuses)
        for statuses in ((0,), (0, 1))
    ]
    Runner(report, spare=0.0).run(parts)
    assert [record["status"] for record in report.records] == ["CRASH", "FAIL"]


def test_processes_of_a_part_end_with_it(tmp_path: Path) -> None:
    def writes(write: Callable[[Any], None]) -> dict[str, Any]:
        child = subprocess.Popen(["sleep", "100"])
        return {"status": "PASS", "figures": {"child": child.pid}}

    child = ran(tmp_path, writes)["writes"]["figures"]["child"]
    until = time.monotonic() + 5
    while Path(f"/proc/{child}").is_dir() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_nothing_begins_once_the_device_is_lost(tmp_path: Path) -> None:
    asked: list[int] = []

    def silent(_: Any) -> dict[str, Any]:
        raise RuntimeError("no device")

    def counted(outcome: Path, output: int) -> Any:
        asked.append(1)
        return forked(silent)(outcome, output)

    found = ran(tmp_path, raises, crashes, passes, probe=Part("answers", 1, counted))
    assert [found[name]["status"] for name in ("raises", "crashes", "passes")] == [
        "FAIL",
        "CRASH",
        "LEFT_OUT",
    ]
    assert found["passes"]["reason"].startswith("the device does not answer any more: FAIL, RuntimeError")
    assert len(asked) == 2, "it is asked twice after the crash, and not after an exception"
    again = ran(tmp_path, crashes, passes, probe=Part("answers", 1, forked(passes)))
    assert again["passes"]["status"] == "PASS"


def test_parts_without_enough_time_are_left_out(tmp_path: Path) -> None:
    found = ran(tmp_path, passes, until=time.monotonic() + 1.0, limit=2.0)
    assert found["passes"]["status"] == "LEFT_OUT"
    assert "s were left, 2 s are needed" in found["passes"]["reason"]
    found = ran(tmp_path, hangs, passes, until=time.monotonic() + 1.5, limit=50.0, least=1.0)
    assert (found["hangs"]["status"], found["passes"]["status"]) == ("TIMEOUT", "LEFT_OUT")
    assert 1.0 < found["hangs"]["limit"] <= 1.5


def test_parts_that_measure_have_the_device_for_themselves(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()

    def work(name: str) -> Callable[[Any], dict[str, Any]]:
        def inside(_: Any) -> dict[str, Any]:
            (marks / name).touch()
            time.sleep(0.3)
            seen = sorted(file.name for file in marks.iterdir())
            (marks / name).unlink()
            return {"status": "PASS", "figures": {"marks": seen}}

        return inside

    parts = [Part(name, 5, forked(work(name)), alone=name == "c") for name in "abcde"]
    report = Report(None, {})
    Runner(report, spare=0.0).run(parts, 2)
    seen = {record["name"]: record["figures"]["marks"] for record in report.records}
    assert seen["c"] == ["c"]
    assert seen["a"] == ["a", "b"]


def test_a_command_that_cannot_be_started_fails_by_itself() -> None:
    report = Report(None, {})
    parts = [Part("none", 5, started(["/no/such/program"], {})), Part("passes", 5, forked(passes))]
    Runner(report, spare=0.0).run(parts)
    assert [record["status"] for record in report.records] == ["FAIL", "PASS"]
    assert "No such file" in report.records[0]["reason"]


PARENT = """
import os, signal, sys, time
from pathlib import Path
from oxidion._gpu_check.runner import Part, Report, Runner, forked

def kills(_):
    time.sleep(0.5)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(100)

def waits(write):
    write({"figures": {"pid": os.getpid()}})
    time.sleep(100)

done = lambda _: {"status": "PASS", "figures": {}}
works = {"done": done, "kills": kills, "waits": waits, "never": done}
parts = [Part(name, 50, forked(work)) for name, work in works.items()]
Runner(Report(Path(sys.argv[1]), {}), spare=0.0).run(parts, 2)
"""


def test_part_that_kills_its_parent_leaves_only_a_true_report(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-c", PARENT, str(file)], check=False)
    assert done.returncode == -signal.SIGKILL
    found = {part["name"]: part for part in json.loads(file.read_text())["parts"]}
    assert found["done"]["status"] == "PASS"
    assert {found[name]["status"] for name in ("kills", "waits", "never")} == {"LEFT_OUT"}
    assert found["kills"]["reason"] == found["waits"]["reason"] == runner.RUNNING
    assert found["never"]["reason"] == runner.NOT_BEGUN
    until = time.monotonic() + 5
    while Path(f"/proc/{found['waits']['figures']['pid']}").is_dir():
        assert time.monotonic() < until, "it runs on without its parent"
        time.sleep(0.01)


def test_a_full_disk_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "none" / "report.json", {})
    Runner(report, spare=0.0).run([Part("passes", 5, forked(passes))])
    assert [record["status"] for record in report.records] == ["PASS"]
    assert "cannot be written" in capsys.readouterr().err
