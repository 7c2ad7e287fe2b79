"""Machine code that the package has compiled is cached for all processes, and recompiled where necessary."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from . import compile as compiler
from .driver import needs_nvrtc, run

LOGGED_STEP = """
logging.basicConfig(level=logging.INFO)
logging.getLogger().handlers[0].setStream(__import__("sys").stdout)
oxidion.Lion(parameters((4, 3))).step()
print(driver.emulator_loads())
"""


@needs_nvrtc
def test_machine_code_that_the_driver_refuses_is_compiled(environment: dict[str, str]) -> None:
    run(environment, LOGGED_STEP)  # all are kept from here on
    said = run({**environment, "OXIDION_EMULATED_REFUSALS": "1"}, LOGGED_STEP)
    assert said.count("INFO:oxidion.cuda:compiling") == 1  # what was refused
    assert "updates.cu as kept: CUDA: loading a module: CUDA_ERROR_INVALID_IMAGE" in said
    assert said.splitlines()[-1] == str(len(compiler.ARCHITECTURES) - len(compiler.FORMED))


PLAIN = [source for source in compiler.ARCHITECTURES if source not in compiler.FORMED]


@needs_nvrtc
@pytest.mark.parametrize(
    "fresh",
    [("updates.cu", "copies.cu"), pytest.param(tuple(PLAIN), marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_machine_code_is_compiled_once_for_all_processes(
    environment: dict[str, str], tmp_path: Path, fresh: tuple[str, ...]
) -> None:
    own = {**environment, "OXIDION_CACHE": str(tmp_path / "cache")}
    shutil.copytree(environment["OXIDION_CACHE"], own["OXIDION_CACHE"])
    names = {source: tmp_path / "cache" / f"{compiler.key(source, 'sm_90a')}.cubin" for source in PLAIN}
    for source in fresh:
        names[source].unlink()
    said = run(own, LOGGED_STEP)
    assert all((f"compiling {source} for sm_90a" in said) == (source in fresh) for source in PLAIN)
    assert "compiling" not in run(own, LOGGED_STEP)
    assert all(file.exists() for file in names.values())
    kept = names["updates.cu"]
    kept.write_bytes(kept.read_bytes()[:-1000])
    assert "compiling updates.cu for sm_90a" in run(own, LOGGED_STEP)
