"""Weights whose norm is kept have to have one: what ranks say of zeros that each has a part of."""

from __future__ import annotations

import pytest

from . import zero_weights
from .resuming import Groups


@pytest.mark.parametrize("name", ["Muon", "SOAP", "AdamW", "Dion"])
def test_shards_of_zeros_are_refused_before_a_step(groups: Groups, name: str) -> None:
    assert all(groups[2].run(zero_weights.refused, name))
