"""Code on the emulated device runs in forks that share nothing and end as processes of their own do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .driver import Environment, Forks, run


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    made = Forks(os.environ)
    yield made
    made.stop()


def test_forks_begin_alike_and_share_nothing(forks: Forks) -> None:
    code = "import os\nprint(os.getpid(), hasattr(torch, 'mark'))\ntorch.mark = 1"
    first, second = (forks.run(code) for _ in range(2))
    assert first[0] == second[0] == 0
    assert first[1].split()[1] == second[1].split()[1] == "False"
    assert first[1].split()[0] != second[1].split()[0]


@pytest.mark.parametrize(
    ("code", "outcome", "complaint"),
    [
        ("assert 1 == 2, 'not equal'", 1, "AssertionError: not equal"),
        ("raise SystemExit(3)", 3, ""),
        ("import os\nos.kill(os.getpid(), 11)", -11, ""),
        ("import atexit, os\natexit.register(os._exit, 7)", 7, ""),
        ("import sys\nsys.stderr.write('said')", 0, "said"),
        ("class Own: ...\nimport pickle\nassert isinstance(pickle.loads(pickle.dumps(Own())), Own)", 0, ""),
    ],
    ids=["raises", "exits", "crashes", "ends badly", "complains", "pickles"],
)
def test_outcome_of_a_fork_is_that_of_a_process(
    forks: Forks, code: str, outcome: int, complaint: str
) -> None:
    got, said, complaints = forks.run(code)
    assert (got, said) == (outcome, "")
    assert complaint in complaints


def test_process_that_was_lost_is_started_anew(forks: Forks) -> None:
    with pytest.raises(RuntimeError, match="has ended"):
        forks.run("import os, signal\nos.kill(os.getppid(), signal.SIGKILL)")
    assert forks.run("print(1)") == (0, "1\n", "")


def test_variables_of_another_environment_are_not_those_of_the_forks(environment: Environment) -> None:
    code = "import os\nprint(os.environ.get('OXIDION_OTHER'))"
    assert run(environment, code) == "None\n"
    assert run({**environment, "OXIDION_OTHER": "1"}, code) == "1\n"
