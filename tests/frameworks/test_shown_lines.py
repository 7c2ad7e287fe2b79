"""Pages show lines of scripts that the tests run, and those of ``docs/frameworks`` all stand in the index."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "frameworks"
COMING_FROM = ROOT / "docs" / "coming-from"
INDEX = FOLDER / "index.md"
SHOWN = re.compile(
    r"^<!-- not run: lines of (?P<script>examples/\S+\.py), [^\n]*-->\n```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
BLOCKS = [
    pytest.param(ROOT / block["script"], block["code"], id=f"{page.stem}-{number}")
    for page in sorted([*FOLDER.glob("*.md"), *COMING_FROM.glob("*.md")])
    for number, block in enumerate(SHOWN.finditer(page.read_text()))
]
SCRIPTS = sorted((ROOT / "examples" / "frameworks").glob("with_*.py"))


def contains(script: str, code: str) -> bool:
    """Whether lines stand in a script one after the other, at any indentation."""
    lines, wanted = script.splitlines(), code.splitlines()
    windows = (lines[at : at + len(wanted)] for at in range(len(lines)))
    return any(textwrap.dedent("\n".join(window)).splitlines() == wanted for window in windows)


def test_lines_are_found_at_any_indentation_and_only_in_their_order() -> None:
    script = "def f():\n    if a:\n        b = 1\n\n        c = 2\n"
    assert contains(script, "b = 1\n\nc = 2\n")
    assert contains(script, "if a:\n    b = 1\n")
    assert not contains(script, "if a:\nb = 1\n")
    assert not contains(script, "c = 2\nb = 1\n")
    assert not contains(script, "b = 12\n")


@pytest.mark.parametrize(("script", "code"), BLOCKS)
def test_block_of_a_page_is_part_of_the_script_that_it_names(script: Path, code: str) -> None:
    assert contains(script.read_text(), code)


def test_every_script_of_a_framework_is_shown_and_named_as_a_command() -> None:
    assert len(SCRIPTS) >= 7
    shown = {param.values[0] for param in BLOCKS}
    assert [script.name for script in SCRIPTS if script not in shown] == []
    text = "".join(page.read_text() for page in FOLDER.glob("*.md"))
    assert [script.name for script in SCRIPTS if f"examples/frameworks/{script.name}" not in text] == []


def test_every_page_of_a_framework_has_a_row_in_the_index() -> None:
    rows = re.findall(r"^\| (\S.*?) \| .+ \| .+ \|$", INDEX.read_text(), re.MULTILINE)
    assert len(rows) > 6
    pages = [page.stem for page in FOLDER.glob("*.md") if page != INDEX]
    assert [page for page in pages if not any(page in row.lower() for row in rows)] == []
    linked = [page for row in rows for page in re.findall(r"\]\((\w+)\.md\)", row)]
    assert len(set(linked)) == len(linked) >= 6


def test_every_command_of_the_index_names_a_script_that_exists() -> None:
    scripts = re.findall(r"`[^`]*?(examples/\S+\.py)[^`]*`", INDEX.read_text())
    assert len(scripts) > 8
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
