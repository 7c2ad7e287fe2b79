"""What QK-clip refuses, and the largest logits of every head against all logits at once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from oxidion.qk_clip import QKClip, logits, max_logits, qk_clip_


def clip_of() -> QKClip:
    return QKClip(SGD([nn.Parameter(torch.zeros(1))], lr=0.0))


Q, K = torch.zeros(8, 6), torch.zeros(4, 6)
WRONG: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
    (ValueError, "num_heads must be a multiple", (Q, K), {"num_heads": 4, "num_kv_heads": 3}),
    (ValueError, "num_heads must be a whole number >= 1, got 0", (Q, K), {"num_heads": 0}),
    (ValueError, "8 rows are not divisible by 3 heads", (Q, Q), {"num_heads": 3}),
    (ValueError, "query heads have 4 rows and key heads 2", (Q, K), {"num_heads": 2}),
    (ValueError, r"max_logits must have shape \[2\]", (Q, Q), {"num_heads": 2, "max_logits": torch.zeros(3)}),
    (TypeError, "plain floating-point", (Q, Q), {"num_heads": 2, "max_logits": torch.zeros(2).long()}),
    (TypeError, "plain floating-point", (Q, Q), {"num_heads": 2, "max_logits": 3.0}),
    (TypeError, "q_weight must be a floating-point tensor, got list", ([1.0], Q), {"num_heads": 1}),
    (TypeError, "k_weight must be a floating-point tensor", (Q, Q.long()), {"num_heads": 1}),
    (ValueError, r"q_weight must have shape \[rows, n\]", (Q[None], Q), {"num_heads": 1}),
    (ValueError, r"q_bias must have shape \[8\]", (Q, Q), {"num_heads": 2, "q_bias": torch.zeros(4)}),
    (ValueError, "k_rows must be within 0 to 7", (Q, Q), {"num_heads": 2, "k_rows": range(4, 12)}),
    (ValueError, "k_rows must be a slice or a list", (Q, Q), {"num_heads": 2, "k_rows": [0.5]}),
    (ValueError, "k_rows has rows twice", (Q, Q), {"num_heads": 2}),
    (ValueError, "q_rows has rows twice", (Q, K), {"num_heads": 1, "q_rows": [0, 0, 1, 1]}),
]


@pytest.mark.parametrize(("kind", "match", "weights", "keywords"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_registration_is_refused_at_once(
    kind: type[Exception], match: str, weights: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    clip = clip_of()
    with pytest.raises(kind, match=match):
        clip.add(*weights, **keywords)
    assert clip.layers == []


@pytest.mark.parametrize("threshold", [0, -1.0, math.nan, math.inf, True, "100"])
def test_threshold_that_is_not_a_positive_number_is_refused(threshold: Any) -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(ValueError, match="threshold must be a finite number > 0"):
        QKClip(optimizer, threshold)
    with pytest.raises(ValueError, match="threshold must be a finite number > 0"):
        qk_clip_(Q, K, torch.zeros(2), num_heads=2, num_kv_heads=1, threshold=threshold)
    assert not optimizer._optimizer_step_post_hooks


def test_anything_but_an_optimizer_or_a_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got Linear"):
        QKClip(nn.Linear(1, 1))  # type: ignore[arg-type]
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.0)
    with pytest.raises(TypeError, match="reduce_over"):
        QKClip(optimizer, reduce_over="dp")
    assert not optimizer._optimizer_step_post_hooks


def test_rows_of_another_layer_are_refused_and_free_rows_taken() -> None:
    clip, stack = clip_of(), torch.zeros(16, 6)
    clip.add(stack, K, num_heads=1, q_rows=slice(0, 4), name="first")
    with pytest.raises(ValueError, match="second: its rows are among those of first already"):
        clip.add(stack, Q, num_heads=1, q_rows=slice(3, 11), name="second")
    assert [layer.name for layer in clip.layers] == ["first"]
    clip.add(stack, Q, num_heads=1, q_rows=slice(4, 12), name="second")
    assert [layer.name for layer in clip.layers] == ["first", "second"]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number >= 1"),
        ({"qk_nope_head_dim": 0}, "qk_nope_head_dim must be a whole number >= 1"),
        ({"qk_rope_head_dim": -1}, "qk_rope_head_dim must be a whole number >= 0"),
        ({"qk_rope_head_dim": 1}, "q_weight must have 2 x 3 rows, got 8"),
        ({"v_head_dim": 1}, "kv_weight must have 2 x 3 rows, got 4"),
    ],
)
def test_latent_attention_of_other_sizes_is_refused(changed: dict[str, int], match: str) -> None:
    sizes = {"num_heads": 2, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 0}
    clip = clip_of()
    with pytest.raises(ValueError, match=match):
        clip.add_mla(Q, K, **(sizes | changed))
    clip.add_mla(Q, K, **sizes)
    assert len(clip.layers) == 1


def all_logits(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Every logit in float64, unscaled, with keys repeated for their query heads."""
    scores = q.double() @ k.double().repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3).mT
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool() & causal
    return scores.masked_fill(hidden, -math.inf)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("block_size", [None, 1, 3, 11, 12])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (11, 5), (4, 11)])
