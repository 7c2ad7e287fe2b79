"""The tests that a change calls for: ``make quick``, or ``make quick ALG=adamw`` for one optimizer.

Without a name: the meta-tests, the tests of what differs from the main branch, and one optimizer on all
simulated layouts. With one: contract, algorithms and simulated layouts of that optimizer. What failed last
comes first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LAYOUTS = TESTS / "distributed" / "test_sim_equivalence.py"
LEFT_OUT = ("slow", "alone", "equipment", "cuda")
"""Marks of tests that take long or need a quiet machine or a device."""
ALWAYS = "lion"
"""The optimizer that steps on all layouts where none is named: the cheapest one."""

# What a changed file calls for, beside the tests that name its module: `{}` is what the group matched.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(tests/.*test_\w+\.py)", ("{}",)),
    (r"src/algorithm/(\w+)\.rs", ("tests/algorithm/test_{}.py", "tests/algorithm/test_{}_*.py")),
    (
        r"python/oxidion/optim/_?(\w+)\.py",
        ("tests/algorithm/test_{}.py", "tests/contract/test_construction.py"),
    ),
    (r"src/kernels/(?:cuda/src|ops)/(\w+)\.cuh?", ("tests/cuda/test_{}.py", "tests/cuda/test_emulated*.py")),
    (r"src/kernels/(?:cuda/.*|ops/\w+/(?:device|panel))\.rs()", ("tests/cuda/test_launch.py",)),
    (r"src/(?:linalg|kernels)/.*\.rs()", ("tests/test_orthonormalizers.py", "tests/test_golden.py")),
    (r"src/(?:plan|program|layout)\b.*\.rs()", ("tests/plan", "tests/distributed/test_layout_pairs.py")),
    (r"src/.*\.rs()", ("tests/test_golden.py",)),
    (r"(?:docs/.*|README)\.md()", ("tests/meta",)),
    (r"docs/frameworks/\w+\.md()", ("tests/frameworks/test_shown_lines.py",)),
    (r"examples/frameworks/\w+\.py()", ("tests/frameworks/test_*.py",)),
    (r"(?:examples|benchmarks)/(\w+)\.py", ("tests/examples/test_{}.py",)),
)


def changed() -> list[str]:
    """Files that differ from where this branch left the main one, and those that git does not know yet."""

    def said(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    base = said("merge-base", "HEAD", "main").strip() or "HEAD"
    return [*said("diff", "--name-only", base).split(), *said("ls-files", "-o", "--exclude-standard").split()]


def called_for(files: Iterable[str]) -> list[Path]:
    """Tests for changed files: by the rules, and those beside or above which name a changed Python module."""
    found: set[Path] = set()
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    for name in files:
        for pattern, places in RULES:
            if match := re.fullmatch(pattern, name):
                found.update(path for place in places for path in ROOT.glob(place.format(match[1])))
        module = Path(name).stem
        if name.endswith(".py") and name.startswith(("python/", "tests/")) and not module.startswith("test_"):
            used = re.compile(rf"^(?:from|import) .*\b{module}\b", re.MULTILINE)
            folder = ROOT / Path(name).parent if name.startswith("tests/") else TESTS
            found.update(path for path in texts if path.is_relative_to(folder) and used.search(texts[path]))
    return sorted(found)


def names_of(optimizer: str) -> set[str]:
    """What an optimizer is called in the names of tests: its class, its algorithm, its rows.

    Raises:
        SystemExit: if there is none of that name.
    """
    from support.cases import ALL_CASES

    known: dict[str, set[str]] = {}
    for case in ALL_CASES:
        own = known.setdefault(case.cls.__name__.lower(), {case.cls.__name__.lower()})
        own |= {case.algorithm, case.name.split("-")[0]}
    found = [own for own in known.values() if optimizer.lower() in own]
    if not found:
        raise SystemExit(f"ALG={optimizer}: expected one of {', '.join(sorted(known))}")
    return set().union(*found)


class Selection:
    """Leaves of the tests that were collected those that are called for."""

    def __init__(self, optimizer: str, named: bool) -> None:
        self.optimizer, self.named = optimizer, named
        self.names: set[str] = set()

    def wants(self, item: pytest.Item) -> bool:
        """Whether a test is to run."""
        words = {*re.split(r"[^a-z0-9_]+", item.name.lower()), item.path.stem.lower().removeprefix("test_")}
        ours = bool(words & self.names)
        if (
            item.path == LAYOUTS
        ):  # the row of the defaults on every layout, other rows where they are not slow
            plain = ours and "default" in words and "float64" in item.name
            return plain or (ours and self.named and not item.get_closest_marker("slow"))
        if any(item.get_closest_marker(mark) for mark in LEFT_OUT):
            return False
        return ours or not self.named

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drops the others."""
        self.names = names_of(self.optimizer)
        dropped = [item for item in items if not self.wants(item)]
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if self.wants(item)]


def main() -> int:
    """Runs the tests; returns what pytest says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alg", default="", metavar="NAME", help="class or algorithm, as adamw")
    options, more = parser.parse_known_args()
    sys.path.insert(0, str(TESTS))
    if options.alg:
        places = [TESTS / "contract", TESTS / "algorithm", LAYOUTS]
    else:
        places = sorted({*called_for(changed()), TESTS / "meta", LAYOUTS})
    selection = Selection(options.alg or ALWAYS, bool(options.alg))
    return int(pytest.main(["-q", "--ff", *map(str, places), *more], plugins=[selection]))


if __name__ == "__main__":
    raise SystemExit(main())
