"""Dependence among Rust modules (docs/architecture.md, 1), unsafe code and the top level of the checkout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    r"src/(tensor/(buffer|encoding|fast_path|lent|matrix|test_views)|binding/tensor|threads/(team|openmp)"
    r"|session/views|linalg/views|kernels/(backend|libtorch/encoded|cpu/(isa|lookup)|cpu/product/\w+|cuda/\w+|ops/\w+/(device|panel)))\.rs"
)
MOST_UNSAFE = 276
"""Lines with ``unsafe`` at most, those of tests among them."""
TOP_LEVEL = {
    "Cargo.lock", "Cargo.toml", "pyproject.toml", "Makefile", "clippy.toml", "rustfmt.toml",
    "src", "python", "tests", "benchmarks", "examples", "docs",
    "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE-MIT", "LICENSE-APACHE",
    "mkdocs.yml",
}  # fmt: skip
OUTPUTS = {"target", "dist", "runs", "carry"}
"""Folders that git ignores."""


def layer_of(path: Path) -> str:
    """Name of the module at the root of the crate that the file belongs to."""
    return path.relative_to(RUST).parts[0].removesuffix(".rs")


def _use_tree(code: str) -> Iterator[tuple[str, ...]]:
    """Paths that the use tree at the start of the text spells out, braces expanded."""
    code = code.lstrip()
    if code.startswith("{"):
        depth, start = 0, 1
        for at, character in enumerate(code):
            depth += (character == "{") - (character == "}")
            if depth == 0 or (depth == 1 and character == ","):
                yield from _use_tree(code[start:at])
                start = at + 1
            if depth == 0:
                return
    elif name := re.match(r"\w+", code):
        rest = code[name.end() :]
        tails = _use_tree(rest[2:]) if rest.startswith("::") else iter(((),))
        yield from ((name.group(), *tail) for tail in tails)


def crate_paths(path: Path, code: str) -> set[tuple[str, ...]]:
    """Paths from the root of the crate that a file names by ``crate::`` or ``super::``."""
    module = path.relative_to(RUST).with_suffix("").parts
    module = module[:-1] if module[-1] == "mod" else module
    found: set[tuple[str, ...]] = set()
    for start in re.finditer(r"(?<![\w:])(crate|super(?:::super)*)::", code):
        base = () if start.group(1) == "crate" else module[: -start.group(1).count("super")]
        found |= {(*base, *tail) for tail in _use_tree(code[start.end() :])}
    return found


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


KERNELS = ("formula", "op", "cpu", "cuda", "dispatch", "ops", "print", "headers", "sources")
"""Modules of ``kernels``, the lower ones first; ``cuda_stub`` stands for ``cuda``."""
BESIDE = ("libtorch", "backend")
"""Modules beside these: an operation names its formula, which computes on the operation's operands."""


def exported(text: str) -> dict[str, str]:
    """Names that a module exports from modules of its own, with the module."""
    uses = re.findall(r"^pub(?:\([\w: ]*\))? use (?!crate|super)(.*?);", text, re.DOTALL | re.MULTILINE)
    return {path[-1]: path[0] for use in uses for path in _use_tree(use) if len(path) > 1}


def test_modules_of_kernels_use_only_those_below_them() -> None:
    folder = RUST / "kernels"
    exports = exported(rust_code((folder / "mod.rs").read_text()))
    assert exports["run"] == "dispatch"
    assert exports["Apply"] == "ops"
    wrong, seen = [], 0
    for file in (file for file in rust_files(tests=False) if folder in file.parents):
        own = file.relative_to(folder).parts[0].removesuffix(".rs")
        own = {"cuda_stub": "cuda"}.get(own, own)
        if own == "mod" or own in BESIDE:
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
        (r"\bdata_ptr\b", r"src/tensor/buffer\.rs"),
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
