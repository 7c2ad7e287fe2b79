"""Types of arguments of the command line, and the files that are named there.

Each type raises ``ArgumentTypeError``, so that a usage error names the option and ends with status 2.
"""

from __future__ import annotations

import json
import os
import re
import stat
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

LARGEST = 2**53
"""The largest integer that an option takes: a float holds it, and so does the core."""
MOST_SHOWN = 100
"""Characters of a wrong value that an error shows."""
PICTURES = ("", ".png", ".svg")
"""Suffixes of files with a picture; a file without one holds a PNG."""


def shown(value: object) -> str:
    """The text of a wrong value in an error, cut where it is long."""
    text = repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def checked(read: Callable[[str], T]) -> Callable[[str], T]:
    """The type of an argument from a function that raises ``ValueError`` or ``OSError`` with the reason."""

    def convert(text: str) -> T:
        try:
            return read(text)
        except (ValueError, OSError) as error:
            raise ArgumentTypeError(str(error)) from error

    return convert


def fraction(text: str) -> Fraction:
    """A number in (0, 1], written as 1/8 or 0.125."""
    try:
        # As a fraction, 1e-999999999 would take gigabytes.
        value = Fraction(float(text)) if "e" in text.lower() else Fraction(text)
    except (ValueError, ArithmeticError) as error:
        raise ArgumentTypeError(f"expected a fraction as 1/8 or 0.125, got {shown(text)}") from error
    if not 0 < value <= 1:
        raise ArgumentTypeError(f"must be in (0, 1], got {text[:MOST_SHOWN]}")
    return value


def share(text: str) -> float:
    """The same as a float."""
    return float(fraction(text))


def integer(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """The type of an integer within bounds."""

    def convert(text: str) -> int:
        if re.fullmatch(r"[+-]?[0-9]{1,20}", text) and least <= int(text) <= most:
            return int(text)
        raise ArgumentTypeError(f"must be an integer from {least} to {most}, got {shown(text)}")

    return convert


def seconds(text: str) -> float:
    """A number of seconds, which may be infinite."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ArgumentTypeError(f"must be a number of seconds > 0, got {shown(text)}")
    return value


def pattern(text: str) -> str:
    """A regular expression."""
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise ArgumentTypeError(f"expected a regular expression, got {shown(text)}: {error}") from error
    return text


def existing(text: str) -> Path:
    """The path of a file or folder that is there."""
    try:
        os.stat(text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentTypeError(f"expected the path of a checkpoint, got {shown(text)}: {reason}") from error
    return Path(text)


def output_file(text: str) -> Path:
    """The path of a file that is to be written."""
    if reason := _why_not_written(text):
        raise ArgumentTypeError(f"expected the path of a file to be written, got {shown(text)}: {reason}")
    return Path(text)


def _why_not_written(text: str) -> str:
    folder = os.path.dirname(text) or "."
    try:
        if stat.S_ISDIR(os.stat(text).st_mode):
            return "it is a folder"
    except FileNotFoundError:
        if not text:
            return "it is empty"
        if not os.path.isdir(folder):
            return f"there is no folder {folder}, make it first"
        return "" if os.access(folder, os.W_OK) else f"this user may not write to {folder}"
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    return "" if os.access(text, os.W_OK) else "this user may not write to it"


def picture(text: str) -> Path:
    """The path of a PNG or SVG file that is to be written."""
    path = output_file(text)
    if path.suffix.lower() not in PICTURES:
        raise ArgumentTypeError(f"expected the path of a .png or .svg file, got {shown(text)}")
    return path


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Names the option in the error of what is written to its file.

    Raises:
        ValueError: where the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}: {error}") from error


def write_json(option: str, file: Path, values: Any) -> None:
    """Writes figures to the file of an option.

    Raises:
        ValueError: where it cannot be written.
    """
    with writing(option):
        file.write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def read_object(kind: str, name: str, known: Any) -> dict[str, Any]:
    """The object in the JSON file of a model or of hardware.

    Args:
        kind: what the file is to hold.
        name: its path.
        known: names that could have been given instead.

    Raises:
        ValueError: where there is no such file, or something else in it.
    """
    try:
        is_file = Path(name).is_file()
    except OSError:  # the name is too long
        is_file = False
    if not is_file:
        raise ValueError(f"unknown {kind} {shown(name)}: neither one of {', '.join(known)} nor a JSON file")
    try:
        values = json.loads(Path(name).read_text("utf-8"))
    except RecursionError:
        raise ValueError(f"{kind} file {name}: expected one JSON object, got objects nested deeply") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{kind} file {name}: expected a JSON object: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{kind} file {name}: expected an object, got {type(values).__name__}")  # noqa: TRY004
    return values
