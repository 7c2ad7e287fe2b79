"""Text that every CPython carries, as byte tokens: the standard library's sources and documentation.

A document is one ``.py`` file of the standard library or one topic of :mod:`pydoc_data.topics`. Documents
are put in the order of the SHA-256 of their names, which mixes packages and is the same on every run of one
Python version. The first of them, up to ``held_out_fraction`` of the bytes, are held out, so no file is in
both parts.

Legend: B = sequences in a batch, S = tokens in a sequence.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
"""One token per byte value."""

SEPARATOR = b"\0"
"""Byte between two documents; it occurs in no source file."""

SKIPPED_FOLDERS = frozenset(
    {
        "__phello__",
        "__pycache__",
        "dist-packages",
        "encodings",  # code pages: tables of numbers
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib2to3",
        "pydoc_data",  # its text is read as topics, not as a source file
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True)
class Corpus:
    """Training and held-out tokens.

    Attributes:
        train: 1-D uint8 tensor of training bytes.
        held_out: 1-D uint8 tensor of the held-out documents' bytes.
        train_names: names of the training documents, in order.
        held_out_names: names of the held-out documents, in order.
    """

    train: Tensor
    held_out: Tensor
    train_names: tuple[str, ...]
    held_out_names: tuple[str, ...]

    def __str__(self) -> str:
        """One line: documents and bytes of both parts."""
        return (
            f"training text: {len(self.train_names)} documents, {self.train.numel() / 1e6:.2f} MB; "
            f"held out: {len(self.held_out_names)} documents, {self.held_out.numel() / 1e6:.2f} MB"
        )


def standard_library_documents() -> Iterator[tuple[str, bytes]]:
    """Yields ``(name, text)`` of every source file and documentation topic, in no fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in SKIPPED_FOLDERS and not name.startswith(("config-", "lib-"))
        ]
        for file in files:
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(folder) / file
                yield path.relative_to(root).as_posix(), path.read_bytes()
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for topic, text in topics.items():
        yield f"pydoc_data/{topic}", text.encode()


def load_corpus(max_bytes: int, held_out_fraction: float = 0.08) -> Corpus:
    """Reads the documents and splits them by file into a training and a held-out part.

    Args:
        max_bytes: size cap on both parts together; the first document that passes it and all after it are
            left out.
        held_out_fraction: share that is held out of ``max_bytes``, or of the whole text if that is smaller.

    Returns:
        The two parts; both hold at least one document.

    Raises:
        ValueError: the text under the cap has fewer than two documents.
    """
    documents = sorted(
        standard_library_documents(), key=lambda item: hashlib.sha256(item[0].encode()).digest()
    )
    sizes = [len(text) + len(SEPARATOR) for _, text in documents]
    budget = min(max_bytes, sum(sizes))
    held_out: list[tuple[str, bytes]] = []
    train: list[tuple[str, bytes]] = []
    used = 0
    for document, size in zip(documents, sizes, strict=True):
        used += size
        if used > budget:
            break
        (held_out if used <= held_out_fraction * budget or not held_out else train).append(document)
    if not train:
        raise ValueError(
            f"max_bytes must leave room for two documents of the standard library, got {max_bytes}"
        )
    return Corpus(
        train=_tokens(train),
        held_out=_tokens(held_out),
        train_names=tuple(name for name, _ in train),
        held_out_names=tuple(name for name, _ in held_out),
    )


def _tokens(documents: list[tuple[str, bytes]]) -> Tensor:
    joined = bytearray(SEPARATOR.join(text for _, text in documents) + SEPARATOR)
    return torch.frombuffer(joined, dtype=torch.uint8)


class Windows:
    """Non-overlapping windows of S+1 tokens, visited in an order that is reshuffled in every epoch.

    Only ``position``, the number of windows taken so far, changes: it is all that a checkpoint needs.
    """

    def __init__(self, tokens: Tensor, seq_len: int, seed: int) -> None:
        """Cuts the tokens.

        Args:
            tokens: 1-D uint8 tensor.
            seq_len: S.
            seed: seed of the shuffles; epoch e uses ``seed + e``.

        Raises:
            ValueError: fewer than S+1 tokens.
        """
        count = (tokens.numel() - 1) // seq_len
        if count < 1:
            raise ValueError(
                f"seq_len must be less than the number of tokens ({tokens.numel()}), got {seq_len}"
            )
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.count = count
        self.position = 0
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def next_batch(self, batch_size: int) -> Tensor:
        """Takes the next windows.

        Returns:
            [B, S+1] int64 tokens: columns ``:-1`` are the inputs, ``1:`` the targets.
        """
        rows = []
        for position in range(self.position, self.position + batch_size):
            epoch, index = divmod(position, self.count)
            if epoch != self._epoch:
                generator = torch.Generator().manual_seed(self.seed + epoch)
                self._order = torch.randperm(self.count, generator=generator)
                self._epoch = epoch
            start = int(self._order[index]) * self.seq_len
            rows.append(self.tokens[start : start + self.seq_len + 1])
        self.position += batch_size
        return torch.stack(rows).long()

    def spread(self, count: int) -> Tensor:
        """Windows at equal distances over the tokens, always the same ones.

        Args:
            count: how many; fewer come back where the tokens hold fewer.

        Returns:
            [B, S+1] int64 tokens.
        """
        count = min(count, self.count)
        starts = [index * self.count // count * self.seq_len for index in range(count)]
        return torch.stack([self.tokens[start : start + self.seq_len + 1] for start in starts]).long()
