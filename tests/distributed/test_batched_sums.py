"""Sums of optimizers that take parameters whole: collectives and bytes of a step, on every layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import oxidion
from support.case import Case, Group
from support.inputs import Shape, gaussian
from support.layouts import Setting, copies, fsdp, plane
from support.sim_mesh import Layout, R, S

from .comparison import Comparison

M, N = 24, 40
MATRICES: tuple[Shape, ...] = ((M, N), (N, M), (M, N), (2 * M, N))
KEYS = {"lr": 2.0**-6, "weight_decay": 2.0**-3}
ADAFACTOR = {"weight_decay": 2.0**-3}


def case(algorithm: str, shapes: tuple[Shape, ...] = MATRICES, **kwargs: object) -> Case:
    classes = {"lamb": oxidion.Lamb, "adafactor": oxidion.Adafactor, "came": oxidion.CAME}
    keys = ADAFACTOR if algorithm == "adafactor" else KEYS
    return Case(algorithm, classes[algorithm], algorithm, {**keys, **kwargs}, (Group(shapes),))


def tensor_parallel(dim: int) -> Callable[[Shape], Layout]:
    return lambda shape: {"tp": S(dim) if len(shape) > 1 else R}


SETTINGS = (
    (Setting("ddp", {"dp": 4}, copies, {"dp": True}), (0, 0, 0)),
    (Setting("fsdp-rows", {"fs": 4}, fsdp(0)), (1, 2, 3)),
    (Setting("fsdp-columns", {"fs": 4}, fsdp(1)), (1, 2, 3)),
    (Setting("hsdp", {"dp": 2, "fs": 2}, lambda s: {"dp": R, **fsdp(0)(s)}), (1, 2, 3)),
    (Setting("colwise", {"tp": 3}, tensor_parallel(0)), (1, 2, 3)),
    (Setting("rowwise", {"tp": 3}, tensor_parallel(1)), (1, 2, 3)),
    (Setting("fsdp-colwise", {"fs": 2, "tp": 2}, plane(0, 0, strided=True)), (1, 2, 3)),
    (Setting("fsdp-rowwise", {"fs": 2, "tp": 2}, plane(1, 0)), (1, 3, 5)),
    (
        Setting("dp-fsdp-rowwise", {"dp": 2, "fs": 2, "tp": 2}, plane(1, 0, dp=True)),
        (1, 3, 5),
    ),
)
COUNTS = [
    (algorithm, setting, counts[i])
    for setting, counts in SETTINGS
    for i, algorithm in enumerate(("lamb", "adafactor", "came"))
]


@pytest.mark.parametrize(("algorithm", "setting", "count"), COUNTS, ids=str)
def test_step_sums_once_per_phase_for_any_number_of_parameters(
    algorithm: str, setting: Setting, count: int
) -> None:
    # Vectors join these sums, except under tensor parallelism alone, where they are replicated.
    shapes = (*MATRICES, (7,), (), (5, 1))
    comparison = Comparison(case(algorithm, shapes), setting, torch.float64, "float64")
    grads = [gaussian(shape, i, 3) for i, shape in enumerate(shapes)]
    comparison.step(grads)
    kinds = [sent.kind for sent in comparison.mesh.sent]
    assert kinds == ["all_reduce"] * count
    comparison.check(1e-10)


def test_both_ways_of_tensor_parallelism_need_one_sum_of_norms() -> None:
    def place(shape: Shape) -> Layout:
        if len(shape) < 2:
            return {"fs": S(0), "tp": R}
        return {"fs": S(0), "tp": S(0 if shape[0] > shape[1] else 1)}

    shapes = ((N, M), (M, N), (M,), (N, M), (M, N), (N,))
    setting = Setting("model", {"fs": 2, "tp": 2}, place)
    for algorithm, count in (("lamb", 1), ("adafactor", 4), ("came", 7)):
        comparison = Comparison(case(algorithm, shapes), setting, torch.float64, "float64")
        comparison.step([gaussian(shape, i, 3) for i, shape in enumerate(shapes)])
        assert len(comparison.mesh.sent) == count
        comparison.check(1e-10)


def payload(algorithm: str, setting: Setting, shape: Shape = (M, N)) -> int:
    comparison = Comparison(case(algorithm, (shape,)), setting, torch.float32, "float32")
    comparison.step([gaussian(shape, 0, 3)])
    return sum(sent.bytes for sent in comparison.mesh.sent)


@pytest.mark.parametrize(("setting", "length"), [(SETTINGS[1][0], N), (SETTINGS[2][0], M)], ids=str)
def test_payload_of_a_sharded_matrix_equals_the_formula(setting: Setting, length: int) -> None:
    assert payload("lamb", setting) == 2 * 8
    assert payload("adafactor", setting) == 8 * (length + 2) + 8
    assert payload("came", setting) == 8 * (length + 1) + 8 + 8 * (length + 1)


def test_payload_of_a_matrix_cut_both_ways_equals_the_formula() -> None:
    setting = Setting("", {"fs": 2, "tp": 2}, plane(1, 0))
    assert payload("adafactor", setting) == 8 * (M // 2 + 2) + 8 * (N // 2 + 2) + 8
    assert payload("came", setting) == 2 * (8 * (M // 2 + 1) + 8 * (N // 2 + 1)) + 8


def test_norm_of_all_gradients_takes_one_more_sum_by_the_formula() -> None:
    shapes = (*MATRICES, (7,), ())
    for setting in (SETTINGS[0][0], SETTINGS[1][0], SETTINGS[6][0]):
        row = case("lamb", shapes, max_grad_norm=0.5)
        comparison = Comparison(row, setting, torch.float64, "float64")
        grads = [gaussian(shape, i, 3) for i, shape in enumerate(shapes)]
        norm = float(torch.sqrt(sum((g.double().square().sum() for g in grads), torch.zeros(()))))
        assert norm > 1.0
        for group in comparison.groups:
            group["grad_norm"] = norm
        comparison.step(grads)
        comparison.check(1e-10)
        assert len(comparison.mesh.sent) == (0 if setting.extra else 2)
