"""QK-clip against logits computed naively in float64 from the weights before and after."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import oxidion
from oxidion.qk_clip import QKClip, qk_clip_

WIDTH, HEAD = 24, 4
TAU = 2.0


def gaussian(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def logits(x: Tensor, wq: Tensor, wk: Tensor, heads: int, key_heads: int, bq: Any = 0, bk: Any = 0) -> Tensor:
    """All causal logits [B, H, T, T], -inf where a query may not look, with loops over heads."""
    x, wq, wk = x.double(), wq.detach().double(), wk.detach().double()
    q, k = x @ wq.T + bq, x @ wk.T + bk
    size = wq.shape[0] // heads
    per_head = []
    for head in range(heads):
        at, key = head * size, (head // (heads // key_heads)) * size
        scores = q[..., at : at + size] @ k[..., key : key + size].mT / math.sqrt(size)
        per_head.append(scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -math.inf))
    return torch.stack(per_head, dim=1)


def hottest(scores: Tensor) -> Tensor:
    return scores.amax(dim=(0, 2, 3))


def weights(heads: int, key_heads: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Query and key weights whose heads differ in size, so that some logits pass the threshold."""
    sizes = torch.linspace(0.1, 0.9, heads, dtype=torch.float64).repeat_interleave(HEAD)[:, None]
    return (gaussian(heads * HEAD, WIDTH, seed=1) * sizes).to(dtype), (
        gaussian(key_heads * HEAD, WIDTH, seed=2) * 0.3
    ).to(dtype)


def no_step(*tensors: Tensor) -> SGD:
    """An optimizer whose step changes nothing."""
    return SGD([nn.Parameter(tensor, requires_grad=True) for tensor in tensors], lr=0.0)


X = gaussian(2, 7, WIDTH, seed=3)


@pytest.mark.parametrize(("heads", "key_heads"), [(6, 6), (6, 2), (6, 1), (1, 1)])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)]
)
def test_clip_multiplies_logits_of_every_head_by_its_own_factor(
    heads: int, key_heads: int, dtype: torch.dtype, limit: float
) -> None:
    wq, wk = weights(heads, key_heads, dtype)
    wq = wq * 2 if heads == 1 else wq
    before = logits(X, wq, wk, heads, key_heads)
    seen = hottest(before)
    expected = torch.clamp(TAU / seen, max=1.0)
    assert (expected < 0.9).any()
    assert heads == 1 or (expected == 1).any()
    held = seen.clone()
    gamma = qk_clip_(wq, wk, seen, num_heads=heads, num_kv_heads=key_heads, threshold=TAU)
    assert torch.equal(seen, held)
    torch.testing.assert_close(gamma.double(), expected, rtol=1e-6, atol=0)
    after = logits(X, wq, wk, heads, key_heads)
    wanted = before * expected[:, None, None]
    seeable = before.isfinite()
    # Relative to the head's largest logit: weights are rounded once more, by 2**-9 in bfloat16.
    scale = wanted.masked_fill(~seeable, 0).abs().amax(dim=(0, 2, 3), keepdim=True).expand_as(wanted)
    error = ((after - wanted) / scale)[seeable].abs().max()
    assert error <= limit
    assert hottest(after).max() <= TAU * (1 + limit)


def test_grouped_head_below_the_threshold_keeps_its_logits() -> None:
    wq, wk = weights(2, 1)
    before = logits(X, wq, wk, 2, 1)
    gamma = qk_clip_(wq, wk, torch.tensor([0.5, 8.0]), num_heads=2, num_kv_heads=1, threshold=2.0)
    assert gamma.tolist() == [1.0, 0.25]
    old_q, old_k = weights(2, 1)
    # Here gamma_g = 1/4, so keys and the hot head's queries shrink by 1/2, the cool head's grow by 2.
    assert torch.equal(wk, old_k * 0.5)
    assert torch.equal(wq[:HEAD], old_q[:HEAD] * 2)
    assert torch.equal(wq[HEAD:], old_q[HEAD:] * 0.5)
    after = logits(X, wq, wk, 2, 1)
    assert torch.equal(after[:, 0], before[:, 0])
    assert torch.equal(after[:, 1], before[:, 1] * 0.25)


