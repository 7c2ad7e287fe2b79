"""Promises of tests/meta/README.md that no other test holds: lines, comments, names, the changelog."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from .sources import ROOT, names_of_tests, numbered, python_files, relative, rust_files

WIDTH = 160
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
#: Words that no first sentence of a comment begins with: the thing that it is about comes first.
VAGUE = {"What", "Where", "Whether", "How", "That", "Those"}
SETTINGS = "".join((ROOT / name).read_text() for name in ("Cargo.toml", "clippy.toml", "pyproject.toml"))
HELD = re.compile(r"^\| .+ \| (.*) \|$", re.MULTILINE)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page without code, tables, and what a program writes between marks."""
    fenced = written = False
    for number, line in numbered(text):
        fenced ^= line.startswith("```")
        if re.match(r"<!-- .*: (begin|end) -->", line):
            written = "begin" in line
        if not (fenced or written or line.startswith("|")):
            yield number, line


def too_long(text: str) -> list[int]:
    """Numbers of the lines that are too long; the address of a link counts nothing."""
    return [n for n, line in prose(text) if len(re.sub(r"\]\([^)]*\)", "]", line)) > WIDTH]


def test_lines_too_long_are_found_in_prose_only() -> None:
    long = "x" * (WIDTH + 1)
    assert too_long(f"{long}\n| {long} |\n```\n{long}\n```\n[a]({long})\n<!-- t: begin -->\n{long}") == [1]
    assert too_long(f"<!-- t: begin -->\n<!-- t: end -->\n{long}") == [3]


@pytest.mark.parametrize("name", [relative(page) for page in PAGES])
def test_page_has_no_line_that_is_too_long(name: str) -> None:
    found = too_long((ROOT / name).read_text())
    assert found == []


def slugs(text: str) -> set[str]:
    """Anchors of the headings of a page."""
    titles = [line.lstrip("#").strip() for _, line in prose(text) if line.startswith("#")]
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\(.*?\)", "", title)).lower().replace(" ", "-") for title in titles
    }


def test_link_leads_to_a_page_and_to_a_heading_of_it() -> None:
    assert slugs("# A `b`, c-d!\n```\n# e\n```\n## [F](g.md)") == {"a-b-c-d", "f"}
    links = [
        (page, target, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text())
    ]
    assert sum(bool(anchor) for _, _, anchor in links) > 20
    wrong = []
    for page, target, anchor in links:
        file = page.parent / target if target else page
        if not file.exists() or (anchor and anchor not in slugs(file.read_text())):
            wrong.append(f"{relative(page)}: {target}#{anchor}")
    assert wrong == []


def test_tests_that_pages_name_exist() -> None:
    named = {
        (relative(page), name) for page in PAGES for name in re.findall(r"tests/[\w/]+\.py", page.read_text())
    }
    assert len(named) > 20
    assert [f"{page}: {name}" for page, name in sorted(named) if not (ROOT / name).exists()] == []


def test_readme_fits_two_screens_with_the_first_things_first() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 80
    first = "\n".join(lines[:40])
    for word in ("Optimizers for PyTorch", "Linux x86-64", "CUDA", "torch", "pip install ."):
        assert word in first
    assert "make demo" in "\n".join(lines)
    assert "make test" in "\n".join(lines)


def openings(text: str) -> Iterator[tuple[int, str]]:
    """First lines of the doc comments of Rust, with their numbers."""
    last = ""
    for number, line in numbered(text):
        marker, _, words = line.strip().partition(" ")
        if marker in {"///", "//!"} and marker != last:
            yield number, words
        last = marker if marker in {"///", "//!"} else ""


def is_vague(sentence: str) -> bool:
    """A sentence that begins with one of the words."""
    first = re.match(r"\w*", sentence)
    return first is not None and first[0] in VAGUE


def test_vague_sentences_are_found_only_where_comments_begin() -> None:
    text = "//! What a.\n//! How.\n\n/// A b.\n/// Where c.\nd\n    /// Whether e.\n// How f.\n/// Whatever."
    assert [number for number, words in openings(text) if is_vague(words)] == [1, 7]


def test_first_sentence_of_rust_comments_begins_with_its_subject() -> None:
    comments = [
        (f"{relative(file)}:{number}", words)
        for file in rust_files()
        for number, words in openings(file.read_text())
    ]
    assert len(comments) > 2000
    assert [f"{where}: {words}" for where, words in comments if is_vague(words)] == []


def test_first_sentence_of_a_docstring_begins_with_its_subject() -> None:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [
        (relative(file), text.strip())
        for file in python_files("python/oxidion")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, documented) and (text := ast.get_docstring(node))
    ]
    assert len(docstrings) > 300
    assert [f"{file}: {text.splitlines()[0]}" for file, text in docstrings if is_vague(text)] == []


def test_name_of_a_test_has_a_subject_and_an_outcome() -> None:
    names = [(file, name) for file, name in names_of_tests() if file.rpartition("/")[2].startswith("test_")]
    assert len(names) > 500
    assert [f"{file}: {name}" for file, name in names if name.count("_") < 2] == []


def test_what_holds_a_convention_exists() -> None:
    cells = HELD.findall((ROOT / "tests" / "meta" / "README.md").read_text())
    holders = [holder for cell in cells for holder in re.findall(r"`([^`]+)`", cell)]
    assert len(holders) > 20
    assert [h for h in holders if not (ROOT / h).exists() and h not in SETTINGS] == []


def test_changelog_has_sections_unreleased_and_of_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    version = re.search(r'^version = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert version
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(version[1])}\] - \d{{4}}-\d\d-\d\d", headings[1])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Numerics"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds
