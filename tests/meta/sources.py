"""The source files of the checkout, and Rust text without what only a reader sees."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUST = ROOT / "src"
PACKAGE = ROOT / "python" / "oxidion"

_NOT_CODE = re.compile(
    r"""//[^\n]*(?:\n[ \t]*//[^\n]*)*  # line comments
    | /\*.*?\*/               # block comment
    | \bb?r(\#*)".*?"\1       # raw string
    | \bb?"(?:\\.|[^"\\])*"   # string after a prefix
    | "(?:\\.|[^"\\])*"       # string
    | '(?:\\.|[^'\\])'        # character""",
    re.DOTALL | re.VERBOSE,
)
_TEST_MODULE = re.compile(
    r"^#\[cfg\(test\)\]\s+(?:#\[[^\n]*\]\s+)*mod \w+ \{.*?^\}\n?", re.DOTALL | re.MULTILINE
)


def rust_files(*, tests: bool = True) -> list[Path]:
    """Rust files below ``src``; without ``tests``, files that hold only unit tests are left out."""
    files = sorted(RUST.rglob("*.rs"))
    return files if tests else [file for file in files if not file.stem.endswith("tests")]


def python_files(*folders: str) -> list[Path]:
    """Python files and stubs below the folders of the checkout."""
    found = (file for folder in folders for file in (ROOT / folder).rglob("*.py*"))
    return sorted(file for file in found if file.suffix in {".py", ".pyi"})


def relative(path: Path) -> str:
    """Path from the root of the checkout."""
    return path.relative_to(ROOT).as_posix()


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", " ", match.group())


def rust_code(text: str) -> str:
    """Rust without comments and literals, line by line as it was."""
    return _NOT_CODE.sub(_blank, text)


def rust_texts(text: str) -> Iterator[tuple[int, str]]:
    """Comments and literals of Rust, each in one line, with the numbers of the lines where they begin."""
    for match in _NOT_CODE.finditer(text):
        words = re.sub(r"^\s*//[/!]?|\\$", "", match.group(), flags=re.MULTILINE)
        yield text.count("\n", 0, match.start()) + 1, " ".join(words.split())


def without_unit_tests(text: str) -> str:
    """Rust without its ``#[cfg(test)] mod tests { ... }``, line by line as it was."""
    return _TEST_MODULE.sub(_blank, text)


def numbered(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers from 1."""
    return enumerate(text.splitlines(), start=1)


def names_of_tests() -> Iterator[tuple[str, str]]:
    """Names of tests with the files that have them, without those that are torch's own."""
    for file in python_files("tests"):
        if not relative(file).startswith("tests/conformance/"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    yield relative(file), node.name
