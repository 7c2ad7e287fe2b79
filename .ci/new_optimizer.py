"""Writes the files of a new optimizer: SGD with momentum under its name, which works at once and is then edited.

``make new-optimizer NAME=ademamix CLASS=AdEMAMix`` calls it. It writes five files and adds a line to three.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

TEMPLATES = Path(__file__).resolve().parent / "optimizer"
KINDS = ("elementwise",)

#: Template and place of each new file.
NEW = {
    "algorithm.rs": "src/algorithm/{name}.rs",
    "update.rs": "src/kernels/ops/{name}.rs",
    "optim.py": "python/oxidion/optim/{name}.py",
    "reference.py": "python/oxidion/_reference/{name}.py",
    "page.md": "docs/optimizers/{name}.md",
}


def filled(text: str, name: str, class_name: str) -> str:
    """A template under this name."""
    return text.replace("CLASS", class_name).replace("NAME_step", f"{name}_step").replace(
        '"NAME"', f'"{name}"'
    ).replace("NAME.", f"{name}.").replace("NAME =", f"{name} =")


def listed(text: str, line: str, block: re.Pattern[str]) -> str:
    """The text with a line among those of a block, which are sorted."""
    found = block.search(text)
    if found is None:
        raise SystemExit(f"error: expected a block {block.pattern!r}, found none")
    lines = [*found[1].splitlines(keepends=True), line]
    indent = re.match(r" *", found[1])
    ordered = sorted({re.sub(r"^ *", indent[0] if indent else "", each) for each in lines}, key=str.lower)
    return text[: found.start(1)] + "".join(ordered) + text[found.end(1) :]


def edits(name: str, class_name: str) -> dict[str, list[tuple[str, str]]]:
    """Files that get a line: the pattern of the block that gets it, and the line."""
    exported = rf"from oxidion\.optim\.{name} import {class_name}\n"
    return {
        "src/kernels/ops/mod.rs": [(r"\$then! \{\n((?: +\w+\n)+)", f"{name}\n")],
        "python/oxidion/optim/__init__.py": [
            (r"((?:from oxidion\.optim\.\w+ import [^\n]+\n)+)", exported.replace("\\", "")),
            (r"__all__ = \[\n((?: +\"\w+\",\n)+)", f'"{class_name}",\n'),
        ],
        "CHANGELOG.md": [],
    }


def noted(text: str, class_name: str) -> str:
    """The changelog with a line about the class under what is not released."""
    head, mark, rest = text.partition("## [Unreleased]\n")
    if not mark:
        raise SystemExit("error: CHANGELOG.md: expected a section [Unreleased], found none")
    line = f"- `{class_name}`.\n"
    added = "\n### Added\n\n"
    if rest.startswith(added):
        return head + mark + added + line + rest.removeprefix(added)
    return head + mark + added + line + rest


def write(root: Path, name: str, class_name: str) -> list[Path]:
    """Writes and edits the files below a checkout; returns them.

    Raises:
        SystemExit: for a name that is taken or no name.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise SystemExit(f"error: NAME must be of lower-case letters, digits and underscores, got {name!r}")
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", class_name):
        raise SystemExit(f"error: CLASS must begin with an upper-case letter, got {class_name!r}")
    places = {template: root / place.format(name=name) for template, place in NEW.items()}
    for file in places.values():
        if file.exists():
            raise SystemExit(f"error: {file.relative_to(root)} is there already; choose another NAME")
    for template, file in places.items():
        file.write_text(filled((TEMPLATES / template).read_text(), name, class_name))
    touched = list(places.values())
    for place, lines in edits(name, class_name).items():
        file, text = root / place, (root / place).read_text()
        for pattern, line in lines:
            text = listed(text, line, re.compile(pattern))
        file.write_text(noted(text, class_name) if file.name == "CHANGELOG.md" else text)
        touched.append(file)
    return touched


def main() -> None:
    """Reads the arguments and writes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--class-name", default="")
    parser.add_argument("--kind", default="elementwise", choices=KINDS)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    arguments = parser.parse_args()
    class_name = arguments.class_name or "".join(part.capitalize() for part in arguments.name.split("_"))
    files = write(arguments.root, arguments.name, class_name)
    for file in files:
        print(file.relative_to(arguments.root))
    print(f"\n{class_name} is SGD with momentum now. Edit the files, then: make quick ALG={arguments.name}")


if __name__ == "__main__":
    main()
