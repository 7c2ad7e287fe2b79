"""The tests that a change calls for: ``make quick``, or ``make quick ALG=adamw`` for one optimizer.

Without a name: the tests of what differs from the main branch, those about the sources, and one optimizer
on all simulated layouts. Files of one optimizer alone call for its own tests, as its name does: contract,
algorithm and simulated layouts. What failed last comes first.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

import areas

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LAYOUTS = TESTS / "distributed" / "test_sim_equivalence.py"
GOLDEN = TESTS / "test_golden.py"
SOURCES = tuple(
    TESTS / "meta" / f"test_{name}.py"
    for name in ("areas", "conventions", "layering", "operations", "python_layering", "sizes", "stubs")
)
"""The tests about the sources that always run. Those of pages and site run where a page changed."""
ALWAYS = "lion"
"""The optimizer that steps on all layouts where none is named: the cheapest one."""

# Tests of a changed file, in addition to those that name its module: `{}` is what the group matched.
RULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"(tests/.*test_\w+\.py)", ("{}",)),
    (
        r"src/(?:algorithm|kernels/ops)/(\w+)\b.*\.(?:rs|cuh)",
        ("tests/algorithm/test_{}.py", "tests/algorithm/test_{}_*.py"),
    ),
    (
        r"python/oxidion/optim/_?(\w+)\.py",
        ("tests/algorithm/test_{}.py", "tests/contract/test_construction.py"),
    ),
    (r"src/(?:linalg|kernels/cpu)/.*\.rs()", ("tests/test_orthonormalizers.py",)),
    (
        r"python/oxidion/(?:_core|groups|qk_clip)/.*\.py()",
        ("tests/contract/test_step.py", "tests/test_golden.py"),
    ),
    (r"(?:Makefile|\.ci/.*|\.github/.*)()", ("tests/meta/test_repository.py",)),
    (r"src/(?:plan|program|layout)\b.*\.rs()", ("tests/plan", "tests/distributed/test_layout_pairs.py")),
    (r"(?:examples|benchmarks)/(\w+)\.py", ("tests/examples/test_{}.py",)),
    (r"(?:mkdocs\.yml|.*\.md)()", ("tests/meta",)),
)


def changed() -> list[str]:
    """Files that differ from where this branch left the main one, and those that git does not know yet."""

    def said(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    base = said("merge-base", "HEAD", "main").strip() or "HEAD"
    return [*said("diff", "--name-only", base).split(), *said("ls-files", "-o", "--exclude-standard").split()]


def called_for(files: Iterable[str]) -> list[Path]:
    """Tests for changed files: by the rules, and those in its folder which name a changed Python module."""
    found: set[Path] = set()
    texts = {path: path.read_text() for path in sorted(TESTS.rglob("test_*.py"))}
    for name in files:
        for pattern, places in RULES:
            if match := re.fullmatch(pattern, name):
                found.update(path for place in places for path in ROOT.glob(place.format(match[1])))
        module = Path(name).stem
        if name.endswith(".py") and name.startswith(("python/", "tests/")) and not module.startswith("test_"):
            used = re.compile(rf"^(?:from|import) .*\b{module}\b", re.MULTILINE)
            own = (ROOT / name).parent
            folder = own if name.startswith("tests/") and own != TESTS / "support" else TESTS
            found.update(path for path in texts if path.is_relative_to(folder) and used.search(texts[path]))
    return sorted(found)


class Selection:
    """Leaves of the tests that were collected those that are called for."""

    def __init__(self, optimizers: Iterable[str], places: Iterable[Path], named: bool) -> None:
        self.optimizers, self.named = set(optimizers), named
        self.places = {str(place) for place in places}

    def wants(self, item: pytest.Item) -> bool:
        """Whether a test is to run."""
        ours = areas.class_of(item.nodeid) in self.optimizers
        if (
            item.path == LAYOUTS
        ):  # the row of the defaults on every layout, other rows where they are not slow
            default = "-default-" in item.name and "float64" in item.name
            return ours and (default or (self.named and not item.get_closest_marker("slow")))
        if item.get_closest_marker("slow"):
            return False
        path = str(item.path)
        if path in self.places:
            return True
        if areas.area_of(item.nodeid) not in ("", "classes"):
            return False
        return ours or (not self.named and any(path.startswith(f"{place}/") for place in self.places))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Drops the others."""
        areas.leave(config, items, [self.wants(item) for item in items])


def main() -> int:
    """Runs the tests; returns what pytest says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--alg", default="", metavar="NAME", help="class or algorithm, as adamw")
    options, more = parser.parse_known_args()
    files = changed()
    owned = areas.owned()
    own = {name for name, mine in owned.items() if not mine.isdisjoint(files)}
    places = [] if options.alg else [*called_for(files), *SOURCES]
    if places and any(name.startswith("src/") for name in set(files).difference(*owned.values())):
        places.append(GOLDEN)
    if options.alg:
        own = {areas.class_of(options.alg)}
        if own == {areas.NO_CLASS}:
            raise SystemExit(f"ALG={options.alg}: expected one of {', '.join(areas.settings().classes)}")
    of_class = [TESTS / "contract", TESTS / "algorithm", GOLDEN] if own else []
    selection = Selection(own or {ALWAYS}, places, bool(options.alg))
    everywhere = sorted({*places, *of_class, LAYOUTS})
    return int(pytest.main(["-q", "--ff", *map(str, everywhere), *more], plugins=[selection]))


if __name__ == "__main__":
    raise SystemExit(main())
