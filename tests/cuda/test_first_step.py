"""First steps of a user, in processes that check their kernels on the emulated device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oxidion._cuda import child
from oxidion._gpu_check import first
from oxidion._gpu_check.place import EMULATED

from .driver import Environment, needs_nvrtc

# Few settings, which are small: the emulator is slow.
FEW = """
import os
if os.environ.get("OXIDION_SELF_CHECK") == "child":
    import oxidion._gpu_check.parts as parts
    few = {
        "updates.cu AdamW": parts.Setting("AdamW", {}, shapes=((20, 12), (17,))),
        "sums.cu totals.cu Lamb": parts.Setting("Lamb", {}, shapes=((20, 12), (17,))),
        "symmetric_mma.cu Muon": parts.Setting(
            "Muon", {"orth_dtype": "bfloat16"}, shapes=((136, 200),), bar=4 * parts.ROUNDED
        ),
    }
    parts.KERNELS = few
    PLANTED
"""
WRONG = """
    own = parts.moved
    factor = {"compare": 1.1}
    parts.moved = lambda s, d, by: [t * factor.get(by if s.cls == "AdamW" else "", 1) for t in own(s, d, by)]
"""


@pytest.fixture
def plant(environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Makes this process one that has the emulated device, and plants code in all that it starts."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    file = tmp_path / "sitecustomize.py"
    file.write_text(FEW.replace("PLANTED", ""))
    return lambda code: (file.write_text(FEW.replace("    PLANTED", code)), None)[1]


@needs_nvrtc
def test_second_process_finds_verdicts_and_is_silent(
    environment: Environment, plant: Callable[[str], None]
) -> None:
    found = first.first(EMULATED, 480.0)
    assert (found.status, found.reason) == ("PASS", ""), found
    earlier, later = found.figures["processes"]
    assert any("checking" in text for text in earlier["warnings"])
    assert any("timing products" in text for text in earlier["warnings"])
    assert later["warnings"] == []
    for report in (earlier, later):
        assert report["import_s"] > 0
        assert report["context_s"] > 0
        assert report["steps"].keys() == report["kernels"].keys() == {"AdamW", "Muon"}
        assert all(step["first_s"] > 0 and step["next_s"] > 0 for step in report["steps"].values())
        assert {word for kernels in report["kernels"].values() for word in kernels.values()} == {"kernels"}
    assert later["steps"]["AdamW"]["first_s"] < earlier["steps"]["AdamW"]["first_s"]
    verdicts = found.figures["verdicts"]
    assert verdicts.keys() >= {"updates.cu", "symmetric_mma.cu"}
    assert {report["result"] for report in verdicts.values()} == {"pass"}
    assert found.figures["products_timed"] is True
    # What the caller keeps is as it was.
    assert not list(Path(environment["OXIDION_CACHE"]).glob("*.json"))
    json.dumps(found.figures, allow_nan=False)


@needs_nvrtc
def test_wrong_kernel_is_warned_of_and_fails(plant: Callable[[str], None]) -> None:
    plant(WRONG)
    found = first.first(EMULATED, 480.0)
    assert found.status == "FAIL"
    assert "the second process warns: UserWarning: updates.cu is not used on oxidion emulator" in found.reason
    verdict = found.figures["verdicts"]["updates.cu"]
    assert verdict["result"] == "fail"
    assert verdict["reason"].startswith("AdamW: updates differ by 1.0e-01")
    assert verdict["error"] == pytest.approx(0.1, rel=1e-3)
    kernels = found.figures["processes"][1]["kernels"]
    assert kernels["AdamW"]["updates.cu"].startswith("libtorch (AdamW: updates differ")
    assert kernels["Muon"]["symmetric_mma.cu"] == "kernels"


def ended(number: int) -> bool:
    """Whether a process ends within seconds."""
    status = Path(f"/proc/{number}/status")
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not status.exists() or "zombie" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_failed_process_is_reported_with_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys\nsys.stderr.write('x' * 5000)\nraise ValueError('planted')"
    monkeypatch.setattr(first, "PROGRAM", code)
    found = first.first("0")
    assert (found.status, found.reason) == ("FAIL", "the first process ended with 1: ValueError: planted")
    assert len(found.traceback) == first.KEPT
    assert found.traceback.rstrip().endswith("in <module>\nValueError: planted")
    assert found.figures["processes"] == []
    monkeypatch.setattr(first, "PROGRAM", "print('noise')")
    assert first.first("0").reason == "the first process printed no figures: it printed nothing"


def test_process_that_hangs_is_killed_with_its_children(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "child"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
open({str(file)!r}, "w").write(str(child.pid))
time.sleep(100)
"""
    monkeypatch.setattr(first, "PROGRAM", code)
    started = time.monotonic()
    found = first.first("0", 3.0)
    assert time.monotonic() - started < 30
    assert (found.status, found.traceback) == ("FAIL", "")
    assert found.reason == "the first process gave no answer within 3 s: it printed nothing"
    assert ended(int(file.read_text()))


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """The child of a check has a session of its own: killing the group of its parent does not reach it."""
    assert child.CODE.startswith(child.END_WITH_PARENT)
    file = tmp_path / "child"
    code = f"""
import subprocess, sys, time
from oxidion._cuda.child import END_WITH_PARENT
sleep = END_WITH_PARENT + "import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", sleep], start_new_session=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    until = time.monotonic() + 60
    while not (file.exists() and file.read_text()) and time.monotonic() < until:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    assert ended(int(file.read_text()))


def test_user_has_set_no_variable_of_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("OXIDION_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OXIDION_CUDA", "kernels")
    monkeypatch.setenv("OXIDION_SELF_CHECK", "0")
    monkeypatch.setenv("OXIDION_SELF_CHECK_SECONDS", "9")
    monkeypatch.setenv("OXIDION_EMULATED_KERNELS", "somewhere")
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    monkeypatch.setenv("OTHER", "stays")

    def own(number: str) -> dict[str, str]:
        made = first.environment(number, tmp_path)
        assert made["OTHER"] == "stays"
        assert "PYTHONWARNINGS" not in made
        return {name: value for name, value in made.items() if name.startswith("OXIDION_")}

    emulated = {"OXIDION_EMULATED_KERNELS": "somewhere", "OXIDION_CACHE": str(tmp_path)}
    assert own("0") == emulated
    assert own(EMULATED) == {**emulated, "OXIDION_SELF_CHECK_SECONDS": "9"}
    monkeypatch.delenv("OXIDION_SELF_CHECK_SECONDS")
    assert own(EMULATED) == {**emulated, "OXIDION_SELF_CHECK_SECONDS": first.EMULATED_SECONDS}


def test_machine_code_is_copied_without_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    for name in ("a.cubin", "check-sums-1.json", "products-1.json", "check.lock"):
        (given / name).write_text(name)
    monkeypatch.setenv("OXIDION_CACHE", str(given))
    code = "import json, os\nprint(json.dumps([{'found': os.listdir(os.environ['OXIDION_CACHE'])}]))"
    monkeypatch.setattr(first, "PROGRAM", code)
    logged: list[Any] = []
    monkeypatch.setattr(first, "judged", lambda report, **_: (logged.extend(report), ("PASS", ""))[1])
    assert first.first("0").status == "PASS"
    assert logged == [[{"found": ["a.cubin"]}]] * 2


def report(seconds: float = 0.1, warnings: tuple[str, ...] = (), *, right: bool = True) -> dict[str, Any]:
    steps = {"AdamW": {"first_s": 0.1, "right": True}, "Muon": {"first_s": seconds, "right": right}}
    return {"steps": steps, "warnings": list(warnings)}


def test_second_process_decides_and_both_have_to_be_right() -> None:
    slow, silent = report(9.0, ("checking",)), report()
    assert first.judged([slow, silent], is_timed=True) == ("PASS", "")
    status, reason = first.judged([slow, report(0.5)], is_timed=True)
    assert (status, reason) == (
        "SLOW",
        "first steps of the second process take Muon 0.50 s, not less than 0.5 s",
    )
    assert first.judged([slow, report(0.5)], is_timed=False) == ("PASS", "")
    assert first.judged([silent, report(warnings=("late",))], is_timed=True) == (
        "FAIL",
        "the second process warns: late",
    )
    for pair in ([report(right=False), silent], [silent, report(right=False)]):
        assert first.judged(pair, is_timed=True)[0] == "FAIL"
