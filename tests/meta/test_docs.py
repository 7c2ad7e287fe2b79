"""Every public class is documented, and what the README shows runs."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch.optim import Optimizer

import oxidion

from .sources import ROOT

PUBLIC = {name: getattr(oxidion, name) for name in oxidion.__all__}
CLASSES = {
    name: value for name, value in PUBLIC.items() if inspect.isclass(value) and issubclass(value, Optimizer)
}
DOCUMENTED = [name for name, value in PUBLIC.items() if not name.startswith("__") and callable(value)]
PAGES = sorted(path for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")] if path.exists())
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
IMPORT = re.compile(r"^(?:import|from) ", re.MULTILINE)
BLOCKS = [
    pytest.param(source, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, source in enumerate(FENCE.findall(page.read_text()))
]
PROGRAMS = [block for block in BLOCKS if IMPORT.search(str(block.values[0]))]
FRAGMENTS = [block for block in BLOCKS if block not in PROGRAMS]
LINKS = [
    (page, target)
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
]


def test_there_are_classes_pages_and_blocks_to_check() -> None:
    assert {"Dion", "Muon", "AdamW", "Lion"} <= CLASSES.keys()
    assert ROOT / "README.md" in PAGES
    assert any(str(block.id).startswith("README") for block in PROGRAMS)
    assert not any(str(block.id).startswith("README") for block in FRAGMENTS)


@pytest.mark.parametrize("name", CLASSES)
def test_optimizer_has_a_page_that_names_its_arguments(name: str) -> None:
    page = ROOT / "docs" / "optimizers" / f"{CLASSES[name].__module__.rpartition('.')[2]}.md"
    text = page.read_text()
    assert name in text.splitlines()[0]
    own = [key for key in inspect.signature(CLASSES[name]).parameters if key != "params"]
    assert own
    missing = [key for key in own if not re.search(rf"\b{key}\b", text)]
    assert not missing


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


@pytest.mark.parametrize("name", CLASSES)
def test_optimizer_docstring_names_every_argument(name: str) -> None:
    text = " ".join(inspect.getdoc(base) or "" for base in CLASSES[name].__mro__ if base is not Optimizer)
    # "Arguments that are not named here are those of `Muon`."
    others = re.findall(r"not named here are those of `(\w+)`", text)
    text = " ".join([text, *(inspect.getdoc(CLASSES[other]) or "" for other in others)])
    missing = [
        key for key in inspect.signature(CLASSES[name]).parameters if not re.search(rf"\b{key}\b", text)
    ]
    assert not missing


@pytest.mark.parametrize("source", PROGRAMS)
def test_code_block_with_imports_runs_as_it_stands(source: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(source)
    command = [sys.executable, str(script)]
    if processes := re.match(r"# torchrun --nproc-per-node (\d+)\n", source):
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes[1]}"]
        command[1:1] = launch
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("source", FRAGMENTS)
def test_code_block_without_imports_uses_names_and_arguments_that_exist(source: str) -> None:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "oxidion":
            assert hasattr(oxidion, node.attr)
        if isinstance(node, ast.Call) and ast.unparse(node.func).removeprefix("oxidion.") in PUBLIC:
            parameters = inspect.signature(PUBLIC[ast.unparse(node.func).removeprefix("oxidion.")]).parameters
            assert {keyword.arg for keyword in node.keywords} <= parameters.keys()


@pytest.mark.parametrize("page", sorted({page for page, _ in LINKS}), ids=lambda page: page.stem)
def test_relative_links_lead_to_files(page: Path) -> None:
    targets = [target for own, target in LINKS if own == page]
    assert [target for target in targets if not (page.parent / target).exists()] == []
