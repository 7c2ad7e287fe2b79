"""What is compiled for the tests is kept by its sources, flags and compilers (``tests/support/cache.py``)."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from support import cache

from . import compile as compiler
from . import kept
from .compile import Cubin, Kernel
from .driver import needs_compiler, needs_nvrtc
from .emulator import library

SOURCE = "updates.cu"
ONCE = "EACH_ELEMENTWISE(UPDATE)"


def copied(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, folder: Path) -> Path:
    """Has a module look into a copy of one of its folders."""
    made = shutil.copytree(getattr(module, name), folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, name, made)
    return Path(made)


def extended(file: Path) -> None:
    file.write_text(file.read_text() + "\n")


@needs_compiler
def test_library_has_another_name_for_whatever_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(**keys: object) -> str:
        return cache.key(library.library_parts(SOURCE, **keys))  # type: ignore[arg-type]

    names = [name(), name(kernels=["count_few"]), name(edits=[(SOURCE, ONCE, f"{ONCE} ")])]
    sources = copied(monkeypatch, compiler, "SOURCES", tmp_path)
    emulator = copied(monkeypatch, library, "HERE", tmp_path)
    assert name() == names[0]
    for file in (sources / SOURCE, sources / "jobs.cuh", emulator / "fibers.h", emulator / "ptx.cuh"):
        extended(file)
        names.append(name())
    monkeypatch.setattr(library, "FLAGS", (*library.FLAGS, "-O2"))
    names.append(name())
    monkeypatch.setattr(cache, "version", lambda command: f"{command} of tomorrow")
    names.append(name())
    assert len(set(names)) == len(names) == 9


@needs_nvrtc
def test_machine_code_has_another_name_for_whatever_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(architecture: str = "sm_90a") -> str:
        return cache.key(kept.parts(SOURCE, architecture))

    names = [name(), name("sm_80")]
    sources = copied(monkeypatch, compiler, "SOURCES", tmp_path)
    assert name() == names[0]
    for file in (sources / SOURCE, sources / "jobs.cuh"):
        extended(file)
        names.append(name())
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "--use_fast_math"))
    names.append(name())
    script = tmp_path / "compile.py"  # what takes machine code apart
    script.write_text("")
    monkeypatch.setattr(compiler, "__file__", str(script))
    names.append(name())
    monkeypatch.setattr(kept, "tools", lambda library: "NVRTC of tomorrow")
    names.append(name())
    assert len(set(names)) == len(names) == 7


def test_machine_code_is_read_back_as_it_was_written() -> None:
    kernel = Kernel(32, 0, 8, Counter({"HMMA.16816": 3}))
    cubin = Cubin({"few": kernel}, "ptxas info\n", 1.5, bytes(range(256)))
    assert kept.read_back(kept.written(cubin)) == cubin
    assert kept.read_back(kept.written(cubin)).kernels["few"].count("HMMA") == 3
