"""Folder for what is compiled on this machine: code that is loaded, so nobody else may write to it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import stat
import sys
from pathlib import Path

VARIABLE = "OXIDION_CACHE"
"""Environment variable that names the folder."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UntrustedFolder(PermissionError):
    """A folder or file that others may write to: what is in it is not loaded."""


def cache_folder() -> Path | None:
    """Folder of the machine code that was compiled on this machine; None for a user without a home.

    ``OXIDION_CACHE``, or ``oxidion`` in the user's folder for caches. Its files are named by their content.
    """
    if own := os.environ.get(VARIABLE):
        return Path(own)
    with contextlib.suppress(RuntimeError):
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "oxidion"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oxidion"
    return None


def check_private(path: Path) -> None:
    """Refuses a folder or file of which the content is not this user's; links are followed.

    Raises:
        UntrustedFolder: where the owner is neither this user nor root, or where others may write; it names
            the way out.
        FileNotFoundError: where nothing is there.
    """
    found = path.stat()
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        reason = f"it belongs to user {found.st_uid}, and this process runs as user {user}"
        way = f"set {VARIABLE} to a folder of your own"
    elif found.st_mode & OTHERS_WRITE:
        reason = f"its mode {stat.S_IMODE(found.st_mode):04o} lets other users write to it"
        name = shlex.quote(str(path.resolve()))
        way = f"empty it and `chmod 700 {name}`, or set {VARIABLE} to a folder of your own"
    else:
        return
    raise UntrustedFolder(f"{path} keeps code that is loaded, but {reason}: {way}")


def make_private(folder: Path) -> None:
    """Makes a folder that only this user may enter, with those above it; checks one that is there.

    Raises:
        UntrustedFolder: for a folder that is there and that others may write to.
        OSError: where it cannot be made.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
    check_private(folder)


def digest_file(file: Path) -> Path:
    """The file beside a kept one with the digest of its content."""
    return file.with_name(f"{file.name}.sha256")


def digest_of(file: Path) -> str:
    """SHA-256 of a file's content."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def is_whole(file: Path) -> bool:
    """True for a file of this user with the content that it was kept with."""
    try:
        for each in (file, digest_file(file)):
            check_private(each)
        return digest_file(file).read_text("ascii") == digest_of(file)
    except (OSError, ValueError):  # not there, others may write to it, or no text
        return False
