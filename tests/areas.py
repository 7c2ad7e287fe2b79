"""Which tests `make test` runs, and which wait until a source that they depend on has changed.

``areas.toml`` lists the areas: the tests of each and the sources that these depend on. A test of no area is
part of ``make test``. ``areas.lock`` has a digest of sources and tests for each part of an area at its last
green run. A part is the tests of an area that name one optimizer (``cuda/lion``), or those that name none
or several (``cuda/-``). The files of other optimizers are no part of its digest, so a change of Lion leaves
SOAP's alone.

    python tests/areas.py                 the parts whose digest differs from the lock
    python tests/areas.py run AREA ...    runs these areas, and records their parts if no test failed
    python tests/areas.py run             likewise the parts that differ; `make test-area` builds first
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LOCK = TESTS / "areas.lock"
HEAD = (
    "# Written by `make test-area`: part of an area, digest of all that it depends on, number of its tests."
)
PRODUCT = "product"
"""The tests of no area, which are those of `make test`."""
FAILURES = "OXIDION_FAILED_TESTS"
"""The variable that names the file to which each area adds its failed tests."""
NO_DEVICE = "no CUDA device"
"""Why tests on a CUDA device are skipped where there is none."""
NOT_GREEN = "skipped"
"""What the lock has instead of a digest for a part whose tests were skipped."""
MOST_SHOWN = 30
"""Failed tests that are named at the end."""
NO_CLASS = "-"
"""The part of an area whose tests name no optimizer, or several."""
PLACES = ("src/algorithm/{}", "src/kernels/ops/{}", "python/oxidion/optim/{}", "python/oxidion/_reference/{}")
"""Where the files of an optimizer are, by its name: with a suffix, or a folder."""


@dataclass(frozen=True)
class Area:
    """One area.

    Attributes:
        name: Its name.
        tests: Patterns of test files, or of test names of a file behind ``::``.
        kept: Patterns of the same kind: tests that ``make test`` runs too.
        sources: Patterns of the files that its tests depend on.
        setup: A target of the Makefile that has to be made before.
        alone: Whether its tests measure time, so nothing else may run at the same time.
        sample: Whether ``make test`` runs the first row of each test too.
        without_representatives: Whether tests that name a representative optimizer, or none, are left
            to ``make test``.
    """

    name: str
    tests: tuple[str, ...]
    sources: tuple[str, ...]
    kept: tuple[str, ...] = ()
    setup: str = ""
    alone: bool = False
    sample: bool = False
    without_representatives: bool = False

    @cached_property
    def _tests(self) -> re.Pattern[str]:
        return _matcher(self.tests)

    @cached_property
    def kept_tests(self) -> re.Pattern[str]:
        """An expression for the names of tests that ``make test`` runs too."""
        return _matcher(self.kept)

    def has(self, test: str) -> bool:
        """Whether a test, by its name for pytest, belongs to this area."""
        if not self._tests.match(test):
            return False
        return not self.without_representatives or class_of(test) not in (
            NO_CLASS,
            *settings().representatives,
        )


@dataclass(frozen=True)
class Settings:
    """The content of ``areas.toml``."""

    areas: Mapping[str, Area]
    representatives: tuple[str, ...]
    shared: frozenset[str]
    classes: Mapping[str, Mapping[str, tuple[str, ...]]]


def _matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    """One expression for patterns: in a path ``*`` is any text without a slash and ``**`` any text."""
    return _expression(tuple(patterns))


@cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    texts = []
    for pattern in patterns:
        file, _, name = pattern.partition("::")
        text = re.escape(file).replace(r"\*\*", ".*").replace(r"\*", "[^/]*")
        within = re.escape(name).replace(r"\*", ".*")
        texts.append(f"{text}::{within}" if name else f"{text}(::.*)?")
    return re.compile("|".join(f"(?:{text})$" for text in texts) or r"(?!)")


@cache
def settings() -> Settings:
    """Areas, classes and representatives as they are written in ``areas.toml``."""
    found = tomllib.loads((TESTS / "areas.toml").read_text())
    areas = {
        name: Area(name, **{k: tuple(v) if isinstance(v, list) else v for k, v in own.items()})
        for name, own in found["areas"].items()
    }
    classes = {name: {k: tuple(v) for k, v in own.items()} for name, own in found["classes"].items()}
    package = ROOT / "python" / "oxidion"
    for file in sorted((package / "_reference").glob("*.py")):
        if (package / "optim" / file.name).exists() and not file.name.startswith("_"):
            classes.setdefault(file.stem, {})
    return Settings(areas, tuple(found["representatives"]), frozenset(found["shared"]), classes)


@cache
def _names() -> tuple[re.Pattern[str], dict[str, str]]:
    """An expression that finds names of optimizers in the name of a test, and the optimizer of each name."""
    owner = {
        word.lower(): name
        for name, own in settings().classes.items()
        for word in (name, *own.get("names", ()))
    }
    longest_first = sorted(owner, key=len, reverse=True)
    return re.compile(rf"(?<![a-z0-9])({'|'.join(longest_first)})(?![a-z0-9])"), owner


@cache
def class_of(test: str) -> str:
    """The one optimizer that a test names in its file, its function or its parameters; else ``-``."""
    pattern, owner = _names()
    file, _, name = test.partition("::")
    words = f"{Path(file).stem} {name}".lower()
    found = {owner[word] for word in pattern.findall(words)}
    return found.pop() if len(found) == 1 else NO_CLASS


@cache
def area_of(test: str) -> str:
    """The area of a test by its name, such as ``tests/cuda/test_rows.py::test_a[lion]``; else nothing."""
    return next((area.name for area in settings().areas.values() if area.has(test)), "")


@cache
def tracked() -> tuple[str, ...]:
    """Files of the checkout that git tracks, or would if they were added."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(sorted({name for name in listed.split("\0") if (ROOT / name).is_file()}))


