"""Runs every check and race on a GPU in a quarter of an hour, in the order of value, each with a limit.

``.device/go`` starts it (docs/cuda.md). It needs the standard library alone, starts each part in a
session of its own, and rewrites ``report.json`` after each: a run that is cut loses nothing that was there.

    python3 benchmarks/device.py --run 1 --seconds 540 --pack .device --out .device/out
    python3 benchmarks/device.py --list
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import importlib.util
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
EMULATED = "emulated"
SCHEMA = 1
SECONDS = {1: 540.0, 2: 180.0}
"""Seconds of each run unless others are asked for."""
STATE = "OXIDION_DEVICE_STATE"
"""Environment variable: the folder that the second run finds what the first one left in."""
STRETCH = "OXIDION_DEVICE_STRETCH"
"""Environment variable: by what all limits are multiplied, for machines that are slower than a GPU's."""
FAILED = ("FAIL", "TIMEOUT", "CRASH")
MOST_FAILURES = 5
"""Failures among the kernels above which the races of matrices go by libtorch alone."""
BY_LIBTORCH = {"OXIDION_CUDA": "libtorch"}
PROFILED = (
    ("updates.cu AdamW", "adamw"),
    ("quantized.cu AdamW", "adamw_quantized"),
    ("symmetric_mma.cu Muon", "symmetric_mma"),
    ("symmetric_wgmma.cu products", "symmetric_wgmma"),
    ("gram.cu cholesky.cu Dion", "gram_product"),
)
"""Settings and kernels that are profiled where nothing has failed."""
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
OF_CHECKS = ("capability", "sms", "memory", "driver", "torch", "cuda", "oxidion")
"""Facts of a device that ``gpu-check`` reports, for a run whose part env has found none."""
PRODUCTS = ("symmetric_mma.cu Muon", "symmetric_wgmma.cu products")


