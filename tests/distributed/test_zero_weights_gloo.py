"""Weights whose norm is kept have to have one: what ranks say of zeros that each has a part of."""

from __future__ import annotations

import pytest

from . import zero_weights
from .resuming import Groups


@pytest.mark.parametrize("name", ["Muon", "SOAP", "AdamW", "Dion"])
def test_shards_of_zeros_are_refused_before_a_step(groups: Groups, name: str) -> None:
    assert all(groups[2].run(zero_weights.refused, name))


@pytest.mark.parametrize("is_zero", [False, True], ids=["all-there", "one-of-zeros"])
def test_ranks_with_experts_of_their_own_agree(groups: Groups, is_zero: bool) -> None:
    said = groups[4].run(zero_weights.of_an_expert, is_zero)
    if is_zero:
        assert all("all zero" in text for text in said[:2])
        assert all("another rank" in text for text in said[2:])
    else:
        assert said == [""] * 4


@pytest.mark.parametrize("init_state", [False, True])
def test_zeros_are_refused_at_every_step(groups: Groups, init_state: bool) -> None:
    for said in groups[2].run(zero_weights.again, init_state):
        assert len(said) == 2
        assert all(text.startswith("ValueError") and "all zero" in text for text in said)
