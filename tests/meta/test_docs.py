"""Every public symbol is documented, every page is on the site, and every code block of every page runs."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from torch.optim import Optimizer

import oxidion
from support import forks

from .sources import ROOT

PUBLIC = {name: getattr(oxidion, name) for name in oxidion.__all__}
CLASSES = {
    name: value for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Optimizer)
}
DOCUMENTED = [name for name, value in PUBLIC.items() if not name.startswith("__") and callable(value)]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
BLOCK = re.compile(
    r"(?:^<!-- (?P<word>before|not run):(?P<said>.*?)-->\n)?^```python\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
"""A block of code. A comment above it holds code that runs before it, or the reason why it cannot run."""
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(BLOCK.finditer(page.read_text()))
]
RUN = [param for param in BLOCKS if param.values[0]["word"] != "not run"]  # type: ignore[index]
NOT_RUN = [param for param in BLOCKS if param not in RUN]
LINKS = [
    (page, target)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
]


def test_there_are_classes_pages_and_blocks_to_check() -> None:
    assert {"Dion", "Muon", "AdamW", "Lion"} <= CLASSES.keys()
    assert len(DOCS) > 25
    assert any(str(block.id).startswith("README") for block in RUN)
    assert len(RUN) > 40


@pytest.mark.parametrize("name", {value.__name__: name for name, value in CLASSES.items()})
def test_optimizer_has_a_page_with_all_expected_sections(name: str) -> None:
    page = ROOT / "docs" / "optimizers" / f"{CLASSES[name].__module__.rpartition('.')[2]}.md"
    text = page.read_text()
    assert name in text.splitlines()[0]
    sections = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert "```algorithm\ninput " in sections["Algorithm"]
    assert f"oxidion.{name}(" in sections["Example"]
    assert f"\n::: oxidion.{name}\n" in sections["Arguments"]  # the site writes signature and docstring here
    assert re.search(r"^\| `\w+`", sections["State"], re.MULTILINE)
    assert re.search(r"arXiv:\d{4}\.\d{5}", sections["References"])


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r"[\w/-]+\.md", nav)
    assert len(named) == len(set(named))
    made = {"contributing.md", "changelog.md"}  # of pages at the root, by docs/site/hooks.py
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}
    assert set(named) <= made | pages
    assert all(page.startswith("optimizers/") for page in pages - set(named))  # the site adds those itself


@pytest.mark.parametrize("name", DOCUMENTED)
def test_public_symbol_and_its_public_methods_have_docstrings(name: str) -> None:
    value = PUBLIC[name]
    assert (inspect.getdoc(value) or "").strip()
    if inspect.isclass(value):
        bare = [
            key
            for key, member in vars(value).items()
            if not key.startswith("_") and callable(member) and not inspect.getdoc(getattr(value, key))
        ]
        assert not bare


@pytest.mark.parametrize("block", RUN)
def test_code_block_runs(block: re.Match[str], tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text((block["said"] or "") + block["code"])
    ranks = re.match(r"# torchrun --nproc-per-node (\d+)\n", block["code"])
    ended = forks.common().run(script, ranks=int(ranks[1]) if ranks else 0, folder=tmp_path)
    assert {rank.returncode for rank in ended} == {0}, "".join(rank.stderr for rank in ended)


def test_block_that_fails_on_one_rank_fails() -> None:
    ended = forks.common().run(
        "import os\nprint('begun')\nassert os.environ['RANK'] == '0', 'other'", ranks=2
    )
    assert [rank.returncode for rank in ended] == [0, 1]
    assert [rank.stdout for rank in ended] == ["begun\n"] * 2
    assert "AssertionError: other" in ended[1].stderr
    (killed,) = forks.common().run("import os\nos.kill(os.getpid(), 9)")
    assert killed.returncode == -9


@pytest.mark.parametrize("block", NOT_RUN)
def test_code_block_that_does_not_run_says_why(block: re.Match[str]) -> None:
    assert len(block["said"].split()) >= 3
    compile(block["code"], "block", "exec")


@pytest.mark.parametrize("page", sorted({page for page, _ in LINKS}), ids=lambda page: page.stem)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = [target for own, target in LINKS if own == page]
    assert [target for target in targets if not (page.parent / target).exists()] == []
