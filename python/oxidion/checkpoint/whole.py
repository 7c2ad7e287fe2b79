"""Files and folders of checkpoints that are whole or not there, whenever the job is killed."""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oxidion._dist.collectives import all_gather_object, everyone, own_group, start_saving


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a file that replaces ``path`` when the block ends: a killed process leaves the older file.

    The file is on the disk before it replaces the older one. A block that raises leaves the older one too.
    A symbolic link of this name is replaced, and its target is not touched.

        with oxidion.checkpoint.whole_file("run.pt") as file:
            torch.save(state, file)

    Args:
        path: the file; its folder is created if it is missing.

    Yields:
        The path to write to, in the folder of ``path``.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    if part.is_symlink():
        part.unlink()  # the block would write to where it points
    try:
        yield part
        _sync(part)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def whole_folder(
    root: str | os.PathLike[str], step: int, *, keep: int = 2, process_group: Any = None
) -> Iterator[Path]:
    """A folder for one checkpoint, ``root/step-00000040``, that has this name only once it is whole.

    All ranks enter and leave together. They write into a folder of another name. When all are done, one of
    them syncs everything to the disk, renames the folder, and removes the oldest whole ones. A process that
    is killed meanwhile leaves the older checkpoints as they were, and ``latest_folder`` finds the newest of
    them. Where a rank's block raises, nothing is renamed, and the other ranks raise too.

        with oxidion.checkpoint.whole_folder("run", step) as folder:
            dcp.save(state, checkpoint_id=folder)

    An older checkpoint may be moved to an archive and replaced by a symbolic link. It still counts, and only
    the link is removed. If an older one cannot be removed, the log has a warning, and the new one is whole.

    With ``dcp.async_save``, wait for the result within the block, or use ``async_save`` instead. One
    checkpoint of a root is written at a time.

    Args:
        root: folder of all checkpoints of a run, seen by all ranks.
        step: number of steps that are done, the same on all ranks.
        keep: number of the newest checkpoints to keep, including this one.
        process_group: ranks that write; by default all of the job, if ``torch.distributed`` is initialized.

    Yields:
        The folder to write to.

    Raises:
        FileExistsError: if there is a whole checkpoint of this step, or anything else of its name.
        ValueError: for a negative ``step``, for ``keep`` below 1, and for a block that wrote nothing.
        RuntimeError: if another rank failed.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got step={step}, keep={keep}")
    group = process_group or everyone()
    final = Path(root, f"step-{step:08d}")
    part = _unfinished(final)
    _by_leader(group, lambda: _begin(final))
    error = None
    try:
        yield part
    except Exception as raised:  # the others wait for this rank's word
        error = raised
    _agree(group, error)
    _by_leader(group, lambda: _finish(final, keep))


_saving: Future[Path] | None = None
"""The save that `async_save` began last."""


def async_save(
    state: dict[str, Any],
    root: str | os.PathLike[str],
    step: int,
    *,
    keep: int = 2,
    process_group: Any = None,
) -> Future[Path]:
    """Saves a checkpoint by ``dcp.async_save`` into a folder as of ``whole_folder``, during the next steps.

    It returns once ``state`` is copied. A thread writes the files, then renames the folder. The next call
    waits until it has.

        saving = oxidion.checkpoint.async_save({"model": model_state}, "run", step)
        ...  # steps
        saving.result()

    Args:
        state: what ``dcp.save`` takes.
        root: folder of all checkpoints of a run, seen by all ranks.
        step: number of steps that are done, the same on all ranks.
        keep: number of the newest checkpoints to keep, including this one.
        process_group: ranks that write, with a backend for the CPU. Nothing else may use it meanwhile, as
            messages of two threads over one group come in another order on each rank. By default a group of
            all ranks that is made for it.

    Returns:
        A future, whose ``result()`` is the path of the folder, or raises where a rank could not write.

    Raises:
        FileExistsError: as ``whole_folder``.
        ValueError: as ``whole_folder``.
    """
    global _saving
    if _saving is not None:
        _saving.exception()  # two saves at a time would exchange messages over one group
    group = process_group or own_group("asynchronous saves")
    whole = whole_folder(root, step, keep=keep, process_group=group)
    folder, saved = whole.__enter__(), Future[Path]()

    def finish(writing: Future[Any]) -> None:
        error = writing.exception()
        try:
            # The others learn of an error of this rank as it leaves the block.
            whole.__exit__(type(error) if error else None, error, None)
        except BaseException as raised:
            error = raised
        if error is None:
            saved.set_result(Path(root, f"step-{step:08d}"))
        else:
            saved.set_exception(error)

    try:
        writing = start_saving(state, folder, group)
    except BaseException as raised:
        whole.__exit__(type(raised), raised, None)
        raise
    writing.add_done_callback(finish)
    _saving = saved
    return saved


def latest_folder(root: str | os.PathLike[str], *, process_group: Any = None) -> Path | None:
    """The newest whole checkpoint that ``whole_folder`` wrote below a root; all ranks get one answer.

    Args:
        root: folder of all checkpoints of a run.
        process_group: ranks that read; by default all of the job, if ``torch.distributed`` is initialized.

    Returns:
        Its folder; None where there is none.
    """
    group = process_group or everyone()
    found = [None if group is not None and group.rank() else max(_whole(Path(root)), default=None)]
    newest = found[0] if group is None else all_gather_object(found[0], group)[0]
    return None if newest is None else Path(root, newest[1])


def _whole(root: Path) -> list[tuple[int, str]]:
    """Steps and names of the whole checkpoints below a root."""
    # os.path.isdir is False for a link to a file system that is away, where Path.is_dir raises.
    names = [path.name for path in root.glob("step-*") if os.path.isdir(path)]
    matches = [re.fullmatch(r"step-(\d{8,})", name) for name in names]
    return sorted((int(match[1]), match[0]) for match in matches if match)


def _unfinished(final: Path) -> Path:
    """The name of a checkpoint that is not whole: not yet, or no longer."""
    return final.with_name(f".{final.name}.part")


def _begin(final: Path) -> None:
    _refuse_existing(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    _sync(final.parent.parent)
    part = _unfinished(final)
    if os.path.lexists(part):
        _remove(part)
    for left in final.parent.glob(".step-*.part"):  # by a run that was killed
        _try_to_remove(left)
    part.mkdir()


def _refuse_existing(final: Path) -> None:
    if os.path.isdir(final):
        raise FileExistsError(
            f"{final} is there already: go on from latest_folder({str(final.parent)!r}), or save elsewhere"
        )
    if os.path.lexists(final):
        found = f"a link to {os.readlink(final)}, where no folder is" if final.is_symlink() else "no folder"
        raise FileExistsError(
            f"{final} must be free for the checkpoint of this step, and is {found}: remove it, or save "
            "elsewhere"
        )


def _remove(path: Path) -> None:
    """Removes a folder with all that is in it; of a link or a file itself alone."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _try_to_remove(path: Path) -> None:
    """Removes what no checkpoint needs; a warning says where that fails."""
    try:
        if not path.is_symlink() and not path.name.endswith(".part"):
            # A checkpoint that is removed in part must not look whole.
            path = path.rename(_unfinished(path))
        _remove(path)
    except OSError as error:
        logging.getLogger("oxidion").warning(
            "%s is no longer needed and cannot be removed (%s): remove it yourself. No other checkpoint is "
            "affected",
            path,
            error,
        )


