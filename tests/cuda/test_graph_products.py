"""Replays of steps in which libtorch multiplies: their numbers are those of steps that were not captured."""

from __future__ import annotations

import pytest

from .driver import TESTS, needs_nvrtc, run

pytestmark = needs_nvrtc

CAPTURED = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from cuda.recording import Capture
from oxidion._cuda import replay
from oxidion.graph import CudaGraphOptimizer

Capture.driver = driver
replay.Capture = Capture

def pair(make, shapes, warmup=2, dtype=torch.float32):
    torch.manual_seed(1)
    ours = parameters(*shapes, dtype=dtype)
    expected = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    return ours, CudaGraphOptimizer(make(ours), warmup_steps=warmup), expected, make(expected)

def gradients(ours, expected, seed, keep):
    torch.manual_seed(seed)
    for one, other in zip(ours, expected):
        other.grad = torch.randn_like(other)
        if keep and one.grad is not None:
            one.grad.copy_(other.grad)
        else:
            one.grad = other.grad.clone()

def assert_alike(ours, optimizer, expected, reference, step):
    for one, other in zip(ours, expected):
        assert bool(one.isfinite().all()), step
        assert torch.equal(one, other), (step, one.shape, float((one - other).abs().max()))
        for name, value in reference.state[other].items():
            assert torch.equal(optimizer.state[one][name], value), (step, name)
