"""Dependence among Python modules (docs/architecture.md, 1): no circle, no arrow upwards."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

import oxidion
from oxidion._oxidion import algorithms

from .imports import Import, circle, circles, import_graph, imports_of
from .sources import PACKAGE, ROOT, python_files, relative

MAY_IMPORT: dict[str, frozenset[str]] = {
    "_oxidion": frozenset(),
    "_torch": frozenset(),
    "_dist": frozenset({"_torch"}),
    "_reference": frozenset(),
    "_cuda": frozenset({"_dist", "_torch"}),
    "_core": frozenset({"_cuda", "_dist", "_reference", "_torch"}),
    "_planning": frozenset({"_core", "_dist"}),
    "_energy": frozenset({"_core"}),
    "optim": frozenset({"_core", "_dist", "_reference"}),
    "functional": frozenset({"_core", "_cuda", "_torch", "optim"}),
    "checkpoint": frozenset({"_core", "_dist"}),
    "graph": frozenset({"_core", "_cuda"}),
    "groups": frozenset({"_core", "_dist", "optim"}),
    "backward": frozenset({"_core", "_cuda", "_dist", "_torch"}),
    "compat": frozenset(
        {"_core", "_dist", "backward", "checkpoint", "functional", "graph", "groups", "optim"}
    ),
    "qk_clip": frozenset({"_core", "_dist"}),
    "_gpu_check": frozenset({"", "_core", "_cuda", "graph"}),
    "__main__": frozenset({"", "_energy", "_gpu_check", "_planning", "compat"}),
    "": frozenset(
        {"_core", "_torch", "backward", "checkpoint", "compat", "functional", "groups", "optim", "qk_clip"}
    ),
}
"""Packages and modules of ``oxidion`` ("" here) that one of them may import in addition to the extension."""


GRAPH = import_graph(PACKAGE, "oxidion")


def planted(**sources: str) -> dict[str, list[Import]]:
    """Graph of a package ``p`` of these modules; ``q_`` before a name stands for its package ``p.q``."""
    names = {"p": "", "p.q": ""} | {f"p.{name.replace('q_', 'q.')}": text for name, text in sources.items()}
    return {
        name: imports_of(name, text, names, is_package=name in ("p", "p.q")) for name, text in names.items()
    }


def test_circles_are_found_in_every_spelling_of_an_import() -> None:
    assert circle(planted(a="import p.b", b="from p import a"), typing=False) == ["p.a", "p.b", "p.a"]
    around = planted(a="from .b import x", b="def f():\n    from . import q", q="from ..a import y")
    assert circle(around, typing=False) == ["p.a", "p.b", "p.q", "p.a"]
    inner = planted(a="from p.q.c import x", q_c="def f():\n    from ..a import y")
    assert circle(inner, typing=False) == ["p.a", "p.q.c", "p.a"]
    own = planted(a="import p.q.c", q_c="")
    own["p.q"] = imports_of("p.q", "from .. import a", own, is_package=True)
    assert circle(own, typing=False) == ["p.a", "p.q", "p.a"], "importing a module runs its package"
    for_types = planted(a="if TYPE_CHECKING:\n    import p.b", b="import p.a")
    assert circle(for_types, typing=False) == []
    assert circle(for_types, typing=True) == ["p.a", "p.b", "p.a"]
    assert circle(planted(a="import p.b", b="import p.q.c", q_c="import torch"), typing=True) == []


@pytest.mark.parametrize("typing", [False, True], ids=["run", "types"])
def test_no_python_module_imports_itself_by_way_of_others(typing: bool) -> None:
    assert sum(map(len, GRAPH.values())) > 100
    assert "oxidion._core.stepper" in {each.target for each in GRAPH["oxidion._core.base"]}
    found = circle(GRAPH, typing=typing)
    assert not found, " -> ".join(found)


def run_graph(graph: dict[str, list[Import]]) -> dict[str, set[str]]:
    """The modules that each module imports when it runs: not those for type checkers only."""
    return {name: {each.target for each in found if not each.typing} for name, found in graph.items()}


def scripts(folder: str) -> dict[str, list[Import]]:
    """Graph of a folder of scripts, which import each other by their names alone."""
    files = {file.stem: file for file in (ROOT / folder).glob("*.py")}
    return {name: imports_of(name, file.read_text(), files, is_package=False) for name, file in files.items()}


def test_all_circles_of_python_files_are_found() -> None:
    two = planted(a="import p.b", b="import p.a", c="import p.q.d", q_d="from ..c import x")
    assert circles(run_graph(two)) == [["p.a", "p.b"], ["p.c", "p.q.d"]]
    assert circles(run_graph(planted(a="if TYPE_CHECKING:\n    import p.b", b="import p.a"))) == []


@pytest.mark.parametrize(
    ("graph", "least"),
    [
        (GRAPH, 500),
        (import_graph(ROOT / "tests", "tests"), 500),
        (scripts("benchmarks"), 100),
        (scripts("examples"), 10),
    ],
    ids=["package", "tests", "benchmarks", "examples"],
)
def test_no_python_file_imports_itself_by_way_of_others(graph: dict[str, list[Import]], least: int) -> None:
    assert sum(map(len, graph.values())) > least
    found = circles(run_graph(graph))
    assert not found, "\n".join(map(", ".join, found))


def room_of(module: str) -> str:
    """The package or module below ``oxidion`` that a module belongs to; "" for ``oxidion`` itself."""
    return module.split(".")[1] if "." in module else ""


def test_python_packages_import_only_those_below_them() -> None:
    assert {room_of(name) for name in GRAPH} == MAY_IMPORT.keys()
    seen = {
        (room_of(name), room_of(each.target)): f"{name}:{each.line}"
        for name, imports in GRAPH.items()
        for each in imports
    }
    wrong = [
        f"{where}: {room or 'oxidion'} may not import {target or 'oxidion'}"
        for (room, target), where in seen.items()
        if target not in MAY_IMPORT[room] | {room, "_oxidion"}
    ]
    assert not wrong, "\n".join(wrong)
    unused = {(room, target) for room, targets in MAY_IMPORT.items() for target in targets} - seen.keys()
    assert not unused, "the table allows imports that do not occur"


def names_in(source: str) -> Iterator[tuple[int, str]]:
    """Lines and words of a Python file that are code: identifiers and strings, but no docstrings."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = re.findall(r"\w+", node.value)
        elif isinstance(node, ast.Name | ast.Attribute | ast.arg | ast.alias | ast.ImportFrom):
            fields = (getattr(node, field, None) for field in ("id", "attr", "arg", "name", "module"))
            words = [word for field in fields if field for word in field.split(".")]
        else:
            continue
        for word in words:
            yield getattr(node, "lineno", 0), word