def _runner() -> ModuleType:
    """The runner of ``gpu-check``, of this checkout: the package may not be installed yet."""
    path = ROOT / "python" / "oxidion" / "_gpu_check" / "runner.py"
    spec = importlib.util.spec_from_file_location("oxidion_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


runner = _runner()


@dataclass(frozen=True)
class Item:
    """A part of the run.

    Attributes:
        name: its name.
        how: "install", "check" (rows of ``gpu-check``), "bench" (`device_parts.py`) or "suite" (the tests).
        limit: seconds after which it is killed; 0: as many as are left.
        what: rows of ``gpu-check``.
        env: environment variables in addition to those of all parts.
    """

    name: str
    how: str
    limit: float
    what: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


ITEMS = (
    Item("install", "install", 60),
    Item("env", "bench", 45),
    Item("baseline", "bench", 60, env=BY_LIBTORCH),
    Item("load", "check", 40, "1,2"),
    Item("kernels", "check", 100, "3"),
    Item("first", "check", 115, "8"),
    Item("elementwise", "bench", 40),
    Item("products", "bench", 40),
    Item("muon", "bench", 60),
    Item("steps", "check", 70, "4"),
    Item("dion", "bench", 60),
    Item("published", "bench", 40),
    Item("graph", "check", 40, "9"),
    Item("peers", "bench", 90),
    Item("suite", "suite", 0),
)
"""Parts in the order of their value: what is cut off at the end matters least."""
PEER = "dion"
"""Folder of the pack with the source of microsoft/dion."""
LEFT = "report-1.json"
"""Name of the report of the first run, as the second one finds it."""
OF_MATRICES = ("muon", "dion")
"""Parts that go by libtorch alone after many failures."""
SMALLEST_SUITE = 25.0
"""Seconds without which the tests do not begin."""
AGAIN, MOST_AGAIN = "again: ", 8
"""Prefix of the names of parts that are run again, and their maximal number; they run before all others."""
RUN_AGAIN, TOOL = 40.0, 60.0
"""Seconds at least of a failed part that is run again, and those of a sanitizer or a profile."""
TOOLS = "/usr/local/cuda/bin"
"""Where sanitizer and profiler lie if they are not on the path."""


class Report(runner.Report):  # type: ignore[misc, name-defined]
    """The report of a run, with the races and facts in the outcomes of its parts."""

    def __init__(
        self, file: Path, facts: dict[str, Any], began: float, given: float, copy: Path | None
    ) -> None:
        """Takes the file, facts, when the run began, its seconds, and a second file for the next run."""
        super().__init__(file, facts)
        self.began, self.given, self.copy = began, given, copy
        self.by_part: dict[str, dict[str, Any]] = {}

    def take(self, name: str, outcome: Mapping[str, Any]) -> None:
        """Takes what an outcome of a part has: facts, races, and parts of its own."""
        outcome = json.loads(runner.without_folders(json.dumps(outcome)))
        self.by_part[name] = {key: outcome.get(key, []) for key in ("races", "products")}
        for key in ("device", "ceilings", "failures"):
            if outcome.get(key):
                self.facts[key] = outcome[key]
        if outcome.get("gpu") and not self.facts["device"]:
            self.facts["device"] = {"name": outcome["gpu"], **{key: outcome[key] for key in OF_CHECKS}}
        for own in outcome.get("parts", []):
            self.put(own)

    def content(self) -> dict[str, Any]:
        """Returns what is written."""
        # Where launches wait, times are not those of the device.
        found_by_part = {name: found for name, found in self.by_part.items() if not name.startswith(AGAIN)}
        lists = {
            key: [{"part": name, **race} for name, found in found_by_part.items() for race in found[key]]
            for key in ("races", "products")
        }
        seconds = {"used": round(time.monotonic() - self.began, 1), "given": self.given}
        return {**self.facts, "parts": self.records, **lists, "seconds": seconds}

    def write(self) -> None:
        """Writes both files."""
        super().write()
        if self.copy is not None:
            with suppress(OSError):
                runner.write_json(self.copy, self.content())


class Run:
    """One run.

    Attributes:
        report: its report.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        """Takes the arguments of the command line."""
        self.number, self.pack, self.out = given.run, given.pack.resolve(), given.out.resolve()
        self.stretch = float(os.environ.get(STRETCH) or 1)
        self.device, self.seconds = given.device, given.seconds or SECONDS[given.run] * self.stretch
        self.began = time.monotonic() - max(0.0, time.time() - (given.began or time.time()))
        manifest = runner.read_json(self.pack / "manifest.json")
        # What another pack has left is not taken.
        own = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:12]
        usual = Path(tempfile.gettempdir(), f"oxidion-device-{os.getuid()}-{own}")
        self.state = Path(os.environ.get(STATE) or usual)
        self.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        facts = {
            "schema": SCHEMA,
            "run": self.number,
            "commit": manifest.get("commit", ""),
            "dirty": manifest.get("dirty"),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "pack": manifest.get("files", {}),
            "device": {},
            "ceilings": {},
            "off": {},
            "ended": False,
        }
        # A plan without a run leaves nothing that a later run could continue.
        copy = self.state / LEFT if self.number == 1 and not given.plan else None
        self.report = Report(self.out / "report.json", facts, self.began, self.seconds, copy)
        self.runner = runner.Runner(
            self.report,
            until=self.began + self.seconds,
            spare=runner.SPARE * self.stretch,
            probe=runner.Part("answers", 20 * self.stretch, self._probe()),
            log=self.out / "log.txt",
            ended=self._ended,
            begun=lambda part, outcome: self.report.take(part.name, outcome),
        )
        self.folder = Path(tempfile.mkdtemp(dir=self.state))

    # What processes are given.

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """Variables of a part."""
        own = {key: value for key, value in os.environ.items() if key not in ("OUT", STATE, STRETCH)}
        paths = [str(self.state / "site"), *filter(None, [own.get("PYTHONPATH")])]
        own |= {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OXIDION_CACHE": str(self.state / "cache"),
            "OXIDION_SELF_CHECK": "0",
            **self._visible(),
        }
        if off := self.report.facts["off"]:
            own["OXIDION_GPU_CHECK_OFF"] = ",".join(off)
        return {**own, **more}

    def start(self, words: list[str], env: Mapping[str, str]) -> Any:
        """What starts a Python program with these words in the environment of a part."""
        return runner.started([sys.executable, *words], self.environment(env))

    def _probe(self) -> Any:
        place = "cpu" if self.device == EMULATED else "cuda"
        code = (
            "import json, sys, torch\n"
            f"assert float(torch.ones(1000, device='{place}').sum()) == 1000\n"
            "open(sys.argv[1], 'w').write('{\"status\": \"PASS\"}')"
        )
        return runner.started([sys.executable, "-c", code, "{outcome}"], {**os.environ, **self._visible()})

    def _visible(self) -> dict[str, str]:
        """The device is the only one that parts see, so that each takes it for the first one."""
        return {} if self.device == EMULATED else {"CUDA_VISIBLE_DEVICES": self.device}

    # Parts.

    def part(self, item: Item) -> Any:
        """The part of an item, with the time that it may take."""
        left = self.began + self.seconds - time.monotonic() - runner.SPARE * self.stretch - 1
        limit = item.limit * self.stretch or math.inf
        if self.number == 2 or not item.limit:  # the second run is short: a part gets what is left
            limit = min(limit, max(SMALLEST_SUITE * self.stretch, left))
        env = dict(item.env)
        if item.name in OF_MATRICES and len(self._failures((3,))) > MOST_FAILURES:
            env |= BY_LIBTORCH
        words = {
            "install": self._install_words,
            "check": self._check_words,
            "bench": self._bench_words,
            "suite": self._suite_words,
        }[item.how](item, limit)
        if item.how == "suite" and self.device == EMULATED:
            env["OXIDION_TEST_DEVICE"] = EMULATED
        statuses = (0, 1) if item.how == "check" else (0,)  # 1: a part has failed
        return runner.Part(item.name, limit, self.start(words, env), env=env, statuses=statuses)

    def _number(self) -> str:
        return EMULATED if self.device == EMULATED else "0"

    def _install_words(self, _item: Item, _limit: float) -> list[str]:
        return [str(HERE / "device.py"), "--pack", str(self.pack), "--install", str(self.state), "{outcome}"]

    def _check_words(self, item: Item, limit: float) -> list[str]:
        words = ["-m", "oxidion", "gpu-check", "--device", self._number(), "--rows", item.what]
        words += ["--log", str(self.out / "log.txt")]
        return [*words, "--seconds", f"{limit * 0.95:g}", "--json", "{outcome}"]

    def _bench_words(self, item: Item, limit: float) -> list[str]:
        device = EMULATED if self.device == EMULATED else "cuda"
        words = [str(HERE / "device_parts.py"), item.name, "--device", device, "--into", "{outcome}"]
        words += ["--seconds", f"{limit * 0.9:g}", "--packed", str(self.pack / "products")]
        peer = self.pack / PEER
        return [*words, "--peer-path", str(peer)] if peer.is_dir() else words

    def _suite_words(self, _item: Item, limit: float) -> list[str]:
        words = [str(HERE / "device_suite.py"), "{outcome}", f"{limit * 0.9:g}"]
        if self.device == EMULATED:
            return [*words, "tests/cuda/test_device_verify.py", "-k", "lion"]
        # A test of sanitizers takes half an hour.
        words += ["tests/cuda", "--deselect", "tests/cuda/test_sanitizer.py"]
        return [*words, "-m", "cuda", "-n", "12", "--timeout", "60"]

    def _ended(self, record: dict[str, Any], outcome: dict[str, Any]) -> None:
        self.report.take(record["name"], outcome)
        if tiers := outcome.get("tiers"):
            off = {source: why for source, why in tiers.items() if why != "kernels"}
            self.report.facts["off"] |= {k: why.partition(": ")[2] for k, why in off.items()}
        _say(record)

    def _failures(self, rows: tuple[int, ...]) -> list[dict[str, Any]]:
        return [p for p in self.report.records if p["row"] in rows and p["status"] in FAILED]

    # Runs.

    def first(self) -> None:
        """Run 1: all items in their order."""
        self._all(ITEMS)

    def _all(self, items: tuple[Item, ...]) -> None:
        self.report.plan([runner.Part(item.name, item.limit, None) for item in items])
        done = {p["name"] for p in self.report.records if not p["row"] and p["status"] != "LEFT_OUT"}
        for item in items:
            if item.name == "peers" and not (self.pack / PEER).is_dir():
                why = "microsoft/dion was not packed"
                self.report.put(runner.record(runner.Part(item.name, 0, None), {}, "LEFT_OUT", why))
            elif item.name not in done:
                self.runner.run([self.part(item)])
            # The second time its parts run one by one: it is known then which of them ends their parent.
            for more in ("resumed", "resumed again") if item.how == "check" else ():
                own = (p for p in reversed(self.report.records) if not p["row"])
                last = next(p for p in own if p["name"].partition(", ")[0] == item.name)
                if last["status"] == "CRASH":
                    self._rest(item, f"{item.name}, {more}", self.report.records, "--jobs", "1")

    def _rest(self, item: Item, name: str, records: Sequence[Mapping[str, Any]], *more: str) -> None:
        """Runs the parts of a check that have no outcome in these records."""
        known = [p for p in records if str(p["row"]) in item.what.split(",")]
        part = self.part(replace(item, name=name))
        inner = self.start([*self._check_words(item, part.limit), "--resume", *more], part.env)

        def start(outcome: Path, output: int) -> Any:
            runner.write_json(outcome, {"parts": known})
            return inner(outcome, output)

        self._once(replace(part, start=start))

    def second(self) -> None:
        """Run 2: what run 1 has found wrong, alone; else profiles. Then what it left out."""
        left = self._first_report()
        if not left:
            self.first()
            return
        whole = {p["name"]: p["status"] for p in left["parts"] if not p["row"]}
        if whole.get("install") != "PASS" or not (self.state / "site").is_dir():
            self._once(self.part(ITEMS[0]))
        self.report.facts["off"] |= left.get("off", {})
        for key in ("device", "ceilings"):
            self.report.facts[key] = left.get(key, {})
        failed = [p for p in left["parts"] if p["status"] in FAILED]
        inner = sorted((p for p in failed if p["row"]), key=lambda p: p["row"] != 3)
        benches = [p for p in failed if not p["row"] and self._item(p["name"])]
        for old in inner[:MOST_AGAIN]:
            self._once(self._again(old))
        if kernels := [p for p in inner if p["row"] == 3]:
            self._sanitize("memcheck", min(kernels, key=lambda p: p["seconds"])["name"])
        self._cut_checks(left["parts"], whole)
        if not inner and not benches:
            self._look_closely()
        both = [*left["parts"], *self.report.records]
        done = {p["name"] for p in both if not p["row"] and p["status"] != "LEFT_OUT"}
        if whole.get("suite") == "CRASH":  # it was cut
            done.discard("suite")
        self._all(tuple(item for item in ITEMS[1:] if item.name not in done))
        for old in benches:
            self._once(self._again(old))

    def _cut_checks(self, parts: Sequence[Mapping[str, Any]], whole: Mapping[str, str]) -> None:
        """Runs parts of checks that the first run has no outcome of."""
        for item in (item for item in ITEMS if item.how == "check"):
            own = [p for p in parts if str(p["row"]) in item.what.split(",")]
            is_cut = not own and whole.get(item.name) in FAILED
            if is_cut or any(p["status"] == "LEFT_OUT" for p in own):
                self._rest(item, item.name, [p for p in own if p["status"] != "LEFT_OUT"])

    def _look_closely(self) -> None:
        """Profiles kernels, and looks for races in the products."""
        for setting, kernel in PROFILED:
            self._profile(setting, kernel)
        for kind in ("racecheck", "synccheck"):
            for setting in PRODUCTS:
                self._sanitize(kind, setting)

    def _once(self, part: Any) -> None:
        """Runs a part unless an earlier process of this run has."""
        own = (p for p in self.report.records if not p["row"] and p["name"] == part.name)
        if all(p["status"] == "LEFT_OUT" for p in own):
            self.runner.run([part])

    def _first_report(self) -> dict[str, Any]:
        """The report of run 1: where it left it, or in the pack if that was on another machine."""
        for file in (self.state / LEFT, self.pack / LEFT):
            found = runner.read_json(file)
            if found and found.get("pack") == self.report.facts["pack"]:
                crashed(found["parts"])
                return dict(found)
        return {}

    @staticmethod
    def _item(name: str) -> Item | None:
        return next((item for item in ITEMS if item.name == name and item.how == "bench"), None)

    def _again(self, old: Mapping[str, Any]) -> Any:
        """A failed part by itself, with launches that wait, so that its traceback shows the kernel."""
        env = {**old["env"], "CUDA_LAUNCH_BLOCKING": "1", "OXIDION_GPU_CHECK_OFF": ""}
        name = f"{AGAIN}{old['row'] or ''} {old['name']}".replace("  ", " ")
        if not old["row"]:
            item = self._item(old["name"])
            assert item is not None
            limit = item.limit * self.stretch
            return runner.Part(name, limit, self.start(self._bench_words(item, limit), env), env=env)
        limit = max(RUN_AGAIN * self.stretch, old["limit"])
        return runner.Part(name, limit, self.start(self._one(old["row"], old["name"]), env), env=env)

    def _one(self, row: int, name: str, *more: str) -> list[str]:
        words = ["-m", "oxidion", "gpu-check", "--device", self._number(), "--part", str(row), name]
        return [*words, "--into", "{outcome}", *more]

    def _tool(self, name: str, tool: str, options: list[str], setting: str) -> None:
        """Runs a setting of the kernels' row under a tool."""
        found = shutil.which(tool) or shutil.which(tool, path=TOOLS)
        if found is None or self.device == EMULATED:
            why = "no device" if self.device == EMULATED else f"{tool} is not installed"
            self.report.put(runner.record(runner.Part(name, 0, None), {}, "LEFT_OUT", why))
            return
        words = [found, *options, sys.executable, *self._one(3, setting, "--repeats", "0")]
        # Torch's pool would hide what is written outside of a tensor.
        env = {"OXIDION_GPU_CHECK_OFF": "", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        start = runner.started(words, self.environment(env))
        self._once(runner.Part(name, TOOL * self.stretch, start, env=env))

    def _sanitize(self, kind: str, setting: str) -> None:
        options = ["--tool", kind, "--error-exitcode", "9"]
        if kind != "memcheck":  # not the library's products, which are slow under a tool
            options += ["--kernel-name", "regex=symmetric_"]
        self._tool(f"{kind}: {setting}", "compute-sanitizer", options, setting)

    def _profile(self, setting: str, kernel: str) -> None:
        """Rates of one launch of a kernel, by Nsight Compute."""
        name, file = f"profile: {setting}", self.folder / "profile.csv"
        file.unlink(missing_ok=True)
        options = ["--csv", "--log-file", str(file), "--metrics", ",".join(METRICS), "-c", "1"]
        options += ["--clock-control", "none"]
        self._tool(name, "ncu", [*options, "-k", f"regex:{kernel}"], setting)
        for record in self.report.records:
            if record["name"] == name and file.is_file():
                record["figures"] = metrics(file.read_text("utf-8", "replace"))
        self.report.write()

    def run(self) -> None:
        """Runs it and leaves the report where the second run looks for it."""
        why = "all parts have run or were left out"
        try:
            self.first() if self.number == 1 else self.second()
        except SystemExit as error:
            why = str(error)
        self.report.facts["ended"] = why
        self.report.write()
        shutil.rmtree(self.folder, ignore_errors=True)

    def resume(self) -> None:
        """Takes over what an earlier process of the same run has written before it was killed."""
        old = runner.read_json(self.out / "report.json")
        for key in ("device", "ceilings", "off", "failures"):
            if old.get(key):
                self.report.facts[key] = old[key]
        crashed(old.get("parts", []))
        for part in old.get("parts", []):
            if part["status"] != "LEFT_OUT" or part["row"]:
                self.report.put(part)
        for key in ("races", "products"):
            for race in old.get(key, []):
                of_part = self.report.by_part.setdefault(race.pop("part"), {"races": [], "products": []})
                of_part[key].append(race)


def crashed(parts: Sequence[dict[str, Any]]) -> None:
    """Notes that the item which ran when a report was cut has crashed; parts of a check run again."""
    for part in parts:
        if not part["row"] and part["status"] == "LEFT_OUT" and part["reason"] == runner.RUNNING:
            part |= {"status": "CRASH", "reason": runner.CUT}


def metrics(text: str) -> dict[str, str]:
    """Values by metric from what Nsight Compute writes as CSV."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows: Iterator[dict[str, str]] = csv.DictReader(io.StringIO("\n".join(lines[start:])))
    return {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}" for row in rows}


def other_code(pack: Path) -> list[str]:
    """Returns files of the check that the wheel of a pack has otherwise than this checkout."""
    folder = "oxidion/_gpu_check"
    wrong = []
    for wheel in pack.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for file in sorted((ROOT / "python" / folder).glob("*.py")):
                name = f"{folder}/{file.name}"
                if name not in archive.namelist() or archive.read(name) != file.read_bytes():
                    wrong.append(f"{name}, which the checkout has otherwise")
    return wrong


WARM = "import torch, torch._dynamo\nif torch.cuda.is_available():\n torch.ones(64, device='cuda').sum()"


def install(pack: Path, state: Path, outcome: Path) -> None:
    """Installs the wheel of a pack and unpacks its machine code into the folder of the run."""
    manifest = runner.read_json(pack / "manifest.json")
    wrong = [
        name
        for name, digest in manifest.get("files", {}).items()
        if not (pack / name).is_file() or hashlib.sha256((pack / name).read_bytes()).hexdigest() != digest
    ]
    wrong += other_code(pack)
    if wrong or not manifest:
        why = f"not as they were packed: {', '.join(wrong)}" if wrong else "there is no manifest"
        runner.write_json(outcome, {"status": "FAIL", "figures": {}, "reason": why})
        return
    shutil.rmtree(state / "cache", ignore_errors=True)
    shutil.copytree(pack / "cache", state / "cache", copy_function=shutil.copyfile)
    (state / "cache").chmod(0o700)
    (wheel,) = pack.glob("*.whl")
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
    words += ["--disable-pip-version-check", "--no-cache-dir", "--upgrade", "--target", str(state / "site")]
    # Meanwhile torch comes from the disk, once for all parts.
    warm = subprocess.Popen([sys.executable, "-c", WARM], stderr=subprocess.DEVNULL)
    began, site = time.monotonic(), state / "site"
    code = os.spawnv(os.P_WAIT, sys.executable, [*words, str(wheel)])
    if code:  # there may be no pip; what the wheel needs is there anyway
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    figures = {"seconds": round(time.monotonic() - began, 1), "wheel": wheel.name, "pip": code}
    runner.write_json(outcome, {"figures": figures})
    with suppress(subprocess.TimeoutExpired):
        warm.wait(30)
    figures["torch_s"] = round(time.monotonic() - began, 1)
    runner.write_json(outcome, {"status": "PASS", "figures": figures})


def _say(record: Mapping[str, Any]) -> None:
    figures = ", ".join(
        f"{key} {value}" for key, value in record["figures"].items() if isinstance(value, (int, float, str))
    )
    detail = record["reason"] or figures
    sys.stdout.write(f"{record['status']:8} {record['seconds']:6.1f} s  {record['name']:14} {detail[:200]}\n")
    sys.stdout.flush()


def _ended_by(number: int, _frame: object) -> None:
    raise SystemExit(f"ended by {signal.Signals(number).name}")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seconds", type=float, help="after which nothing runs any more")
    parser.add_argument("--began", type=float, help="when the command began, in seconds since 1970")
    parser.add_argument("--pack", type=Path, default=Path(".device"))
    parser.add_argument("--out", type=Path, default=Path(".device", "out"))
    parser.add_argument("--device", default=os.environ.get("OXIDION_DEVICE", "0"))
    parser.add_argument("--resume", action="store_true", help="go on with the report that is there")
    parser.add_argument("--list", action="store_true", help="print the parts and their limits")
    parser.add_argument("--plan", action="store_true", help="write the report of a run that has not begun")
    parser.add_argument("--install", nargs=2, type=Path, metavar=("STATE", "OUTCOME"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.list:
        for item in ITEMS:
            limit = f"{item.limit:g} s" if item.limit else "the rest"
            sys.stdout.write(f"{item.name:12} {item.how:8} {limit:10} {item.what}\n")
        return
    if given.install:
        install(given.pack, *given.install)
        return
    signal.signal(signal.SIGTERM, _ended_by)
    run = Run(given)
    if given.plan:
        run.report.plan([runner.Part(item.name, item.limit, None) for item in ITEMS])
        run.report.write()
        return
    if given.resume:
        run.resume()
    run.run()
    sys.stdout.write(json.dumps({"report": str(run.report.file)}) + "\n")


if __name__ == "__main__":
    main()
