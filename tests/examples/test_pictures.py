"""The pictures of the pages can be drawn, and are those that the script draws."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
PAGES = ("look-inside.md", "planning.md", "rank.md")
NUMBER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of new pictures."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("pictures")
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        import pictures

        pictures.draw(folder)
        yield folder
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))


def size(path: Path) -> tuple[str | None, str | None]:
    """Width and height."""
    root = ElementTree.parse(path).getroot()
    return root.get("width"), root.get("height")


def labels(path: Path) -> set[str]:
    """Texts of a picture, with # for numbers: those are measured, and differ from machine to machine.

    matplotlib draws letters as shapes and writes each text into a comment.
    """
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    elements = ElementTree.parse(path, parser).getroot().iter()
    texts = [each.text or "" for each in elements if callable(each.tag) or each.tag.endswith("}text")]
    return {" ".join(NUMBER.sub("#", text).split()) for text in texts}


def test_pictures_of_the_page_are_there_and_shown() -> None:
    text = "".join((PICTURES.parent / page).read_text() for page in PAGES)
    shown = re.findall(r"!\[[^\]]{20,}\]\(pictures/([\w-]+\.svg)\)", text)
    assert sorted(shown) == sorted(path.name for path in PICTURES.iterdir())
    assert len(shown) >= 6


def test_pictures_are_those_that_the_script_draws(drawn: Path) -> None:
    names = sorted(path.name for path in PICTURES.iterdir())
    assert sorted(path.name for path in drawn.iterdir()) == names
    for name in names:
        assert size(drawn / name) == size(PICTURES / name), name
        assert labels(drawn / name) == labels(PICTURES / name), name


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("explain", {"lr_factor", "state_bytes", "#"}),
        ("plan", {"issue", "hazards #", "whole matrices over (fs)"}),
        ("metrics", {"captured_energy", "update_rms"}),
        ("verify", {"update_error"}),
        ("metrics-steps", {"captured_energy", "error_feedback_norm", "rank_fraction=#"}),
        ("plan-plot", {"Memory of a rank", "workspace", "fs=#,tp=#"}),
        (
            "bytes-shards",
            {"Dion #/#, keep", "Dion #/#, gather", "AdamW: sends nothing"},
        ),
        ("rank-plot", {"Energy of the momentum that low ranks capture", "blocks.*.expand.weight (#)"}),
    ],
)
def test_picture_has_the_words_that_the_page_explains(name: str, wanted: set[str]) -> None:
    assert wanted <= labels(PICTURES / f"{name}.svg")
    assert (PICTURES / f"{name}.svg").stat().st_size < 100_000


def test_page_explains_every_number_of_a_picture() -> None:
    page = (PICTURES.parent / "look-inside.md").read_text()
    for name in ("explain", "plan", "metrics", "verify"):
        after = page.partition(f"(pictures/{name}.svg)")[2].partition("\n#")[0].partition("\n![")[0]
        explained = re.findall(r"^(\d+)\. ", after, re.MULTILINE)
        root = ElementTree.parse(PICTURES / f"{name}.svg").getroot()
        marks = [each.text for each in root.iter() if each.get("font-size") == "8.4"]
        assert explained == marks
        assert len(marks) >= 2