@cache
def owned() -> Mapping[str, frozenset[str]]:
    """Files of each optimizer alone: after a change of these, tests of other optimizers need not run."""
    files: dict[str, frozenset[str]] = {}
    for name, own in settings().classes.items():
        if name in settings().shared:
            continue
        places = [f"{place.format(name)}{end}" for place in PLACES for end in ("/**", ".rs", ".cuh", ".py")]
        pattern = _matcher((*places, *own.get("sources", ())))
        files[name] = frozenset(file for file in tracked() if pattern.match(file))
    return files


def _imported(path: Path) -> Iterator[Path]:
    """Modules of the tests that a module of them imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            bases = [path.parents[node.level - 1]] if node.level else [TESTS, ROOT]
            places = [base.joinpath(*(node.module or "").split(".")) for base in bases]
            names = [file for place in places for file in (place, *(place / n.name for n in node.names))]
        elif isinstance(node, ast.Import):
            names = [TESTS.joinpath(*name.name.split(".")) for name in node.names]
        else:
            continue
        for name in names:
            yield from (file for file in (name.with_suffix(".py"), name / "__init__.py") if file.is_file())


@cache
def tests_of(area: Area) -> frozenset[str]:
    """Files of the area's tests, of what they import, and of the folders that they are in."""
    match = _matcher(pattern.partition("::")[0] for pattern in area.tests).match
    pending = [ROOT / name for name in tracked() if name.endswith(".py") and match(name)]
    found: set[Path] = set()
    while pending:
        path = pending.pop()
        if path not in found and path != Path(__file__):  # the choice of tests is no part of them
            found.add(path)
            pending += _imported(path)
            pending += [f for f in (path.with_name("conftest.py"), TESTS / "conftest.py") if f.is_file()]
    folders = {path.parent for path in found} - {TESTS, TESTS / "support"}
    data = {
        name
        for name in tracked()
        if not name.endswith((".py", ".md")) and any((ROOT / name).is_relative_to(f) for f in folders)
    }
    return frozenset(str(path.relative_to(ROOT)) for path in found) | data


@cache
def files_of(area: Area, part: str) -> tuple[str, ...]:
    """All files that a part of an area depends on."""
    match = _matcher(area.sources).match
    files = {name for name in tracked() if match(name)} | tests_of(area)
    if part != NO_CLASS:
        others = set().union(*(own for name, own in owned().items() if name not in _with_used(part)))
        files -= others
    return tuple(sorted(files))


def _with_used(part: str) -> set[str]:
    """An optimizer and those that it is made of."""
    used = {part}
    for name in settings().classes[part].get("uses", ()):
        used |= _with_used(name)
    return used


@cache
def _content(name: str) -> bytes:
    return hashlib.sha256((ROOT / name).read_bytes()).digest()