@pytest.mark.parametrize("bound", [1, 100, 1 << 22])
def test_max_logits_equal_those_of_all_logits(
    causal: bool, block_size: int | None, queries: int, keys: int, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logits, "BLOCK_ELEMENTS", bound)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, queries, 8, generator=generator, requires_grad=True)
    k = torch.randn(3, 2, keys, 8, generator=generator)
    wanted = all_logits(q.detach(), k, causal=causal).amax(dim=(0, 2, 3))
    for scale, factor in ((None, 8**-0.5), (0.5, 0.5)):
        got = max_logits(q, k, causal=causal, scale=scale, block_size=block_size)
        assert not got.requires_grad
        torch.testing.assert_close(got.double(), wanted * factor, rtol=1e-6, atol=1e-6)  # float32 sums of 8


@pytest.mark.parametrize("shape", [(5, 3, 9, 4), (3, 9, 4), (2, 2, 3, 9, 4)])
def test_max_logits_take_any_batch_and_use_float32_for_bfloat16(shape: tuple[int, ...]) -> None:
    q, k = (torch.randn(shape, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (1, 2))
    wanted = all_logits(q, k, causal=True).amax(dim=(-2, -1)).view(-1, 3).amax(dim=0) / 2
    with torch.autocast("cpu", torch.bfloat16):
        got = max_logits(q, k)
    assert got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), wanted, rtol=1e-6, atol=1e-6
    )  # bfloat16 products would miss 1e-3


def test_max_logits_of_nan_are_nan_and_of_none_minus_infinity() -> None:
    q, k = torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4)
    q[0, 1, 2, 0] = math.nan
    assert max_logits(q, k).tolist() == [2.0, pytest.approx(math.nan, nan_ok=True)]
    assert max_logits(q[:0], k[:0]).tolist() == [-math.inf, -math.inf]


@pytest.mark.parametrize(
    ("kind", "match", "q", "k", "keywords"),
    [
        (TypeError, "q must be a floating-point tensor", (2, 3, 4), None, {}),
        (ValueError, r"q must be \[..., heads", (3, 4), (2, 3, 4), {}),
        (ValueError, "H a multiple of G", (3, 3, 4), (2, 3, 4), {}),
        (ValueError, "H a multiple of G", (2, 3, 4), (2, 3, 5), {}),
        (
            ValueError,
            "scale must be None or a finite number > 0, got 0",
            (2, 3, 4),
            (2, 3, 4),
            {"scale": 0.0},
        ),
        (ValueError, "block_size must be None or at least 1", (2, 3, 4), (2, 3, 4), {"block_size": 0}),
    ],
)
def test_max_logits_refuse_what_does_not_fit(
    kind: type[Exception], match: str, q: tuple[int, ...], k: tuple[int, ...] | None, keywords: dict[str, Any]
) -> None:
    dtype = torch.float32 if k is not None else torch.int64
    with pytest.raises(kind, match=match):
        max_logits(torch.zeros(q, dtype=dtype), torch.zeros(k or q, dtype=dtype), **keywords)
