"""Operations are declared once, in src/kernels/ops: no other file lists them or orders their scalars."""

from __future__ import annotations

import re

from oxidion import _oxidion

from .sources import ROOT, relative, rust_code, rust_files, without_unit_tests

KERNELS = ROOT / "src" / "kernels"
NAMES = [kernel["name"] for kernel in _oxidion.device_kernels()]
DECLARATIONS = KERNELS / "ops"
#: Files that carry out any formula, and operations that have none: those of products, and pieces of a pass.
ENGINES = ("cpu/each", "cpu/fold", "cpu/product/combine", "ops/factored")
#: Files of tests that have an equation, a number or a fault for operations by name.
WITH_EQUATIONS = {"jobs.py", "test_quantized.py", "test_rows.py", "test_compile_quantized.py"}


def named(text: str) -> set[str]:
    """Operations that a text names as strings or as arguments of a macro."""
    words = set(re.findall(r"[\"(](\w+)[\",]", text))
    return {name for name in NAMES if name != "count" and words & {name, f"{name}_quantized"}}


def test_names_are_found_as_strings_and_as_arguments() -> None:
    assert named('stems: &["lion_quantized"], UPDATE(adamw, AdamW)') == {"lion", "adamw"}


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


def test_formulas_stand_once() -> None:
    """CUDA bodies are generated and libtorch executes recorded formulas: neither is handwritten."""
    assert not list(DECLARATIONS.glob("*.cuh"))
    hand_written = [file.read_text() for file in (KERNELS / "cuda" / "src").iterdir()]
    operations = [kernel["operation"] for kernel in _oxidion.device_kernels()]
    bodies = [name for name in operations if any(f"struct {name} " in text for text in hand_written)]
    assert not bodies
    wrong = [
        relative(file)
        for file in rust_files(tests=False)
        if re.search(r"fn \w+\([^)]*values: &mut \[Value\]", rust_code(file.read_text()))
    ]
    assert not wrong
    bodies = [
        relative(file)
        for file in rust_files(tests=False)
        if re.search(r"\bimpl.*\b(Op|Fold|RowPass)<.* for ", rust_code(file.read_text()))
    ]
    assert set(bodies) <= {f"src/kernels/{name}.rs" for name in ENGINES}


def test_kernels_are_called_by_their_declarations() -> None:
    wrong = [
        relative(file)
        for file in rust_files(tests=False)
        if re.search(r"Pass::new\(", rust_code(file.read_text())) and file.name not in {"declare.rs"}
    ]
    assert not wrong


def test_formula_of_the_page_is_the_one_that_is_written_and_run() -> None:
    """Less names, attributes and descriptions of fields: the template is compiled and stepped by a test."""
    page = (
        (ROOT / "src" / "algorithm" / "README.md").read_text().partition("```rust\n")[2].partition("```")[0]
    )
    template = (ROOT / ".ci" / "optimizer" / "update.rs").read_text()
    template = template.replace("RustType", "Sgd").replace("optimizer_name", "sgd")

    def code(text: str) -> list[str]:
        lines = map(str.strip, text.partition("operation! {")[2].splitlines())
        return [line for line in lines if line and not line.startswith(("//", "#", "pub(in crate"))]

    assert len(code(page)) > 20
    assert code(page) == code(template)
