"""The graph of imports of the Python package, read from its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import NamedTuple, TypeVar

Node = TypeVar("Node", str, tuple[str, ...])


class Import(NamedTuple):
    """A module that another imports.

    Attributes:
        target: name of the imported module.
        line: number of the line.
        typing: whether only type checkers see it.
    """

    target: str
    line: int
    typing: bool


def module_names(folder: Path, package: str) -> dict[str, Path]:
    """Files of a package by the names of their modules; a stub stands for an extension."""
    found = {}
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):
        parts = file.relative_to(folder).with_suffix("").parts
        found[".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])] = file
    return found


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).removeprefix("typing.") == "TYPE_CHECKING"


def _statements(node: ast.AST, typing: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports at any depth, those in functions too."""
    body = set(node.body) if isinstance(node, ast.If) and _is_for_types(node) else set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, typing or child in body
        yield from _statements(child, typing or child in body)


def imports_of(name: str, source: str, modules: Mapping[str, object], *, is_package: bool) -> list[Import]:
    """Modules of the package that one of them imports.

    Importing ``a.b.c`` runs ``a`` and ``a.b`` too: they count unless the importer lies in them, whose own
    import runs them before it.
    """
    found = []
    around = name.split(".") if is_package else name.split(".")[:-1]
    for node, typing in _statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        else:
            base = around[: len(around) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            inside = [f"{start}.{alias.name}" for alias in node.names]
            targets = [target if target in modules else start for target in inside]
        for target in targets:
            parts = target.split(".")
            run = [".".join(parts[:count]) for count in range(1, len(parts))]
            own = {".".join(around[:count]) for count in range(1, len(around) + 1)}
            reached = [*(step for step in run if step not in own), target]
            reached = [each for each in reached if each in modules and each != name]
            found += [Import(each, node.lineno, typing) for each in reached]
    return found


def import_graph(folder: Path, package: str) -> dict[str, list[Import]]:
    """Imports within a package, by importing module."""
    modules = module_names(folder, package)
    return {
        name: imports_of(name, file.read_text(), modules, is_package=file.name == "__init__.py")
        for name, file in modules.items()
    }


def circle(graph: Mapping[str, list[Import]], *, typing: bool) -> list[str]:
    """The modules of one circle in the order of its imports, the first one again at the end; else nothing.

    Args:
        graph: imports by module.
        typing: whether imports for type checkers count.
    """
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for each in graph.get(name, []):
            if (typing or not each.typing) and (found := visit(each.target, [*path, name])):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def circles(graph: Mapping[Node, Set[Node]]) -> list[list[Node]]:
    """The strongly connected components of two nodes or more, each in order.

    Args:
        graph: the nodes that each node names.
    """
    number: dict[Node, int] = {}
    least: dict[Node, int] = {}
    waiting: list[Node] = []
    found: list[list[Node]] = []

    def visit(node: Node) -> None:
        number[node] = least[node] = len(number)
        waiting.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
            if other in waiting:
                least[node] = min(least[node], least[other])
        if least[node] == number[node]:
            at = waiting.index(node)
            if len(waiting) > at + 1:
                found.append(sorted(waiting[at:]))
            del waiting[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found
