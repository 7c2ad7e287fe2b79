"""Weights in which several matrices lie one behind the other, and the sizes of these."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import Tensor, nn

from oxidion.groups.facts import alternates, class_names, is_linear, number, weight_shape

QKV = re.compile(r"\w*qkv\w*|c_attn|query_key_value|kv(_proj)?|to_kv|kv_a_proj_with_mqa|wkv_a")
GATED = re.compile(r"gate_up_proj|gate_and_up|gate_up|w13|w12|weights_in|gated_up\w*|Wi")
GATED_CLASS = re.compile(r"glu", re.IGNORECASE)
GATED_INPUT = re.compile(r"fc1|w12|proj|wi|c_fc|linear_in|in_proj", re.IGNORECASE)
BY_HEAD = re.compile(
    r"GPTNeoX|Bloom|Falcon|Persimmon|CodeGen|ChatGLM|GLMSelf|InternLM2|Megatron|BigCode|Qwen3Next|FusedQKVLinear|MiniMaxLightning"
)
"""Classes whose queries, keys and values alternate from head to head."""
ALTERNATING = re.compile(r"GptOss")
"""Classes in which every other output is a gate."""

HEADS_OF_TWO = re.compile(r"kv_b_proj|wkv_b")
"""Layers whose outputs are, head by head, keys and values."""


class Fused(NamedTuple):
    """Matrices that the outputs of a layer are made of."""

    sizes: list[int]
    """Outputs of each matrix; none where they are not known or do not lie together."""
    said: str
    """Words for the summary."""
    alternating: int = 1
    """Number of matrices whose outputs alternate one by one."""


def _attention(parent: nn.Module, size: int, features: int) -> list[int]:
    """Rows of queries, keys and values: as many heads of each or fewer of the last two, else three thirds."""
    head = number(parent, "head_dim", "head_size", "d_kv")
    heads = number(parent, "num_heads", "num_attention_heads", "n_heads", "n_head")
    groups = number(parent, "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head")
    if head is not None and heads is not None:
        for own in (groups, heads):
            if own is not None and (heads + 2 * own) * head == size:
                return [heads * head, own * head, own * head]
    return [features] * 3 if size == 3 * features else []


def _sizes(name: str, parent: nn.Module, size: int, features: int) -> list[int]:
    if name in ("kv_a_proj_with_mqa", "wkv_a"):
        own = (number(parent, "kv_lora_rank"), number(parent, "qk_rope_head_dim"))
        return [n for n in own if n is not None] if None not in own else []
    if name in ("kv", "kv_proj", "to_kv"):
        return [size // 2] * 2 if size % 2 == 0 else []
    return _attention(parent, size, features)


def fused(name: str, parent: nn.Module, size: int, features: int) -> Fused | None:
    """The matrices that the outputs of a linear layer are made of; None where it is one.

    Args:
        name: of the layer in ``parent``.
        parent: the module that holds it.
        size: outputs.
        features: inputs.
    """
    classes = " ".join(class_names(parent))
    if HEADS_OF_TWO.fullmatch(name):
        return Fused([], "fused, not split: heads alternate")
    if name == "kv_proj" and number(parent, "head_dim") == size:
        return None  # one head that is key and value
    if QKV.fullmatch(name.lower()):
        if BY_HEAD.search(classes) or alternates(parent):
            return Fused([], "fused, not split: heads alternate")
        sizes = _sizes(name.lower(), parent, size, features)
        if sum(sizes) == size:
            return Fused(sizes, "fused")
        return Fused([], "fused, not split: sizes unknown")
    if GATED.fullmatch(name) or (GATED_CLASS.search(classes) and GATED_INPUT.fullmatch(name)):
        return halves(parent, size) if _is_halved(name, parent, size) else None
    if name == "in_proj" and re.search(r"Mamba(?!2)", classes):
        inner = number(parent, "intermediate_size", "d_inner")
        if inner is not None and size == 2 * inner:
            return Fused([inner, inner], "fused")
    if name == "in_proj" and "Mamba2" in classes:
        return Fused([], "fused, not split: some parts are a few rows")
    return None


def _is_halved(name: str, parent: nn.Module, size: int) -> bool:
    """Returns True if a sibling of this layer takes half of its outputs, or there is no sibling."""
    others = [m for own, m in parent.named_children() if own != name and is_linear(m)]
    return not others or any(size == 2 * side for other in others for side in weight_shape(other))


def halves(module: nn.Module, size: int) -> Fused:
    """A gate and what it multiplies, one behind the other unless the module says otherwise."""
    if not getattr(module, "is_concatenated", True) or ALTERNATING.search(" ".join(class_names(module))):
        return Fused([], "fused, not split: gate and value alternate", alternating=2)
    if size % 2:
        return Fused([], "fused, not split: sizes unknown")
    return Fused([size // 2] * 2, "fused")


def recurrent(module: nn.Module, param: Tensor) -> list[int]:
    """The gates of a recurrent layer's weight."""
    gates = param.shape[0] // _recurrent_size(module)
    return [param.shape[0] // gates] * gates if gates > 1 else []


def _recurrent_size(module: nn.Module) -> int:
    size = getattr(module, "hidden_size", None)
    return size if isinstance(size, int) and size > 0 else 1
