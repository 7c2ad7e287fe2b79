"""What the ranks of a gloo process group do in the tests of QK-clip."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import oxidion
from support.inputs import gaussian

from .jobs import mesh_of, whole

HEADS, KEY_HEADS, WIDTH = 4, 2, 5
PLACES = {"R": Replicate(), "0": Shard(0), "1": Shard(1)}


def maxima(rank: int) -> Tensor:
    """Logits of one rank: each rank sees the hottest of another head, head 0 stays below the threshold."""
    seen = torch.full((HEADS,), 1.5)
    seen[1 + rank % (HEADS - 1)] = 3.0 + rank
    return seen


def fused() -> tuple[Tensor, Tensor]:
    """A weight of queries, keys and values, and its bias; its 41 rows do not divide by ranks."""
    rows = (HEADS + 2 * KEY_HEADS) * WIDTH + 1
    return gaussian((rows, 7), 1).float(), gaussian((rows,), 2).float()


def rows() -> dict[str, slice]:
    """Where queries and keys are."""
    start = HEADS * WIDTH
    return {"q_rows": slice(0, start), "k_rows": slice(start, start + KEY_HEADS * WIDTH)}


def wanted(most: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and bias after the clip in one process, computed manually."""
    weight, bias = fused()
    gamma = torch.where(most > 2.0, 2.0 / most, 1.0)
    keys = gamma.view(KEY_HEADS, -1).amin(1).sqrt()
    factors = torch.ones(len(bias))
    for head in range(HEADS):
        factors[head * WIDTH :][:WIDTH] = gamma[head] / keys[head // 2]
    for head in range(KEY_HEADS):
        factors[(HEADS + head) * WIDTH :][:WIDTH] = keys[head]
    return weight * factors[:, None], bias * factors


def clip_on_a_layout(axes: dict[str, int], places: str, reduce_over: str) -> tuple[float, bool, int]:
    """Clips DTensors (``places`` has a letter for each axis) or plain replicas ("") after an empty step.

    Returns:
        The largest difference to one process, whether the local rows are bit-equal to its, and the advance of
        the weight's version counter.
    """
    mesh = mesh_of(axes)
    weight, bias = fused()
    if places:
        weight = distribute_tensor(weight, mesh, [PLACES[place] for place in places])
        flat = [PLACES["R" if place == "1" else place] for place in places]
        bias = distribute_tensor(bias, mesh, flat)
    params = [nn.Parameter(weight), nn.Parameter(bias)]
    optimizer = torch.optim.SGD(params, lr=0.0)
    over: Any = {"": None, "mesh": mesh, "groups": mesh.get_all_groups()}[reduce_over]
    clip = oxidion.qk_clip.QKClip(optimizer, 2.0, reduce_over=over)
    layer = clip.add(
        params[0], params[0], num_heads=HEADS, num_kv_heads=KEY_HEADS, q_bias=params[1], k_bias=params[1],
        max_logits=maxima(mesh.get_rank()), **rows(),
    )  # fmt: skip
    version = params[0]._version
    optimizer.step()
    most = torch.stack([maxima(rank) for rank in range(mesh.size())]).amax(0)
    expected = wanted(most)
    assert layer.seen is not None
    assert torch.equal(layer.seen, most)
    got = [whole(param) for param in params]
    gap = max(float((a - b).abs().max()) for a, b in zip(got, expected, strict=True))
    equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    return gap, equal, params[0]._version - version


def clip_a_wrapped_model(kind: str) -> tuple[bool, float]:
    """Clips the projections of a model under FSDP2, tensor parallelism, or both on one dimension.

    Returns:
        Whether its weights are DTensors, and the largest difference to one process.
    """
    axes = {"fsdp": {"fs": 2}, "tp": {"tp": 2}, "both": {"fs": 2, "tp": 2}}[kind]
    mesh = mesh_of(axes)
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("q", nn.Linear(8, HEADS * WIDTH))
    model.add_module("k", nn.Linear(8, KEY_HEADS * WIDTH))
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"q": ColwiseParallel(), "k": ColwiseParallel()})
    if "fs" in axes:
        fully_shard(model, mesh=mesh["fs"])
    clip = oxidion.qk_clip.QKClip(oxidion.AdamW(model.parameters(), lr=0.0, weight_decay=0.0), 2.0)
    q, k = model
    layer = clip.add(
        q.weight, k.weight, num_heads=HEADS, num_kv_heads=KEY_HEADS, q_bias=q.bias, k_bias=k.bias
    )
    assert isinstance(layer.max_logits, Tensor)
    place = mesh.get_local_rank("tp") if "tp" in axes else 0
    heads, key_heads = (n // axes.get("tp", 1) for n in (HEADS, KEY_HEADS))
    # One query and one key of width 1 for each head: with scale 1 the logit is their product, h + 1.
    size = torch.arange(1.0, HEADS + 1)[place * heads :][:heads, None, None]
    layer.observe(size, torch.ones(key_heads, 1, 1), scale=1.0, first_head=place * heads)
    clip.apply()
    gamma = torch.tensor([1.0, 1.0, 2 / 3, 2 / 4])
    keys = torch.tensor([1.0, math.sqrt(0.5)])
    factors = {"q": gamma / keys.repeat_interleave(2), "k": keys}
    gap = 0.0
    for name, param in model.named_parameters():
        factor = factors[name[0]].repeat_interleave(WIDTH).view(-1, *[1] * (param.ndim - 1))
        gap = max(gap, float((whole(param) - before[name] * factor).abs().max()))
    return all(isinstance(param, DTensor) for param in model.parameters()), gap


def clip_with_a_bad_rank(value: float) -> tuple[list[float], bool]:
    """One rank's maximum is not finite; the factors, and whether the head kept its bits."""
    mesh = mesh_of({"dp": 2})
    weight = fused()[0]
    old = weight.clone()
    clip = oxidion.qk_clip.QKClip(
        torch.optim.SGD([nn.Parameter(weight)], lr=0.0), 2.0, reduce_over=mesh.get_group()
    )
    seen = torch.tensor([4.0, 8.0])
    if mesh.get_rank() == 1:
        seen[0] = value
    layer = clip.add(weight, weight, num_heads=2, q_rows=slice(0, 8), k_rows=slice(8, 16), max_logits=seen)
    clip.apply()
    assert layer.gammas is not None
    return layer.gammas.tolist(), torch.equal(weight[:4], old[:4])


def different_layers(axes: dict[str, int], first: int) -> tuple[str, str, bool]:
    """The first rank registers another number of heads; the error, its text, and whether nothing changed."""
    mesh = mesh_of(axes)
    weight = fused()[0]
    old = weight.clone()
    clip = oxidion.qk_clip.QKClip(torch.optim.SGD([nn.Parameter(weight)], lr=0.0), 2.0, reduce_over=[mesh])
    if heads := first if mesh.get_rank() == 0 else 2:
        hot = torch.full((heads,), 9.0)
        clip.add(weight, weight, num_heads=heads, q_rows=slice(0, 8), k_rows=slice(8, 16), max_logits=hot)
    try:
        clip.apply()
    except Exception as error:
        return type(error).__name__, str(error), torch.equal(weight, old)
    return "", "", torch.equal(weight, old)
