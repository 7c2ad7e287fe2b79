"""Parts of the check, each run in a process of its own."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import oxidion
from oxidion._core.base import OxOptimizer
from oxidion._core.env import env_report
from oxidion._cuda import device as core
from oxidion._cuda import tuning
from oxidion._gpu_check import products
from oxidion._gpu_check.place import EMULATED, place
from oxidion._oxidion import exchange_on_device, symmetric_product_on_device

STEPS = 20
GUARD = 64
"""Elements before and behind each tensor, which nothing may write."""


@dataclass(frozen=True)
class Found:
    """Outcome of a part.

    Attributes:
        status: "PASS", "FAIL", "SLOW" or "SKIP".
        figures: what it measured, by name.
        reason: what was wrong, or why it was left out.
    """

    status: str
    figures: dict[str, Any]
    reason: str = ""


@dataclass(frozen=True)
class Setting:
    """Steps of one class.

    Attributes:
        cls: name of the class.
        keys: arguments.
        dtype: of parameters and gradients.
        shapes: of the parameters.
        bar: the largest relative difference of an update, in the Frobenius norm, from libtorch's.
        waits: whether libtorch or the class itself waits for the device in a step.
    """

    cls: str
    keys: dict[str, Any]
    dtype: torch.dtype = torch.float32
    shapes: tuple[tuple[int, ...], ...] = ((300, 257), (257, 300), (129, 129), (64, 8), (1000,), (17,))
    bar: float = 1e-5
    waits: bool = False
    tiled: bool = False
    """True for so many matrices that each multiprocessor has a tile of their products."""
    wide: tuple[tuple[int, ...], ...] = ()
    """Shapes beside the others on a real device: an emulated one would take too long."""
    group: dict[str, Any] = field(default_factory=dict)
    """Keys of the group."""


MATRICES = ((300, 257), (257, 300), (129, 129), (64, 8))
SMALL = ((160, 96), (96, 160))
"""Enough elements for states of 8 bits."""
LARGE = ((256, 256), (257, 300), (1040, 257), (300, 1000))
"""Long enough, one of them, to be cut along the depth where a device has many multiprocessors."""
TILES = 6
"""Tiles of the product of a matrix of 257 to 384 rows."""
ROUNDED = 2.0**-7
"""Twice the unit in the last place of bfloat16, in which products are rounded in another order."""

GROUPED = Setting("", {}, bar=ROUNDED)
"""Stands for products by the instructions of warpgroups, of sizes and in grids that steps do not choose."""
EXCHANGE = Setting("", {}, bar=0.0)
"""Stands for what ranks send each other, which is exact."""

_EIGHT, _ROUNDED = {"state_bits": 8}, {"stochastic_rounding": True}
_FLOAT32 = {"orth_dtype": "float32"}
_SPHERE: dict[str, Any] = {"weight_norm": "hyperball", "weight_decay": 0.0}
_HELD = {**_FLOAT32, **_SPHERE}


def _coded(cls: str, keys: dict[str, Any], bar: float = 1e-3, *, waits: bool = False) -> Setting:
    return Setting(cls, {**keys, **_EIGHT}, shapes=SMALL, bar=bar, waits=waits)


def _rounded(cls: str, keys: dict[str, Any], **more: Any) -> Setting:
    # A number that lies between two others may be rounded to either.
    return Setting(cls, {**keys, **_ROUNDED}, torch.bfloat16, SMALL, bar=2 * ROUNDED, **more)


def _narrow(cls: str, group: dict[str, Any]) -> Setting:
    # Of some 100000 averages a few lie so near to a threshold that they may go to either side, 1/128 apart,
    # which is several updates.
    return Setting(cls, {}, shapes=SMALL, bar=0.25, group={**group, "average_dtype": "bfloat16"})


KERNELS: dict[str, Setting] = {
    # Roots and quotients of devices are off by two units in the last place.
    "updates.cu AdamW": Setting("AdamW", {}),
    "updates.cu AdEMAMix": Setting("AdEMAMix", {}),
    "updates.cu Lion": Setting("Lion", {}),
    "updates.cu averages": Setting("AdamW", {}, group={"average": "ema", "average_decay": 0.5}),
    "updates.cu Schedule-Free": Setting("AdamW", {}, group={"average": "schedule_free"}),
    "updates.cu counters": Setting("AdamW", {"capturable": True}),
    "updates.cu float64": Setting("AdamW", {"amsgrad": True}, torch.float64, bar=1e-12),
    "updates.cu Dion of two types": Setting(
        "Dion", {"rank_fraction": 0.25, **_FLOAT32}, torch.bfloat16, SMALL, bar=2 * ROUNDED
    ),
    # Bases, which the first gradient makes, are libtorch's on either side.
    "updates.cu SOAP": Setting("SOAP", {}, shapes=SMALL, bar=1e-2, waits=True),
    "updates.cu SOAPMuon": Setting("SOAPMuon", _FLOAT32, shapes=SMALL, bar=1e-2, waits=True),
    "coded.cu AdamW": Setting("AdamW", _EIGHT, bar=1e-3),
    "coded.cu AMSGrad": _coded("AdamW", {"amsgrad": True}),
    "coded.cu AdEMAMix": _coded("AdEMAMix", {}),
    "coded.cu Lion": _coded("Lion", {}),
    "coded.cu Dion2": _coded("Dion2", _FLOAT32),
    "coded.cu SOAP": _coded("SOAP", {}, 1e-2, waits=True),
    "coded.cu SOAPMuon": _coded("SOAPMuon", _FLOAT32, 1e-2, waits=True),
    "coded.cu GaLore": _coded("GaLoreAdamW", {"rank": 32, "update_proj_gap": 2}, 1e-2, waits=True),
    "coded.cu rounded Muon": _rounded("Muon", _FLOAT32),
    "coded.cu rounded SOAP": _rounded("SOAP", {}, waits=True),
    "coded.cu rounded averages": _rounded("AdamW", {}, group={"average": "ema", "average_decay": 0.5}),
    "coded.cu averages in bfloat16": _narrow("AdamW", {"average": "ema", "average_decay": 0.5}),
    "coded.cu Schedule-Free in bfloat16": _narrow("AdamW", {"average": "schedule_free"}),
    "coded_sums.cu Lamb": Setting("Lamb", _EIGHT, bar=1e-3),
    "coded_sums.cu Muon": _coded("Muon", _FLOAT32),
    "coded_sums.cu rounded MuonH": _rounded("Muon", _HELD),
    "sums.cu totals.cu factors.cu Lamb": Setting("Lamb", {}),
    "sums.cu Lamb of two types": Setting("Lamb", {}, torch.bfloat16, SMALL, bar=2 * ROUNDED),
    "rows.cu means.cu totals.cu Adafactor": Setting(
        "Adafactor", {"relative_step": False, "lr": 0.01}, bar=1e-4
    ),
    "rows.cu CAME": Setting("CAME", {}, bar=1e-4),
    "copies.cu messages.cu exchange": EXCHANGE,
    "symmetric_mma.cu Muon": Setting("Muon", {"orth_dtype": "bfloat16"}, shapes=LARGE, bar=4 * ROUNDED),
    "symmetric_wgmma.cu Muon": Setting(
        "Muon", {"orth_dtype": "bfloat16"}, shapes=((304, 312),), bar=4 * ROUNDED, tiled=True
    ),
    "sums.cu totals.cu MuonH": Setting("Muon", _HELD, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu AdamW of held norms": Setting("AdamW", _SPHERE, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu Dion of held norms": Setting(
        "Dion", {"rank_fraction": 0.25, **_SPHERE}, shapes=SMALL, bar=1e-3
    ),
    "sums.cu totals.cu Dion2 of held norms": Setting("Dion2", _HELD, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu SOAP of held norms": Setting("SOAP", _SPHERE, shapes=SMALL, bar=1e-2, waits=True),
    "rows.cu Adafactor with momentum": Setting(
        "Adafactor", {"relative_step": False, "beta1": 0.9, "lr": 0.01}, bar=1e-4
    ),
    "symmetric_wgmma.cu products": GROUPED,
    "neurons.cu NorMuon": Setting("NorMuon", {"orth_dtype": "float32"}, shapes=MATRICES, bar=1e-3),
    "select.cu Dion2": Setting("Dion2", {"orth_dtype": "float32"}, shapes=MATRICES, bar=1e-3),
    "columns.cu gram.cu cholesky.cu Dion": Setting(
        "Dion", {"rank_fraction": 0.25}, shapes=MATRICES, bar=1e-3
    ),
    # 460 columns: several blocks factor a matrix.
    "columns.cu gram.cu cholesky.cu Dion wide": Setting(
        "Dion", {"rank_fraction": 0.9}, shapes=((70, 64),), bar=1e-3, wide=((520, 512),)
    ),
    "jacobi.cu low_rank.cu GaLore": Setting(
        "GaLoreAdamW", {"rank": 16, "update_proj_gap": 2}, shapes=MATRICES, bar=1e-2, waits=True
    ),
    "low_rank.cu APOLLO": Setting(
        "APOLLOAdamW", {"rank": 16, "update_proj_gap": 2}, shapes=MATRICES, bar=1e-3
    ),
}

_KEYS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lion": {},
    "AdEMAMix": {},
    "Lamb": {},
    "Adafactor": {"relative_step": False, "lr": 0.01},
    "CAME": {},
    # Products in float32, whose errors are small: those of 16 bits are in row 3.
    "Muon": {"orth_dtype": "float32"},
    "NorMuon": {"orth_dtype": "float32"},
    "Dion": {"rank_fraction": 0.25},
    "Dion2": {"orth_dtype": "float32"},
    "NorDion2": {"orth_dtype": "float32"},
    "GaLoreAdamW": {"rank": 8, "update_proj_gap": 4},
    "APOLLOAdamW": {"rank": 8, "update_proj_gap": 4},
    "SOAP": {},
    "SOAPMuon": _FLOAT32,
}
_WAITS = ("GaLoreAdamW", "SOAP", "SOAPMuon")
# Directions of rounding size have random signs in the first steps of a basis.
_BARS = {"SOAP": 1e-2, "SOAPMuon": 5e-2}
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "float32": ({}, torch.float32),
    "bfloat16": ({}, torch.bfloat16),
    "8-bit": (_EIGHT, torch.float32),
    "rounded": (_ROUNDED, torch.bfloat16),
}
CLASSES: dict[str, dict[str, Setting]] = {
    name: {
        kind: Setting(name, {**keys, **more}, dtype, MATRICES, waits=name in _WAITS)
        for kind, (more, dtype) in KINDS.items()
        if not (name == "Dion" and kind == "8-bit")
    }
    for name, keys in _KEYS.items()
}
VERIFIED = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""The largest error of an update that `verify` may find: bfloat16 parameters have a unit of that size."""


