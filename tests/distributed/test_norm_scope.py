"""``norm_scope="shard"`` on a simulated mesh: norms of the rows that one process stores."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import oxidion
from oxidion._reference.normuon import normuon_step
from oxidion._reference.orthogonalize import orthogonalize
from support.cases import LR, WEIGHT_DECAY, Case, Group
from support.inputs import gradients
from support.layouts import Setting, setting_named
from support.sim_mesh import R, S, SimMesh, cut, layouts_for

STEPS = 3


def shard_step(param: Tensor, update: Tensor, variance: Tensor, chunks: Sequence[tuple[int, int]]) -> None:
    """NorMuon's normalization and update with the norms of each chunk of rows."""
    for start, length in chunks:
        u, v = update[start : start + length], variance[start : start + length]
        if length == 0:
            continue
        size = u.norm()
        v += 0.5 * (u.square().mean(dim=1, keepdim=True) - v)
        normal = u / (v.sqrt() + 1e-8)
        normal *= size / max(float(normal.norm()), 1e-8)
        x = param[start : start + length]
        x.mul_(1 - LR * WEIGHT_DECAY).sub_(LR * math.sqrt(param.shape[0] / param.shape[1]) * normal)


SHARD_SETTINGS = (
    setting_named("fsdp4-dim0"),
    setting_named("fsdp20-empty-shards"),
    setting_named("hsdp"),
    Setting("fsdp2-tp2-columns", {"fs": 2, "tp": 2}, lambda _: {"fs": S(0), "tp": S(1)}),
    Setting("ddp3", {"dp": 3}, lambda _: {"dp": R}, {"dp": True}),
)


@pytest.mark.parametrize("algorithm", ["normuon", "nordion2"])
@pytest.mark.parametrize("setting", SHARD_SETTINGS, ids=str)
def test_shard_norms_are_those_of_rows_that_one_process_stores(algorithm: str, setting: Setting) -> None:
    # With fraction 1 and mu 1 NorDion2 is NorMuon of the sum of all gradients.
    cls = oxidion.NorMuon if algorithm == "normuon" else oxidion.NorDion2
    own = {} if cls is oxidion.NorMuon else {"fraction": 1.0, "selection_scope": "global"}
    settings = {
        "lr": LR,
        "weight_decay": WEIGHT_DECAY,
        "mu": 1.0,
        "muon_beta2": 0.5,
        "orth_dtype": "float64",
        **own,
    }
    shapes = ((12, 8), (8, 12), (17, 5), (1, 7), (3, 4))
    found = {}
    for scope in ("shard", "global"):
        case = Case("", cls, algorithm, {**settings, "norm_scope": scope}, (Group(shapes),))
        mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
        full = [p.detach() for p in case.parameters()]
        mesh.build(full)
        expected = [p.clone() for p in full]
        states = [{"momentum": torch.zeros_like(p)} for p in full]
        variances = [torch.zeros_like(p[:, :1]) for p in full]
        for number, grads in enumerate(gradients(shapes, STEPS, 0)):
            # The scale of the rows differs, or the norms of all shards would be alike.
            scaled = [g * torch.linspace(1, 3 + number, len(g)).double()[:, None] for g in grads]
            mesh.step(lambda _, g=scaled: g)  # type: ignore[misc]
            for i, (x, grad) in enumerate(zip(expected, scaled, strict=True)):
                spans = sorted({rank.spans(i, x.shape)[0] for rank in mesh.ranks})
                if scope == "shard":
                    states[i]["momentum"] += grad
                    shard_step(x, orthogonalize(states[i]["momentum"], settings), variances[i], spans)
                else:
                    normuon_step(x, grad, states[i], settings)
        for rank in mesh.ranks:
            for i, (param, whole) in enumerate(zip(rank.params, expected, strict=True)):
                wanted = cut(whole, rank.spans(i, whole.shape))
                torch.testing.assert_close(param.detach(), wanted, rtol=1e-10, atol=1e-12)
        found[scope] = expected
    difference = max(float((a - b).abs().max()) for a, b in zip(*found.values(), strict=True))
    assert (difference > 1e-4) == (setting.name != "ddp3")
