"""Attention heads in weights: which outputs, or inputs, of a linear layer belong to each head.

Legend: H = heads of queries, G = heads of keys and values, D = outputs of a head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from oxidion.groups.facts import alternates, class_names, is_linear, number, weight_shape

KINDS = ("q", "k", "v", "o")
"""Kinds that ``per_head`` names: queries with their gates, keys, values, the layer behind the attention."""

LAYERS = {
    "q": re.compile(
        r"q|wq(_b)?|((to|linear|add|project)_)?q(_b)?(_proj|_lin)?|(projection_)?query(_proj|_global)?"
    ),
    "k": re.compile(r"k|wk|((to|linear|add|project)_)?k(_proj|_lin)?|(projection_)?key(_proj|_global)?"),
    "v": re.compile(r"v|wv|((to|linear|add|project)_)?v(_proj|_lin)?|(projection_)?value(_proj|_global)?"),
    "z": re.compile(r"g(_b)?_proj|in_proj_z|(q_)?gate_proj|output_gate"),
    "kv": re.compile(r"kv(_proj)?|to_kv|linear_kv|(w|linear_)?kv_b(_proj)?"),
    "qkv": re.compile(r"\w*qkv(_proj|_linear)?|c_attn|query_key_value"),
    "qkvz": re.compile(r"\w*qkvz"),
    "o": re.compile(
        r"o|wo|((o|out|output|c|linear|att)_)?proj(ect)?|(to_|linear_)?out(_lin|put)?|to_add_out|dense|"
        r"projection(_layer)?|merge"
    ),
}
"""Names of the layers of an attention, by the kinds that they make; z is a gate."""
SHARED = re.compile(
    r"(w|linear_)?(q|kv|k|v|g|f)_a(_proj\w*)?|wkv_a\w*|in_proj_(ba|b|a)|[abf]_proj|gate|indexer|router"
)
"""Names of layers that belong to all heads, or that have a few outputs for each."""

ATTENTION = re.compile(r"Attention|Attn|DeltaNet", re.IGNORECASE)
GATED = re.compile(r"Qwen3Next|Qwen3_5")
"""Classes whose heads have a query and a gate, one behind the other."""


ALTERNATING = re.compile(
    r"GPTNeoX|Bloom|Falcon|Persimmon|CodeGen|InternLM2|Megatron|BigCode|FusedQKVLinear|\bSelfAttention\b|MiniMax"
)
"""Classes whose order of queries, keys and values is by groups of heads, or depends on settings."""


@dataclass(frozen=True)
class Split:
    """Sizes of the parts of a weight, along its outputs or its inputs; none where they are not certain."""

    sizes: tuple[int, ...] = ()
    of_inputs: bool = False

    def keys(self, *, transposed: bool) -> dict[str, Any]:
        """Group keys that cut the weight, which is stored ``[in, out]`` if ``transposed``."""
        if len(self.sizes) < 2:
            return {}
        alike = len(set(self.sizes)) == 1
        keys: dict[str, Any] = {"num_heads": len(self.sizes)} if alike else {"split_sizes": self.sizes}
        return {**keys, "split_dim": 1} if self.of_inputs != transposed else keys


def kinds(per_head: bool | Iterable[str]) -> frozenset[str]:
    """The kinds of layers that an argument ``per_head`` names.

    Raises:
        TypeError: for anything but True, False and a list of kinds.
        ValueError: for an unknown kind.
    """
    if isinstance(per_head, bool):
        return frozenset(KINDS if per_head else ())
    expected = f"per_head must be True, False or a list of {', '.join(map(repr, KINDS))}"
    if isinstance(per_head, str) or not isinstance(per_head, Iterable):
        raise TypeError(f"{expected}, got {per_head!r}")
    named = list(per_head)
    if unknown := [kind for kind in named if kind not in KINDS]:
        raise ValueError(f"{expected}, got {unknown[0]!r}")
    return frozenset(named)


def split(
    names: Sequence[str], around: Sequence[nn.Module], shape: Sequence[int], wanted: Collection[str]
) -> Split | None:
    """The heads of a linear layer; None for a layer of no attention, and for kinds that are not wanted.

    Args:
        names: of the layer in the module that holds it, of that in the one around it, and so on.
        around: these modules, the nearest first.
        shape: outputs and inputs of the layer.
        wanted: kinds that are cut into heads.
    """
    owner = next(_attentions(around), None) if wanted else None
    if owner is None:
        return None
    own = around[0] is owner or len(names) < 2
    name = names[0] if own else names[1]
    kind = next((kind for kind, layer in LAYERS.items() if layer.fullmatch(name.lower())), "")
    if not kind and not SHARED.fullmatch(name.lower()) and set(wanted) == set(KINDS):
        return Split()
    if not set(kind.replace("z", "q")) & set(wanted):
        return None
    # Of several layers in a row some take or make no heads.
    heads = _heads(owner, kind, shape) if own or sum(map(is_linear, around[0].children())) < 2 else None
    if heads is None or not heads.keys() >= set(kind):
        return Split()
    outputs, inputs = shape
    if kind == "o":
        count, size = heads["o"]
        return Split((size,) * count, of_inputs=True) if count * size == inputs else Split()
    runs = _runs(kind, heads, owner)
    if sum(size for _, size in runs) != outputs:
        return Split()
    return Split(
        _cut(runs, wanted, is_ordered=kind != "qkv" or not (alternates(owner) or _is(owner, ALTERNATING)))
    )


def _is(module: nn.Module, pattern: re.Pattern[str]) -> bool:
    return pattern.search(" ".join(class_names(module))) is not None


def _attentions(around: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Attention modules that know their heads, among two modules and what these hold, the nearest first."""
    for module in around[:2]:
        if _is(module, ATTENTION):
            yield from (m for m in (module, *module.children()) if _count(m) is not None)


