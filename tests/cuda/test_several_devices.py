"""Parameters of one optimizer on several devices and on the host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import oxidion
from oxidion._core.runner import DIRECT
from oxidion._cuda.replay import Replay

from .device_steps import ALGORITHMS
from .driver import TESTS, needs_nvrtc, run

SCRIPT = TESTS / "cuda" / "several_devices.py"
OF_KERNELS = ("adamw", "lamb", "muon", "came")
"""Classes whose kernels are launched on both devices; libtorch computes all of them."""


def steps(environment: dict[str, str], *algorithms: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *algorithms],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_steps_by_libtorch_equal_one_optimizer_for_each_device() -> None:
    environment = {**os.environ, "OXIDION_CUDA": "libtorch", "PYTHONWARNINGS": "ignore"}
    assert steps(environment, *ALGORITHMS) == list(ALGORITHMS)


@needs_nvrtc
def test_steps_by_kernels_equal_one_optimizer_for_each_device(environment: dict[str, str]) -> None:
    assert steps(environment, *OF_KERNELS) == list(OF_KERNELS)


@needs_nvrtc
def test_each_device_loads_and_launches_its_own_kernels(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        from oxidion import _oxidion
        def state(number):
            return {name: state for name, state, *_ in _oxidion.source_states(number)}["updates.cu"]
        params = parameters((7,), (5,), (6,))
        for param, place in zip(params, (1, None, 0)):
            _oxidion.count_as(param, place)
        print(state(0), state(1), sep=", ")
        optimizer = oxidion.AdamW(params)
        before = driver.emulator_launches()
        optimizer.step()
        print(driver.emulator_launches() - before, driver.emulator_current_device())
        print(state(0), state(1), sep=", ")
        print(optimizer.plan())
        """,
    )
    first, launches, then, *plan = said.splitlines()
    assert (first, launches, then) == ("not loaded, not loaded", "2 -1", "loaded, loaded")
    assert [line.split(" on ")[1].split()[0] for line in plan[:3]] == ["cuda:0", "cuda:1", "cpu"]


def test_graph_of_a_step_on_several_devices_is_refused() -> None:
    replay = Replay(1, "thread_local", DIRECT)
    places = [torch.device("cpu"), torch.device("cuda", 1)]
    with pytest.raises(RuntimeError, match="one CUDA device, got cpu, cuda:1"):
        replay.open_capture(places)


@pytest.mark.cuda
def test_mixed_parameters_of_a_device_map_are_stepped() -> None:
    """On a real device, with the host."""
    results = []
    for places in (("cuda", "cpu"), ("cpu", "cpu")):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(40, 30).to(place)) for place in places]
        optimizer = oxidion.Muon(params, lr=0.1)
        for step in range(3):
            for at, param in enumerate(params):
                param.grad = (
                    torch.sin(torch.arange(1200.0) * (at + step + 1)).reshape(40, 30).to(param.device)
                )
            optimizer.step()
        results.append([param.detach().cpu() for param in params])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
