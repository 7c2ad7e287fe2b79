"""Routes of Dion, which keep matrices sharded or gather them at owners: the same results on all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._oxidion import Plan
from oxidion._planning.models import parse_mesh
from oxidion._planning.simulate import Settings, human, simulate
from support.cases import Case, case_named
from support.inputs import gradients
from support.layouts import Setting, setting_named
from support.sim_mesh import Rank

from .comparison import Comparison, on_grid
from .pairs import CHOSEN, FEW

STEPS = 2
ROWS = [(case, setting) for case, setting, dtype in CHOSEN if dtype == "float64" and case.algorithm == "dion"]


def sharding(case: Case, setting: Setting) -> list[str]:
    """The axes that shard a dimension of some matrix."""
    cuts = {a for shape in case.shapes for a, (kind, _) in setting.place(shape).items() if kind != "R"}
    return [axis for axis in setting.axes if axis in cuts and setting.axes[axis] > 1]


def routes(case: Case, setting: Setting) -> list[str | tuple[str, ...]]:
    """All routes that a case can be given on a layout."""
    axes = sharding(case, setting)
    return ["keep", "gather", *((axis,) for axis in axes if len(axes) > 1)]


def on_route(case: Case, route: Any) -> Case:
    """The same case with a route."""
    return replace(case, kwargs={**case.kwargs, "route": route})


def compared() -> Iterator[Any]:
    """Every Dion case on its layouts, on every route that is not the only one."""
    for case, setting in ROWS:
        if sharding(case, setting):
            for route in routes(case, setting):
                words = route if isinstance(route, str) else "+".join(route)
                # Some of the axes gathered, on all layouts that have several: a long list.
                marks = () if words == route or setting.name in FEW else pytest.mark.slow
                yield pytest.param(case, setting, route, id=f"{case}-{setting}-{words}", marks=marks)


@pytest.mark.parametrize(("case", "setting", "route"), list(compared()))
def test_float64_step_on_any_route_equals_the_reference(
    case: Case, setting: Setting, route: str | tuple[str, ...]
) -> None:
    comparison = Comparison(on_route(case, route), setting, torch.float64, "float64")
    flatten = bool(case.kwargs.get("flatten", False))
    for grads in gradients(case.shapes, STEPS, 0, flatten=flatten):
        comparison.step([on_grid(grad) for grad in grads])
    comparison.check(1e-10)


@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "fsdp2-tp3", "dp2-fsdp2-tp2", "hsdp"])
@pytest.mark.parametrize("name", ["dion-quarter", "dion-power2", "dion-mixed"])
def test_routes_agree_to_the_last_digits(name: str, setting: str) -> None:
    case, chosen = case_named(name), setting_named(setting)
    results = []
    for route in routes(case, chosen):
        comparison = Comparison(on_route(case, route), chosen, torch.float64, "float64")
        for grads in gradients(case.shapes, 3, 0):
            comparison.step([on_grid(grad) for grad in grads])
        results.append([rank.params for rank in comparison.mesh.ranks])
    for other in results[1:]:
        for ranks in zip(results[0], other, strict=True):
            for mine, its in zip(*ranks, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)


def held(rank: Rank) -> list[Tensor]:
    """Copies of the first parameter of a rank and of its states."""
    first = rank.params[0]
    return [t.detach().clone() for t in (first, *rank.optimizer.state[first].values())]


def test_missing_gradient_leaves_gathered_matrix_and_its_states() -> None:
    case = on_route(case_named("dion-quarter"), "gather")
    comparison = Comparison(case, setting_named("fsdp4-dim0"), torch.float64, "float64")
    first, second = gradients(case.shapes, 2, 0)
    comparison.step(first)
    before = [held(rank) for rank in comparison.mesh.ranks]
    comparison.mesh.step(lambda rank: comparison.replica_gradients(rank, [None, *second[1:]]))
    for rank, olds in zip(comparison.mesh.ranks, before, strict=True):
        assert all(torch.equal(new, old) for new, old in zip(held(rank), olds, strict=True))
        assert any(not torch.equal(p, q) for p, q in zip(rank.params[1:], comparison.full[1:], strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_states_differ_by_their_rounding_alone(dtype: torch.dtype) -> None:
    case, chosen = case_named("dion-quarter"), setting_named("fsdp4-dim0")
    ends: list[list[Tensor]] = []
    for route in ("keep", "gather"):
        comparison = Comparison(on_route(case, route), chosen, dtype, "float32")
        for grads in gradients(case.shapes, 2, 0):
            comparison.step([on_grid(grad) for grad in grads])
        ends.append([rank.params[0].detach().float() for rank in comparison.mesh.ranks])
    for mine, its in zip(*ends, strict=True):
        torch.testing.assert_close(
            mine, its, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
        )


MODELS = {
    "llama-8b": (32, 4096, 1024, 14336),
    "llama-70b": (80, 8192, 1024, 28672),
    "llama-405b": (126, 16384, 1024, 53248),
}
"""Layers, width, width of keys and values, hidden width."""
MESHES = [
    ("llama-8b", "fs=8"),
    ("llama-8b", "fs=64"),
    ("llama-8b", "dp=32,fs=8,tp=8"),
    ("llama-70b", "fs=8"),
    ("llama-70b", "fs=64"),
    ("llama-70b", "fs=256,tp=8"),
    ("llama-70b", "dp=32,fs=8,tp=8"),
    ("llama-405b", "dp=8,fs=64,tp=8"),
]


def least_bytes(model: str, mesh: dict[str, int], fraction: float, moment: int) -> float:
    """Bytes that a rank sends at least, on average, counted from shapes alone.

    A momentum of ``moment`` bytes an element to owners and back, a bfloat16 update, float32 factors; rings;
    matrices that divide evenly over many owners.
    """
    layers, dim, kv, hidden = MODELS[model]
    # Count, rows, columns, and whether tensor parallelism shards rows.
    matrices = [(layers, dim, dim, True), (2 * layers, kv, dim, True), (2 * layers, hidden, dim, True)]
    matrices += [(layers, dim, dim, False), (layers, dim, hidden, False)]
    axes = {a: n for a, n in mesh.items() if a in ("fs", "tp") and n > 1}
    totals = []
    for subset in (s for k in range(len(axes) + 1) for s in combinations(axes, k)):
        total = 0.0
        for count, rows, cols, by_rows in matrices:
            side = {a: int(by_rows) if a == "fs" and "tp" in axes else 0 for a in axes}
            if "tp" in axes:
                side["tp"] = int(not by_rows)
            local = [float(rows), float(cols)]
            for a, n in axes.items():
                local[side[a]] /= n
            rank, share, long = max(1, round(fraction * min(rows, cols))), 1.0, int(cols > rows)
            for a in subset:
                total += count * (2 * moment + 2) * share * local[0] * local[1] * (axes[a] - 1) / axes[a]
                share, local[side[a]] = share / axes[a], local[side[a]] * axes[a]
            for a, n in axes.items():
                p, q = local[long] * rank * 4, local[1 - long] * rank * 4
                if a in subset:
                    sent = 2 * share * q
                elif side[a] == long:
                    sent = share * (3 * q + 2 * p)
                else:
                    sent = share * 2 * p
                total += count * sent * (n - 1) / n
        totals.append(total)
    return min(totals)


@pytest.mark.parametrize(("state_dtype", "moment"), [(None, 4), ("bfloat16", 2)])
@pytest.mark.parametrize("fraction", [0.25, 0.0625])
@pytest.mark.parametrize(("model", "mesh"), MESHES)
def test_bytes_are_within_a_tenth_of_the_least(
    model: str, mesh: str, fraction: float, state_dtype: str | None, moment: int
) -> None:
    settings = Settings(rank_fraction=fraction, state_dtype=state_dtype)
    result, _ = simulate(model, parse_mesh(mesh), settings)
    assert 0 < result.routes["chosen"] <= 1.10 * least_bytes(model, parse_mesh(mesh), fraction, moment)
    assert result.routes["chosen"] <= min(result.routes.values())


def test_planned_bytes_of_a_balanced_mesh_are_the_deciding_mean() -> None:
    result, _ = simulate("llama-70b", {"fs": 8}, Settings(rank_fraction=0.25))
    assert sum(t.sent for t in result.wire) == pytest.approx(result.routes["chosen"], rel=0.01)


@pytest.mark.parametrize("ranks", [4, 16])
def test_mean_over_ranks_of_what_they_send_chooses_the_route(ranks: int) -> None:
    results = [
        simulate("gpt-160m", {"fs": ranks}, Settings(rank_fraction=0.25, rank=rank))[0]
        for rank in range(ranks)
    ]
    sent = [result.routes_sent for result in results]
    assert sent == [sum(t.sent for t in result.wire) for result in results]
    assert sum(sent) / ranks == pytest.approx(results[0].routes["chosen"], rel=1e-3)
    assert (len({*sent}) > 1) == (ranks != 4), "of 12 matrices of a shape each of 4 ranks owns 3"


def test_report_says_what_each_count_of_a_route_is() -> None:
    result, _ = simulate("llama-8b", {"fs": 64}, Settings(rank_fraction=0.0625, rank=1))
    assert result.routes_sent == sum(t.sent for t in result.wire) != pytest.approx(result.routes["chosen"])
    text = str(result)
    words = [human(result.routes["chosen"], "B"), human(result.routes_sent, "B")]
    assert re.search(rf"^route +mean sent +sent\nchosen +{words[0]} +{words[1]}\nkeep ", text, re.MULTILINE)
    assert re.search(rf"^fs +64 .*{words[1]}", text, re.MULTILINE)
    assert "mean sent: by a rank if all own equally many matrices, which decides the route" in text
    assert "sent: by rank 1, as in the table of axes" in text


@pytest.mark.parametrize(("ranks", "fraction"), [(8, 1 / 16), (16, 1 / 32)])
def test_ranks_with_equal_ownership_send_what_the_route_counts(ranks: int, fraction: float) -> None:
    # Batches of half as many matrices as ranks had half of an all-gather padded.
    result, _ = simulate("llama-8b", {"fs": ranks}, Settings(rank_fraction=fraction))
    assert result.routes_sent == pytest.approx(result.routes["chosen"], rel=1e-3)
    assert result.routes_sent <= 1.1 * min(result.routes.values())


def planned(route: Any, mesh: list[tuple[str, int, str, int]], **keys: Any) -> Plan:
    """The plan of one 64 x 48 matrix of float32 on axes as name, size, kind and dimension."""
    axes = [(name, list(range(size)), 0, kind, dim) for name, size, kind, dim in mesh]
    group = {"algorithm": "dion", "rank_fraction": 0.5, "route": route, **keys}
    return Plan.of_shapes([group], [("weight", [64, 48], "float32", 0, axes)])


def test_named_axis_is_gathered_with_those_inside_of_it() -> None:
    both = [("fs", 2, "S", 0), ("tp", 2, "S", 0)]
    assert planned(("fs",), both).rows()[0]["route"] == "gather fs and tp"
    assert planned(("tp",), both).rows()[0]["route"] == "gather tp"
    two_axes = [("fs", 2, "S", 0), ("tp", 2, "S", 1)]
    assert planned(("fs",), two_axes).rows()[0]["route"] == "gather fs"
    assert planned((), two_axes).rows()[0]["route"] == "keep"
    assert planned("keep", two_axes).rows()[0]["route"] == "keep"


def test_axis_that_no_parameter_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"route names the axis 'pp'.* fs"):
        planned(("pp",), [("fs", 2, "S", 0)])
    assert planned(("pp",), []).rows()[0]["route"] is None


@pytest.mark.parametrize("cut", [{"fs": 0, "tp": 1}, {"fs": 1, "tp": 0}])
@pytest.mark.parametrize("fraction", [1 / 16, 0.25, 1.0])
def test_auto_takes_the_way_that_sends_least(cut: dict[str, int], fraction: float) -> None:
    mesh = [("fs", 4, "S", cut["fs"]), ("tp", 4, "S", cut["tp"])]
    ((_, chosen, ways),) = planned("auto", mesh, rank_fraction=fraction).routes()
    found = {way: sum(sent for _, sent in by_axis) for way, by_axis in ways}
    assert len(found) == 4
    assert found[chosen] == min(found.values())


WRONG = [
    "both",
    3,
    (1,),
    ("",),
    None,
    {"fs": 1e9},
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_route_is_refused_with_what_it_may_be(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"route.*'auto', 'keep', 'gather'"):
        oxidion.Dion([nn.Parameter(torch.zeros(4, 4))], route=wrong)


def test_momentum_of_eight_bits_is_kept() -> None:
    mesh = [("fs", 8, "S", 0)]
    assert planned("auto", mesh).rows()[0]["route"] == "gather fs"
    eight = planned("auto", mesh, state_bits=8, min_quant_numel=0)
    assert eight.rows()[0]["route"] is None
    assert not any(t["buffer"] == "momentum" for t in eight.transfers)


def test_plan_shows_the_route_and_what_others_send() -> None:
    text = str(planned("auto", [("fs", 8, "S", 0)]))
    assert "gather fs" in text
    assert "(not keep" in text
    ((bucket, chosen, ways),) = planned("auto", [("fs", 8, "S", 0)]).routes()
    assert (bucket, chosen) == (0, "gather fs")
    sent = {way: sum(bytes_ for _, bytes_ in by_axis) for way, by_axis in ways}
    # 3 shards of 64 x 48 / 8 float32 and 2 of Q; each rank keeps an eighth of them.
    assert sent["gather fs"] == pytest.approx((3 * 64 * 48 + 2 * 48 * 24) / 8 * 4 * 7 / 8)
    assert sent["keep"] > sent["gather fs"]
