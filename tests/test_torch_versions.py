"""Library for each torch, how one is compiled where there is none, and what is said where that fails."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

import oxidion
from oxidion import _oxidion
from oxidion._torch import compat, compiler, library
from support import elf

PACKAGE = Path(oxidion.__file__).parent
ROOT = Path(__file__).resolve().parents[1]
NAMES = ROOT / "src" / "torch_names.txt"
MINOR = ".".join(torch.__version__.split(".")[:2])
TABLE: dict[str, Any] = json.loads((library.FOLDER / compiler.TABLE).read_text())
EMPTY = {**TABLE, "minors": {}}
STEP = """
import torch, oxidion
p = torch.nn.Parameter(torch.eye(8))
p.grad = torch.ones(8, 8)
oxidion.Muon([p], lr=0.5).step()
print(oxidion._torch.library.serving().shipped, bool((p.detach() != torch.eye(8)).any()))
"""
needs_readelf = pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")


Choose = Callable[..., library.Library]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Chooses a library again, for a package with this table, a torch of this version and a compiler."""
    monkeypatch.setenv("OXIDION_CACHE", str(tmp_path / "cache"))

    def chosen(
        table: dict[str, Any] = EMPTY, version: str = str(torch.__version__), **environment: str
    ) -> library.Library:
        package(table, tmp_path / "package")
        monkeypatch.setattr(library, "FOLDER", tmp_path / "package" / "oxidion" / "_torch")
        monkeypatch.setattr(torch, "__version__", version)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return library.serving.__wrapped__()

    return chosen


def package(table: dict[str, Any], into: Path) -> None:
    """A package with this table: all else are links."""
    root = into / "oxidion"
    (root / "_torch").mkdir(parents=True, exist_ok=True)
    for folder, skipped in ((PACKAGE, {"_torch"}), (PACKAGE / "_torch", {compiler.TABLE})):
        for path in folder.iterdir():
            link = root / path.relative_to(PACKAGE)
            if path.name not in skipped and not link.exists():
                link.symlink_to(path)
    (root / "_torch" / compiler.TABLE).write_text(json.dumps(table))


def script(path: Path, *lines: str) -> str:
    """A compiler that is a shell script; in the last line ``$2`` is the library to write."""
    *before, last = lines
    path.write_text("\n".join(["#!/bin/sh", *before, 'while [ "$1" != -o ]; do shift; done', last, ""]))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake_compiler(tmp_path: Path) -> str:
    """A compiler that takes the library that is open for the one that it makes, and keeps count."""
    copy = f'cp {library.serving().path} "$2"'
    return script(tmp_path / "fake-c++", f"echo called >> {tmp_path}/calls", "sleep 1", copy)


def test_library_that_serves_is_that_of_this_torch() -> None:
    served = library.serving()
    assert served.path.is_file()
    assert served.torch.split(".")[:2] == torch.__version__.split(".")[:2]
    assert f"for torch {served.torch}" in oxidion.env_report()
    assert str(served.path) in oxidion.env_report()


@needs_readelf
def test_core_needs_the_library_and_nothing_of_libtorch() -> None:
    core = Path(_oxidion.__file__)
    assert elf.needed(core) - elf.OF_SYSTEM == {compiler.NAME}
    assert not elf.has_search_path(core)
    assert elf.undefined(core) == set(NAMES.read_text().split())


def test_names_are_sorted_and_each_is_there_once() -> None:
    names = NAMES.read_text().split()
    assert names == sorted(set(names))


LIBRARIES = sorted({library.serving().path, *library.FOLDER.glob(f"*/{compiler.NAME}")})


@needs_readelf
@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.parent.name)
def test_library_runs_on_old_systems_and_exports_its_names_alone(path: Path) -> None:
    assert elf.needed(path) <= elf.OF_LIBTORCH | elf.OF_SYSTEM
    assert {"libtorch_cpu.so", "libc10.so"} <= elf.needed(path)
    assert not elf.has_search_path(path)
    assert elf.symbol_versions(path)
    assert not elf.too_new(path)
    assert elf.exported(path) == {*NAMES.read_text().split(), "oxidion_cdata", "oxidion_torch_version"}
    assert not elf.undefined(path) & set(NAMES.read_text().split())
    assert elf.python_names(path) == ["PyType_IsSubtype"], "the library is for every version of Python"


@pytest.mark.skipif(not library.serving().shipped, reason="the library was compiled here")
@pytest.mark.parametrize("version", [f"{MINOR}.7+cu999", f"{MINOR}.0a0+git1234567", f"{MINOR}.0rc3"])
def test_other_releases_of_a_minor_are_served_by_its_library(version: str, choose: Choose) -> None:
    assert choose(TABLE, version).shipped


@pytest.mark.parametrize("version", ["2.6.0", "1.13.1+cu117"])
def test_torch_that_is_too_old_is_named_with_the_floor(version: str, choose: Choose) -> None:
    with pytest.raises(ImportError, match=r"torch 2\.7 or newer.*pip install 'torch>=2\.7'") as raised:
        choose(TABLE, version)
    assert f"found torch {version}" in str(raised.value)