def _finish(final: Path, keep: int) -> None:
    part = _unfinished(final)
    if not any(part.iterdir()):
        raise ValueError(f"nothing was written to {part}: write the checkpoint within the block")
    for folder, _, files in os.walk(part):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))
    part.rename(final)
    _sync(final.parent)
    older = [final.with_name(name) for _, name in _whole(final.parent) if name != final.name]
    for old in older[: max(0, len(older) + 1 - keep)]:
        _try_to_remove(old)


def _sync(path: Path) -> None:
    """Has the content of a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _by_leader(group: Any, work: Callable[[], None]) -> None:
    """Has the first rank of a group do something, while the others wait for it."""
    error = None
    if group is None or group.rank() == 0:
        try:
            work()
        except Exception as raised:
            error = raised
    _agree(group, error)


@contextmanager
def by_all() -> Iterator[None]:
    """A block after which all ranks go on, or none: an error of one is raised on all."""
    error = None
    try:
        yield
    except Exception as raised:  # the others wait for this rank's word
        error = raised
    _agree(everyone(), error, "loaded")


def _agree(group: Any, error: Exception | None, what: str = "written") -> None:
    """Raises on all ranks where one has an error: its own there, on the others one that names the rank."""
    words = None if error is None else f"{type(error).__name__}: {error}"
    gathered = [words] if group is None else all_gather_object(words, group)
    if error is not None:
        raise error
    for rank, said in enumerate(gathered):
        if said is not None:
            raise RuntimeError(f"no checkpoint was {what}: rank {rank} of the group failed with {said}")
