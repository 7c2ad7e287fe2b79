"""QK-clip on real processes over gloo."""

from __future__ import annotations

import math

import pytest

from support.workers import Workers

from . import clipping


@pytest.mark.parametrize(
    ("axes", "places", "reduce_over"),
    [
        ({"fs": 2}, "0", ""),
        ({"fs": 2}, "1", ""),
        ({"fs": 2}, "R", ""),
        ({"fs": 4}, "0", ""),
        ({"fs": 4}, "1", "mesh"),
        ({"dp": 2, "fs": 2}, "R0", ""),
        ({"fs": 2, "tp": 2}, "00", ""),
        ({"fs": 2, "tp": 2}, "10", ""),
        ({"fs": 2, "tp": 2}, "01", "groups"),
        ({"dp": 2}, "", "mesh"),
        ({"dp": 2, "pp": 2}, "", "mesh"),
        ({"dp": 2, "pp": 2}, "", "groups"),
    ],
)
def test_clip_on_any_layout_equals_one_process_bit_by_bit(
    two: Workers, four: Workers, axes: dict[str, int], places: str, reduce_over: str
) -> None:
    group = two if math.prod(axes.values()) == 2 else four
    for gap, equal, versions in group.run(clipping.clip_on_a_layout, axes, places, reduce_over):
        assert equal, f"off by {gap:.1e}"
        assert versions >= 1


@pytest.mark.parametrize("kind", ["fsdp", "tp", "both"])
def test_clip_of_a_wrapped_model_equals_one_process(two: Workers, four: Workers, kind: str) -> None:
    for sharded, gap in (four if kind == "both" else two).run(clipping.clip_a_wrapped_model, kind):
        assert sharded
        assert gap < 1e-7  # weights below 1, one float32 product on each side


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_maximum_on_one_rank_leaves_the_head_on_all(two: Workers, value: float) -> None:
    for gammas, kept in two.run(clipping.clip_with_a_bad_rank, value):
        assert gammas == [1.0, 0.25]
        assert kept


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("axes", [{"dp": 2}, {"dp": 2, "fs": 2}], ids=["line", "plane"])
def test_ranks_with_other_layers_all_raise_and_nothing_changes(
    two: Workers, four: Workers, axes: dict[str, int], first: int
) -> None:
    group = two if len(axes) == 1 else four
    for name, text, unchanged in group.run(clipping.different_layers, axes, first):
        assert name == "PlanMismatch"
        assert f"heads, others {first} to 2" in text
        assert unchanged