@pytest.mark.parametrize("interleaved", [False, True], ids=["side by side", "by group"])
def test_fused_weight_and_bias_scale_in_their_rows_only(interleaved: bool) -> None:
    heads, key_heads, values = 4, 2, 2 * HEAD
    wq, wk = weights(heads, key_heads)
    wv, bias = gaussian(values, WIDTH, seed=5), gaussian(len(wq) + len(wk) + values, seed=6)
    order = torch.arange(len(bias))
    if interleaved:  # of each group: its query heads, its key head, its value head
        q, k, v = (rows.view(key_heads, -1) for rows in order.split([len(wq), len(wk), values]))
        order = torch.cat([q, k, v], dim=1).flatten()
    fused, bias = torch.cat([wq, wk, wv])[order], bias[order]
    place = order.argsort()
    q_rows, k_rows = place[: len(wq)], place[len(wq) : len(wq) + len(wk)]
    old, old_bias = fused.clone(), bias.clone()
    before = logits(X, fused[q_rows], fused[k_rows], heads, key_heads, bias[q_rows], bias[k_rows])
    expected = torch.clamp(TAU / hottest(before), max=1.0)
    assert (expected < 1).any()
    rows: Any = {"q_rows": q_rows, "k_rows": k_rows.tolist()}
    if not interleaved:
        rows = {"q_rows": slice(0, len(wq)), "k_rows": range(len(wq), len(wq) + len(wk))}
    qk_clip_(
        fused, fused, hottest(before), num_heads=heads, num_kv_heads=key_heads, threshold=TAU,
        q_bias=bias, k_bias=bias, **rows,
    )  # fmt: skip
    after = logits(X, fused[q_rows], fused[k_rows], heads, key_heads, bias[q_rows], bias[k_rows])
    torch.testing.assert_close(after, before * expected[:, None, None], rtol=1e-12, atol=1e-12)
    v_rows = place[len(wq) + len(wk) :]
    assert torch.equal(fused[v_rows], old[v_rows])
    assert torch.equal(bias[v_rows], old_bias[v_rows])


def test_latent_attention_scales_content_and_rotary_parts_alike() -> None:
    heads, nope, rope, value = 3, 4, 2, 5
    wq = gaussian(heads * (nope + rope), WIDTH, seed=1)
    wkv, shared = gaussian(heads * (nope + value), WIDTH, seed=2), gaussian(rope, WIDTH, seed=3)

    def scores() -> Tensor:
        q, kv = (X @ wq.T).unflatten(-1, (heads, -1)), (X @ wkv.T).unflatten(-1, (heads, -1))
        content = torch.einsum("bthd,bshd->bhts", q[..., :nope], kv[..., :nope])
        return content + torch.einsum("bthd,bsd->bhts", q[..., nope:], X @ shared.T)

    before, old = scores(), wkv.clone()
    seen = torch.tensor([50.0, 100.0, 400.0], dtype=torch.float64)
    optimizer = no_step(wq, wkv)
    clip = QKClip(optimizer)
    sizes = {"qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value}
    layer = clip.add_mla(wq, wkv, num_heads=heads, max_logits=seen, **sizes)
    optimizer.step()
    assert layer.gammas is not None
    assert layer.gammas.tolist() == [1.0, 1.0, 0.25]
    # sqrt(1/4) and 1/4 are exact, sums are in the same order: only the last bits of the sum can differ.
    torch.testing.assert_close(scores(), before * layer.gammas[:, None, None], rtol=1e-13, atol=1e-13)
    after_values, old_values = (w.view(heads, -1, WIDTH)[:, nope:] for w in (wkv, old))
    assert torch.equal(after_values, old_values)


def test_hook_runs_right_after_the_step_and_resets_the_maxima() -> None:
    wq, wk = (nn.Parameter(w.float()) for w in weights(2, 2))
    seen = torch.tensor([8.0, 1.0])
    optimizer = oxidion.Muon([wq, wk], lr=0.1)
    states: list[tuple[Tensor, Tensor]] = []

    def look(*_: object) -> None:
        states.append((wq.detach().clone(), seen.clone()))

    optimizer.register_step_post_hook(look)
    clip = QKClip(optimizer, threshold=2.0)
    layer = clip.add(wq, wk, num_heads=2, max_logits=seen)
    optimizer.register_step_post_hook(look)
    wq.grad, wk.grad = gaussian(*wq.shape, seed=7).float(), gaussian(*wk.shape, seed=8).float()
    start = wq.detach().clone()
    optimizer.step()
    (stepped, before), (clipped, after) = states
    assert not torch.equal(stepped, start)
    assert before.tolist() == [8.0, 1.0]
    assert after.tolist() == [-math.inf, -math.inf]
    assert torch.equal(clipped[:HEAD], stepped[:HEAD] * 0.5)
    assert torch.equal(clipped[HEAD:], stepped[HEAD:])
    assert layer.seen is not None
    assert layer.seen.tolist() == [8.0, 1.0]
    clip.remove()
    clip.remove()
    states.clear()
    seen.fill_(8.0)
    optimizer.step()
    assert torch.equal(states[0][0], states[1][0])
    assert seen.tolist() == [8.0, 8.0]
    clip.apply()
    assert torch.equal(wq.detach(), states[1][0] * 0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -5.0, 0.0, 2.0])
