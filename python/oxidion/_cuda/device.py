"""The device of an optimizer's parameters, torch's stream there, and where the core finds its kernels."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from oxidion._dist.comm import local
from oxidion._oxidion import prepare_devices, source_states
from oxidion._torch.cache import cache_folder, make_private

CPU = torch.device("cpu")
TIERS = ("auto", "libtorch", "kernels")
FOR_ONE_ARCHITECTURE = "symmetric_wgmma.cu"
"""A source that is off on most devices, where another one does its work."""
EMULATED = "emulated"
"""Word for host memory that stands in for a device's, as in tests."""

_memory_of_the_host: list[bool] = []


def tier() -> str:
    """The word for what computes on devices: "kernels", "libtorch", or "auto", kernels where they can be had.

    Raises:
        ValueError: for another word in ``OXIDION_CUDA``.
    """
    word = os.environ.get("OXIDION_CUDA") or "auto"
    if word not in TIERS:
        raise ValueError(f"OXIDION_CUDA must be auto, libtorch or kernels, got '{word}'")
    return "libtorch" if word == "auto" and torch.version.hip else word


def device_of(groups: Iterable[dict[str, Any]]) -> torch.device:
    """The device of the first parameter: that of all where there is a mesh."""
    for group in groups:
        for param in group["params"]:
            return local(param).device
    return CPU


def is_emulated() -> bool:
    """True where memory of the host counts as that of device 0."""
    return bool(_memory_of_the_host)


def number_of(where: torch.device) -> int | None:
    """The number under which the core knows a device; None for the CPU."""
    if where.type == "cuda":
        return where.index or 0
    return 0 if where.type == "cpu" and is_emulated() else None


def current_stream(device: torch.device) -> int:
    """The handle of torch's current stream on a CUDA device, also during a capture; 0 on the CPU.

    Raises:
        RuntimeError: during a capture where libtorch computes.
    """
    if device.type != "cuda":
        return 0
    prepare()
    if is_capturing(device) and (reason := refusal_of_graphs(device)):
        raise RuntimeError(f"a step cannot be captured: {reason}. Take it outside of the graph")
    return int(torch.cuda.current_stream(device).cuda_stream)


class InTurn:
    """Context of work on a device that is done in turn, whatever the streams on which it is begun."""

    def __init__(self) -> None:
        self._done: torch.cuda.Event | None = None

    def __enter__(self) -> InTurn:
        """Has the current stream wait for what was begun before."""
        if self._done is not None:
            self._done.wait()
        return self

    def __exit__(self, *_raised: object) -> None:
        """Notes what the current stream has been given."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()


def finish_copies(kind: str) -> None:
    """Waits for copies to the host that the current stream of a kind of device has been given.

    Args:
        kind: type of device; for others than CUDA's, and where none is in use, there is nothing to wait for.
    """
    if kind == "cuda" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()


def keep_for_stream(tensor: torch.Tensor) -> None:
    """Has a tensor's memory wait for the current stream before others get it; nothing on the host."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def devices_of(groups: Iterable[dict[str, Any]]) -> list[torch.device]:
    """The devices of all parameters, in the order of the first on each; without any, the CPU."""
    found = dict.fromkeys(local(param).device for group in groups for param in group["params"])
    return list(found) or [CPU]


def current_streams(devices: Sequence[torch.device]) -> list[int]:
    """The handles of torch's current streams on devices; 0 for the CPU.

    Raises:
        RuntimeError: during a capture where libtorch computes, and where there are several devices: only what
            is launched on one of them is captured.
    """
    if len(devices) > 1 and any(map(is_capturing, devices)):
        raise RuntimeError(
            f"a step cannot be captured that is on several devices, {', '.join(map(str, devices))}: make an "
            "optimizer for each device"
        )
    return list(map(current_stream, devices))


def stream_of(value: object) -> int:
    """Returns the handle of torch's current stream on a tensor's device; 0 on the CPU and for non-tensors.

    Raises:
        RuntimeError: as `current_stream`.
    """
    if not isinstance(value, torch.Tensor) or not issubclass(type(value), torch.Tensor):
        return 0  # an object may claim another class than its own
    return current_stream(value.device)


def is_capturing(device: torch.device) -> bool:
    """True while launches on torch's current stream go into a graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_capture(device: torch.device) -> None:
    """Refuses to make states while a graph is captured: each replay would make them again.

    Raises:
        RuntimeError: during a capture.
    """
    if is_capturing(device):
        raise RuntimeError("take one step before the capture of a graph: something has to be planned again")


def kept_in() -> Path | None:
    """The folder where machine code is kept; none, with a warning, where others may write to it."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        make_private(folder)
    except OSError as error:
        warnings.warn(f"CUDA kernels are compiled in each process again, and not kept: {error}", stacklevel=2)
        return None
    return folder


def _of_pathfinder() -> list[Path]:
    """The NVRTC that NVIDIA's own search finds, where that package is installed."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
        found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except (ImportError, RuntimeError, AttributeError, OSError):
        return []
    return [Path(found)] if found else []


def nvrtc_libraries() -> list[Path]:
    """Returns candidate paths of NVRTC, the first to try at the front.

    They are what NVIDIA's own search finds, then what pip installed next to torch, with torch's major version
    of CUDA first. Each is opened by its path, so a toolkit on the loader's path cannot replace it.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    installed = [file for folder in folders for file in sorted(folder.glob("*/lib/libnvrtc.so.*"))]
    own = f".so.{(torch.version.cuda or '').partition('.')[0]}"
    installed.sort(key=lambda file: not file.name.endswith(own))
    return list(dict.fromkeys(file.absolute() for file in (*_of_pathfinder(), *installed)))


def described(where: torch.device) -> str:
    """The kind of device, with the sources of kernels that are off."""
    if where.type != "cuda":
        return where.type
    try:
        states = source_states(where.index or 0)
    except RuntimeError:
        return f"{where.type}, by libtorch"
    off = [name for name, state, *_ in states if state == "off" and name != FOR_ONE_ARCHITECTURE]
    return f"{where.type}, by libtorch instead of {', '.join(off)}" if off else where.type


def refusal_of_graphs(where: torch.device) -> str:
    """Returns the reason why steps on a device are not captured; empty where they may be.

    A scalar that is passed to libtorch, such as a learning rate, would keep its captured value in replays.
    """
    found = f"{where.type}, by libtorch" if tier() == "libtorch" else described(where)
    return "" if found == where.type else f"on {found}, a capture would fix the arguments of a step"


@cache
def prepare(*, emulated: bool = False) -> None:
    """Passes the folder for machine code and the paths of NVRTC to the core.

    Args:
        emulated: whether host memory counts as a device's, for tests without a device.
    """
    if torch.version.hip and tier() == "libtorch":
        logging.getLogger("oxidion.cuda").warning(
            "libtorch computes, which is slower: the kernels are for CUDA devices, and this torch is for ROCm"
        )
    if emulated:
        _memory_of_the_host.append(True)
    compute_by(tier())


def compute_by(word: str) -> None:
    """Has devices compute by "kernels", by "libtorch", or by kernels where they can be had: "auto"."""
    folder, libraries = _places()
    # Where sources are checked before they are used, a step does not load others.
    only_asked = word == "auto" and (os.environ.get("OXIDION_SELF_CHECK") or "1") == "1"
    prepare_devices(folder, libraries, tier=word, emulated=is_emulated(), only_asked=only_asked)


@cache
def _places() -> tuple[Path | None, list[Path]]:
    """The folder of machine code, and paths at which NVRTC may lie."""
    return kept_in(), nvrtc_libraries()