@cache
def digest(area: Area, part: str) -> str:
    """Of all files that a part depends on, of what chooses its tests, and of the torch that is installed."""
    installed = version("torch").partition("+")[0].rpartition(".")[0]
    choice = [(other.name, other.tests) for other in settings().areas.values()]
    uses = settings().classes.get(part)
    known = (area, choice, uses, sorted(settings().shared), settings().representatives, installed)
    total = hashlib.sha256(repr(known).encode())
    for name in files_of(area, part):
        total.update(name.encode() + b"\0" + _content(name))
    return total.hexdigest()[:32]


@cache
def recorded() -> dict[str, tuple[str, int]]:
    """Digest and number of tests of each part that is in the lock, by ``area/part``."""
    lines = LOCK.read_text().splitlines() if LOCK.exists() else []
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: (value, int(tests)) for name, value, tests in rows}


def is_green(area: Area, part: str) -> bool:
    """Whether a part of an area was green with the files that are there now."""
    return recorded().get(f"{area.name}/{part}", ("",))[0] == digest(area, part)


def differing() -> dict[str, list[str]]:
    """Parts of each area that differ from the lock; for an area that is not in it, its general part."""
    found: dict[str, list[str]] = {}
    for area in settings().areas.values():
        known = {f"{area.name}/{part}": part for part in (NO_CLASS, *settings().classes)}
        parts = [known[name] for name in recorded() if name in known] or [NO_CLASS]
        changed = [part for part in parts if not is_green(area, part)]
        if changed:
            found[area.name] = changed
    return found


def chosen(tests: Iterable[str], areas: Iterable[str], only_changed: bool) -> list[bool]:
    """For each test, whether a run of these areas includes it; ``product`` has the tests of no area."""
    seen: set[str] = set()
    found = []
    for test in tests:
        own, function = area_of(test), test.partition("[")[0]
        area = settings().areas.get(own)
        first = area is not None and area.sample and function not in seen
        seen.add(function)
        too = first or (area is not None and bool(area.kept_tests.match(test)))
        in_product = PRODUCT in areas and (area is None or too)
        in_area = own in areas and area is not None and not (only_changed and is_green(area, class_of(test)))
        found.append(in_product or in_area)
    return found


def leave(config: pytest.Config, items: list[pytest.Item], wanted: Iterable[bool]) -> None:
    """Leaves the tests that are wanted among those that were collected; pytest counts the others."""
    sides: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item, own in zip(items, wanted, strict=True):
        sides[own].append(item)
    config.hook.pytest_deselected(items=sides[False])
    items[:] = sides[True]


def may_have(path: Path, areas: Iterable[str]) -> bool:
    """Whether a file may have tests of these areas."""
    file = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    found = set()
    for area in settings().areas.values():
        if _matcher(p.partition("::")[0] for p in area.tests).match(file):
            found.add(area.name)
            kept = _matcher(p.partition("::")[0] for p in area.kept).match(file)
            if _matcher(p for p in area.tests if "::" not in p).match(file) and not (
                kept or area.sample or area.without_representatives
            ):
                return not found.isdisjoint(areas)
    return not {PRODUCT, *found}.isdisjoint(areas)


def is_built() -> bool:
    """Whether the extension that is installed is no older than the sources that it is compiled of."""
    stamps = list((ROOT / ".venv").glob(".built-*"))
    sources = [ROOT / n for n in tracked() if n.startswith(("src/", "Cargo."))]
    last = max(path.stat().st_mtime for path in sources)
    return bool(stamps) and max(path.stat().st_mtime for path in stamps) >= last


class Failures:
    """A plugin that writes the names of failed tests, and of modules that cannot be imported, into a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keeps the name of a failed test, or of a module whose import fails, as pytest takes it."""
        from support.spread import without_group

        if report.failed:
            self.found[without_group(report.nodeid)] = None

    pytest_collectreport = pytest_runtest_logreport

    def pytest_sessionfinish(self) -> None:
        """Adds what was found to the file."""
        with self.file.open("a") as file:
            file.writelines(f"{name}\n" for name in self.found)


