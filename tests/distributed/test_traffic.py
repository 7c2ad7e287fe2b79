"""What a step sends: never more collectives or bytes than a measured trace of microsoft/dion.

Four matrices 128×64 in float32 on four ranks, rank of the update 16; bytes are what one rank gives to its
collectives.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import oxidion
from support.cases import Case, Group
from support.inputs import gaussian
from support.layouts import Setting, copies, fsdp
from support.sim_mesh import R, S, Sent, SimMesh, layouts_for

SHAPE = (128, 64)
QUARTER = {"rank_fraction": 0.25}

AG, RS, AR = "all_gather", "reduce_scatter", "all_reduce"

# The rest of the trace on FSDP and tensor parallelism.
PLANE = [(RS, 2, 16384, 2), (AG, 2, 1024, 4), (RS, 2, 2048, 2), (AR, 2, 8192, 2), (AR, 2, 128, 2)]

# name: (setting, arguments, the trace as (kind, ranks, bytes, how often))
TRACE: dict[str, tuple[Setting, dict[str, Any], list[tuple[str, int, int, int]]]] = {
    "ddp-synced": (Setting("", {"dp": 4}, copies, {"dp": True}), QUARTER, [(AG, 4, 8192, 1)]),
    "ddp-compressed": (
        Setting("", {"dp": 4}, copies, {"dp": False}),
        QUARTER,
        [(RS, 4, 32768, 1), (AG, 4, 8192, 1), (AR, 4, 16384, 1)],
    ),
    "ddp-full-rank": (
        Setting("", {"dp": 4}, copies, {"dp": False}),
        {},
        [(AR, 4, 131072, 1), (AG, 4, 32768, 1)],
    ),
    "fsdp": (
        Setting("", {"fs": 4}, fsdp(0), outer="fs"),
        QUARTER,
        [(RS, 4, 16384, 1), (AG, 4, 4096, 1), (AR, 4, 256, 1)],
    ),
    "hsdp-compressed": (
        Setting("", {"dp": 2, "fs": 2}, lambda s: {"dp": R, "fs": S(0)}, {"dp": False}, outer="fs"),
        QUARTER,
        [(RS, 2, 8192, 2), (AR, 2, 4096, 2), (AG, 2, 4096, 2), (AR, 2, 8192, 2), (AR, 2, 128, 2)],
    ),
    "tp": (
        Setting("", {"tp": 4}, lambda s: {"tp": S(0)}, inner="tp"),
        QUARTER,
        [
            (AG, 4, 1024, 4),
            (RS, 4, 32768, 1),
            (AG, 4, 1024, 1),
            (RS, 4, 4096, 1),
            (AG, 4, 1024, 1),
            (AR, 4, 16384, 1),
        ],
    ),
    "fsdp-tp": (
        Setting("", {"fs": 2, "tp": 2}, lambda s: {"fs": S(1), "tp": S(0)}, outer="fs", inner="tp"),
        QUARTER,
        [(AG, 2, 2048, 4), (AR, 2, 4096, 2), *PLANE],
    ),
}


def sent(
    setting: Setting, cls: type, kwargs: dict[str, Any], dtype: torch.dtype = torch.float32
) -> list[Any]:
    """What rank 0 gives to collectives in one step."""
    case = Case("traffic", cls, cls._ALGORITHM, kwargs, (Group((SHAPE,) * 4),))  # type: ignore[attr-defined]
    mesh = SimMesh(
        setting.axes,
        case.build,
        layouts_for(case, setting.place),
        extra=setting.extra,
        outer=setting.outer,
        inner=setting.inner,
    )
    mesh.build([p.detach() for p in case.parameters(dtype)])
    grads = [gaussian(SHAPE, i) for i in range(4)]
    mesh.step(lambda _: grads)
    return mesh.sent


@pytest.mark.parametrize("name", TRACE)
def test_dion_sends_no_more_than_the_trace(name: str) -> None:
    setting, kwargs, trace = TRACE[name]
    ours = sent(setting, oxidion.Dion, kwargs)
    assert 0 < len(ours) <= sum(times for *_, times in trace), ours
    theirs = sum(times * Sent(kind, ranks, size).wire for kind, ranks, size, times in trace)
    assert sum(s.wire for s in ours) <= theirs, f"more than {theirs} bytes: {ours}"


def test_dion_on_fsdp_sends_exactly_the_formula() -> None:
    setting, kwargs, _ = TRACE["fsdp"]
    m, r, batch = 64, 16, 4
    ours = [(s.kind, s.bytes) for s in sent(setting, oxidion.Dion, kwargs)]
    assert ours == [
        ("reduce_scatter", batch * m * r * 4),
        ("all_gather", m * r * 4),
        ("all_reduce", batch * r * 4),
    ]


def test_dion_gathers_q_once_for_all_and_sends_no_sketch() -> None:
    setting, kwargs, _ = TRACE["tp"]
    ours = [(s.kind, s.bytes) for s in sent(setting, oxidion.Dion, kwargs)]
    q, p, r = 64 * 4 * 4, 32 * 16 * 4, 64 * 16 * 4
    assert ours == [
        ("all_gather", 4 * q),
        ("all_to_all", 4 * p),
        ("all_to_all", 4 * p),
        ("all_reduce", 4 * r),
    ]


@pytest.mark.parametrize(
    ("setting", "route", "more"),
    [
        # A quarter of the columns: R of four matrices goes to its owners and back.
        (Setting("", {"fs": 4}, fsdp(1)), "keep", [("all_to_all", 4 * 16 * 16 * 4)] * 2),
        (Setting("", {"fs": 4}, fsdp(1)), "gather", []),
        (Setting("", {"fs": 4}, fsdp(0)), "keep", []),
        (Setting("", {"fs": 4}, fsdp(0)), "gather", []),
        (Setting("", {"dp": 4}, copies, {"dp": True}), "keep", []),
        (Setting("", {"dp": 4}, copies, {"dp": False}), "keep", []),
    ],
)
def test_orthonormal_right_factor_sends_r_twice_on_a_cut_side(
    setting: Setting, route: str, more: list[tuple[str, int]]
) -> None:
    kwargs = {**QUARTER, "route": route}
    column, orthonormal = (
        Counter((s.kind, s.bytes) for s in sent(setting, oxidion.Dion, {**kwargs, "right_factor": kind}))
        for kind in ("column", "orthonormal")
    )
    assert column
    assert orthonormal - column == Counter(more)
    assert not column - orthonormal


def test_muon_sends_two_all_to_alls_or_one_replicated_all_gather() -> None:
    local = 4 * 128 * 64 // 4
    for orth_dtype, size in (("bfloat16", 2), ("float32", 4)):
        kwargs = {"orth_dtype": orth_dtype}
        ours = sent(Setting("", {"fs": 4}, fsdp(0)), oxidion.Muon, kwargs)
        assert [(s.kind, s.bytes) for s in ours] == [("all_to_all", local * size)] * 2
        ours = sent(Setting("", {"dp": 4}, copies, {"dp": True}), oxidion.Muon, kwargs)
        assert [(s.kind, s.bytes) for s in ours] == [("all_gather", local * size)]


ALL_TO_ALL, GLOBAL = "all_to_all", {"selection_scope": "global"}
FSDP, COLUMNS = Setting("", {"fs": 4}, fsdp(0)), Setting("", {"fs": 4}, fsdp(1))
REPLICAS = Setting("", {"dp": 4}, copies, {"dp": True})
ROWS, COLS, MATRICES = *SHAPE, 4
# Float64 numbers that make results the same on every layout, and that the trace lacks: the squared norm of
# each matrix before and after, the squares of each row that columns share (of the rows chosen), the sums of
# the slices that are chosen from.
NORMS = (AR, 2 * 8 * MATRICES)
SQUARES, CHOSEN_SQUARES = (AR, ROWS * 8 * MATRICES), (AR, ROWS // 4 * 8 * MATRICES)
ROW_SUMS, COLUMN_SUMS = (AR, ROWS * 8 * MATRICES), (AR, COLS * 8 * MATRICES)

# Elements of one rank in a 2-byte type: all, or the chosen quarter.
ALL, QUARTER_OF_ALL = [(ALL_TO_ALL, 16384)] * 2, [(ALL_TO_ALL, 4096)] * 2

FAMILY: dict[str, tuple[Setting, type, dict[str, Any], list[tuple[str, int]], list[tuple[str, int]]]] = {
    "normuon-fsdp": (FSDP, oxidion.NorMuon, {}, ALL, [NORMS]),
    "normuon-columns": (COLUMNS, oxidion.NorMuon, {}, ALL, [SQUARES]),
    "normuon-shard-norms": (FSDP, oxidion.NorMuon, {"norm_scope": "shard"}, ALL, []),
    "normuon-ddp": (REPLICAS, oxidion.NorMuon, {}, [(AG, 16384)], []),
    "dion2-fsdp-local": (FSDP, oxidion.Dion2, {}, QUARTER_OF_ALL, []),
    "dion2-columns-local": (COLUMNS, oxidion.Dion2, {}, QUARTER_OF_ALL, []),
    # Columns are chosen, which are not cut.
    "dion2-fsdp-global": (FSDP, oxidion.Dion2, GLOBAL, QUARTER_OF_ALL, [COLUMN_SUMS]),
    "dion2-columns-global": (COLUMNS, oxidion.Dion2, GLOBAL, ALL, [COLUMN_SUMS]),
    "dion2-ddp": (REPLICAS, oxidion.Dion2, GLOBAL, [(AG, 4096)], []),
    "nordion2-fsdp-local": (FSDP, oxidion.NorDion2, {}, QUARTER_OF_ALL, [NORMS]),
    "nordion2-fsdp-local-shard": (FSDP, oxidion.NorDion2, {"norm_scope": "shard"}, QUARTER_OF_ALL, []),
    "nordion2-fsdp-global": (FSDP, oxidion.NorDion2, GLOBAL, ALL, [ROW_SUMS, NORMS]),
    "nordion2-columns": (COLUMNS, oxidion.NorDion2, {}, QUARTER_OF_ALL, [ROW_SUMS, CHOSEN_SQUARES]),
    "nordion2-ddp": (REPLICAS, oxidion.NorDion2, {}, [(AG, 4096)], []),
}


@pytest.mark.parametrize("name", FAMILY)
def test_the_family_sends_the_trace_and_small_exact_sums(name: str) -> None:
    setting, cls, kwargs, trace, sums = FAMILY[name]
    ours = [(s.kind, s.bytes) for s in sent(setting, cls, {"orth_dtype": "bfloat16", **kwargs})]
    assert sorted(ours) == sorted(trace + sums)


PLANE_OF_TWO = Setting("", {"fs": 2, "tp": 2}, lambda s: {"fs": S(0), "tp": S(1)})
# Three float64 numbers: the squared norms of weights and update, and their product.
OF_A_MATRIX, OF_A_ROW = (AR, 24 * MATRICES), (AR, 24 * MATRICES * ROWS)
# Setting, and what is sent for the matrices and for the rows that are cut; of the plane along each axis, and
# for the rows that a rank has a part of.
HELD = {
    "fsdp": (FSDP, [OF_A_MATRIX], []),
    "columns": (COLUMNS, [OF_A_MATRIX], [OF_A_ROW]),
    "ddp": (REPLICAS, [], []),
    "plane": (PLANE_OF_TWO, [OF_A_MATRIX] * 2, [(AR, 24 * MATRICES * ROWS // 2)]),
}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (oxidion.AdamW, {}),
        (oxidion.Muon, {}),
        (oxidion.Dion, QUARTER),
        (oxidion.NorDion2, {}),
        (oxidion.SOAP, {"sides": "short"}),
    ],
)
def test_weight_norm_rules_send_three_numbers_per_matrix_or_row(
    cls: type, kwargs: dict[str, Any], name: str
) -> None:
    setting, of_matrices, of_rows = HELD[name]
    free = Counter((s.kind, s.bytes) for s in sent(setting, cls, kwargs))
    for rule, more in (("hyperball", of_matrices), ("floor", of_matrices), ("row_floor", of_rows)):
        own = {"weight_norm": rule, **({"weight_decay": 0.0} if rule == "hyperball" else {})}
        held = Counter((s.kind, s.bytes) for s in sent(setting, cls, {**kwargs, **own}))
        assert held == free + Counter(more), rule


@pytest.mark.parametrize("cls", [oxidion.AdamW, oxidion.Lion])
def test_elementwise_steps_send_nothing(cls: type) -> None:
    assert sent(Setting("", {"fs": 4}, fsdp(0)), cls, {}) == []


def test_compression_is_chosen_by_size() -> None:
    small, large = {"rank_fraction": 0.25}, {"rank_fraction": 0.9}
    setting = TRACE["ddp-compressed"][0]
    names = [s.kind for s in sent(setting, oxidion.Dion, small)]
    assert names == ["reduce_scatter", "all_gather", "all_reduce"]
    # (128 + 64)·58 elements are more than 128·64: the gradient is averaged.
    names = [s.kind for s in sent(setting, oxidion.Dion, large)]
    assert names == ["all_reduce", "all_gather"]
    assert sum(s.bytes for s in sent(setting, oxidion.Dion, large)[:1]) == 4 * 128 * 64 * 4