def numbers(shape: tuple[int, ...], phase: float) -> Tensor:
    """Numbers that are the same on every machine, of full rank."""
    count = torch.Size(shape).numel()
    at = torch.arange(count, dtype=torch.float64)
    return (torch.sin(at * 12.9898 + phase) * 43758.5453).frac().mul(2).sub(1).reshape(shape)


def made(setting: Setting, device: torch.device) -> tuple[list[nn.Parameter], OxOptimizer]:
    """Parameters and their optimizer."""
    params = [
        nn.Parameter(numbers(shape, 1.0 + i).to(setting.dtype).to(device))
        for i, shape in enumerate(setting.shapes)
    ]
    keys = {"lr": 0.01, "weight_decay": 0.1, **setting.keys}
    return params, getattr(oxidion, setting.cls)([{"params": params, **setting.group}], **keys)


def guarded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers between guards, and all of that memory."""
    room = values.new_full((values.numel() + 2 * GUARD,), _guard(values.dtype))
    inside = room[GUARD : room.numel() - GUARD].view(values.shape)
    return inside.copy_(values), room


def _guard(dtype: torch.dtype) -> float:
    """A number that no kernel has a reason to write: none at all, or of codes one in the midst."""
    return float("nan") if dtype.is_floating_point else 85


def are_whole(rooms: Iterable[Tensor]) -> bool:
    """True if all guards are as they were."""
    for room in rooms:
        edges = torch.cat([room[:GUARD], room[room.numel() - GUARD :]])
        is_own = edges.isnan() if room.dtype.is_floating_point else edges == _guard(room.dtype)
        if not is_own.all():
            return False
    return True


def guard_states(optimizer: OxOptimizer) -> list[Tensor]:
    """Moves states on the parameters' device between guards; all of that memory."""
    rooms = []
    for param, states in optimizer.state.items():
        for name, state in states.items():
            if isinstance(state, Tensor) and state.dim() and state.device == param.device:
                states[name], room = guarded(state)
                rooms.append(room)
    return rooms