class Recorder:
    """A plugin that counts the tests of each part that pass, and writes the lock if none failed.

    A part with more skipped than passed tests counts as changed: something is missing on the machine. Tests
    on a CUDA device do not count.
    """

    def __init__(self, area: Area, only_changed: bool) -> None:
        self.area, self.only_changed = area, only_changed
        self.passed: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.parts = (NO_CLASS, *settings().classes)
        self.green = {part for part in self.parts if is_green(area, part)}
        self.before = [digest(area, part) for part in self.parts]
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts one test."""
        from support.spread import without_group

        test = without_group(report.nodeid)
        if area_of(test) == self.area.name:
            self.passed[class_of(test)] += report.when == "call" and report.passed
            self.skipped[class_of(test)] += report.skipped and NO_DEVICE not in str(report.longrepr)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Records what has passed; nothing if a test failed or a file has changed meanwhile."""
        seconds = time.monotonic() - self.start
        passed, skipped = sum(self.passed.values()), sum(self.skipped.values())
        print(f"\narea {self.area.name}: {passed} passed, {skipped} skipped in {seconds:.0f} s")
        for kept in (tracked, owned, tests_of, files_of, _content, digest):
            kept.cache_clear()
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        if self.before != [digest(self.area, part) for part in self.parts]:
            print("files have changed meanwhile: nothing is recorded")
        elif not is_built():
            print("the extension is older than its sources: nothing is recorded")
        else:
            self._write()

    def _write(self) -> None:
        """Records the parts that ran, and takes out those that were to run and have no test any more."""
        lock = {}
        for name, row in recorded().items():
            area, _, part = name.partition("/")
            if area != self.area.name or (self.only_changed and part in self.green):
                lock[name] = row
        for part, tests in self.passed.items():
            value = digest(self.area, part)
            if tests < self.skipped[part]:
                print(f"{self.area.name}/{part} is not green: {self.skipped[part]} tests were skipped")
                value = NOT_GREEN
            if tests or self.skipped[part]:
                lock[f"{self.area.name}/{part}"] = (value, tests)
        lines = [f"{name} {value} {tests}" for name, (value, tests) in sorted(lock.items())]
        LOCK.write_text("\n".join([HEAD, *lines, ""]))
        recorded.cache_clear()


def run(area: Area, only_changed: bool, jobs: int, more: Sequence[str]) -> int:
    """Runs the tests of an area in a process of its own; records those that passed if none failed."""
    if area.setup and subprocess.run(["make", "-s", area.setup], cwd=ROOT, check=False).returncode:
        return 1
    # Nothing is recorded of tests that were skipped for want of a compiler or of a framework.
    environment = {**os.environ, "OXIDION_REQUIRE_EMULATOR": "1", "OXIDION_REQUIRE_FRAMEWORKS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # all tests run, or nothing is recorded
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--area={area.name}"]
    if area.alone:
        environment.pop("OMP_WAIT_POLICY", None)  # torch's own, as users have it
    elif jobs > 1:
        command += ["-n", str(jobs), "--dist", "loadgroup", "--no-loadscope-reorder"]
    command += [*(["--changed"] if only_changed else []), *(["--record"] if not more else []), *more]
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    return 0 if code == pytest.ExitCode.NO_TESTS_COLLECTED and only_changed else code


def main() -> int:
    """Prints or runs what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", nargs="?", choices=["list", "run"], default="list")
    parser.add_argument("areas", nargs="*", help="those to run whole; without any, the parts that differ")
    parser.add_argument("--jobs", type=int, default=2)
    options, more = parser.parse_known_args()
    if options.command == "list":
        for name, parts in differing().items():
            print(name, *parts)
        return 0
    names = list(settings().areas) if options.areas == ["all"] else options.areas
    if unknown := [name for name in names if name not in settings().areas]:
        raise SystemExit(
            f"no area {', '.join(unknown)}: expected all or some of {', '.join(settings().areas)}"
        )
    only_changed = not names
    with tempfile.NamedTemporaryFile("r", suffix=".txt") as failures:
        os.environ[FAILURES] = failures.name
        found = {n: run(settings().areas[n], only_changed, options.jobs, more) for n in names or differing()}
        failed = failures.read().splitlines()
    # Once more at the end: the log of a run of all areas is long.
    for name in failed[:MOST_SHOWN]:
        print(f"failed: {name}")
    if len(failed) > MOST_SHOWN:
        print(f"failed: {len(failed) - MOST_SHOWN} more")
    if not_green := [name for name, status in found.items() if status]:
        print(f"not green: {', '.join(not_green)}")
    return int(bool(not_green))


if __name__ == "__main__":
    raise SystemExit(main())
