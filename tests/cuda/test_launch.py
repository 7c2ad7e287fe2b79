"""The launch path of the core, from a step in Python to kernels on a driver without a device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from .driver import needs_nvrtc, on_the_device, run

CHOSEN = [
    ("six_float32_updates", "algorithm/test_normed.py"),
    ("six_steps", "algorithm/test_eight_bit.py"),
    ("goes_right_direction and float32 and not scheduler", "conformance/test_torch_optim.py"),
    ("Muon or Lamb or CAME", "contract/test_gradients.py"),
]


@needs_nvrtc
def test_recorded_trajectories_are_followed(environment: dict[str, str]) -> None:
    passed, skipped = on_the_device(environment, "", "test_golden.py")
    assert passed > 10 * skipped


@needs_nvrtc
@pytest.mark.parametrize(("chosen", "place"), CHOSEN)
def test_results_equal_those_of_the_cpu(environment: dict[str, str], chosen: str, place: str) -> None:
    passed, skipped = on_the_device(environment, chosen, place)
    assert passed > skipped


@pytest.mark.slow
@pytest.mark.timeout(3600)
@needs_nvrtc
def test_all_results_equal_those_of_the_cpu(environment: dict[str, str]) -> None:
    """As above, all tests of the optimizers: a quarter of an hour."""
    passed, skipped = on_the_device(environment, "", "algorithm", "contract", "conformance")
    assert passed > 100 * skipped


@needs_nvrtc
def test_step_takes_as_few_launches_as_tables_hold(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        optimizer = oxidion.AdamW(parameters(*[(7,)] * 500))
        for _ in range(3):
            before = driver.emulator_launches()
            optimizer.step()
            launches = driver.emulator_launches() - before
            print(launches, driver.emulator_current_device())
        """,
    )
    # 500 jobs are a table of 338 and one of 162. Afterwards the thread has the context that it had before.
    assert said.splitlines() == ["2 -1"] * 3


