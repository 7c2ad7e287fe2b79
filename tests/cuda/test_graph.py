"""Steps as replays of a captured graph, on a driver without a device."""

from __future__ import annotations

import pytest
import torch

import oxidion
from oxidion.graph import CudaGraphOptimizer

from .driver import needs_nvrtc, run

pytestmark = needs_nvrtc

EMULATED = """
import contextlib
from oxidion._cuda import replay
from oxidion.graph import CudaGraphOptimizer

class Capture:
    made = 0

    def __init__(self, device, error_mode):
        Capture.made += 1
        self.replays = 0

    def on_stream(self):
        return contextlib.nullcontext()

    def record(self, work):
        driver.emulator_begin_capture()
        try:
            work()
        finally:
            driver.emulator_end_capture()

    def handle(self):
        return 1

    def replay(self):
        assert driver.emulator_replay() == 0

    def release(self):
        pass

replay.Capture = Capture

def pair(make, *shapes, warmup=2, dtype=torch.float32):
    torch.manual_seed(1)
    ours = parameters(*shapes, dtype=dtype)
    expected = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    return ours, CudaGraphOptimizer(make(ours), warmup_steps=warmup), expected, make(expected)

def gradients(ours, expected, seed):
    torch.manual_seed(seed)
    for one, other in zip(ours, expected):
        other.grad = torch.randn_like(other)
        one.grad = other.grad.clone()
"""


def emulated(environment: dict[str, str], code: str) -> str:
    return run(environment, EMULATED, code)


MAKERS = [
    "oxidion.AdamW(p, lr=0.01)",
    "oxidion.AdamW(p, lr=0.01, weight_decay=0.1, amsgrad=True, capturable=True)",
    "oxidion.Lion(p, lr=0.01, weight_decay=0.1)",
    "oxidion.Lamb([{'params': p, 'min_quant_numel': 0}], lr=0.01, state_bits=8)",
    "oxidion.CAME([{'params': p, 'min_quant_numel': 0}], lr=0.01, state_bits=8)",
    "oxidion.AdamW(p, lr=0.01, state_dtype=torch.float16)",
    "oxidion.AdEMAMix(p, lr=0.01, state_dtype=torch.bfloat16)",
]


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replays_are_steps_with_their_own_settings_and_gradients(
    environment: dict[str, str], make: str, dtype: str
) -> None:
    emulated(
        environment,
        f"""
        ours, optimizer, expected, reference = pair(lambda p: {make}, (40, 30), (5,), (), dtype=torch.{dtype})
        torch.optim.lr_scheduler.CosineAnnealingLR(reference, 9)
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 9) for o in (optimizer, reference)]
        for step in range(8):
            gradients(ours, expected, step)
            if step == 5:
                for own in (optimizer, reference):
                    own.param_groups[0]["weight_decay"] = 0.3
                    own.param_groups[0]["betas"] = (0.7, 0.9, 0.8)[: len(own.param_groups[0]["betas"])]
            before = driver.emulator_launches()
            optimizer.step()
            assert (driver.emulator_launches() == before) == (step > 2)
            assert optimizer.captured == (step >= 2)
            reference.step()
            for schedule in schedules:
                schedule.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, expected)), step
            optimizer.zero_grad()
        assert driver.emulator_updates() > 0
        assert optimizer.param_groups[0]["step"] == 8
        for one, other in zip(ours, expected):
            for name, value in reference.state[other].items():
                assert torch.equal(optimizer.state[one][name], value), name
        """,
    )


def test_step_without_a_gradient_is_refused_and_changes_nothing(environment: dict[str, str]) -> None:
    said = emulated(
        environment,
        """
        ours, optimizer, expected, reference = pair(oxidion.Lion, (4, 3), (5,), warmup=1)

        def refused():
            before, count = [p.clone() for p in ours], optimizer.param_groups[0]["step"]
            try:
                optimizer.step()
            except RuntimeError as error:
                print(error)
            assert all(torch.equal(a, b) for a, b in zip(ours, before))
            assert optimizer.param_groups[0]["step"] == count

        optimizer.step()
        grad, ours[1].grad = ours[1].grad, None
        refused()
        assert not optimizer.captured
        ours[1].grad = grad
        optimizer.step()
        assert optimizer.captured
        ours[1].grad = None
        refused()
        optimizer.release()
        optimizer.step()  # warm-up again
        assert not optimizer.captured
        """,
    )
    first, second = said.splitlines()
    assert "parameter 1" in first
    assert "call release()" in second


def test_changed_optimizer_is_refused_until_release(environment: dict[str, str]) -> None:
    said = emulated(
        environment,
        """
        ours, optimizer, expected, reference = pair(oxidion.AdamW, (4, 3), warmup=1)
        for step in range(3):
            optimizer.step()
        saved = optimizer.state_dict()
        optimizer.optimizer.load_state_dict(saved)
        before = ours[0].clone()
        try:
            optimizer.step()
        except RuntimeError as error:
            print(error)
        assert torch.equal(ours[0], before)
        optimizer.load_state_dict(saved)
        assert not optimizer.captured
        for step in range(3):
            optimizer.step()
        assert optimizer.captured and Capture.made == 2
        optimizer.add_param_group({"params": parameters((3,))})
        assert not optimizer.captured and len(optimizer.param_groups) == 2
        """,
    )
    assert "call release()" in said


