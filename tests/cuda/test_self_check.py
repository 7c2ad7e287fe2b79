"""Sources of kernels are checked on first use, in a child: a faulty one is off, and its verdict is kept."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from oxidion import _oxidion
from oxidion._cuda import child as processes
from oxidion._cuda import device, proof, self_check
from oxidion._cuda.self_check import SOURCES, Verdict
from oxidion._dist import agree
from oxidion._gpu_check import parts, place
from oxidion._gpu_check import sources as child

from .compile import ARCHITECTURES
from .driver import Environment, needs_nvrtc, run
from .emulator.library import KERNELS, Emulated

ROOT = Path(__file__).resolve().parents[2]

# Few settings, which are small: the emulator is slow. Of factors.cu alone the faults are.
FEW = """
import os
if os.environ.get("OXIDION_SELF_CHECK") == "child":
    import oxidion._gpu_check.parts as parts
    few = ("updates.cu Lion", "sums.cu totals.cu factors.cu Lamb")
    parts.KERNELS = {
        name: parts.Setting(name.split()[-1], {}, shapes=((20, 12), (17,))) for name in few
    }
"""
STEP = """
import ctypes, json, logging, os, sys, warnings
os.environ.update(VARIABLES)
import torch, oxidion
from oxidion import _oxidion
from oxidion._cuda import child as processes
from oxidion._cuda import device, self_check
logged = []
class Collect(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("oxidion.cuda").addHandler(Collect())
BEFORE
device.prepare(emulated=True)
torch.set_num_threads(1)
torch.manual_seed(0)
param = torch.nn.Parameter(torch.randn(20, 12))
optimizer = oxidion.Lamb([param], lr=0.1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        param.grad = torch.randn(20, 12)
        optimizer.step()
print(json.dumps(dict(
    states=self_check.states(torch.device("cpu")),
    warned=[str(w.message) for w in caught],
    logged=logged,
    param=param.detach().double().flatten().tolist(),
    explained=optimizer.explain().kernels,
    printed=str(optimizer.explain()),
    env=oxidion.env_report(),
)))
"""
FAULTY = ("factors.cu", "return what.lr * what.rate.value() * ratio;")
PLANTED = {
    "wrong": "return 1.01 * what.lr * what.rate.value() * ratio;",
    "crash": "__builtin_trap();\n" + FAULTY[1],
    "hang": "for (volatile int i = 0; !i;) {}\n" + FAULTY[1],
}
SAID = {
    "wrong": "Lamb: updates differ by ",
    "crash": "the process that ran it ended with -",
    "hang": "it gave no answer within 8 s, nor in an earlier process",
}


class Emulation:
    """Steps of processes that check their kernels, and keep what they find in a folder of their own."""

    def __init__(self, environment: Environment, folder: Path) -> None:
        self._forks = environment.forks
        self.cache = folder / "cache"
        shutil.copytree(environment["OXIDION_CACHE"], self.cache)
        (folder / "sitecustomize.py").write_text(FEW)
        self.libraries = environment["OXIDION_EMULATED_KERNELS"].split(":")
        self.variables = {
            "OXIDION_CUDA": "auto",
            "OXIDION_SELF_CHECK": "1",
            "OXIDION_SELF_CHECK_SECONDS": "60",
            "OXIDION_CACHE": str(self.cache),
            "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]),
        }
        self.path = str(folder)

    def step(self, *, before: str = "", **variables: str) -> dict[str, Any]:
        """What steps of LAMB say and find."""
        libraries = {"OXIDION_EMULATED_KERNELS": ":".join(self.libraries)}
        chosen = {**self.variables, **libraries, **variables}
        # The child has the parent's path, which is where it finds what is planted in it.
        before = f"sys.path.insert(0, {self.path!r})\n{textwrap.dedent(before)}"
        code = STEP.replace("VARIABLES", repr(chosen)).replace("BEFORE", before)
        (ended,) = self._forks.run(code)
        outcome, said, complaints = ended.returncode, ended.stdout, ended.stderr
        assert outcome == 0, complaints[-3000:]
        found: dict[str, Any] = json.loads(said.strip().splitlines()[-1])
        return found

    def without(self, source: str) -> None:
        """Takes away the kernels of a source."""
        self.libraries = [path for path in self.libraries if Path(path).parent.name != source]

    def records(self) -> dict[str, dict[str, Any]]:
        """What is kept, by source."""
        rows = [json.loads(file.read_text()) for file in sorted(self.cache.glob("check-*.json"))]
        return {row["source"]: row for row in rows}


@pytest.fixture
def emulation(environment: Environment, tmp_path: Path) -> Emulation:
    return Emulation(environment, tmp_path)


LAMB = {"updates.cu", "sums.cu", "totals.cu", "factors.cu"}


@needs_nvrtc
def test_sources_are_checked_once_and_their_verdicts_kept(
    emulation: Emulation, environment: Environment
) -> None:
    first = emulation.step()
    assert first["states"] == dict.fromkeys(LAMB, "kernels")
    assert first["explained"] == first["states"]
    assert "sources: " in first["printed"]
    assert first["warned"] == []
    assert sum("checking 4 CUDA sources" in text for text in first["logged"]) == 1
    kept = emulation.records()
    assert kept.keys() == LAMB
    assert {row["result"] for row in kept.values()} == {"pass"}
    assert all(0 <= row["error"] <= 1e-5 and row["seconds"] > 0 for row in kept.values())
    assert {row["sms"] for row in kept.values()} == {4}
    assert "updates.cu kernels, on oxidion emulator, driver 13.0" in first["env"]
    # Other processes read them.
    second = emulation.step()
    assert not any("checking" in text for text in second["logged"])
    assert second["param"] == first["param"]
    # A file that is damaged does not count.
    (damaged,) = emulation.cache.glob("check-factors-*.json")
    damaged.write_text(damaged.read_text()[:50])
    again = emulation.step()
    assert sum("checking 1 CUDA sources" in text for text in again["logged"]) == 1
    assert emulation.records()["factors.cu"]["result"] == "pass"
    # A verdict is valid until a user requests another check.
    (kept,) = emulation.cache.glob("check-factors-*.json")
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "result": "fail", "reason": "planted"}))
    report = emulation.step()
    assert report["states"]["factors.cu"].startswith("libtorch (planted (found before")
    done = subprocess.run(
        [sys.executable, "-m", "oxidion", "gpu-check", "--device", "emulated", "--recheck"],
        env={**environment, **emulation.variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" kernels  off=") == len(SOURCES)
    assert emulation.records().keys() == set(SOURCES)
    assert emulation.step()["states"]["factors.cu"] == "kernels"


@needs_nvrtc
@pytest.mark.parametrize("planted", sorted(PLANTED))
def test_faulty_source_is_off_and_is_not_tried_again(
    emulation: Emulation, tmp_path: Path, planted: str
) -> None:
    emulation.without("factors.cu")
    edit = ("factors.cu", FAULTY[1], PLANTED[planted])
    emulation.libraries.append(str(Emulated("factors.cu", tmp_path / "factors.cu", [edit]).path))
    variables = {"OXIDION_SELF_CHECK_SECONDS": "8"} if planted == "hang" else {}
    if planted == "hang":  # a first time-out may be due to other work: the next process checks again
        once = emulation.step(**variables)
        (warning,) = once["warned"]
        assert "it gave no answer within 8 s; the next process checks it once more. libtorch" in warning
        assert once["states"]["factors.cu"].startswith("libtorch (")
        assert emulation.records()["factors.cu"]["result"] == "timeout"
        assert "factors.cu libtorch (it gave no answer within 8 s" in once["env"]
    found = [emulation.step(**variables) for _ in range(2)]
    for report in found:
        assert report["states"].pop("factors.cu").startswith("libtorch (")
        assert set(report["states"].values()) == {"kernels"}
        (warning,) = report["warned"]
        words = (
            "factors.cu",
            "oxidion emulator",
            "driver 13.0",
            SAID[planted],
            "libtorch computes",
            "gpu-check",
        )
        assert all(word in warning for word in words), warning
    assert sum("checking" in text for text in found[0]["logged"]) == 1
    assert not any("checking" in text for text in found[1]["logged"])
    assert "found before, and kept in" in found[1]["warned"][0]
    assert found[0]["param"] == found[1]["param"]
    kept = emulation.records()
    assert {name for name, row in kept.items() if row["result"] == "fail"} == {"factors.cu"}
    assert kept.keys() == LAMB
    assert "factors.cu libtorch (" in found[1]["env"]


@needs_nvrtc
def test_kernels_are_used_without_a_check_or_where_none_can_be(emulation: Emulation) -> None:
    for variables in ({"OXIDION_SELF_CHECK": "0"}, {"OXIDION_CUDA": "kernels"}):
        report = emulation.step(**variables)
        assert report["states"]["factors.cu"] == "kernels"
        assert report["warned"] == report["logged"] == []
    report = emulation.step(before="sys.executable = ''")
    assert report["states"] == dict.fromkeys(LAMB, "kernels")
    assert report["warned"] == []
    (unchecked,) = [text for text in report["logged"] if "without a check" in text]
    assert "there is no sys.executable" in unchecked
    assert all(name in unchecked for name in LAMB)
    assert emulation.records() == {}
    # A kernel that is not there needs no check.
    emulation.without("factors.cu")
    report = emulation.step(before="sys.executable = ''")
    assert "NOT_FOUND" in report["states"]["factors.cu"]
    assert report["states"]["sums.cu"] == "kernels"


def test_products_by_warpgroups_are_not_used_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    turned: list[tuple[str, str, int]] = []
    monkeypatch.setattr(self_check, "turn_source_off", lambda *report: turned.append(report))
    monkeypatch.setattr(self_check, "_applied", set())
    facts = self_check.Facts("a GPU", "9.0", 132, "12.4")
    unknown = Verdict("unknown", "no child")
    with pytest.warns(
        UserWarning, match=r"symmetric_wgmma.cu is not used on a GPU .* symmetric_mma.cu computes"
    ):
        self_check._apply_verdicts(0, facts, {"symmetric_wgmma.cu": unknown, "updates.cu": unknown})
    assert turned == [("symmetric_wgmma.cu", "no child", 0)]


def test_warpgroup_products_wait_for_a_report_that_proves_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["symmetric_mma.cu", "updates.cu"]
    monkeypatch.delenv("OXIDION_SYMMETRIC", raising=False)
    monkeypatch.setattr(self_check, "PROVEN", frozenset())
    assert self_check.asked_for(names, "9.0") == names
    monkeypatch.setattr(self_check, "PROVEN", frozenset({"9.0"}))
    assert self_check.asked_for(names, "9.0") == [*names, "symmetric_wgmma.cu"]
    assert self_check.asked_for(names, "10.0") == names
    monkeypatch.setenv("OXIDION_SYMMETRIC", "wgmma")
    assert self_check.asked_for(names, "10.0") == [*names, "symmetric_wgmma.cu"]
    assert self_check.asked_for(["updates.cu"], "9.0") == ["updates.cu"]
    monkeypatch.setenv("OXIDION_SYMMETRIC", "cublas")
    with pytest.raises(ValueError, match="OXIDION_SYMMETRIC must be auto or wgmma, got 'cublas'"):
        self_check.asked_for(names, "9.0")


def test_default_follows_from_the_reports_of_devices() -> None:
    files = sorted((ROOT / "docs" / "gpu-reports").glob("*.json"))
    reports = [json.loads(file.read_text("utf-8")) for file in files]
    assert {proof.capability(report) for report in reports if proof.proven(report)} == self_check.PROVEN


def part(row: int, name: str, status: str = "PASS") -> dict[str, Any]:
    return {"row": row, "name": name, "status": status}


BY_GROUPS = [name for name in parts.KERNELS if self_check.GROUPS[0] in name.split()]
ALL_PASS = [
    *(part(1, "env"), part(2, "load"), part(6, "Muon", "SLOW")),
    *(part(3, name) for name in parts.KERNELS),
    *(part(4, name) for name in parts.CLASSES),
]


def test_report_in_which_all_parts_pass_is_a_proof() -> None:
    assert self_check.GROUPS[0] == proof.BY_GROUPS
    assert len(BY_GROUPS) == 3
    assert proof.proven({"capability": "9.0", "parts": ALL_PASS})
    assert proof.proven({"device": {"capability": "9.0"}, "parts": ALL_PASS})
    # It is enough that a part of another source was left out on purpose.
    assert proof.proven({"parts": [*ALL_PASS, part(3, "other.cu Muon", "SKIP")]})


@pytest.mark.parametrize("row", proof.ROWS)
def test_report_without_a_row_is_no_proof(row: int) -> None:
    assert not proof.proven({"parts": [found for found in ALL_PASS if found["row"] != row]})
    skipped = [{**found, "status": "SKIP"} if found["row"] == row else found for found in ALL_PASS]
    assert not proof.proven({"parts": skipped})


@pytest.mark.parametrize("name", BY_GROUPS)
@pytest.mark.parametrize("status", ["FAIL", "SLOW", "SKIP", "TIMEOUT", "CRASH", "LEFT_OUT"])
def test_report_with_a_bad_part_of_warpgroups_is_no_proof(name: str, status: str) -> None:
    found = [{**each, "status": status} if each["name"] == name else each for each in ALL_PASS]
    assert not proof.proven({"parts": found})


@pytest.mark.parametrize("status", ["FAIL", "SLOW", "TIMEOUT", "CRASH", "LEFT_OUT"])
def test_report_with_a_bad_part_of_a_class_is_no_proof(status: str) -> None:
    assert not proof.proven({"parts": [*ALL_PASS, part(4, "Lion", status)]})


def test_report_without_parts_of_warpgroups_is_no_proof() -> None:
    assert not proof.proven({"parts": [found for found in ALL_PASS if found["name"] not in BY_GROUPS]})
    assert not proof.proven({"parts": []})
    assert not proof.proven({})


def test_capability_is_read_from_reports_of_both_kinds() -> None:
    assert proof.capability({"capability": "9.0"}) == "9.0"
    assert proof.capability({"device": {"capability": "8.0"}}) == "8.0"
    assert proof.capability({"capability": ""}) == proof.capability({}) == ""


def test_verdicts_hold_for_what_they_depend_on() -> None:
    facts = self_check.Facts("a GPU", "9.0", 132, "12.4")
    key = self_check.key_of(facts, "updates.cu", "image")
    others = [
        *(facts._replace(**{field: "x"}) for field in facts._fields),
    ]
    assert key not in {self_check.key_of(other, "updates.cu", "image") for other in others}
    assert key != self_check.key_of(facts, "sums.cu", "image")
    assert key != self_check.key_of(facts, "updates.cu", "another")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("OXIDION_SELF_CHECK", "no", "OXIDION_SELF_CHECK must be 0 or 1, got 'no'"),
        ("OXIDION_SELF_CHECK_SECONDS", "0", "must be a positive number of seconds, got '0'"),
        ("OXIDION_SELF_CHECK_SECONDS", "soon", "must be a positive number of seconds, got 'soon'"),
    ],
)
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str) -> None:
    monkeypatch.setenv(name, value)

    def read() -> None:
        self_check.is_on()
        self_check.seconds_of_a_source()

    with pytest.raises(ValueError, match=words):
        read()


def test_every_source_has_a_setting_that_it_is_checked_by() -> None:
    assert set(SOURCES) == set(ARCHITECTURES)
    assert {name for name in SOURCES if not child.settings_of(name)} == set()


class Talker(self_check.Child):
    """A child that says what a test has it say."""

    @staticmethod
    def of(monkeypatch: pytest.MonkeyPatch, code: str) -> self_check.Child:
        monkeypatch.setattr(processes, "CODE", "import sys, time, os, signal\n" + textwrap.dedent(code))
        made = self_check.Child.started("0", ["a.cu", "b.cu"], [])
        assert isinstance(made, self_check.Child)
        return made


SAY = """
def say(text):
    print("oxidion-self-check " + text, flush=True)
verdict = '{"source": "a.cu", "result": "pass", "reason": "", "error": 0.0, "seconds": 1.0}'
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("sys.exit(3)", {"a.cu": "unknown", "b.cu": "unknown"}),
        ("print('noise')", {"a.cu": "unknown", "b.cu": "unknown"}),
        ('say(\'{"ready": true}\'); say(\'{"begin": "a.cu"}\'); os.abort()', {"a.cu": "fail"}),
        (
            'say(\'{"begin": "a.cu"}\'); os.kill(os.getpid(), signal.SIGKILL)',
            {"a.cu": "unknown"},
        ),
        ('say(\'{"begin": "a.cu"}\'); time.sleep(60)', {"a.cu": "timeout"}),
        (
            'say(\'{"begin": "a.cu"}\'); say(verdict); say(\'{"begin": "b.cu"}\'); time.sleep(60)',
            {"a.cu": "pass", "b.cu": "timeout"},
        ),
        (  # what comes before the first source takes none of its time
            'time.sleep(2.5); say(\'{"ready": true}\'); say(\'{"begin": "a.cu"}\'); say(verdict)',
            {"a.cu": "pass"},
        ),
        ('say(\'{"begin": "a.cu"}\'); say(verdict); sys.exit(1)', {"a.cu": "pass"}),
    ],
)
def test_child_that_ends_or_hangs_says_which_source_it_was_at(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: dict[str, str]
) -> None:
    monkeypatch.setenv("OXIDION_SELF_CHECK_SECONDS", "0.6")
    made = Talker.of(monkeypatch, SAY + code)
    found = made.verdicts(["a.cu", "b.cu"], 0.0)
    assert {name: verdict.result for name, verdict in found.items()} == expected


