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
    """Writes a checkpoint in three files, which must all be of one step."""
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
def test_folders_are_whole_after_a_kill_and_the_next_save_works(tmp_path: Path, keep: int) -> None:
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
def test_file_after_a_kill_is_the_older_or_the_newer_one(tmp_path: Path) -> None:
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


def test_block_that_raises_leaves_only_the_older_ones(tmp_path: Path) -> None:
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


def test_just_written_folder_stays_along_with_later_steps(tmp_path: Path) -> None:
    for step in (30, 40):
        save(tmp_path, step)
    save(tmp_path, 20)
    assert steps(tmp_path) == [20, 40]


@pytest.mark.parametrize(
    ("step", "keep", "message"),
    [(-1, 2, "got step=-1, keep=2"), (3, 0, "got step=3, keep=0"), (5, 2, "step-00000005 is there already")],
)
def test_impossible_folder_is_refused_before_anything_is_written(
    tmp_path: Path, step: int, keep: int, message: str
) -> None:
    save(tmp_path, 5)
    with pytest.raises((ValueError, FileExistsError), match=message), whole_folder(tmp_path, step, keep=keep):
        pytest.fail("the block is not entered")
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def archived(root: Path, step: int, archive: Path) -> Path:
    """Moves a checkpoint to an archive and leaves a link; returns where it is then."""
    archive.mkdir(exist_ok=True)
    folder = root / f"step-{step:08d}"
    moved = folder.rename(archive / folder.name)
    folder.symlink_to(moved)
    return moved


def test_old_folder_that_is_a_link_goes_and_its_target_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (10, 20):
        save(root, step)
    moved = archived(root, 10, tmp_path / "archive")
    assert latest_folder(root) == root / "step-00000020"
    for step, kept in ((30, [20, 30]), (40, [30, 40])):
        save(root, step)
        assert steps(root) == kept
        assert {path.name for path in root.iterdir()} == {f"step-{each:08d}" for each in kept}
    assert {path.name for path in moved.iterdir()} == set(PARTS)


def test_newest_folder_that_is_a_link_counts_and_stays(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (10, 20):
        save(root, step)
    moved = archived(root, 20, tmp_path / "archive")
    assert latest_folder(root) == root / "step-00000020"
    with pytest.raises(FileExistsError, match="step-00000020 is there already"), whole_folder(root, 20):
        pytest.fail("the block is not entered")
    save(root, 15)
    assert steps(root) == [15, 20]
    assert {path.name: path.read_text() for path in moved.iterdir()} == dict.fromkeys(PARTS, "20")


@pytest.mark.parametrize("kind", ["lost link", "link to a file", "file"])
def test_path_that_is_not_a_folder_is_never_replaced(tmp_path: Path, kind: str) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    root.mkdir()
    place, words = root / "step-00000010", f"is a link to {other}, where no folder is: remove it"
    if kind == "link to a file":
        other.write_text("mine")
    if kind == "file":
        place.write_text("mine")
        words = "is no folder: remove it"
    else:
        place.symlink_to(other)
    with pytest.raises(FileExistsError, match=words), whole_folder(root, 10):
        pytest.fail("the block is not entered")
    for step in (5, 20, 30, 40):
        save(root, step)
    assert {path.name for path in root.iterdir()} == {place.name, "step-00000030", "step-00000040"}
    assert kind == "lost link" or place.read_text() == "mine"
    assert place.is_symlink() == (kind != "file")


@pytest.mark.parametrize("target", ["folder", "file", "none"])
def test_link_that_a_killed_run_has_left_goes_alone(tmp_path: Path, target: str) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    root.mkdir()
    if target == "folder":
        other.mkdir()
        (other / "mine").write_text("mine")
    elif target == "file":
        other.write_text("mine")
    for step in (10, 20):
        (root / f".step-{step:08d}.part").symlink_to(other)
    save(root, 10)
    assert {path.name for path in root.iterdir()} == {"step-00000010"}
    assert steps(root) == [10]
    assert target != "folder" or [path.name for path in other.iterdir()] == ["mine"]
    assert target != "file" or other.read_text() == "mine"


def test_file_is_not_written_through_links(tmp_path: Path) -> None:
    mine, path = tmp_path / "mine", tmp_path / "run.pt"
    mine.write_text("mine")
    for link in (path, tmp_path / "run.pt.part"):
        link.symlink_to(mine)
    with whole_file(path) as file:
        file.write_text("new")
    assert (mine.read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)
    assert {each.name for each in tmp_path.iterdir()} == {"mine", "run.pt"}


class OneRank:
    """A process group of one rank."""

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("failing", ["rename", "rmtree"])
def test_old_folder_that_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    said: list[str | None] = []

    def all_gather_object(words: str | None, _group: Any) -> list[str | None]:
        said.append(words)
        return [words]

    rename, left = Path.rename, {"rename": "step-00000010", "rmtree": ".step-00000010.part"}[failing]

    def refuse(path: Path, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    def rename_or_refuse(path: Path, target: Path) -> Any:
        return refuse(path) if path.name == "step-00000010" else rename(path, target)

    for step in (10, 20):
        save(tmp_path, step)
    monkeypatch.setattr("oxidion.checkpoint.whole.all_gather_object", all_gather_object)
    if failing == "rename":
        monkeypatch.setattr(Path, "rename", rename_or_refuse)
    else:
        monkeypatch.setattr("shutil.rmtree", refuse)
    with whole_folder(tmp_path, 30, process_group=OneRank()) as folder:
        (folder / PARTS[0]).write_text("30")
    assert said
    assert set(said) == {None}, "the other ranks hear of the failure"
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"{tmp_path / left} is no longer needed and cannot be removed" in record.getMessage()
    assert "Permission denied" in record.getMessage()
    assert latest_folder(tmp_path) == tmp_path / "step-00000030"
    save(tmp_path, 40)
    assert latest_folder(tmp_path) == tmp_path / "step-00000040"
    assert left in {path.name for path in tmp_path.iterdir()}
    monkeypatch.undo()
    save(tmp_path, 50)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000040", "step-00000050"}


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