def test_head_without_a_finite_large_maximum_keeps_its_bits(value: float) -> None:
    wq, wk = weights(2, 2, torch.float32)
    old_q, old_k = wq.clone(), wk.clone()
    gamma = qk_clip_(wq, wk, torch.tensor([value, 8.0]), num_heads=2, threshold=2.0)
    assert gamma.tolist() == [1.0, 0.25]
    assert torch.equal(wq[:HEAD], old_q[:HEAD])
    assert torch.equal(wk[:HEAD], old_k[:HEAD])
    assert torch.equal(wq[HEAD:], old_q[HEAD:] * 0.5)


def test_version_counter_advances_where_rows_are_scaled() -> None:
    wq, wk = (nn.Parameter(w) for w in weights(2, 2))
    product = (wq * wk).sum()
    qk_clip_(wq, wk, torch.tensor([8.0, 8.0]), num_heads=2, threshold=2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_observe_keeps_the_maximum_of_all_batches_until_the_step() -> None:
    optimizer = no_step(torch.zeros(1))
    wq, wk = weights(6, 2, torch.float32)
    layer = QKClip(optimizer).add(wq, wk, num_heads=6, num_kv_heads=2)
    assert isinstance(layer.max_logits, Tensor)
    batches = [X.float(), X.float().flip(1) * 1.5, X.float() * 0.5]
    wanted = torch.stack([hottest(logits(x, wq, wk, 6, 2)) for x in batches]).amax(dim=0)
    for x in batches:
        q, k = ((x @ w.T).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (wq, wk))
        layer.observe(q, k)
    torch.testing.assert_close(layer.max_logits.double(), wanted, rtol=1e-5, atol=1e-6)
    optimizer.step()
    assert layer.max_logits.tolist() == [-math.inf] * 6
    layer.observe(q[:, 3:], k[:, 1:], first_head=3)
    assert layer.max_logits[:3].tolist() == [-math.inf] * 3
    assert layer.max_logits[3:].isfinite().all()
    with pytest.raises(ValueError, match="heads 4 to 6 were observed, the layer has 6"):
        layer.observe(q[:, 3:], k[:, 1:], first_head=4)


def test_step_skipped_by_a_scaler_clips_the_observed_weights() -> None:
    wq, wk = (nn.Parameter(w.float()) for w in weights(2, 2))
    optimizer, scaler = oxidion.AdamW([wq, wk], lr=0.1), torch.amp.GradScaler("cpu")
    seen, old = torch.tensor([8.0, 1.0]), wq.detach().clone()
    QKClip(optimizer, 2.0).add(wq, wk, num_heads=2, max_logits=seen)
    scaler.scale((wq * math.inf).sum() + wk.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(wq[:HEAD], old[:HEAD] * 0.5)
    assert torch.equal(wq[HEAD:], old[HEAD:])


def test_callable_is_asked_at_every_step() -> None:
    wq, wk = weights(2, 2)
    answers = iter([torch.tensor([8.0, 1.0]), torch.tensor([1.0, 1.0]), torch.tensor([8.0])])
    optimizer = no_step(wq, wk)
    clip = QKClip(optimizer, 2.0)
    layer = clip.add(wq, wk, num_heads=2, max_logits=lambda: next(answers), name="blocks.0")
    old = wq.clone()
    optimizer.step()
    optimizer.step()
    assert torch.equal(wq[:HEAD], old[:HEAD] * 0.5)
    with pytest.raises(ValueError, match=r"blocks.0: max_logits must have shape \[2\], got \(1,\)"):
        optimizer.step()
    with pytest.raises(TypeError, match=r"blocks.0: max_logits is a callable"):
        layer.observe(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))


def test_optimizer_is_copied_and_pickled_without_its_hook() -> None:
    model = nn.Linear(WIDTH, 2 * HEAD)
    optimizer = oxidion.AdamW(model.parameters())
    clip = QKClip(optimizer, 2.0)
    clip.add(model.weight, model.weight, num_heads=1, q_rows=slice(0, HEAD), k_rows=slice(HEAD, None))
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert not other._optimizer_step_post_hooks
        weight = other.param_groups[0]["params"][0]
        before = weight.detach().clone()
        other.step()
        assert torch.equal(weight, before)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_copy_of_model_and_clip_clips_the_copied_weights_only(way: Any) -> None:
    model = nn.Linear(WIDTH, 2 * HEAD, bias=False)
    clip = QKClip(SGD(model.parameters(), lr=0.0), 2.0)
    layer = clip.add(model.weight, model.weight, num_heads=1, q_rows=slice(HEAD), k_rows=slice(HEAD, None))
    assert isinstance(layer.max_logits, Tensor)
    layer.max_logits.fill_(8.0)
    old = model.weight.detach().clone()
    twin, other = way((model, clip))
    other.optimizer.step()
    assert torch.equal(twin.weight, old * 0.5)
    assert torch.equal(model.weight, old)
    assert layer.max_logits.tolist() == [8.0]
    clip.optimizer.step()
    assert torch.equal(model.weight, old * 0.5)


COPIES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"average": "schedule_free"}) for name in ("Muon", "AdamW", "Lion", "SOAP")),
    *(
        (name, {"weight_norm": "hyperball"})
        for name in ("MuonH", "NorMuon", "Dion", "Dion2", "AdamW", "SOAP")
    ),
    ("Muon", {"weight_norm": "hyperball", "average": "schedule_free"}),
]


