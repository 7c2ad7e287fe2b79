"""Cache folder of code that was compiled on this machine and is loaded: no other user may change it.

A folder is opened from the root on, one descriptor after another. Every folder on the way is checked, as sshd
checks the way to a user's keys. A file is checked, read and loaded by one descriptor, so that nothing depends
on what its path leads to later.
"""

from __future__ import annotations

import contextlib
import errno
import grp
import hashlib
import os
import pwd
import secrets
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "OXIDION_CACHE"
"""Environment variable that names the folder."""
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
MOST_LINKS = 40
"""Symbolic links on the way to a folder, as many as Linux follows."""
# O_PATH needs no right to list a folder: /home often has mode 0711.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK the open of a named pipe would wait for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class UntrustedFolder(PermissionError):
    """A folder or file that another user may change: what is in it is not loaded."""


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


def _check(found: os.stat_result, place: Path, asked: Path, *, above: bool = False) -> None:
    """Refuses a file or folder that another user may change.

    Args:
        found: what the system says of it.
        place: its path.
        asked: the path that was asked for.
        above: whether it is only on the way there. Such a folder may let others write if it is sticky, as
            /tmp: they cannot move what belongs to this user or root there.
    """
    user, mode = os.geteuid(), stat.S_IMODE(found.st_mode)
    if above and mode & OTHERS_WRITE == stat.S_IWGRP and _is_of_user_alone(found.st_gid):
        mode &= ~stat.S_IWGRP
    way = f"set {VARIABLE} to a folder of your own"
    if found.st_uid not in (user, 0):
        reason = f"belongs to user {found.st_uid}, and this process runs as user {user}"
    elif mode & OTHERS_WRITE and not stat.S_ISLNK(found.st_mode) and not (above and mode & stat.S_ISVTX):
        reason = f"has mode {mode:04o} and lets other users write"
        quoted = shlex.quote(str(place))
        way = f"{f'`chmod go-w {quoted}`' if above else f'empty it and `chmod 700 {quoted}`'}, or {way}"
    else:
        return
    subject = f"{place} on the way there" if above else "it"
    raise UntrustedFolder(f"{asked} keeps code that is loaded, but {subject} {reason}: {way}")


def _is_of_user_alone(gid: int) -> bool:
    """True for the group that a user has for himself, as where home folders have mode 0775."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (gid, group.gr_name) == (user.pw_gid, user.pw_name) and {*group.gr_mem} <= {user.pw_name}


def _enter(at: int, name: str, *, make: bool) -> int | str:
    """The descriptor of a folder within another, or the target of a symbolic link."""
    try:
        return os.open(name, _FOLDER, dir_fd=at)
    except FileNotFoundError:
        if not make:
            raise
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=at)
        return os.open(name, _FOLDER, dir_fd=at)
    except OSError:
        if not stat.S_ISLNK(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode):
            raise
        return os.readlink(name, dir_fd=at)


def _check_count(links: int, asked: Path) -> None:
    if links > MOST_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(asked))


def _walk(folder: Path, *, make: bool) -> int:
    """The descriptor of a folder, after the check of all on the way; symbolic links are followed here."""
    left, place, links = [*reversed(folder.absolute().parts)], Path("/"), 0
    at = os.open("/", _FOLDER)
    try:
        while left:
            name = left.pop()
            try:
                inner = _enter(at, name, make=make)
            except OSError as error:
                error.filename = str(place / name)
                raise
            if isinstance(inner, str):
                links += 1
                _check_count(links, folder)
                link = os.stat(name, dir_fd=at, follow_symlinks=False)
                _check(link, place / name, folder, above=True)
                left += reversed(Path(inner).parts)  # the root is a part of its own
                continue
            os.close(at)
            at, place = inner, place.parent if name == ".." else place / name
            _check(os.fstat(at), place, folder, above=bool(left))
    except BaseException:
        os.close(at)
        raise
    return at


@contextlib.contextmanager
def private_folder(folder: Path, *, make: bool = False) -> Iterator[int]:
    """Opens a folder that no other user can change or replace; gives its descriptor.

    Args:
        folder: its path.
        make: whether folders that are missing are made, with mode 0700.

    Raises:
        UntrustedFolder: for a folder that belongs to another user or that others may write to, here or above;
            it says what to do.
        OSError: where it is not there, or cannot be made.
    """
    at = _walk(folder, make=make)
    try:
        yield at
    finally:
        os.close(at)


def make_private(folder: Path) -> None:
    """Makes a folder that only this user may enter, with those above it; checks those that are there.

    Raises:
        UntrustedFolder: as `private_folder`.
        OSError: where it cannot be made.
    """
    with private_folder(folder, make=True):
        pass


def _check_file(found: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFolder(f"{name} must be a regular file: remove it")
    _check(found, Path(name), Path(name))


def open_private(at: int, name: str) -> int:
    """The descriptor of a file in an open folder, for reading; no link is followed.

    Raises:
        UntrustedFolder: for a file that another user may change, and for anything but a regular file.
        OSError: where there is none.
    """
    file = os.open(name, _READ, dir_fd=at)
    try:
        _check_file(os.fstat(file), name)
    except BaseException:
        os.close(file)
        raise
    return file


def read_private(file: Path) -> bytes:
    """The content of a file that only this user or root can have written.

    Raises:
        OSError: for any other file, and where there is none.
    """
    with private_folder(file.parent) as at, open(open_private(at, file.name), "rb") as opened:
        return opened.read()


def keep(at: int, name: str, content: bytes) -> None:
    """Writes a file of an open folder: it is there whole or not at all.

    Raises:
        OSError: where it cannot be written.
    """
    part = f".{name}-{secrets.token_hex(8)}.part"
    file = os.open(part, os.O_WRONLY | os.O_EXCL | _CREATE, 0o600, dir_fd=at)
    try:
        with open(file, "wb") as opened:
            opened.write(content)
            os.fchmod(file, 0o644)
        os.replace(part, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=at)
        raise


def keep_with_digest(at: int, name: str, content: bytes) -> None:
    """Keeps a file that is loaded only with the digest of its content, which is written last.

    Raises:
        OSError: where it cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(digest_name(name), dir_fd=at)
    keep(at, name, content)
    keep(at, digest_name(name), hashlib.sha256(content).hexdigest().encode())


def open_whole(at: int, name: str) -> int | None:
    """The descriptor of a file of this user with the content that it was kept with; None if there is none."""
    with contextlib.ExitStack() as opened:
        try:
            file = opened.enter_context(open(open_private(at, name), "rb"))
            digest = opened.enter_context(open(open_private(at, digest_name(name)), "rb"))
            if digest.read() == hashlib.sha256(file.read()).hexdigest().encode():
                return os.dup(file.fileno())
        except OSError:  # not there, or others may write to it
            pass
    return None


def digest_name(name: str) -> str:
    """The name of the file with the digest of another."""
    return f"{name}.sha256"


@contextlib.contextmanager
def locked(at: int, name: str) -> Iterator[None]:
    """Holds a file of an open folder so that one process writes; where locks are not served, several may."""
    with open(os.open(name, os.O_RDWR | _CREATE, 0o600, dir_fd=at), "rb") as file:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