def test_child_that_does_not_begin_is_given_time_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "STARTING", 0.5)
    found = Talker.of(monkeypatch, "time.sleep(60)").verdicts(["a.cu"], 0.0)
    assert found["a.cu"].result == "unknown"
    assert "did not begin: it gave no answer within 0.5 s" in found["a.cu"].reason


def test_libraries_are_loaded_before_the_time_of_a_source_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(child, "place", lambda _: torch.device("cpu"))
    monkeypatch.setattr(child, "warm_up", lambda _: done.append("warm-up"))
    monkeypatch.setattr(child, "checked", lambda name, _: done.append(name) or Verdict("pass"))
    monkeypatch.setattr(child, "say", lambda **report: done.append(next(iter(report))))
    for name in ("load_sources", "hide_sources", "turn_source_off"):
        monkeypatch.setattr(child, name, lambda *_: None)
    monkeypatch.setattr(child.signal, "alarm", lambda _: None)
    child.run("0", ["sums.cu"], [])
    assert done == ["warm-up", "ready", "begin", "sums.cu", "source"]


class Calls(TorchDispatchMode):
    """Notes the operations of torch that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, torch.dtype]] = set()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes one and does it."""
        if args and isinstance(args[0], torch.Tensor):
            self.found.add((func._schema.name.removeprefix("aten::").strip("_"), args[0].dtype))
        return func(*args, **(kwargs or {}))