"""

MATRICES = "(40, 30), (64, 24), (24, 64), (40, 30)"
LARGE = "(136, 200), (200, 136)"  # by the kernels of symmetric products
LONG = "(136, 600), (560, 136)"  # cut along the depth where a device has many multiprocessors
MANY = {"OXIDION_EMULATED_MULTIPROCESSORS": "20"}
HALF = "orth_dtype='bfloat16'"
CASES = [
    ("Muon", "p, lr=0.02, weight_decay=0.1, orth_dtype='float32'", MATRICES),
    ("Muon", f"p, lr=0.02, weight_decay=0.1, nesterov=True, {HALF}", LARGE),
    ("Muon", f"p, lr=0.02, orth_method='gram', cautious_wd=True, {HALF}", LARGE),
    ("Muon", f"p, lr=0.02, orth_method='standard', {HALF}", LONG),
    ("NorMuon", "p, lr=0.02, weight_decay=0.1, orth_dtype='float32'", MATRICES),
    ("NorMuon", f"p, lr=0.02, weight_decay=0.1, {HALF}", LARGE),
    ("Dion", "p, lr=0.02, weight_decay=0.1, rank_fraction=0.5", MATRICES),
    ("Dion", "p, lr=0.02, weight_decay=0.1, rank_fraction=0.25, power_iters=2", MATRICES),
    ("Dion2", "p, lr=0.02, weight_decay=0.1, fraction=0.5, orth_dtype='float32'", MATRICES),
    ("Dion2", f"p, lr=0.02, weight_decay=0.1, fraction=0.75, {HALF}", LARGE),
    ("NorDion2", "p, lr=0.02, weight_decay=0.1, fraction=0.5, orth_dtype='float32'", MATRICES),
    ("APOLLOAdamW", "p, lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=3", MATRICES),
    ("APOLLOMini", "p, lr=0.01, weight_decay=0.1, update_proj_gap=3", MATRICES),
    ("GaLoreAdamW", "p, lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=1000", MATRICES),
    ("Dion", "p, lr=0.02, rank_fraction=0.5, stochastic_rounding=True", MATRICES),
    ("NorDion2", "[{'params': p, 'min_quant_numel': 0}], lr=0.02, state_bits=8, strict=False", MATRICES),
]


@pytest.mark.parametrize(("name", "arguments", "shapes"), CASES)
def test_replays_equal_steps_with_settings_of_their_own(
    environment: dict[str, str], name: str, arguments: str, shapes: str
) -> None:
    run(
        {**environment, **MANY} if shapes == LONG else environment,
        CAPTURED,
        f"""
        dtype = torch.{"bfloat16" if "rounding" in arguments or "bits" in arguments else "float32"}
        make = lambda p: oxidion.{name}({arguments})
        ours, optimizer, expected, reference = pair(make, ({shapes}), dtype=dtype)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 9) for o in (optimizer, reference)]
        for step in range(8):
            gradients(ours, expected, step, keep={name in ("GaLoreAdamW", "APOLLOAdamW", "APOLLOMini")})
            if step == 5:
                for own in (optimizer, reference):
                    [group] = own.param_groups
                    group["weight_decay"] = 0.3
                    group["betas"] = (0.7, 0.9)
                    for key, value in (("mu", 0.8), ("muon_beta2", 0.7)):
                        if key in group:
                            group[key] = value
            launches = driver.emulator_launches()
            optimizer.step()
            assert (driver.emulator_launches() == launches) == (step > 2), step
            assert optimizer.captured == (step >= 2)
            reference.step()
            for schedule in schedules:
                schedule.step()
            assert_alike(ours, optimizer, expected, reference, step)
        [capture] = Capture.made
        assert capture.replays == 6
        assert capture.recording.launches > 0 and capture.recording.recorder.operations
        assert bool(driver.emulator_launches_of(b"symmetric_mma_total")) == {shapes == LONG}
        """,
    )


@pytest.mark.parametrize(
    ("made", "dtype"),
    [
        ("Muon(p, lr=0.02, orth_method='svd')", "float32"),
        ("APOLLOAdamW(p, lr=0.01, rank=4, stochastic_rounding=True)", "bfloat16"),
        ("APOLLOMini(p, lr=0.01, master_weights=True)", "bfloat16"),
    ],
)
def test_steps_that_no_replay_repeats_are_taken_directly(
    environment: dict[str, str], made: str, dtype: str
) -> None:
    run(
        environment,
        CAPTURED,
        f"""
        make = lambda p: oxidion.{made}
        ours, optimizer, expected, reference = pair(make, ({MATRICES}), dtype=torch.{dtype})
        for step in range(5):
            gradients(ours, expected, step, keep=False)
            optimizer.step()
            assert not optimizer.captured
            reference.step()
            assert_alike(ours, optimizer, expected, reference, step)
        """,
    )


def test_learning_rate_on_the_device_is_that_of_each_replay(environment: dict[str, str]) -> None:
    """Also where libtorch computes with it, and where another tensor takes its place."""
    run(
        environment,
        CAPTURED,
        f"""
        make = lambda p: oxidion.Dion(p, lr=torch.tensor(0.02), rank_fraction=0.5, capturable=True)
        ours, optimizer, expected, reference = pair(make, ({MATRICES}))
        for step in range(6):
            gradients(ours, expected, step, keep=False)
            for own in (optimizer, reference):
                own.param_groups[0]["lr"] = torch.tensor(0.02 / (step + 1))
            optimizer.step()
            assert optimizer.captured == (step >= 2)
            reference.step()
            assert_alike(ours, optimizer, expected, reference, step)
        """,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "p, lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=3",
        "p, lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=3, rotate_moments=True, svd='exact'",
        "p, lr=0.01, weight_decay=0.1, rank=4, update_proj_gap=3, proj_type='full', svd='random'",
    ],
)
@pytest.mark.parametrize("warmup", [2, 3])
def test_steps_with_a_new_basis_are_taken_outside_of_the_graph(
    environment: dict[str, str], arguments: str, warmup: int
) -> None:
    """Those between are replays; a step with a new basis that would be captured leaves that to the next."""
    run(
        environment,
        CAPTURED,
        f"""
        make = lambda p: oxidion.GaLoreAdamW({arguments})
        ours, optimizer, expected, reference = pair(make, ({MATRICES}), warmup={warmup})
        replayed = []
        for step in range(10):
            gradients(ours, expected, step, keep=True)
            for own in (optimizer, reference):
                own.param_groups[0]["lr"] = 0.01 / (step + 1)
            before = sum(capture.replays for capture in Capture.made)
            optimizer.step()
            if sum(capture.replays for capture in Capture.made) > before:
                replayed.append(step)
            reference.step()
            assert_alike(ours, optimizer, expected, reference, step)
        first = 2 if {warmup} == 2 else 4
        assert replayed == [step for step in range(first, 10) if step % 3], replayed
        assert optimizer.captured
        """,
    )


def test_staggered_bases_are_computed_outside_of_the_graph(environment: dict[str, str]) -> None:
    """Some matrix has a new basis in most of the steps: those are direct ones, the others replays."""
    run(
        environment,
        CAPTURED,
        f"""
        keys = dict(lr=0.01, rank=4, update_proj_gap=6, stagger=True)
        make = lambda p: oxidion.GaLoreAdamW(p, **keys)
        ours, optimizer, expected, reference = pair(make, ({MATRICES}))
        direct = []
        for step in range(14):
            gradients(ours, expected, step, keep=True)
            before = sum(capture.replays for capture in Capture.made)
            optimizer.step()
            if sum(capture.replays for capture in Capture.made) == before:
                direct.append(step)
            reference.step()
            assert_alike(ours, optimizer, expected, reference, step)
        print(direct)
        assert 0 in direct and len(direct) < 14
        """,
    )


def test_replays_without_new_arguments_have_other_numbers(environment: dict[str, str]) -> None:
    """The comparisons of the tests above notice a replay with the arguments of an earlier step."""
    run(
        environment,
        CAPTURED,
        f"""
        # What others need next to their operands is gone when the graph is replayed without `step`.
        make = lambda p: oxidion.Lion(p, lr=0.02, weight_decay=0.1)
        ours, optimizer, expected, reference = pair(make, ({MATRICES}))
        for step in range(5):
            gradients(ours, expected, step, keep=True)
            if step == 4:
                reference.param_groups[0]["lr"] = 0.01
                [capture] = Capture.made
                capture.replay()  # with the arguments of the step before, and these gradients
            else:
                optimizer.step()
            reference.step()
            alike = all(torch.equal(a, b) for a, b in zip(ours, expected))
            assert alike == (step < 4), step
        """,
    )
