"""Limits on the lengths of files, and names that say nothing."""

from __future__ import annotations

import re
from pathlib import Path

from .sources import ROOT, RUST, python_files, relative, rust_files

VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def lines(path: Path) -> int:
    """Number of lines of a file."""
    return len(path.read_text().splitlines())


SIZES = [
    *((file, 800) for file in [*rust_files(), *python_files("python", "tests", "benchmarks", "examples")]),
    (RUST / "lib.rs", 80),
]
"""Limits for which no concept has to be split: lints bound functions."""


def test_the_table_of_sizes_covers_every_kind_of_file() -> None:
    covered = [relative(file) for file, _ in SIZES]
    for folder in (
        "src/algorithm",
        "src/kernels",
        "python/oxidion",
        "python/oxidion/optim",
        "tests",
        "benchmarks",
    ):
        assert any(name.startswith(folder + "/") for name in covered), folder


def test_no_file_is_longer_than_its_limit() -> None:
    long = [
        f"{relative(path)} has {count} lines, {limit} at most"
        for path, limit in SIZES
        if (count := lines(path)) > limit
    ]
    assert not long, "\n".join(long)


def test_functions_are_bounded_by_lints() -> None:
    clippy = (ROOT / "clippy.toml").read_text()
    assert "too-many-lines-threshold = 80" in clippy
    assert "cognitive-complexity-threshold = 20" in clippy
    assert 'cognitive_complexity = "warn"' in (ROOT / "Cargo.toml").read_text()
    assert "max-complexity = 12" in (ROOT / "pyproject.toml").read_text()


def test_no_module_has_a_name_that_says_nothing() -> None:
    files = rust_files() + python_files("python", "tests", "benchmarks", "examples")
    assert files
    vague = [relative(file) for file in files if VAGUE & {*file.parts[-2:-1], *re.split(r"[_.]", file.name)}]
    assert not vague
