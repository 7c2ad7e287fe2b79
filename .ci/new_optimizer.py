"""Writes the files of a new optimizer: SGD with momentum under its name, which works and is then edited.

``make new-optimizer NAME=ademamix CLASS=AdEMAMix`` calls it. It writes five files and edits three.
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


def camel(name: str) -> str:
    """The name of a type in Rust, in which a word of capitals alone is no type."""
    return "".join(part.capitalize() for part in name.split("_"))


def filled(text: str, name: str, class_name: str) -> str:
    """A template under this name."""
    text = text.replace("RustType", camel(name)).replace("ClassName", class_name)
    return text.replace("optimizer_name", name)


def listed(text: str, line: str, block: str) -> str:
    """The text with a line among the sorted ones of a block; words in upper case come first."""
    found = re.search(block, text)
    if found is None:
        raise SystemExit(f"error: expected lines like {block!r}, found none")
    lines = sorted({*found[1].splitlines(), line}, key=lambda each: (not each.strip(' ",').isupper(), each))
    return text[: found.start(1)] + "".join(f"{each}\n" for each in lines) + text[found.end(1) :]


def edits(name: str, class_name: str) -> dict[str, list[tuple[str, str]]]:
    """Files that get a line: the line, and the lines among which it belongs."""
    return {
        "src/kernels/ops/mod.rs": [(f"            {name}", r"\$then! \{\n((?: {12}\w+\n)+)")],
        "python/oxidion/optim/__init__.py": [
            (
                f"from oxidion.optim.{name} import {class_name}",
                r"((?:from oxidion\.optim\.\w+ import \w+\n)+)",
            ),
            (f'    "{class_name}",', r"__all__ = \[\n((?: {4}\"\w+\",\n)+)"),
            (f'    "{name}",', r"Literal\[\n((?: {4}\"\w+\",\n)+)"),
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
        for line, block in lines:
            text = listed(text, line, block)
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
    class_name = arguments.class_name or camel(arguments.name)
    files = write(arguments.root, arguments.name, class_name)
    for file in files:
        print(file.relative_to(arguments.root))
    print(f"\n{class_name} is SGD with momentum now. Edit the files, then: make quick ALG={arguments.name}")


if __name__ == "__main__":
    main()
