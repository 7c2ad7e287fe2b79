"""The stub of the extension names what the extension holds, and no more."""

from __future__ import annotations

import ast

import pytest

from oxidion import _oxidion

from .sources import PACKAGE

STUB = ast.parse((PACKAGE / "_oxidion.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}


def names_of(body: list[ast.stmt]) -> set[str]:
    """Names that a body of a stub defines."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def public(names: set[str]) -> set[str]:
    """Names without those that start with an underscore."""
    return {name for name in names if not name.startswith("_")}


def test_module_names_equal_the_names_in_the_stub() -> None:
    there = public(set(dir(_oxidion)))
    assert there
    assert there == public(names_of(STUB.body))


def test_version_is_in_the_stub() -> None:
    assert "__version__" in names_of(STUB.body)
    assert isinstance(_oxidion.__version__, str)


@pytest.mark.parametrize("name", CLASSES)
def test_class_members_equal_the_members_in_the_stub(name: str) -> None:
    there = {key for key in vars(getattr(_oxidion, name)) if not key.startswith("_")}
    assert there == public(names_of(CLASSES[name].body))


def test_the_stub_has_classes() -> None:
    assert {"Session"} <= CLASSES.keys()
