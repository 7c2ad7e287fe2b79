"""``python -m oxidion gpu-check`` without a GPU: every row runs, and what is planted is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oxidion._gpu_check import command, parts
from oxidion._gpu_check.parts import EMULATED

from .driver import needs_nvrtc

KEYS = {"row", "part", "seconds", "limit", "status", "figures", "reason"}
FACTS = {
    "schema",
    "oxidion",
    "torch",
    "cuda",
    "driver",
    "gpu",
    "capability",
    "sms",
    "memory",
    "tier",
    "rows",
    "exit",
}


def by_row(report: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for part in report["rows"]:
        found.setdefault(part["row"], []).append(part)
    return found


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer settings and classes than a GPU is asked for."""
    kernels = ("updates.cu AdamW", "sums.cu totals.cu factors.cu Lamb", "columns.cu gram.cu cholesky.cu Dion")
    monkeypatch.setattr(command, "KERNELS", {name: parts.KERNELS[name] for name in kernels})
    monkeypatch.setattr(command, "CLASSES", {name: parts.CLASSES[name] for name in ("Lion", "Muon")})


def on(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


@needs_nvrtc
def test_every_row_runs_on_the_emulator(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, some: None
) -> None:
    on(monkeypatch, {**environment, "OXIDION_CUDA": "auto"})
    report = command.check(EMULATED, command.ROWS)
    assert set(report) == FACTS
    assert all(set(part) == KEYS for part in report["rows"])
    rows = by_row(report)
    assert {row for row, found in rows.items() if {part["status"] for part in found} == {"PASS"}} == {
        1,
        2,
        3,
        4,
    }
    assert {part["status"] for row in (5, 6, 7) for part in rows[row]} == {"SKIP"}
    assert report["exit"] == 0
    text = json.dumps(report)
    private = [Path.home(), os.uname().nodename, os.environ.get("USER") or "no user"]
    assert not [word for word in private if str(word) in text]


def test_command_works_by_libtorch_alone(tmp_path: Path) -> None:
    """As a user calls it, with all classes."""
    file = tmp_path / "report.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "oxidion",
            "gpu-check",
            "--device",
            EMULATED,
            "--rows",
            "1,3,4",
            "--json",
            str(file),
        ],
        env={**os.environ, "OXIDION_CUDA": "libtorch"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = by_row(json.loads(file.read_text("utf-8")))
    assert {part["status"] for part in rows[3]} == {"SKIP"}
    assert [part["part"] for part in rows[4]] == list(parts.CLASSES)
    assert {part["status"] for part in rows[4]} == {"PASS"}
    assert f"4 steps     {len(parts.CLASSES)} PASS" in done.stdout


PLANTED = {
    "wrong": "import oxidion._gpu_check.parts as p\nown, factor = p.moved, {'kernels': 1.01}\n"
    "p.moved = lambda s, d, by: [t * factor.get(by, 1) for t in own(s, d, by)]",
    "crash": "import os\nos._exit(3)",
    "hang": "import time\ntime.sleep(1000)",
}


@needs_nvrtc
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("wrong", "updates differ by 1.0e-02 from libtorch's"),
        ("crash", "the process ended with 3"),
        ("hang", "no answer within 15 s"),
    ],
)
def test_a_broken_kernel_is_reported(
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    planted: str,
    said: str,
) -> None:
    condition = 'import os, sys\nif "--part" in sys.orig_argv and os.environ["OXIDION_CUDA"] == "kernels":\n'
    lines = [f"    {line}\n" for line in PLANTED[planted].splitlines()]
    (tmp_path / "sitecustomize.py").write_text(condition + "".join(lines))
    on(monkeypatch, {**environment, "OXIDION_CUDA": "auto"})
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(command, "KERNELS", {"updates.cu AdamW": parts.KERNELS["updates.cu AdamW"]})
    if planted == "hang":
        monkeypatch.setitem(command.LIMITS, 3, 15)
    report = command.check(EMULATED, [3])
    (part,) = report["rows"]
    assert part["status"] == "FAIL"
    assert said in part["reason"]
    assert report["exit"] == 1


def test_a_broken_class_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "place", lambda _: __import__("torch").device("cpu"))
    monkeypatch.setattr(parts, "VERIFIED", dict.fromkeys(parts.VERIFIED, -1.0))
    found = parts.run(4, "AdamW", EMULATED)
    assert found.status == "FAIL"
    assert "float32: verify() finds an error of" in found.reason


def test_without_a_device_the_exit_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if parts.torch.cuda.is_available():
        pytest.skip("there is a device")
    from oxidion.__main__ import main

    assert main(["gpu-check"]) == command.NO_DEVICE
    assert "torch finds no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--rows", "9"], ["--rows", "a"]])
def test_wrong_rows_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from oxidion.__main__ import main

    with pytest.raises(SystemExit):
        main(["gpu-check", *wrong])
    assert "--rows must be numbers of 1 to 7" in capsys.readouterr().err
