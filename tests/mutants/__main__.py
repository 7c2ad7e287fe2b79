"""Plants each fault of the tables in this folder, and reports which of them the tests find: ``make mutants``.

    PYTHONPATH=tests python -m mutants [NAME ...] [--areas] [--report FILE]

Nothing in the checkout changes: faults are planted in a copy below ``target/mutants``. All faults of Rust
that are expressions are compiled at once, and a variable of the environment chooses one; each other has a
build of its own. Tests that a row names run first. What they do not find is planted together for the tests
of the core and for ``make test`` whole, and after that for the areas: a fault is found there if a test that
fails does so with this fault alone as well.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
TESTS = HERE.parent
ROOT = TESTS.parent
WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
"""The copy of the sources that is compiled."""
COPIED = (
    "src",
    "python",
    "tests/rust",
    "Cargo.toml",
    "Cargo.lock",
    "README.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
)
CARGO = "cargo"
"""What a row names among its tests if those of the core find it."""
VARIABLE = "OXIDION_PLANTED"
CHECKED = ("package.oxidion.debug-assertions=true", "package.oxidion.overflow-checks=true")
PATIENCE = 420
"""Seconds for the tests that a row names: a fault that makes them hang is found."""
PLANTED = """//! Faults that are compiled in, and the choice among them.

use std::sync::OnceLock;

static CHOSEN: OnceLock<Vec<u16>> = OnceLock::new();

/// Whether the fault of this number is planted.
#[allow(clippy::disallowed_methods)]
pub(crate) fn is(number: u16) -> bool {
    let read = || std::env::var("OXIDION_PLANTED").unwrap_or_default();
    CHOSEN.get_or_init(|| read().split(',').flat_map(str::parse).collect()).contains(&number)
}
"""


@dataclass(frozen=True)
class Mutant:
    """A row of a table; ``README.md`` says what its keys mean."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ()
    k: str = ""
    expr: bool = False
    area: str = ""
    reason: str = ""

    @property
    def layer(self) -> str:
        """The part of the product that it is planted in."""
        parts = Path(self.file).with_suffix("").parts
        deep = parts[:2] in (("src", "algorithm"), ("src", "kernels"), ("python", "oxidion"))
        return "/".join(parts[: 3 if deep else 2])

    @property
    def rust(self) -> bool:
        """Whether it has to be compiled."""
        return self.file.endswith(".rs")


def mutants() -> list[Mutant]:
    """All rows, in the order of their files."""
    rows = [row for file in sorted(HERE.glob("*.toml")) for row in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items()}) for row in rows]


def problems(found: Sequence[Mutant]) -> Iterator[str]:
    """What is wrong with rows: names that are given twice, faults that fit no place or more than one."""
    names = [mutant.name for mutant in found]
    yield from sorted(f"{name}: given twice" for name in set(names) if names.count(name) > 1)
    for mutant in found:
        path = ROOT / mutant.file
        times = path.read_text().count(mutant.old) if path.exists() else 0
        if times != 1:
            yield f"{mutant.name}: its text occurs {times} times in {mutant.file}"


def _config(keys: Iterable[str]) -> list[str]:
    """Settings of the profile, as the Makefile has them."""
    return [word for key in keys for word in ("--config", f"profile.release.{key}")]


def compiled_at_once(every: Iterable[Mutant]) -> list[Mutant]:
    """Faults of Rust that are expressions, without those that lie within another one's text."""
    chosen: list[Mutant] = []
    ends: dict[str, list[tuple[int, int]]] = {}
    for mutant in every:
        if mutant.rust and mutant.expr:
            first = (ROOT / mutant.file).read_text().index(mutant.old)
            span = (first, first + len(mutant.old))
            others = ends.setdefault(mutant.file, [])
            if all(span[1] <= start or end <= span[0] for start, end in others):
                others.append(span)
                chosen.append(mutant)
    return chosen


def run(command: Sequence[str | Path], **options: object) -> subprocess.CompletedProcess[str]:
    """A process with what it says."""
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


