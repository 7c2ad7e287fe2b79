"""Checkpoints that go on: written by some ranks on one layout, read by others on another."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.workers import Workers

from . import jobs, saving

Groups = Mapping[int, Workers]
Place = tuple[int, str]
"""How many ranks, and their layout."""


def run(groups: Groups, ranks: int, job: Any, *args: Any) -> Any:
    """The answer of rank 0; in this process where one rank is wanted."""
    if ranks > 1:
        return groups[ranks].run(job, *args)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        return job(*args)


def goes_on(
    groups: Groups,
    folder: Path,
    source: Place,
    target: Place,
    name: str,
    keys: dict[str, Any],
    other: dict[str, Any] | None = None,
) -> tuple[float, dict[str, str]]:
    """Compares float64 training that was resumed elsewhere with uninterrupted training.

    Elsewhere, settings may be ``other`` than in the checkpoint.

    Returns:
        The largest distance of their weights, relative to the way from the first ones, and the dtypes of the
        states that were loaded.
    """
    where = str(folder / "checkpoint")
    wanted = run(groups, source[0], saving.save, where, source[1], name, keys, torch.float64)
    own = {**keys, **(other or {})}
    got, dtypes = run(groups, target[0], saving.load, where, target[1], name, own, torch.float64, other)
    return jobs.furthest(got, wanted), dtypes


def resumes_bit_equal(
    groups: Groups, folder: Path, layout: str, name: str, keys: dict[str, Any], asynchronous: bool = False
) -> bool:
    """Whether float32 training on four ranks goes on from a checkpoint as if it had not been interrupted."""
    where = str(folder / "checkpoint")
    wanted = run(groups, 4, saving.save, where, layout, name, keys, torch.float32, asynchronous)
    got, _ = run(groups, 4, saving.load, where, layout, name, keys, torch.float32)
    return equal(got, wanted)


def plain_state_resumes_bit_equal(groups: Groups, layout: str, name: str, keys: dict[str, Any]) -> bool:
    """The same with ``state_dict`` and no files."""
    return equal(*run(groups, 4, saving.plain_resume, layout, name, keys))


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all bits are the same."""
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
