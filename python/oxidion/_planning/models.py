"""Transformer configurations as lists of parameter shapes, and how a mesh shards them."""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from oxidion._core.arguments import read_object, shown

AXES = {"dp": "replicas", "fs": "fully sharded", "ep": "experts", "tp": "tensor parallel"}
"""Names of mesh axes, outermost first: ranks are numbered in row-major order."""

MOST_LAYERS = 10_000
"""Most transformer blocks of a model: each parameter is an entry of the plan."""
MOST_SIZE = 2**31
"""The largest of the other sizes of a model."""
MOST_RANKS = 2**20
"""Most ranks of a mesh: each is an entry of its axes."""
MOST_DIGITS = 18
"""Digits of the size of an axis; Python refuses to read 5000."""

Kind = Literal["column", "row", "embedding", "head", "vector", "router", "expert_column", "expert_row"]
Mesh = dict[str, int]
Lines = dict[str, tuple[list[int], int]]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Attributes:
        name: dotted name.
        shape: global shape; matrices are output by input features.
        kind: how tensor parallelism sees it. "column" matrices are split by output features, "row" ones by
            input features; "embedding" and "head" are vocabulary by width; a "vector" and a "router" are not
            split. Stacks of experts are "expert_column" and "expert_row".
        parts: heights of the matrices that a fused weight is made of; empty for one.
    """

    name: str
    shape: tuple[int, ...]
    kind: Kind
    parts: tuple[int, ...] = ()

    @property
    def is_matrix(self) -> bool:
        """True for what the algorithm of the matrices takes."""
        return self.kind in ("column", "row", "expert_column", "expert_row")

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
        head_dim: width of a head; 0 is ``dim / heads``.
        bias: whether the matrices inside the layers have biases.
        fused: whether query, key and value are one weight, and gate and up.
        experts: feed-forward blocks of a layer among which a router chooses; 0 for none.
        expert_hidden: width inside an expert; 0 is ``hidden``.
        experts_per_token: experts that a token goes through.
        shared_experts: experts that every token goes through, as one block of their width together.
        dense_layers: first layers without experts.
        kv_lora: rank of keys and values in latent attention; 0 for none.
        q_lora: rank of the queries in latent attention; 0 for none.
        rope_dim: width of the part of a head with positions, in latent attention.
        positions: rows of a learned embedding of positions; 0 for none.
    """

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int
    gated: bool
    tied: bool = False
    head_dim: int = 0
    bias: bool = False
    fused: bool = False
    experts: int = 0
    expert_hidden: int = 0
    experts_per_token: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    kv_lora: int = 0
    q_lora: int = 0
    rope_dim: int = 0
    positions: int = 0

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            ValueError: for sizes that are not integers within their bounds, flags that are not booleans, or
                head counts that do not divide.
        """
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.default is MISSING else 0
            most = MOST_LAYERS if field.name == "layers" else MOST_SIZE
            if field.name in FLAGS:
                if not isinstance(value, bool):
                    raise ValueError(f"{field.name} must be true or false, got {shown(value)}")
            elif not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise ValueError(
                    f"{field.name} must be an integer >= {least} and <= {most}, got {shown(value)}"
                )
        for whole, part in (("dim", "heads"), ("heads", "kv_heads")):
            size, count = getattr(self, whole), getattr(self, part)
            if size % count and not (part == "heads" and self.head_dim):
                raise ValueError(f"{whole} must be a multiple of {part}, got {size} and {count}")
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(
                f"experts_per_token must be from 1 to {self.experts}, got {self.experts_per_token}"
            )

    def parameters(self) -> list[Parameter]:
        """All parameters in the order of the forward pass."""
        embedding = [Parameter("embedding.weight", (self.vocab, self.dim), "embedding")]
        if self.positions:
            embedding.append(Parameter("positions.weight", (self.positions, self.dim), "embedding"))
        layers = [parameter for layer in range(self.layers) for parameter in self._layer(layer)]
        norm = Parameter("norm.weight", (self.dim,), "vector")
        head = [] if self.tied else [Parameter("head.weight", (self.vocab, self.dim), "head")]
        return [*embedding, *layers, norm, *head]

    @property
    def active(self) -> int:
        """Elements that a token meets, without the embedding's other rows."""
        total = 0
        for parameter in self.parameters():
            if parameter.kind in ("expert_column", "expert_row"):
                total += parameter.numel // self.experts * self.experts_per_token
            elif parameter.kind != "embedding" or self.tied:
                total += parameter.numel
        return total

    def _layer(self, layer: int) -> list[Parameter]:
        prefix = f"layers.{layer}"
        norm = Parameter(f"{prefix}.attention_norm.weight", (self.dim,), "vector")
        second = Parameter(f"{prefix}.mlp_norm.weight", (self.dim,), "vector")
        has_experts = self.experts > 0 and layer >= self.dense_layers
        inner = self._experts(prefix) if has_experts else self._mlp(f"{prefix}.mlp", self.hidden)
        return [norm, *self._attention(f"{prefix}.attention"), second, *inner]

    def _linear(self, name: str, shape: tuple[int, int], kind: Kind, *parts: int) -> list[Parameter]:
        weight = Parameter(f"{name}.weight", shape, kind, parts)
        return [weight, *([Parameter(f"{name}.bias", shape[:1], "vector")] if self.bias else [])]

    def _attention(self, name: str) -> list[Parameter]:
        dim, head = self.dim, self.head_dim or self.dim // self.heads
        queries, keys = self.heads * head, self.kv_heads * head
        if self.kv_lora:
            return self._latent(name, head)
        if self.fused:
            heights = (queries, keys, keys)
            first = self._linear(f"{name}.qkv", (sum(heights), dim), "column", *heights)
        else:
            first = self._linear(f"{name}.q", (queries, dim), "column")
            for part in "kv":
                first += self._linear(f"{name}.{part}", (keys, dim), "column")
        return [*first, *self._linear(f"{name}.o", (dim, queries), "row")]

    def _latent(self, name: str, head: int) -> list[Parameter]:
        """Attention over latent queries, keys and values, as of DeepSeek-V3."""
        dim, both = self.dim, head + self.rope_dim
        linear = self._linear
        if self.q_lora:
            first = linear(f"{name}.q_a", (self.q_lora, dim), "column")
            first += linear(f"{name}.q_b", (self.heads * both, self.q_lora), "column")
        else:
            first = linear(f"{name}.q", (self.heads * both, dim), "column")
        down = (self.kv_lora, self.rope_dim)
        return [
            *first,
            *linear(f"{name}.kv_a", (sum(down), dim), "column", *down),
            *linear(f"{name}.kv_b", (self.heads * 2 * head, self.kv_lora), "column"),
            *linear(f"{name}.o", (dim, self.heads * head), "row"),
        ]

    def _mlp(self, name: str, hidden: int) -> list[Parameter]:
        dim = self.dim
        if self.gated and self.fused:
            wide = self._linear(f"{name}.gate_up", (2 * hidden, dim), "column", hidden, hidden)
        elif self.gated:
            wide = [
                p for part in ("gate", "up") for p in self._linear(f"{name}.{part}", (hidden, dim), "column")
            ]
        else:
            wide = self._linear(f"{name}.fc", (hidden, dim), "column")
        return [*wide, *self._linear(f"{name}.{'down' if self.gated else 'proj'}", (dim, hidden), "row")]

    def _experts(self, prefix: str) -> list[Parameter]:
        hidden, count = self.expert_hidden or self.hidden, self.experts
        router = Parameter(f"{prefix}.router.weight", (count, self.dim), "router")
        names = ("gate", "up") if self.gated else ("fc",)
        wide = [
            Parameter(f"{prefix}.experts.{name}", (count, hidden, self.dim), "expert_column")
            for name in names
        ]
        down = Parameter(f"{prefix}.experts.down", (count, self.dim, hidden), "expert_row")
        shared = self._mlp(f"{prefix}.shared", self.shared_experts * hidden) if self.shared_experts else []
        return [router, *wide, down, *shared]


