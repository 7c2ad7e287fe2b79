"""Tests that share something expensive are run by one process (``tests/support/spread.py``)."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import spread

MODULE = """
import pytest

@pytest.fixture(scope="module")
def kept():
    return 1

@pytest.fixture(scope="session")
def pool():
    return 1

@pytest.fixture
def own(pool):
    return 1

@pytest.mark.parametrize("n", range(100))
def test_alone(n, tmp_path_factory): ...

@pytest.mark.parametrize("at", ["a@b"])
def test_kept(kept, at):
    assert at == "c"

def test_pool(pool): ...

def test_own(own): ...
"""


@pytest.fixture
def collected(pytester: pytest.Pytester) -> list[pytest.Item]:
    return pytester.getitems(MODULE)


def test_tests_with_a_shared_fixture_are_one_group_and_the_rest_goes_in_pieces(
    collected: list[pytest.Item],
) -> None:
    groups = [group.partition(".py")[0] + group.partition(".py")[2] for group in spread.groups_of(collected)]
    name = Path(str(collected[0].path)).stem
    pieces = [f"piece-{name}-{i // spread.PIECE}" for i in range(100)]
    assert groups == [*pieces, f"kept-{name}", "gloo", "gloo"]


def test_groups_that_take_long_come_first_and_no_test_is_lost(collected: list[pytest.Item]) -> None:
    ordered = spread.in_groups(collected)
    assert sorted(item.name for item in ordered) == sorted(item.name for item in collected)
    assert [item.name for item in ordered[:3]] == ["test_pool", "test_own", "test_kept[a@b]"]
    for item in ordered:
        (mark,) = item.iter_markers("xdist_group")
        assert mark.args == (spread.groups_of([item])[0],) or "piece" in mark.args[0]


def test_last_failures_are_found_by_a_run_without_groups(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MODULE)
    hooks = Path(spread.__file__).parents[1] / "conftest.py"
    pytester.makeconftest(hooks.read_text())
    pytester.makeini(f"[pytest]\npythonpath = {hooks.parent}\n")
    failed = pytester.runpytest_subprocess("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
    failed.assert_outcomes(failed=1, passed=102)
    pytester.runpytest_subprocess("--last-failed").assert_outcomes(failed=1)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.py::test[x@y]@kept-a.py", "a.py::test[x@y]"),
        ("a.py::test[x@y]", "a.py::test[x@y]"),
        ("a.py::test@gloo", "a.py::test"),
        ("a.py::test", "a.py::test"),
        ("b@c/a.py::test", "b@c/a.py::test"),
    ],
)
def test_only_the_group_is_taken_from_a_name(name: str, expected: str) -> None:
    assert spread.without_group(name) == expected
