"""Symmetric products by the kernel or by the library, whichever was timed to be the faster one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion._cuda import tuning
from oxidion._cuda.records import Facts
from oxidion._gpu_check import products
from oxidion._oxidion import symmetric_classes

from .driver import Environment, needs_nvrtc

PROVEN = """
import os
if os.environ.get("OXIDION_SELF_CHECK") == "child":
    import oxidion._gpu_check.parts as parts
    parts.KERNELS = {}
"""
"""Whatever is asked for passes the check: it is not what is tested here."""
STEP = """
import ctypes, json, logging, os, sys
os.environ.update(VARIABLES)
sys.path.insert(0, FOLDER)
BEFORE
import torch, oxidion
from oxidion._cuda import device, tuning
logged = []
class Collect(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("oxidion.cuda").addHandler(Collect())
device.prepare(emulated=True)
driver = ctypes.CDLL("libcuda.so.1")
torch.set_num_threads(1)
torch.manual_seed(0)
param = torch.nn.Parameter(torch.randn(136, 200))
optimizer = oxidion.Muon([param], lr=0.1, orth_method="standard", orth_dtype="bfloat16")
for _ in range(2):
    param.grad = torch.randn(136, 200)
    optimizer.step()
print(json.dumps(dict(
    launches=driver.emulator_launches_of(b"symmetric_mma"),
    logged=logged,
    finite=bool(param.isfinite().all()),
    env=oxidion.env_report(),
)))
"""
ITERATIONS = 2 * 10
"""Symmetric products of two steps: two in each of five iterations."""


class Process:
    """Steps of processes that keep what they time in a folder of their own."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self._forks = environment.forks
        self.cache = folder / "cache"
        shutil.copytree(environment["OXIDION_CACHE"], self.cache)
        (folder / "sitecustomize.py").write_text(PROVEN)
        self.folder = str(folder)
        self.variables = {
            "OXIDION_CUDA": "auto",
            "OXIDION_SELF_CHECK": "1",
            "OXIDION_SELF_CHECK_SECONDS": "60",
            "OXIDION_CACHE": str(self.cache),
            "OXIDION_EMULATED_KERNELS": environment["OXIDION_EMULATED_KERNELS"],
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        }

    def step(self, before: str = "", **variables: str) -> dict[str, Any]:
        """What two steps of Muon launch and say."""
        code = STEP.replace("VARIABLES", repr({**self.variables, **variables}))
        code = code.replace("FOLDER", repr(self.folder)).replace("BEFORE", before)
        (ended,) = self._forks.run(code)
        outcome, said, complaints = ended.returncode, ended.stdout, ended.stderr
        assert outcome == 0, complaints[-3000:]
        found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        assert found["finite"]
        return found

    def timed(self, report: dict[str, Any]) -> int:
        """How often products were timed."""
        return sum("timing products" in text for text in report["logged"])

    def record(self) -> tuple[Path, dict[str, Any]]:
        """What is kept."""
        (file,) = self.cache.glob("products-*.json")
        return file, json.loads(file.read_text())


@needs_nvrtc
def test_products_are_timed_once_and_the_faster_way_is_taken(
    environment: Environment, tmp_path: Path
) -> None:
    process = Process(environment, tmp_path)
    first = process.step()
    assert process.timed(first) == 1
    file, kept = process.record()
    classes = symmetric_classes()
    assert len(kept["ratios"]) == len(classes)
    assert kept["sources"] == ["symmetric_mma.cu"]
    for (rows, depth, _, _), ratio in zip(classes, kept["ratios"], strict=True):
        assert (ratio is None) == (rows * depth > products.EMULATED_ELEMENTS)
    assert all(ratio > 0 for ratio in kept["ratios"] if ratio is not None)
    won = sum(ratio >= tuning.MARGIN for ratio in kept["ratios"] if ratio is not None)
    assert f"symmetric products: kernels in {won} of " in first["env"]
    for ratio, launches in ((2.0, ITERATIONS), (1.04, 0), (0.5, 0)):
        file.write_text(json.dumps({**kept, "ratios": [ratio] * len(classes)}))
        report = process.step()
        assert (process.timed(report), report["launches"]) == (0, launches), ratio
    # An untimed class follows the rule: it has enough tiles for four multiprocessors.
    file.write_text(json.dumps({**kept, "ratios": [None] * len(classes)}))
    assert process.step()["launches"] == ITERATIONS
    # With products added or not, by itself: one in two adds.
    file.write_text(json.dumps({**kept, "ratios": [2.0 if adds else 0.5 for *_, adds in classes]}))
    assert process.step()["launches"] == ITERATIONS // 2
    # A record of other classes does not count, and the new timing is kept.
    file.write_text(json.dumps({**kept, "ratios": [2.0]}))
    assert process.timed(process.step()) == 1
    assert len(process.record()[1]["ratios"]) == len(classes)


@needs_nvrtc
def test_rule_chooses_where_nothing_is_timed(environment: Environment, tmp_path: Path) -> None:
    process = Process(environment, tmp_path)
    for variables in ({"OXIDION_TUNE": "0"}, {"OXIDION_SELF_CHECK": "0"}, {"OXIDION_CUDA": "kernels"}):
        report = process.step(**variables)
        assert (process.timed(report), report["launches"]) == (0, ITERATIONS), variables
    broken = Path(process.folder, "sitecustomize.py")
    broken.write_text(
        PROVEN + "    import oxidion._gpu_check.products as p\n    p.ratios = lambda _: 1 / 0\n"
    )
    report = process.step()
    assert report["launches"] == ITERATIONS
    (said,) = [text for text in report["logged"] if "a fixed rule chooses" in text]
    assert "ZeroDivisionError" in said
    assert not list(process.cache.glob("products-*.json"))


def test_ranks_take_the_kernel_where_it_wins_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[int, list[bool | None]]] = []
    monkeypatch.setattr(tuning, "set_symmetric_wins", lambda *report: used.append(report))
    count = len(symmetric_classes())
    ranks: list[list[int | None]] = [[1, 1, 0, None, 1], [1, 0, 0, 1, None]]
    report = []
    for wins in ranks:
        monkeypatch.setattr(tuning, "_in_use", {0: [*wins, *[0] * (count - 5)]})
        report.append(tuning.flags(0))
    largest = [max(pair) for pair in zip(*report, strict=True)]
    for wins in ranks:
        monkeypatch.setattr(tuning, "_in_use", {0: [*wins, *[0] * (count - 5)]})
        tuning.agree(0, largest)
        number, agreed = used.pop()
        assert (number, agreed[:5]) == (0, [True, False, False, None, None])
        tuning.agree(0, tuning.flags(0))  # once it is so, nothing changes
        assert not used
    # A rank that has timed nothing has the rule, and so do the others.
    monkeypatch.setattr(tuning, "_in_use", {})
    silent = tuning.flags(0)
    tuning.agree(0, silent)
    assert not used
    monkeypatch.setattr(tuning, "_in_use", {0: [1] * count})
    tuning.agree(0, [max(pair) for pair in zip(silent, tuning.flags(0), strict=True)])
    assert used.pop() == (0, [None] * count)


