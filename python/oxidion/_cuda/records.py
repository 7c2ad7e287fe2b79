"""Records of a device that are kept across processes, next to its machine code."""

from __future__ import annotations

import fcntl
import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from oxidion._torch.cache import cache_folder, keep, make_private, private_folder, read_private

_log = logging.getLogger("oxidion.cuda")


class Facts(NamedTuple):
    """The device that a record is for."""

    gpu: str
    capability: str
    sms: int
    driver: str


def folder() -> Path | None:
    """The folder of records, which is that of machine code; None where nothing can be kept."""
    found = cache_folder()
    if found is None:
        return None
    try:
        make_private(found)
    except OSError:
        return None  # `device.kept_in` says so
    return found


def read(file: Path, keys: Collection[str]) -> dict[str, Any]:
    """A record that has these keys; empty where there is none that this user alone could write."""
    try:
        record = json.loads(read_private(file))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.keys() >= {"key", *keys} else {}


def write(file: Path, record: Mapping[str, Any]) -> None:
    """Keeps a record: the file is there whole or not at all."""
    try:
        with private_folder(file.parent) as at:
            keep(at, file.name, f"{json.dumps(record, indent=1)}\n".encode())
    except OSError as error:
        _log.warning("%s cannot be kept: %s", file, error)


@contextmanager
def turn(seconds: float) -> Iterator[bool]:
    """Waits until no other process of this user checks the devices; yields False if that takes too long.

    On a file system without locks no process waits.
    """
    where = folder()
    if where is None:
        yield True
        return
    with (where / "check.lock").open("w") as file:
        yield _locked(file.fileno(), time.monotonic() + seconds)


def _locked(file: int, until: float) -> bool:
    def is_taken() -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return isinstance(error, BlockingIOError)
        return False

    while is_taken():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
