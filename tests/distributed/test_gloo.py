"""Real processes over gloo: DTensors, wrapped models, and ranks that disagree."""

from __future__ import annotations

import pytest
import torch

from support.layouts import PAIRS, SETTINGS, Setting
from support.workers import Workers, workers

from . import agreeing, averaging, jobs, normed, wrapped

NAMES = ("Dion", "Muon", "AdamW", "Lion")
CASES = ("dion-quarter", "muon-default", "adamw-default", "lion-default")
# Of the way of four steps in float64: every wrapper sums gradients in an order of its own.
CLOSE = 1e-12


def size_of(axes: dict[str, int]) -> int:
    size = 1
    for n in axes.values():
        size *= n
    return size


FOUR = [s.name for s in SETTINGS if size_of(s.axes) == 4]
EIGHT = [s.name for s in SETTINGS if size_of(s.axes) == 8]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", PAIRS, ids=str)
def test_steps_on_two_processes_equal_one_process(two: Workers, case: str, setting: Setting) -> None:
    assert max(two.run(jobs.steps_on_a_layout, case, setting.name, torch.float64, False)) <= 1e-12


@pytest.mark.parametrize("case", [*CASES, "dion-orthonormal-half"])
@pytest.mark.parametrize("setting", FOUR)
def test_steps_on_four_processes_equal_one_process(four: Workers, case: str, setting: str) -> None:
    assert max(four.run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-12


def test_rank_without_an_expert_takes_part_with_empty_messages(four: Workers) -> None:
    for name in ("Dion", "Muon"):
        assert max(four.run(jobs.one_expert_on_two_ranks, name)) <= 1e-12


# The last ones sum over two of three axes, for which a process group is created.
@pytest.mark.parametrize("case", [*CASES, "lamb-default", "adafactor-beta1", "came-default"])
@pytest.mark.parametrize("setting", EIGHT)
def test_steps_on_eight_processes_equal_one_process(eight: Workers, case: str, setting: str) -> None:
    assert max(eight.run(jobs.steps_on_a_layout, case, setting, torch.float64, False)) <= 1e-12


@pytest.mark.parametrize(
    "case",
    [
        *("soap-default", "soap_muon-default", "muon-hyperball", "soap-row-floor"),
        *("dion-orthonormal", "galore-owned", "apollo-owned"),
    ],
)
def test_owned_or_periodic_work_on_eight_processes_equals_one(eight: Workers, case: str) -> None:
    assert max(eight.run(jobs.steps_on_a_layout, case, "dp2-fsdp2-tp2", torch.float64, False)) <= 1e-12


@pytest.mark.parametrize("rule", ["schedule_free", "ema"])
def test_averages_on_eight_processes_equal_one_process(eight: Workers, rule: str) -> None:
    assert max(eight.run(averaging.steps, "Muon", {"average": rule})) <= CLOSE


def test_sums_along_two_axes_need_no_new_process_group(eight: Workers) -> None:
    assert max(eight.run(normed.sum_with_uneven_groups)) <= 1e-12


STEP = "step of group 0 differs: rank 0 has 7, rank 1 has 6. A rank has left out a step"


@pytest.mark.parametrize(
    ("name", "kind", "every", "then", "found", "words"),
    [
        ("Muon", "lr", None, "", 3, "lr of group 0 differs: rank 0 has 0.01, rank 1 has 0.0123"),
        ("AdamW", "lr", 1, "", 3, "lr of group 0 differs: rank 0 has 0.001, rank 1 has 0.0123"),
        ("AdamW", "weight_decay", 5, "", 5, "weight_decay of group 0 differs"),
        ("Lion", "lr", None, "", 64, "lr of group 0 differs"),
        ("AdamW", "step", None, "load", 6, STEP),
        ("Lion", "step", 0, "load", 6, STEP),
        ("AdamW", "step", None, "checkpoint", 6, "have taken other numbers of steps"),
        ("AdamW", "lr", None, "checkpoint", 6, ""),
    ],
)
def test_ranks_that_diverge_are_found_when_they_next_compare(
    two: Workers, name: str, kind: str, every: int | None, then: str, found: int, words: str
) -> None:
    for step, text in two.run(agreeing.drifted, name, kind, every, then):
        assert words in text
        assert not words or step == found


@pytest.mark.parametrize("name", ["Muon", "NorMuon", "Dion", "Dion2", "NorDion2"])
@pytest.mark.parametrize("kind", ["values", "one expert is zero", "gradients of zeros"])
def test_copies_that_are_none_are_refused_before_the_first_step(two: Workers, name: str, kind: str) -> None:
    own = "replicate_mesh" if name == "Dion" else "distributed_mesh"
    for error, text, unchanged in two.run(agreeing.copies_that_differ, name, kind):
        what = "gradients" if "grad" in kind else "values"
        assert error == ("PlanMismatch" if what == "gradients" else "LayoutError")
        assert unchanged
        assert text.startswith(f"expert: {what} should be the same on the ranks [0, 1], and differ.")
        assert f"without {own};" in text


@pytest.mark.parametrize("kind", ["equal", "roundings", "not finite"])
def test_copies_that_differ_by_roundings_are_taken(two: Workers, kind: str) -> None:
    for error, _, unchanged in two.run(agreeing.copies_that_differ, "Muon", kind):
        assert (error, unchanged) == ("", False)


NAMED = [s.name for s in SETTINGS if s.outer and size_of(s.axes) == 4]


@pytest.mark.parametrize("setting", NAMED)
def test_named_meshes_on_four_processes_equal_one_process(four: Workers, setting: str) -> None:
    assert max(four.run(jobs.steps_on_a_layout, "dion-tall", setting, torch.float64, True)) <= 1e-12


def test_all_meshes_named_on_eight_processes_equal_one_process(eight: Workers) -> None:
    setting = "dp2-fsdp2-tp2-all-named"
    assert max(eight.run(jobs.steps_on_a_layout, "dion-tall", setting, torch.float64, True)) <= 1e-12


# Without names of meshes, which choose another orientation of Q than one process.
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("setting", FOUR)
def test_float32_steps_on_four_processes_equal_one_process(four: Workers, case: str, setting: str) -> None:
    assert max(four.run(jobs.steps_on_a_layout, case, setting, torch.float32, False)) <= 2e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_model_equals_one_process(two: Workers, four: Workers, name: str, dim: int) -> None:
    for group in (two, four):
        assert max(group.run(wrapped.fsdp, name, True, dim)) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_ddp_model_equals_one_process(two: Workers, name: str) -> None:
    assert max(two.run(wrapped.ddp, name, False)) <= CLOSE


def test_ddp_model_with_compressed_sync_equals_one_process(two: Workers, four: Workers) -> None:
    for group in (two, four):
        assert max(group.run(wrapped.ddp, "Dion", True)) <= CLOSE


@pytest.mark.parametrize(("name", "compressed"), [("Dion", True), ("Dion", False), ("Muon", False)])
def test_hsdp_model_equals_one_process(four: Workers, name: str, compressed: bool) -> None:
    assert max(four.run(wrapped.hsdp, name, compressed)) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_model_equals_one_process(two: Workers, name: str) -> None:
    assert max(two.run(wrapped.tensor_parallel, name)) <= CLOSE


@pytest.mark.parametrize("strided", [False, True], ids=["other-dimension", "same-dimension"])
@pytest.mark.parametrize("name", NAMES)
def test_fsdp_and_tensor_parallel_model_equals_one_process(four: Workers, name: str, strided: bool) -> None:
    axes = {"fs": 2, "tp": 2}
    assert max(four.run(wrapped.plane, name, axes, strided, False)) <= CLOSE


@pytest.mark.parametrize(("name", "compressed"), [("Dion", True), ("Dion", False), ("Muon", False)])
def test_three_axes_on_eight_processes_equal_one_process(eight: Workers, name: str, compressed: bool) -> None:
    axes = {"dp": 2, "fs": 2, "tp": 2}
    assert max(eight.run(wrapped.plane, name, axes, False, compressed)) <= CLOSE


@pytest.mark.parametrize("name", ["Dion", "Muon"])
def test_flattened_mesh_equals_one_process(four: Workers, name: str) -> None:
    assert max(four.run(wrapped.flattened, name)) <= CLOSE


@pytest.mark.parametrize("name", ["Dion", "Muon"])
def test_mesh_that_was_built_again_is_the_same(two: Workers, name: str) -> None:
    assert max(two.run(wrapped.rebuilt_mesh, name)) <= CLOSE


@pytest.mark.parametrize(
    ("made_first", "message"),
    [
        (True, "TypeError: 0.weight: FullyShardedDataParallel (FSDP1) flattens"),
        (False, "TypeError: _fsdp_wrapped_module.0.weight: FullyShardedDataParallel (FSDP1) flattens"),
    ],
)
def test_fsdp1_has_no_matrices_for_muon_made_before_or_after_it(
    two: Workers, made_first: bool, message: str
) -> None:
    for error in two.run(wrapped.fsdp1, made_first):
        assert error.startswith(message)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("gradient", ("second", "rank 0 has a gradient, rank 1 none")),
        ("lr", ("lr", "0.02")),
        ("parameters", ("second", "[6, 9]")),
        ("rank", ("first", "0.25")),
    ],
)
def test_ranks_that_disagree_all_raise_and_nothing_changes(
    two: Workers, four: Workers, kind: str, names: tuple[str, ...]
) -> None:
    for group in (two, four):
        for answer in group.run(agreeing.disagreement, kind):
            assert answer["error"] == "PlanMismatch", answer
            assert all(name in answer["text"] for name in names), answer["text"]
            assert answer["unchanged"]
            assert answer["step"] == 0


