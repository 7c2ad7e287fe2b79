"""Suites of other projects over the classes of this package, from checkouts that the environment names.

Nothing of them is in this repository. ``OXIDION_UPSTREAM_TORCH`` is a checkout of pytorch/pytorch at the
version of the torch that is installed, ``OXIDION_UPSTREAM_DION`` one of microsoft/dion,
``OXIDION_UPSTREAM_PYTORCH_OPTIMIZER`` one of kozistr/pytorch_optimizer and ``OXIDION_UPSTREAM_HEAVYBALL`` one
of HomebrewML/HeavyBall, which needs opt_einsum. What fails is explained in ``README.md`` of this folder, by
the patterns that are listed here. A run writes its counts to ``counts.json`` and to that page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import NamedTuple

import pytest

from upstream import counts

TESTS = Path(__file__).parents[1]
RECORDED = counts.read(counts.FILE.read_text("utf-8"))


class Suite(NamedTuple):
    """A suite of another project.

    Attributes:
        variable: names the checkout.
        plugin: replaces the suite's classes by those of this package.
        files: of the checkout.
        select: expression of pytest for the tests that are run.
        explained: regular expressions of the tests that fail.
    """

    variable: str
    plugin: str
    files: tuple[str, ...]
    select: str
    explained: tuple[str, ...]


DION = Suite(
    "OXIDION_UPSTREAM_DION",
    "upstream.dion_plugin",
    (
        "tests/test_state_prepopulation.py",
        "tests/test_optimizers.py",
        "tests/test_dion3_alias.py",
        "tests/test_polar_express.py",
        "tests/test_adamw_foreach.py",
        "tests/test_cuda_graph.py",
        "tests/test_dion2_selection_scope.py",
        "tests/test_megabatch_empty_shard.py",
    ),
    "",
    (
        r"test_normalize_selected_stacked_matches_unfused",
        r"test_dion2_pre_orthogonalize_empty_\w+_shard",
        r"test_adamw_foreach::test_\w+",
        r"test_global_scope_k_uses_global_size_not_padded",
        r"test_default_selection_scope_is_local",
        r"test_local_scope_nopad_equals_pad",
        r"test_megabatch_orthogonalize_async_requires_global_comm_dim_size",
        r"TestNumHeads.*(invalid_num_heads|rejects_1d|flatten_true_incompatible)",
        r"TestSplitSizes.*(mismatch_raises|rejects_3d_param|incompatible_with|invalid_split_sizes)",
        r"TestValidation.*test_1d_param_rejected",
        r"TestSplitSizes.*test_dion2_not_supported",
    ),
)
MATRIX = "(Dion|Muon|NorMuon|Dion2|NorDion2)_cpu"
TORCH = Suite(
    "OXIDION_UPSTREAM_TORCH",
    "upstream.torch_plugin",
    ("test/test_optim.py",),
    "TestOptimRenewed",
    (
        r"test_foreach_matches_forloop",
        r"test_fused_error_on_params_on_meta_AdamW",
        rf"test_param_group_with_lrscheduler_goes_right_direction_{MATRIX}",
        r"test_param_group_with_lrscheduler_goes_right_direction_(Adafactor|CAME)",
        rf"test_param_groups_lr_{MATRIX}",
        r"test_param_groups_lr_Adafactor",
        r"test_param_groups_weight_decay_CAME",
        r"test_param_groups_weight_decay_Dion_cpu",
        r"test_step_is_noop_for_zero_grads_(AdEMAMix|GaLoreAdamW)",
        rf"test_step_is_noop_for_zero_grads_{MATRIX}",
    ),
)
PYTORCH_OPTIMIZER = Suite(
    "OXIDION_UPSTREAM_PYTORCH_OPTIMIZER",
    "upstream.pytorch_optimizer_plugin",
    (
        "tests/test_optimizers.py",
        "tests/test_gradients.py",
        "tests/test_general_optimizer_parameters.py",
        "tests/test_optimizer_variants.py",
        "tests/test_wrapper_optimizers.py",
        "tests/test_lr_schedulers.py",
    ),
    "test_f32_optimizers or test_bf16_optimizers or test_closure or test_no_gradients"
    " or test_sparse_not_supported or test_complex_not_supported"
    " or test_learning_rate or test_epsilon or test_weight_decay or test_betas or test_foreach_maximize"
    " or test_sam_optimizer_with_closure or test_lookahead or test_schedulefree_wrapper"
    " or (test_trac_optimizer and not erf)"
    " or (test_lr_schedulers and not get_chebyshev_scheduler and not deberta and not chebyshev_params)",
    (r"test_complex_not_supported",),
)
HEAVYBALL = Suite(
    "OXIDION_UPSTREAM_HEAVYBALL",
    "upstream.heavyball_plugin",
    (
        "test/test_optimizer_cpu_smoke.py",
        "test/test_cpu_features.py",
        "test/test_toy_training.py",
        "test/test_nd_param.py",
        "test/test_closure.py",
        "test/test_save_restore.py",
        "test/test_hook.py",
        "test/test_bf16_params.py",
        "test/test_channels_last.py",
    ),
    "runs_on_cpu or (test_selected and not SOAP) or test_toy or test_nd_param or test_closure"
    " or (test_save_restore and not merge_split) or test_hook or test_bf16_params"
    " or (test_channels_last and AdamW)",
    (
        r"test_toy_updates_change.Lion",
        r"test_bf16_params::test_foreach.(Lion|SOAP)",
    ),
)
SUITES = {"dion": DION, "torch": TORCH, "pytorch_optimizer": PYTORCH_OPTIMIZER, "heavyball": HEAVYBALL}


def run(suite: Suite, folder: Path, report: Path) -> dict[str, str]:
    """Outcomes (passed, skipped, failed) of the tests of a suite by their names."""
    own = [str(TESTS), str(TESTS.parent / "python"), str(folder / "test")]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                suite.plugin,
                "-p",
                "no:cacheprovider",
                "-c",
                os.devnull,
            ),
            *(f"--rootdir={folder}", f"--junitxml={report}", "-k", suite.select, *suite.files),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        found = {child.tag for child in case} & {"failure", "error", "skipped"}
        kind = "skipped" if found == {"skipped"} else "failed" if found else "passed"
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = kind
    return outcomes


def commit_of(folder: Path) -> str:
    """The commit of a checkout, in seven digits."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def unexplained(suite: Suite, failed: list[str]) -> list[str]:
    """Tests that fail without a pattern, and patterns without a test that fails."""
    tests = [test for test in failed if not any(re.search(why, test) for why in suite.explained)]
    return tests + [why for why in suite.explained if not any(re.search(why, test) for test in failed)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUITES)