def test_warm_up_calls_each_library_function_of_the_core() -> None:
    """In every type that steps have it in; a new decomposition of the core has to be added there."""
    with Calls() as calls:
        child.warm_up(torch.device("cpu"))
    products = re.compile(r"\bf_((?:badd|add)?b?mm)_?(?:out)?\(")
    others = re.compile(r"\bf_(linalg_\w+|svd)\(")
    names: tuple[set[str], set[str]] = (set(), set())
    for file in (ROOT / "src").rglob("*.rs"):
        for pattern, own in zip((products, others), names, strict=True):
            own.update(pattern.findall(file.read_text("utf-8")))
    multiplied, decomposed = names
    assert multiplied == {"mm", "bmm", "addmm", "baddbmm"}
    wide = (torch.float32, torch.float64)
    for name in multiplied:
        assert {dtype for own, dtype in calls.found if own == name} >= {torch.bfloat16, *wide}, name
    assert len(decomposed) >= 5
    for name in decomposed:
        own_name = "linalg_svd" if name == "svd" else name
        assert {(own_name, dtype) for dtype in wide} <= calls.found, name


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Verdict, int]]:
    """A process that judges one source, whose check has a given result; and how often it checked."""
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "cache"))
    facts = self_check.Facts("a GPU", "9.0", 132, "12.4")

    def process(result: str, meanwhile: Callable[[], object] | None = None) -> tuple[Verdict, int]:
        checked: list[str] = []

        def compared(word: str, names: list[str], proven: list[str]) -> dict[str, Verdict]:
            checked.extend(names)
            return dict.fromkeys(names, Verdict(result, "" if result == "pass" else "it was wrong"))

        monkeypatch.setattr(self_check, "_known", {})
        monkeypatch.setattr(self_check, "compared", compared)
        if meanwhile is not None:
            monkeypatch.setattr(self_check, "turn", lambda _: after(meanwhile))
        for _ in range(2):  # a second device of the same kind is not checked
            found = self_check.judged(0, facts, {"sums.cu": "image"})
        return found["sums.cu"], len(checked)

    @contextmanager
    def after(work: Callable[[], object]) -> Iterator[bool]:
        known, own = self_check._known, self_check.compared
        work()
        self_check._known, self_check.compared = known, own
        yield True

    return process


