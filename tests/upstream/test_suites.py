"""Suites of other projects over the classes of this package, from checkouts that the environment names.

Nothing of them is in this repository. ``OXIDION_UPSTREAM_TORCH`` is a checkout of pytorch/pytorch at the
version of the torch that is installed, ``OXIDION_UPSTREAM_DION`` one of microsoft/dion. What fails is
explained in ``docs/reliability.md``, by the patterns that are listed here.
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

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "reliability.md"


class Suite(NamedTuple):
    """A suite of another project.

    Attributes:
        variable: names the checkout.
        plugin: puts the classes of this package in the place of its own.
        files: of the checkout.
        select: expression of pytest for the tests that are run.
        least: how many tests have to pass.
        explained: regular expressions of the tests that fail.
    """

    variable: str
    plugin: str
    files: tuple[str, ...]
    select: str
    least: int
    explained: tuple[str, ...]


DION = Suite(
    "OXIDION_UPSTREAM_DION",
    "upstream.dion_plugin",
    (
        "tests/test_state_prepopulation.py",
        "tests/test_optimizers.py",
        "tests/test_dion3_alias.py",
    ),
    "",
    81,
    (
        r"test_lm_head_lr_scale_by_scalar_opt",
        r"test_normalize_selected_stacked_matches_unfused",
        r"test_dion2_pre_orthogonalize_empty_\w+_shard",
        r"TestTiming",
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
    450,
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
SUITES = {"dion": DION, "torch": TORCH}


def run(suite: Suite, folder: Path, report: Path) -> dict[str, str]:
    """Outcomes (passed, skipped, failed) of the tests of a suite by their names."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "python"), str(folder / "test")])
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SUITES)
def test_upstream_suite_fails_only_where_the_page_explains(name: str, tmp_path: Path) -> None:
    suite = SUITES[name]
    folder = os.environ.get(suite.variable)
    if not folder:
        pytest.skip(f"{suite.variable} does not name a checkout")
    outcomes = run(suite, Path(folder), tmp_path / "report.xml")
    failed = [test for test, outcome in outcomes.items() if outcome == "failed"]
    assert [test for test in failed if not any(re.search(why, test) for why in suite.explained)] == []
    assert [why for why in suite.explained if not any(re.search(why, test) for test in failed)] == []
    assert list(outcomes.values()).count("passed") >= suite.least


@pytest.mark.parametrize("name", SUITES)
def test_every_explained_failure_is_on_the_page(name: str) -> None:
    suite, page = SUITES[name], PAGE.read_text("utf-8")
    assert suite.explained
    assert [why for why in suite.explained if f"`{why}`".replace("|", r"\|") not in page] == []
