"""What only a CUDA device has: streams, offsets beyond 2^31, several devices, the time of a first step."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import Parameter

import oxidion

from .device_steps import ALGORITHMS, CASES, gradients_of, optimizer_of, parameters_of

pytestmark = pytest.mark.cuda

Shapes = tuple[tuple[int, ...], ...]
ANY: Shapes = ((96, 64), (64, 200), (300, 300), (1, 7), (7, 1), (5,), (1000,), (3, 4, 5), (70_001,))


@pytest.fixture(autouse=True)
def _no_memory_is_left() -> Iterator[None]:
    yield
    gc.collect()


def made(shapes: Shapes, device: str) -> list[Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]


def give_gradients(params: list[Parameter]) -> None:
    generator = torch.Generator().manual_seed(100)
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator).to(param.device)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_step_runs_on_the_current_stream(algorithm: str) -> None:
    case = CASES[algorithm][-1]
    expected, params = (parameters_of(case, torch.float32, "cuda") for _ in range(2))
    [grads] = gradients_of(case, 1)
    for own in (expected, params):
        for param, grad in zip(own, grads, strict=True):
            param.grad = grad.to("cuda", param.dtype)
    optimizer_of(case, expected).step()
    optimizer = optimizer_of(case, params)
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


def test_offsets_beyond_two_to_the_31_are_reached() -> None:
    count = 2**31 + 2**15
    if torch.cuda.mem_get_info()[0] < 7 * count:
        pytest.skip("needs 15 GB of device memory")
    param = Parameter(torch.zeros(count, dtype=torch.bfloat16, device="cuda"))
    param.grad = torch.ones_like(param)
    oxidion.Lion([param], lr=0.5, weight_decay=0.0).step()
    assert bool((param.detach()[-10:] == -0.5).all())
    assert bool((param.detach()[:10] == -0.5).all())


def test_each_device_of_a_process_is_stepped() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    results = []
    for device in ("cuda:0", "cuda:1"):
        params = made(ANY, device)
        give_gradients(params)
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
