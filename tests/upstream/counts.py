"""Counts of the suites of others: recorded by a run, shown by ``README.md`` of this folder."""

from __future__ import annotations

import fcntl
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("counts.json")
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- suites: begin -->", "<!-- suites: end -->"
HEAD = ("suite", "commit", "tests", "passed", "failed", "skipped")


class Counts(NamedTuple):
    """Outcomes of a suite.

    Attributes:
        commit: of the checkout.
        passed: how many tests passed.
        skipped: how many were skipped.
        failed: names of the tests that failed.
    """

    commit: str
    passed: int
    skipped: int
    failed: list[str]

    @property
    def tests(self) -> int:
        """How many tests ran or were skipped."""
        return self.passed + self.skipped + len(self.failed)


def counted(commit: str, outcomes: Mapping[str, str]) -> Counts:
    """Counts of outcomes (passed, skipped, failed) by the names of tests."""
    kinds = list(outcomes.values())
    failed = sorted(test for test, outcome in outcomes.items() if outcome == "failed")
    return Counts(commit, kinds.count("passed"), kinds.count("skipped"), failed)


def read(text: str) -> dict[str, Counts]:
    """The counts of a file, by suite."""
    return {name: Counts(**entry) for name, entry in json.loads(text).items()}


def dumped(counts: Mapping[str, Counts]) -> str:
    """Text of a file with the counts."""
    entries = {name: counts[name]._asdict() for name in sorted(counts)}
    return json.dumps(entries, indent=2) + "\n"


def table(counts: Mapping[str, Counts]) -> str:
    """Table of the page, in Markdown."""
    rows = [HEAD, tuple("---" for _ in HEAD)]
    for name in sorted(counts):
        suite = counts[name]
        figures = suite.tests, suite.passed, len(suite.failed), suite.skipped
        rows.append((name, suite.commit, *map(str, figures)))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def written(page: str, counts: Mapping[str, Counts]) -> str:
    """Text of a page with the table of the counts between the marks."""
    made, times = re.subn(
        rf"({BEGIN}\n).*?({END})", lambda marks: marks[1] + table(counts) + marks[2], page, flags=re.DOTALL
    )
    if times != 1:
        raise ValueError(f"the page has {times} pairs of marks `{BEGIN}`, one is expected")
    return made


def record(name: str, suite: Counts, file: Path = FILE, page: Path = PAGE) -> None:
    """Writes the counts of a suite to the file and to the page, one process at a time."""
    with file.open("r+", encoding="utf-8") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        counts = read(locked.read()) | {name: suite}
        locked.seek(0)
        locked.truncate()
        locked.write(dumped(counts))
        page.write_text(written(page.read_text("utf-8"), counts), "utf-8")
