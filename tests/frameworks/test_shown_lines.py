"""Pages show lines of scripts that the tests run, and the page of frameworks has a row for each script."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "frameworks.md"
COMING_FROM = ROOT / "docs" / "coming-from"
SCRIPTS = ROOT / "examples" / "frameworks"
SHOWN = re.compile(
    r"^<!-- not run: lines of (?P<script>examples/\S+\.py), [^\n]*-->\n```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
BLOCKS = [
    pytest.param(ROOT / block["script"], block["code"], id=f"{page.stem}-{number}")
    for page in sorted(COMING_FROM.glob("*.md"))
    for number, block in enumerate(SHOWN.finditer(page.read_text()))
]


def contains(script: str, code: str) -> bool:
    """Whether lines stand in a script one after the other, at any indentation."""
    lines, wanted = script.splitlines(), code.splitlines()
    windows = (lines[at : at + len(wanted)] for at in range(len(lines)))
    return any(textwrap.dedent("\n".join(window)).splitlines() == wanted for window in windows)


def test_lines_are_found_at_any_indentation_but_only_in_order() -> None:
    script = "def f():\n    if a:\n        b = 1\n\n        c = 2\n"
    assert contains(script, "b = 1\n\nc = 2\n")
    assert contains(script, "if a:\n    b = 1\n")
    assert not contains(script, "if a:\nb = 1\n")
    assert not contains(script, "c = 2\nb = 1\n")
    assert not contains(script, "b = 12\n")


@pytest.mark.parametrize(("script", "code"), BLOCKS)
def test_block_of_a_page_is_part_of_the_script_that_it_names(script: Path, code: str) -> None:
    assert contains(script.read_text(), code)


def test_scripts_and_rows_of_the_page_are_the_same() -> None:
    scripts = sorted(path.name for path in SCRIPTS.glob("with_*"))
    rows = re.findall(r"\| `(with_\w+\.\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == scripts
    assert len(scripts) > 15


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("with_*.py")), ids=lambda path: path.stem)
def test_script_begins_with_its_command_and_what_to_look_out_for(script: Path) -> None:
    doc = ast.get_docstring(ast.parse(script.read_text()))
    assert doc is not None
    assert f"    python examples/frameworks/{script.name}" in doc
    assert re.search(r"^- |^Run with", doc, re.MULTILINE)