def test_failed_capture_leaves_no_graph(environment: dict[str, str]) -> None:
    emulated(
        environment,
        """
        ours, optimizer, expected, reference = pair(oxidion.Lion, (4, 3), warmup=1)
        optimizer.step()
        record = Capture.record
        def fail(self, work):
            record(self, work)
            raise MemoryError("full")
        Capture.record = fail
        try:
            optimizer.step()
            raise AssertionError
        except MemoryError:
            pass
        assert not optimizer.captured
        try:
            optimizer.step()
            raise AssertionError
        except oxidion.PoisonedOptimizer:
            pass
        """,
    )


def test_scaler_closure_and_hooks_work_as_without_a_graph(environment: dict[str, str]) -> None:
    emulated(
        environment,
        """
        ours, optimizer, expected, reference = pair(oxidion.AdamW, (4, 3), warmup=1)
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append("outer"))
        optimizer.optimizer.register_step_post_hook(lambda *_: calls.append("inner"))
        for step in range(6):
            gradients(ours, expected, step)
            scale = 2.0 ** step
            ours[0].grad *= scale
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.tensor(float(step == 4))
            loss = optimizer.step(lambda: step)
            del optimizer.grad_scale, optimizer.found_inf
            assert loss == step
            if step != 4:
                reference.step()
            assert torch.equal(ours[0], expected[0]), step
        assert calls == ["inner", "outer"] * 6
        """,
    )


def test_launches_between_products_stay_as_they_were_captured(environment: dict[str, str]) -> None:
    # libtorch's products run on the host here, so a replay cannot repeat them: it must not run them either.
    emulated(
        environment,
        """
        make = lambda p: oxidion.Muon(p, orth_dtype="bfloat16")
        ours, optimizer, expected, reference = pair(make, (200, 160))
        for step in range(3):
            optimizer.step()
        before = [ours[0].clone(), *(s.clone() for s in optimizer.state[ours[0]].values())]
        Capture.replay = lambda self: None
        launches, updates = driver.emulator_launches(), driver.emulator_updates()
        optimizer.step()
        # The gradient goes in, its norm and the update come out: the orthonormalization is as it was.
        assert driver.emulator_launches() == launches and driver.emulator_updates() == updates + 3
        after = [ours[0], *optimizer.state[ours[0]].values()]
        assert all(torch.equal(a, b) for a, b in zip(before, after))
        """,
    )


def test_gradients_that_libtorch_multiplies_have_to_stay(environment: dict[str, str]) -> None:
    said = emulated(
        environment,
        """
        make = lambda p: oxidion.APOLLOAdamW(p, rank=4)
        ours, optimizer, expected, reference = pair(make, (64, 32), warmup=1)
        Capture.replay = lambda self: None  # the emulated graph lacks the products
        for step in range(3):
            optimizer.step()
        assert optimizer.captured
        before, count = ours[0].clone(), optimizer.param_groups[0]["step"]
        ours[0].grad = ours[0].grad.clone()
        try:
            optimizer.step()
        except RuntimeError as error:
            print(error)
        assert torch.equal(ours[0], before)
        assert optimizer.param_groups[0]["step"] == count
        """,
    )
    assert "call release()" in said


def test_bad_arguments_are_refused() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(ValueError, match="warmup_steps"):
        CudaGraphOptimizer(oxidion.Lion([param]), warmup_steps=0)
    with pytest.raises(TypeError, match="oxidion"):
        CudaGraphOptimizer(torch.optim.SGD([param]))  # type: ignore[arg-type]
    optimizer = CudaGraphOptimizer(oxidion.Lion([param]), warmup_steps=1)
    optimizer.step()
    with pytest.raises(RuntimeError, match="CUDA device"):
        optimizer.step()


FILLED = """
import threading
from oxidion import _oxidion

def take():
    for size in range(1, 600):
        taken.extend(torch.full((size,), float("nan"), dtype=torch.float64) for _ in range(3))

def replay(self):
    if early:
        _oxidion.Session.drop_scratch()
    take()
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    assert driver.emulator_replay() == 0

Capture.replay, taken = replay, []
shapes = (40, 30), (5,), (300, 20)
ours, optimizer, expected, reference = pair(lambda p: oxidion.Lamb(p, lr=0.01), *shapes)
for step in range(6):
    gradients(ours, expected, step)
    optimizer.step()
    reference.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected))
assert optimizer.captured
assert all(bool(one.isnan().all()) for one in taken)
"""


def test_scratch_of_a_walk_is_kept_until_the_replay_is_launched(environment: dict[str, str]) -> None:
    """Between the walk and the launch this thread and another one take memory and fill it."""
    emulated(environment, f"early = False\n{FILLED}")


def test_scratch_returned_early_is_written_by_the_replay(environment: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        emulated(environment, f"early = True\n{FILLED}")
