"""Transformer configurations as lists of parameter shapes, and how a mesh shards them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

AXES = {"dp": "replicas", "fs": "fully sharded", "tp": "tensor parallel"}
"""Names of mesh axes, outermost first: ranks are numbered in row-major order."""

MOST_LAYERS = 10_000
"""Most transformer blocks of a model: each parameter is an entry of the plan."""

Kind = Literal["column", "row", "embedding", "head", "vector"]
Mesh = dict[str, int]
Lines = dict[str, tuple[list[int], int]]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        name: dotted name.
        shape: global shape; matrices are output by input features.
        kind: how tensor parallelism sees it. "column" matrices are split by output features, "row" ones by
            input features; "embedding" and "head" are vocabulary by width; a "vector" is not split.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Config:
    """A decoder-only transformer.

    Attributes:
        layers: transformer blocks.
        dim: width of the residual stream.
        heads: query heads.
        kv_heads: key and value heads.
        hidden: width inside the feed-forward block.
        vocab: tokens.
        gated: whether the feed-forward block has a gate (SwiGLU: three matrices) or not (two).
        tied: whether the output head is the embedding.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    gated: bool
    tied: bool = False

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: for sizes that are not positive integers, more layers than ``MOST_LAYERS``, flags that
                are not booleans, or head counts that do not divide.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("gated", "tied"):
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be true or false, got {value!r}")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field.name} must be an integer >= 1, got {value!r}")
        if self.layers > MOST_LAYERS:
            raise ValueError(f"layers must be an integer >= 1 and <= {MOST_LAYERS}, got {self.layers}")
        for whole, part in (("dim", "heads"), ("heads", "kv_heads")):
            size, count = getattr(self, whole), getattr(self, part)
            if size % count:
                raise ValueError(f"{whole} must be a multiple of {part}, got {size} and {count}")

    def parameters(self) -> list[Parameter]:
        """All parameters in the order of the forward pass."""
        embedding = Parameter("embedding.weight", (self.vocab, self.dim), "embedding")
        layers = [parameter for layer in range(self.layers) for parameter in self._layer(f"layers.{layer}")]
        norm = Parameter("norm.weight", (self.dim,), "vector")
        head = [] if self.tied else [Parameter("head.weight", (self.vocab, self.dim), "head")]
        return [embedding, *layers, norm, *head]

    def _layer(self, prefix: str) -> list[Parameter]:
        dim, hidden = self.dim, self.hidden
        keys = self.dim // self.heads * self.kv_heads
        wide: list[tuple[str, int]] = [("gate", hidden), ("up", hidden)] if self.gated else [("fc", hidden)]
        return [
            Parameter(f"{prefix}.attention_norm.weight", (dim,), "vector"),
            Parameter(f"{prefix}.attention.q.weight", (dim, dim), "column"),
            Parameter(f"{prefix}.attention.k.weight", (keys, dim), "column"),
            Parameter(f"{prefix}.attention.v.weight", (keys, dim), "column"),
            Parameter(f"{prefix}.attention.o.weight", (dim, dim), "row"),
            Parameter(f"{prefix}.mlp_norm.weight", (dim,), "vector"),
            *(Parameter(f"{prefix}.mlp.{name}.weight", (size, dim), "column") for name, size in wide),
            Parameter(f"{prefix}.mlp.{'down' if self.gated else 'proj'}.weight", (dim, hidden), "row"),
        ]


BUILT_IN = {
    "gpt-160m": Config(12, 768, 12, 12, 3072, 50304, gated=False),
    "llama-1b": Config(16, 2048, 32, 8, 8192, 128256, gated=True, tied=True),
    "llama-8b": Config(32, 4096, 32, 8, 14336, 128256, gated=True),
    "llama-70b": Config(80, 8192, 64, 8, 28672, 128256, gated=True),
    "llama-405b": Config(126, 16384, 128, 8, 53248, 128256, gated=True),
}
"""Models by name: GPT-2 small without position embeddings and with its own head, and the Llama 3 family."""


def load(name: str) -> Config:
    """A configuration by its name or from a JSON file.

    Args:
        name: a key of ``BUILT_IN`` or the path of a file that holds an object with the fields of ``Config``.

    Raises:
        ValueError: for a name that is neither, or a file that does not hold a configuration.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(BUILT_IN)
        raise ValueError(f"unknown model {name!r}: neither one of {known} nor a JSON file")
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"model file {name}: {error}") from error
    if isinstance(values, dict):
        names = [field.name for field in fields(Config)]
        wrong = [f"unknown key {key!r}" for key in values if key not in names]
        wrong += [f"missing key {key!r}" for key in names if key not in values and key != "tied"]
    else:
        wrong = [f"expected an object, got {type(values).__name__}"]
    if wrong:
        raise ValueError(f"model file {name}: {', '.join(wrong)}")
    try:
        return Config(**values)
    except ValueError as error:
        raise ValueError(f"model file {name}: {error}") from error


def spelled(mesh: Mesh) -> str:
    """The mesh as the command line takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def parse_mesh(text: str) -> Mesh:
    """Axes and sizes of ``dp=8,fs=64,tp=8``, outermost first.

    Raises:
        ValueError: for anything else.
    """
    sizes: Mesh = {}
    for part in text.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if not equals or axis not in AXES:
            raise ValueError(
                f"mesh {text!r}: expected name=size with the names {', '.join(AXES)}, got {part!r}"
            )
        if axis in sizes:
            raise ValueError(f"mesh {text!r}: axis {axis} is there twice")
        if not (size.isascii() and size.isdigit()) or int(size) < 1:
            raise ValueError(f"mesh {text!r}: the size of {axis} must be an integer >= 1, got {size!r}")
        sizes[axis] = int(size)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def lines(mesh: Mesh, rank: int) -> Lines:
    """For each axis the ranks along it through ``rank``, and the place of ``rank`` among them."""
    found = {}
    stride = math.prod(mesh.values())
    for axis, size in mesh.items():
        stride //= size
        place = rank // stride % size
        first = rank - place * stride
        found[axis] = (list(range(first, first + size * stride, stride)), place)
    return found


def cut_dim(kind: Kind, axis: str, mesh: Mesh) -> int | None:
    """The dimension of a parameter that an axis shards, or None."""
    split = {"column": 0, "row": 1, "embedding": 1, "head": 1}.get(kind) if mesh.get("tp", 1) > 1 else None
    if axis == "tp":
        return split
    return (1 if split == 0 else 0) if axis == "fs" else None


def stored(parameter: Parameter, mesh: Mesh, at: Lines) -> int:
    """Elements of a parameter on one rank: chunks as ``torch.chunk`` makes them."""
    shape = list(parameter.shape)
    for axis, (ranks, place) in at.items():
        dim = cut_dim(parameter.kind, axis, mesh)
        if dim is not None:
            each = -(-shape[dim] // len(ranks))
            shape[dim] = max(min(each, shape[dim] - each * place), 0)
    return math.prod(shape)
