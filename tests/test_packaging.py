"""What a user installs: versions that agree, the built module, import, threads, clean environments."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import textwrap
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import oxidion
from oxidion import _oxidion
from oxidion._core.abi import TORCH

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TORCH_OF_TCH = {"0.24": "2.11", "0.26": "2.13"}
MEGABYTE = 2**20


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


def torch_pins() -> set[str]:
    """Every requirement on torch in pyproject.toml."""
    project = toml("pyproject.toml")
    requirements = [
        *project["build-system"]["requires"],
        *project["dependency-groups"]["build"],
        *project["project"]["dependencies"],
    ]
    return {requirement for requirement in requirements if requirement.startswith("torch")}


def test_torch_pins_agree_with_the_locked_tch() -> None:
    locked = {package["name"]: package["version"] for package in toml("Cargo.lock")["package"]}
    minor = TORCH_OF_TCH[locked["tch"].rpartition(".")[0]]
    assert torch_pins() == {f"torch=={minor}.*"}
    assert minor == TORCH


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


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")
def test_extension_finds_the_libtorch_beside_it_and_needs_no_libpython() -> None:
    done = subprocess.run(
        ["readelf", "--dynamic", _oxidion.__file__], capture_output=True, text=True, check=True
    )
    assert re.search(r"R(UN)?PATH.*[\[:]\$ORIGIN/\.\./torch/lib[\]:]", done.stdout)
    needed = re.findall(r"NEEDED.*\[(.*)\]", done.stdout)
    assert "libtorch_cpu.so" in needed
    assert not [name for name in needed if name.startswith("libpython")]


@pytest.mark.alone
def test_import_adds_less_than_a_tenth_of_a_second_to_torch() -> None:
    source = """
        import time, torch
        wall, cpu = time.perf_counter(), time.process_time()
        import oxidion
        print(time.perf_counter() - wall, time.process_time() - cpu)
    """
    runs = [[float(figure) for figure in python(source).stdout.split()] for _ in range(5)]
    # Other work on the machine lengthens wall times: the quickest run is nearest to the cost.
    assert min(wall for wall, _ in runs) < 0.1
    assert statistics.median(cpu for _, cpu in runs) < 0.1


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


def test_import_under_another_torch_minor_names_both_and_the_way_out() -> None:
    source = """
        import torch
        torch.__version__ = torch.version.__version__ = "2.99.0"
        import oxidion
    """
    done = python(source, fails=True)
    message = done.stderr[done.stderr.index("ImportError: ") :]
    assert re.search(rf"\btorch {re.escape(TORCH)}\b", message)
    assert "2.99.0" in message
    assert re.search(r"pip install |make build TORCH=", message)


def test_import_under_a_patch_release_or_local_build_of_the_same_minor_works() -> None:
    source = f"""
        import torch
        torch.__version__ = torch.version.__version__ = "{TORCH}.7+cu999"
        import oxidion
        print(oxidion.__version__)
    """
    assert python(source).stdout.split() == [oxidion.__version__]


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
                beside = len(tasks()) - before
                if beside == threads - 1:
                    break
                time.sleep(0.01)
            print(beside)
    """
    assert python(TASKS + textwrap.dedent(source)).stdout.split() == ["3", "1", "2"]


def environment_with_torch(folder: Path) -> Path:
    """The interpreter of a new virtual environment with only the torch that the package is pinned to."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    interpreter = folder / "bin" / "python"
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *torch_pins()], check=True)
    return interpreter


STEP = """
import oxidion, torch
p = torch.nn.Parameter(torch.eye(8))
p.grad = torch.ones(8, 8)
oxidion.Dion([p], lr=0.5).step()
print(oxidion.__file__, float((p - torch.eye(8)).abs().max()) > 0)
"""


def assert_takes_a_step(interpreter: Path, folder: Path) -> None:
    """Imports the installed package in a new process, away from the checkout, and takes a step."""
    done = subprocess.run([interpreter, "-c", STEP], cwd="/", capture_output=True, text=True, check=True)
    where, moved = done.stdout.split()
    assert Path(where).is_relative_to(folder)
    assert moved == "True"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_wheel_installs_and_steps_in_an_environment_with_only_torch(tmp_path: Path) -> None:
    subprocess.run(["make", "wheel"], cwd=ROOT, check=True, stdin=subprocess.DEVNULL)
    wheel = max((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    assert re.fullmatch(r"oxidion-[\d.]+-cp310-abi3-(many)?linux\w*\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert not [name for name in names if "libtorch" in name or "libc10" in name]
        assert {"oxidion/py.typed", "oxidion/_oxidion.pyi", "oxidion/_oxidion.abi3.so"} <= set(names)
        assert not [name for name in names if not name.startswith(("oxidion/", "oxidion-"))]
        information = re.sub(r"\.dist-info/.*", ".dist-info/", next(n for n in names if ".dist-info/" in n))
        assert {f"{information}licenses/LICENSE-{which}" for which in ("MIT", "APACHE")} <= set(names)
        (parts,) = [name for name in names if name.startswith(f"{information}sboms/")]
        crates = {part["name"] for part in json.loads(archive.read(parts))["components"]}
        assert {"tch", "faer", "pyo3"} <= crates
    assert wheel.stat().st_size < 50 * MEGABYTE
    environment = tmp_path / "env"
    interpreter = environment_with_torch(environment)
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", wheel], check=True)
    assert_takes_a_step(interpreter, environment)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("isolation", [True, False], ids=["isolated", "not-isolated"])
def test_pip_install_of_the_checkout_works_from_an_environment_that_is_not_active(
    isolation: bool, tmp_path: Path
) -> None:
    environment = tmp_path / "env"
    interpreter = environment_with_torch(environment)
    options = []
    if not isolation:
        requirements = toml("pyproject.toml")["build-system"]["requires"]
        subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *requirements], check=True)
        options = ["--no-build-isolation"]
    inherited = {
        key: value for key, value in os.environ.items() if key not in {"VIRTUAL_ENV", "LIBTORCH_USE_PYTORCH"}
    }
    subprocess.run(
        [interpreter, "-m", "pip", "install", *options, ROOT], cwd=tmp_path, env=inherited, check=True
    )
    assert_takes_a_step(interpreter, environment)
