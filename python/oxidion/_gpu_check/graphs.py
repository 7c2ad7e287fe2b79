"""Compares steps that a CUDA graph replays with plain steps, and times both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oxidion._cuda import device as core
from oxidion._gpu_check.found import Found
from oxidion._gpu_check.parts import LARGE, MATRICES, Setting, difference, give_gradients, made
from oxidion._gpu_check.place import EMULATED, place
from oxidion.graph import CudaGraphOptimizer

WARM_UP, REPLAYS = 2, 5
BAR = 1e-6
"""The largest relative difference of updates: a replay launches what a plain step does."""
RATES = (0.01, 0.004, 0.02)
"""Learning rates that steps have in turn."""
STEPS, ROUNDS = 20, 3
"""Steps that are timed together, and how often."""
GRAPHS = {
    "AdamW": Setting("AdamW", {}, shapes=(*MATRICES, (1000,), (17,))),
    "Muon": Setting("Muon", {"orth_dtype": "bfloat16"}, shapes=LARGE),
    "Dion": Setting("Dion", {"rank_fraction": 0.25}, shapes=MATRICES),
}
"""Steps that are captured, by class."""
CAPTURABLE = ("AdamW",)
"""Classes whose steps are also captured in a graph of torch's."""

Captured = Callable[[Callable[[], object]], Callable[[], object]]
"""Captures what a function launches, and returns a function that replays it."""


def graph(number: str, name: str) -> Found:
    """Compares replays with plain steps of a class.

    Args:
        number: of the device, or "emulated", where torch captures nothing.
        name: of the class.
    """
    if number == EMULATED:
        return Found("LEFT_OUT", {}, "torch captures no graph on an emulated device")
    return compared(GRAPHS[name], place(number), captured_by_torch)


def captured_by_torch(work: Callable[[], object]) -> Callable[[], object]:
    """Captures what a function launches in a graph of torch's; nothing of it runs before the first replay."""
    graph_of_torch = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph_of_torch):
        work()
    return graph_of_torch.replay


def compared(setting: Setting, device: torch.device, capture: Captured) -> Found:
    """Compares and times replays of `CudaGraphOptimizer`, and of a graph of torch's where the class has it.

    Args:
        setting: of the steps.
        device: of the parameters.
        capture: captures a step in a graph of torch's.
    """
    params, plain = made(setting, device)
    others, inner = made(setting, device)
    graphed = CudaGraphOptimizer(inner, warmup_steps=WARM_UP)
    starts = [param.detach().clone() for param in params]
    off = 0.0
    for step in range(WARM_UP + REPLAYS):
        for own, optimizer in ((params, plain), (others, graphed)):
            give_gradients(own, step)
            optimizer.param_groups[0]["lr"] = RATES[step % len(RATES)]
            optimizer.step()
        if refusal := core.refusal_of_graphs(device):
            return Found("SKIP", {}, f"steps are not captured: {refusal}")
        if step >= WARM_UP and not graphed.captured:
            return Found("FAIL", {}, f"step {step} is not a replay of a graph")
        off = max(off, difference(_updates(others, starts), _updates(params, starts)))
    figures: dict[str, Any] = {"off": off, "bar": BAR}
    graph_ms, plain_ms = _milliseconds(graphed.step, device), _milliseconds(plain.step, device)
    graphed.release()
    figures.update(graph_ms=graph_ms, plain_ms=plain_ms, ratio=round(plain_ms / graph_ms, 2))
    if not off <= BAR:
        return Found("FAIL", figures, f"replayed updates differ by {off:.1e} from those of plain steps")
    if setting.cls in CAPTURABLE:
        figures["by_hand_off"] = off = by_hand(setting, device, capture)
        if not off <= BAR:
            return Found("FAIL", figures, f"updates of a graph of torch's differ by {off:.1e}")
    return Found("PASS", figures)


def by_hand(setting: Setting, device: torch.device, capture: Captured) -> float:
    """Returns the largest difference of updates that a graph of torch's replays from those of plain steps.

    The learning rate is a tensor on the device, which is filled before each step.
    """
    rate = torch.tensor(RATES[0], device=device)
    setting = replace(setting, keys={**setting.keys, "lr": rate, "capturable": True})
    params, plain = made(setting, device)
    others, optimizer = made(setting, device)
    starts = [param.detach().clone() for param in params]
    for own, each in ((params, plain), (others, optimizer)):
        give_gradients(own, 0)
        each.step()
    replay = capture(optimizer.step)
    off = 0.0
    for step in range(1, 1 + REPLAYS):
        rate.fill_(RATES[step % len(RATES)])
        give_gradients(params, step)
        plain.step()
        for param, other in zip(params, others, strict=True):
            assert param.grad is not None
            assert other.grad is not None
            other.grad.copy_(param.grad)  # its memory is that of the capture
        replay()
        off = max(off, difference(_updates(others, starts), _updates(params, starts)))
    return off


def _updates(params: list[Any], starts: list[Tensor]) -> list[Tensor]:
    """By how much parameters have moved, in float64 on the host."""
    return [
        param.detach().double().cpu() - old.double().cpu() for param, old in zip(params, starts, strict=True)
    ]


def _milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the least time of a call on the device, of several that follow each other."""
    best = float("inf")
    for _ in range(ROUNDS):
        if device.type != "cuda":
            started = time.perf_counter()
            work()
            spent = (time.perf_counter() - started) * 1e3
        else:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(device)
            first.record()
            for _ in range(STEPS):
                work()
            last.record()
            last.synchronize()
            spent = float(first.elapsed_time(last)) / STEPS
        best = min(best, spent)
    return round(best, 4)
