"""``python -m oxidion gpu-check`` without a GPU: every row runs, and what is planted is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion._gpu_check import command, parts, ranks
from oxidion._gpu_check.place import EMULATED

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
    "tiers",
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
    assert {part["status"] for row in (5, 6) for part in rows[row]} == {"SKIP"}
    # Two processes that share the emulated device.
    assert [part["status"] for part in rows[7]] == ["PASS", "SKIP", "SKIP", "SKIP"]
    assert set(rows[7][0]["figures"]) == {"ranks", *ranks.CLASSES}
    assert report["tiers"]["columns.cu"] == report["tiers"]["updates.cu"] == "kernels"
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


@pytest.mark.parametrize("bits", [8, 32])
def test_states_lie_between_guards_that_are_watched(bits: int) -> None:
    setting = parts.Setting("AdamW", {"state_bits": bits}, shapes=parts.SMALL)
    params, optimizer = parts.made(setting, torch.device("cpu"))
    parts.give_gradients(params, 0)
    optimizer.step()
    rooms = parts.guard_states(optimizer)
    assert len(rooms) == (4 if bits == 32 else 8)
    before = [room.clone() for room in rooms]
    parts.give_gradients(params, 1)
    optimizer.step()
    # Steps write there, and to the guards not.
    assert all(
        not torch.equal(room.nan_to_num(), old.nan_to_num()) for room, old in zip(rooms, before, strict=True)
    )
    assert parts.are_whole(rooms)
    for room in rooms:
        for at in (0, parts.GUARD - 1, -1, -parts.GUARD):
            old = room[at].clone()
            room[at] = 1
            assert not parts.are_whole(rooms)
            room[at] = old
    assert parts.are_whole(rooms)


def test_tiers_are_what_the_kernels_row_has_found() -> None:
    def part(name: str, status: str, reason: str = "", row: int = 3) -> dict[str, Any]:
        return {"row": row, "part": name, "status": status, "reason": reason}

    found = [
        part("updates.cu AdamW", "PASS"),
        part("sums.cu totals.cu Lamb", "PASS"),
        part("totals.cu updates.cu Adafactor", "FAIL", "updates differ"),
        part("updates.cu Lion", "FAIL", "later"),
        part("symmetric_wgmma.cu Muon", "SKIP", "other devices"),
        part("env", "PASS", row=1),
    ]
    assert command.tiers(found) == {
        "updates.cu": "libtorch: updates differ",
        "sums.cu": "kernels",
        "totals.cu": "libtorch: updates differ",
        "symmetric_wgmma.cu": "libtorch: other devices",
    }


def test_ranks_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    good: dict[str, Any] = {"off": dict.fromkeys(ranks.CLASSES, 1e-6), "kernels": {"updates.cu": "kernels"}}
    assert ranks.judged([good, good]).status == "PASS"
    other = {**good, "kernels": {"updates.cu": "libtorch (off)"}}
    assert "other kernels" in ranks.judged([good, other]).reason
    for value in (0.01, float("nan")):
        wrong = {**good, "off": {**good["off"], "Dion": value}}
        for order in ([wrong, good], [good, wrong]):
            found = ranks.judged(order)
            assert (found.status, found.reason.split(":")[0]) == ("FAIL", "Dion")
    monkeypatch.setenv("OXIDION_CUDA", "libtorch")
    monkeypatch.setattr(ranks.child, "CODE", "import sys; sys.exit('planted')")
    found = ranks.run(ranks.PARTS[0], [EMULATED] * 2)
    assert (found.status, found.reason) == ("FAIL", "rank 0 ended with 1: planted")
    monkeypatch.setattr(ranks.child, "CODE", "import time; time.sleep(100)")
    monkeypatch.setattr(ranks, "SECONDS", 1)
    assert ranks.run(ranks.PARTS[0], [EMULATED] * 2).reason == "no answer within 1 s"


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
