"""Dependence among Rust modules (docs/architecture.md, 1), unsafe code and the top level of the checkout."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .imports import circles
from .rust_imports import crate_graph, file_graph, module_of, named_paths, use_tree, without_families
from .sources import (
    ROOT,
    RUST,
    numbered,
    relative,
    rust_code,
    rust_files,
    without_unit_tests,
)

FACTS = frozenset({"error", "spec", "tensor"})
"""What every room above them may name: memory, and facts about parameters."""
MAY_USE: dict[str, frozenset[str]] = {
    "error": frozenset(),
    "tensor": frozenset({"error"}),
    "spec": frozenset({"error", "tensor"}),
    "threads": frozenset(),
    "layout": frozenset({"error"}),
    "program": frozenset({"spec", "tensor"}),
    "kernels": FACTS | {"threads"},
    "linalg": FACTS | {"kernels", "threads"},
    "algorithm": FACTS | {"kernels", "linalg", "program"},
    "plan": FACTS | {"algorithm", "layout", "program"},
    "session": FACTS | {"algorithm", "kernels", "layout", "plan", "program", "threads"},
    "binding": FACTS | {"algorithm", "kernels", "layout", "linalg", "plan", "session", "threads"},
    "lib": frozenset(),
    "build": frozenset(),
}
"""Rooms at the root of the crate that a room may name, the lower ones first."""

NO_DISTRIBUTION = ("algorithm", "linalg", "kernels")
DISTRIBUTION = re.compile(
    r"\b(mesh|meshes|dtensor|device_?mesh|process_?group|world|world_size|ranks|num_ranks|nccl|gloo)\b",
    re.IGNORECASE,
)
UNSAFE_ALLOWED = re.compile(
    r"src/(tensor/(buffer|encoded|fast_path|flat_ptr|storage|lent|matrix|test_views)|binding/tensor|threads/(team|openmp)"
    r"|session/views|linalg/views|kernels/(backend|libtorch/encoded|cpu/(each|isa|lookup)|cpu/product/\w+|cuda/\w+|ops/\w+/(device|panel)))\.rs"
)
MOST_UNSAFE = 286
"""Lines with ``unsafe`` at most, those of tests among them."""
TOP_LEVEL = {
    "Cargo.lock", "Cargo.toml", "pyproject.toml", "Makefile", "clippy.toml", "rustfmt.toml",
    "src", "python", "tests", "benchmarks", "examples", "docs",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE-MIT", "LICENSE-APACHE",
    "CITATION.cff", "mkdocs.yml",
}  # fmt: skip
OUTPUTS = {"target", "dist", "runs", "carry"}
"""Folders that git ignores."""


def layer_of(path: Path) -> str:
    """Name of the module at the root of the crate that the file belongs to."""
    return path.relative_to(RUST).parts[0].removesuffix(".rs")


def crate_paths(path: Path, code: str) -> set[tuple[str, ...]]:
    """Paths from the root of the crate that a file names."""
    return named_paths(module_of(path), code)


def test_crate_paths_are_resolved_from_every_spelling() -> None:
    code = "use crate::{a::{B, c}, d::E};\nuse super::f::G; fn x() { super::super::h::i(); crate::j::k() }"
    expected = {("a", "B"), ("a", "c"), ("d", "E"), ("m", "f", "G"), ("h", "i"), ("j", "k")}
    assert crate_paths(RUST / "m" / "n.rs", code) == expected
    assert crate_paths(RUST / "m" / "mod.rs", "use super::o::P;") == {("o", "P")}


def test_the_table_of_rooms_has_no_circle() -> None:
    below: set[str] = set()
    for room, used in MAY_USE.items():
        assert used <= below, f"{room} may use {sorted(used - below)}, which the table names after it"
        below.add(room)


def test_rust_modules_use_only_the_layers_below_them() -> None:
    files = rust_files(tests=False)
    assert {layer_of(file) for file in files} == MAY_USE.keys()
    assert len(files) > 20
    wrong = []
    seen = 0
    for file in files:
        layer = layer_of(file)
        for target, *_ in crate_paths(file, without_unit_tests(rust_code(file.read_text()))):
            seen += 1
            if target != layer and target not in MAY_USE[layer]:
                wrong.append(f"{relative(file)}: {layer} may not use {target}")
    assert seen > 50
    assert not wrong, "\n".join(wrong)


FILES = crate_graph()


def test_circles_of_files_are_found_in_every_spelling() -> None:
    both = {("a",): "use crate::b::X;", ("b",): "use super::a::Y;"}
    exported = {
        ("a",): "mod c; pub use c::X;",
        ("a", "c"): "use crate::b::{Y, Z};",
        ("b",): "use crate::a::X;",
    }
    siblings = {
        ("m",): "mod a; mod b;",
        ("m", "a"): "use super::b::X;",
        ("m", "b"): "fn f() { super::a::y() }",
    }
    for sources in (both, exported, siblings):
        planted = without_families(file_graph(sources))
        assert all(len(found) == 1 and len(found[0]) == 2 for found in map(circles, planted)), sources
    through = {("a",): "mod c;", ("a", "c"): "use crate::b::X;", ("b",): "use crate::a::Y;"}
    assert [len(found) for found in map(circles, without_families(file_graph(through)))] == [0, 1]
    family = {("a",): "mod c; use c::X;", ("a", "c"): "use super::Y;"}
    assert circles(file_graph(family)) == [[("a",), ("a", "c")]]
    assert not any(map(circles, without_families(file_graph(family))))
    assert circles(file_graph({("a",): "use crate::b::X;", ("b",): "use crate::c::Y;", ("c",): ""})) == []


def circles_of_the_crate() -> list[str]:
    """Circles of the crate's files.

    A circle that needs a parent's naming of its submodules and a submodule's naming of its parent is
    harmless: `mod.rs` lists the files of its folder, and has the types that they share.
    """
    found = {tuple(circle) for each in without_families(FILES) for circle in circles(each)}
    return [", ".join("::".join(module) for module in circle) for circle in sorted(found)]


def test_no_rust_file_names_itself_by_way_of_others() -> None:
    assert len(FILES) > 150
    assert sum(map(len, FILES.values())) > 600
    assert ("plan", "ir") in FILES["plan", "route"]
    assert ("tensor", "flat_ptr") in FILES["session", "views"], "a parent's exports are followed"
    found = circles_of_the_crate()
    assert not found, "\n".join(found)


KERNELS = (
    "formula",
    "op",
    "cpu",
    "cuda",
    "backend",
    "libtorch",
    "dispatch",
    "ops",
    "print",
    "headers",
    "sources",
    "enter",
)
"""Modules of ``kernels``, the lower ones first; ``cuda_stub`` stands for ``cuda``."""


def exported(text: str) -> dict[str, str]:
    """Names that a module exports from modules of its own, with the module."""
    uses = re.findall(r"^pub(?:\([\w: ]*\))? use (?!crate|super)(.*?);", text, re.DOTALL | re.MULTILINE)
    return {path[-1]: path[0] for use in uses for path in use_tree(use) if len(path) > 1}


def test_modules_of_kernels_use_only_those_below_them() -> None:
    folder = RUST / "kernels"
    exports = exported(rust_code((folder / "mod.rs").read_text()))
    assert exports["run"] == "dispatch"
    assert exports["Apply"] == "ops"
    wrong, seen = [], 0
    for file in (file for file in rust_files(tests=False) if folder in file.parents):
        own = file.relative_to(folder).parts[0].removesuffix(".rs")
        own = {"cuda_stub": "cuda"}.get(own, own)
        if own == "mod":
            continue
        for room, *path in crate_paths(file, without_unit_tests(rust_code(file.read_text()))):
            if room == "kernels" and path:
                target = exports.get(path[0], path[0])
                seen += target != own and target in KERNELS
                if target in KERNELS and KERNELS.index(target) > KERNELS.index(own):
                    wrong.append(f"{relative(file)}: {own} may not use {'::'.join(path)} of {target}")
    assert seen > 50
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("pattern", "only"),
    [
        (r"\bpyo3\b|\bPyAny\b|\bPython<", r"src/binding/.*"),
        (r"\btch\b", r"src/(algorithm|linalg|kernels|binding|tensor|error|session).*"),
        (r"\brayon\b", r"src/threads/mod\.rs"),
        (r"\bthreads::(run|each|map|chunks|share)\b", r"src/(kernels/(cpu|ops)/.*|linalg/iteration)\.rs"),
        (r"\bdata_ptr\b", r"src/tensor/(elements|flat_ptr)\.rs"),
        (r"\blibloading\b", r"src/kernels/cuda/(driver|nvrtc)\.rs"),
    ],
    ids=["python", "tensors", "rayon", "threads", "pointers", "driver"],
)
def test_a_library_is_named_only_where_it_belongs(pattern: str, only: str) -> None:
    lines = [
        (relative(file), number, line)
        for file in rust_files(tests=False)
        for number, line in numbered(without_unit_tests(rust_code(file.read_text())))
        if re.search(pattern, line)
    ]
    assert lines, "the pattern finds nothing at all"
    wrong = [
        f"{file}:{number}: {line.strip()}" for file, number, line in lines if not re.fullmatch(only, file)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_on_the_threads_of_the_kernels_calls_libtorch() -> None:
    """Inside a region of OpenMP it would have one thread, and in the pool its threads would come on top."""
    files = [
        file for file in rust_files(tests=False) if re.search(r"kernels/(cpu/|ops/.*host)", relative(file))
    ]
    files.append(RUST / "linalg" / "packed.rs")  # what `linalg/iteration.rs` shares out
    assert len(files) > 20
    libtorch = re.compile(r"\btch\b|\bTensor\b|\.tensor\(")
    wrong = [
        f"{relative(file)}:{number}: {line.strip()}"
        for file in files
        for number, line in numbered(without_unit_tests(rust_code(file.read_text())))
        if libtorch.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", NO_DISTRIBUTION)
def test_mathematics_does_not_know_ranks_or_meshes(layer: str) -> None:
    files = [file for file in rust_files() if layer_of(file) == layer]
    assert files
    wrong = [
        f"{relative(file)}:{number}: {line.strip()}"
        for file in files
        for number, line in numbered(rust_code(file.read_text()))
        if DISTRIBUTION.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_unsafe_code_stays_in_its_files_and_says_why_it_is_sound() -> None:
    files = rust_files()
    assert files
    blocks = 0
    wrong = []
    for file in files:
        text = file.read_text()
        lines = text.splitlines()
        for number, line in numbered(rust_code(text)):
            if not re.search(r"\bunsafe\b", line):
                continue
            blocks += 1
            where = f"{relative(file)}:{number}"
            if not UNSAFE_ALLOWED.fullmatch(relative(file)):
                wrong.append(f"{where}: unsafe outside its files (UNSAFE_ALLOWED)")
            reason = "# Safety" if re.search(r"\bunsafe (trait|(extern .*)?fn)\b", line) else "SAFETY:"
            if not any(reason in before for before in lines[max(0, number - 12) : number]):
                wrong.append(f"{where}: no `{reason}` above it")
            if any("SAFETY: as above" in before for before in lines[max(0, number - 4) : number]):
                wrong.append(f"{where}: its reason has to be written out")
    assert 0 < blocks <= MOST_UNSAFE
    assert not wrong, "\n".join(wrong)


def test_lints_that_the_design_relies_on_are_denied() -> None:
    manifest = (ROOT / "Cargo.toml").read_text()
    for lint in (
        "unsafe_op_in_unsafe_fn",
        "undocumented_unsafe_blocks",
        "iter_over_hash_type",
        "unwrap_used",
        "expect_used",
        "print_stdout",
    ):
        assert re.search(rf'^{lint} = "deny"', manifest, re.MULTILINE), lint


def test_top_level_holds_nothing_but_what_the_architecture_names() -> None:
    names = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")} - OUTPUTS
    assert names == TOP_LEVEL
