"""Docstrings for the documentation site: complete as at run time, equations and names in Markdown."""

from __future__ import annotations

import ast
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


def _constructor() -> Any:
    """The module that completes docstrings when the package is imported, without importing the package."""
    (path,) = PACKAGE.rglob("*constructor.py")
    spec = importlib.util.spec_from_file_location("constructor", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


constructor = _constructor()
completed, GATHERED, OPTIONS = constructor.completed, constructor.GATHERED, constructor.OPTIONS
TYPES = ("ModelOptions", "SharedOptions", "CommonOptions")
"""Types of arguments: those of a model, and the two of the arguments of every class."""


class Completed(griffe.Extension):
    """Completes the docstrings of optimizers and turns those of the package into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrites all docstrings, those of derived classes first."""
        public = {str(name) for name in pkg.exports or ()}
        common = Common(pkg)
        classes = [item for item in _objects(pkg) if isinstance(item, griffe.Class) and item.docstring]
        own = {item.path: item.docstring.value for item in classes if item.docstring}
        for item in classes:
            bases = [own[base.path] for base in item.mro() if base.path in own]
            if item.docstring and bases and "__init__" in item.members:
                if common.spell_out(item):
                    bases.append(common.docstring)
                names = [parameter.name for parameter in item.members["__init__"].parameters][1:]
                item.docstring.value = completed(own[item.path], bases, names)
        for item in _objects(pkg):
            if item.docstring:
                item.docstring.value = markdown(item.docstring.value, public)


class Common:
    """The arguments of every class, as they are written in the sources."""

    def __init__(self, pkg: griffe.Module) -> None:
        """Reads their types, and their defaults from the schema."""
        core = pkg["_core"]
        options, shared, every = (core["signature"][name] for name in TYPES)
        self.docstring = every.docstring.value
        self._types = {**shared.members, **every.members}
        self._options = f"Unpack[{options.name}]"
        fields = ast.parse(str(core["schema"]["COMMON"].value), mode="eval").body
        self._defaults = _dict(core["schema"]["ONLY_ARGUMENTS"]) | {
            key.value: ast.unparse(field.args[0]) if field.args else "None"
            for key, field in zip(fields.keys, fields.values, strict=True)
            if key is not None
        }

    def spell_out(self, item: griffe.Class) -> bool:
        """Puts them in the place where a constructor gathers them; false for one that does not."""
        parameters = item.members["__init__"].parameters
        if GATHERED not in [parameter.name for parameter in parameters]:
            return False
        del parameters[GATHERED]
        classes = [*reversed(item.mro()), item]
        own = [cls.members["_OWN_DEFAULTS"] for cls in classes if "_OWN_DEFAULTS" in cls.members]
        defaults = self._defaults | {key: value for each in own for key, value in _dict(each).items()}
        for key, attribute in self._types.items():
            if key not in [parameter.name for parameter in parameters]:
                kind, default = griffe.ParameterKind.keyword_only, defaults[key]
                added = griffe.Parameter(key, annotation=attribute.annotation, kind=kind, default=default)
                parameters.add(added)
        kind, default = griffe.ParameterKind.var_keyword, "{}"
        parameters.add(griffe.Parameter(OPTIONS, annotation=self._options, kind=kind, default=default))
        return True


def _dict(attribute: Any) -> dict[str, str]:
    """A dict of the sources: keys, and values as they are written."""
    found = ast.parse(str(attribute.value), mode="eval").body
    return {key.value: ast.unparse(value) for key, value in zip(found.keys, found.values, strict=True)}


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
