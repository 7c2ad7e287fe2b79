"""The graph of names among Rust files, read from their source."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from .sources import RUST, rust_code, rust_files, without_unit_tests

Module = tuple[str, ...]
"""Path of a module from the root of the crate."""


def module_of(path: Path) -> Module:
    """The module that a file below ``src`` is."""
    parts = path.relative_to(RUST).with_suffix("").parts
    return parts[:-1] if parts[-1] == "mod" else parts


def use_tree(code: str) -> Iterator[Module]:
    """Paths that the use tree at the start of the text spells out, braces expanded."""
    code = code.lstrip()
    if code.startswith("{"):
        depth, start = 0, 1
        for at, character in enumerate(code):
            depth += (character == "{") - (character == "}")
            if depth == 0 or (depth == 1 and character == ","):
                yield from use_tree(code[start:at])
                start = at + 1
            if depth == 0:
                return
    elif name := re.match(r"\w+|\*", code):
        rest = code[name.end() :]
        tails = use_tree(rest[2:]) if rest.startswith("::") else iter(((),))
        yield from ((name.group(), *tail) for tail in tails)


def named_paths(module: Module, code: str) -> set[Module]:
    """Paths from the root of the crate that a module names by ``crate::``, ``self::`` or ``super::``."""
    found: set[Module] = set()
    for start in re.finditer(r"(?<![\w:])(crate|self|super(?:::super)*)::", code):
        ups = start.group(1).count("super")
        base = () if start.group(1) == "crate" else module[: len(module) - ups]
        found |= {(*base, *tail) for tail in use_tree(code[start.end() :])}
    return found


def _imports(module: Module, code: str, modules: Set[Module]) -> dict[str, Module]:
    """Names that the uses of a module bring into it, with the paths that they stand for."""
    found = {}
    for use in re.findall(r"(?<!\w)use\s+(.*?);", code, re.DOTALL):
        paths = named_paths(module, use)
        paths |= {(*module, *path) for path in use_tree(use) if (*module, path[0]) in modules}
        for path in paths:
            path = path[:-1] if path[-1] == "self" else path
            found[path[-1]] = path
    return found


def file_graph(sources: Mapping[Module, str]) -> dict[Module, set[Module]]:
    """Of each module the modules of other files that it names, by ``use`` or by a path, or declares.

    A name that a module only brings in from another stands for that other: who names it by way of a
    parent's exports uses the file that has it.

    Args:
        sources: code of each module, without comments, literals and unit tests.
    """
    imports = {module: _imports(module, code, sources.keys()) for module, code in sources.items()}

    def home(path: Module, seen: Set[tuple[Module, str]] = frozenset()) -> Module:
        module: Module = ()
        for at, name in enumerate(path):
            if (*module, name) in sources:
                module = (*module, name)
                continue
            target = imports.get(module, {}).get(name)
            if target is None or (module, name) in seen:
                break
            return home((*target, *path[at + 1 :]), seen | {(module, name)})
        return module

    graph = {}
    for module, code in sources.items():
        named = {home(path) for path in named_paths(module, code)}
        named |= {(*module, child) for child in re.findall(r"\bmod (\w+);", code)}
        graph[module] = {target for target in named if target in sources and target != module}
    return graph


def crate_graph() -> dict[Module, set[Module]]:
    """Graph of the files of the crate; unit tests do not count."""
    files = [file for file in rust_files(tests=False) if file.name not in {"lib.rs", "build.rs"}]
    sources = {module_of(file): without_unit_tests(rust_code(file.read_text())) for file in files}
    return file_graph(sources)


def without_families(graph: Mapping[Module, Set[Module]]) -> list[dict[Module, set[Module]]]:
    """The graph without the arrows from parents to their submodules, and without those the other way."""
    below = {(a, b) for a, targets in graph.items() for b in targets if b[: len(a)] == a}
    above = {(a, b) for a, targets in graph.items() for b in targets if a[: len(b)] == b}
    return [
        {a: {b for b in targets if (a, b) not in harmless} for a, targets in graph.items()}
        for harmless in (below, above)
    ]