def test_upstream_suite_fails_only_where_the_page_explains(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    folder = os.environ.get(suite.variable)
    if not folder:
        pytest.skip(f"{suite.variable} does not name a checkout")
    found = counts.counted(commit_of(Path(folder)), run(suite, Path(folder), tmp_path / "report.xml"))
    assert unexplained(suite, found.failed) == []
    before = RECORDED.get(name)
    if before and before.commit == found.commit:
        assert found.passed >= before.passed, f"failed newly: {set(found.failed) - set(before.failed)}"
    counts.record(name, found)


@pytest.mark.parametrize("name", SUITES)
def test_every_explained_failure_is_on_the_page(name: str) -> None:
    suite, page = SUITES[name], counts.PAGE.read_text("utf-8")
    assert suite.explained
    assert [why for why in suite.explained if f"`{why}`".replace("|", r"\|") not in page] == []


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_failure_is_explained(name: str) -> None:
    assert RECORDED[name].failed
    assert unexplained(SUITES[name], RECORDED[name].failed) == []


def test_page_shows_the_recorded_counts() -> None:
    page = counts.PAGE.read_text("utf-8")
    assert len(RECORDED) >= 3
    assert counts.written(page, RECORDED) == page


def test_recorded_counts_replace_those_of_one_suite(tmp_path: Path) -> None:
    file, page = tmp_path / "counts.json", tmp_path / "page.md"
    file.write_text("{}", "utf-8")
    page.write_text(f"before\n{counts.BEGIN}\nold\n{counts.END}\nafter\n", "utf-8")
    first = counts.counted("0000001", {"a": "passed", "b": "failed", "c": "skipped", "d": "passed"})
    second = counts.counted("0000002", {"a": "passed"})
    for name, suite in (("x", first), ("y", first), ("x", second)):
        counts.record(name, suite, file, page)
    assert counts.read(file.read_text("utf-8")) == {"x": second, "y": first}
    assert page.read_text("utf-8").splitlines() == [
        *("before", counts.BEGIN),
        *("| suite | commit | tests | passed | failed | skipped |", "| --- | --- | --- | --- | --- | --- |"),
        *("| x | 0000002 | 1 | 1 | 0 | 0 |", "| y | 0000001 | 4 | 2 | 1 | 1 |"),
        *(counts.END, "after"),
    ]


def test_page_without_marks_is_refused_for_counts() -> None:
    with pytest.raises(ValueError, match="0 pairs of marks"):
        counts.written("text", {})
