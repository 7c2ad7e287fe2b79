"""The largest attention logit of every head, block by block.

Legend: B = batch, H = query heads, G = key heads, T and S = query and key positions, D = head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 22
"""Logits that are in memory at once unless ``block_size`` is given: 16 MiB in float32."""


@torch.no_grad()
def max_logits(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    block_size: int | None = None,
) -> Tensor:
    """``max over batch and positions of scale * (q . k)``, for each query head.

    A block of queries meets all keys that it may see at a time, so the logits of all positions are never in
    memory together; autograd records nothing. float16 and bfloat16 are multiplied in float32, also under
    autocast.

    Args:
        q: queries ``[..., H, T, D]`` as the attention gets them: after rotary positions and normalizations.
        k: keys ``[..., G, S, D]``; query head h meets key head ``h // (H / G)``.
        causal: query i sees keys 0 to i, as ``is_causal`` of ``scaled_dot_product_attention``.
        scale: factor of the logits; None means ``1 / sqrt(D)``.
        block_size: query positions in a block; None bounds the memory of a block at 16 MiB.

    Returns:
        ``[H]``, float32 (float64 for float64 queries); NaN for a head with a NaN logit, ``-inf`` without any.

    Raises:
        TypeError: for anything but floating-point tensors of one dtype.
        ValueError: for shapes that do not fit, a ``scale`` that is not > 0, or a ``block_size`` below 1.
    """
    _check(q, k, scale, block_size)
    kind = torch.promote_types(q.dtype, torch.float32)
    (*_, heads, length, width), key_heads = q.shape, k.shape[-3]
    batch = math.prod(q.shape[:-3])
    q = q.detach().reshape(batch, key_heads, heads // key_heads, length, width)
    k = k.detach().reshape(batch, key_heads, k.shape[-2], width)
    row = max(1, heads * k.shape[-2])
    samples = max(1, min(batch, BLOCK_ELEMENTS // row))
    block = block_size or max(1, BLOCK_ELEMENTS // (samples * row))
    most = torch.full((key_heads, heads // key_heads), -math.inf, dtype=kind, device=q.device)
    with torch.autocast(q.device.type, enabled=False):
        for queries, some_keys in zip(torch.split(q, samples), torch.split(k, samples), strict=True):
            keys = some_keys.to(kind)
            for start in range(0, length, block):
                some = queries[..., start : start + block, :].to(kind)
                seen = keys[..., : start + block, :] if causal else keys
                if some.numel() and seen.numel():
                    most = torch.maximum(most, _largest(some, seen, start if causal else None))
    return most.flatten() * (1.0 / math.sqrt(width) if scale is None else scale)


def _largest(q: Tensor, k: Tensor, start: int | None) -> Tensor:
    """The largest products [G, H/G] of queries [B, G, H/G, T, D] with keys [B, G, S, D].

    With ``start``, the position of the first query, a query meets no key behind its own position.
    """
    products = (q.flatten(2, 3) @ k.mT).reshape(*q.shape[:4], k.shape[-2])
    if start is not None:
        allowed = torch.ones(products.shape[-2:], dtype=torch.bool, device=q.device).tril(start)
        products.masked_fill_(~allowed, -math.inf)
    return products.amax(dim=(0, 3, 4))


def _check(q: Tensor, k: Tensor, scale: float | None, block_size: int | None) -> None:
    for name, value in (("q", q), ("k", k)):
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a floating-point tensor, got {kind}")
        if value.ndim < 3:
            raise ValueError(
                f"{name} must be [..., heads, positions, head_dim], got shape {tuple(value.shape)}"
            )
    if q.dtype != k.dtype:
        raise TypeError(f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
    fits = q.shape[:-3] == k.shape[:-3] and q.shape[-1] == k.shape[-1] > 0
    if not fits or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            "q must be [..., H, T, D] and k [..., G, S, D] with H a multiple of G, "
            f"got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if scale is not None and not (0.0 < scale < math.inf):
        raise ValueError(f"scale must be None or a finite number > 0, got {scale}")
    if block_size is not None and block_size < 1:
        raise ValueError(f"block_size must be None or at least 1, got {block_size}")
