"""A small GPT: pre-norm blocks of causal self-attention with rotary positions and a GELU MLP.

Every weight of a block is a matrix of its own (query, key, value and projection are separate), so that an
orthonormalizing optimizer sees the linear maps that the model has.

Legend: B = batch, S = sequence, H = heads, D = width of a head, C = H*D = width of the model, V = vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class GPTShape:
    """Sizes of a model.

    Attributes:
        vocabulary: V.
        seq_len: longest S.
        layers: number of blocks.
        dim: C.
        heads: H; C must be a multiple of 2*H.
        tied: the head is the transposed token embedding.
    """

    vocabulary: int
    seq_len: int
    layers: int
    dim: int
    heads: int
    tied: bool

    def __post_init__(self) -> None:
        """Checks the sizes.

        Raises:
            ValueError: a size below 1, or ``dim`` not a multiple of ``2 * heads``.
        """
        for name in ("vocabulary", "seq_len", "layers", "dim", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % (2 * self.heads):
            raise ValueError(
                "dim must be a multiple of 2 * heads (a head has an even width), "
                f"got dim={self.dim}, heads={self.heads}"
            )


class RotaryPositions(nn.Module):
    """Rotates pairs of features by an angle that grows with the position (arXiv:2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, head_dim: int, base: float = 10_000.0) -> None:
        """Fills the tables [S, D/2] of cosines and sines."""
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates x [B, H, S, D]; returns a tensor of the same shape and dtype."""
        cos, sin = self.cos[: x.size(-2)].to(x.dtype), self.sin[: x.size(-2)].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, shape: GPTShape, rotary: RotaryPositions) -> None:
        """Makes the four C x C maps."""
        super().__init__()
        self.num_heads, self.head_dim = shape.heads, shape.dim // shape.heads
        self.rotary = rotary
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, shape.dim, bias=False)
        self.value = nn.Linear(shape.dim, shape.dim, bias=False)
        self.project = nn.Linear(shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, S, C] to [B, S, C]; under tensor parallelism this process has some of the heads."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(self.rotary(query), self.rotary(key), value, is_causal=True)
        result: Tensor = self.project(mixed.transpose(1, 2).flatten(-2))
        return result


class Block(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, shape: GPTShape, rotary: RotaryPositions) -> None:
        """Makes the layers; the MLP is four times as wide as the model."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim)
        self.attention = Attention(shape, rotary)
        self.mlp_norm = nn.RMSNorm(shape.dim)
        self.expand = nn.Linear(shape.dim, 4 * shape.dim, bias=False)
        self.contract = nn.Linear(4 * shape.dim, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, S, C] to [B, S, C]."""
        x = x + self.attention(self.attention_norm(x))
        result: Tensor = x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))
        return result


class GPT(nn.Module):
    """Token embedding, blocks, norm and head."""

    def __init__(self, shape: GPTShape) -> None:
        """Makes and initializes the model: normal weights of deviation 0.02, as in GPT-2.

        Maps that write to the residual stream start smaller by the square root of their number.
        """
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.dim)
        rotary = RotaryPositions(shape.seq_len, shape.dim // shape.heads)
        self.blocks = nn.ModuleList(Block(shape, rotary) for _ in range(shape.layers))
        self.final_norm = nn.RMSNorm(shape.dim)
        self.lm_head = nn.Linear(shape.dim, shape.vocabulary, bias=False)
        if shape.tied:
            self.lm_head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                writes_residual = name.endswith(("project.weight", "contract.weight"))
                deviation = 0.02 / math.sqrt(2 * shape.layers) if writes_residual else 0.02
                nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [B, S] to next-token logits [B, S, V]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.final_norm(x))
        return logits

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token of windows [B, S+1], computed in float32 or wider."""
        logits = self(windows[:, :-1]).flatten(0, 1)
        logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        return F.cross_entropy(logits, windows[:, 1:].flatten())
