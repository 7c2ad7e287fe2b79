"""Operations are declared once, in src/kernels/ops: no other file lists them or orders their scalars."""

from __future__ import annotations

import re

from oxidion import _oxidion

from .sources import ROOT, relative, rust_code, rust_files, without_unit_tests

KERNELS = ROOT / "src" / "kernels"
NAMES = [kernel["name"] for kernel in _oxidion.device_kernels()]
DECLARATIONS = KERNELS / "ops"
#: Files of tests that have an equation, a number or a fault for operations by name.
WITH_EQUATIONS = {"jobs.py", "test_coded.py", "test_rows.py", "test_compile_coded.py"}


def named(text: str) -> set[str]:
    """Operations that a text names as strings or as arguments of a macro."""
    words = set(re.findall(r"[\"(](\w+)[\",]", text))
    return {name for name in NAMES if name != "count" and words & {name, f"{name}_coded"}}


def test_names_are_found_as_strings_and_as_arguments() -> None:
    assert named('stems: &["lion_coded"], UPDATE(adamw, AdamW)') == {"lion", "adamw"}


def test_no_source_has_a_list_of_operations() -> None:
    assert len(NAMES) > 20
    rust = [file for file in rust_files(tests=False) if KERNELS in file.parents]
    sources = [*rust, *KERNELS.rglob("*.cu"), *KERNELS.rglob("*.cuh")]
    wrong = []
    for file in sources:
        if DECLARATIONS in file.parents:
            continue
        text = file.read_text()
        found = named(without_unit_tests(text) if file.suffix == ".rs" else text)
        if len(found) > 2:
            wrong.append(f"{relative(file)}: {sorted(found)}")
    assert not wrong, "\n".join(wrong)


def test_no_support_of_the_tests_has_a_list_of_operations() -> None:
    files = [file for file in (ROOT / "tests" / "cuda").rglob("*.py") if file.name not in WITH_EQUATIONS]
    assert len(files) > 40
    wrong = [
        f"{relative(file)}: {sorted(found)}"
        for file in files
        if not file.name.startswith("test_") and len(found := named(file.read_text())) > 5
    ]
    assert not wrong, "\n".join(wrong)


def test_scalars_have_no_numbers_on_devices() -> None:
    bodies = list(DECLARATIONS.rglob("*.cuh"))
    assert len(bodies) > 8
    wrong = [relative(file) for file in bodies if re.search(r"\bs\[\d", file.read_text())]
    assert not wrong


def test_kernels_are_called_by_their_declarations() -> None:
    wrong = [
        relative(file)
        for file in rust_files(tests=False)
        if re.search(r"Pass::new\(", rust_code(file.read_text())) and file.name not in {"declare.rs"}
    ]
    assert not wrong
