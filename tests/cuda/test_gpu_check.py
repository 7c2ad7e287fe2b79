"""``python -m oxidion gpu-check`` without a GPU: every row runs, and what is planted is found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion._cuda import self_check
from oxidion._gpu_check import command, parts, ranks, rows
from oxidion._gpu_check.place import EMULATED
from oxidion._gpu_check.runner import FIELDS, NOT_BEGUN

from .driver import needs_nvrtc

FACTS = {
    *("schema", "oxidion", "torch", "cuda", "driver", "gpu", "capability", "sms", "memory", "gpus", "tier"),
    *("tiers", "parts", "exit", "status", "figures", "reason"),
}


def by_row(report: dict[str, Any]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = {}
    for part in report["parts"]:
        found.setdefault(part["row"], []).append(part)
    return found


def command_of(*words: str) -> list[str]:
    return [sys.executable, "-m", "oxidion", "gpu-check", "--device", EMULATED, *words]


def called(environment: dict[str, str], file: Path, *words: str) -> tuple[int, str, dict[str, Any]]:
    """Calls the command as a user does; its status, what it prints, and the report that it leaves."""
    command = command_of(*words, "--json", str(file), "--log", str(file.with_suffix(".log")))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, json.loads(file.read_text("utf-8"))


@needs_nvrtc
def test_the_whole_check_passes_on_the_emulator(environment: dict[str, str], tmp_path: Path) -> None:
    """All rows, settings and classes; a GPU takes the same ways."""
    file = tmp_path / "report.json"
    # Products fill the rest of a minute where there is a device; here each takes a million times as long.
    variables = {**environment, "OXIDION_CUDA": "auto", "OXIDION_SELF_CHECK_SECONDS": "60"}
    code, said, report = called(variables, file)
    assert code == 0, said
    assert set(report) == FACTS
    assert all(tuple(part) == FIELDS for part in report["parts"])
    rows = by_row(report)
    assert list(rows) == list(command.ORDER)
    names = {row: [part["name"] for part in found] for row, found in rows.items()}
    assert names[2] == list(self_check.SOURCES)
    assert names[3] == list(parts.KERNELS)
    assert names[4] == list(parts.CLASSES)
    for row in (1, 2, 3, 4, 6, 8):
        assert {part["status"] for part in rows[row]} == {"PASS"}, row
    assert {part["status"] for part in rows[9]} == {"LEFT_OUT"}, "torch captures nothing there"
    # Two processes that share the emulated device.
    assert [part["status"] for part in rows[7]] == ["PASS", "SKIP", "SKIP", "SKIP"]
    assert set(rows[7][0]["figures"]) == {"ranks", *ranks.CLASSES}
    assert set(report["tiers"]) == set(self_check.SOURCES)
    assert set(report["tiers"].values()) == {"kernels"}
    assert report["status"] == "PASS"
    text = json.dumps(report)
    private = [Path.home(), os.uname().nodename, os.environ.get("USER") or "no user"]
    assert not [word for word in private if str(word) in text]


def test_the_whole_check_passes_by_libtorch_alone(tmp_path: Path) -> None:
    """As a user calls it, with all classes."""
    code, said, report = called(
        {**os.environ, "OXIDION_CUDA": "libtorch"}, tmp_path / "report.json", "--rows", "1,2,3,4"
    )
    assert code == 0, said
    rows = by_row(report)
    assert {part["status"] for row in (2, 3) for part in rows[row]} == {"SKIP"}
    assert [part["name"] for part in rows[4]] == list(parts.CLASSES)
    assert {part["status"] for part in rows[4]} == {"PASS"}
    assert f"4 steps     {len(parts.CLASSES)} PASS" in said


#: What is done to the part of a name, in the process that runs it.
PLANTED = """
import os, signal, sys, time
if "gpu-check" in sys.orig_argv:
    import oxidion._gpu_check.rows as rows
    import oxidion._gpu_check.parts as parts
    own, moved = rows.kernels, parts.moved

    def kernels(number, name, *rest):
        if name != "updates.cu Lion":
            return own(number, name, *rest)
        KIND
        return own(number, name, *rest)

    rows.kernels = kernels
