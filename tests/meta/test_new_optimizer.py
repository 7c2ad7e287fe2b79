"""What an optimizer costs: `make new-optimizer` writes eight files, and what they say works as it stands."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oxidion._core import schema
from oxidion._torch import library

from .sources import ROOT

SCRIPT = ROOT / ".ci" / "new_optimizer.py"
#: Files that adding an optimizer takes, those of its documentation, of CUDA and of the changelog included.
MOST = 8


def copy(folder: Path) -> Path:
    """The checkout without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("benchmarks/results"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """All files by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def scaffold(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy(tmp_path_factory.mktemp("tree"))


def test_new_optimizer_takes_eight_files(tree: Path) -> None:
    before = contents(tree)
    done = scaffold(tree, "heavy_ball", "--class-name", "HeavyBall")
    assert done.returncode == 0, done.stderr
    after = contents(tree)
    changed = {name for name, text in after.items() if before.get(name) != text}
    assert before.keys() <= after.keys()
    assert changed == {line for line in done.stdout.splitlines() if "/" in line or line.endswith(".md")}
    assert len(changed) <= MOST
    assert "make quick ALG=heavy_ball" in done.stdout
    left = {name for name in changed if b"optimizer_name" in after[name] or b"ClassName" in after[name]}
    assert not left


def test_optimizer_of_the_scaffold_is_in_the_expected_files(tree: Path) -> None:
    """AdEMAMix: besides its eight files only modules with other packages' names, and lists of classes."""
    scaffold(tree, "heavy_ball", "--class-name", "HeavyBall")
    folders = [tree / "src", tree / "python"]
    sources = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".rs", ".py")]
    named: dict[str, set[str]] = {"heavy_?ball": set(), "ademamix": set()}
    for path in sources:
        text = path.read_text()
        for word, files in named.items():
            if re.search(word, text, re.IGNORECASE) or re.search(word, path.name):
                files.add(str(path.relative_to(tree)).replace("heavy_ball", "ademamix"))
    others = ("__init__", "_gpu_check/parts", "backward", "compat/hf", "compat/megatron")
    assert named["ademamix"] - {f"python/oxidion/{name}.py" for name in others} == named["heavy_?ball"]


def test_what_is_written_names_no_setting_of_every_class(tree: Path) -> None:
    scaffold(tree, "heavy_ball", "--class-name", "HeavyBall")
    named = re.compile("|".join(f"[\"']{key}[\"']" for key in schema.COMMON.keys() - {"lr", "weight_decay"}))
    written = [path for path in tree.rglob("heavy_ball.*") if path.suffix in (".rs", ".py")]
    assert len(written) == 4
    assert not [path for path in written if named.search(path.read_text())]


def test_class_of_capitals_has_types_in_camel_case(tree: Path) -> None:
    """A Rust type of capitals alone is no type to clippy."""
    scaffold(tree, "fast_sgd", "--class-name", "FASTSGD")
    for place in ("src/algorithm", "src/kernels/ops"):
        text = (tree / place / "fast_sgd.rs").read_text()
        assert "FastSgd" in text
        assert "FASTSGD" not in re.sub(r"`FASTSGD`", "", text)
    assert "class FASTSGD(" in (tree / "python/oxidion/optim/fast_sgd.py").read_text()


def test_what_is_written_is_formatted(tree: Path) -> None:
    scaffold(tree, "heavy_ball", "--class-name", "HeavyBall")
    places = ["src/algorithm/heavy_ball.rs", "src/kernels/ops/heavy_ball.rs", "src/kernels/ops/mod.rs"]
    checks = [
        ["ruff", "format", "--check", "python"],
        ["ruff", "check", "python"],
        ["rustfmt", "--check", "--edition", "2024", *places],
    ]
    for command in checks:
        if shutil.which(command[0]):
            done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["lion"], "src/algorithm/lion.rs is there already"),
        (["Heavy"], "NAME must be of lower-case letters"),
        (["light", "--class-name", "light"], "CLASS must begin with an upper-case letter"),
        (["light", "--kind", "matrix"], "invalid choice: 'matrix'"),
    ],
)
def test_name_that_does_not_do_is_refused(tree: Path, arguments: list[str], said: str) -> None:
    before = contents(tree)
    done = scaffold(tree, *arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert contents(tree) == before


TESTS = (
    *(f"tests/algorithm/test_{name}.py" for name in ("cases", "edges", "eight_bit")),
    *(f"tests/contract/test_{name}.py" for name in ("step", "state_dict", "validation")),
    *("tests/distributed/test_sim_equivalence.py", "tests/meta/test_docs.py"),
)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_new_optimizer_works_as_it_stands(tmp_path: Path) -> None:
    tree = copy(tmp_path / "tree")
    assert scaffold(tree, "heavy_ball", "--class-name", "HeavyBall").returncode == 0
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "new-optimizer"
    environment = {**os.environ, "CARGO_TARGET_DIR": str(target), "PYTHONPATH": str(tree / "python")}
    # Warnings would be those of what was written: the rest has none.
    build = ["cargo", "build", "--release", "--features", "extension-module"]
    done = subprocess.run(build, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning: `oxidion`" not in done.stderr, done.stderr[-3000:]
    shutil.copy(target / "release" / "lib_oxidion.so", tree / "python" / "oxidion" / "_oxidion.abi3.so")
    # What the build made of the library over libtorch: git ignores it.
    shutil.copytree(library.FOLDER, tree / "python" / "oxidion" / "_torch", dirs_exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    done = subprocess.run(
        [*command, "-k", "heavy_ball or HeavyBall"],
        cwd=tree,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
