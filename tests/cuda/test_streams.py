"""On which streams steps launch, and that they wait for what other streams were given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from .driver import TESTS, needs_nvrtc, run
from .sanitizer_steps import ALGORITHMS

pytestmark = needs_nvrtc

STREAMS = f"""
import copy
import sys
sys.path.insert(0, {str(TESTS)!r})
from cuda import streams
streams.install(driver)
side = streams.Stream()
"""


def steps(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    script = TESTS / "cuda" / "stream_steps.py"
    command = [sys.executable, str(script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "how", [pytest.param("default", marks=SLOW), "side", pytest.param("graph", marks=SLOW), "replays"]
)
def test_every_launch_goes_to_the_current_stream(environment: dict[str, str], how: str) -> None:
    done = steps(environment, how)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = {name: (int(own), int(others)) for name, own, others in map(str.split, done.stdout.splitlines())}
    assert counts.keys() == set(ALGORITHMS)
    for algorithm, (own, others) in counts.items():
        assert own > 0, algorithm
        assert others == 0, algorithm


def test_launches_on_the_default_stream_are_found(environment: dict[str, str]) -> None:
    stray = steps(environment, "side", "stray")
    assert all(line.split()[1] == "0" != line.split()[2] for line in stray.stdout.splitlines())
    for how in ("graph", "replays"):
        assert "STREAM_CAPTURE_IMPLICIT" in steps(environment, how, "stray").stderr


def test_launch_is_refused_until_it_waits_for_the_last_stream(environment: dict[str, str]) -> None:
    said = run(
        environment,
        STREAMS,
        """
        third = streams.Stream()
        optimizer = oxidion.Lion(parameters((4, 3)))
        optimizer.step()
        kept = copy.deepcopy(optimizer.state_dict())
        def refused():
            try:
                optimizer.step()
            except RuntimeError as error:
                print(error)
                optimizer.load_state_dict(kept)  # a step that failed asks for a checkpoint
            else:
                print("taken")
        with torch.cuda.stream(side):
            refused()
            side.wait_stream(streams.current[0])
            refused()
        refused()
        third.wait_stream(side)  # and so for the default one
        with torch.cuda.stream(third):
            refused()
        torch.cuda.synchronize()
        refused()
        assert (side.launches(), third.launches()) == (2, 1)
        """,
    )
    first, second, third, fourth, fifth = said.splitlines()
    assert "on stream 1: what stream 0 was given may still run" in first
    assert "on stream 0: what stream 1 was given may still run" in third
    assert second == fourth == fifth == "taken"


def test_only_the_captured_stream_is_recorded(environment: dict[str, str]) -> None:
    said = run(
        environment,
        STREAMS,
        """
        params = parameters((4, 3))
        optimizer = oxidion.Lion(params)
        optimizer.step()
        before = params[0].clone()
        driver.emulator_begin_capture_on(ctypes.c_void_p(side.cuda_stream))
        try:
            optimizer.step()
        except RuntimeError as error:
            print(error)
        assert driver.emulator_end_capture() == 0
        assert torch.equal(params[0], before)
        """,
    )
    assert "STREAM_CAPTURE_IMPLICIT" in said


@pytest.mark.parametrize("waits", [True, False])
def test_capture_makes_the_streams_wait_for_each_other(environment: dict[str, str], waits: bool) -> None:
    said = run(
        environment,
        STREAMS,
        f"""
        from oxidion.graph import CudaGraphOptimizer
        if not {waits}:
            streams.Stream.wait_stream = lambda self, other: None
        optimizer = CudaGraphOptimizer(oxidion.Lion(parameters((4, 3))), warmup_steps=1)
        for _ in range(2):
            optimizer.step()
        try:
            optimizer.step()
            print("taken")
        except RuntimeError as error:
            print(error)
        """,
    )
    assert said.strip() == ("taken" if waits else "a launch of the graph failed")