def test_hyper_parameters_of_none_on_both_ranks_are_not_blamed(two: Workers) -> None:
    for name, text in two.run(agreeing.gradient_of_lamb_missing_on_one_rank):
        assert name == "PlanMismatch"
        assert "weight: rank 0 has a gradient, rank 1 none" in text
        assert "hyper-parameters" not in text


def test_states_are_made_at_construction_without_another_rank(two: Workers) -> None:
    wanted = (["momentum", "variance_neuron"], ["momentum", "step_dev", "variance"])
    assert two.run(agreeing.eager_states_of_one_rank) == [wanted, ([], [])]


@pytest.mark.parametrize(("every", "steps"), [(1, [*range(1, 9)]), (3, [1, 4, 6, 7]), (0, [1, 6])])
def test_ranks_compare_as_often_as_they_are_asked_to(two: Workers, every: int, steps: list[int]) -> None:
    assert two.run(agreeing.compared_steps, every) == [steps, steps]


@pytest.mark.parametrize("name", ["Dion", "Muon"])
@pytest.mark.parametrize(("plane", "compared"), [(False, 1), (True, 2)], ids=["one-axis", "two-axes"])
def test_a_step_starts_what_its_plan_says_and_compares(
    four: Workers, name: str, plane: bool, compared: int
) -> None:
    """One comparison on each axis."""
    for counts, planned in four.run(normed.collectives, name, 4, plane):
        assert counts == planned + compared
        assert planned > 0


