"""The two-step example of a 2 x 3 matrix for every optimizer, the rule of ranks and the rule of chunks.

Recorded from microsoft/dion in float32; "exact" rows with the exact polar factor, returned in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion
from support.appendix import assert_near, two_steps
from support.cases import Case, Group
from support.inputs import gaussian
from support.layouts import copies, fsdp
from support.sim_mesh import SimMesh, layouts_for

Matrix = tuple[tuple[float, ...], ...]

EF_STATE: Matrix = ((-0.05, 2.4, -0.7), (2.375, 0.475, 2.375))
MUON_STATE: Matrix = ((-0.05, 2.4, -0.7), (2.475, 0.525, 2.35))
LION_STATE: Matrix = ((-0.0025, 0.12, -0.035), (0.12375, 0.02625, 0.1175))
ADAMW_STATES: dict[str, Matrix] = {
    "exp_avg": ((-0.01, 0.23, -0.065), (0.245, 0.055, 0.22)),
    "exp_avg_sq": ((0.0975, 0.2025, 0.050625), (0.211875, 0.061875, 0.44)),
}
SELECTED: Matrix = ((0.457054, -1.046093, 1.993196), (1.413059, 0.233623, -0.792166))
# The printed digits of float32 numbers up to 3.
DIGITS = 1.5e-6
# An update of 0.1 rounded to bfloat16 in every step: 2 * 0.1 * 2^-8.
BF16 = 8e-4


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    cls: type
    kwargs: dict[str, Any]
    param: Matrix
    states: dict[str, Matrix]
    atol: float
    keys: dict[str, Any] = field(default_factory=dict)
    states_atol: float = DIGITS


def polar_bf16(x: Tensor, epsilon: float = 0.0) -> Tensor:
    """The exact polar factor by float32, in bfloat16."""
    u, _, vh = torch.linalg.svd(x.float(), full_matrices=False)
    return (u @ vh).bfloat16()


FUNCTION: dict[str, Any] = {"newton_schulz_func": polar_bf16, "orth_dtype": "bfloat16"}
SVD: dict[str, Any] = {"orth_method": "svd", "orth_dtype": "float32"}
CAUTIOUS_MUON = {"nesterov": True, "adjust_lr": "rms_norm", "cautious_wd": True}
HALF = {"fraction": 0.5}

EXACT: dict[str, tuple[type, dict[str, Any], Matrix, dict[str, Matrix]]] = {
    "muon": (
        oxidion.Muon,
        {},
        ((0.449343, -1.127356, 1.993884), (1.389441, 0.229209, -0.868078)),
        {"momentum": MUON_STATE},
    ),
    "muon-nesterov-rms-cautious": (
        oxidion.Muon,
        CAUTIOUS_MUON,
        ((0.488347, -1.062256, 2.009735), (1.43045, 0.232931, -0.795288)),
        {"momentum": MUON_STATE},
    ),
    "normuon": (
        oxidion.NorMuon,
        {},
        ((0.449306, -1.127747, 1.99389), (1.389398, 0.229213, -0.867917)),
        {"momentum": MUON_STATE, "variance_neuron": ((0.032443,), (0.032546,))},
    ),
    "dion2": (oxidion.Dion2, HALF, SELECTED, {"momentum": EF_STATE}),
    "nordion2": (
        oxidion.NorDion2,
        HALF,
        SELECTED,
        {"momentum": EF_STATE, "variance_neuron": ((0.016663,), (0.016622,))},
    ),
}
ROWS: dict[str, Row] = {
    # V sees the rounding of U: a share of 2^-8 of 0.03.
    **{
        f"{name}-{how}": Row(cls, {**kwargs, **method}, param, states, BF16, states_atol=1.5e-4)
        for name, (cls, kwargs, param, states) in EXACT.items()
        for how, method in (("function", FUNCTION), ("svd", SVD))
    },
    # Five iterations in bfloat16: Polar Express passes their roundings on a tenfold.
    "muon-polar-express": Row(
        oxidion.Muon,
        {},
        ((0.444962, -1.146804, 2.002369), (1.38984, 0.225628, -0.876032)),
        {"momentum": MUON_STATE},
        1.5e-2,
    ),
    "muon-newton-schulz": Row(
        oxidion.Muon,
        {"use_polar_express": False},
        ((0.449197, -1.126389, 1.993575), (1.388708, 0.229826, -0.865881)),
        {"momentum": MUON_STATE},
        4e-3,
    ),
    "muon-reference": Row(
        oxidion.Muon,
        {"ns_coefficients": "keller_jordan", "nesterov": True, "orth_dtype": "float32"},
        ((0.477299, -1.088598, 1.98317), (1.383235, 0.222992, -0.828194)),
        {"momentum": MUON_STATE},
        4e-3,
    ),
    "adamw": Row(
        oxidion.AdamW,
        {"betas": (0.9, 0.95)},
        ((0.396313, -1.163097, 2.106677), (1.283677, 0.307688, -0.888581)),
        ADAMW_STATES,
        DIGITS,
    ),
    "adamw-cautious": Row(
        oxidion.AdamW,
        {"betas": (0.9, 0.95), "cautious_wd": True},
        ((0.400263, -1.183997, 2.147476), (1.283677, 0.310163, -0.904506)),
        ADAMW_STATES,
        DIGITS,
    ),
    "adamw-in-a-group-of-muon": Row(
        oxidion.Muon,
        {},
        ((0.396313, -1.163097, 2.106677), (1.283677, 0.307688, -0.888581)),
        {"momentum": ADAMW_STATES["exp_avg"], "variance": ADAMW_STATES["exp_avg_sq"]},
        DIGITS,
        {"algorithm": "adamw"},
    ),
    "lion": Row(
        oxidion.Lion,
        {"betas": (0.9, 0.95)},
        ((0.49105, -1.1791, 2.1592), (1.27115, 0.244025, -0.934075)),
        {"exp_avg": LION_STATE},
        DIGITS,
    ),
    "lion-cautious": Row(
        oxidion.Lion,
        {"betas": (0.9, 0.95), "cautious_wd": True},
        ((0.495, -1.2, 2.2), (1.27115, 0.2465, -0.95)),
        {"exp_avg": LION_STATE},
        DIGITS,
    ),
    "lion-in-a-group-of-nordion2": Row(
        oxidion.NorDion2,
        {},
        ((0.49105, -1.1791, 2.1592), (1.27115, 0.244025, -0.934075)),
        {"momentum": LION_STATE},
        DIGITS,
        {"algorithm": "lion"},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_two_recorded_steps_are_reproduced(name: str) -> None:
    row = ROWS[name]
    param, state = two_steps(row.cls, keys=row.keys, **row.kwargs)
    assert_near(param, row.param, row.atol)
    for key, expected in row.states.items():
        assert_near(state[key], expected, DIGITS if key == "momentum" else row.states_atol)


@pytest.mark.parametrize(
    ("kwargs", "q", "param", "momentum", "end"),
    [
        (
            {"rank_fraction": 0.5},
            ((0.25,), (0.5,)),
            ((0.496819, -0.978528, 1.969761), (1.383056, 0.222934, -0.865659)),
            ((0.013617, 2.502981, -0.731506), (2.326591, 0.458613, 2.250555)),
            ((-0.084175,), (0.996451,)),
        ),
        (
            {},
            ((0.25, 0.5), (0.75, 1.0)),
            ((0.455749, -1.123054, 2.009455), (1.399937, 0.245671, -0.871017)),
            ((-0.0475, 2.28, -0.665), (2.35125, 0.49875, 2.2325)),
            ((-0.134769, 0.984183), (0.990877, 0.177153)),
        ),
    ],
    ids=["rank-1", "rank-2"],
)
@pytest.mark.parametrize("algorithm", ["dion", "muon"])
def test_two_recorded_steps_of_dion_are_reproduced(
    kwargs: dict[str, Any], q: Matrix, param: Matrix, momentum: Matrix, end: Matrix, algorithm: str
) -> None:
    # Also as a group of an optimizer of another class.
    cls = oxidion.Dion if algorithm == "dion" else oxidion.Muon
    own = {"algorithm": "dion", **kwargs} if cls is oxidion.Muon else kwargs
    got, state = two_steps(cls, q=q, keys=own)
    # The QR of microsoft/dion and ours differ by roundings of float32.
    assert_near(got, param, 3e-6)
    assert_near(state["momentum"], momentum, 1e-5)
    # The sign of a column is free.
    assert_near(state["Q"] * state["Q"][1].sign(), end, 1e-5)


def first_transfer(shape: tuple[int, int], fraction: float, multiple: int) -> tuple[str, int, int]:
    """Kind and bytes of what two replicas exchange first, and the rank of Q."""
    kwargs = {"rank_fraction": fraction, "rank_multiple_of": multiple}
    case = Case("", oxidion.Dion, "dion", kwargs, (Group((shape,)),))
    mesh = SimMesh({"dp": 2}, case.build, layouts_for(case, copies), extra={"dp": False})
    mesh.build([p.detach() for p in case.parameters(torch.float32)])
    mesh.step(lambda _: [gaussian(shape, 1)])
    rank = mesh.ranks[0]
    return mesh.sent[0].kind, mesh.sent[0].bytes, rank.optimizer.state[rank.params[0]]["Q"].shape[-1]


@pytest.mark.parametrize(
    ("shape", "fraction", "multiple", "rank", "compressed"),
    [
        ((100, 40), 0.1, 1, 4, True),
        ((100, 30), 0.07, 1, 3, True),
        ((768, 3072), 0.25, 1, 192, True),
        ((30, 10), 0.33, 4, 4, True),
        ((5, 5), 0.01, 8, 5, False),
        ((100, 100), 0.07, 1, 8, True),
    ],
)
def test_rank_and_compression_follow_the_rule(
    shape: tuple[int, int], fraction: float, multiple: int, rank: int, compressed: bool
) -> None:
    kind, size, found = first_transfer(shape, fraction, multiple)
    assert found == rank
    whole = (kind, size) == ("all_reduce", 4 * shape[0] * shape[1])
    assert whole is not compressed


@pytest.mark.parametrize(
    ("rows", "world", "stored", "chosen"),
    [
        (18, 8, [3] * 6 + [0] * 2, 1),
        (5, 4, [2, 2, 1, 0], 1),
        (2, 4, [1, 1, 0, 0], 1),
        (17, 4, [5, 5, 5, 2], 2),
        (15, 4, [4, 4, 4, 3], 1),
        (1, 2, [1, 0], 1),
    ],
)
@pytest.mark.parametrize("cls", [oxidion.Dion2, oxidion.NorDion2])
def test_chunks_and_rows_chosen_of_each_follow_the_rule(
    rows: int, world: int, stored: list[int], chosen: int, cls: type
) -> None:
    case = Case("", cls, cls._ALGORITHM, {"weight_decay": 0.0}, (Group(((rows, 3),)),))  # type: ignore[attr-defined]
    mesh = SimMesh({"fs": world}, case.build, layouts_for(case, fsdp(0)))
    full = [p.detach() for p in case.parameters()]
    mesh.build(full)
    mesh.step(lambda _: [gaussian((rows, 3), 1)])
    first = 0
    for rank, count in zip(mesh.ranks, stored, strict=True):
        assert rank.params[0].shape == (count, 3)
        moved = (rank.params[0].detach() != full[0][first : first + count]).any(dim=1)
        assert int(moved.sum()) == min(chosen, count)
        first += count
    assert first == rows
