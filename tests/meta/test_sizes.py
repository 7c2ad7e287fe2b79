"""How long a file may be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .sources import PACKAGE, RUST, python_files, relative, rust_code, rust_files, without_unit_tests

VAGUE = {"utils", "util", "helpers", "helper", "common", "misc"}


def lines(path: Path) -> int:
    """Number of lines of a file."""
    return len(path.read_text().splitlines())


def code_lines(path: Path) -> int:
    """Number of lines of a Rust file that hold code outside its unit tests."""
    return sum(bool(line.strip()) for line in without_unit_tests(rust_code(path.read_text())).splitlines())


SIZES = [
    *((file, 400, lines) for file in rust_files()),
    *((file, 300, lines) for file in python_files("python", "tests", "benchmarks", "examples")),
    *((file, 120, lines) for file in sorted((PACKAGE / "optim").glob("*.py"))),
    *((file, 200, code_lines) for file in sorted((RUST / "algorithm").glob("*.rs"))),
    (RUST / "lib.rs", 80, lines),
    (PACKAGE / "_core" / "driver.py", 60, lines),
    (PACKAGE / "_oxidion.pyi", 120, lines),
]


def test_the_table_of_sizes_covers_every_kind_of_file() -> None:
    covered = [relative(file) for file, _, _ in SIZES]
    for folder in (
        "src/algorithm",
        "src/kernels",
        "python/oxidion",
        "python/oxidion/optim",
        "tests",
        "benchmarks",
    ):
        assert any(name.startswith(folder + "/") for name in covered), folder


@pytest.mark.parametrize(
    ("path", "limit", "count"), SIZES, ids=[f"{relative(file)}-{limit}" for file, limit, _ in SIZES]
)
def test_file_is_no_longer_than_its_limit(path: Path, limit: int, count: object) -> None:
    assert callable(count)
    assert count(path) <= limit


def test_no_module_has_a_name_that_says_nothing() -> None:
    files = rust_files() + python_files("python", "tests", "benchmarks", "examples")
    assert files
    vague = [relative(file) for file in files if VAGUE & {*file.parts[-2:-1], *re.split(r"[_.]", file.name)}]
    assert not vague
