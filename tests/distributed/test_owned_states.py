"""Owner-sharded states (ZeRO-1): what is sent and stored, and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxidion
from support.cases import Case, Group
from support.inputs import gradients
from support.layouts import Setting
from support.sim_mesh import SimMesh, layouts_for

from . import compared, owning
from .resuming import Groups
from .test_basis import A2A, AG, COLUMNS, HSDP, RANKS, REPLICAS, ROWS, M, N, elements, traffic

LAYOUTS: tuple[Any, ...] = (("S", 0), ("S", 1), None)
IDS = ["rows", "columns", "replicas"]
BASES = ["SOAP", "SOAPMuon", "SOAP quantized"]
LOW_RANK = ["GaLoreAdamW", "APOLLOAdamW", "APOLLOMini", "GaLoreAdamW quantized"]
MOMENTA = ["Muon", "NorMuon", "Muon quantized"]
"""Settings whose states are owner-sharded on replicated layouts only."""
# Scales of blocks of 8 elements do not fit 14 columns on two ranks.
ROWS_ONLY = {"SOAP quantized", "GaLoreAdamW quantized"}
CASES = [
    pytest.param(name, layout, id=f"{name}-{where}")
    for name in (*BASES, *LOW_RANK, *MOMENTA)
    for layout, where in zip(LAYOUTS, IDS, strict=True)
    if where != "columns" or name not in ROWS_ONLY
    if where == "replicas" or name not in MOMENTA
]


def test_a_step_sends_the_gradient_and_the_update_only() -> None:
    # A rank's parts of four matrices to their owners, and those of the one that it owns back, each time.
    part = (A2A, elements(M * N))
    for kwargs in ({}, {"state_bits": 8}):
        assert traffic(ROWS, (M, N), **kwargs) == [[part, part]] * 4
    assert traffic(REPLICAS, (M, N), owned_states=True) == [[(AG, elements(M * N))]] * 4


@pytest.mark.parametrize("setting", [REPLICAS, HSDP], ids=str)
def test_momenta_with_their_owners_send_no_more_bytes(setting: Setting) -> None:
    """Gradients go where momenta went, and updates come back as before."""

    def sent(owned: bool) -> int:
        keys = {"lr": 2.0**-6, "owned_states": owned}
        case = Case("sent", oxidion.Muon, "muon", keys, (Group(((M, N),) * RANKS),))
        mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
        mesh.build([p.detach() for p in case.parameters(torch.float64)])
        mesh.step(lambda _: [grad.double() for grad in next(iter(gradients(case.shapes, 1, 0)))])
        return sum(s.bytes for s in mesh.sent)

    assert sent(owned=True) == sent(owned=False) > 0


def test_a_basis_of_the_uncut_side_moves_where_that_sends_less() -> None:
    part = (A2A, elements(M * N))
    tall = (2 * RANKS * N, N)
    for kwargs in ({"sides": "short"}, {"max_precondition_dim": N}):
        # Squares of 16 x 16 from and to all four are more than a quarter of 24 x 16, not of 128 x 16.
        assert traffic(ROWS, (M, N), owned_states=True, **kwargs) == [[part, part]] * 4
        assert traffic(ROWS, tall, owned_states=True, **kwargs) == traffic(ROWS, tall, **kwargs)


@pytest.mark.parametrize("name", [*BASES, *LOW_RANK, *MOMENTA])
@pytest.mark.parametrize("setting", [ROWS, REPLICAS, HSDP], ids=str)
def test_weights_without_a_gradient_keep_their_states(name: str, setting: Setting) -> None:
    cls = getattr(oxidion, name.split()[0])
    shapes = ((12, 8), (8, 12), (9, 7), (12, 8))
    case = Case(
        "missing",
        cls,
        cls._ALGORITHM,
        {"lr": 2.0**-6, **owning.settings(name)},
        (Group(shapes, owning.group_keys(name)),),
    )
    mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
    whole = case.parameters(torch.float64)
    mesh.build([p.detach() for p in whole])
    alone = case.build(whole)
    for at, grads in enumerate(gradients(shapes, 6, 0)):
        kept = [None if (at + i) % 3 == 1 else grad.double() for i, grad in enumerate(grads)]
        mesh.step(lambda _, kept=kept: kept)  # type: ignore[misc]
        for param, grad in zip(whole, kept, strict=True):
            param.grad = grad
        alone.step()
    for mine, theirs in compared.parts(mesh, whole):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("setting", [ROWS, COLUMNS, HSDP], ids=str)
def test_8_bit_states_of_heads_are_sharded_by_owner(setting: Setting) -> None:
    own = owning.EIGHT_BITS
    groups = (
        Group(((12, 32), (12, 64)), {"num_heads": 3, **own}),
        Group(((8, 32), (6, 64)), {"num_heads": 4, "split_dim": 1, **own}),
        Group(((12, 32), (2, 12, 32)), {"split_sizes": (6, 2, 4), **own}),
    )
    keys = {"lr": 2.0**-6, "state_bits": 8, "precondition_frequency": 1}
    case = Case("quantized", oxidion.SOAP, "soap", keys, groups)
    grads = compared.normal(case.shapes, 5, 0)
    _, whole = compared.one_process(case, grads, torch.float64)
    mesh = compared.all_ranks(case, setting, grads, torch.float64)
    assert compared.distance(mesh, case, whole) <= 1e-11


def test_quantized_mixed_widths_side_by_side_are_refused() -> None:
    own = owning.EIGHT_BITS
    group = Group(((8, 32),), {"split_sizes": (16, 8, 8), "split_dim": 1, **own})
    case = Case("widths", oxidion.SOAP, "soap", {"state_bits": 8}, (group,))
    mesh = SimMesh(ROWS.axes, case.build, layouts_for(case, ROWS.place))
    with pytest.raises(ValueError, match=r"several widths. Set state_bits=32"):
        mesh.build([p.detach() for p in case.parameters(torch.float64)])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_checkpoint_is_that_of_one_process(groups: Groups, name: str, layout: Any) -> None:
    for found in groups[2].run(owning.compare_with_one_process, name, layout):
        of_bases = {"exp_avg_sq", "L", "R", "Q_L", "Q_R", "basis_step"}
        others = {"momentum"} if name in MOMENTA else {"exp_avg", "exp_avg_sq"}
        assert found.keys() >= {"weights", *(of_bases if name in BASES else others)}
        # Gradients and sums of squares are rounded in another order.
        assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_steps_go_on_after_a_checkpoint_bit_for_bit(groups: Groups, name: str, layout: Any) -> None:
    assert groups[2].run(owning.goes_on, name, layout) == [(True, True)] * 2


@pytest.mark.parametrize(("name", "layout"), [*CASES, *(("SOAP sums", layout) for layout in LAYOUTS)])
def test_states_that_the_user_replaced_are_used(groups: Groups, name: str, layout: Any) -> None:
    """As offloaders do between rollouts, by the shape and not by the object."""
    assert groups[2].run(owning.replaced, name, layout) == [[True] * 4] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_one_rank_may_take_a_state_dict_before_the_first_step(groups: Groups, layout: Any) -> None:
    assert groups[2].run(owning.one_rank_asks_first, layout) == [True, True]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_state_of_another_shape_is_refused_by_name_without_loss(groups: Groups, layout: Any) -> None:
    assert groups[2].run(owning.damaged, layout) == [True, True]


def test_states_that_are_filled_before_the_first_step_are_used(groups: Groups) -> None:
    assert groups[2].run(owning.filled_by_data) == [True, True]


@pytest.mark.parametrize("name", [*BASES, *LOW_RANK, *MOMENTA])
def test_replicas_hold_each_moment_once(groups: Groups, name: str) -> None:
    alone, owned = (groups[2].run(owning.elements, name, None, is_owned) for is_owned in (False, True))
    (moments, others), twin = alone
    assert twin == (moments, others)
    assert sum(own for own, _ in owned) == moments
    assert min(own for own, _ in owned) > 0
    # All states of bases are owner-sharded; those of projections that other ranks need too are not.
    assert sum(own for _, own in owned) == (1 if name in BASES else 2) * others


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("name", BASES)
def test_ranks_that_cut_a_side_hold_each_state_of_a_basis_once(
    groups: Groups, name: str, is_asked: bool
) -> None:
    whole, *_ = groups[2].run(owning.elements, name, None, False)  # copies have all
    parts = groups[2].run(owning.elements, name, ("S", 0), is_asked)
    assert [*map(sum, zip(*parts, strict=True))] == [*whole]
    assert min(own for own, _ in parts) > 0


@pytest.mark.parametrize("name", ["GaLoreAdamW", "APOLLOAdamW"])
def test_ranks_that_cut_the_projected_side_hold_each_moment_once(groups: Groups, name: str) -> None:
    of_columns, of_rows = (
        [groups[2].run(owning.elements, name, ("S", dim), is_owned) for is_owned in (False, True)]
        for dim in (1, 0)
    )
    whole, _ = groups[2].run(owning.elements, name, None, False)[0]  # copies have all
    for alone, owned in (of_columns, of_rows):
        assert sum(own for own, _ in owned) == whole < sum(own for own, _ in alone)
        assert [others for _, others in owned] == [others for _, others in alone]


# The shorter side of the first two weights is the one that is not cut.
@pytest.mark.parametrize("layout", [("S", 0)], ids=["rows"])
def test_a_factor_that_ranks_add_to_is_a_sum_in_checkpoints(groups: Groups, layout: Any) -> None:
    for found in groups[2].run(owning.sums_of_one_process, layout):
        assert found.keys() >= {"weights", "verify", "R", "Q_R", "basis_step"}
        assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=IDS[:2])
def test_steps_go_on_with_sums_from_a_checkpoint(groups: Groups, layout: Any) -> None:
    for is_same, distance in groups[2].run(owning.sums_go_on, layout):
        assert is_same
        assert distance <= 1e-11


@pytest.mark.parametrize("name", ["Muon", "SOAP"])
def test_a_refused_step_leaves_all_ranks_alike(groups: Groups, name: str) -> None:
    """They refuse it at different parameters, and then gather what they have."""
    assert groups[4].run(owning.refused, name) == [[True, True]] * 4


def test_another_group_of_parameters_is_refused_with_advice(groups: Groups) -> None:
    groups[2].run(owning.more_parameters)


def test_weights_may_be_frozen_and_unfrozen(groups: Groups) -> None:
    for distances in groups[2].run(owning.frozen):
        assert max(distances) <= 1e-9, distances
    groups[2].run(owning.frozen_without_loading)


@pytest.mark.parametrize("name", BASES[:3])
def test_a_nan_of_one_rank_leaves_bases_as_those_of_one_process(groups: Groups, name: str) -> None:
    for distances in groups[2].run(owning.spoiled, name):
        assert all(distance <= 1e-9 for distance in distances), distances


@pytest.mark.parametrize(
    ("name", "layout"), [("APOLLOAdamW", ("S", 0)), ("SOAP", None), ("SOAPMuon", None), ("NorMuon", None)]
)
def test_setting_may_change_between_steps(groups: Groups, name: str, layout: Any) -> None:
    for distances in groups[2].run(owning.switched, name, layout):
        assert max(distances) <= 1e-9, distances


def test_state_dicts_and_copies_are_whole(groups: Groups) -> None:
    assert all(groups[2].run(owning.in_hand))
    groups[2].run(owning.all_states_at_once)


@pytest.mark.parametrize("how", ["hook", "no caller"])
@pytest.mark.parametrize("name", ["SOAP", "SOAPMuon"])
def test_state_dicts_are_whole_without_a_call(groups: Groups, name: str, how: str) -> None:
    assert all(groups[2].run(owning.gathered, name, how))


@pytest.mark.parametrize("bits", [8, 32])
def test_quantized_checkpoints_are_loaded_and_saved(groups: Groups, bits: int) -> None:
    """States have the dtype of the checkpoint, whatever the group says, as those on all ranks do."""
    assert all(groups[2].run(owning.of_other_bits, bits))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_verify_reads_states_from_their_owners(groups: Groups, name: str, layout: Any) -> None:
    for errors in groups[2].run(owning.verified, name, layout):
        assert max(errors) <= 1e-9, errors


def test_states_that_a_checkpoint_fills_are_sharded(groups: Groups) -> None:
    assert groups[2].run(owning.first_step_at_a_rate_of_zero) == [{"DTensor"}] * 2


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_weights_may_have_their_first_gradient_later(groups: Groups, name: str, layout: Any) -> None:
    for distances in groups[2].run(owning.late, name, layout):
        assert max(distances) <= 1e-9, distances


def test_sums_go_with_a_group_without_a_rate(groups: Groups) -> None:
    assert all(groups[2].run(owning.with_a_rate_of_none))
