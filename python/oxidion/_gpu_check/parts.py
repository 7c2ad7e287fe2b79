"""Settings of the check, and steps by kernels compared with steps by libtorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import oxidion
from oxidion._core import masters
from oxidion._core.base import OxOptimizer
from oxidion._cuda import device as core
from oxidion._oxidion import exchange_on_device, symmetric_product_on_device

STEPS = 20
GUARD = 64
"""Elements before and after each tensor, which nothing may write."""


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
    """True for as many matrices as give each multiprocessor a tile of their products."""
    wide: tuple[tuple[int, ...], ...] = ()
    """Shapes in addition to the others on a real device: an emulated one would take too long."""
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
_MASTERS, _MOMENTS = {"master_weights": True}, {"state_dtype": torch.bfloat16}
_NARROWER = {"state_dtype": torch.float32}  # for weights in float64
_FLOAT32 = {"orth_dtype": "float32"}
_POWER = {**_FLOAT32, "denom_power": 0.25}
_SPHERE: dict[str, Any] = {"weight_norm": "hyperball", "weight_decay": 0.0}
_HELD = {**_FLOAT32, **_SPHERE}


def _quantized(cls: str, keys: dict[str, Any], bar: float = 1e-3, *, waits: bool = False) -> Setting:
    return Setting(cls, {**keys, **_EIGHT}, shapes=SMALL, bar=bar, waits=waits)


def _rounded(cls: str, keys: dict[str, Any], **more: Any) -> Setting:
    # A number that lies between two others may be rounded to either.
    return Setting(cls, {**keys, **_ROUNDED}, torch.bfloat16, SMALL, bar=2 * ROUNDED, **more)


def _exact(cls: str, keys: dict[str, Any], **more: Any) -> Setting:
    return Setting(cls, {**keys, **_MASTERS}, torch.bfloat16, SMALL, bar=1e-3, **more)


def _narrow(cls: str, group: dict[str, Any]) -> Setting:
    # Of some 100000 averages a few are so near to a threshold that they may be rounded to either side. The
    # sides differ by 1/128, which is several updates.
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
        "Dion", {"rank_fraction": 0.25, **_NARROWER}, torch.float64, SMALL
    ),
    # Bases, which the first gradient makes, are libtorch's on either side.
    "updates.cu SOAP": Setting("SOAP", {}, shapes=SMALL, bar=1e-2, waits=True),
    "updates.cu SOAPMuon": Setting("SOAPMuon", _FLOAT32, shapes=SMALL, bar=1e-2, waits=True),
    "updates.cu SOAPMuon to a power": Setting("SOAPMuon", _POWER, shapes=SMALL, bar=1e-2, waits=True),
    "quantized.cu AdamW": Setting("AdamW", _EIGHT, bar=1e-3),
    "quantized.cu AMSGrad": _quantized("AdamW", {"amsgrad": True}),
    "quantized.cu AdEMAMix": _quantized("AdEMAMix", {}),
    "quantized.cu Lion": _quantized("Lion", {}),
    "quantized.cu Dion2": _quantized("Dion2", _FLOAT32),
    "quantized.cu SOAP": _quantized("SOAP", {}, 1e-2, waits=True),
    "quantized.cu SOAPMuon": _quantized("SOAPMuon", _FLOAT32, 1e-2, waits=True),
    "quantized.cu SOAPMuon to a power": _quantized("SOAPMuon", _POWER, 1e-2, waits=True),
    "quantized.cu GaLore": _quantized("GaLoreAdamW", {"rank": 32, "update_proj_gap": 2}, 1e-2, waits=True),
    "quantized.cu rounded Muon": _rounded("Muon", _FLOAT32),
    "quantized.cu rounded SOAP": _rounded("SOAP", {}, waits=True),
    "quantized.cu rounded averages": _rounded("AdamW", {}, group={"average": "ema", "average_decay": 0.5}),
    "quantized.cu averages in bfloat16": _narrow("AdamW", {"average": "ema", "average_decay": 0.5}),
    "quantized.cu Schedule-Free in bfloat16": _narrow("AdamW", {"average": "schedule_free"}),
    "quantized.cu masters AdamW": _exact("AdamW", {}),
    "quantized.cu masters Dion2": _exact("Dion2", _FLOAT32),
    "quantized_sums.cu masters MuonH": _exact("Muon", _HELD),
    "quantized.cu moments in bfloat16 AdamW": Setting("AdamW", _MOMENTS, shapes=SMALL, bar=2 * ROUNDED),
    "quantized.cu select.cu moments in bfloat16 Dion2": Setting(
        "Dion2", {**_FLOAT32, **_MOMENTS}, shapes=SMALL, bar=2 * ROUNDED
    ),
    "quantized_sums.cu Lamb": Setting("Lamb", _EIGHT, bar=1e-3),
    "quantized_sums.cu Muon": _quantized("Muon", _FLOAT32),
    "quantized_sums.cu rounded MuonH": _rounded("Muon", _HELD),
    "sums.cu totals.cu factors.cu Lamb": Setting("Lamb", {}),
    "sums.cu Lamb of two types": Setting("Lamb", _NARROWER, torch.float64, SMALL),
    "rows.cu means.cu totals.cu Adafactor": Setting(
        "Adafactor", {"relative_step": False, "lr": 0.01}, bar=1e-4
    ),
    "rows.cu CAME": Setting("CAME", {}, bar=1e-4),
    "copies.cu messages.cu exchange": EXCHANGE,
    "symmetric_mma.cu Muon": Setting(
        "Muon", {"orth_dtype": "bfloat16"}, shapes=((136, 144),), bar=4 * ROUNDED, wide=LARGE
    ),
    "symmetric_mma.cu Muon in float16": Setting(
        "Muon", {"orth_dtype": "float16"}, shapes=((136, 144), (240, 136)), bar=4 * ROUNDED, wide=LARGE
    ),
    "symmetric_wgmma.cu Muon in float16": Setting(
        "Muon", {"orth_dtype": "float16"}, shapes=((304, 312),), bar=4 * ROUNDED, tiled=True
    ),
    "symmetric_wgmma.cu Muon": Setting(
        "Muon", {"orth_dtype": "bfloat16"}, shapes=((304, 312),), bar=4 * ROUNDED, tiled=True
    ),
    "sums.cu totals.cu MuonH": Setting("Muon", _HELD, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu AdamW with weight_norm": Setting("AdamW", _SPHERE, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu Dion with weight_norm": Setting(
        "Dion", {"rank_fraction": 0.25, **_FLOAT32, **_SPHERE}, shapes=SMALL, bar=1e-3
    ),
    "sums.cu totals.cu Dion2 with weight_norm": Setting("Dion2", _HELD, shapes=SMALL, bar=1e-3),
    "sums.cu totals.cu SOAP with weight_norm": Setting("SOAP", _SPHERE, shapes=SMALL, bar=1e-2, waits=True),
    "rows.cu Adafactor with momentum": Setting(
        "Adafactor", {"relative_step": False, "beta1": 0.9, "lr": 0.01}, bar=1e-4
    ),
    "symmetric_wgmma.cu products": GROUPED,
    "select.cu Dion2": Setting("Dion2", {"orth_dtype": "float32"}, shapes=MATRICES, bar=1e-3),
    "gram.cu cholesky.cu Dion": Setting(
        "Dion", {"rank_fraction": 0.25, **_FLOAT32}, shapes=MATRICES, bar=1e-3
    ),
    "gram.cu cholesky.cu Dion in TF32": Setting(
        "Dion", {"rank_fraction": 0.25, "orth_dtype": "tf32"}, shapes=MATRICES, bar=1e-2
    ),
    # 460 columns: several blocks factor a matrix.
    "gram.cu cholesky.cu Dion wide": Setting(
        "Dion", {"rank_fraction": 0.9, **_FLOAT32}, shapes=((70, 64),), bar=1e-3, wide=((520, 512),)
    ),
    "updates.cu GaLore": Setting(
        "GaLoreAdamW",
        {"rank": 16, "update_proj_gap": 2},
        shapes=((80, 70), (64, 8)),
        bar=1e-2,
        waits=True,
        wide=MATRICES,
    ),
    "normals.cu APOLLO": Setting(
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
    "Dion": {"rank_fraction": 0.25, **_FLOAT32},
    "Dion2": {"orth_dtype": "float32"},
    "NorDion2": {"orth_dtype": "float32"},
    "GaLoreAdamW": {"rank": 8, "update_proj_gap": 4},
    "APOLLOAdamW": {"rank": 8, "update_proj_gap": 4},
    "SOAP": {},
    "SOAPMuon": _FLOAT32,
}
_WAITS = ("GaLoreAdamW", "SOAP", "SOAPMuon")
# Directions of rounding size have random signs in the first steps of a basis.
LOOSER = {"SOAP": 1e-2, "SOAPMuon": 5e-2}
KINDS: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "float32": ({}, torch.float32),
    "bfloat16": ({}, torch.bfloat16),
    "8-bit": (_EIGHT, torch.float32),
    "rounded": (_ROUNDED, torch.bfloat16),
    "masters": (_MASTERS, torch.bfloat16),
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
    """Returns a value that no kernel has a reason to write: NaN, or 85 for 8-bit values."""
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
    before = _weights(optimizer, params)
    for step in range(count):
        give_gradients(params, step)
        optimizer.step()
    return [new - old for new, old in zip(_weights(optimizer, params), before, strict=True)]


def _weights(optimizer: OxOptimizer, params: list[nn.Parameter]) -> list[Tensor]:
    """Copies of the weights in float64 on the host."""
    weights = [masters.weight(param, optimizer.state.get(param, {})) for param in params]
    return [weight.to("cpu", torch.float64, copy=True) for weight in weights]


def moved(setting: Setting, device: torch.device, by: str) -> list[Tensor]:
    """Returns the updates of three steps between guards: all are NaN if a guard was written to.

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
    before = _weights(optimizer, params)
    for step in range(3):
        give_gradients(params, step)
        for param in params:
            assert param.grad is not None
            param.grad, room = guarded(param.grad)
            rooms.append(room)
        optimizer.step()
        if step == 0:
            rooms += guard_states(optimizer)
    found = [new - old for new, old in zip(_weights(optimizer, params), before, strict=True)]
    return found if are_whole(rooms) else [torch.full_like(own, float("nan")) for own in found]


