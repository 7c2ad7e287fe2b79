"""Projected gradients on a mesh: what is sent when, which rank decomposes, and that replicas remain equal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.registry import REFERENCE
from support.cases import Case, Group, case_named
from support.inputs import gaussian, gradients
from support.layouts import SETTINGS, Setting, copies, fsdp, setting_named
from support.sim_mesh import R, S, SimMesh, cut, layouts_for

from .comparison import Comparison, on_grid

AG, AR, A2A, RS = "all_gather", "all_reduce", "all_to_all", "reduce_scatter"
RANK, GAP, COUNT = 4, 3, 4
TALL, WIDE = (24, 16), (16, 24)

FSDP, COLUMNS = Setting("", {"fs": 4}, fsdp(0)), Setting("", {"fs": 4}, fsdp(1))
REPLICAS = Setting("", {"dp": 4}, copies, {"dp": True})
HSDP = Setting("", {"dp": 2, "fs": 2}, lambda s: {"dp": R, "fs": S(0)}, {"dp": True})
PLANE = Setting("", {"fs": 2, "tp": 2}, lambda s: {"fs": S(0), "tp": S(1)})


def traffic(
    setting: Setting, shape: tuple[int, int], cls: type = oxidion.GaLoreAdamW, **kwargs: Any
) -> tuple[list[list[tuple[str, int]]], SimMesh]:
    """Kinds and bytes of what rank 0 gives to collectives in each of four steps."""
    settings = {"rank": RANK, "update_proj_gap": GAP, **kwargs}
    case = Case("traffic", cls, cls._ALGORITHM, settings, (Group((shape,) * COUNT),))  # type: ignore[attr-defined]
    mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    mesh.build([p.detach() for p in case.parameters(torch.float32)])
    sent = []
    for grads in gradients(case.shapes, GAP + 1, 0):
        mesh.step(lambda _, g=grads: g)  # type: ignore[misc]
        sent.append([(s.kind, s.bytes) for s in mesh.sent])
    return sent, mesh


M, N = TALL
BASIS = N * RANK * 4
GRADIENT = COUNT * M * N * 4 // 4
# The sum of the projected gradients of all matrices, as stored here.
LOW = (AR, COUNT * RANK * M * 4)

# Whether there are new projections, to those that hold parts of them.
FOUND = (AG, 4)


def sums(d: int, columns: int | None = None) -> list[tuple[str, int]]:
    """Sent where Gram matrices, or sketches, have fewer bytes than a rank's part of the gradient."""
    return [(RS, COUNT * d * (columns or d) * 8), (AG, d * RANK * 4)]