def test_second_timeout_is_kept_as_a_failure(judge: Callable[..., tuple[Verdict, int]]) -> None:
    found, checks = judge("timeout")
    assert (found.result, checks) == ("timeout", 1)
    assert found.reason == "it was wrong; the next process checks it once more"
    found, checks = judge("timeout")
    assert (found.result, checks) == ("fail", 1)
    assert found.reason == "it was wrong, nor in an earlier process"
    found, checks = judge("pass")
    assert (found.result, checks) == ("fail", 0)


def test_source_passes_after_one_timeout(judge: Callable[..., tuple[Verdict, int]]) -> None:
    assert judge("timeout")[0].result == "timeout"
    assert judge("pass") == (Verdict("pass"), 1)
    assert judge("fail") == (Verdict("pass"), 0)


@pytest.mark.parametrize(("result", "checks"), [("fail", 0), ("pass", 0), ("late", 1), ("unknown", 1)])
def test_other_results_are_kept_at_once_or_never(
    judge: Callable[..., tuple[Verdict, int]], result: str, checks: int
) -> None:
    assert judge(result)[0].result == result
    assert judge("pass")[1] == checks


def test_timeout_of_a_process_that_was_waited_for_counts_once(
    judge: Callable[..., tuple[Verdict, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one machine do not make a failure of the same busy minute."""
    turn = self_check.turn

    def other() -> None:
        monkeypatch.setattr(self_check, "turn", turn)
        assert judge("timeout")[0].result == "timeout"

    found, checks = judge("timeout", meanwhile=other)
    assert (found.result, checks) == ("timeout", 0)
    assert judge("pass") == (Verdict("pass"), 1)


def test_sources_for_which_no_time_is_left_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OXIDION_SELF_CHECK_SECONDS", "0.6")
    made = Talker.of(monkeypatch, SAY + 'say(\'{"begin": "a.cu"}\'); time.sleep(60)')
    found = made.verdicts(["a.cu", "b.cu"], 1.5)  # of 1.8 seconds in all
    assert {verdict.result for verdict in found.values()} == {"late"}


def test_ranks_have_off_what_any_of_them_has(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device("cuda", 0)
    states = dict.fromkeys(SOURCES, "loaded")
    monkeypatch.delenv("OXIDION_CUDA", raising=False)
    monkeypatch.setattr(self_check, "source_states", lambda _: [(n, s, None) for n, s in states.items()])
    turned: list[str] = []
    monkeypatch.setattr(self_check, "turn_source_off", lambda name, *_: turned.append(name))
    count = len(SOURCES) + 2  # what is timed stands behind
    assert self_check.flags(where)[:count] == [0] * len(SOURCES) + [0, 1]
    states["select.cu"], states["rows.cu"] = "off", "not loaded"
    own = self_check.flags(where)
    assert [name for name, off in zip(SOURCES, own, strict=False) if off] == ["select.cu"]
    # A rank that has not been asked for products by warpgroups does not compute them.
    states["symmetric_wgmma.cu"] = "not loaded"
    assert self_check.flags(where)[SOURCES.index("symmetric_wgmma.cu")] == 1
    states["symmetric_wgmma.cu"] = "loaded"
    other = [int(name == "updates.cu") for name in SOURCES] + [0, 1]
    both = [*(max(pair) for pair in zip(own, other, strict=False)), *own[count:]]
    assert self_check.turn_off(where, both) == ""
    assert turned == ["updates.cu"]
    mixed = [*both[: count - 2], 1, 1, *both[count:]]
    assert "OXIDION_CUDA=kernels is set on some ranks only" in self_check.turn_off(where, mixed)
    monkeypatch.setenv("OXIDION_CUDA", "libtorch")
    assert self_check.flags(where)[:count] == [1] * len(SOURCES) + [0, 1]

    def refused(_: int) -> list[Any]:
        raise RuntimeError("no driver")

    monkeypatch.delenv("OXIDION_CUDA")
    monkeypatch.setattr(self_check, "source_states", refused)
    assert self_check.flags(where)[:count] == [1] * len(SOURCES) + [0, 1]


def test_union_reaches_every_rank_of_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on a mesh of two by two, one with a source off; each reduces over its two axes."""
    values = {rank: [int(rank == 3)] for rank in range(4)}
    axes = {rank: [(2 * (rank // 2), 2 * (rank // 2) + 1), (rank % 2, rank % 2 + 2)] for rank in range(4)}
    # Ranks one after the other, until nothing changes: each receives what the others had.
    received: dict[int, list[int]] = {}

    def largest_of(numbers: list[int], group: Any) -> list[int]:
        return [max(numbers[0], *(received[member][0] for member in group))]

    monkeypatch.setattr(agree, "largest_of", largest_of)
    for _ in range(2):
        received.update(values)
        for rank in range(4):
            groups = {ranks: ranks for ranks in axes[rank]}
            values[rank] = agree.union(values[rank], groups, axes[rank])  # type: ignore[arg-type]
    assert values == {rank: [1] for rank in range(4)}


RANKS = """
import os, sys, json, warnings, logging
import torch, oxidion
from oxidion import _oxidion
from oxidion._cuda import child as processes
from oxidion._cuda import device, self_check
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
rank, store = int(sys.argv[1]), sys.argv[2]
device.prepare(emulated=True)
torch.set_num_threads(1)
dist = torch.distributed
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
if rank:
    _oxidion.turn_source_off("updates.cu", "planted", 0)
torch.manual_seed(0)
param = torch.nn.Parameter(torch.randn(40, 24))
optimizer = oxidion.Dion([param], lr=0.1, replicate_mesh=dist.group.WORLD, rank_fraction=0.5)
for step in range(3):
    torch.manual_seed(1 + step + 10 * rank)
    param.grad = torch.randn(40, 24)
    optimizer.step()
print(json.dumps([self_check.states(torch.device("cpu")), param.detach().flatten().tolist()]))
dist.destroy_process_group()
"""


@needs_nvrtc
def test_ranks_compute_alike_where_one_has_a_source_off(environment: Environment, tmp_path: Path) -> None:
    made = {**environment, "OXIDION_CUDA": "auto"}
    command = [sys.executable, "-c", RANKS]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            env=made,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = []
    for process in ranks:
        said, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints[-3000:]
        found.append(said)
    (states, param), (others, copy) = (json.loads(said.strip().splitlines()[-1]) for said in found)
    assert states["updates.cu"] == "libtorch (another rank has it off)"
    assert others["updates.cu"] == "libtorch (planted)"
    assert {name for name, word in states.items() if word != "kernels"} == {"updates.cu"}
    assert param == copy
    assert found[0].count("updates.cu: not used on this rank, since another one has it off") == 1


CLASSES: dict[str, list[dict[str, Any]]] = {
    "AdamW": [{"amsgrad": True}],
    "Lion": [{}],
    "AdEMAMix": [{}],
    "Lamb": [{}, {"max_grad_norm": 1.0}],
    "Adafactor": [{"relative_step": False}, {"relative_step": False, "beta1": 0.9}],
    "CAME": [{}],
    "Muon": [{}, {"orth_dtype": "float32"}, {"orth_method": "svd"}],
    "NorMuon": [{}],
    "Dion": [{"rank_fraction": 0.25}, {"qr_method": "qr"}],
    "Dion2": [{}],
    "NorDion2": [{}],
    "GaLoreAdamW": [{"rank": 4, "update_proj_gap": 2}, {"rank": 4, "proj_type": "left"}],
    "APOLLOAdamW": [{"rank": 4, "update_proj_gap": 2}],
    "APOLLOMini": [{}],
    "SOAP": [{}],
    "SOAPMuon": [{}],
}


NEVER = {
    "release": "Dion2 chooses slices by kernels of their own",
    "lamb_norms_quantized_": "where anything is quantized, sums alone are made",
    "lamb_along_quantized_": "by a gradient norm of parameters that are cut",
    "momentum_alone_quantized_": "Dion2 keeps a quantized momentum in a buffer first",
    "decay_quantized_": "what is rounded at random is decayed and stepped in one pass",
    "release_quantized_": "as without quantization",
}
"""Declared kernels, and quantized forms of them, that no step of one device launches, and why."""


@needs_nvrtc
def test_every_declared_kernel_is_compared(environment: Environment) -> None:
    """What no setting launches would be used without a check."""
    said = run(
        environment,
        """
        from dataclasses import replace
        from oxidion._gpu_check import parts
        from oxidion._gpu_check.place import place
        from oxidion._oxidion import device_kernels
        place("emulated")
        for name, setting in parts.KERNELS.items():
            if setting is not parts.EXCHANGE and "symmetric" not in name:
                vectors = [(5000,)] * (len(setting.shapes[-1]) == 1)
                parts.moved(replace(setting, shapes=(*parts.SMALL, *vectors)), torch.device("cpu"), "kernels")
        names = [k["name"] for k in device_kernels()]
        names += [k["name"] + "_quantized_" for k in device_kernels() if k["encoded"]]
        launched = lambda name: driver.emulator_launches_of(name.encode())
        def own(name):
            # Launches of kernels whose names are longer do not count.
            longer = [other for other in names if other != name and other.startswith(name)]
            inner = [other for other in longer if not any(o != other and other.startswith(o) for o in longer)]
            return launched(name) - sum(map(launched, inner))
        print("MISSING", [name for name in names if not own(name)])
        """,
    )
    missing = json.loads(said.split("MISSING ")[1].replace("'", '"'))
    assert set(missing) <= NEVER.keys()


@needs_nvrtc
@pytest.mark.parametrize("name", CLASSES)
def test_plan_names_all_sources_that_its_steps_need(environment: Environment, name: str) -> None:
    """One that it does not name would be loaded unchecked: it is off, and that is said."""
    code = """
import os, sys, logging
os.environ.update(OXIDION_CUDA="auto", OXIDION_SELF_CHECK="1")
sys.executable = ""
import torch, oxidion
from oxidion._cuda import device
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
device.prepare(emulated=True)
torch.set_num_threads(1)
rounded, quantized = dict(stochastic_rounding=True), dict(state_bits=8)
kinds = (dict(), torch.float32), (rounded, torch.bfloat16), (quantized, torch.float32)
for keys in KEYS:
    for more, dtype in kinds:
        if NAME == "Dion" and more.get("state_bits"):
            continue
        shapes = (20, 12), (12, 20)
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        optimizer = getattr(oxidion, NAME)(params, **{"lr": 0.01, **keys, **more})
        for step in range(3):
            for p in params:
                p.grad = torch.randn(p.shape).to(dtype)
            optimizer.step()
"""
    (ended,) = environment.forks.run(code.replace("KEYS", repr(CLASSES[name])).replace("NAME", repr(name)))
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "used on oxidion emulator without a check" in ended.stdout
    assert "has not been checked" not in ended.stdout


@needs_nvrtc
@pytest.mark.slow
def test_checks_launch_kernels_of_every_source_and_pass(environment: Environment) -> None:
    said = run(
        {**environment, "OXIDION_CUDA": "auto", "OXIDION_SELF_CHECK": "child"},
        f"KERNELS = { {name: list(kernels) for name, kernels in KERNELS.items()} }\n",
        """
        from oxidion import _oxidion
        from oxidion._cuda.self_check import SOURCES
        from oxidion._gpu_check import sources
        _oxidion.load_sources(0, 0, SOURCES)
        def launched(name):
            return sum(driver.emulator_launches_of(kernel.encode()) for kernel in KERNELS[name])

        for name in SOURCES:
            shown = (name, *sources.WITH.get(name, ()))
            _oxidion.hide_sources(0, [other for other in SOURCES if other not in shown])
            before = launched(name)
            verdict = sources.checked(name, torch.device("cpu"))
            assert verdict.result == "pass", (name, verdict)
            assert launched(name) > before, name
        print("all")
        """,
    )
    assert said.strip().splitlines()[-1] == "all"


def test_names_of_sources_are_those_of_the_core() -> None:
    assert _oxidion.source_of_kernel("lamb_factors") in SOURCES
    assert self_check.GROUPS[0] == device.FOR_ONE_ARCHITECTURE
    assert place.EMULATED == device.EMULATED
