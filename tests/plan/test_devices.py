"""Plans of parameters on several devices: buckets, memory and order by device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import oxidion
from oxidion._cuda import device as devices
from oxidion._oxidion import Plan

DEVICES = ("cuda:1", "cpu", "cuda")
SHAPES = ((64, 48), (48, 64), (64, 48))


def spelled(group: int) -> list[tuple[Any, ...]]:
    return [(f"{group}.{at}", shape, "float32", group, []) for at, shape in enumerate(SHAPES)]


def group_of(algorithm: str, where: str) -> dict[str, Any]:
    return {"algorithm": algorithm, "device": where}


@pytest.mark.parametrize("algorithm", ["adamw", "muon", "dion", "lamb", "soap"])
def test_devices_have_their_own_memory_and_no_bucket_has_two(algorithm: str) -> None:
    groups = [group_of(algorithm, where) for where in DEVICES]
    plan = Plan.of_shapes(groups, [param for at in range(len(DEVICES)) for param in spelled(at)])
    alone = [Plan.of_shapes([group_of(algorithm, where)], spelled(0)) for where in DEVICES]
    assert plan.arena_parts == [(at * len(SHAPES), one.arena_bytes) for at, one in enumerate(alone)]
    assert plan.arena_bytes == sum(one.arena_bytes for one in alone)
    buckets = [line for line in str(plan).splitlines() if line.startswith("bucket")]
    # Devices first, as they work while the host is given its own.
    order = [line.split(" on ")[1].split()[0] for line in buckets]
    assert order == sorted(order, key=["cuda:0", "cuda:1", "cpu"].index)
    assert set(order) == {"cuda:0", "cuda:1", "cpu"}
    assert all(" on " not in str(one) for one in alone)
    assert len(plan.schedule) == sum(len(one.schedule) for one in alone)


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_mesh_needs_one_device(other: str) -> None:
    axis = ("fs", [0, 1], 0, "S", 0)
    params = [("a", (8, 8), "float32", 0, [axis]), ("b", (8, 8), "float32", 1, [])]
    groups = [group_of("adamw", "cuda"), group_of("adamw", other)]
    with pytest.raises(ValueError, match=f"b: with a mesh .* one device, got {other} after cuda:0"):
        Plan.of_shapes(groups, params)


def test_capture_of_a_step_on_several_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "is_capturing", lambda where: where.type == "cuda")
    places = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(RuntimeError, match="several devices, cpu, cuda:1"):
        devices.current_streams(places)
    assert devices.current_streams(places[:1]) == [0]


def test_parameters_on_the_cpu_have_one_part_of_the_arena() -> None:
    plan = oxidion.Muon([nn.Parameter(torch.zeros(8, 8))]).plan()
    assert plan.arena_parts == [(0, plan.arena_bytes)]
