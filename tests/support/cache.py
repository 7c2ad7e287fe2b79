"""Files that take long to make, kept in ``target/test-cache`` by all that they are made of.

Another source, flag or compiler gives another name, so nothing is ever out of date. One process writes a file
under a temporary name and renames it, while others wait for it. The digest of its content is stored next to
it: a file with another digest is rebuilt. Libraries among them are loaded, so no other user may write there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from subprocess import run

FOLDER = Path(__file__).resolve().parents[2] / "target" / "test-cache"
DAYS = 14
"""How long a file that no run uses is kept."""


def key(parts: Iterable[str | bytes]) -> str:
    """A name for what is made of these parts, in their order and with their borders."""
    content = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        content.update(len(data).to_bytes(8, "little") + data)
    return content.hexdigest()


@cache
def version(command: str) -> str:
    """What a compiler on the path says of its version.

    Raises:
        FileNotFoundError: if there is none.
    """
    return run([command, "--version"], check=True, capture_output=True, text=True).stdout


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _is_whole(file: Path, digest: Path) -> bool:
    return file.exists() and digest.exists() and digest.read_text() == _digest(file)


def _drop_old(folder: Path) -> None:
    oldest = time.time() - DAYS * 24 * 3600
    for place in folder.iterdir():
        with suppress(FileNotFoundError):  # another process has taken it away meanwhile
            if place.stat().st_mtime < oldest:
                rmtree(place) if place.is_dir() else place.unlink()


def kept(
    name: str, parts: Iterable[str | bytes], make: Callable[[Path], None], folder: Path = FOLDER
) -> Path:
    """The file that is made of the parts; made now where it is not there yet.

    Args:
        name: what the file is, with its suffix.
        parts: all that its content depends on.
        make: writes the content to the path that it is given, in a folder of its own.
        folder: where files are kept.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} may be written to by others and keeps code that is loaded: remove it"
        )
    file = folder / f"{key(parts)[:32]}-{name}"
    digest, lock = file.with_name(f"{file.name}.sha256"), file.with_name(f"{file.name}.lock")
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # others wait here until this one is done, or gone
        if not _is_whole(file, digest):
            _drop_old(folder)
            own = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder))
            try:
                made, said = own / name, own / "digest"
                make(made)
                said.write_text(_digest(made))
                digest.unlink(missing_ok=True)
                made.replace(file)
                said.replace(digest)
            finally:
                rmtree(own)
        for used in (file, digest):
            os.utime(used)
    return file
