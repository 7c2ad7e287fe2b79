"""The workspace of a plan is within its limit, by construction, on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import oxidion
from distributed.comparison import Comparison, on_grid
from oxidion._oxidion import Plan
from oxidion._planning.models import parse_mesh
from oxidion._planning.simulate import Settings, simulate
from support.cases import Case, Group
from support.inputs import gradients
from support.layouts import Setting, setting_named

GB = 10**9


@pytest.mark.parametrize(
    ("model", "mesh", "algorithm", "fraction", "most"),
    [
        ("llama-70b", "fs=64", "dion", 0.25, 3.8),
        ("llama-70b", "fs=64", "dion", 0.0625, 3.5),
        ("llama-70b", "fs=8", "muon", 1.0, 3.0),
        ("llama-405b", "dp=8,fs=64,tp=8", "muon", 1.0, 6.5),
        ("llama-405b", "dp=8,fs=64,tp=8", "dion", 0.0625, 4.0),
        ("llama-8b", "fs=8", "dion", 0.25, 1.2),
        ("llama-8b", "fs=8", "muon", 1.0, 1.0),
    ],
)
def test_workspace_without_a_limit_fits_next_to_a_model(
    model: str, mesh: str, algorithm: str, fraction: float, most: float
) -> None:
    result, _ = simulate(model, parse_mesh(mesh), Settings(algorithm, fraction))
    assert 0 < result.memory["workspace"] <= most * GB


Place = tuple[str, int, str, int]
AXES = st.lists(
    st.tuples(st.sampled_from([2, 3, 4]), st.sampled_from(["R", "S0", "S1"])), min_size=0, max_size=2
)
SHAPE = st.tuples(st.integers(1, 40), st.integers(1, 40))


def plan_of(
    rank: int, sizes: list[tuple[int, str]], shapes: list[tuple[int, int]], group: dict[str, Any]
) -> Plan:
    """The plan of one rank of a mesh with axes of such sizes and placements."""
    world = 1
    for size, _ in sizes:
        world *= size
    axes, stride = [], world
    for i, (size, kind) in enumerate(sizes):
        stride //= size
        at = rank // stride % size
        first = rank - at * stride
        axes.append((f"a{i}", [first + k * stride for k in range(size)], at, kind[0], int(kind[1:] or 0)))
    members = [(f"w{i}", list(shape), "float32", 0, axes) for i, shape in enumerate(shapes)]
    return Plan.of_shapes([group], members)


@settings(max_examples=1500, deadline=None)
@given(
    sizes=AXES,
    shapes=st.lists(SHAPE, min_size=1, max_size=6),
    algorithm=st.sampled_from(
        ["dion", "muon", "normuon", "dion2", "nordion2", "galore_adamw", "apollo_adamw"]
    ),
    route=st.sampled_from(["auto", "keep", "gather"]),
    share=st.floats(0.05, 1.0),
)
def test_limit_is_kept_on_every_rank_or_refused_on_all(
    sizes: list[tuple[int, str]],
    shapes: list[tuple[int, int]],
    algorithm: str,
    route: str,
    share: float,
) -> None:
    world = 1
    for size, _ in sizes:
        world *= size
    group = {"algorithm": algorithm, "rank_fraction": 0.5, "rank": 4}
    if algorithm == "dion":
        group["route"] = route
    free = max(plan_of(rank, sizes, shapes, group).arena_bytes for rank in range(world))
    limited = {**group, "workspace_limit": max(int(free * share), 1)}
    found, refused = [], []
    for rank in range(world):
        try:
            found.append(plan_of(rank, sizes, shapes, limited))
        except ValueError as error:  # noqa: PERF203
            refused.append(str(error))
    assert all(plan.arena_bytes <= limited["workspace_limit"] for plan in found)
    assert len({*refused}) <= 1
    assert not (found and refused)
    assert len({plan.fingerprint for plan in found}) <= 1
    if refused:
        least = int(refused[0].split(" bytes")[0].split()[-1])
        assert least > limited["workspace_limit"]
        for rank in range(world):
            assert plan_of(rank, sizes, shapes, {**group, "workspace_limit": least}).arena_bytes <= least


def least_of(sizes: list[tuple[int, str]], shapes: list[tuple[int, int]], group: dict[str, Any]) -> int:
    """The least limit that rank 0 takes, as its refusals say."""
    limit = 1
    while True:
        try:
            plan_of(0, sizes, shapes, {**group, "workspace_limit": limit})
        except ValueError as error:  # noqa: PERF203
            least = int(str(error).split(" bytes")[0].split()[-1])
            assert least > limit
            limit = least
        else:
            return limit


@settings(max_examples=300, deadline=None)
@given(
    sizes=AXES,
    shapes=st.lists(SHAPE, min_size=1, max_size=4),
    fraction=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_automatic_route_keeps_every_limit_of_a_forced_one(
    sizes: list[tuple[int, str]], shapes: list[tuple[int, int]], fraction: float
) -> None:
    group = {"algorithm": "dion", "rank_fraction": fraction}
    for route in ("keep", "gather"):
        least = least_of(sizes, shapes, {**group, "route": route})
        plan = plan_of(0, sizes, shapes, {**group, "route": "auto", "workspace_limit": least})
        assert plan.arena_bytes <= least


@pytest.mark.parametrize("algorithm", ["muon", "dion"])
@pytest.mark.parametrize("mesh", ["dp=8,fs=64,tp=8", "dp=4,fs=8", "dp=16,fs=4"])
def test_least_that_is_named_is_hardly_more_than_a_plan_takes(algorithm: str, mesh: str) -> None:
    axes, settings = parse_mesh(mesh), Settings(algorithm, 0.0625)
    with pytest.raises(ValueError, match="workspace_limit must be at least") as refused:
        simulate("llama-405b", axes, replace(settings, workspace_limit=1))
    least = int(str(refused.value).split("at least ")[1].split()[0])
    result, _ = simulate("llama-405b", axes, replace(settings, workspace_limit=least))
    assert least / 1.15 <= result.memory["workspace"] <= least


SHAPES = ((24, 16),) * 6 + ((9, 20),) * 3


def within_the_least(cls: Any, keys: dict[str, Any], setting: Setting) -> tuple[Comparison, int]:
    """The class on a layout and on one process with the least limit that both take, as refusals say."""
    limit = 1
    while True:
        case = Case("tight", cls, cls._ALGORITHM, {**keys, "workspace_limit": limit}, (Group(SHAPES),))
        try:
            return Comparison(case, setting, torch.float64, "float64"), limit
        except ValueError as error:
            least = int(str(error).split("workspace_limit must be at least ")[1].split()[0])
            assert least > limit
            limit = least


@pytest.mark.parametrize("setting", ["fsdp4-dim0", "hsdp", "dp2-fsdp2-tp2"])
@pytest.mark.parametrize(
    ("cls", "keys"),
    [
        (oxidion.Muon, {}),
        (oxidion.NorMuon, {}),
        (oxidion.Dion2, {"selection_scope": "global"}),
        (oxidion.Dion, {"rank_fraction": 0.5, "route": "keep"}),
        (oxidion.Dion, {"rank_fraction": 0.5, "route": "gather"}),
    ],
    ids=["muon", "normuon", "dion2", "dion-keep", "dion-gather"],
)
def test_steps_within_the_least_limit_equal_the_reference(
    cls: Any, keys: dict[str, Any], setting: str
) -> None:
    comparison, least = within_the_least(cls, keys, setting_named(setting))
    assert least > 1
    for grads in gradients(SHAPES, 2, 0):
        comparison.step([on_grid(grad) for grad in grads])
    comparison.check(1e-10)
    assert all(rank.plan.arena_bytes <= least for rank in comparison.mesh.ranks)


def test_share_of_the_memory_becomes_bytes() -> None:
    optimizer = oxidion.Muon([nn.Parameter(torch.zeros(4, 4))], workspace_limit=0.5)
    (group,) = optimizer.param_groups
    with open("/proc/meminfo") as table:
        total = int(table.readline().split()[1]) * 1024
    assert group["workspace_limit"] == pytest.approx(total / 2, rel=1e-6)


@pytest.mark.parametrize("wrong", [0, -1, 0.0, 1.5, True, "1 GB", 2**63])
def test_wrong_limit_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"workspace_limit.*\(0, 1\]"):
        oxidion.Muon([nn.Parameter(torch.zeros(4, 4))], workspace_limit=wrong)


def test_least_of_several_groups_counts() -> None:
    param = [("w", [64, 64], "float32", 0, []), ("v", [64, 64], "float32", 1, [])]
    free = Plan.of_shapes([{"algorithm": "muon"}] * 2, param).arena_bytes
    groups = [
        {"algorithm": "muon", "workspace_limit": 10 * free},
        {"algorithm": "muon", "workspace_limit": 1},
    ]
    with pytest.raises(ValueError, match="workspace_limit must be at least"):
        Plan.of_shapes(groups, param)
