"""The part of the check that compares graphs with plain steps, with graphs that are recorded on the host."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oxidion._gpu_check import graphs
from oxidion._gpu_check.place import EMULATED

from .driver import TESTS, needs_nvrtc, run

CAPTURED = f"""
import json, sys
sys.path.insert(0, {str(TESTS)!r})
from dataclasses import replace
from cuda.recording import Capture
from oxidion._cuda import replay
from oxidion._gpu_check import graphs

Capture.driver = driver
replay.Capture = Capture
graphs.ROUNDS = 1

def captured(work):
    recorded = Capture(torch.device("cpu"), "")
    recorded.record(lambda: (work(), None)[1])
    return recorded.replay
"""


def compared(environment: dict[str, str], name: str, planted: str = "") -> dict[str, Any]:
    """What the part finds, with matrices that the emulator can do."""
    said = run(
        environment,
        CAPTURED,
        planted,
        f"""
        shapes = ((136, 200),) if {name!r} == "Muon" else ((40, 30), (24, 64))
        setting = replace(graphs.GRAPHS[{name!r}], shapes=shapes)
        found = graphs.compared(setting, torch.device("cpu"), captured)
        print(json.dumps([vars(found), [capture.replays for capture in Capture.made]]))
        """,
    )
    found, replays = json.loads(said.strip().splitlines()[-1])
    return {**found, "replays": replays}


@needs_nvrtc
@pytest.mark.parametrize("name", graphs.GRAPHS)
def test_replays_have_the_updates_of_plain_steps(environment: dict[str, str], name: str) -> None:
    found = compared(environment, name)
    assert (found["status"], found["reason"]) == ("PASS", ""), found
    figures = found["figures"]
    assert figures["off"] == 0.0
    assert figures["graph_ms"] > 0
    assert figures["plain_ms"] > 0
    assert figures["ratio"] > 0
    # Five steps that are compared, and one that is timed; a handwritten capture adds five.
    by_hand = [graphs.REPLAYS] if name in graphs.CAPTURABLE else []
    assert found["replays"] == [graphs.REPLAYS + 1, *by_hand]
    assert figures.get("by_hand_off", 0.0) == 0.0
    assert ("by_hand_off" in figures) == bool(by_hand)


PLANTED = {
    "nothing is replayed": (
        "Capture.replay = lambda self: None",
        "replayed updates differ by ",
    ),
    "the learning rate is that of the capture": (
        """
        from oxidion.graph import CudaGraphOptimizer
        own = CudaGraphOptimizer.step
        def step(self, closure=None):
            self.param_groups[0]["lr"] = graphs.RATES[0]
            return own(self, closure)
        CudaGraphOptimizer.step = step
        """,
        "replayed updates differ by ",
    ),
    "a graph of torch's is not replayed": (
        "captured = lambda work: lambda: None",
        "updates of a graph of torch's differ by ",
    ),
    "no graph is captured": (
        """
        from oxidion.graph import CudaGraphOptimizer
        CudaGraphOptimizer.captured = False
        """,
        "step 2 is not a replay of a graph",
    ),
}


@needs_nvrtc
@pytest.mark.parametrize("planted", PLANTED)
def test_replay_that_is_wrong_fails(environment: dict[str, str], planted: str) -> None:
    code, said = PLANTED[planted]
    found = compared(environment, "AdamW", code)
    assert found["status"] == "FAIL"
    assert found["reason"].startswith(said)


@needs_nvrtc
def test_steps_by_libtorch_are_skipped(environment: dict[str, str]) -> None:
    found = compared({**environment, "OXIDION_CUDA": "libtorch"}, "AdamW")
    assert found["status"] == "SKIP"
    assert "by libtorch" in found["reason"]


def test_emulated_device_has_no_graph() -> None:
    assert graphs.graph(EMULATED, "AdamW").status == "LEFT_OUT"
