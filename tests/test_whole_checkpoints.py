"""Checkpoints that are whole or not there: ``oxidion.checkpoint.whole_file`` and ``whole_folder``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import oxidion
from oxidion.checkpoint import latest_folder, whole_file, whole_folder

PARTS = ("__0_0.distcp", "__1_0.distcp", ".metadata")
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
"""Audit events of what changes a folder; files that are opened to be written are counted too."""


def save(root: Path, step: int, keep: int = 2) -> None:
    """A checkpoint in three files, all of which must be of one step."""
    with whole_folder(root, step, keep=keep) as folder:
        for name in PARTS:
            (folder / name).write_text(str(step))


def steps(root: Path) -> list[int]:
    """Steps of the checkpoints that are there under their names; each is whole."""
    for folder in root.glob("step-*"):
        assert {path.name: path.read_text() for path in folder.iterdir()} == dict.fromkeys(
            PARTS, str(int(folder.name.removeprefix("step-")))
        )
    return sorted(int(folder.name.removeprefix("step-")) for folder in root.glob("step-*"))


def killed_at(change: int, work: Callable[[], None]) -> bool:
    """Runs ``work`` in a fork that is killed just before its change of that number; False if it had fewer."""
    child = os.fork()
    if child == 0:
        seen = 0

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY
            if event in CHANGES or writes:
                seen += 1
                if seen > change:
                    os.kill(os.getpid(), signal.SIGKILL)

        status = 1
        try:
            sys.addaudithook(hook)
            work()
            status = 0
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
@pytest.mark.parametrize("keep", [1, 2, 3])
def test_folders_after_a_kill_before_any_change_are_whole_and_the_next_save_works(
    tmp_path: Path, keep: int
) -> None:
    change, seen = 0, set()
    while True:
        root = tmp_path / str(change)
        for step in (10, 20):
            save(root, step, keep)
        before = steps(root)
        if not killed_at(change, lambda root=root: save(root, 30, keep)):  # type: ignore[misc]
            break
        left = steps(root)
        if 30 in left:
            assert set([10, 20, 30][-keep:]) <= set(left)
        else:
            assert left == before
        newest = latest_folder(root)
        assert newest == root / f"step-{max(left):08d}"
        seen.add(max(left))
        if 30 not in left:
            save(root, 30, keep)  # what a resumed run does
        save(root, 40, keep)
        assert steps(root) == [10, 20, 30, 40][-keep:]
        assert {path.name for path in root.iterdir()} == {f"step-{step:08d}" for step in steps(root)}
        change += 1
    assert change >= 5  # a folder, three files, a name
    assert seen == ({20, 30} if keep < 3 else {20})  # with three nothing is changed after the renaming


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_file_after_a_kill_before_any_change_is_the_older_or_the_newer_one(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"

    def write(text: str) -> None:
        with whole_file(path) as file:
            file.write_text(text)

    write("old")
    change = 0
    while killed_at(change, lambda: write("new")):
        assert path.read_text() == "old"
        change += 1
    assert change >= 2  # the file and its name
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["run.pt"]


def test_everything_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, str]] = []
    sync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(handle: int) -> None:
        said.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda a, b: (said.append(("name", b.name)), rename(a, b))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (said.append(("name", b.name)), replace(a, b))[1])
    with whole_folder(tmp_path / "run", 7) as folder:
        (folder / "inner").mkdir()
        for name in ("a", "b", "inner/c"):
            (folder / name).write_text(name)
    named = said.index(("name", "step-00000007"))
    part = ".step-00000007.part"
    assert {("sync", name) for name in ("a", "b", "c", "inner", part)} <= set(said[:named])
    assert said[named + 1 :] == [("sync", "run")]
    said.clear()
    with whole_file(tmp_path / "run.pt") as file:
        file.write_text("content")
    assert said == [("sync", "run.pt.part"), ("name", "run.pt"), ("sync", tmp_path.name)]


def test_block_that_raises_leaves_the_older_ones_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def half(place: Path) -> None:
        place.write_text("half")
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"), whole_folder(tmp_path, 2) as folder:
        half(folder / "part")
    assert steps(tmp_path) == [1]
    assert latest_folder(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}
    with whole_file(tmp_path / "a.pt") as file:
        file.write_text("old")
    with pytest.raises(OSError, match="no space"), whole_file(tmp_path / "a.pt") as file:
        half(file)
    assert (tmp_path / "a.pt").read_text() == "old"
    assert not (tmp_path / "a.pt.part").exists()


def test_newest_folder_goes_by_steps_and_counts_whole_ones_alone(tmp_path: Path) -> None:
    assert latest_folder(tmp_path / "none") is None
    assert latest_folder(tmp_path) is None
    for name in (".step-00000300.part", "step-400", "step-00000500-copy", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000600").write_text("a file")
    assert latest_folder(tmp_path) is None
    for step in (99_999_999, 100_000_000, 7):
        save(tmp_path, step, keep=9)
    assert latest_folder(str(tmp_path)) == tmp_path / "step-100000000"


def test_folder_that_is_just_written_stays_beside_those_of_later_steps(tmp_path: Path) -> None:
    for step in (30, 40):
        save(tmp_path, step)
    save(tmp_path, 20)
    assert steps(tmp_path) == [20, 40]


@pytest.mark.parametrize(
    ("step", "keep", "message"),
    [(-1, 2, "got step=-1, keep=2"), (3, 0, "got step=3, keep=0"), (5, 2, "step-00000005 is there already")],
)
def test_folder_that_cannot_be_made_is_refused_before_anything_is_written(
    tmp_path: Path, step: int, keep: int, message: str
) -> None:
    save(tmp_path, 5)
    with pytest.raises((ValueError, FileExistsError), match=message), whole_folder(tmp_path, step, keep=keep):
        pytest.fail("the block is not entered")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was written"), whole_folder(tmp_path, 5):
        pass
    assert latest_folder(tmp_path) is None


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_asynchronous_save_is_whole_once_its_result_is_there(tmp_path: Path) -> None:
    for step in range(3):  # each waits for the one before
        saving = oxidion.checkpoint.async_save({"weight": torch.full((3,), float(step))}, tmp_path, step)
    assert saving.result() == tmp_path / "step-00000002"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002"]
    read = {"weight": torch.zeros(3)}
    dcp.load(read, checkpoint_id=saving.result(), no_dist=True)
    assert torch.equal(read["weight"], torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_asynchronous_save_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("torch.distributed.checkpoint.FileSystemWriter.write_data", fail)
    saving = oxidion.checkpoint.async_save({"weight": torch.zeros(3)}, tmp_path, 1)
    with pytest.raises(BaseException, match="no space left"):
        saving.result()
    assert oxidion.checkpoint.latest_folder(tmp_path) is None
    monkeypatch.undo()
    assert oxidion.checkpoint.async_save({"weight": torch.zeros(3)}, tmp_path, 1).result().is_dir()