def test_the_step_of_python_names_no_algorithm() -> None:
    known = {*algorithms(), "galore", "apollo"}
    assert {"adamw", "adafactor", "dion"} <= known
    assert {word for _, word in names_in('"adamw"\nx = f"of {y}: adamw"\nimport a.dion')} >= {"adamw", "dion"}
    files = sorted((PACKAGE / "_core").glob("*.py"))
    assert len(files) > 10
    wrong = [
        f"{relative(file)}:{line}: {word}"
        for file in files
        for line, word in names_in(file.read_text())
        if word.lower() in known
    ]
    assert not wrong, "\n".join(wrong)


def test_state_key_has_one_role_in_all_algorithms_of_a_class() -> None:
    """Else `existing` could not tell the role of a state whose parameter another algorithm steps."""
    classes = [value for value in vars(oxidion.optim).values() if isinstance(value, type)]
    tables = [value._STATE_NAMES for value in classes if hasattr(value, "_STATE_NAMES")]
    assert sum(map(len, tables)) > 10
    for table in tables:
        roles: dict[str, str] = {}
        for public in table.values():
            for role, key in public.items():
                assert roles.setdefault(key, role) == role, (key, table)


OPENERS = re.compile(r"(What|Where|Whether|How|That|Those)\b")


def test_docstrings_of_the_package_open_with_what_they_are_about() -> None:
    opened = 0
    wrong = []
    for file in python_files("python/oxidion"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                if isinstance(text, str):
                    opened += 1
                    if OPENERS.match(text):
                        wrong.append(f"{relative(file)}:{node.lineno}: {text.splitlines()[0]}")
    assert opened > 200
    assert OPENERS.match("Whether this is found")
    assert not wrong, "\n".join(wrong)


def test_only_the_files_of_communication_name_torch_distributed() -> None:
    files = python_files("python/oxidion")
    assert len(files) > 10
    users = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            else:
                continue
            if any(name == "torch.distributed" or name.startswith("torch.distributed.") for name in names):
                users.append(relative(file))
    # Names by version, and a check that makes process groups as a user does.
    own = ("_torch/compat", "_gpu_check/ranks")
    allowed = ("_dist/comm", "_dist/collectives", "_dist/folders", *own)
    assert set(users) == {f"python/oxidion/{name}.py" for name in allowed}


def test_optimizer_classes_do_no_tensor_mathematics() -> None:
    files = [file for file in (PACKAGE / "optim").glob("*.py") if file.name != "__init__.py"]
    assert files
    for file in files:
        calls = [
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch.")
        ]
        assert not calls, f"{relative(file)} calls {calls}"
