"""Command ``python -m oxidion shim``: a package whose name is another's and whose contents are ours."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from oxidion._core.arguments import checked

MARK = "Written by `python -m oxidion shim"
"""Text by which a package is known as one of this command."""

TEXT = '''"""Names of {name}, computed by oxidion. {mark} {name}`; --remove takes it away."""

import oxidion.compat.{name} as _own
from oxidion.compat.{name} import *  # noqa: F403
from oxidion.compat.{name} import __all__  # noqa: F401

globals().update(_own.register(__name__))
'''


def _is_ours(file: Path) -> bool:
    """True for the file of a package that this command wrote."""
    return file.is_file() and MARK in file.read_text(encoding="utf-8", errors="replace")


def _folder(text: str) -> Path:
    """A folder that is there."""
    if "\0" in text or not Path(text).is_dir():
        raise ValueError(f"expected a folder that is there, got {text[:100]!r}")
    return Path(text)


def add(commands: Any) -> argparse.ArgumentParser:
    """Adds the subcommand; returns its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "shim",
        help="make `import dion` find oxidion.compat.dion",
        description="Writes a package of one file that has the names of microsoft/dion, so that a script "
        "runs unedited. A package of that name which is not of this command is left as it is.",
    )
    parser.add_argument("name", choices=["dion"], help="the package")
    parser.add_argument(
        "--target",
        type=checked(_folder),
        metavar="FOLDER",
        help="where it is written (default: site-packages of this Python)",
    )
    parser.add_argument("--remove", action="store_true", help="take the package away again")
    return parser


def _refuse_other(parser: argparse.ArgumentParser, name: str, file: Path) -> None:
    """Ends the process where a package of the name is installed that is not of this command."""
    module = file.parent.with_suffix(".py")
    if module.exists():
        parser.error(f"{module} is there and is not of this command: remove it, or name another --target")
    if file.parent.exists() and not _is_ours(file):
        parser.error(
            f"{file.parent} is there and is not of this command: remove it, or name another --target"
        )
    found = None if name in sys.modules else importlib.util.find_spec(name)
    if found is not None and found.origin is not None and not _is_ours(Path(found.origin)):
        parser.error(
            f"{name} is there already, as {found.origin}: remove it (pip uninstall {name}, if it is "
            "installed), as only one of the two can be imported, or run this from another folder"
        )


def run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Writes or removes the package; a usage error ends the process with status 2."""
    target = given.target or Path(sysconfig.get_path("purelib"))
    file = target / given.name / "__init__.py"
    try:
        if given.remove:
            if not _is_ours(file):
                parser.error(f"{file.parent} is not a package of this command: nothing was removed")
            file.unlink()
            shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
            if not any(file.parent.iterdir()):
                file.parent.rmdir()
            sys.stdout.write(f"removed {file.parent}\n")
            return 0
        _refuse_other(parser, given.name, file)
        file.parent.mkdir(exist_ok=True)
        file.write_text(TEXT.format(name=given.name, mark=MARK), encoding="utf-8")
    except OSError as error:
        parser.error(f"argument --target: {error}")
    sys.stdout.write(f"wrote {file}: `import {given.name}` finds oxidion.compat.{given.name}\n")
    return 0
