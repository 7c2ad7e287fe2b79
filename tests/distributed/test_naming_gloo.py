"""Names of parameters, and of the mesh, over gloo: numbers and arguments are the same on every layout."""

from __future__ import annotations

from typing import Any

import pytest

from support.workers import Workers

from . import naming

RANDOM: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Dion", {"rank_fraction": 0.25}),
    ("GaLoreAdamW", {"rank": 2, "svd": "random", "update_proj_gap": 2, "state_bits": 32}),
    ("APOLLOAdamW", {"rank": 4, "update_proj_gap": 2}),
)
EVERY: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("Dion", {"rank_fraction": 0.25}, True),
    ("Muon", {}, True),
    ("NorMuon", {}, True),
    ("Dion2", {}, True),
    ("NorDion2", {}, True),
    ("AdamW", {}, False),
    ("Lion", {}, False),
    ("Lamb", {}, False),
    ("Adafactor", {"relative_step": False}, False),
    ("CAME", {}, False),
    ("AdEMAMix", {}, False),
    ("GaLoreAdamW", {"rank": 4, "state_bits": 32}, True),
    ("APOLLOAdamW", {"rank": 4}, False),
    ("APOLLOMini", {}, False),
)
every_class = pytest.mark.parametrize(("name", "keys", "shares"), EVERY, ids=[name for name, *_ in EVERY])


# float64: only the order of sums differs between layouts.
@pytest.mark.parametrize(("name", "keys"), RANDOM, ids=[name for name, _ in RANDOM])
def test_single_parameter_optimizers_on_two_ranks_equal_one(
    two: Workers, name: str, keys: dict[str, Any]
) -> None:
    assert max(two.run(naming.one_by_one, name, keys)) <= 1e-12


@every_class
def test_every_class_takes_the_mesh_of_copies_under_one_name(
    two: Workers, name: str, keys: dict[str, Any], shares: bool
) -> None:
    how = "group" if name in {"Dion", "NorMuon", "Lamb"} else "mesh"
    for far, shared in two.run(naming.copies, name, keys, how):
        assert far <= 1e-12
        assert shared == shares


@every_class
def test_every_class_refuses_copies_under_the_mesh_that_differ(
    two: Workers, name: str, keys: dict[str, Any], shares: bool
) -> None:
    for error, text in two.run(naming.copies_that_differ, name, keys):
        assert error == "LayoutError"
        assert "w: values should be the same on the ranks [0, 1], and differ" in text
        assert "without distributed_mesh;" in text


def test_two_words_for_one_mesh_have_to_name_the_same_ranks(four: Workers) -> None:
    for pending, (error, text) in four.run(naming.two_words):
        assert pending == [True, False, False]
        assert error == "ValueError"
        assert "distributed_mesh and replicate_mesh are two words for one mesh" in text
        assert "leave one of them out" in text