def test_library_is_compiled_once_and_kept(choose: Choose, fake_compiler: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"compiles its library for torch {re.escape(torch.__version__)}"):
        made = choose(CXX=fake_compiler)
    assert not made.shipped
    assert made == choose(CXX="no-such-compiler"), "a second import compiles nothing and warns of nothing"
    assert (tmp_path / "calls").read_text().split() == ["called"]
    (folder,) = (tmp_path / "cache" / "torch").iterdir()
    assert made.path.parent == folder
    assert torch.__version__ in folder.name
    assert TABLE["abi"] in folder.name
    assert {path.name for path in folder.iterdir()} == {compiler.NAME, f"{compiler.NAME}.sha256", "lock"}
    for private in (folder, folder.parent, folder.parent.parent):
        assert private.stat().st_mode & 0o777 == 0o700


def test_processes_that_start_together_compile_once_and_step(fake_compiler: str, tmp_path: Path) -> None:
    package(EMPTY, tmp_path / "package")
    own = {"PYTHONPATH": str(tmp_path / "package"), "OXIDION_CACHE": str(tmp_path / "cache")}
    together = [
        subprocess.Popen(
            [sys.executable, "-c", STEP],
            cwd="/",
            env=os.environ | own | {"CXX": fake_compiler},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [process.communicate(timeout=300) for process in together]
    assert [out.split() for out, _ in ends] == [["False", "True"]] * 2, ends
    assert sum("compiles its library" in err for _, err in ends) == 1
    assert (tmp_path / "calls").read_text().split() == ["called"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:oxidion compiles")
def test_library_that_a_real_compiler_makes_is_accepted(choose: Choose) -> None:
    assert not choose().shipped


@pytest.mark.filterwarnings("ignore:oxidion compiles")
@pytest.mark.parametrize(
    ("place", "change"), [(".", "chmod 700"), ("..", "chmod go-w"), ("../..", "chmod go-w")]
)
def test_library_in_a_folder_writable_by_others_is_refused(
    choose: Choose, fake_compiler: str, place: str, change: str
) -> None:
    folder = (choose(CXX=fake_compiler).path.parent / place).resolve()
    folder.chmod(0o777)
    with pytest.raises(
        ImportError, match=rf"mode 0777 .*{change} {re.escape(str(folder))}.*set OXIDION_CACHE"
    ):
        choose(CXX="no-such-compiler")
    with pytest.raises(ImportError, match=r"mode 0777 "):
        choose(CXX=fake_compiler)
    folder.chmod(0o755)
    assert not choose(CXX="no-such-compiler").shipped


@pytest.mark.filterwarnings("ignore:oxidion compiles")
@pytest.mark.parametrize("change", ["content", "digest", "mode"])
def test_library_that_is_not_what_was_kept_is_compiled_again(
    choose: Choose, fake_compiler: str, tmp_path: Path, change: str
) -> None:
    library = choose(CXX=fake_compiler).path
    whole = library.read_bytes()
    if change == "content":
        library.unlink()  # the library is open in this process, and its memory is that of the file
        library.write_bytes(whole + b"\0")
    elif change == "digest":
        library.with_name(f"{library.name}.sha256").unlink()
    else:
        library.chmod(0o777)
    with pytest.raises(ImportError, match="no C\\+\\+ compiler"):
        choose(CXX="no-such-compiler")
    assert choose(CXX=fake_compiler).path == library
    assert library.read_bytes() == whole
    assert (tmp_path / "calls").read_text().split() == ["called"] * 2


def small_library(path: Path, value: int) -> Path:
    """A library with the function ``value`` that returns a number."""
    source = path.with_suffix(".c")
    source.write_text(f"int value(void) {{ return {value}; }}\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, source], check=True)
    return path


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="the system has no path for a descriptor")
def test_library_is_loaded_from_the_descriptor_that_was_checked(tmp_path: Path) -> None:
    values = []
    for number in (1, 2):
        place = small_library(tmp_path / "library.so", number)
        descriptor = os.open(place, os.O_RDONLY)
        small_library(tmp_path / "other.so", 10 + number).replace(place)
        values.append(library._loaded(place, descriptor).value())
    assert values == [1, 2], "glibc would return the first one again for a descriptor of the same number"


def test_library_is_loaded_by_its_path_without_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = small_library(tmp_path / "library.so", 3)
    descriptor = os.open(place, os.O_RDONLY)
    monkeypatch.setattr(Path, "exists", lambda _: False)
    assert library._loaded(place, descriptor).value() == 3
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.filterwarnings("ignore:oxidion compiles")
def test_nightly_build_gets_a_library_of_its_own(choose: Choose, fake_compiler: str) -> None:
    assert not choose(TABLE, f"{MINOR}.0.dev20261101+cu130", CXX=fake_compiler).shipped


def test_without_a_compiler_the_message_has_all_ways_out(choose: Choose) -> None:
    others = [minor for minor in ("2.8", "2.10", "2.14") if minor != MINOR]
    with pytest.raises(ImportError) as raised:
        choose({**TABLE, "minors": {each: {} for each in others}}, CXX="no-such-compiler")
    message = str(raised.value)
    assert f"has code for torch {others[0]} to {others[-1]}, found torch {torch.__version__}" in message
    for way in ("pip install -U oxidion", "no C++ compiler", f"pip install 'torch=={others[-1]}.*'"):
        assert way in message


@pytest.mark.filterwarnings("ignore:oxidion compiles")
def test_failure_of_the_compiler_is_shown(choose: Choose, tmp_path: Path) -> None:
    failing = script(
        tmp_path / "failing-c++", "echo 'oxidion_torch.cpp:7: error: no type named Tensor'", "exit 3"
    )
    with pytest.raises(ImportError, match=r"(?s)ended with status 3.*no type named Tensor"):
        choose(CXX=failing)
    assert not list((tmp_path / "cache").rglob("*.so")), "a library is left"


def test_compilation_can_be_forbidden(choose: Choose) -> None:
    with pytest.raises(ImportError, match=r"pip install -U oxidion.*OXIDION_TORCH_COMPILE=0"):
        choose(OXIDION_TORCH_COMPILE="0")


def test_cache_that_cannot_be_written_is_named(choose: Choose, fake_compiler: str) -> None:
    with pytest.raises(ImportError, match=r"/proc/none/torch.*set OXIDION_CACHE"):
        choose(CXX=fake_compiler, OXIDION_CACHE="/proc/none")


def test_headers_of_another_torch_are_refused(choose: Choose) -> None:
    with pytest.raises(ImportError, match=rf"must be of torch 2\.99, found {re.escape(MINOR)}"):
        choose(version="2.99.0")


@pytest.mark.filterwarnings("ignore:oxidion compiles")
def test_library_of_another_build_is_refused(choose: Choose, fake_compiler: str) -> None:
    with pytest.raises(
        ImportError, match=rf"interface {TABLE['abi']}, this oxidion has 0+: .*different builds"
    ):
        choose({"abi": "0" * 16, "minors": {}}, CXX=fake_compiler)


@pytest.mark.filterwarnings("ignore:oxidion compiles")
def test_broken_file_in_the_cache_is_named(choose: Choose, tmp_path: Path) -> None:
    empty = script(tmp_path / "empty-c++", 'echo no library > "$2"')
    with pytest.raises(ImportError, match=rf"does not load: {re.escape(str(tmp_path / 'cache'))}"):
        choose(CXX=empty)


@pytest.mark.filterwarnings("ignore:oxidion compiles")
@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("2.98.0", r"is for torch 2\.98\.0, but torch .* is imported from .*two in this process"),
        (str(torch.__version__), "keeps a tensor's pointer elsewhere"),
    ],
)
def test_library_for_another_torch_or_object_is_refused(
    version: str, message: str, choose: Choose, tmp_path: Path
) -> None:
    source, made = tmp_path / "wrong.c", tmp_path / "wrong.so"
    source.write_text(
        f'const char *oxidion_shim_abi(void) {{ return "{TABLE["abi"]}"; }}\n'
        f'const char *oxidion_torch_version(void) {{ return "{version}"; }}\n'
        "const void *oxidion_cdata(void *object) { return object; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source], check=True)
    with pytest.raises(ImportError, match=message):
        choose(CXX=script(tmp_path / "wrong-c++", f'cp {made} "$2"'))


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
    own |= {"_asdict", "_fields", "_make", "_replace", "_exit"}  # public names of named tuples, and of os
    table = {name for names in compat.PRIVATE.values() for name in names}
    table |= {part for owner in compat.PRIVATE for part in owner.split(".")}
    for path, tree in trees.items():
        if path.name != "compat.py":
            unknown = private_uses(tree) - own - table
            assert not unknown, f"{path}: {sorted(unknown)} belong into PRIVATE of _torch/compat.py"


def strings(source: str) -> list[str]:
    """The strings of a module, with a version instead of what is formatted into them."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = [str(node.value) for node in nodes if isinstance(node, ast.Constant)]
    joined = [node.values for node in nodes if isinstance(node, ast.JoinedStr)]
    return plain + [
        "".join(
            str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "2.7" for part in parts
        )
        for parts in joined
    ]


def test_every_command_that_an_error_advises_can_be_run() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    source = (PACKAGE / "_torch" / "library.py").read_text()
    advised = {found for text in strings(source) for found in re.findall(r"`([^`]+)`", text)}
    assert len(advised) >= 3
    for command in advised:
        program, verb, *rest = shlex.split(command)
        if program == "make":
            assert verb in targets, command
            assert not rest, command
        else:
            assert (program, verb) == ("pip", "install"), command
            for requirement in (word for word in rest if not word.startswith("-")):
                Requirement(requirement)
