"""Steps in the backward pass of real processes: what needs no collective is allowed, the rest refused."""

from __future__ import annotations

from typing import Any

import pytest

from support.workers import Workers

from . import within

#: Class, arguments, and layouts on which a step of it sends nothing.
QUANTIZED = {"state_bits": 8}
ALLOWED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("AdamW", {}, ("rows", "columns", "tp", "offload")),
    ("AdamW", QUANTIZED, ("rows",)),
    ("AdamW", {"stochastic_rounding": True}, ("rows",)),
    ("AdamW", {"average": "schedule_free"}, ("rows",)),
    ("AdEMAMix", {}, ("rows",)),
    ("Lion", {}, ("rows", "columns", "tp", "offload")),
    ("Lion", QUANTIZED, ("rows",)),
    ("Lion", {"average": "ema", "average_decay": 0.9}, ("rows",)),
)
PAIRS = [(name, keys, layout) for name, keys, layouts in ALLOWED for layout in layouts]
IDS = [f"{name}-{'-'.join(keys)}-{layout}" for name, keys, layout in PAIRS]
REFUSED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Muon", {}),
    ("NorMuon", {}),
    ("Dion", {}),
    ("Dion2", {}),
    ("NorDion2", {}),
    ("SOAP", {}),
    ("SOAPMuon", {}),
    ("Adafactor", {"relative_step": False, "lr": 0.01}),
    ("CAME", {"lr": 0.01}),
    ("Lamb", {}),
    ("GaLoreAdamW", {"rank": 2, "proj_type": "unsharded"}),  # sums of G^T G when due
    ("APOLLOAdamW", {"rank": 2, "proj_type": "unsharded"}),  # norms of rows or columns
)


@pytest.mark.parametrize(("name", "keys", "layout"), PAIRS, ids=IDS)
def test_backward_pass_steps_of_two_ranks_equal_those_after_it(
    two: Workers, name: str, keys: dict[str, Any], layout: str
) -> None:
    assert two.run(within.steps, name, keys, layout, "module") == [(True, True, True)] * 2


@pytest.mark.parametrize("layout", ["rows", "hsdp", "plane"])
@pytest.mark.parametrize("per", ["module", "parameter"])
def test_backward_pass_steps_of_four_ranks_equal_those_after_it(four: Workers, layout: str, per: str) -> None:
    assert four.run(within.steps, "AdamW", {}, layout, per) == [(True, True, True)] * 4


@pytest.mark.slow
def test_backward_pass_steps_of_eight_ranks_equal_those_after_it(eight: Workers) -> None:
    assert eight.run(within.steps, "AdamW", {}, "plane", "module") == [(True, True, True)] * 8


@pytest.mark.parametrize(("name", "keys"), REFUSED, ids=[name for name, _ in REFUSED])
def test_classes_that_send_on_shards_are_refused_by_their_plan(
    two: Workers, name: str, keys: dict[str, Any]
) -> None:
    for text in two.run(within.refusal, name, keys, "rows"):
        assert text.startswith("LayoutError: ")
        assert "collectives on this layout, and in the backward pass they would come in the order" in text


def test_meshes_of_the_constructor_are_refused(two: Workers) -> None:
    for text in two.run(within.mesh_of_the_constructor):
        assert text.startswith(
            "ValueError: distributed_mesh and other meshes of the constructor must be left"
        )


def test_gradients_accumulate_by_the_switch_of_fsdp2_alone(two: Workers) -> None:
    for equal, text in two.run(within.accumulation, "AdamW"):
        assert equal
        assert "a second gradient came before optimizer.step()" in text


def test_sharded_gradients_of_one_layer_are_alive_at_a_time(two: Workers) -> None:
    # Weights and biases of the layers on each rank: 16 x 8, 12 x 16 and 12, 3 x 12 and 3, split by rows.
    after, inside = (two.run(within.most_alive, where) for where in (False, True))
    layers = [[64, 96 + 6, 24 + 2], [64, 96 + 6, 12 + 1]]
    assert after == [4 * sum(sizes) for sizes in layers]
    assert inside == [4 * max(sizes) for sizes in layers]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_ddp_made_before_or_after_the_optimizer_is_refused(two: Workers, before: bool) -> None:
    for text in two.run(within.wrapped_by_ddp, before):
        assert text.startswith("TypeError: DistributedDataParallel has not averaged a gradient yet")


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Dion"])
def test_matrix_classes_step_whole_matrix_stacks_on_each_rank(two: Workers, name: str) -> None:
    assert two.run(within.experts, name) == [(True, True)] * 2


@pytest.mark.parametrize(("name", "keys"), [("AdamW", {}), ("Lion", QUANTIZED)], ids=["AdamW", "Lion-8-bit"])
def test_checkpoint_of_shards_goes_on_in_either_kind(two: Workers, name: str, keys: dict[str, Any]) -> None:
    assert two.run(within.resumed, name, keys) == [(True, True)] * 2


def test_gradients_needing_a_collective_are_refused_in_the_hook(two: Workers) -> None:
    for text in two.run(within.partial_gradient):
        assert text.startswith("weight: a step of 'adamw' takes 1 collectives on this layout")
    for text in two.run(within.sharded_gradient):
        assert text.startswith("weight: its gradient is placed otherwise than the parameter")


def test_device_copies_are_awaited_before_offloaded_shards_step(two: Workers) -> None:
    for kinds in two.run(within.copies_awaited):
        assert kinds == ["cuda"] * 3  # one for each of three layers
