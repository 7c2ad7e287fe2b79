"""Docstrings for the documentation site: complete as at run time, equations and names in Markdown."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
from markdown.extensions.toc import slugify

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "oxidion"
DISPLAY = re.compile(r"^( *)\.\. math::\n((?:\1 +.*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]*)`")
NAME = re.compile(r"(?<![`\[\w])`(\w[\w.]*)(\(\))?`(?!`)")
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{5})")
PAGE = re.compile(r"docs/([\w/-]+\.md)")


def _completed() -> Any:
    """The function that completes docstrings when the package is imported, without importing the package."""
    (path,) = PACKAGE.rglob("*constructor.py")
    spec = importlib.util.spec_from_file_location("constructor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.completed


completed = _completed()


class Completed(griffe.Extension):
    """Completes the docstrings of optimizers and turns those of the package into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrites all docstrings, those of derived classes first."""
        public = {str(name) for name in pkg.exports or ()}
        classes = [item for item in _objects(pkg) if isinstance(item, griffe.Class) and item.docstring]
        own = {item.path: item.docstring.value for item in classes if item.docstring}
        for item in classes:
            bases = [own[base.path] for base in item.mro() if base.path in own]
            if item.docstring and bases and "__init__" in item.members:
                names = [parameter.name for parameter in item.members["__init__"].parameters][1:]
                item.docstring.value = completed(own[item.path], bases, names)
        for item in _objects(pkg):
            if item.docstring:
                item.docstring.value = markdown(item.docstring.value, public)


def _objects(item: Any) -> list[Any]:
    """The object and all that lies in it."""
    found = [item]
    for member in item.members.values():
        if not member.is_alias:
            found += _objects(member)
    return found


def markdown(text: str, public: Any) -> str:
    """A docstring's equations, names and papers in the site's Markdown."""

    def display(match: re.Match[str]) -> str:
        tex = textwrap.dedent(match[2]).strip()
        if "\\\\" in tex:
            tex = f"\\begin{{align*}} {tex} \\end{{align*}}"
        return textwrap.indent(f"$$\n{tex}\n$$\n\n", match[1])

    def name(match: re.Match[str]) -> str:
        shown = f"`{match[1]}{match[2] or ''}`"
        return f"[{shown}][oxidion.{match[1]}]" if match[1] in public else shown

    def page(match: re.Match[str]) -> str:
        title = (PACKAGE.parents[1] / match[0]).read_text().partition("\n")[0].lstrip("# ")
        return f"[{title.partition(':')[0].lower()}][{slugify(title, '-')}]"

    text = PAGE.sub(page, text)
    text = DISPLAY.sub(display, text + "\n")
    text = INLINE.sub(r"$\1$", text)
    text = ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
    return NAME.sub(name, text).rstrip() + "\n"