@needs_nvrtc
def test_captured_step_is_repeated_by_its_replay(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        def lion():
            torch.manual_seed(1)
            return parameters((40, 30), (5,))
        expected, params = lion(), lion()
        reference, optimizer = [oxidion.Lion(p, lr=0.01, weight_decay=0.1) for p in (expected, params)]
        for _ in range(4):
            reference.step()
        optimizer.step()
        after_one = [param.clone() for param in params]
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() == 1
        assert all(torch.equal(a, b) for a, b in zip(params, after_one))
        for _ in range(3):
            assert driver.emulator_replay() == 0
        assert all(torch.equal(a, b) for a, b in zip(params, expected))
        """,
    )


@needs_nvrtc
@pytest.mark.parametrize("state_dict", [False, True])
def test_captured_adamw_counts_its_steps_on_the_device(environment: dict[str, str], state_dict: bool) -> None:
    run(
        environment,
        f"""
        def made():
            torch.manual_seed(1)
            return parameters((40, 30), (5,), ())
        expected, params = made(), made()
        settings = dict(lr=0.01, weight_decay=0.1, amsgrad=True)
        reference = oxidion.AdamW(expected, **settings)
        optimizer = oxidion.AdamW(params, **settings, capturable=True)
        for _ in range(6):
            reference.step()
        optimizer.step()
        optimizer.step()
        if {state_dict}:
            saved = optimizer.state_dict()
            optimizer = oxidion.AdamW(params, **settings, capturable=True)
            optimizer.load_state_dict(saved)
            optimizer.step()
        else:
            optimizer.step()
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() == 2  # one counts, one updates
        for _ in range(3):
            assert driver.emulator_replay() == 0
        assert all(float(own["step"]) == 6 for own in optimizer.state.values())
        for ours, theirs in zip(params, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        """,
    )


@needs_nvrtc
@pytest.mark.parametrize("name", ["NorMuon", "Dion2", "NorDion2", "APOLLOAdamW", "APOLLOMini"])
def test_captured_step_launches_what_every_step_launches(environment: dict[str, str], name: str) -> None:
    """No kernel has run yet. What libtorch does is not recorded here: it has run."""
    run(
        environment,
        f"""
        params = parameters((40, 30), (64, 30), (30, 64), (40, 30))
        optimizer = oxidion.{name}(params, weight_decay=0.1)
        optimizer.step()
        before = driver.emulator_launches()
        optimizer.step()
        usual = driver.emulator_launches() - before
        written = [*params, *(x for own in optimizer.state.values() for x in own.values())]
        if {name != "Dion2"}:
            written = [own["exp_avg" if "exp_avg" in own else "momentum"] for own in optimizer.state.values()]
        old = [x.detach().clone() for x in written]
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() == usual
        assert all(torch.equal(a, b) for a, b in zip(written, old) if a.numel() > 1)
        """,
    )


@needs_nvrtc
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("Lamb", "lr=0.01, weight_decay=0.1, max_grad_norm=1.0"),
        ("Lamb", "lr=0.01, weight_decay=0.1, debias='step'"),
        ("Adafactor", "weight_decay=0.1"),
        ("Adafactor", "lr=0.01, beta1=0.9, relative_step=False, scale_parameter=False"),
        ("CAME", "lr=0.01, weight_decay=0.1"),
    ],
)
def test_captured_step_has_norms_and_steps_of_each_replay(
    environment: dict[str, str], optimizer: str, settings: str
) -> None:
    run(
        environment,
        f"""
        def made():
            torch.manual_seed(1)
            return parameters((40, 30), (5,), (), (3, 9, 70))
        expected, params = made(), made()
        reference = oxidion.{optimizer}(expected, {settings})
        optimizer = oxidion.{optimizer}(params, {settings}, capturable=True)
        for _ in range(5):
            reference.step()
        optimizer.step()
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() > 0
        for _ in range(4):
            assert driver.emulator_replay() == 0
        assert all(float(own["step"]) == 5 for own in optimizer.state.values())
        for ours, theirs in zip(params, expected):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        """,
    )


@needs_nvrtc
def test_capture_before_the_first_step_is_refused_at_no_cost(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        params = parameters((4, 3))
        optimizer = oxidion.Lion(params)
        before = params[0].clone()
        driver.emulator_begin_capture()
        try:
            optimizer.step()
        except RuntimeError as error:
            print(error)
        assert driver.emulator_end_capture() == 0
        assert torch.equal(params[0], before)
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 1
        assert not torch.equal(params[0], before)
        """,
    )
    assert "take one step before the capture" in said


@needs_nvrtc
@pytest.mark.parametrize("shapes", [[(40, 9000)], [(32, 32)] * 70], ids=["long", "many"])
def test_muon_has_room_for_matrices_of_any_shape(environment: dict[str, str], shapes: list[object]) -> None:
    run(
        environment,
        f"""
        for orth_dtype in ("float32", "bfloat16", "float16"):
            params = parameters(*{shapes})
            for _ in range(2):
                oxidion.Muon(params, orth_dtype=orth_dtype).step()
            assert all(bool(param.isfinite().all()) for param in params)
        """,
    )


LAUNCHED = """
def polar(x):
    u, _, v = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ v

def launched(shape, count, kinds):
    '''How many kernels of each kind a step of Muon launches, whose updates are about polar factors.'''
    params = parameters(*[shape] * count)
    grads = [p.grad.clone() for p in params]
    before = [p.detach().clone() for p in params]
    keys = {"adjust_lr": None, "orth_method": "standard", "orth_dtype": "bfloat16"}
    made = oxidion.Muon(params, lr=1.0, weight_decay=0.0, **keys)
    start = [driver.emulator_launches_of(kind.encode()) for kind in kinds]
    made.step()
    found = [driver.emulator_launches_of(kind.encode()) - then for kind, then in zip(kinds, start)]
    for old, new, grad in zip(before, params, grads):
        update = (old - new.detach()).double()
        cosine = (update * polar(grad)).sum() / update.norm() / polar(grad).norm()
        assert cosine > 0.99, (shape, cosine)
    return found
"""


@needs_nvrtc
def test_matrices_of_a_shape_multiply_in_the_kernel_they_fill(
    environment: dict[str, str],
) -> None:
    """Tall ones too, whose short side is that of the products."""
    run(
        environment,
        LAUNCHED,
        """
        kinds = "symmetric_mma", "symmetric_wgmma", ""
        # The device has four multiprocessors. Warpgroups take aligned rows, with a tile for each of those.
        cases = ((136, 200), 1, 0), ((200, 136), 2, 1), ((304, 264), 1, 1), ((135, 200), 4, 0)
        for shape, count, by_groups in cases:
            mma, wgmma, everything = launched(shape, count, kinds)
            assert [mma, wgmma] == [10 * (1 - by_groups), 10 * by_groups], (shape, mma, wgmma)
            assert everything == 14  # with momentum, norm and division before and the update after
        """,
    )


@needs_nvrtc
def test_long_products_of_few_tiles_are_cut_along_the_depth(environment: dict[str, str]) -> None:
    """Of a device with 20 multiprocessors three tiles leave more than half without work."""
    run(
        {**environment, "OXIDION_EMULATED_MULTIPROCESSORS": "20"},
        LAUNCHED,
        """
        kinds = "symmetric_mma_part", "symmetric_mma_total", "symmetric_mma_bfloat16"
        # Five iterations: a product as deep as the matrix is long, and one as deep as it is high.
        cases = ((136, 600), 1, [5, 5, 5]), ((136, 600), 4, [0, 0, 10]), ((136, 500), 1, [0, 0, 10])
        for shape, count, expected in cases:
            assert launched(shape, count, kinds) == expected, (shape, count)
        """,
    )


@needs_nvrtc
@pytest.mark.parametrize(("tier", "expected"), [("auto", "['6', '6']"), ("libtorch", "['8', '4']")])
def test_buckets_hold_enough_matrices_to_fill_multiprocessors(
    environment: dict[str, str], tier: str, expected: str
) -> None:
    """Three tiles each: eight take two turns of 20 multiprocessors, four one more; six take one, twice."""
    run(
        {**environment, "OXIDION_EMULATED_MULTIPROCESSORS": "20", "OXIDION_CUDA": tier},
        f"""
        import re
        keys = {{"orth_method": "standard", "orth_dtype": "bfloat16", "max_batch_bytes": 1_250_000}}
        made = oxidion.Muon(parameters(*[(136, 136)] * 12), **keys)
        found = re.findall(r"(\\d+) × \\[136, 136\\]", str(made.plan()))
        assert str(found) == "{expected}", found
        """,
    )


@needs_nvrtc
def test_matrices_that_the_library_multiplies_faster_go_to_it(
    environment: dict[str, str],
) -> None:
    """Those of rows that start anywhere. Few tiles cannot be had on four multiprocessors."""
    run(
        {**environment, "OXIDION_CUDA": "auto", "OXIDION_SELF_CHECK": "0"},
        """
        for shape, count, expected in ((136, 200), 1, 10), ((135, 200), 4, 0):
            params = parameters(*[shape] * count)
            start = driver.emulator_launches_of(b"symmetric_mma")
            oxidion.Muon(params, orth_method="standard", orth_dtype="bfloat16").step()
            found = driver.emulator_launches_of(b"symmetric_mma") - start
            assert found == expected, (shape, found)
            assert all(bool(param.isfinite().all()) for param in params)
        """,
    )


def test_emulation_is_refused_where_the_driver_is_no_emulator() -> None:
    clean = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    text = """
from oxidion._cuda import device
try:
    device.prepare(emulated=True)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=False, env=clean
    )
    assert done.stdout.startswith("CUDA: "), done.stderr[-2000:]
