"""Steps on a CUDA device against the same steps on the CPU, and what a step there must not do."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import oxidion
from oxidion.graph import CudaGraphOptimizer
from support.asserts import update_relative_error

pytestmark = pytest.mark.cuda

Shapes = tuple[tuple[int, ...], ...]
MATRICES: Shapes = ((96, 64), (64, 200), (300, 300), (512, 640), (1, 7), (7, 1), (33, 65))
ANY: Shapes = (*MATRICES, (5,), (1000,), (3, 4, 5), (70_001,))
CASES: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], Shapes]] = {
    "adamw": (oxidion.AdamW, {"lr": 1e-2, "weight_decay": 0.1}, ANY),
    "adamw-amsgrad": (oxidion.AdamW, {"lr": 1e-2, "amsgrad": True}, ANY),
    "lion": (oxidion.Lion, {"lr": 1e-3, "weight_decay": 0.1}, ANY),
    "muon": (oxidion.Muon, {"lr": 2e-2, "weight_decay": 0.1, "orth_dtype": "float32"}, MATRICES),
    "muon-gram": (oxidion.Muon, {"lr": 2e-2, "orth_dtype": "float32", "orth_method": "gram"}, MATRICES),
    "muon-svd": (oxidion.Muon, {"lr": 2e-2, "orth_dtype": "float64", "orth_method": "svd"}, MATRICES[:3]),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
STEPS = 4


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    gc.collect()


def made(shapes: Shapes, dtype: torch.dtype, device: str) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def give_gradients(params: list[Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
        if param.grad is None:
            param.grad = gradient
        else:
            param.grad.copy_(gradient)


def updates(case: str, dtype: torch.dtype, device: str) -> list[tuple[Tensor, Tensor]]:
    """Before and after of every parameter, on the CPU."""
    build, settings, shapes = CASES[case]
    params = made(shapes, dtype, device)
    before = [param.detach().cpu().clone() for param in params]
    optimizer = build(params, **settings)
    for step in range(STEPS):
        give_gradients(params, step)
        optimizer.step()
    return list(zip(before, [param.detach().cpu() for param in params], strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_updates_equal_those_on_the_cpu(case: str, dtype: torch.dtype) -> None:
    settings = CASES[case][1]
    exact = dtype == torch.float64 and settings.get("orth_dtype", "float64") == "float64"
    tolerance = TOLERANCE[dtype] if exact or dtype == torch.float32 else TOLERANCE[torch.float32]
    for (before, on_cpu), (_, on_device) in zip(
        updates(case, dtype, "cpu"), updates(case, dtype, "cuda"), strict=True
    ):
        assert update_relative_error(on_device, before, on_cpu - before) <= tolerance, tuple(before.shape)


@pytest.mark.parametrize("orth_dtype", ["bfloat16", "float16"])
def test_half_precision_products_stay_near_the_polar_factor(orth_dtype: str) -> None:
    (param,) = made(((384, 640),), torch.float32, "cuda")
    optimizer = oxidion.Muon([param], lr=1.0, momentum=0.0, orth_dtype=orth_dtype, adjust_lr=None)
    before = param.detach().clone()
    give_gradients([param], 0)
    optimizer.step()
    singular = torch.linalg.svdvals((before - param.detach()).double())
    assert singular.min() > 0.7
    assert singular.max() < 1.3


@pytest.mark.parametrize("case", [name for name in CASES if name != "muon-svd"])
@pytest.mark.parametrize("rate_there", [False, True])
def test_step_waits_for_nothing(case: str, rate_there: bool) -> None:
    build, settings, shapes = CASES[case]
    params = made(shapes, torch.float32, "cuda")
    if rate_there and settings.get("lr", 1.0) is not None:
        settings = {**settings, "lr": torch.tensor(0.01, device="cuda"), "capturable": True}
    optimizer = build(params, **settings)
    give_gradients(params, 0)
    optimizer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", ["adamw", "muon"])
def test_step_runs_on_the_current_stream(case: str) -> None:
    build, settings, shapes = CASES[case]
    expected, params = made(shapes, torch.float32, "cuda"), made(shapes, torch.float32, "cuda")
    for own in (expected, params):
        give_gradients(own, 0)
    build(expected, **settings).step()
    optimizer = build(params, **settings)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # the gradients are ready after that, on this stream only
        for param in params:
            assert param.grad is not None
            param.grad.mul_(2.0).mul_(0.5)
        optimizer.step()
    stream.synchronize()
    for ours, theirs in zip(params, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("build", [oxidion.AdamW, oxidion.Lion, oxidion.Muon])
def test_captured_step_is_repeated_by_its_replay(build: Callable[..., Optimizer]) -> None:
    shapes: Shapes = ((40, 30), (5, 9))
    expected, params = made(shapes, torch.float32, "cuda"), made(shapes, torch.float32, "cuda")
    for own in (expected, params):
        give_gradients(own, 0)
    reference, optimizer = [build(own, lr=1e-2, capturable=True) for own in (expected, params)]
    for _ in range(4):
        reference.step()
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(params, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("case", [name for name in CASES if name != "muon-svd"])
def test_replays_are_steps_with_settings_and_gradients_of_their_own(case: str) -> None:
    build, settings, shapes = CASES[case]
    expected, params = made(shapes, torch.float32, "cuda"), made(shapes, torch.float32, "cuda")
    reference, optimizer = (
        build(expected, **settings),
        CudaGraphOptimizer(cast("oxidion.Muon", build(params, **settings)), warmup_steps=3),
    )
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 12) for o in (reference, optimizer)]
    for step in range(12):
        optimizer.zero_grad(set_to_none=True)
        before = [param.detach().clone() for param in expected]
        for own in (expected, params):
            give_gradients(own, step)
        reference.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.captured == (step >= 3)
        for ours, theirs, old in zip(params, expected, before, strict=True):
            assert update_relative_error(ours.detach(), old, theirs.detach() - old) <= 1e-5
    optimizer.release()
    assert not optimizer.captured


def test_offsets_beyond_two_to_the_31_are_reached() -> None:
    count = 2**31 + 2**15
    if torch.cuda.mem_get_info()[0] < 7 * count:
        pytest.skip("needs 15 GB of device memory")
    param = Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.ones_like(param)
    oxidion.Lion([param], lr=0.5, weight_decay=0.0).step()
    assert bool((param.detach()[-10:] == -0.5).all())
    assert bool((param.detach()[:10] == -0.5).all())


def test_parameters_on_cpu_and_device_are_refused() -> None:
    params = [*made(((4, 3),), torch.float32, "cpu"), *made(((4, 3),), torch.float32, "cuda")]
    give_gradients(params, 0)
    with pytest.raises(ValueError, match="on one device"):
        oxidion.Lion(params).step()


def test_each_device_of_a_process_is_stepped() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    results = []
    for device in ("cuda:0", "cuda:1"):
        params = made(ANY, torch.float32, device)
        give_gradients(params, 0)
        oxidion.AdamW(params).step()
        results.append([param.detach().cpu() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


FIRST = """
import time, torch, oxidion
param = torch.nn.Parameter(torch.randn(256, 256, device="cuda"))
param.grad = torch.randn_like(param)
optimizer = oxidion.AdamW([param])
torch.cuda.synchronize()
start = time.perf_counter()
optimizer.step()
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def test_first_step_takes_less_than_half_a_second() -> None:
    seconds = [
        float(
            subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(2)
    ]
    assert seconds[1] < 0.5
