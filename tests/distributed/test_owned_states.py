"""States that lie with the owners of matrices: what is sent and stored, and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import oxidion
from support.cases import Case, Group
from support.inputs import gaussian, gradients
from support.layouts import Setting, fsdp
from support.sim_mesh import SimMesh, layouts_for

from . import owning
from .resuming import Groups
from .test_basis import A2A, AG, HSDP, RANKS, REPLICAS, ROWS, M, N, elements, traffic

LAYOUTS: tuple[Any, ...] = (("S", 0), ("S", 1), None)
IDS = ["rows", "columns", "replicas"]
BASES = ["SOAP", "SOAPMuon", "SOAP kl"]
NAMES = [*BASES, "GaLoreAdamW", "APOLLOAdamW", "APOLLOMini"]


def test_a_step_sends_the_gradient_and_the_update_only() -> None:
    # A rank's parts of four matrices to their owners, and those of the one that it owns back, each time.
    part = (A2A, elements(M * N))
    assert traffic(ROWS, (M, N), owned_states=True) == [[part, part]] * 4
    assert traffic(REPLICAS, (M, N), owned_states=True) == [[(AG, elements(M * N))]] * 4


def test_a_basis_of_the_uncut_side_moves_where_that_sends_less() -> None:
    part = (A2A, elements(M * N))
    tall = (2 * RANKS * N, N)
    for kwargs in ({"sides": "short"}, {"max_precondition_dim": N}):
        # Squares of 16 x 16 from and to all four are more than a quarter of 24 x 16, not of 128 x 16.
        assert traffic(ROWS, (M, N), owned_states=True, **kwargs) == [[part, part]] * 4
        assert traffic(ROWS, tall, owned_states=True, **kwargs) == traffic(ROWS, tall, **kwargs)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", [ROWS, REPLICAS, HSDP], ids=str)
def test_weights_without_a_gradient_keep_their_states(name: str, setting: Setting) -> None:
    cls = getattr(oxidion, name.split()[0])
    settings = {"lr": 2.0**-6, **owning.OWN_KEYS.get(name, owning.KEYS)}
    shapes = ((12, 8), (8, 12), (9, 7), (12, 8))
    one, other = (
        Case("missing", cls, cls.ALGORITHM, {**settings, "owned_states": owned}, (Group(shapes),))
        for owned in (True, False)
    )
    weights = []
    for case in (one, other):
        mesh = SimMesh(setting.axes, case.build, layouts_for(case, setting.place), extra=setting.extra)
        mesh.build([p.detach() for p in case.parameters(torch.float64)])
        for at, grads in enumerate(gradients(shapes, 6, 0)):
            kept = [None if (at + i) % 3 == 1 else grad.double() for i, grad in enumerate(grads)]
            mesh.step(lambda _, kept=kept: kept)  # type: ignore[misc]
        weights.append([param.detach() for rank in mesh.ranks for param in rank.params])
    for mine, theirs in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("cls", [oxidion.SOAP, oxidion.GaLoreAdamW, oxidion.APOLLOAdamW])
def test_states_of_eight_bits_are_refused(cls: Any) -> None:
    param = torch.nn.Parameter(torch.ones(8, 8))
    rank = {} if cls is oxidion.SOAP else {"rank": 2}
    with pytest.raises(ValueError, match="owned_states keeps states of 32 bits"):
        cls([param], owned_states=True, state_bits=8, **rank).plan()


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_that_of_sharded_states(groups: Groups, name: str, layout: Any) -> None:
    for found in groups[2].run(owning.beside_sharded, name, layout):
        of_bases = {"L", "R", "Q_L", "Q_R", "basis_step"} if name in BASES else {"exp_avg"}
        assert found.keys() >= {"weights", "exp_avg_sq", *of_bases}
        assert ("eigen_left" in found) == ("eigen_right" in found) == name.endswith("kl")
        # Gradients and sums of squares are rounded in another order.
        assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
def test_steps_go_on_after_a_checkpoint_bit_for_bit(groups: Groups, name: str, layout: Any) -> None:
    assert groups[2].run(owning.goes_on, name, layout) == [(True, True)] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("name", [*NAMES, "SOAP sums"])
def test_states_that_somebody_replaced_are_used(groups: Groups, name: str, layout: Any) -> None:
    """As offloaders do between rollouts, by the shape and not by the object."""
    assert groups[2].run(owning.replaced, name, layout) == [[True] * 4] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_a_state_dict_before_the_first_step_may_be_taken_by_one_rank(groups: Groups, layout: Any) -> None:
    assert groups[2].run(owning.one_rank_asks_first, layout) == [True, True]


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
def test_a_state_of_another_shape_is_refused_by_name_and_nothing_is_lost(groups: Groups, layout: Any) -> None:
    assert groups[2].run(owning.damaged, layout) == [True, True]


def test_states_that_are_filled_before_the_first_step_are_used(groups: Groups) -> None:
    assert groups[2].run(owning.filled_by_data) == [True, True]


@pytest.mark.parametrize("name", NAMES)
def test_replicas_hold_each_moment_once(groups: Groups, name: str) -> None:
    alone, owned = (groups[2].run(owning.elements, name, None, is_owned) for is_owned in (False, True))
    (moments, others), twin = alone
    assert twin == (moments, others)
    assert sum(own for own, _ in owned) == moments
    assert min(own for own, _ in owned) > 0
    # All states of bases lie with the owner; those of projections that others need too do not.
    assert sum(own for _, own in owned) == (1 if name in BASES else 2) * others


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
    for found in groups[2].run(owning.sums_beside_one_process, layout):
        assert found.keys() >= {"weights", "verify", "R", "Q_R", "basis_step"}
        assert max(found.values()) <= 1e-9, found


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=IDS[:2])
def test_steps_go_on_with_sums_from_a_checkpoint(groups: Groups, layout: Any) -> None:
    for is_same, distance in groups[2].run(owning.sums_go_on, layout):
        assert is_same
        assert distance <= 1e-11


def test_another_group_of_parameters_is_refused_with_a_way_out(groups: Groups) -> None:
    groups[2].run(owning.more_parameters)


def test_weights_may_be_frozen_and_unfrozen(groups: Groups) -> None:
    for distances in groups[2].run(owning.frozen):
        assert max(distances) <= 1e-9, distances
    groups[2].run(owning.frozen_without_loading)


def test_setting_may_change_between_steps(groups: Groups) -> None:
    for distances in groups[2].run(owning.switched):
        assert max(distances) <= 1e-9, distances


def test_state_dicts_and_copies_are_whole(groups: Groups) -> None:
    assert all(groups[2].run(owning.in_hand))
    groups[2].run(owning.all_states_at_once)


def test_codes_of_a_checkpoint_are_refused() -> None:
    param = torch.nn.Parameter(gaussian((64, 128), 0).float())
    coded = oxidion.SOAP([param], state_bits=8)
    param.grad = torch.ones_like(param)
    coded.step()
    mesh = SimMesh({"fs": 2}, lambda params: oxidion.SOAP(params, owned_states=True), [fsdp(0)((64, 128))])
    mesh.build([param.detach()])
    (rank, _) = mesh.ranks
    for key, value in coded.state[param].items():
        rank.optimizer.state[rank.params[0]][key] = value
    with pytest.raises(ValueError, match=r"of 8 bits.*owned_states"):
        rank.bind()


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
def test_verify_reads_states_from_their_owners(groups: Groups, name: str, layout: Any) -> None:
    for errors in groups[2].run(owning.verified, name, layout):
        assert max(errors) <= 1e-9, errors


def test_states_that_a_checkpoint_fills_are_sharded(groups: Groups) -> None:
    assert groups[2].run(owning.first_step_at_a_rate_of_zero) == [{"DTensor"}] * 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=IDS)
@pytest.mark.parametrize("name", NAMES)
def test_weights_may_have_their_first_gradient_later(groups: Groups, name: str, layout: Any) -> None:
    for distances in groups[2].run(owning.late, name, layout):
        assert max(distances) <= 1e-9, distances


def test_sums_go_beside_a_group_without_a_rate(groups: Groups) -> None:
    assert all(groups[2].run(owning.beside_a_rate_of_none))