def work_of(name: str, device: torch.device, by: str) -> list[Tensor]:
    """Results of what `KERNELS` has under a name."""
    setting = KERNELS[name]
    if setting is GROUPED:
        return multiplied(device, by)
    return exchanged(device, by) if setting is EXCHANGE else moved(setting, device, by)


def compared(name: str, device: torch.device, by: str, repeats: int = 1) -> tuple[float, str]:
    """Returns the largest difference of updates from libtorch's, and what is wrong; empty if nothing is."""
    first = work_of(name, device, by)
    for _ in range(repeats):
        with busy(device):
            again = work_of(name, device, by)
        if not same_bits(first, again) and (why := _why_bits_differ(name, device, by, first, again)):
            return difference(again, first), why
    expected, bar = work_of(name, device, "libtorch"), KERNELS[name].bar
    if not all(bool(own.any()) for own in expected):
        return float("inf"), "nothing is compared: an update by libtorch is 0"
    off = difference(first, expected)
    if off <= bar:
        return off, ""
    wrong = first_wrong(first, expected, bar)
    return off, f"updates differ by {off:.1e} from libtorch's, {bar:.0e} at most: {wrong}"


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """True if all numbers are equal; NaN is equal to nothing."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _why_bits_differ(
    name: str, device: torch.device, by: str, first: list[Tensor], again: list[Tensor]
) -> str:
    """Returns what is wrong with a repeated step; empty if libtorch's own bits vary next to another stream.

    cuBLAS promises equal bits only where no other stream is in use.
    """
    if any(own.isnan().any() for own in (*first, *again)):
        return "an update is NaN, or memory next to a tensor was written"
    where = first_wrong(again, first, 0.0)
    if not same_bits(first, work_of(name, device, by)):
        return f"a repeated step has other bits, also when no other stream is busy: {where}"
    with busy(device):
        library = work_of(name, device, "libtorch")
    if not same_bits(library, work_of(name, device, "libtorch")):
        return ""
    return f"a repeated step has other bits, only while another stream is busy: {where}"


def first_wrong(found: list[Tensor], expected: list[Tensor], bar: float) -> str:
    """Returns which element is the first whose error is above a share of its tensor's norm."""
    for number, (own, other) in enumerate(zip(found, expected, strict=True)):
        far = ~((own - other).abs() <= bar * other.norm() / max(other.numel(), 1) ** 0.5)
        if far.any():
            at = tuple(int(i) for i in torch.nonzero(far)[0])
            count = int(far.sum())
            return f"tensor {number} at {at} has {own[at]:.6g}, not {other[at]:.6g}; {count} such elements"
    return "no single element is far off"


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
            outside = out[:, :, rows:]
            is_right = are_whole([room]) and not outside.any()
            found.append(given[0].double().cpu() if is_right else torch.full_like(whole, float("nan")).cpu())
    return found


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """Returns the largest relative difference in the Frobenius norm; infinite for NaN."""
    worst = 0.0
    for own, other in zip(found, expected, strict=True):
        off = float((own - other).norm() / other.norm().clamp_min(1e-300))
        worst = max(worst, off if off == off else float("inf"))
    return worst
