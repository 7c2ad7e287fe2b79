"""Files that tests keep between runs (``tests/support/cache.py``): never stale, damaged or made twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support import cache

PARTS = ["source", "-O1", "compiler 12.2"]
TESTS = Path(cache.__file__).resolve().parents[1]


class Maker:
    """Writes a content, and counts how often it was asked to."""

    def __init__(self, content: bytes = b"code") -> None:
        self.content, self.times = content, 0

    def __call__(self, file: Path) -> None:
        self.times += 1
        file.write_bytes(self.content)


@pytest.mark.parametrize(
    "other",
    [
        ["sourcf", "-O1", "compiler 12.2"],
        ["source", "-O2", "compiler 12.2"],
        ["source", "-O1", "compiler 12.3"],
        ["source", "-O1"],
        ["-O1", "source", "compiler 12.2"],
        ["source-", "O1", "compiler 12.2"],
        ["source", "-O1", "compiler 12.2", ""],
    ],
)
def test_other_parts_are_another_file(tmp_path: Path, other: list[str]) -> None:
    first, second = Maker(b"first"), Maker(b"second")
    assert cache.key(PARTS) != cache.key(other)
    files = [cache.kept("a.so", PARTS, first, tmp_path), cache.kept("a.so", other, second, tmp_path)]
    assert [file.read_bytes() for file in files] == [b"first", b"second"]


def test_same_parts_are_made_once(tmp_path: Path) -> None:
    maker = Maker()
    files = {cache.kept("a.so", PARTS, maker, tmp_path) for _ in range(3)}
    assert maker.times == 1
    assert [file.read_bytes() for file in files] == [b"code"]


def damaged(file: Path) -> None:
    file.write_bytes(b"cod\x00")


def shortened(file: Path) -> None:
    file.write_bytes(b"cod")


def removed(file: Path) -> None:
    file.unlink()


def without_digest(file: Path) -> None:
    file.with_name(f"{file.name}.sha256").unlink()


@pytest.mark.parametrize("harm", [damaged, shortened, removed, without_digest], ids=lambda f: f.__name__)
def test_damaged_file_is_made_anew(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    maker = Maker()
    harm(cache.kept("a.so", PARTS, maker, tmp_path))
    assert cache.kept("a.so", PARTS, maker, tmp_path).read_bytes() == b"code"
    assert maker.times == 2


def test_file_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    def fails(file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.kept("a.so", PARTS, fails, tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".lock"}
    assert cache.kept("a.so", PARTS, Maker(), tmp_path).read_bytes() == b"code"


def test_files_that_no_run_uses_are_dropped(tmp_path: Path) -> None:
    old, used = (cache.kept("a.so", [name], Maker(), tmp_path) for name in ("old", "used"))
    past = time.time() - (cache.DAYS + 1) * 24 * 3600
    for file in tmp_path.iterdir():
        os.utime(file, (past, past))
    cache.kept("a.so", ["used"], Maker(), tmp_path)
    cache.kept("a.so", ["new"], Maker(), tmp_path)
    assert used.exists()
    assert not old.exists()


SLOW = """
import sys, time
from pathlib import Path
from support import cache

def make(file):
    with open(sys.argv[2], "a") as log:
        log.write("made\\n")
    time.sleep(1)
    file.write_text("code")

print(cache.kept("a.so", ["source"], make, Path(sys.argv[1])).read_text())
"""


def test_processes_at_once_make_a_file_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLOW, str(tmp_path / "cache"), str(log)]
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["code\n"] * 3
    assert log.read_text() == "made\n"
