"""Rows of the check: versions, loading, kernels against libtorch, classes against the CPU."""

from __future__ import annotations

import ctypes
import os
import warnings
from dataclasses import replace
from typing import Any

import torch

import oxidion
from oxidion._core.env import env_report
from oxidion._cuda import device as core
from oxidion._cuda.self_check import GROUPS, SOURCES
from oxidion._gpu_check import first, graphs, speed
from oxidion._gpu_check.found import Found
from oxidion._gpu_check.parts import (
    CLASSES,
    GROUPED,
    KERNELS,
    LOOSER,
    STEPS,
    VERIFIED,
    Setting,
    compared,
    difference,
    give_gradients,
    made,
    numbers,
    steps,
)
from oxidion._gpu_check.place import EMULATED, OFF, ONLY_90, lacks_groups, place
from oxidion._oxidion import load_sources, source_states

REPEATS = 3
"""Repetitions of a setting whose bits must be equal."""
EMULATED_STEPS, EMULATED_SHAPES = 5, ((72, 64), (64, 72), (33, 33), (16, 8))
"""Steps and shapes of a class where the device is emulated, which takes a thousand times as long."""
EMULATED_FIRST = 280.0
"""Seconds that both processes of first steps have there."""


def driver_version() -> str:
    """Version of CUDA that the driver has, as "13.0"; empty where there is no driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    number = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(number)):
        return ""
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def facts(number: str) -> dict[str, Any]:
    """Facts of the device and of what is installed, without names of hosts, users or folders.

    ``gpus`` is the number of devices: 0 if torch finds none, or not the one with this number.
    """
    found: dict[str, Any] = {
        "oxidion": oxidion.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "driver": driver_version(),
        "tier": core.tier(),
        "gpu": "",
        "capability": "",
        "sms": 0,
        "memory": 0,
        "gpus": 0,
    }
    if number == EMULATED:
        return {**found, "gpu": EMULATED, "gpus": 1}
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not (number.isdigit() and int(number) < count):
        return {**found, "gpus": count}
    properties = torch.cuda.get_device_properties(int(number))
    return {
        **found,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory": properties.total_memory,
        "gpus": count,
    }


def env(number: str) -> Found:
    """A product of torch is right, and what is installed."""
    device = place(number)
    a, b = numbers((64, 64), 1.0), numbers((64, 64), 2.0)
    product = (a.float().to(device) @ b.float().to(device)).double().cpu()
    off = float((product - a @ b).norm() / (a @ b).norm())
    lines = [line for line in env_report().splitlines() if not line.startswith(("library", "platform"))]
    status = "PASS" if off < 1e-2 else "FAIL"  # TensorFloat-32 has eleven bits
    return Found(
        status, {"product": off, "report": lines}, "" if status == "PASS" else "a product of torch is wrong"
    )


def load(number: str, source: str) -> Found:
    """Loads one source of kernels by itself: from where its machine code comes, and the seconds."""
    device = place(number)
    if source == GROUPS[0] and lacks_groups(device):
        return Found("SKIP", {}, ONLY_90)
    core.compute_by("compare")
    states = load_sources(device.index or 0, 0, [source])
    ((_, state, origin, seconds, reason),) = (found for found in states if found[0] == source)
    figures = {"from": origin or "nowhere", "load_s": round(seconds, 3)}
    return Found("PASS" if state == "loaded" else "FAIL", figures, reason or "")


def kernels(number: str, name: str, repeats: int = REPEATS) -> Found:
    """Compares steps of one setting, by the sources in its name, with repetitions and with libtorch.

    Other sources are used where they can be loaded: one that cannot fails the settings of its own name.
    """
    device, setting = place(number), KERNELS[name]
    if (setting.tiled or setting is GROUPED) and lacks_groups(device):
        return Found("SKIP", {}, ONLY_90)
    ordinal, own = device.index or 0, [word for word in name.split() if word in SOURCES]
    core.compute_by("compare")
    load_sources(ordinal, 0, own)
    off, reason = compared(name, device, "compare", repeats if device.type == "cuda" else min(repeats, 1))
    unused = [
        f"{source}: {why or state}"
        for source, state, _, _, why in source_states(ordinal)
        if source in own and state != "loaded"
    ]
    reason = "; ".join(unused) or reason
    return Found("FAIL" if reason else "PASS", {"off": off, "bar": setting.bar}, reason)


def classes(number: str, name: str) -> Found:
    """Compares steps of a class with the CPU's in every kind of storage."""
    figures = dict[str, Any]()
    count = EMULATED_STEPS if number == EMULATED else STEPS
    settings = CLASSES[name]
    if number == EMULATED:
        settings = {kind: replace(setting, shapes=EMULATED_SHAPES) for kind, setting in settings.items()}
    # Before the device is there: where it is emulated, memory of the host counts as its own afterwards.
    on_cpu = {kind: steps(setting, torch.device("cpu"), count) for kind, setting in settings.items()}
    device = place(number)
    for kind, setting in settings.items():
        reason = _class(device, setting, kind, figures)
        if not reason:
            off = difference(steps(setting, device, count), on_cpu[kind])
            figures[f"{kind}_cpu"] = off
            # Directions of rounding size may turn, and moments in one byte are rounded once more.
            reason = "" if off <= 0.3 else f"{count} steps differ by {off:.1e} from those of the CPU"
        if reason:
            return Found("FAIL", figures, f"{kind}: {reason}")
    return Found("PASS", figures)


def _class(device: torch.device, setting: Setting, kind: str, figures: dict[str, Any]) -> str:
    """Returns what is wrong with `verify`, memory or waiting; empty if nothing is."""
    params, optimizer = made(setting, device)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    error = max(float(row["update_error"]) for row in optimizer.verify())
    figures[kind] = error
    if not error <= max(VERIFIED[setting.dtype], LOOSER.get(setting.cls, -1.0)):
        return f"verify() finds an error of {error:.1e}"
    optimizer.step()
    if device.type != "cuda":
        return ""
    before = torch.cuda.memory_allocated(device)
    waits = setting.waits or core.tier() == "libtorch" or bool(os.environ.get(OFF))
    for step in range(2, STEPS):
        give_gradients(params, step)
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.memory_allocated(device) - before
    return f"{grown} bytes more are allocated after {STEPS} steps than after 2" if grown > 0 else ""


def answers(number: str) -> Found:
    """Checks that the device computes: it is run after a part has crashed or hung."""
    device = place(number)
    total = float(torch.ones(1000, device=device).sum())
    return Found(
        "PASS" if total == 1000 else "FAIL", {"sum": total}, "" if total == 1000 else "1000 is right"
    )


def run(row: int, name: str, number: str, repeats: int = REPEATS) -> Found:
    """Runs a part that needs nothing but this process."""
    warnings.simplefilter("ignore")
    if row == 1:
        return env(number)
    if row == 2:
        return load(number, name)
    if row == 3:
        return kernels(number, name, repeats)
    if row == 4:
        return classes(number, name)
    if row == 8:
        return first.first(number, EMULATED_FIRST if number == EMULATED else first.LIMIT)
    if row == 9:
        return graphs.graph(number, name)
    return speed.SPEED[name](number)