class Core:
    """The core, compiled with faults in a copy of the sources."""

    def __init__(self, planted: Sequence[Mutant]) -> None:
        self.numbers = {mutant.name: number for number, mutant in enumerate(planted)}
        self.broken: list[str] = []
        self.library = WORK / "planted.so"
        self.tests: list[Path] = []

    def _write(self, planted: Iterable[Mutant]) -> dict[str, dict[int, str]]:
        """Writes the copy with all faults; returns the fault of each line of each file."""
        for name in COPIED:
            place = TREE / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                skipped = shutil.ignore_patterns("target", "__pycache__", "*.so")
                shutil.rmtree(place, ignore_errors=True)
                shutil.copytree(ROOT / name, place, ignore=skipped)
            else:
                shutil.copy2(ROOT / name, place)
        by_file: dict[str, list[Mutant]] = {}
        for mutant in planted:
            by_file.setdefault(mutant.file, []).append(mutant)
        lines: dict[str, dict[int, str]] = {}
        for file, own in by_file.items():
            text = (TREE / file).read_text()
            for mutant in sorted(own, key=lambda m: text.index(m.old), reverse=True):
                at = text.index(mutant.old)
                number = self.numbers.get(mutant.name)
                choice = f"(if crate::planted::is({number}) {{ {mutant.new} }} else {{ {mutant.old} }})"
                new = mutant.new if number is None else choice
                text = text[:at] + new + text[at + len(mutant.old) :]
            for mutant in own:
                number = self.numbers.get(mutant.name)
                mark = mutant.new if number is None else f"crate::planted::is({number})"
                first = text[: text.index(mark)].count("\n") + 1
                for line in range(first, first + mutant.old.count("\n") + mutant.new.count("\n") + 1):
                    lines.setdefault(file, {})[line] = mutant.name
            (TREE / file).write_text(text)
        (TREE / "src" / "planted.rs").write_text(PLANTED)
        library = TREE / "src" / "lib.rs"
        library.write_text(library.read_text() + "\nmod planted;\n")
        return lines

    def _cargo(self, *arguments: str) -> tuple[bool, list[Path], list[tuple[str, int]], str]:
        """Compiles; the files that were made, and the places of errors."""
        command = ["cargo", *arguments, "--release", "--message-format=json"]
        environment = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "target")}  # of the same dependencies
        done = run(command, cwd=TREE, env=environment)
        made, places, errors = [], [], []
        for line in done.stdout.splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if entry.get("reason") == "compiler-artifact" and entry["target"]["name"] == "_oxidion":
                made += [Path(f) for f in entry["filenames"] if f.endswith(".so")]
                made += [Path(entry["executable"])] if entry.get("executable") else []
            message = entry.get("message") or {}
            if entry.get("reason") == "compiler-message" and message.get("level") == "error":
                errors.append(message.get("rendered", ""))
                places += [(span["file_name"], span["line_start"]) for span in message["spans"]]
        return done.returncode == 0, made, places, "\n".join(errors) or done.stderr[-2000:]

    def build(self, planted: Sequence[Mutant]) -> list[Mutant]:
        """Compiles extension and tests; those that do not compile are left out and remembered."""
        left = list(planted)
        while True:
            lines = self._write(left)
            good, made, places, text = self._cargo("build", "--features", "extension-module")
            if good:
                self.library.unlink(missing_ok=True)
                shutil.copy2(next(file for file in made if file.name == "lib_oxidion.so"), self.library)
                break
            guilty = {lines.get(file, {}).get(line) for file, line in places} - {None}
            if not guilty:
                raise SystemExit(f"the copy does not compile:\n{text}")
            print(f"do not compile: {', '.join(map(str, guilty))}\n{text[:3000]}", flush=True)
            self.broken += sorted(map(str, guilty))
            left = [mutant for mutant in left if mutant.name not in guilty]
        good, made, _, text = self._cargo(
            *(
                "test",
                "--no-run",
                "--no-default-features",
                "--features",
                "cuda,internals,tch/python-extension",
            ),
            *_config(CHECKED),
        )
        if not good:
            raise SystemExit(f"the tests of the core do not compile:\n{text}")
        self.tests = [file for file in made if file.suffix != ".so"]
        return left