def give_gradients(params: list[nn.Parameter], step: int) -> None:
    """Gradients of a step."""
    for i, param in enumerate(params):
        param.grad = numbers(tuple(param.shape), 100.0 + 10 * step + i).to(param.dtype).to(param.device)


def steps(setting: Setting, device: torch.device, count: int) -> list[Tensor]:
    """By how much parameters have moved after some steps, in float64 on the host."""
    params, optimizer = made(setting, device)
    before = [param.detach().double().cpu() for param in params]
    for step in range(count):
        give_gradients(params, step)
        optimizer.step()
    return [param.detach().double().cpu() - old for param, old in zip(params, before, strict=True)]


def moved(setting: Setting, device: torch.device, by: str) -> list[Tensor]:
    """As `steps`, three of them, between guards: all is no number where one was written to.

    ``by`` says what computes: "kernels", "libtorch", or "compare", sources of kernels that are on.
    """
    core.compute_by(by)
    if setting.tiled and device.type == "cuda":
        count = -(-torch.cuda.get_device_properties(device).multi_processor_count // TILES)
        setting = replace(setting, shapes=setting.shapes * count)
    if device.type == "cuda":
        setting = replace(setting, shapes=setting.shapes + setting.wide)
    rooms = []
    params, optimizer = made(setting, device)
    for param in params:
        param.data, room = guarded(param.data)
        rooms.append(room)
    before = [param.detach().double().cpu() for param in params]
    for step in range(3):
        give_gradients(params, step)
        for param in params:
            assert param.grad is not None
            param.grad, room = guarded(param.grad)
            rooms.append(room)
        optimizer.step()
        if step == 0:
            rooms += guard_states(optimizer)
    found = [param.detach().double().cpu() - old for param, old in zip(params, before, strict=True)]
    return found if are_whole(rooms) else [torch.full_like(own, float("nan")) for own in found]


def work_of(name: str, device: torch.device, by: str) -> list[Tensor]:
    """Results of what `KERNELS` has under a name."""
    setting = KERNELS[name]
    if setting is GROUPED:
        return multiplied(device, by)
    return exchanged(device, by) if setting is EXCHANGE else moved(setting, device, by)


def compared(name: str, device: torch.device, by: str, repeats: int = 1) -> tuple[float, str]:
    """The largest difference of updates from libtorch's, and what is wrong; empty if nothing is."""
    first = work_of(name, device, by)
    for _ in range(repeats):
        with busy(device):
            again = work_of(name, device, by)
        if not all(torch.equal(a, b) for a, b in zip(first, again, strict=True)):
            if any(own.isnan().any() for own in (*first, *again)):
                return float("inf"), "an update is no number, or memory beside a tensor was written"
            return difference(again, first), "a repeated step has other bits"
    off, bar = difference(first, work_of(name, device, "libtorch")), KERNELS[name].bar
    return off, "" if off <= bar else f"updates differ by {off:.1e} from libtorch's, {bar:.0e} at most"


EXCHANGED = (1000, 1003)
"""Shape of a matrix whose rows are messages."""


def exchanged(device: torch.device, by: str) -> list[Tensor]:
    """Copies of rectangles and sums of messages, as steps on several ranks have them."""
    core.compute_by(by)
    found = []
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    for dtype, corner in ((torch.float32, (0, 0)), (torch.float32, (7, 5)), (torch.bfloat16, (1, 3))):
        matrix = numbers(EXCHANGED, 3.0).to(dtype).to(device)
        shape = [size - first for size, first in zip(EXCHANGED, corner, strict=True)]
        to, room = guarded(torch.zeros(shape, dtype=dtype, device=device))
        total, other = guarded(torch.zeros(EXCHANGED[1], dtype=dtype, device=device))
        exchange_on_device(device.index or 0, stream, matrix, corner, to, 0.25, total)
        nothing = 0.0 if are_whole([room, other]) else float("nan")
        found += [to.double().cpu() + nothing, total.double().cpu() + nothing]
    return found


GRIDS = (1, 7, None)
"""Blocks of a launch; None: one for each multiprocessor."""
PRODUCTS = ((129, 72, 1), (256, 64, 3), (300, 136, 2))
"""Rows, columns and number of matrices."""
LARGE_PRODUCTS = ((255, 4096, 3), (1000, 72, 33), (2048, 512, 1))


def multiplied(device: torch.device, by: str) -> list[Tensor]:
    """Products `A Aᵀ + B` between guards, by warpgroups in several grids, or in float64 by libtorch."""
    core.compute_by(by)
    is_real = device.type == "cuda"
    stream = torch.cuda.current_stream(device).cuda_stream if is_real else 0
    each = torch.cuda.get_device_properties(device).multi_processor_count if is_real else 4
    found = []
    for rows, depth, count in (*PRODUCTS, *(LARGE_PRODUCTS if is_real else ())):
        a = numbers((count, rows, depth), 5.0).bfloat16().to(device)
        # Rows begin at multiples of 16 bytes.
        wide = -(-rows // 8) * 8
        half = numbers((count, rows, wide), 6.0)[:, :, :rows]
        addend = torch.zeros(count, rows, wide, dtype=torch.bfloat16, device=device)
        addend[:, :, :rows] = (half + half.transpose(1, 2)).bfloat16()
        whole = a.double() @ a.double().transpose(1, 2) + addend[:, :, :rows].double()
        for grid in GRIDS:
            if by == "libtorch":
                found.append(whole.cpu())
                continue
            out, room = guarded(torch.zeros(count, rows, wide, dtype=torch.bfloat16, device=device))
            given = (out[:, :, :rows], a, addend[:, :, :rows])
            if not symmetric_product_on_device(device.index or 0, stream, *given, grid or each):
                raise RuntimeError("there is no product by warpgroups")
            beside = out[:, :, rows:]
            is_right = are_whole([room]) and not beside.any()
            found.append(given[0].double().cpu() if is_right else torch.full_like(whole, float("nan")).cpu())
    return found


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest relative difference in the Frobenius norm; infinite where something is no number."""
    worst = 0.0
    for own, other in zip(found, expected, strict=True):
        off = float((own - other).norm() / other.norm().clamp_min(1e-300))
        worst = max(worst, off if off == off else float("inf"))
    return worst


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
    """Facts of the device and of what is installed, without names of hosts, users or folders."""
    found: dict[str, Any] = {
        "oxidion": oxidion.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip or "",
        "driver": driver_version(),
    }
    if number == EMULATED:
        return {**found, "gpu": EMULATED, "capability": "", "sms": 0, "memory": 0}
    properties = torch.cuda.get_device_properties(int(number))
    return {
        **found,
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
        "memory": properties.total_memory,
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


def load(number: str) -> Found:
    """Kernels can be had."""
    device = place(number)
    started = time.perf_counter()
    steps(KERNELS["coded.cu AdamW"], device, 1)
    first = time.perf_counter() - started
    started = time.perf_counter()
    steps(KERNELS["coded.cu AdamW"], device, 1)
    return Found(
        "PASS", {"first_step_s": round(first, 3), "next_step_s": round(time.perf_counter() - started, 3)}
    )


@contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """A second stream that is busy meanwhile."""
    if device.type != "cuda":
        yield
        return
    other = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(other):
        a = torch.ones(2048, 2048, device=device)
        for _ in range(20):
            a = a @ a * 1e-4
    yield
    other.synchronize()


def kernels(number: str, name: str) -> Found:
    """Steps of one setting by kernels, repeated, and beside libtorch's."""
    device, setting = place(number), KERNELS[name]
    by_groups = setting.tiled or setting is GROUPED
    if by_groups and number != EMULATED and torch.cuda.get_device_capability(device) != (9, 0):
        return Found("SKIP", {}, "it is for devices of compute capability 9.0")
    off, reason = compared(name, device, "kernels", repeats=3)
    return Found("FAIL" if reason else "PASS", {"off": off, "bar": setting.bar}, reason)


def classes(number: str, name: str) -> Found:
    """Steps of a class in every kind of storage."""
    device, figures = place(number), dict[str, Any]()
    for kind, setting in CLASSES[name].items():
        reason = _class(device, setting, kind, figures)
        if reason:
            return Found("FAIL", figures, f"{kind}: {reason}")
    return Found("PASS", figures)


def _class(device: torch.device, setting: Setting, kind: str, figures: dict[str, Any]) -> str:
    """Says what is wrong with `verify`, memory, waiting or steps beside the CPU's; empty if nothing is."""
    params, optimizer = made(setting, device)
    give_gradients(params, 0)
    optimizer.step()
    give_gradients(params, 1)
    error = max(float(row["update_error"]) for row in optimizer.verify())
    figures[kind] = error
    if not error <= max(VERIFIED[setting.dtype], _BARS.get(setting.cls, -1.0)):
        return f"verify() finds an error of {error:.1e}"
    optimizer.step()
    if device.type != "cuda":
        return ""
    before = torch.cuda.memory_allocated(device)
    waits = setting.waits or core.tier() == "libtorch"
    for step in range(2, STEPS):
        give_gradients(params, step)
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.memory_allocated(device) - before
    if grown > 0:
        return f"{grown} bytes more are allocated after {STEPS} steps than after 2"
    off = difference(steps(setting, device, STEPS), steps(setting, torch.device("cpu"), STEPS))
    figures[f"{kind}_cpu"] = off
    # Directions of rounding size may turn, and moments in one byte are rounded once more.
    return "" if off <= 0.3 else f"{STEPS} steps differ by {off:.1e} from those of the CPU"


def _seconds(work: Callable[[], Any], device: torch.device, rounds: int = 5) -> tuple[float, float]:
    """Least seconds on the device and of the host of some work."""
    best = [float("inf")] * 2
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        host = time.perf_counter() - started
        torch.cuda.synchronize(device)
        best = [min(best[0], time.perf_counter() - started), min(best[1], host)]
    return best[0], best[1]


def speed_elementwise(number: str) -> Found:
    """AdamW and Lion beside a copy of as many bytes."""
    device = place(number)
    count = min(1 << 28, torch.cuda.mem_get_info(device)[0] // 40)
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
    return Found("PASS" if low >= 0.85 else "SLOW", figures, "" if low >= 0.85 else f"{low} of a copy")


def speed_host(number: str) -> Found:
    """Host time of a step of many small tensors beside torch's fused AdamW."""
    device = place(number)
    times = {}
    made_by: dict[str, Callable[..., Any]] = {
        "ours": oxidion.AdamW,
        "torch": partial(torch.optim.AdamW, fused=True),
    }
    for name, make in made_by.items():
        params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(4000)]
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = make(params, lr=1e-3)
        optimizer.step()
        times[name] = _seconds(optimizer.step, device)[1]
    ratio = round(times["torch"] / times["ours"], 2)
    figures = {"host_us_per_param": round(times["ours"] / 4000 * 1e6, 2), "torch_over_ours": ratio}
    return Found("PASS" if ratio >= 1 else "SLOW", figures, "" if ratio >= 1 else f"{ratio} of torch's rate")


def speed_muon(number: str) -> Found:
    """Muon on matrices of a model of a billion parameters beside torch.optim.Muon."""
    device = place(number)
    if not hasattr(torch.optim, "Muon"):
        return Found("SKIP", {}, "this torch has no torch.optim.Muon")
    shapes = [(2048, 2048)] * 4 + [(8192, 2048)] * 2 + [(2048, 8192)]
    times = {}
    for name, cls in (("ours", oxidion.Muon), ("torch", torch.optim.Muon)):
        params = [nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16)) for s in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer = cls(params, lr=1e-3)
        optimizer.step()
        times[name] = _seconds(optimizer.step, device)[0]
    ratio = round(times["torch"] / times["ours"], 2)
    figures = {"step_ms": round(times["ours"] * 1e3, 2), "torch_over_ours": ratio}
    return Found("PASS" if ratio >= 1 else "SLOW", figures, "" if ratio >= 1 else f"{ratio} of torch's rate")


def speed_products(number: str) -> Found:
    """Symmetric products by kernels beside the library's: the kernel is used where it is the faster way."""
    found = [ratio for ratio in products.ratios(place(number)) if ratio is not None]
    won = sum(ratio >= tuning.MARGIN for ratio in found)
    figures = {"classes": len(found), "faster": won, "best": max(found), "worst": min(found)}
    return Found("PASS" if won else "SLOW", figures, "" if won else "the library is faster everywhere")


SPEED: dict[str, Callable[[str], Found]] = {
    "elementwise": speed_elementwise,
    "host": speed_host,
    "Muon": speed_muon,
    "products": speed_products,
}


def run(row: int, name: str, number: str) -> Found:
    """Runs one part; what it raises is a failure."""
    warnings.simplefilter("ignore")
    parts: dict[int, Callable[[], Found]] = {
        1: lambda: env(number),
        2: lambda: load(number),
        3: lambda: kernels(number, name),
        4: lambda: classes(number, name),
        6: lambda: SPEED[name](number),
    }
    try:
        return parts[row]()
    except Exception as error:  # whatever it is belongs in the report
        return Found("FAIL", {}, f"{type(error).__name__}: {error}".splitlines()[0][:400])
