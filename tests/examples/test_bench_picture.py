"""The picture of a benchmark: which races it shows, and that a page can hold it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_bench import BENCHMARKS, race, result

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def test_picture_has_a_bar_a_headline_against_the_fastest_of_the_same_algorithm() -> None:
    from headline import HEADLINE, machine_line, rows
    from workloads import named

    assert all(family in named(workload).families for workload, family, _ in HEADLINE)
    assert len(HEADLINE) <= 12
    peers = {"torch.optim.AdamW fused": [3.0] * 6, "dion adamw group eager": [4.0] * 6}
    one = race([1.0] * 6, {**peers, "lion_pytorch.Lion": [0.5] * 6, "oxidion.AdamW 8-bit": [0.5] * 6})
    two = race([1.0] * 6, {"torch.optim.AdamW fused": [9.0] * 6}, threads=2)
    both = result(two, {**one, "workload": "mixed"}, one)
    (row,) = rows(both)  # "mixed" has no bar, and two threads none where one was measured
    assert (row.label, row.peer, row.median) == (
        "AdamW, 4000 vectors of 768",
        "torch.optim.AdamW, fused",
        3.0,
    )
    assert machine_line(both) == "x, 1 thread of 2 cores, torch 2.11, 2026-11-21"
    (row,) = rows(result({**one, "workload": "mixed"}))
    assert row.label == "adamw, mixed"
    assert rows(result()) == []


@pytest.mark.parametrize("name", ["step", "zen5"])
def test_picture_of_a_recorded_result_is_legible_on_light_and_dark_pages(name: str, tmp_path: Path) -> None:
    from matplotlib import image

    from charts import plot_ratios

    recorded = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    plot_ratios(recorded, tmp_path / "bars.png")
    pixels = image.imread(tmp_path / "bars.png")
    height, width, _ = pixels.shape
    assert width >= 1200  # sharp at 800
    assert height < width  # fits a screen
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 1.0).all()  # white, and not clear
    assert (pixels[:, -4:, :3] == 1.0).all(), "a label runs out of the picture"