FLAGS = ("gated", "tied", "bias", "fused")
"""Fields of a configuration that are true or false."""


BUILT_IN = {
    "gpt-160m": Config(12, 768, 12, 12, 3072, 50304, gated=False),
    "llama-1b": Config(16, 2048, 32, 8, 8192, 128256, gated=True, tied=True),
    "llama-8b": Config(32, 4096, 32, 8, 14336, 128256, gated=True),
    "llama-70b": Config(80, 8192, 64, 8, 28672, 128256, gated=True),
    "llama-405b": Config(126, 16384, 128, 8, 53248, 128256, gated=True),
    "mixtral-8x7b": Config(32, 4096, 32, 8, 14336, 32000, gated=True, experts=8, experts_per_token=2),
    "deepseek-v3": Config(
        layers=61,
        dim=7168,
        heads=128,
        kv_heads=128,
        hidden=18432,
        vocab=129280,
        gated=True,
        head_dim=128,
        experts=256,
        expert_hidden=2048,
        experts_per_token=8,
        shared_experts=1,
        dense_layers=3,
        kv_lora=512,
        q_lora=1536,
        rope_dim=64,
    ),
}
"""Models by name: GPT-2 small without positions and with a head of its own, Llama 3, two with experts."""


def load(name: str) -> Config:
    """A configuration by its name or from a JSON file.

    Args:
        name: a key of ``BUILT_IN`` or the path of a file that holds an object with the fields of ``Config``,
            or the ``config.json`` of a model of transformers.

    Raises:
        ValueError: for a name that is neither, or a file that does not hold a configuration.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    values = read_object("model", name, BUILT_IN)
    if "model_type" in values:
        values = of_transformers(values, name)
    names = [field.name for field in fields(Config)]
    needed = [field.name for field in fields(Config) if field.default is MISSING]
    wrong = [f"unknown key {key!r}" for key in values if key not in names]
    wrong += [f"missing key {key!r}" for key in needed if key not in values]
    if wrong:
        raise ValueError(f"model file {name}: {', '.join(wrong)}")
    try:
        return Config(**values)
    except ValueError as error:
        raise ValueError(f"model file {name}: {error}") from error


HEADS = ("num_attention_heads", "n_head")
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "mixtral": {},
    "qwen3_moe": {},
    "phi3": {"fused": True},
    "deepseek_v3": {},
    "gpt2": {"gated": False, "fused": True, "bias": True},
}
"""Kinds of models whose ``config.json`` is read, with what all models of a kind have."""


def of_transformers(values: dict[str, Any], name: str) -> dict[str, Any]:
    """The fields of `Config` from a configuration of transformers.

    Raises:
        ValueError: for a kind that is not known, or a missing key.
    """
    kind = values["model_type"]
    if not isinstance(kind, str) or kind not in TRANSFORMERS:
        raise ValueError(
            f"model file {name}: model_type must be one of {', '.join(TRANSFORMERS)}, got {shown(kind)}"
        )

    def get(*keys: str, default: Any = None) -> Any:
        found = next((values[key] for key in keys if values.get(key) is not None), default)
        if found is None:
            raise ValueError(f"model file {name}: missing key {keys[0]!r}")
        return found

    dim, heads = get("hidden_size", "n_embd"), get(*HEADS)
    is_gpt2 = kind == "gpt2" and isinstance(dim, int)
    experts = get("num_local_experts", "num_experts", "n_routed_experts", default=0)
    read = {
        "layers": get("num_hidden_layers", "n_layer"),
        "dim": dim,
        "heads": heads,
        "kv_heads": get("num_key_value_heads", default=heads),
        "hidden": get("intermediate_size", "n_inner", default=4 * dim if is_gpt2 else None),
        "vocab": get("vocab_size"),
        "gated": True,
        "tied": get("tie_word_embeddings", default=kind in ("gpt2", "gemma", "gemma2", "gemma3_text")),
        "head_dim": get("v_head_dim", "head_dim", default=0),
        "positions": get("n_positions", default=1024) if kind == "gpt2" else 0,
        "experts": experts,
        "expert_hidden": get("moe_intermediate_size", default=0) if experts else 0,
        "experts_per_token": get("num_experts_per_tok", default=0) if experts else 0,
        "shared_experts": get("n_shared_experts", default=0) if experts else 0,
        "dense_layers": get("first_k_dense_replace", default=0) if experts else 0,
        "kv_lora": get("kv_lora_rank", default=0),
        "q_lora": get("q_lora_rank", default=0),
        "rope_dim": get("qk_rope_head_dim", default=0),
    }
    return {**read, **TRANSFORMERS[kind]}


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
                f"mesh {shown(text)}: expected name=size with the names {', '.join(AXES)}, got {shown(part)}"
            )
        if axis in sizes:
            raise ValueError(f"mesh {shown(text)}: axis {axis} is there twice")
        if not (size.isascii() and size.isdigit() and len(size) <= MOST_DIGITS) or int(size) < 1:
            raise ValueError(
                f"mesh {shown(text)}: the size of {axis} must be an integer >= 1, got {shown(size)}"
            )
        sizes[axis] = int(size)
    check_ranks(sizes)
    return {axis: sizes[axis] for axis in AXES if axis in sizes}


def check_ranks(mesh: Mesh) -> None:
    """Refuses a mesh of more ranks than are planned for.

    Raises:
        ValueError: for more than ``MOST_RANKS``.
    """
    ranks = math.prod(mesh.values())
    if ranks > MOST_RANKS:
        raise ValueError(f"mesh '{spelled(mesh)}' has {ranks} ranks: a mesh may have at most {MOST_RANKS}")


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
    has_tp = mesh.get("tp", 1) > 1
    if kind in ("expert_column", "expert_row"):
        split = {"expert_column": 1, "expert_row": 2}[kind] if has_tp else None
        if axis == "ep":
            return 0
        return split if axis == "tp" else (2 if split == 1 else 1) if axis == "fs" else None
    split = {"column": 0, "row": 1, "embedding": 1, "head": 1}.get(kind) if has_tp else None
    if axis == "tp":
        return split
    # Where there are no experts, their axis is one more over which parameters are fully sharded.
    return (1 if split == 0 else 0) if axis in ("fs", "ep") else None


def stored(parameter: Parameter, mesh: Mesh, at: Lines) -> int:
    """Elements of a parameter on one rank: chunks as ``torch.chunk`` makes them."""
    shape = list(parameter.shape)
    for axis, (ranks, place) in at.items():
        dim = cut_dim(parameter.kind, axis, mesh)
        if dim is not None:
            each = -(-shape[dim] // len(ranks))
            shape[dim] = max(min(each, shape[dim] - each * place), 0)
    return math.prod(shape)