@pytest.mark.parametrize("is_sharded_by_heads", [False, True])
@pytest.mark.parametrize(("name", "keys"), COPIES)
def test_copies_of_the_weights_follow_the_clip(
    name: str, keys: dict[str, Any], is_sharded_by_heads: bool
) -> None:
    """Steps with negligible updates: logits remain at the threshold, also those of the averages."""
    q, k = (nn.Parameter(w) for w in weights(4, 2))
    k.data[:HEAD] *= 10.0 * TAU / float(hottest(logits(X, q, k, 4, 2)).max())
    before = hottest(logits(X, q, k, 4, 2))
    assert (before > TAU).any()
    assert (before < TAU).any()
    group: dict[str, Any] = {"params": [q, k], "weight_decay": 0.0, **keys}
    if is_sharded_by_heads and name in ("Muon", "NorMuon", "SOAP"):
        group |= {"num_heads": 2}
    optimizer = getattr(oxidion, name)([group], lr=1e-9, **({"weight_decay": 0.0} if name == "MuonH" else {}))
    clip = QKClip(optimizer, TAU)
    layer = clip.add(q, k, num_heads=4, num_kv_heads=2)
    wanted = before.clamp(max=TAU)
    for step in range(4):
        if step == 1:
            layer.max_logits.copy_(before)  # type: ignore[union-attr]
        for at, param in enumerate((q, k)):
            param.grad = gaussian(*param.shape, seed=10 * step + at)
        optimizer.step()
        expected = wanted if step else before
        assert torch.allclose(hottest(logits(X, q, k, 4, 2)), expected, rtol=1e-4)
    with optimizer.averaged():
        assert torch.allclose(hottest(logits(X, q, k, 4, 2)), wanted, rtol=1e-4)