"""
WRONG = "parts.moved = lambda s, d, by: [t * (1.01 if by == 'compare' else 1) for t in moved(s, d, by)]"
KINDS = {
    "wrong": (WRONG, "FAIL", "updates differ by 1.0e-02 from libtorch's"),
    "raises": ("raise ValueError('planted')", "FAIL", "ValueError: planted"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", "CRASH", "the process ended by SIGSEGV"),
    "ends": ("os._exit(3)", "CRASH", "the process ended with 3"),
    "hangs": ("time.sleep(1000)", "TIMEOUT", "no answer within 15 s"),
    "kills": ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(100)", "CRASH", "ended while this one ran"),
}


def planted(environment: dict[str, str], folder: Path, code: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(PLANTED.replace("KIND", code.replace("; ", "\n        ")))
    before = "import oxidion._gpu_check.command as c\nc.EMULATED_LIMIT = 15\nc.KERNELS = {n: v for n, v in "
    before += "c.KERNELS.items() if n in ('updates.cu Lion', 'updates.cu AdamW')}\n"
    text = (folder / "sitecustomize.py").read_text()
    (folder / "sitecustomize.py").write_text(text + "".join(f"    {line}\n" for line in before.splitlines()))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**environment, "OXIDION_CUDA": "auto", "PYTHONPATH": paths}


@needs_nvrtc
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_kernel_is_reported(environment: dict[str, str], tmp_path: Path, kind: str) -> None:
    code, status, reason = KINDS[kind]
    file, variables = tmp_path / "report.json", planted(environment, tmp_path, code)
    words = ("--rows", "3", "--jobs", "1")
    if kind == "kills":
        done = subprocess.run([*command_of(*words), "--json", str(file)], env=variables, check=False)
        assert done.returncode == -signal.SIGKILL
        words = (*words, "--resume")
    ended, said, report = called(variables, file, *words)
    found = {part["name"]: part for part in report["parts"]}
    wrong = found["updates.cu Lion"]
    assert (wrong["status"], found["updates.cu AdamW"]["status"]) == (status, "PASS"), said
    assert reason in wrong["reason"]
    assert ended == report["exit"] == 1
    assert report["tiers"]["updates.cu"].startswith("libtorch: ")
    if kind == "wrong":
        assert "tensor 0 at (0, " in wrong["reason"]
    if kind == "raises":
        assert "in kernels" in wrong["traceback"]


@needs_nvrtc
def test_source_that_does_not_load_fails_only_its_own_settings(
    environment: dict[str, str], tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(environment["OXIDION_CACHE"], cache)
    cache.chmod(0o700)
    kernels = environment["OXIDION_EMULATED_KERNELS"].split(":")
    without = ":".join(library for library in kernels if "totals.cu" not in library)
    names = ("updates.cu Lion", "rows.cu CAME", "sums.cu totals.cu MuonH")
    chosen = "import oxidion._gpu_check.command as c\nc.KERNELS = {n: c.KERNELS[n] for n in " + f"{names}}}"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'gpu-check' in sys.orig_argv:\n    " + chosen.replace("\n", "\n    ")
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {**environment, "OXIDION_CUDA": "auto", "PYTHONPATH": paths, "OXIDION_CACHE": str(cache)}
    variables["OXIDION_EMULATED_KERNELS"] = without
    _, said, report = called(variables, tmp_path / "report.json", "--rows", "2,3")
    found = {part["name"]: part for part in report["parts"]}
    assert {name for name, part in found.items() if part["status"] != "PASS"} == {"totals.cu", names[2]}, said
    assert "NOT_FOUND" in found["totals.cu"]["reason"]
    assert found[names[2]]["reason"].startswith("totals.cu: ")


@needs_nvrtc
def test_a_source_that_failed_before_is_off(environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "outcome.json"
    variables = {**environment, "OXIDION_CUDA": "auto", "OXIDION_GPU_CHECK_OFF": "updates.cu"}
    words = ("--part", "3", "updates.cu Lion", "--into", str(file))
    subprocess.run(command_of(*words), env=variables, check=True)
    found = json.loads(file.read_text())
    assert (found["status"], found["reason"]) == ("FAIL", "updates.cu: it failed before")


def values(*numbers: float) -> list[torch.Tensor]:
    return [torch.tensor(numbers, dtype=torch.float64)]


@pytest.mark.parametrize(
    ("by_kernels", "by_libtorch", "reason"),
    [
        # Results of calls: first, next to a busy stream, without it; then libtorch's with and without one.
        ([1.0, 1.0], [1.0], ""),
        ([1.0, 2.0, 2.0], [], "other bits, also when no other stream is busy: tensor 0 at (0,) has 2, not 1"),
        ([1.0, 2.0, 1.0], [1.0, 1.0], "other bits, only while another stream is busy"),
        ([1.0, 1.001, 1.0], [1.0, 1.5, 1.0], ""),
        ([1.0, float("nan")], [], "an update is NaN"),
        ([1.0, 1.0], [1.5], "updates differ by 3.3e-01 from libtorch's"),
        ([0.0, 0.0], [0.0], "nothing is compared"),
    ],
)
def test_bits_that_differ_are_found(
    monkeypatch: pytest.MonkeyPatch, by_kernels: list[float], by_libtorch: list[float], reason: str
) -> None:
    results = {"compare": list(by_kernels), "libtorch": list(by_libtorch)}
    monkeypatch.setattr(parts, "work_of", lambda _name, _device, by: values(results[by].pop(0)))
    _, found = parts.compared("quantized.cu AdamW", torch.device("cpu"), "compare")
    assert reason in found
    assert bool(found) == bool(reason)
    assert results == {"compare": [], "libtorch": []}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_updates_are_measured_in_every_type(dtype: torch.dtype) -> None:
    updates = parts.steps(parts.Setting("AdamW", {}, dtype, parts.SMALL), torch.device("cpu"), 1)
    assert all(update.dtype == torch.float64 and update.any() for update in updates)


def test_sanitizers_run_the_smallest_setting_of_each_source() -> None:
    names = command.smallest(parts.KERNELS)
    used = {source for name in names for source in name.split() if source.endswith(".cu")}
    assert used == set(self_check.SOURCES)
    assert len(names) <= len(self_check.SOURCES)
    assert 5 not in command.ORDER, "only when asked for"


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
        return {"row": row, "name": name, "status": status, "reason": reason}

    found = [
        part("updates.cu AdamW", "PASS"),
        part("sums.cu totals.cu Lamb", "PASS"),
        part("totals.cu updates.cu Adafactor", "FAIL", "updates differ"),
        part("updates.cu Lion", "FAIL", "later"),
        part("symmetric_wgmma.cu Muon", "SKIP", "other devices"),
        part("env", "PASS", row=1),
        part("means.cu Adafactor", "LEFT_OUT", NOT_BEGUN),
        part("select.cu Dion2", "LEFT_OUT", "6 s were left, 10 s are needed"),
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
    monkeypatch.setattr(rows, "place", lambda _: torch.device("cpu"))
    monkeypatch.setattr(rows, "VERIFIED", dict.fromkeys(parts.VERIFIED, -1.0))
    found = rows.run(4, "AdamW", EMULATED)
    assert found.status == "FAIL"
    assert "float32: verify() finds an error of" in found.reason
    monkeypatch.undo()
    monkeypatch.setattr(rows, "place", lambda _: torch.device("cpu"))
    monkeypatch.setattr(rows, "difference", lambda *_: 0.31)
    found = rows.run(4, "AdamW", EMULATED)
    assert (found.status, found.reason) == (
        "FAIL",
        "float32: 5 steps differ by 3.1e-01 from those of the CPU",
    )


def test_without_a_device_the_exit_status_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if parts.torch.cuda.is_available():
        pytest.skip("there is a device")
    from oxidion.__main__ import main

    assert main(["gpu-check"]) == command.NO_DEVICE
    assert "torch finds no GPU" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--rows", "10"], ["--rows", "a"]])
def test_wrong_rows_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from oxidion.__main__ import main

    with pytest.raises(SystemExit):
        main(["gpu-check", *wrong])
    assert "--rows: must be numbers of 1 to 9" in capsys.readouterr().err