def parts(m: int, n: int, d: int) -> list[tuple[str, int]]:
    """Sent where they have more."""
    return [(A2A, COUNT * m * n * 4 // 4), (AG, d * RANK * 4)]


UNSHARDED = {"proj_type": "unsharded"}
# name: (setting, shape, settings, every step, also when due)
STEPS: dict[str, Any] = {
    "fsdp-tall": (FSDP, TALL, {}, [], parts(*TALL, N)),
    "fsdp-long": (FSDP, (128, N), {}, [], sums(N)),
    "fsdp-almost-long": (FSDP, (124, N), {}, [], parts(124, N, N)),
    "fsdp-wide": (FSDP, WIDE, {}, [LOW], [(A2A, GRADIENT), (A2A, COUNT * BASIS // 4), FOUND]),
    "columns-wide": (COLUMNS, WIDE, {}, [], parts(*WIDE, N)),
    "columns-long": (COLUMNS, (N, 160), {}, [], sums(N)),
    "fsdp-exact": (FSDP, (128, N), {"svd": "exact"}, [], parts(128, N, N)),
    "fsdp-random": (FSDP, (48, 44), {"svd": "random"}, [], parts(48, 44, 44)),
    "fsdp-random-long": (FSDP, (160, 44), {"svd": "random"}, [], sums(44, 20)),
    "fsdp-unsharded": (FSDP, WIDE, UNSHARDED, [], parts(*WIDE, M)),
    "fsdp-unsharded-long": (FSDP, (192, M), UNSHARDED, [], sums(M)),
    "ddp": (REPLICAS, TALL, {}, [], [(AG, BASIS)]),
    "fsdp-rotate": (
        FSDP,
        WIDE,
        {"rotate_moments": True},
        [LOW],
        [(A2A, GRADIENT), (A2A, COUNT * BASIS // 4), FOUND, (AR, COUNT * RANK * RANK * 4)],
    ),
}


OWNED = {"owned_states": True, "state_bits": 32}


def test_owned_moments_send_no_more_than_copies_of_them() -> None:
    low = RANK * M * 4
    # Their sum to the owner of each matrix and what it makes of it back: together an all-reduce.
    assert _every_step(FSDP, WIDE) == [(RS, COUNT * low), (AG, low)]
    assert _every_step(COLUMNS, TALL) == [(RS, COUNT * low), (AG, low)]
    # Replicas have the gradients: the owner's direction goes to all.
    assert _every_step(REPLICAS, TALL) == [(AG, low)]
    # Sharded along the side that is not projected, moments are sharded as parameters are: nothing is sent.
    assert _every_step(FSDP, TALL) == []
    # With replicas a rank sends its halves to the owner, one of four, and gets what that makes of them.
    assert _every_step(HSDP, TALL) == [(A2A, COUNT * low // 2), (AG, low), (A2A, COUNT * low // 2)]


def _every_step(setting: Setting, shape: tuple[int, int], **kwargs: Any) -> list[tuple[str, int]]:
    sent, _ = traffic(setting, shape, **OWNED, **kwargs)
    assert sent[1] == sent[2]
    return sent[1]


@pytest.mark.parametrize("name", STEPS)
def test_galore_sends_for_new_projections_only_when_they_are_due(name: str) -> None:
    setting, shape, kwargs, every, due = STEPS[name]
    sent, _ = traffic(setting, shape, **kwargs)
    assert [sorted(step) for step in sent] == [
        sorted(due + every),
        every,
        every,
        sorted(due + every),
    ]


@pytest.mark.parametrize("svd", ["gram", "exact", "random"])
@pytest.mark.parametrize("setting", [FSDP, COLUMNS, PLANE, HSDP, REPLICAS], ids=str)
@pytest.mark.parametrize("shape", [TALL, WIDE], ids=str)
def test_galore_never_gathers_a_gradient_on_all_ranks(
    setting: Setting, shape: tuple[int, int], svd: str
) -> None:
    _, mesh = traffic(setting, shape, svd=svd)
    for transfer in mesh.ranks[0].plan.transfers:
        assert not (transfer["kind"] == AG and transfer["buffer"] == "source")
        assert transfer["when_due"] == (transfer["buffer"] in ("source", "basis", "found", "overlap"))
    text = str(mesh.ranks[0].plan)
    assert "decompose[" in text
    assert "when due" in text


def test_apollo_sends_one_number_per_matrix_on_an_uncut_side() -> None:
    number, both = (AR, COUNT * 8), (AR, COUNT * 16)
    for setting, shape, every in (
        (FSDP, TALL, [number]),
        (FSDP, WIDE, [LOW, number]),
        (REPLICAS, TALL, []),
    ):
        sent, _ = traffic(setting, shape, oxidion.APOLLOAdamW)
        assert sent == [every] * (GAP + 1)
    sent, _ = traffic(FSDP, TALL, oxidion.APOLLOMini, rank=1)
    assert sent == [[both, number]] * (GAP + 1)


def test_apollo_sends_factors_only_where_owners_have_the_moments() -> None:
    number, kind = (AR, COUNT * 8), oxidion.APOLLOAdamW
    for setting, shape, every in (
        (FSDP, TALL, [number]),
        (FSDP, WIDE, [(RS, COUNT * RANK * M * 4), (AG, M * 8), number]),
        (REPLICAS, TALL, [(AG, M * 8)]),
    ):
        sent, _ = traffic(setting, shape, kind, owned_states=True)
        assert sent == [every] * (GAP + 1)
    sent, _ = traffic(REPLICAS, TALL, oxidion.APOLLOMini, rank=1, owned_states=True)
    assert sent == [[(AG, 2 * 8)]] * (GAP + 1)


@pytest.mark.parametrize(
    "name", [s.name for s in SETTINGS if "outer" not in s.name and "named" not in s.name]
)
@pytest.mark.parametrize("cls", [oxidion.GaLoreAdamW, oxidion.APOLLOAdamW])
def test_unsharded_projection_follows_layout_and_reference(name: str, cls: type) -> None:
    setting = setting_named(name)
    kwargs = {**case_named("galore-default").kwargs, "proj_type": "unsharded"}
    shapes = ((12, 8), (8, 12), (8, 8), (17, 6), (3, 6, 7))
    comparison = Comparison(
        Case("unsharded", cls, cls._ALGORITHM, kwargs, (Group(shapes),)), setting, torch.float64, ""
    )  # type: ignore[attr-defined]
    rows = comparison.mesh.ranks[0].plan.rows()
    for group, row in zip(comparison.groups, rows, strict=True):
        group["transposed"] = row["transposed"]
    comparison.states = [{} for _ in shapes]
    for grads in gradients(shapes, 3, 0):
        comparison.step(grads)
    comparison.check(1e-10)
    if name.startswith("fsdp4"):
        steps = [t for t in comparison.mesh.ranks[0].plan.transfers if not t["when_due"]]
        assert [t["buffer"] for t in steps if t["buffer"] == "r"] == []


@pytest.mark.parametrize("svd", ["gram", "exact", "random"])
@pytest.mark.parametrize("name", ["ddp4", "ddp3-compressed", "hsdp", "hsdp-compressed", "dp2-fsdp2-tp2"])
def test_replicas_have_bit_equal_projections_and_parameters(name: str, svd: str) -> None:
    case = case_named("galore-default")
    case = Case("replicas", case.cls, case.algorithm, {**case.kwargs, "svd": svd}, case.groups)
    comparison = Comparison(case, setting_named(name), torch.float32, "")
    for grads in gradients(case.shapes, 3, 0):
        comparison.mesh.step(lambda rank, g=grads: comparison.replica_gradients(rank, g))  # type: ignore[misc]
    for rank in comparison.mesh.ranks:
        twin = next(r for r in comparison.mesh.ranks if {**r.at, "dp": 0} == {**rank.at, "dp": 0})
        for mine, other in zip(rank.params, twin.params, strict=True):
            assert torch.equal(mine, other)
            for key, value in rank.optimizer.state[mine].items():
                assert torch.equal(value, twin.optimizer.state[other][key]), key


def test_every_matrix_even_a_lone_one_is_decomposed_by_one_rank() -> None:
    for setting in (REPLICAS, FSDP, HSDP):
        case = Case("one", oxidion.GaLoreAdamW, "galore_adamw", {"rank": 2}, (Group(((8, 6),)),))
        mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
        mesh.build([p.detach() for p in case.parameters(torch.float32)])
        texts = [str(rank.plan) for rank in mesh.ranks]
        assert sum("decompose[1," in text for text in texts) == 1
        assert sum("decompose[0," in text for text in texts) == len(texts) - 1


@pytest.mark.parametrize("name", ["galore-default", "galore-rotate", "galore-full"])
@pytest.mark.parametrize("setting", ["fsdp4-dim0", "fsdp4-dim1", "ddp4", "fsdp2-tp2"])
def test_non_finite_gradient_keeps_the_old_projection_everywhere(name: str, setting: str) -> None:
    case = case_named(name)
    comparison = Comparison(case, setting_named(setting), torch.float64, "")
    first, second, third = gradients(case.shapes, 3, 0)
    for grads in (first, second):
        comparison.step(grads)
    held = [[dict(rank.optimizer.state[p]) for p in rank.params] for rank in comparison.mesh.ranks]
    held = [[{k: v.clone() for k, v in state.items()} for state in rank] for rank in held]
    bad = [g.clone() for g in third]
    bad[1][0, 0] = math.nan
    comparison.step(bad)
    for rank, olds in zip(comparison.mesh.ranks, held, strict=True):
        for i, (param, old) in enumerate(zip(rank.params, olds, strict=True)):
            state = rank.optimizer.state[param]
            if i == 1:
                assert all(torch.equal(state[k], old[k]) for k in old if k.startswith("proj"))
            else:
                part = cut(comparison.expected[i], rank.spans(i, comparison.full[i].shape))
                assert torch.allclose(param.detach(), part, rtol=1e-9, atol=1e-12)
                assert not state["proj"].numel() or not torch.equal(state["proj"], old["proj"])


LAYOUTS = (
    "fsdp4-dim0",
    "fsdp4-dim1",
    "fsdp20-empty-shards",
    "ddp3-compressed",
    "hsdp-compressed",
    "fsdp2-tp2",
)


@pytest.mark.parametrize("name", ["galore-right", "galore-exact-full", "galore-experts", "galore-rotate"])
@pytest.mark.parametrize("setting", [*LAYOUTS, "experts2-tp2"])
def test_zero_gradients_leave_the_projection_to_the_next_ones(name: str, setting: str) -> None:
    case = case_named(name)
    comparison = Comparison(case, setting_named(setting), torch.float64, "")
    averaged = all(comparison.setting.extra.values())
    for step, grads in enumerate(gradients(case.shapes, 7, 0)):
        some = [on_grid(2.5**step * grad) for grad in grads]
        for i, grad in enumerate(some):
            # All of it, one matrix of a stack, and rows that some shards have alone.
            if (step + i) % 3 == 0 or (step == 0 and i == 1):
                grad.zero_()
            elif grad.ndim > 2 and step < 3:
                grad[0] = 0.0
            elif i == 2 and step < 3:
                grad[: grad.shape[0] // 2] = 0.0
        if averaged:
            comparison.step(some)
            continue
        comparison.mesh.step(lambda _, g=some: g)  # type: ignore[misc]
        for expected, grad, state, group in zip(
            comparison.expected, some, comparison.states, comparison.groups, strict=True
        ):
            REFERENCE[case.algorithm](expected, grad, state, group)
    comparison.check(1e-10)
    for rank in comparison.mesh.ranks:
        for i, param in enumerate(rank.params):
            since = comparison.states[i]["proj_step"]
            part = cut(since, rank.spans(i, comparison.full[i].shape)[: since.ndim])
            assert torch.equal(rank.optimizer.state[param]["proj_step"], part)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and newer allow it")
@pytest.mark.parametrize("name", ["galore-default", "galore-exact-full", "galore-cautious", "apollo-tensor"])
@pytest.mark.parametrize("setting", LAYOUTS)
@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
    ids=str,
)
def test_gradients_of_another_dtype_step_as_their_cast_copies(
    name: str, setting: str, dtype: torch.dtype, grad_dtype: torch.dtype
) -> None:
    case, chosen = case_named(name), setting_named(setting)
    cast, other = (Comparison(case, chosen, dtype, "") for _ in range(2))
    other.mesh.grad_dtype = grad_dtype
    for grads in gradients(case.shapes, 3, 0):
        exact = [(8 * grad).round() / 8 for grad in grads]  # numbers of all types
        for comparison in (cast, other):
            comparison.mesh.step(lambda _, g=exact: g)  # type: ignore[misc]
    tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for mine, twin in zip(other.mesh.ranks, cast.mesh.ranks, strict=True):
        for param, expected in zip(mine.params, twin.params, strict=True):
            torch.testing.assert_close(param, expected, rtol=tolerance, atol=tolerance)


def test_staggered_matrices_are_decomposed_in_different_steps() -> None:
    case = Case(
        "stagger",
        oxidion.GaLoreAdamW,
        "galore_adamw",
        {"rank": 2, "update_proj_gap": 4, "stagger": True},
        (Group(((8, 6),) * 8),),
    )
    params = case.parameters(torch.float64)
    optimizer = case.build(params)
    changed = []
    for step in range(9):
        before = [optimizer.state[p]["proj"].clone() if p in optimizer.state else None for p in params]
        for i, p in enumerate(params):
            p.grad = gaussian((8, 6), step, i)
        optimizer.step()
        new = [
            b is None or not torch.equal(b, optimizer.state[p]["proj"])
            for b, p in zip(before, params, strict=True)
        ]
        changed.append(sum(new))
    assert changed[0] == 8
    # Afterwards each once in four steps; counts differ from their mean of two by at most one.
    for period in (changed[1:5], changed[5:9]):
        assert sum(period) == 8
        assert 1 <= min(period) <= max(period) <= 3


def run(optimizer: Any, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        for i, p in enumerate(params):
            p.grad = gaussian(p.shape, 5, step, i).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    "name", ["galore-default", "galore-stagger", "galore-full", "apollo-default", "apollo-tensor"]
)
@pytest.mark.parametrize("cut_at", [1, 2, 3, 4])
def test_resuming_across_a_refresh_is_bit_equal(name: str, cut_at: int) -> None:
    case = case_named(name)
    params, copies_ = (case.parameters(torch.float32) for _ in range(2))
    optimizer = case.build(params)
    run(optimizer, params, range(cut_at))
    resumed = case.build(copies_)
    with torch.no_grad():
        for new, old in zip(copies_, params, strict=True):
            new.copy_(old)
    resumed.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(cut_at, 7))
    run(resumed, copies_, range(cut_at, 7))
    assert all(torch.equal(a, b) for a, b in zip(params, copies_, strict=True))


def test_first_gradient_that_is_not_finite_skips_the_step(caplog: pytest.LogCaptureFixture) -> None:
    param = nn.Parameter(gaussian((8, 6), 1))
    start = param.detach().clone()
    optimizer: Any = oxidion.GaLoreAdamW([param], rank=2, update_proj_gap=2, weight_decay=0.0)
    for bad in (math.nan, math.inf):
        param.grad = torch.full((8, 6), bad, dtype=torch.float64)
        optimizer.step()
        assert torch.equal(param, start)
        assert not optimizer.state[param]["proj"].any()
    assert sum("not finite" in record.message for record in caplog.records) == 1
    param.grad = gaussian((8, 6), 2)
    optimizer.step()
    assert param.isfinite().all()
    assert not torch.equal(param, start)


def test_directions_that_a_gradient_does_not_have_get_no_step() -> None:
    for svd in ("gram", "exact", "random"):
        param = nn.Parameter(torch.zeros(8, 6))
        optimizer: Any = oxidion.GaLoreAdamW([param], rank=4, svd=svd)
        u, v = gaussian((8, 2), 1).float(), gaussian((2, 6), 2).float()
        param.grad = u @ v
        optimizer.step()
        proj = optimizer.state[param]["proj"]
        assert (proj.norm(dim=0) > 0).tolist() == [True, True, False, False]
        outside = torch.linalg.qr(v.mT, mode="complete")[0][:, 2:]
        assert (param.detach() @ outside).norm() <= 1e-5 * param.detach().norm()


def test_parameter_without_gradient_keeps_its_own_count_of_steps() -> None:
    case = Case(
        "skip",
        oxidion.GaLoreAdamW,
        "galore_adamw",
        {"rank": 2, "update_proj_gap": 2},
        (Group(((8, 6), (3, 8, 6))),),
    )
    params = case.parameters(torch.float64)
    optimizer = case.build(params)
    states: list[dict[str, Tensor]] = [{}, {}]
    expected = [p.detach().clone() for p in params]
    for step in range(6):
        for i, p in enumerate(params):
            p.grad = gaussian(p.shape, 3, step, i) if (step + i) % 3 else None
            if p.grad is not None:
                REFERENCE["galore_adamw"](expected[i], p.grad, states[i], case.reference_groups()[i])
        optimizer.step()
    for p, e, state in zip(params, expected, states, strict=True):
        assert torch.allclose(p.detach(), e, rtol=1e-11, atol=1e-13)
        assert float(optimizer.state[p]["step"]) == float(state["step"]) == 4
