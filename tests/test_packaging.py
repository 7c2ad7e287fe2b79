"""What a user installs: versions that agree, the built module, import, threads, clean environments."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import oxidion
from oxidion import _oxidion
from oxidion._torch import library

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def toml(name: str) -> dict[str, Any]:
    """A TOML file of the checkout."""
    with (ROOT / name).open("rb") as file:
        return tomllib.load(file)


#: For programs that count threads: the names of those of the process. One may end while it is looked at.
TASKS = """
from contextlib import suppress
from pathlib import Path

def tasks():
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            names.append((task / "comm").read_text().strip())
    return names
"""


def python(source: str, *, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new interpreter, away from the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done


def test_torch_has_only_a_floor_and_is_not_needed_to_build() -> None:
    project = toml("pyproject.toml")
    floor = "{}.{}".format(*library.OLDEST)
    assert [each for each in project["project"]["dependencies"] if "torch" in each] == [f"torch>={floor}"]
    assert not [each for each in project["build-system"]["requires"] if "torch" in each]


def test_source_of_the_library_is_cut_out_of_the_locked_crate() -> None:
    locked = {package["name"]: package["version"] for package in toml("Cargo.lock")["package"]}
    script = (ROOT / "python" / "build_shim.py").read_text("utf-8")
    assert f'TORCH_SYS = "{locked["torch-sys"]}"' in script
    tch = toml("Cargo.toml")["dependencies"]["tch"]
    assert tch == {"version": f"={locked['tch']}", "default-features": False, "features": ["doc-only"]}


def test_build_group_equals_the_build_requirements() -> None:
    project = toml("pyproject.toml")
    assert project["dependency-groups"]["build"] == project["build-system"]["requires"]


def test_versions_of_crate_module_and_distribution_agree() -> None:
    version = toml("Cargo.toml")["package"]["version"]
    assert (oxidion.__version__, _oxidion.__version__, metadata.version("oxidion")) == (version,) * 3


def test_python_versions_of_crate_and_distribution_agree() -> None:
    features = toml("Cargo.toml")["dependencies"]["pyo3"]["features"]
    lowest = toml("pyproject.toml")["project"]["requires-python"].removeprefix(">=")
    assert f"abi3-py{lowest.replace('.', '')}" in features


def test_extension_is_built_for_the_stable_abi() -> None:
    assert Path(_oxidion.__file__).name == "_oxidion.abi3.so"


def test_import_takes_an_eighth_of_the_import_of_torch_at_most() -> None:
    source = """
        import time
        start = time.process_time()
        import torch
        middle = time.process_time()
        import oxidion
        print((time.process_time() - middle) / (middle - start))
    """
    assert statistics.median(float(python(source).stdout) for _ in range(5)) < 1 / 8


def test_import_leaves_distributed_and_heavy_modules_alone() -> None:
    source = """
        import sys, torch
        before = set(sys.modules)
        import oxidion
        print(*sorted(set(sys.modules) - before))
    """
    added = python(source).stdout.split()
    assert "oxidion" in added
    heavy = ("torch.distributed.tensor", "torch._dynamo", "matplotlib", "tqdm", "triton")
    assert not [name for name in added if name.startswith(heavy)]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc/self/task")
@pytest.mark.parametrize("threads", [1, 2])
def test_step_starts_no_threads_where_torch_has_some(threads: int) -> None:
    source = f"""
        import time, torch, oxidion

        torch.set_num_threads({threads})
        torch.ones(512, 512) @ torch.ones(512, 512)
        torch.ones(2**22).add_(1)
        before = len(tasks())
        for cls in (oxidion.Dion, oxidion.Muon, oxidion.AdamW, oxidion.Lion):
            params = [torch.nn.Parameter(torch.ones(1024, 1024)) for _ in range(2)]
            for p in params:
                p.grad = torch.ones_like(p)
            cls(params).step()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:  # what asks for the memory of states ends by itself
            after = tasks()
            if len(after) == before:
                break
            time.sleep(0.01)
        print(sum(name.startswith("oxidion") for name in after), len(after) - before)
    """
    assert python(TASKS + textwrap.dedent(source)).stdout.split() == ["0", "0"]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="no /proc/self/task")
def test_threads_follow_a_later_change_of_their_number() -> None:
    source = """
        import time, torch, oxidion

        torch.set_num_threads(1)
        p = torch.nn.Parameter(torch.ones(2**20))
        p.grad = torch.ones_like(p)
        optimizer = oxidion.AdamW([p])
        optimizer.step()
        time.sleep(0.5)
        before = len(tasks())
        for threads in (4, 2, 3):
            torch.set_num_threads(threads)
            optimizer.step()
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                added = len(tasks()) - before
                if added == threads - 1:
                    break
                time.sleep(0.01)
            print(added)
    """
    assert python(TASKS + textwrap.dedent(source)).stdout.split() == ["3", "1", "2"]


def entries_of(*names: str) -> set[str]:
    """What these distributions and all that they require have at the top of site-packages."""
    left, seen, entries = [*names], set(), set()
    while left:
        name = left.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        with contextlib.suppress(metadata.PackageNotFoundError):  # of an extra or another system
            found = metadata.distribution(name)
            entries |= {file.parts[0] for file in found.files or ()}
            left += [re.match(r"[\w.-]+", requirement)[0] for requirement in found.requires or ()]
    return entries - {".."}


def environment_with_torch(folder: Path) -> Path:
    """The interpreter of a new virtual environment with this torch and numpy alone."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    own = Path(str(metadata.distribution("torch").locate_file("")))
    for name in entries_of("torch", "numpy"):
        if not (packages / name).exists():
            (packages / name).symlink_to(own / name)
    return folder / "bin" / "python"


STEP = """
import oxidion, torch
p = torch.nn.Parameter(torch.eye(8))
p.grad = torch.ones(8, 8)
oxidion.Dion([p], lr=0.5).step()
print(oxidion.__file__, oxidion._torch.library.serving().shipped, float((p - torch.eye(8)).abs().max()) > 0)
"""


def assert_takes_a_step(interpreter: Path, folder: Path, *, shipped: bool) -> None:
    """Imports the installed package in a new process, away from the checkout, and takes a step."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [interpreter, "-c", STEP],
        cwd="/",
        env=environment | {"OXIDION_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    where, *facts = done.stdout.split()
    assert Path(where).is_relative_to(folder)
    assert facts == [str(shipped), "True"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wheel_installs_and_steps_where_only_torch_is_present(tmp_path: Path) -> None:
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    wheel = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    environment = tmp_path / "env"
    interpreter = environment_with_torch(environment)
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", wheel], check=True)
    assert_takes_a_step(interpreter, environment, shipped=True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isolation", [True, False], ids=["isolated", "not-isolated"])
def test_checkout_installs_by_pip_of_an_inactive_environment(isolation: bool, tmp_path: Path) -> None:
    environment = tmp_path / "env"
    interpreter = environment_with_torch(environment)
    options = []
    if not isolation:
        requirements = toml("pyproject.toml")["build-system"]["requires"]
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *requirements], check=True)
        options = ["--no-build-isolation"]
    left_out = {"VIRTUAL_ENV", "OXIDION_SHIMS"}
    inherited = {key: value for key, value in os.environ.items() if key not in left_out}
    subprocess.run(
        [interpreter, "-m", "pip", "install", *options, ROOT], cwd=tmp_path, env=inherited, check=True
    )
    assert_takes_a_step(interpreter, environment, shipped=False)