class Bench:
    """Folders that the package is imported from, each with the faults that are planted there now."""

    def __init__(self, core: Core, jobs: int) -> None:
        self.core = core
        self.places: Queue[Path] = Queue()
        self.jobs = jobs
        for number in range(jobs):
            place = WORK / f"job{number}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(ROOT / "python", place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            for library in (ROOT / "python").rglob("*.so"):
                os.link(library, place / library.relative_to(ROOT / "python"))
            self.places.put(place)

    def _environment(self, place: Path, planted: Iterable[Mutant], library: Path) -> dict[str, str]:
        """The variables of a process with these faults, after writing them."""
        extension = place / "oxidion" / "_oxidion.abi3.so"
        extension.unlink(missing_ok=True)
        os.link(library, extension)
        by_file: dict[str, list[Mutant]] = {}
        for mutant in planted:
            if not mutant.rust:
                by_file.setdefault(mutant.file, []).append(mutant)
        for file, own in by_file.items():
            text = (ROOT / file).read_text()
            for mutant in own:
                text = text.replace(mutant.old, mutant.new)
            (place / Path(file).relative_to("python")).write_text(text)
        numbers = [self.core.numbers[m.name] for m in planted if m.name in self.core.numbers]
        return {
            **os.environ,
            "PYTHONPATH": str(place),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_WAIT_POLICY": "passive",
            VARIABLE: ",".join(map(str, numbers)),
        }

    def _restore(self, place: Path, planted: Iterable[Mutant]) -> None:
        for mutant in planted:
            if not mutant.rust:
                shutil.copy2(ROOT / mutant.file, place / Path(mutant.file).relative_to("python"))

    def pytest(
        self,
        planted: Sequence[Mutant],
        arguments: Sequence[str],
        patience: float,
        library: Path | None = None,
    ) -> list[str] | None:
        """Names of the tests that fail with these faults; None where they hang or crash."""
        place = self.places.get()
        try:
            environment = self._environment(place, planted, library or self.core.library)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
            command += ["-W", "ignore", "--tb=no", "-rfE", *arguments]
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip
            try:
                said, _ = process.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return None
            failed = re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", said, re.MULTILINE)
            if process.returncode in (0, 5):
                return []
            if process.returncode == 4:
                raise SystemExit(f"pytest {' '.join(arguments)}:\n{said[-2000:]}")
            return failed or None
        finally:
            self._restore(place, planted)
            self.places.put(place)

    def core_tests(self, planted: Sequence[Mutant]) -> list[str] | None:
        """Names of the tests of the core that fail."""
        import torch

        libraries = [ROOT / "target" / "shim" / "test", Path(torch.__file__).parent / "lib"]
        environment = {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
            VARIABLE: ",".join(str(self.core.numbers[m.name]) for m in planted if m.rust),
        }
        failed: list[str] = []
        for file in self.core.tests:
            try:
                done = run([file, "-q"], cwd=ROOT, env=environment, timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                return None
            failed += re.findall(r"^    ([\w:]+)$", done.stdout, re.MULTILINE)
            if done.returncode and not failed:
                return None
        return failed


def narrow(mutant: Mutant, tier: Sequence[str]) -> list[str]:
    """Arguments of pytest for the tests that a row names."""
    files = [test for test in mutant.tests if test != CARGO]
    return [*files, *(["-k", mutant.k] if mutant.k else []), *tier]


def first_round(bench: Bench, planted: Sequence[Mutant], in_areas: bool = False) -> dict[str, str]:
    """Which faults the tests find that their rows name, and how; in ``make test``, or in their areas."""
    found: dict[str, str] = {}

    def one(mutant: Mutant) -> None:
        start = time.monotonic()
        by = ""
        if narrow(mutant, ()):
            tier = ["--area", mutant.area if in_areas else "product"]
            failed = bench.pytest([mutant], ["-x", *narrow(mutant, tier)], PATIENCE)
            by = "crash or hang" if failed is None else failed[0] if failed else ""
        if by:
            found[mutant.name] = by
        print(f"{time.monotonic() - start:5.0f} s  {mutant.name}: {by or 'not yet'}", flush=True)

    with ThreadPoolExecutor(bench.jobs) as pool:
        list(pool.map(one, planted))
    return found


def spread(bench: Bench) -> list[str]:
    """Arguments of pytest for a run in several processes."""
    return ["-n", str(bench.jobs), "--dist", "loadgroup", "--no-loadscope-reorder"]


def together(bench: Bench, planted: Sequence[Mutant], arguments: Sequence[str]) -> dict[str, str]:
    """Which of some faults a run with all of them finds; each is tried alone by the tests that failed."""
    rest, found = list(planted), {}
    while rest:
        failed = bench.pytest(rest, [*spread(bench), *arguments], 3600)
        if failed == []:
            break
        print(f"{len(rest)} faults at once: {len(failed or ())} tests fail", flush=True)
        names = [name.partition("@")[0] for name in failed or ()]
        files = sorted({name.partition("::")[0] for name in names})
        before = len(found)
        for mutant in rest:
            alone = bench.pytest(
                [mutant], ["-x", *(names if len(names) < 200 else files), *_options(arguments)], 1800
            )
            if alone is None or alone:
                found[mutant.name] = "crash or hang" if alone is None else alone[0]
                print(f"{mutant.name}: {found[mutant.name]}", flush=True)
        rest = [mutant for mutant in rest if mutant.name not in found]
        if len(found) == before:
            print(f"no fault alone makes these fail: {names[:20]}", flush=True)
            break
    return found


def _options(arguments: Sequence[str]) -> list[str]:
    return [argument for argument in arguments if argument != "tests"]


def own_builds(core: Core, bench: Bench, planted: Sequence[Mutant], tier: Sequence[str]) -> dict[str, str]:
    """Which faults are found that need a build of their own."""
    found = {}
    for mutant in planted:
        core._write([mutant])
        good, made, _, text = core._cargo("build", "--features", "extension-module")
        if not good:
            print(f"does not compile: {mutant.name}\n{text[:2000]}", flush=True)
            core.broken.append(mutant.name)
            continue
        library = WORK / f"{mutant.name}.so"
        shutil.copy2(next(file for file in made if file.name == "lib_oxidion.so"), library)
        failed = bench.pytest([mutant], ["-x", *narrow(mutant, tier)], PATIENCE, library)
        by = "crash or hang" if failed is None else failed[0] if failed else ""
        print(f"{mutant.name}: {by or 'not yet'}", flush=True)
        if by:
            found[mutant.name] = by
            library.unlink()
    return found


def table(planted: Sequence[Mutant], found: Mapping[str, str], by_areas: Mapping[str, str]) -> str:
    """How many faults of each layer are found, as a table of a page; what survives, with its reason."""
    layers = sorted({mutant.layer for mutant in planted})
    rows = ["| layer | faults | found by `make test` | with areas |", "|---|---|---|---|"]
    for layer in [*layers, ""]:
        own = [mutant for mutant in planted if layer in ("", mutant.layer)]
        first = sum(mutant.name in found for mutant in own)
        both = sum(mutant.name in found or mutant.name in by_areas for mutant in own)
        rows.append(f"| {f'`{layer}`' if layer else 'all'} | {len(own)} | {first} | {both} |")
    survived = [m for m in planted if m.name not in found and m.name not in by_areas]
    rows += ["", *(f"- survives: `{m.name}`, {m.reason or 'no reason is written'}" for m in survived)]
    return "\n".join(rows) + "\n"


def main() -> int:
    """Plants all, prints the table, and ends with 1 if too few are found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="those to plant alone; an expression each")
    parser.add_argument(
        "--areas", action="store_true", help="run the areas for what `make test` does not find"
    )
    parser.add_argument("--first", action="store_true", help="run the tests alone that rows name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--built", action="store_true", help="use the build of the last run")
    parser.add_argument("--report", type=Path, default=WORK / "report.json")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    every = mutants()
    if wrong := list(problems(every)):
        raise SystemExit("\n".join(wrong))
    planted = [m for m in every if not options.names or any(re.search(n, m.name) for n in options.names)]
    core = Core(compiled_at_once(every))
    if options.built:
        state = json.loads((WORK / "built.json").read_text())
        core.numbers, core.tests = state["numbers"], [Path(file) for file in state["tests"]]
        core.broken = state["broken"]
    else:
        core.build(compiled_at_once(every))
        state = {"numbers": core.numbers, "tests": list(map(str, core.tests)), "broken": core.broken}
        (WORK / "built.json").write_text(json.dumps(state))
    planted = [mutant for mutant in planted if mutant.name not in core.broken]
    bench = Bench(core, options.jobs)
    tier = ["--area", "product"]
    at_once = [mutant for mutant in planted if mutant.name in core.numbers or not mutant.rust]
    files = sorted({test for mutant in at_once for test in mutant.tests} - {CARGO})
    if (failed := bench.pytest([], [*spread(bench), *files, *tier], 3600)) != []:
        raise SystemExit(f"these fail without any fault: {failed}")
    found = first_round(bench, at_once)
    found |= own_builds(core, bench, [m for m in planted if m not in at_once], tier)
    rest = [mutant for mutant in at_once if mutant.name not in found]
    if not options.first:
        for mutant in [m for m in rest if m.rust]:
            failed = bench.core_tests([mutant])
            if failed is None or failed:
                found[mutant.name] = "cargo test: " + (failed[0] if failed else "crash or hang")
                print(f"{mutant.name}: {found[mutant.name]}", flush=True)
        rest = [mutant for mutant in rest if mutant.name not in found]
        found |= together(bench, rest, ["tests", *tier])
    by_areas: dict[str, str] = {}
    if options.areas:
        rest = [mutant for mutant in at_once if mutant.name not in found]
        by_areas |= first_round(bench, [mutant for mutant in rest if mutant.area], in_areas=True)
        for area in sorted({mutant.area for mutant in rest} - {""}) or ["classes", "gloo"]:
            left = [mutant for mutant in rest if mutant.name not in by_areas]
            by_areas |= together(bench, left, ["tests", "--area", area])
    options.report.write_text(
        json.dumps({"found": found, "areas": by_areas, "broken": core.broken}, indent=1)
    )
    print(table(planted, found, by_areas))
    return int(bool(core.broken) or len(found) < 0.9 * len(planted))


if __name__ == "__main__":
    raise SystemExit(main())
