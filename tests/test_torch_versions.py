"""Library for each torch, how one is compiled where there is none, and what is said where that fails."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import oxidion
from oxidion import _oxidion
from oxidion._torch import compat, compiler, library

PACKAGE = Path(oxidion.__file__).parent
NAMES = Path(__file__).resolve().parents[1] / "src" / "torch_names.txt"
MINOR = ".".join(torch.__version__.split(".")[:2])
TABLE: dict[str, Any] = json.loads((library.FOLDER / compiler.TABLE).read_text())
STEP = """
import torch, oxidion
p = torch.nn.Parameter(torch.eye(8))
p.grad = torch.ones(8, 8)
oxidion.Muon([p], lr=0.5).step()
print(oxidion._torch.library.serving().shipped, bool((p.detach() != torch.eye(8)).any()))
"""
#: What a manylinux_2_28 system has at least.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
OF_LIBTORCH = {"libtorch_cpu.so", "libc10.so", "libtorch_python.so"}
OF_SYSTEM = {"libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libc.so.6", "ld-linux-x86-64.so.2"}

needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")


def readelf(option: str, path: Path) -> str:
    done = subprocess.run(["readelf", "-W", option, path], capture_output=True, text=True, check=True)
    return done.stdout


def needed(path: Path) -> set[str]:
    """Libraries that a library names."""
    return set(re.findall(r"NEEDED.*\[(.*)\]", readelf("-d", path)))


def undefined(path: Path) -> set[str]:
    """Functions of libtorch and of the library over it that a library expects."""
    names = re.findall(r"\sUND ([^\s@]+)", readelf("--dyn-syms", path))
    return {name for name in names if re.match(r"at_|atg_|ats_|thp_|get_and_reset|oxidion_|aoti_|_Z", name)}


Package = Callable[..., dict[str, str]]


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """Makes a package whose table can be another, and returns the environment in which it is imported."""

    def make(table: dict[str, Any] | None = None, **environment: str) -> dict[str, str]:
        root = tmp_path / "package" / "oxidion"
        (root / "_torch").mkdir(parents=True)
        for folder, skipped in ((PACKAGE, {"_torch"}), (library.FOLDER, {compiler.TABLE})):
            for path in folder.iterdir():
                if path.name not in skipped:
                    (root / path.relative_to(PACKAGE)).symlink_to(path)
        (root / "_torch" / compiler.TABLE).write_text(json.dumps(table or {**TABLE, "minors": {}}))
        inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
        own = {"PYTHONPATH": str(root.parent), "OXIDION_CACHE": str(tmp_path / "cache")}
        return inherited | own | environment

    return make


@pytest.fixture
def fake_compiler(tmp_path: Path) -> Path:
    """A compiler that takes the library that is open for the one that it makes, and keeps count."""
    script = tmp_path / "fake-c++"
    copied = library.serving().path
    script.write_text(
        f"#!/bin/sh\necho called >> {tmp_path}/calls\nsleep 1\n"
        f'while [ "$1" != -o ]; do shift; done\ncp {copied} "$2"\n'
    )
    script.chmod(0o755)
    return script


def start(
    environment: dict[str, str], source: str = STEP, version: str | None = None
) -> subprocess.Popen[str]:
    said = f"import torch\ntorch.__version__ = torch.version.__version__ = {version!r}\n" if version else ""
    return subprocess.Popen(
        [sys.executable, "-c", said + textwrap.dedent(source)],
        cwd="/",
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def imported(environment: dict[str, str], version: str | None = None) -> tuple[str, str]:
    """What the import and a step print, and what they warn of."""
    process = start(environment, version=version)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err


def refused(environment: dict[str, str], version: str | None = None) -> str:
    """The message of the ImportError."""
    process = start(environment, version=version)
    _, err = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "ImportError: " in err, err
    return err[err.index("ImportError: ") :]


def test_library_that_serves_is_that_of_this_torch() -> None:
    served = library.serving()
    assert served.path.is_file()
    assert served.torch.split(".")[:2] == torch.__version__.split(".")[:2]
    assert f"for torch {served.torch}" in oxidion.env_report()
    assert str(served.path) in oxidion.env_report()


@needs_readelf
def test_core_needs_the_library_and_nothing_of_libtorch() -> None:
    core = Path(_oxidion.__file__)
    assert needed(core) - OF_SYSTEM == {compiler.NAME}
    assert not re.search(r"R(UN)?PATH", readelf("-d", core))
    assert undefined(core) == set(NAMES.read_text().split())


def test_names_are_sorted_and_each_is_there_once() -> None:
    names = NAMES.read_text().split()
    assert names == sorted(set(names))


LIBRARIES = sorted({library.serving().path, *library.FOLDER.glob(f"*/{compiler.NAME}")})


@needs_readelf
@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.parent.name)
def test_library_runs_on_old_systems_and_exports_its_names_alone(path: Path) -> None:
    assert needed(path) <= OF_LIBTORCH | OF_SYSTEM
    assert {"libtorch_cpu.so", "libc10.so"} <= needed(path)
    assert not re.search(r"R(UN)?PATH", readelf("-d", path))
    versions = re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", readelf("-V", path))
    assert versions
    for kind, version in versions:
        assert tuple(map(int, version.split("."))) <= NEWEST[kind], f"{kind}_{version}"
    exported = re.findall(r"(?:FUNC|OBJECT)\s+\w+\s+DEFAULT\s+\d+ ([^\s@]+)", readelf("--dyn-syms", path))
    assert set(exported) == {*NAMES.read_text().split(), "oxidion_cdata", "oxidion_torch_version"}
    assert not undefined(path) & set(NAMES.read_text().split())
    python = re.findall(r"\sUND (_?Py\w+)", readelf("--dyn-syms", path))
    assert python == ["PyObject_IsInstance"], "the library is for every version of Python"


@pytest.mark.skipif(not library.serving().shipped, reason="the library was compiled here")
@pytest.mark.parametrize("version", [f"{MINOR}.7+cu999", f"{MINOR}.0a0+git1234567", f"{MINOR}.0rc3"])
def test_other_releases_of_a_minor_are_served_by_its_library(version: str, package: Package) -> None:
    assert imported(package(TABLE), version) == ("True True", "")


@pytest.mark.parametrize("version", ["2.6.0", "1.13.1+cu117"])
def test_torch_that_is_too_old_is_named_with_the_floor(version: str, package: Package) -> None:
    message = refused(package(TABLE), version)
    assert "torch 2.7 or newer" in message
    assert version in message
    assert "pip install 'torch>=2.7'" in message


def test_library_is_compiled_once_and_kept(package: Package, fake_compiler: Path, tmp_path: Path) -> None:
    environment = package(CXX=str(fake_compiler))
    out, err = imported(environment)
    assert out == "False True"
    assert err.count(f"compiles its library for torch {torch.__version__}") == 1
    assert imported({**environment, "CXX": "no-such-compiler"}) == ("False True", "")
    assert (tmp_path / "calls").read_text().split() == ["called"]
    (folder,) = (tmp_path / "cache" / "torch").iterdir()
    assert torch.__version__ in folder.name
    assert TABLE["abi"] in folder.name
    assert {path.name for path in folder.iterdir()} == {compiler.NAME, "lock"}


def test_processes_that_start_together_compile_once(
    package: Package, fake_compiler: Path, tmp_path: Path
) -> None:
    environment = package(CXX=str(fake_compiler))
    together = [start(environment) for _ in range(3)]
    ends = [process.communicate(timeout=300) for process in together]
    assert [out.strip() for out, _ in ends] == ["False True"] * 3, ends
    assert sum("compiles its library" in err for _, err in ends) == 1
    assert (tmp_path / "calls").read_text().split() == ["called"]


@pytest.mark.slow
def test_library_that_a_real_compiler_makes_takes_the_same_steps(package: Package) -> None:
    out, err = imported(package())
    assert out == "False True"
    assert "compiles its library" in err


def test_nightly_build_gets_a_library_of_its_own(package: Package, fake_compiler: Path) -> None:
    out, _ = imported(package(TABLE, CXX=str(fake_compiler)), f"{MINOR}.0.dev20261101+cu130")
    assert out == "False True"


def test_without_a_compiler_the_message_has_all_ways_out(package: Package) -> None:
    newest = {**TABLE, "minors": {"2.7": {}, "2.10": {}}}
    message = refused(package(newest, CXX="no-such-compiler"), None)
    if MINOR == "2.7":
        pytest.skip("2.7 is in the table of this test")
    assert "has code for torch 2.7 to 2.10" in message
    assert f"found torch {torch.__version__}" in message
    for way in ("pip install -U oxidion", "no C++ compiler", "pip install 'torch==2.10.*'"):
        assert way in message


def test_failure_of_the_compiler_is_shown(package: Package, tmp_path: Path) -> None:
    script = tmp_path / "failing-c++"
    script.write_text("#!/bin/sh\necho 'oxidion_torch.cpp:7: error: no type named Tensor'\nexit 3\n")
    script.chmod(0o755)
    message = refused(package(CXX=str(script)))
    assert "ended with status 3" in message
    assert "no type named Tensor" in message
    assert not list((tmp_path / "cache").rglob("*.so")), "nothing is left in its place"


def test_compilation_can_be_forbidden(package: Package) -> None:
    message = refused(package(OXIDION_TORCH_COMPILE="0"))
    assert "OXIDION_TORCH_COMPILE=0" in message
    assert "pip install -U oxidion" in message


def test_cache_that_cannot_be_written_is_named(package: Package, fake_compiler: Path) -> None:
    message = refused(package(CXX=str(fake_compiler), OXIDION_CACHE="/proc/none"))
    assert "/proc/none" in message
    assert "set OXIDION_CACHE" in message


def test_headers_of_another_torch_are_refused(package: Package) -> None:
    message = refused(package(), "2.99.0")
    assert "must be of torch 2.99" in message
    assert f"found {MINOR}" in message


def test_library_of_another_build_is_refused(package: Package, fake_compiler: Path) -> None:
    message = refused(package({"abi": "0" * 16, "minors": {}}, CXX=str(fake_compiler)))
    assert TABLE["abi"] in message
    assert "different builds" in message


def test_broken_file_in_the_cache_is_named(package: Package, fake_compiler: Path, tmp_path: Path) -> None:
    environment = package(CXX=str(fake_compiler))
    imported(environment)
    (made,) = (tmp_path / "cache").rglob(compiler.NAME)
    made.write_bytes(b"no library")
    assert str(made) in refused(environment)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('"2.98.0"', "torch 2.98.0, but torch .* is imported from .*two in this process"),
        (f'"{torch.__version__}"', "keeps a tensor's pointer elsewhere"),
    ],
)
def test_library_for_another_torch_or_object_is_refused(
    body: str, message: str, package: Package, tmp_path: Path
) -> None:
    source, made = tmp_path / "wrong.c", tmp_path / "wrong.so"
    abi = f'const char *oxidion_shim_abi(void) {{ return "{TABLE["abi"]}"; }}\n'
    source.write_text(
        f"{abi}const char *oxidion_torch_version(void) {{ return {body}; }}\n"
        "const void *oxidion_cdata(void *object) { return object; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    script = tmp_path / "wrong-c++"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp {made} "$2"\n')
    script.chmod(0o755)
    assert re.search(message, refused(package(CXX=str(script))))


@pytest.mark.parametrize(
    ("owner", "name"), [(owner, name) for owner, names in compat.PRIVATE.items() for name in names]
)
def test_private_name_of_torch_is_there(owner: str, name: str) -> None:
    if owner.startswith("torch.distributed") and not torch.distributed.is_available():
        pytest.skip("this torch has no distributed package")
    value = pkgutil.resolve_name(owner.removesuffix("()"))
    if owner.endswith("()"):
        value = value([torch.zeros(1)], {})
    assert hasattr(value, name), f"torch {torch.__version__}: {owner} has no {name}"


def private_uses(tree: ast.AST) -> set[str]:
    """Private names that are read from other objects or imported."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found.update(alias.name for alias in node.names)
            found.update((node.module or "").split("."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}:
            found.add(ast.unparse(node.args[1]).strip("'"))
    return {name for name in found if re.fullmatch(r"_[a-z]\w*", name)}


def own_names(tree: ast.AST) -> set[str]:
    """Names that the package gives itself: functions, attributes that are set, fields and modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def test_every_private_name_of_torch_is_in_the_table() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
    own = set().union(*map(own_names, trees.values())) | {path.stem for path in trees}
    own |= {path.parent.name for path in trees}
    table = {name for names in compat.PRIVATE.values() for name in names}
    table |= {part for owner in compat.PRIVATE for part in owner.split(".")}
    for path, tree in trees.items():
        if path.name != "compat.py":
            unknown = private_uses(tree) - own - table
            assert not unknown, f"{path}: {sorted(unknown)} belong into PRIVATE of _torch/compat.py"