def test_records_are_for_a_device_and_what_computes_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "cache"))
    facts, asked = Facts("a GPU", "9.0", 132, "12.4"), []
    count = len(symmetric_classes())

    def child(word: str, images: dict[str, str]) -> tuple[list[float | None], str]:
        asked.append((word, dict(images)))
        return [1.0] * count, ""

    monkeypatch.setattr(tuning, "_child", child)
    monkeypatch.setattr(tuning, "_known", {})
    image = {"symmetric_mma.cu": "image"}
    assert tuning.ratios(0, facts, image) == [1.0] * count
    assert tuning.ratios(1, facts, image) == [1.0] * count
    monkeypatch.setattr(tuning, "_known", {})
    assert tuning.ratios(0, facts, image) == [1.0] * count
    assert asked == [("0", image)]
    others = [
        (facts._replace(gpu="another"), image),
        (facts._replace(sms=66), image),
        (facts, {"symmetric_mma.cu": "other"}),
        (facts, {**image, "symmetric_wgmma.cu": "image"}),
    ]
    for other, images in others:
        tuning.ratios(0, other, images)
    assert len(asked) == 5
    monkeypatch.setattr(torch, "__version__", "9.9")
    tuning.ratios(0, facts, image)
    assert len(asked) == 6
    tuning.forget(facts)
    monkeypatch.setattr(tuning, "_known", {})
    tuning.ratios(0, facts, image)
    assert len(asked) == 7


def test_wrong_word_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDION_TUNE", "2")
    with pytest.raises(ValueError, match="OXIDION_TUNE must be 0 or 1, got '2'"):
        tuning.is_on()
