"""Speed of steps against a copy of as many bytes, torch's optimizers and cuBLAS."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import oxidion
from oxidion._cuda import tuning
from oxidion._cuda.self_check import GROUPS
from oxidion._gpu_check import products
from oxidion._gpu_check.found import Found
from oxidion._gpu_check.place import ONLY_90, lacks_groups, place


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(work: Callable[[], Any], device: torch.device, rounds: int = 5) -> tuple[float, float]:
    """Returns the least seconds of some work on the device and of the host."""
    best = [float("inf")] * 2
    for _ in range(rounds if device.type == "cuda" else 1):
        _wait(device)
        started = time.perf_counter()
        work()
        host = time.perf_counter() - started
        _wait(device)
        best = [min(best[0], time.perf_counter() - started), min(best[1], host)]
    return best[0], best[1]


def _judged(device: torch.device, figures: dict[str, Any], is_fast: bool, reason: str) -> Found:
    """Returns SLOW with a reason if a bar is missed; an emulated device has no bar."""
    slow = not is_fast and device.type == "cuda"
    return Found("SLOW" if slow else "PASS", figures, reason if slow else "")


def _against_torch(device: torch.device, times: dict[str, float], **figures: float) -> Found:
    """Returns the outcome of a race of "ours" against "torch"."""
    ratio = round(times["torch"] / times["ours"], 2)
    return _judged(device, {**figures, "torch_over_ours": ratio}, ratio >= 1, f"{ratio} of torch's rate")


def elementwise(number: str) -> Found:
    """Times AdamW and Lion against a copy of as many bytes."""
    device = place(number)
    is_real = device.type == "cuda"
    count = min(1 << 28, torch.cuda.mem_get_info(device)[0] // 40) if is_real else 1000
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    copied, _ = _seconds(partial(target.copy_, source), device)
    rate = 8 * count / copied
    del source, target
    figures: dict[str, Any] = {"copy_GB_per_s": round(rate / 1e9, 1)}
    for name, moved in (("AdamW", 28), ("Lion", 20)):
        param = nn.Parameter(torch.zeros(count, device=device))
        param.grad = torch.ones_like(param)
        optimizer = getattr(oxidion, name)([param], lr=1e-3)
        optimizer.step()
        spent, _ = _seconds(optimizer.step, device)
        figures[f"{name}_of_copy"] = round(moved * count / spent / rate, 3)
    low = min(figures["AdamW_of_copy"], figures["Lion_of_copy"])
    return _judged(device, figures, low >= 0.85, f"{low} of a copy, 0.85 at least")


def host(number: str) -> Found:
    """Times the host in a step of many small tensors, against torch's fused AdamW."""
    device = place(number)
    count, times = 4000 if device.type == "cuda" else 8, dict[str, float]()
    made_by: dict[str, Callable[..., Any]] = {
        "ours": oxidion.AdamW,
        "torch": partial(torch.optim.AdamW, fused=True),
    }
    for name, make in made_by.items():
        params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(count)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make(params, lr=1e-3)
        optimizer.step()
        times[name] = _seconds(optimizer.step, device)[1]
    return _against_torch(device, times, host_us_per_param=round(times["ours"] / count * 1e6, 2))


def muon(number: str) -> Found:
    """Times Muon on matrices of a model of a billion parameters against torch.optim.Muon."""
    device = place(number)
    if not hasattr(torch.optim, "Muon"):
        return Found("SKIP", {}, "this torch has no torch.optim.Muon")
    shapes = [(2048, 2048)] * 4 + [(8192, 2048)] * 2 + [(2048, 8192)]
    if device.type != "cuda":
        shapes = [(32, 48)]
    times = {}
    for name, cls in (("ours", oxidion.Muon), ("torch", torch.optim.Muon)):
        params = [nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16)) for s in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = cls(params, lr=1e-3)
        optimizer.step()
        times[name] = _seconds(optimizer.step, device)[0]
    return _against_torch(device, times, step_ms=round(times["ours"] * 1e3, 2))


def symmetric_products(number: str, source: str) -> Found:
    """Times symmetric products by the kernels of one source against cuBLAS, in all classes of sizes."""
    device = place(number)
    if source == GROUPS[0] and lacks_groups(device):
        return Found("SKIP", {}, ONLY_90)
    names = list(dict.fromkeys([GROUPS[1], source]))  # the other one takes what is too small for this one
    ratios = products.run(number, names)
    found = [ratio for ratio in ratios if ratio is not None]
    won = sum(ratio >= tuning.MARGIN for ratio in found)
    figures = {
        "classes": len(found),
        "faster": won,
        "best": max(found),
        "worst": min(found),
        "ratios": ratios,
    }
    return _judged(device, figures, won > 0, "cuBLAS is faster everywhere")


SPEED: dict[str, Callable[[str], Found]] = {
    "elementwise": elementwise,
    "host": host,
    "Muon": muon,
    **{f"products by {name}": partial(symmetric_products, source=name) for name in reversed(GROUPS)},
}
