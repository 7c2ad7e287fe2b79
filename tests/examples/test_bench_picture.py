"""What a page shows of the benchmarks: the picture, the tables of figures, the bars that are missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_bench import BENCHMARKS, race, result

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def test_picture_has_a_bar_per_headline_against_the_fastest_peer() -> None:
    from gains import HEADLINE, machine_line, rows
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
def test_picture_of_a_result_is_legible_on_light_and_dark_pages(name: str, tmp_path: Path) -> None:
    from matplotlib import image

    from gains import plot

    recorded = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    plot(recorded, tmp_path / "bars.png")
    pixels = image.imread(tmp_path / "bars.png")
    height, width, _ = pixels.shape
    assert width >= 1200  # sharp at 800
    assert height < width  # fits a screen
    corners = pixels[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == 1.0).all()  # white, and not clear
    assert (pixels[:, -4:, :3] == 1.0).all(), "a label runs out of the picture"


def test_tables_of_the_pages_are_the_recorded_results() -> None:
    from gains import RECORD_PAGE, SUMMARY_PAGE, recorded, written

    assert RECORD_PAGE.read_text().count("| Muon, 1024 x 4096 | 3.43, 3.21 |") == 1
    for page in (SUMMARY_PAGE, RECORD_PAGE):
        text = page.read_text()
        assert written(text, page, recorded()) == text, "run python benchmarks/gains.py"
        with pytest.raises(SystemExit, match="must hold the lines"):
            written("", page, recorded())


def test_every_package_that_was_raced_is_in_the_table_of_peers() -> None:
    from gains import SUMMARY_PAGE

    rows = SUMMARY_PAGE.read_text().partition("<!-- peers: begin -->")[2].partition("<!-- peers: end -->")[0]
    packages = ("torch.optim", "microsoft/dion", "pytorch_optimizer", "lion_pytorch", "came_pytorch")
    for package in (*packages, "torchao", "galore_torch", "bitsandbytes"):
        assert package in rows, package


def test_page_names_every_speed_bar_that_recorded_results_miss() -> None:
    from bars import held
    from gains import MACHINES, RECORD_PAGE, recorded

    section = RECORD_PAGE.read_text().split("## Bars that are missed")[1].split("\nBars of quality")[0]
    rows = [line for line in section.splitlines() if line.startswith("|")]
    missed, unnamed = 0, []
    for name, result_of in recorded().items():
        machine = MACHINES[name].removeprefix("EPYC ").removesuffix(" without AMX")
        own = [row for row in rows if row.startswith(f"| {machine} |")]
        for what, _, least, found in held(result_of):
            if found < least:
                missed += 1
                if not any(f"{found:.2f}" in row and f"{least:g}" in row for row in own):
                    unnamed.append(f"{machine}: {what}, {found:.2f} of {least:g}")
    assert missed > 20
    assert unnamed == []
