"""What ``make quick`` runs for a change (``tests/quick.py``), and that no rule of it is out of date."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import quick

from .sources import ROOT

FILES = [
    str(path.relative_to(ROOT))
    for folder in ("src", "python", "tests", "docs", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.*"))
]


@pytest.mark.parametrize(("pattern", "places"), quick.RULES, ids=[pattern for pattern, _ in quick.RULES])
def test_rule_matches_files_and_leads_to_tests(pattern: str, places: tuple[str, ...]) -> None:
    matches = [match for match in (re.fullmatch(pattern, name) for name in FILES) if match]
    assert matches
    for place in places:
        assert any([*ROOT.glob(place.format(match[1]))] for match in matches), place


@pytest.mark.parametrize(
    ("changed", "called"),
    [
        ("tests/plan/test_schedule.py", {"tests/plan/test_schedule.py"}),
        ("src/algorithm/adamw.rs", {"tests/algorithm/test_adamw.py"}),
        ("tests/distributed/comparison.py", {"tests/distributed/test_layout_pairs.py"}),
        ("tests/support/sim_mesh.py", set()),
        ("LICENSE", set()),
    ],
)
def test_changed_file_calls_for_the_tests_that_name_it(changed: str, called: set[str]) -> None:
    found = {str(path.relative_to(ROOT)) for path in quick.called_for([changed])}
    assert found >= called
    assert all((ROOT / name).exists() for name in found)


def item(path: Path, name: str, *marks: str) -> Any:
    """A test as far as the selection looks at it."""
    return SimpleNamespace(
        path=path, name=name, get_closest_marker=lambda mark: mark if mark in marks else None
    )


CONTRACT = quick.TESTS / "contract" / "test_step.py"
DEFAULT, OTHER = "test_float64_step[lion-default-fsdp4-dim0]", "test_float64_step[lion-betas-fsdp4-dim0]"


@pytest.mark.parametrize(
    ("path", "name", "marks", "alone", "named"),
    [
        (CONTRACT, "test_a[Lion]", (), True, True),
        (CONTRACT, "test_a[Muon]", (), True, False),
        (CONTRACT, "test_a[Lion]", ("slow",), False, False),
        (CONTRACT, "test_a[Lion]", ("equipment",), False, False),
        (quick.TESTS / "algorithm" / "test_lion.py", "test_a", (), True, True),
        (quick.LAYOUTS, DEFAULT, ("slow",), True, True),
        (quick.LAYOUTS, DEFAULT.replace("lion", "muon"), (), False, False),
        (quick.LAYOUTS, OTHER, (), False, True),
        (quick.LAYOUTS, OTHER, ("slow",), False, False),
    ],
)
def test_selection_is_what_was_asked_for(
    path: Path, name: str, marks: tuple[str, ...], alone: bool, named: bool
) -> None:
    for wanted, asked in ((alone, False), (named, True)):
        selection = quick.Selection("lion", asked)
        selection.names = quick.names_of("lion")
        assert selection.wants(item(path, name, *marks)) == wanted


@pytest.mark.parametrize("name", ["adamw", "AdamW", "galore", "GaLoreAdamW", "galore_adamw"])
def test_optimizer_is_found_by_any_of_its_names(name: str) -> None:
    own = {"adamw"} if name.lower() == "adamw" else {"galoreadamw", "galore_adamw", "galore"}
    assert quick.names_of(name) == own


def test_optimizer_that_is_unknown_raises_and_names_all() -> None:
    with pytest.raises(SystemExit, match=r"ALG=sgdm: expected one of adafactor, adamw, .*normuon"):
        quick.names_of("sgdm")
