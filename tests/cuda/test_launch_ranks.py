"""The launch path with several ranks: what they send each other is memory of the emulated device."""

from __future__ import annotations

import pytest

from .driver import TESTS, needs_nvrtc, on_the_device, run

SHARDED = (
    "((muon-default or adamw-default or lion-default) and not normuon and one_process"
    " and (fsdp3-dim0 or fsdp2-tp2-strided or hsdp-compressed or experts2-tp2)) or unequal_shares"
    " or (float64 and one_process and fsdp2-tp2-strided and not muon and not adamw and not lion)"
)
"""Layouts on which rows and columns are cut, twice too, and replicas whose gradients are averaged."""


PROCESSES = (
    "(steps_on_four_processes and (muon-default or adamw-default) and (hsdp or ddp4 or fsdp2-tp2))"
    " or (fsdp_and_tensor_parallel_model and Muon)"
)

ON_ITS_MESH = (
    "(equal_one_process and (muon-default or adamw-default or dion-quarter) and not normuon)"
    " or (scaler and (Muon or AdamW))"
)
"""Shards on a mesh of devices: those of the tests of offload, which here are in memory of the device."""


@needs_nvrtc
@pytest.mark.parametrize(
    ("place", "chosen", "least"),
    [
        ("test_sim_equivalence.py", SHARDED, 25),
        ("test_gloo.py", PROCESSES, 10),
        ("test_offload_gloo.py", ON_ITS_MESH, 17),
        ("test_eight_bit.py", "empty_shards or (8_bit_states_of_every_layout and (Lamb or Dion2))", 22),
    ],
)
def test_sharded_results_equal_those_of_one_process(
    environment: dict[str, str], place: str, chosen: str, least: int
) -> None:
    """All ranks in one process, and ranks over gloo whose messages are memory of the device."""
    # Of the full product of cases and layouts too, which is slow as a whole.
    passed, _ = on_the_device(environment, chosen, f"distributed/{place}", markers="")
    assert passed >= least


MESH = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from support.inputs import gaussian
from support.sim_mesh import R, S, SimMesh

def mesh_of(make, shapes, axes, place, extra=None):
    mesh = SimMesh(axes, make, [place] * len(shapes), extra=extra)
    mesh.build([gaussian(shape, i).float() for i, shape in enumerate(shapes)])
    return mesh

def gradients(shapes, step):
    return lambda rank: [gaussian(shape, step, i, rank.number).float() for i, shape in enumerate(shapes)]
"""


@needs_nvrtc
def test_all_parts_of_a_message_take_one_launch(environment: dict[str, str]) -> None:
    said = run(
        environment,
        MESH
        + """
shapes = [(40, 20)] * 8
mesh = mesh_of(lambda p: oxidion.Muon(p, orth_dtype="float32"), shapes, {"fs": 4}, {"fs": S(0)})
for step in range(2):
    before = driver.emulator_launches()
    mesh.step(gradients(shapes, step))
    print(driver.emulator_launches() - before)
""",
    )
    # On each of four ranks: momentum, what came, two for norms, division by them, what goes, and the update.
    assert said.split() == ["28", "28"]


@needs_nvrtc
def test_replay_repeats_the_captured_averaging_of_gradients(
    environment: dict[str, str],
) -> None:
    run(
        environment,
        MESH
        + """
class Captured:
    def __init__(self, own):
        self.own = own
    def __getattr__(self, name):
        return getattr(self.own, name)
    def compute(self, k):
        driver.emulator_begin_capture()
        self.own.compute(k)
        assert driver.emulator_end_capture() > 0
        assert driver.emulator_replay() == 0

shapes = [(40, 30), (5,), (7, 3)]
for algorithm in ("adamw", "lion"):
    make = lambda params: oxidion.Dion([{"params": params, "algorithm": algorithm}], weight_decay=0.1)
    one, other = [mesh_of(make, shapes, {"dp": 3}, {"dp": R}, {"dp": False}) for _ in range(2)]
    for rank in other.ranks:
        rank.session = Captured(rank.session)
    for step in range(3):
        for mesh in (one, other):
            mesh.step(gradients(shapes, step))
    assert len(one.ranks[0].plan.transfers) > 0
    for a, b in zip(one.ranks, other.ranks):
        assert all(torch.equal(x, y) for x, y in zip(a.params, b.params))
""",
    )
