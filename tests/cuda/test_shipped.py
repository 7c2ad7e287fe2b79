"""Machine code that a wheel ships: built in as ``make wheel`` does it, and loaded without NVRTC."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from . import compile as compiler
from .driver import TESTS, needs_compiler, needs_nvrtc, run, unless
from .test_releases import fetched

ROOT = TESTS.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    needs_nvrtc,
    needs_compiler,
    unless("" if shutil.which("cargo") else "cargo"),
]

#: Of other sources than the package's: its file has another name.
STALE = ("totals.cu", "sm_100")
STEP = """
logging.basicConfig(level=logging.INFO)
logging.getLogger().handlers[0].setStream(__import__("sys").stdout)
assert oxidion.__file__.startswith({package!r}), oxidion.__file__
oxidion.Lion(parameters((4, 3))).step()
oxidion.Lion([{{"params": parameters((4, 3)), "min_quant_numel": 0}}], state_bits=8).step()
"""
ENTERED = Callable[..., list[str]]


@pytest.fixture(scope="module")
def step(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> ENTERED:
    """Takes steps with a package that has machine code; returns what it says of loading it."""
    folder = tmp_path_factory.mktemp("shipped")
    kept = ROOT / "target" / "cubins"  # that of `make wheel`
    compiler.write_cubins(kept, [*fetched().values()])
    cubins = folder / "cubins"
    shutil.copytree(kept, cubins)
    stale = cubins / f"{compiler.key(*STALE)}.cubin"
    stale.rename(stale.with_stem(stale.stem[:-24] + "0" * 24))

    package = folder / "package" / "oxidion"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "python" / "oxidion", package, ignore=ignored)
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    subprocess.run(
        ["cargo", "build", "--release", "--features", "extension-module"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "OXIDION_CUBINS": str(cubins)},
    )
    shutil.copy(target / "release" / "lib_oxidion.so", package / "_oxidion.abi3.so")
    shipped = {**environment, "PYTHONPATH": str(package.parent)}

    def step(capability: int, **more: str) -> list[str]:
        cache = tmp_path_factory.mktemp("cache")
        said = {"OXIDION_EMULATED_CAPABILITY": str(capability), "OXIDION_CACHE": str(cache), **more}
        lines = run({**shipped, **said}, STEP.format(package=str(package.parent))).splitlines()
        return [
            line.removeprefix("INFO:oxidion.cuda:") for line in lines if line.startswith("INFO:oxidion.cuda")
        ]

    return step


@pytest.mark.parametrize(
    ("capability", "compiled"),
    [
        (80, []),
        (86, []),
        (89, []),
        (90, []),
        (100, ["compiling totals.cu for sm_100"]),
        (103, ["compiling totals.cu for sm_100"]),
    ],
)
def test_only_code_shipped_of_other_sources_is_compiled(
    step: ENTERED, capability: int, compiled: list[str]
) -> None:
    assert step(capability) == compiled


def test_devices_without_shipped_code_have_all_of_it_compiled(step: ENTERED) -> None:
    sources = [source for source, architectures in compiler.ARCHITECTURES.items() if len(architectures) > 1]
    assert sorted(step(120)) == sorted(f"compiling {source} for sm_120" for source in sources)


def test_shipped_code_that_the_driver_refuses_is_compiled(step: ENTERED) -> None:
    assert step(90, OXIDION_EMULATED_REFUSALS="1") == [
        "updates.cu as shipped: CUDA: loading a module: CUDA_ERROR_INVALID_IMAGE",
        "compiling updates.cu for sm_90a",
    ]
