"""16-bit moments on every layout: rounded by the random numbers of one process, on any rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from support.inputs import gaussian
from support.sim_mesh import Layout, R, S, SimMesh, T, cut, spans

LAYOUTS: list[tuple[dict[str, int], Layout]] = [
    ({"fs": 3}, {"fs": S(0)}),
    ({"fs": 4}, {"fs": S(1)}),
    ({"dp": 2, "fs": 2}, {"dp": R, "fs": S(1)}),
    ({"fs": 2, "tp": 3}, {"fs": S(0), "tp": S(1)}),
    ({"fs": 2, "tp": 2}, {"fs": T(0), "tp": S(0)}),
    ({"fs": 2, "tp": 2}, {"fs": T(1), "tp": S(1)}),
]
BF16, F16 = torch.bfloat16, torch.float16
SHAPES = [(20, 64), (33, 50)]
BASES = {"precondition_frequency": 2}
LOW_RANK = {"rank": 4, "update_proj_gap": 2, "state_bits": 32}
# Where sums over ranks go into a state, the share of numbers that may lie on the other side of a threshold.
CASES: list[tuple[Any, dict[str, Any], float]] = [
    (oxidion.AdamW, {"state_dtype": BF16}, 0.0),
    (oxidion.AdamW, {"state_dtype": F16, "amsgrad": True}, 0.0),
    (oxidion.AdEMAMix, {"state_dtype": BF16}, 0.0),
    (oxidion.Lamb, {"state_dtype": F16}, 0.0),
    (oxidion.Muon, {"state_dtype": BF16}, 0.0),
    (oxidion.NorMuon, {"state_dtype": BF16, "orth_dtype": "float32"}, 0.01),
    (oxidion.SOAP, {"state_dtype": BF16, **BASES}, 0.0),
    (oxidion.SOAP, {"state_dtype": F16, "sides": "short", "owned_states": True, **BASES}, 0.0),
    (oxidion.SOAPMuon, {"state_dtype": BF16, "orth_dtype": "float32", **BASES}, 0.0),
    (oxidion.GaLoreAdamW, {"state_dtype": BF16, **LOW_RANK}, 0.01),
    (oxidion.GaLoreAdamW, {"state_dtype": F16, "owned_states": True, **LOW_RANK}, 0.01),
    (oxidion.APOLLOAdamW, {"state_dtype": BF16, "owned_states": True, **LOW_RANK}, 0.01),
]
IDS = [f"{cls.__name__}-{n}" for n, (cls, *_) in enumerate(CASES)]


def of_one_process(own: Tensor, value: Tensor, param: Tensor, parts: list[tuple[int, int]]) -> Tensor:
    """The part of a state that a rank has: a shard, or all where it owns the matrix."""
    if own.ndim > value.ndim:
        return value.reshape(own.shape) if own.numel() else value.new_zeros(own.shape)
    sides = zip(parts, param.shape, value.shape, own.shape, strict=True)
    return cut(value, [part if n == whole and m != n else (0, n) for part, whole, n, m in sides])


@pytest.mark.parametrize(("cls", "keys", "share"), CASES, ids=IDS)
@pytest.mark.parametrize(("axes", "layout"), LAYOUTS, ids=lambda v: "-".join(map(str, v)))
def test_moments_of_every_layout_are_those_of_one_process(
    axes: dict[str, int], layout: Layout, cls: Any, keys: dict[str, Any], share: float
) -> None:
    full = [gaussian(shape, 1, index, scale=0.1).float() for index, shape in enumerate(SHAPES)]

    def make(params: list[Tensor]) -> Any:
        return cls(params, **{"lr": 1e-3, **keys})

    params = [nn.Parameter(own.clone()) for own in full]
    single = make(params)
    mesh = SimMesh(axes, make, [layout] * len(full))
    mesh.build(full)
    for step in range(4):
        grads = [gaussian(shape, 2, step, index).float() for index, shape in enumerate(SHAPES)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        single.step()
        mesh.step(lambda _rank, grads=grads: grads)
    seen = 0
    for rank in mesh.ranks:
        for index, (own, param) in enumerate(zip(rank.params, params, strict=True)):
            parts = spans(param.shape, mesh.layouts[index], axes, rank.at)
            for key, value in single.state[param].items():
                if value.dtype != keys["state_dtype"]:
                    continue
                got = rank.optimizer.state[own][key]
                assert got.dtype == value.dtype
                wanted = of_one_process(got, value, param, parts)
                differing = (got != wanted).double()
                assert float(differing.sum()) <= share * value.numel(), (key, float(differing.mean()))
                seen += got.numel()
    assert seen >= sum(param.numel() for param in params) / 8


EIGHT_BITS = {"state_bits": 8, "min_quant_numel": 0, "block_size": 8}
OWNED: list[tuple[Any, dict[str, Any], tuple[int, ...], dict[str, Any]]] = [
    (oxidion.SOAP, BASES, (5, 12, 16), {}),
    (oxidion.SOAP, BASES, (24, 16), {"num_heads": 3}),
    (oxidion.SOAP, BASES, (16, 24), {"num_heads": 3, "split_dim": 1}),
    (oxidion.GaLoreAdamW, {"rank": 8, "update_proj_gap": 2}, (5, 12, 16), {}),
    (oxidion.APOLLOAdamW, {"rank": 8, "update_proj_gap": 2}, (5, 12, 16), {}),
]
WHERE: list[tuple[dict[str, int], Layout]] = [({"dp": 2}, {"dp": R}), ({"fs": 2}, {"fs": S(-2)})]


def matrices(value: Tensor, group: dict[str, Any]) -> list[Tensor]:
    """The elements of each matrix of a state, as its owner has them."""
    if value.ndim > 2:
        return [own.reshape(-1) for own in value]
    parts = value.chunk(group["num_heads"], dim=group.get("split_dim", 0))
    return [own.reshape(-1) for own in parts]


def assert_is_made_of(packed: Tensor, pieces: list[Tensor], share: float) -> None:
    """Packed matrices in any order; each removes its piece, and a ``share`` of its numbers may differ."""
    at = 0
    while at < len(packed):
        part = packed[at : at + pieces[0].numel()]
        differing = [float((part != piece).double().mean()) for piece in pieces]
        nearest = min(range(len(pieces)), key=differing.__getitem__)
        assert differing[nearest] <= share, differing
        at += pieces.pop(nearest).numel()


@pytest.mark.parametrize(
    "storage", [EIGHT_BITS, {"state_dtype": BF16}, {"state_dtype": F16}], ids=["8", "b16", "f16"]
)
@pytest.mark.parametrize(("axes", "layout"), WHERE, ids=["copies", "rows"])
@pytest.mark.parametrize(
    ("cls", "keys", "shape", "group"), OWNED, ids=[f"{c[0].__name__}-{n}" for n, c in enumerate(OWNED)]
)
def test_owners_of_matrices_round_by_places_in_the_whole_state(
    cls: Any,
    keys: dict[str, Any],
    shape: tuple[int, ...],
    group: dict[str, Any],
    axes: dict[str, int],
    layout: Layout,
    storage: dict[str, Any],
) -> None:
    """Several matrices of one state, distributed over the ranks."""
    layout = {name: (kind, dim % len(shape) if kind == "S" else dim) for name, (kind, dim) in layout.items()}
    full = gaussian(shape, 1).float()

    def make(params: list[Tensor]) -> Any:
        of_group = {key: storage[key] for key in ("min_quant_numel", "block_size") if key in storage}
        more = {"state_bits": 32, **storage, **keys}
        settings = {key: value for key, value in more.items() if key not in of_group}
        return cls([{"params": params, **group, **of_group}], lr=1e-3, owned_states=True, **settings)

    param = nn.Parameter(full.clone())
    single = make([param])
    mesh = SimMesh(axes, make, [layout])
    mesh.build([full])
    for step in range(3):
        param.grad = gaussian(shape, 2, step).float()
        single.step()
        mesh.step(lambda _rank, step=step: [gaussian(shape, 2, step).float()])
    # Projected gradients are sums over ranks.
    share = 0.02 if cls is not oxidion.SOAP else 0.0
    rounded = {torch.uint8, BF16, F16}
    keys_of_moments = [key for key in ("exp_avg", "exp_avg_sq") if single.state[param][key].dtype in rounded]
    assert keys_of_moments
    for key in keys_of_moments:
        value = single.state[param][key]
        pieces = matrices(value, group)
        for rank in mesh.ranks:
            own = rank.optimizer.state[rank.params[0]][key]
            assert own.dtype == value.dtype
            assert own.ndim > value.ndim, "the state is not sharded over owners"
            assert 0 < own.numel() < value.numel()
            assert_is_made_of(own.reshape(-1), pieces, share)
        assert not pieces, "each matrix has one owner"