def test_disagreement_on_one_line_of_one_axis_reaches_all_ranks(four: Workers) -> None:
    for name, text in four.run(agreeing.disagreement_on_one_line):
        assert name == "PlanMismatch"
        assert "on_tp: rank 1 has a gradient, rank 0 none" in text


@pytest.mark.parametrize("kind", ["inner", "outer", "both", "order"])
def test_ranks_with_parameters_on_other_axes_raise_without_delay(four: Workers, kind: str) -> None:
    for name, text, unchanged in four.run(agreeing.axes_that_differ, kind):
        assert name == "PlanMismatch"
        assert "parameter 1 of group 0" in text, text
        assert unchanged


def test_rank_left_alone_raises_when_its_process_group_gives_up() -> None:
    with workers(2) as group:
        (name, _), (error, text) = group.run(agreeing.plain_on_one_rank)
        group.kill()
    assert name == ""
    assert error == "PlanMismatch"
    assert "the ranks [0, 1] did not all come to compare the step of w" in text


@pytest.mark.parametrize("kind", ["lr", "gradient"])
def test_elementwise_ranks_compare_settings_before_a_first_step(two: Workers, kind: str) -> None:
    for first, second in two.run(agreeing.elementwise_that_differ, kind):
        assert first[0] == second[0] == ("PlanMismatch" if kind == "lr" else "")
        assert "0.2" in first[1] or kind != "lr"


@pytest.mark.parametrize("kind", ["max_batch_bytes", "groups", "maximize", "index"])
def test_settings_that_differ_between_ranks_raise_everywhere(two: Workers, kind: str) -> None:
    for name, text in two.run(agreeing.different_settings, kind):
        assert name == "PlanMismatch"
        assert "rank 1 has" in text, text
        assert len(text) < 1600


@pytest.mark.parametrize("name", ["Dion", "Muon"])
def test_replica_axis_sharing_ranks_with_a_shard_axis_is_refused(four: Workers, name: str) -> None:
    for error, text in four.run(agreeing.overlapping_replicas, name):
        assert error == "LayoutError"
        assert "w: the ranks [0, 1, 2, 3]" in text


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_metrics_and_verify_look_at_the_distributed_step(two: Workers, kind: str) -> None:
    first, second = two.run(agreeing.looked_at, kind)
    assert first["sent"] > 0
    assert first["row"] == pytest.approx(second["row"])
    assert first["row"]["orthogonality_error"] < 1e-5
    for answer in (first, second):
        assert answer["error"] < 1e-5
    if kind == "fsdp":
        assert first["row"].get("captured_energy") is None


def test_deep_copy_keeps_the_meshes_and_pickling_says_why_not(two: Workers) -> None:
    for same, text in two.run(agreeing.copied):
        assert same
        assert "save its state_dict()" in text


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and newer allow the gradient")
def test_rank_with_an_unusable_gradient_informs_the_others(two: Workers) -> None:
    first, second = two.run(agreeing.disagreement, "dtype")
    assert (first["error"], second["error"]) == ("PlanMismatch", "TypeError")
    assert "rank 1 could not begin the step" in first["text"]
    assert "second" in first["text"]
    assert first["unchanged"]
    assert second["unchanged"]


def test_infinity_that_one_rank_found_skips_the_step_on_all(two: Workers) -> None:
    for answer in two.run(agreeing.disagreement, "found_inf"):
        assert answer == {"error": "", "text": "", "unchanged": True, "step": 0}


def test_gradients_that_are_not_averaged_are_detected(two: Workers) -> None:
    for name, text, _ in two.run(agreeing.averaged_or_not, False, False):
        assert name == "PlanMismatch"
        assert "w: gradients differ" in text
    for name, _, caught in two.run(agreeing.averaged_or_not, False, True):
        assert (name, caught) == ("", [])


def test_gradients_that_were_averaged_already_are_detected(two: Workers) -> None:
    for name, _, caught in two.run(agreeing.averaged_or_not, True, True):
        assert name == ""
        assert "averaged already" in caught[0]
    for name, _, caught in two.run(agreeing.averaged_or_not, True, False):
        assert (name, caught) == ("", [])