def _count(module: nn.Module) -> int | None:
    return number(module, "num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "num_v_heads")


def _heads(module: nn.Module, kind: str, shape: Sequence[int]) -> dict[str, tuple[int, int]] | None:
    """Heads of each kind, and outputs of each head; None where the module does not say it."""
    count = _count(module)
    if count is None:
        return None
    own = vars(module)
    if isinstance(own.get("head_v_dim"), int):  # linear attention
        values, value = number(module, "num_v_heads", "num_heads"), own["head_v_dim"]
        keys, key = number(module, "num_k_heads", "num_heads"), number(module, "head_k_dim")
        if values is None or keys is None or key is None or values % keys:
            return None
        return {**dict.fromkeys("qk", (keys, key)), **dict.fromkeys("vzo", (values, value))}
    nope, value = number(module, "qk_nope_head_dim"), number(module, "v_head_dim")
    holders = (module, getattr(module, "config", None))
    rope = next((n for m in holders if isinstance(n := getattr(m, "qk_rope_head_dim", None), int)), None)
    if nope is not None and value is not None and rope is not None:  # latent attention
        return {"q": (count, nope + rope), "k": (count, nope), **dict.fromkeys("vo", (count, value))}
    groups = number(
        module, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "num_query_groups"
    )
    size = number(
        module, "head_dim", "attention_head_size", "head_size", "d_kv", "key_value_proj_dim", "dim_head"
    ) or _size(module, kind, count, groups, shape)
    if size is None:
        return None
    return {**dict.fromkeys("qzo", (count, size)), **dict.fromkeys("kv", (groups or count, size))}


def _size(module: nn.Module, kind: str, count: int, groups: int | None, shape: Sequence[int]) -> int | None:
    """Outputs of a head where the module does not say it, by the layer itself or by that of the queries."""
    outputs, inputs = shape
    queries = [
        weight_shape(own) for name, own in module.named_children() if LAYERS["q"].fullmatch(name.lower())
    ]
    if kind == "o":
        width = inputs
    elif kind in ("q", "z"):
        width = outputs
    elif queries and queries[0]:
        width = queries[0][0]
    elif kind == "qkv" and (groups is not None or outputs == 3 * inputs):
        width = outputs * count // (count + 2 * (groups or count))
    else:
        return None
    return width // count if width % count == 0 else None


def _runs(kind: str, heads: Mapping[str, tuple[int, int]], owner: nn.Module) -> list[tuple[str, int]]:
    """The outputs of a layer as runs of a kind, one for each head."""
    is_latent = "z" not in heads
    count = min(heads[letter][0] for letter in kind)
    if kind == "qkvz" or (kind == "kv" and is_latent):
        mixed = kind
    elif kind == "q" and _is(owner, GATED) and not is_latent:
        mixed = "qz"
    else:
        return [(letter, heads[letter][1]) for letter in kind for _ in range(heads[letter][0])]
    each = [(letter, heads[letter][1]) for letter in mixed for _ in range(heads[letter][0] // count)]
    return each * count


def _cut(runs: list[tuple[str, int]], wanted: Collection[str], *, is_ordered: bool) -> tuple[int, ...]:
    """Sizes of the parts: a run of what is wanted, and all runs of another kind that lie together."""
    named = [(letter.replace("z", "q"), size) for letter, size in runs]
    if all(letter in wanted for letter, _ in named):
        return tuple(size for _, size in named)
    together = [(letter, [size for _, size in group]) for letter, group in groupby(named, lambda run: run[0])]
    if not is_ordered or len(together) > len({letter for letter, _ in together}):
        return ()  # other kinds lie between those that are wanted, or may do so
    sizes = ([*run] if letter in wanted else [sum(run)] for letter, run in together)
    return tuple(size for part in sizes for size in part)
