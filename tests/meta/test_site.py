"""The documentation site: builds without warnings, loads nothing from elsewhere, shows what help() does."""

from __future__ import annotations

import html
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.optim import Optimizer

import oxidion
from oxidion._core.constructor import LEFT_OUT

from .sources import ROOT

griffe: Any = pytest.importorskip("griffe", reason="`make site` installs what builds the site")
pytest.importorskip("mkdocs", reason="`make site` installs what builds the site")

CLASSES: dict[str, Any] = {
    value.__name__: value
    for value in (getattr(oxidion, name) for name in oxidion.__all__)
    if inspect.isclass(value) and issubclass(value, Optimizer)
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-W", "ignore", "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    """What a reader sees of a page."""
    return html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]+>", "", page.read_text(), flags=re.DOTALL))


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loading = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
    assert not {found for page in pages for found in loading.findall(page.read_text())}
    foreign = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")
    assert not [sheet.name for sheet in site.rglob("*.css") if foreign.search(sheet.read_text())]


def test_equations_are_mathml_and_nothing_is_left_of_tex(site: Path) -> None:
    pages = [site / "optimizers" / f"{name}.html" for name in ("dion", "adamw", "came", "galore")]
    for page in pages:
        assert 'xmlns="http://www.w3.org/1998/Math/MathML" display="block"' in page.read_text()
    left = re.compile(r"\$\$|\\\[|\\(?:frac|mathrm|leftarrow|operatorname|text)\b|:math:|\.\. math::")
    assert not [page.name for page in site.rglob("*.html") if left.search(text_of(page))]


@pytest.mark.parametrize("name", CLASSES)
def test_page_of_a_class_shows_every_argument_with_its_default(name: str, site: Path) -> None:
    page = site / "optimizers" / f"{CLASSES[name].__module__.rpartition('.')[2]}.html"
    text = text_of(page)
    assert f"\n{name}(\n    params: Params,\n" in text  # the signature
    for key, parameter in inspect.signature(CLASSES[name]).parameters.items():
        entry = re.search(rf"^\s*{key}\s+\((.*?)\)\s+–", text, re.MULTILINE | re.DOTALL)
        assert entry, key
        default = parameter.default
        if default is not inspect.Parameter.empty:
            shown = entry[1].partition("default:")[2].strip()
            assert eval(shown, {"LEFT_OUT": LEFT_OUT}) == default, key  # literals of the source


def test_docstrings_of_the_site_are_those_of_help() -> None:
    sys.path.insert(0, str(ROOT / "docs" / "site"))
    try:
        from docstrings import Completed, markdown
    finally:
        sys.path.remove(str(ROOT / "docs" / "site"))
    package = griffe.load(
        "oxidion",
        search_paths=[str(ROOT / "python")],
        extensions=griffe.load_extensions(Completed),
        allow_inspection=False,
        try_relative_path=False,
    )
    names = set(map(str, package.exports))
    for name, cls in CLASSES.items():
        assert package[name].docstring.value == markdown(inspect.getdoc(cls) or "", names)
