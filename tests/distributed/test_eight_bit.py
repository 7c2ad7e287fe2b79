"""8-bit states on every layout: values equal to those of one process, checkpoints between layouts, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion import LayoutError
from support.inputs import gaussian
from support.sim_mesh import Layout, R, S, SimMesh, T, cut, spans
from support.workers import Pool

from . import quantized

LAYOUTS: list[tuple[dict[str, int], Layout]] = [
    ({"fs": 4}, {"fs": S(0)}),
    ({"fs": 3}, {"fs": S(0)}),
    ({"fs": 2}, {"fs": S(1)}),
    ({"fs": 4}, {"fs": S(1)}),
    ({"dp": 2, "fs": 2}, {"dp": R, "fs": S(0)}),
    ({"fs": 2, "tp": 2}, {"fs": S(0), "tp": S(1)}),
    ({"fs": 2, "tp": 2}, {"fs": T(0), "tp": S(0)}),
    ({"fs": 2, "tp": 2}, {"fs": T(1), "tp": S(1)}),
]
SHAPES = [(20, 1024), (33, 1000)]
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (oxidion.AdamW, {}),
    (oxidion.Lion, {}),
    (oxidion.Lamb, {}),
    (oxidion.Muon, {}),
    (oxidion.Dion2, {"selection_scope": "global"}),
]
# Their states depend on sums over ranks. A number halfway between two entries may be rounded to either: an
# error of at most 1.6 % of the largest of its block. That is 6e-4 of the norm of 5000 numbers whose largest
# is three deviations, and more where GaLore's second moment is small. Measured on 64 meshes: other entries
# for 2 in a million elements, scales 5e-7, updates 4e-4, 6e-5 and 6e-6 of their norm. With scales 1 % off it
# would be 2e-3.
SUMMED: list[tuple[Any, dict[str, Any], float]] = [
    (oxidion.GaLoreAdamW, {"rank": 8, "update_proj_gap": 2}, 1e-3),
    (oxidion.CAME, {"lr": 1e-3}, 3e-4),
    (oxidion.Dion, {"rank_fraction": 0.5}, 1e-3),
]
# What whole matrices are made of has no sum over ranks; squares of the uncut side and norms have.
OF_MATRICES: list[tuple[Any, dict[str, Any], float]] = [
    (oxidion.SOAP, {"precondition_frequency": 2}, 0.0),
    # Sums over ranks are rounded in another order, and a code that flips is 1/64 of its element.
    (oxidion.SOAP, {"precondition_frequency": 2, "sides": "short"}, 1e-2),
    (oxidion.SOAPMuon, {"precondition_frequency": 2, "orth_dtype": "float32"}, 0.0),
    # In float32 libtorch rounds norms of parts otherwise: 1.6e-6 on a Xeon without AMX.
    (oxidion.Muon, {"weight_norm": "hyperball", "weight_decay": 0.0}, 3e-6),
]
EVERY = [*CLASSES, *((cls, keys) for cls, keys, _ in (*SUMMED, *OF_MATRICES))]


def named(value: Any) -> str:
    return getattr(value, "__name__", "")


def assert_moved(own: Tensor, param: Tensor, index: int, parts: Any, close: float) -> None:
    """A part has moved from its start as that of one process."""
    start = cut(gaussian(tuple(param.shape), 1, index, scale=0.1).float(), parts)
    moved = cut(param.detach(), parts)
    assert (own - moved).norm() <= close * (moved - start).norm()


def take_steps(single: Any, params: list[nn.Parameter], mesh: SimMesh, steps: int = 3) -> None:
    """Steps of one process and of a mesh with the same gradients."""
    for step in range(steps):
        grads = [gaussian(tuple(p.shape), 2, step, i).to(p.dtype) for i, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        single.step()
        mesh.step(lambda _rank, grads=grads: grads)


def trained(
    cls: Any,
    keys: dict[str, Any],
    shapes: list[tuple[int, int]],
    axes: dict[str, int],
    layout: Layout,
    steps: int,
    block: int = 256,
) -> tuple[Any, list[nn.Parameter], SimMesh]:
    """One process and a mesh after the same steps."""
    full = [gaussian(shape, 1, i, scale=0.1).float() for i, shape in enumerate(shapes)]

    def make(params: list[Tensor]) -> Any:
        return cls([{"params": params, "block_size": block}], state_bits=8, **keys)

    params = [nn.Parameter(p.clone()) for p in full]
    single = make(params)
    # 1000 columns are 256, 256, 256 and 232: what four processes cut evenly would lie inside of blocks.
    even = {name: (kind, 0 if kind != "R" else dim) for name, (kind, dim) in layout.items()}
    mesh = SimMesh(axes, make, [layout, even if len(axes) == 1 else dict.fromkeys(layout, R)])
    mesh.build(full)
    take_steps(single, params, mesh, steps)
    return single, params, mesh


def quantized_states(
    single: Any, param: Tensor, rank: Any, own: Tensor, parts: list[tuple[int, int]], block: int = 256
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """8-bit values and scales of a shard or an owner, each followed by those of one process."""
    for key, value in single.state[param].items():
        if value.dtype != torch.uint8:
            continue
        if rank.optimizer.state[own][key].ndim > value.ndim:
            whole = [
                (rank.optimizer.state[own][name], single.state[param][name])
                for name in (key, key + "_absmax")
            ]
            if whole[0][0].numel():
                (got, expected), (absmax, scales) = whole
                yield got.view_as(expected), expected, absmax.view_as(scales), scales
        else:
            sizes = zip(parts, param.shape, value.shape, strict=True)
            held = [part if size == whole else (0, size) for part, whole, size in sizes]
            (start, length), state = held[1], rank.optimizer.state[own]
            blocks = (start // block, -(-length // block))
            scales = cut(single.state[param][key + "_absmax"], [held[0], blocks])
            yield state[key], cut(value, held), state[key + "_absmax"], scales


@pytest.mark.parametrize(("cls", "keys"), CLASSES, ids=named)
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_8_bit_states_of_every_layout_are_those_of_one_process(
    cls: Any, keys: dict[str, Any], axes: dict[str, int], layout: Layout
) -> None:
    single, params, mesh = trained(cls, keys, SHAPES, axes, layout, 3)
    for rank in mesh.ranks:
        for index, (own, param) in enumerate(zip(rank.params, params, strict=True)):
            parts = spans(param.shape, mesh.layouts[index], axes, rank.at)
            if cls in (oxidion.AdamW, oxidion.Lion):
                assert torch.equal(own, cut(param.detach(), parts))
            for got, expected, absmax, scales in quantized_states(single, param, rank, own, parts):
                assert torch.equal(got, expected)
                assert torch.equal(absmax, scales)


def assert_next_to(got: Tensor, wanted: Tensor) -> None:
    """At most a thousandth of the 8-bit values differ; numbers differ by rounding.

    In the first step differing values are neighbouring entries. Later the same distance may span several
    entries, which lie nearer to each other.
    """
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    if got.dtype == torch.uint8:
        distance = (got.int() - wanted.int()).abs()
        assert (distance <= 4).all()
        assert distance.sum() <= 1e-3 * distance.numel()
    else:
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()


# Three steps to the second projection of GaLore, and one that reads what was stored with it.
@pytest.mark.parametrize(("cls", "keys", "close"), SUMMED, ids=named)
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_8_bit_states_of_every_layout_are_next_to_one_process(
    cls: Any, keys: dict[str, Any], close: float, axes: dict[str, int], layout: Layout
) -> None:
    galore = cls is oxidion.GaLoreAdamW
    # Moments of 8 x 1024, and of 1000 x 8 which are cut as their rows are.
    shapes = [(20, 1024), (1000, 33)] if galore else SHAPES
    single, params, mesh = trained(cls, keys, shapes, axes, layout, 4)
    for rank in mesh.ranks:
        for index, (own, param) in enumerate(zip(rank.params, params, strict=True)):
            parts = spans(param.shape, mesh.layouts[index], axes, rank.at)
            assert_moved(own, param, index, parts, close)
            states = list(quantized_states(single, param, rank, own, parts))
            assert len(states) == 1 + galore
            for got, expected, absmax, scales in states:
                assert_next_to(got, expected)
                assert absmax.shape == scales.shape
                assert torch.allclose(absmax, scales, rtol=1e-5, atol=0.0)


# Bases of 250 columns are quick; their third step is the first one in a basis that followed.
@pytest.mark.parametrize(("cls", "keys", "close"), OF_MATRICES, ids=lambda v: named(v) or None)
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_quantized_whole_matrices_equal_those_of_one_process(
    cls: Any, keys: dict[str, Any], close: float, axes: dict[str, int], layout: Layout
) -> None:
    single, params, mesh = trained(cls, keys, [(20, 256), (33, 250)], axes, layout, 4, 64)
    wanted, seen = 1 + (cls is oxidion.SOAPMuon), set()
    for rank in mesh.ranks:
        for index, (own, param) in enumerate(zip(rank.params, params, strict=True)):
            parts = spans(param.shape, mesh.layouts[index], axes, rank.at)
            assert_moved(own, param, index, parts, close)
            states = list(quantized_states(single, param, rank, own, parts, 64))
            assert len(states) == wanted or not (cls is oxidion.Muon or states)
            seen |= {index for _ in states}
            for got, expected, absmax, scales in states:
                assert_next_to(got, expected)
                assert_next_to(absmax, scales)
                assert close or (torch.equal(got, expected) and torch.equal(absmax, scales))
    assert seen == {0, 1}


BY_MATRICES: list[tuple[Any, dict[str, Any]]] = [
    (oxidion.Lamb, {}),
    (oxidion.CAME, {}),
    (oxidion.Adafactor, {"beta1": 0.9, "relative_step": False, "scale_parameter": False}),
    (oxidion.Dion2, {"selection_scope": "global"}),
    (oxidion.NorDion2, {}),
    (oxidion.APOLLOAdamW, {"rank": 2}),
]


@pytest.mark.parametrize(("cls", "keys"), BY_MATRICES, ids=named)
def test_empty_shards_of_quantized_or_rounded_values_take_part(cls: Any, keys: dict[str, Any]) -> None:
    shapes = [(3, 512), (17, 256)]
    full = [gaussian(shape, 1, i).bfloat16() for i, shape in enumerate(shapes)]

    def make(params: list[Tensor]) -> Any:
        group = {"params": params, "min_quant_numel": 0, "stochastic_rounding": True, **keys}
        return cls([group], lr=0.01, state_bits=8)

    params = [nn.Parameter(p.clone()) for p in full]
    single = make(params)
    mesh = SimMesh({"fs": 4}, make, [{"fs": S(0)}] * len(shapes))
    mesh.build(full)
    take_steps(single, params, mesh)
    assert any(p.numel() == 0 for rank in mesh.ranks for p in rank.params)
    if cls is oxidion.NorDion2:
        return  # selects by shard
    for rank in mesh.ranks:
        for own, param in zip(rank.params, params, strict=True):
            parts = spans(param.shape, {"fs": S(0)}, {"fs": 4}, rank.at)
            # Sums have another order, so what lies at a threshold goes to either side of it.
            differing = own.detach() != cut(param.detach(), parts)
            assert differing.double().sum() <= 0.01 * param.numel()


@pytest.mark.parametrize(("cls", "own"), EVERY, ids=named)
def test_a_cut_inside_of_blocks_raises_on_every_rank(cls: Any, own: dict[str, Any]) -> None:
    def make(params: list[Tensor], **keys: Any) -> Any:
        return cls([{"params": params, "param_names": ["w"], **keys}], **{"state_bits": 8, **own})

    with pytest.raises(LayoutError, match=r"w: dimension 1 of 640 .*block_size=64"):
        SimMesh({"fs": 2}, make, [{"fs": S(1)}]).build([torch.zeros(64, 640)])
    for keys in ({"block_size": 64}, {"state_bits": 32}, {"min_quant_numel": 64 * 640 + 1}):
        SimMesh({"fs": 2}, lambda p, keys=keys: make(p, **keys), [{"fs": S(1)}]).build([torch.zeros(64, 640)])


def run(groups: Pool, ranks: int, job: Any, *args: Any) -> Any:
    """The answer of rank 0; in this process where one rank is wanted."""
    return groups[ranks].run(job, *args)[0] if ranks > 1 else job(*args)


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon"])
def test_checkpoints_keep_quantized_states_on_4_2_and_1_ranks(
    groups: Pool, tmp_path: Path, name: str
) -> None:
    expected = quantized.train(name, 1, None, None)
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    made = run(groups, 4, quantized.train, name, 1, None, first)
    halved = run(groups, 2, quantized.train, name, 0, first, second)
    whole = quantized.train(name, 0, second, None)
    for other in (made, halved, whole):
        assert other.keys() == expected.keys()
        for key, value in expected.items():
            if "param" not in key:
                assert other[key].dtype == value.dtype
                assert torch.equal(other[key], value), key
    assert any(value.dtype == torch.uint8 for value in expected.values())


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_steps_from_another_layouts_checkpoint_are_bit_equal(groups: Pool, tmp_path: Path, name: str) -> None:
    folder = str(tmp_path / "a")
    run(groups, 4, quantized.train, name, 2, None, folder)
    expected = quantized.train(name, 4, None, None)
    for ranks in (2, 1):
        got = run(groups, ranks, quantized.train, name, 2, folder, None)
        assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.parametrize(("cls", "close"), [(cls, close) for cls, _, close in SUMMED], ids=named)
def test_quantized_sums_over_ranks_resume_on_other_layouts(
    groups: Pool, tmp_path: Path, cls: Any, close: float
) -> None:
    name, first, second = cls.__name__, str(tmp_path / "a"), str(tmp_path / "b")
    start = quantized.train(name, 0, None, None)
    made = run(groups, 4, quantized.train, name, 3, None, first)
    halved = run(groups, 2, quantized.train, name, 0, first, second)
    whole = quantized.train(name, 0, second, None)
    for key, value in made.items():
        for other in (halved, whole):
            assert other[key].dtype == value.dtype
            assert torch.equal(other[key], value), key
    # The first of the two steps after loading reads the 8-bit values, the next one projects again.
    gone_on = [run(groups, ranks, quantized.train, name, 2, first, None) for ranks in (4, 2, 1)]
    for steps, others in ((3, [made]), (5, gone_on)):
        expected = quantized.train(name, steps, None, None)
        assert any(value.dtype == torch.uint8 for value in expected.values())
        for other in others:
            assert other.keys() == expected.keys()
            for key, value in expected.items():
                if key.endswith("param"):
                    assert (other[key] - value).norm() <= close * (value - start[key]).norm(), key
                else:
                    assert_next_to(other[key], value)


@pytest.mark.parametrize("rounding", ["stochastic_rounding", "master_weights"])
def test_bfloat16_parameters_with_float32_states_survive(groups: Pool, tmp_path: Path, rounding: str) -> None:
    folder = str(tmp_path / "a")
    keys = {"state_bits": 32, "state_dtype": torch.float32, rounding: True}
    run(groups, 4, quantized.train, "AdamW", 2, None, folder, torch.bfloat16, keys)
    expected = quantized.train("AdamW", 4, None, None, torch.bfloat16, keys)
    got = run(groups, 2, quantized.train, "AdamW", 2, folder, None, torch.bfloat16, keys)
    assert all(torch.equal(got[key], value) for key, value in expected.items())
    kinds = {str(v.dtype) for k, v in got.items() if "param" not in k and "master" not in k}
    assert kinds == {"torch.float32"}
    assert any("master" in key for key in got) == (rounding == "master_weights")


def test_masters_go_through_a_whole_state_dict(groups: Pool) -> None:
    """Torch gathers and scatters states by collectives that do not support int16."""
    assert groups[2].run(quantized.gathered) == [True, True]


def test_synchronizing_averages_dequantized_values(groups: Pool) -> None:
    for before, after, error in groups[2].run(quantized.synchronized):
        assert before > 1e-2
        assert after == 0.0
        assert error <= 0.01
