"""Tests of the test bench itself: planted faults that checks have to find, and machine code taken apart.

They depend on the CUDA sources, the emulator and themselves alone. ``equipment.sha256`` has the digest of all
that at their last green run: ``make test`` runs them where it differs, ``make test-all`` always, and ``make
test-equipment`` writes it. ``python tests/cuda/equipment.py`` prints what ``make test`` adds to its choice of
tests; with ``--record REPORT`` it writes the digest if all tests of a JUnit report passed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
RECORD = TESTS / "cuda" / "equipment.sha256"
LEFT_OUT = " and not equipment"
MARKED = re.compile(
    r"^pytestmark = .*\bequipment\b|^@pytest\.mark\.equipment$|^    pytest\.mark\.equipment,$", re.M
)


def marked() -> list[Path]:
    """The modules that have tests of the equipment."""
    return [path for path in sorted((TESTS / "cuda").glob("test_*.py")) if MARKED.search(path.read_text())]


def _imported(path: Path) -> Iterator[Path]:
    """Modules of these tests that a module imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ImportFrom):
            continue
        if node.level:
            base = path.parents[node.level - 1]
        elif node.module and node.module.split(".")[0] == "support":
            base = TESTS
        else:
            continue
        place = base.joinpath(*(node.module or "").split("."))
        candidates = [place, *(place / name.name for name in node.names)]
        yield from (file for file in (c.with_suffix(".py") for c in candidates) if file.exists())


def files() -> list[Path]:
    """All that the equipment is made of: sources, emulator, and every module that its tests import."""
    kernels = ROOT / "src" / "kernels"
    found = {*(kernels / "cuda" / "src").glob("*.cu*"), *(kernels / "ops").glob("*.cuh")}
    found |= {p for p in (TESTS / "cuda" / "emulator").iterdir() if p.suffix in (".h", ".cuh", ".cpp")}
    pending = marked()
    while pending:
        path = pending.pop()
        if path not in found:
            found.add(path)
            pending += _imported(path)
    return sorted(found)


def digest() -> str:
    """Of all files by name, generated headers, and the torch whose compilers make machine code."""
    from oxidion import _oxidion

    content = hashlib.sha256()
    pins = re.findall(r"^TORCH \?= .*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    texts = [text for path in files() for text in (str(path.relative_to(ROOT)), path.read_text())]
    generated = [text for pair in sorted(_oxidion.generated_headers().items()) for text in pair]
    for part in (*pins, *generated, *texts):
        content.update(len(part.encode()).to_bytes(8, "little") + part.encode())
    return content.hexdigest()


def recorded() -> str:
    """The digest at the last green run; nothing if there was none."""
    return RECORD.read_text().split()[0] if RECORD.exists() else ""


def record(report: Path) -> None:
    """Writes the digest of the files as they are, with the number of tests of a JUnit report.

    Raises:
        SystemExit: if there were none, or one of them did not pass.
    """
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for suite in ElementTree.parse(report).iter("testsuite"):
        for kind in counts:
            counts[kind] += int(suite.get(kind, 0))
    if not counts["tests"] or counts["failures"] or counts["errors"] or counts["skipped"]:
        raise SystemExit(f"{report}: expected that all tests passed, got {counts}: nothing is recorded")
    RECORD.write_text(f"{digest()}  {counts['tests']} tests passed\n")


def left_out() -> str:
    """What ``make test`` adds to its choice of tests."""
    return LEFT_OUT if digest() == recorded() else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, metavar="REPORT")
    report = parser.parse_args().record
    if report:
        record(report)
    else:
        print(left_out())
