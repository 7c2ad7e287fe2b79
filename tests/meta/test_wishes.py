"""The page of wishes: each row has an answer, and the tests that it names are there."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from .sources import ROOT

PAGE = (ROOT / "docs" / "wishes.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not re.match(r"\| *(-|\| wish|wish)", line)
]
#: Wishes that are numbered, by how often and how dearly they are wished.
NUMBERED = 25


@cache
def functions_of(file: str) -> frozenset[str]:
    """The test functions of a file."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def test_every_wish_of_the_list_has_a_row() -> None:
    numbers = [int(row[0]) for row in ROWS if row[0].isdigit()]
    assert numbers == list(range(1, NUMBERED + 1))
    assert len(ROWS) >= NUMBERED + 8


@pytest.mark.parametrize("row", ROWS, ids=[f"{at}-{row[-3][:30]}" for at, row in enumerate(ROWS)])
def test_wish_is_a_sentence_with_an_answer_and_tests_that_are_there(row: list[str]) -> None:
    wish, answer, shown = row[-3:]
    assert wish.endswith((".", "?"))
    assert answer.endswith(".")
    found = TEST.findall(shown)
    assert found, "no test shows it"
    assert [
        name for file, name in found if not name.startswith("test_") or name not in functions_of(file)
    ] == []


def test_a_test_that_is_not_there_would_be_found() -> None:
    assert "test_every_wish_of_the_list_has_a_row" in functions_of("tests/meta/test_wishes.py")
    assert "test_that_is_not_there" not in functions_of("tests/meta/test_wishes.py")
    assert all("::" not in TEST.sub("", row[-1]) for row in ROWS)
