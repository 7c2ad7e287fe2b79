"""The rows of ``pairs.py`` have every pair of features, whoever chooses them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oxidion._reference.registry import REFERENCE
from support import pairwise
from support.cases import ALL_CASES
from support.layouts import SETTINGS, WIDE

from .pairs import (
    CHOSEN,
    FLOAT32_CASES,
    PAIRS,
    ROWS,
    TRAILING,
    WIDE_CHOSEN,
    WIDE_ROWS,
    kind,
    options,
    too_deep,
    traits,
    worth,
)


def test_every_case_meets_every_setting_in_the_full_product() -> None:
    met = {(case.name, setting.name) for case, setting in PAIRS}
    wanted = {(c.name, s.name) for c in ALL_CASES for s in SETTINGS if worth(c, s)}
    # A kernel is cut along its third dimension there.
    left_out = {(name, "experts2-tp2") for name in TRAILING}
    # Dimensions that are one side of a matrix can be cut along the first of them alone.
    merged = {case.name: case for case in ALL_CASES if "merged" in case.name}
    left_out |= {(c.name, s.name) for c in merged.values() for s in SETTINGS if too_deep(c, s)}
    assert wanted - met == left_out & wanted
    for name in merged:
        assert {s.name for s in SETTINGS if (name, s.name) in met} >= {"fsdp4-dim0"}
    assert {case.algorithm for case, _ in PAIRS} == set(REFERENCE)
    assert len(PAIRS) > 2000
    assert len(ROWS) == len(PAIRS) + len(FLOAT32_CASES) * sum(s.outer is None for s in SETTINGS)


def test_chosen_rows_have_every_pair_of_features() -> None:
    assert {case.name for case, *_ in CHOSEN} == {case.name for case in ALL_CASES}
    chosen = [(case.algorithm, setting.name) for case, setting, _ in CHOSEN]
    assert set(chosen) == {(case.algorithm, setting.name) for case, setting, _ in ROWS}
    assert len(set(chosen)) == len(REFERENCE) * len(SETTINGS)
    met, wanted = (
        {
            pair
            for case, setting, _ in rows
            for pair in itertools.product(sorted(options(case)), sorted(traits(setting)))
        }
        for rows in (CHOSEN, ROWS)
    )
    assert len(wanted) > 2000
    assert met == wanted
    for dtype in ("float64", "float32"):
        met, wanted = (
            {
                feature
                for case, setting, own in rows
                if own == dtype
                for feature in (setting.name, case.algorithm, *options(case))
            }
            for rows in (CHOSEN, ROWS)
        )
        assert len(wanted) > 30
        assert met == wanted
    assert len(CHOSEN) < len(ROWS) / 4


def test_traits_tell_all_kinds_of_layouts_apart() -> None:
    by_kind: dict[str, set[str]] = {}
    for setting in SETTINGS:
        for trait in traits(setting):
            by_kind.setdefault(trait.partition("=")[0], set()).add(trait.partition("=")[2])
    assert by_kind == {
        "cuts": {"", "S0", "S1", "S0+S1", "S0+T0", "S0+S2", "S0+S0"},
        "replicas": {"none", "averaged", "compressed"},
        "named": {"None,None", "fs,None", "fs,tp"},
        "shards": {"even", "uneven", "empty"},
        "axes": {"1", "2", "3"},
    }


def test_every_kind_of_algorithm_meets_every_wide_layout() -> None:
    assert {case.name for case, _ in WIDE_CHOSEN} == {case.name for case, _ in WIDE_ROWS}
    met = {(kind(case.algorithm), setting.name) for case, setting in WIDE_CHOSEN}
    assert met == {(k, s.name) for k in ("matrix", "low rank", "basis", "sums", "elementwise") for s in WIDE}
    assert {kind(name) for name in REFERENCE} == {"matrix", "low rank", "basis", "sums", "elementwise"}


FACTORS = [range(5), range(4), range(3), range(3)]
TABLE = list(itertools.product(*FACTORS))


def pairs_of(row: tuple[int, ...]) -> set[object]:
    return set(itertools.combinations(enumerate(row), 2))


def test_generator_has_every_pair_of_a_product_in_few_rows() -> None:
    chosen = pairwise.covering(TABLE, pairs_of)
    for (i, one), (k, other) in itertools.combinations(enumerate(FACTORS), 2):
        for a, b in itertools.product(one, other):
            assert any(row[i] == a and row[k] == b for row in chosen)
    assert 5 * 4 <= len(chosen) <= 30 < len(TABLE)
    assert len(set(chosen)) == len(chosen)


@pytest.mark.parametrize("lonely", [0, 17, len(TABLE) - 1])
def test_generator_takes_a_row_that_alone_has_something(lonely: int) -> None:
    chosen = pairwise.covering(
        TABLE, lambda row: {*pairs_of(row), *({"own"} if row == TABLE[lonely] else ())}
    )
    assert TABLE[lonely] in chosen


def test_generator_takes_nothing_of_nothing() -> None:
    assert pairwise.covering([], pairs_of) == []
    assert pairwise.covering([(1,)], pairs_of) == []


CHOICE = """
import itertools
from support.pairwise import covering
table = list(itertools.product("abcde", "fghi", "klm", "nop"))
print(["".join(row) for row in covering(table, lambda row: set(itertools.combinations(row, 2)))])
"""


def test_choice_does_not_depend_on_the_order_of_a_set() -> None:
    """Processes that share a run have to collect the same tests."""
    tests = str(Path(__file__).resolve().parents[1])
    said = {
        subprocess.run(
            [sys.executable, "-c", CHOICE],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": tests, "PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2, 3)
    }
    assert len(said) == 1
