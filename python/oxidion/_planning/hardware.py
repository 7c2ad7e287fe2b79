"""Machines that a step is estimated for: rates of a device, and of the links between devices.

Nothing here was measured: the built-in figures are those that vendors publish, times one factor of efficiency
for each kind. A file may hold measured ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from oxidion._core.arguments import read_object, shown

PRODUCTS = 0.6
"""Share of the published rate that products of matrices reach."""
MEMORY = 0.8
"""Share of the published bandwidth that loops over memory reach."""
LINK = 0.8
"""Share of the published bandwidth that collectives reach."""
KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""Kinds of collectives."""
SLOWEST, FASTEST = 1e-3, 1e30
"""Bounds of rates in a file: with others the times of a step would not be numbers."""
LATEST = 3600
"""The longest latency in a file, in seconds."""
LAUNCH = 1e-5
"""Seconds that an instruction takes in addition to its work: launches of a handful of kernels."""


@dataclass(frozen=True)
class Link:
    """A way between devices.

    Attributes:
        latency: seconds of one message.
        bytes: bytes per second that a device sends.
    """

    latency: float
    bytes: float


@dataclass(frozen=True)
class Hardware:
    """A device and its links.

    Attributes:
        name: for the report.
        flops: floating-point operations per second of products by dtype: published dense rates.
        memory: bytes per second: published.
        inner: link inside a node.
        outer: link between nodes.
        node: devices of a node.
        axes: links of axes by name, where they are known; they win over ``inner`` and ``outer``.
        collectives: seconds of a collective that sends next to nothing, and bytes per second, by kind, as
            measured for groups of this size; they win over all links.
        hides: whether collectives run while the device computes; not where the same cores do both.
        share: number of devices that take turns on one processor; each has its rates while all are busy.
        measured: whether rates and bandwidths are those that are reached, not published ones.
    """

    name: str
    flops: dict[str, float]
    memory: float
    inner: Link
    outer: Link
    node: int = 8
    axes: dict[str, Link] = field(default_factory=dict)
    collectives: dict[str, Link] = field(default_factory=dict)
    hides: bool = True
    share: float = 1.0
    measured: bool = False

    def product_rate(self, dtype: str) -> float:
        """Operations per second of products in a dtype that are reached."""
        wide = {"float64": ("float64", "float32"), "float32": ("float32",), "tf32": ("tf32", "float32")}
        for name in (*wide.get(dtype, (dtype, "bfloat16")), "float32"):
            if name in self.flops:
                return self._reached(self.flops[name], PRODUCTS)
        raise ValueError(f"hardware {self.name} has no rate of float32")

    @property
    def bandwidth(self) -> float:
        """Bytes per second of memory that loops reach."""
        return self._reached(self.memory, MEMORY)

    def _reached(self, rate: float, share: float) -> float:
        return rate if self.measured else rate * share

    def collective(self, kind: str, sent: float, ranks: int, stride: int, axis: str) -> float:
        """Seconds of a collective in which this rank sends ``sent`` bytes to ``ranks - 1`` others.

        ``latency · rounds + sent / (0.8 · bytes)``, with ``⌈log2 ranks⌉`` rounds, twice in an all-reduce.
        Where an axis lies partly inside a node, what goes to ranks inside goes by the inner link.

        Args:
            kind: of the collective.
            sent: bytes.
            ranks: along the axis.
            stride: distance of neighbours on the axis, in ranks.
            axis: name.
        """
        rounds = math.ceil(math.log2(ranks)) if ranks > 1 else 0
        rounds *= 2 if kind == "all_reduce" else 1
        if kind in self.collectives:
            link = self.collectives[kind]
            return (link.latency if ranks > 1 else 0.0) + sent / self._reached(link.bytes, LINK)
        if axis in self.axes:
            link = self.axes[axis]
            return link.latency * rounds + sent / self._reached(link.bytes, LINK)
        inner, outer = (self._reached(link.bytes, LINK) for link in (self.inner, self.outer))
        near = max(min(self.node // stride, ranks), 1)  # ranks of the axis inside of one node
        if near == ranks:
            return self.inner.latency * rounds + sent / inner
        inside = sent * (near - 1) / (ranks - 1)
        outside = sent - inside
        if kind == "all_reduce":
            # Inside of the nodes first: only the sums of a node's ranks go between nodes.
            inside, outside = sent * (near - 1) / near, sent / near
        return self.outer.latency * rounds + inside / inner + outside / outer


INNER = {"a100-80g": 300e9, "h100-sxm": 450e9, "h200": 450e9, "b200": 900e9, "mi300x": 448e9}
"""Bytes per second that a device sends inside of a node: half of the published sum of both directions."""
DEVICES: dict[str, tuple[dict[str, float], float]] = {
    "a100-80g": ({"bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 19.5e12}, 2.039e12),
    "h100-sxm": ({"bfloat16": 989e12, "tf32": 494.5e12, "float32": 67e12, "float64": 67e12}, 3.35e12),
    "h200": ({"bfloat16": 989e12, "tf32": 494.5e12, "float32": 67e12, "float64": 67e12}, 4.8e12),
    "b200": ({"bfloat16": 2250e12, "tf32": 1125e12, "float32": 75e12, "float64": 37e12}, 8e12),
    "mi300x": ({"bfloat16": 1307e12, "float32": 163.4e12, "float64": 163.4e12}, 5.3e12),
}
"""Published rates of dense products by dtype, and of memory; float16 has that of bfloat16."""
LINKS: dict[str, tuple[Link | None, Link]] = {
    "nvlink+ib400": (None, Link(5e-6, 50e9)),
    "nvlink+ib200": (None, Link(5e-6, 25e9)),
    "pcie+eth100": (Link(8e-6, 25e9), Link(3e-5, 1.5e9)),
}
"""Links inside of a node (none: the device's own) and between nodes: for each device one adapter of 400 or
200 Gbit/s, or one of 100 Gbit/s for the eight of a node."""


def load(name: str, links: str = "nvlink+ib400") -> Hardware:
    """Hardware by its name or from a JSON file.

    Args:
        name: a key of ``DEVICES``, or the path of a file that holds an object with ``flops`` (by dtype),
            ``memory``, ``inner`` and ``outer`` (pairs of latency and bytes per second) and, if known,
            ``node``, ``axes``, ``collectives``, ``hides``, ``share`` and ``measured``.
        links: a key of ``LINKS``, for a built-in device.

    Raises:
        ValueError: for a name that is neither, unknown links, or a file that does not hold such an object.
    """
    if links not in LINKS:
        raise ValueError(f"links must be one of {', '.join(LINKS)}, got {links!r}")
    if name in DEVICES:
        flops, memory = DEVICES[name]
        inner, outer = LINKS[links]
        return Hardware(f"{name}, {links}", flops, memory, inner or Link(3e-6, INNER[name]), outer)
    values = read_object("hardware", name, DEVICES)
    try:
        return _read(Path(name).stem, values)
    except ValueError as error:
        raise ValueError(f"hardware file {name}: {error}") from error


def _read(name: str, values: dict[str, Any]) -> Hardware:
    """Hardware from what a file holds."""
    known = {entry.name for entry in fields(Hardware)} - {"name"}
    if unknown := values.keys() - known:
        raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
    if missing := {"flops", "memory", "inner", "outer"} - values.keys():
        raise ValueError(f"missing keys {', '.join(sorted(missing))}")
    flops = {dtype: _positive(f"flops.{dtype}", rate) for dtype, rate in _table(values, "flops").items()}
    if "float32" not in flops:
        raise ValueError("flops must have float32")
    axes = {axis: _link(f"axes.{axis}", link) for axis, link in _table(values, "axes").items()}
    collectives = {
        _kind(kind): _link(f"collectives.{kind}", link)
        for kind, link in _table(values, "collectives").items()
    }
    hides, measured = _flag(values, "hides", default=True), _flag(values, "measured", default=False)
    node = values.get("node", 8)
    if not isinstance(node, int) or isinstance(node, bool) or node < 1:
        raise ValueError(f"node must be an integer >= 1, got {shown(node)}")
    memory = _positive("memory", values["memory"])
    share = _positive("share", values.get("share", 1.0))
    if share < 1:
        raise ValueError(f"share must be a number >= 1, got {shown(share)}")
    inner, outer = (_link(key, values[key]) for key in ("inner", "outer"))
    return Hardware(name, flops, memory, inner, outer, node, axes, collectives, hides, share, measured)


def _table(values: dict[str, Any], key: str) -> dict[str, Any]:
    value = values.get(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be an object, got {shown(value)}")  # noqa: TRY004
    return value


def _kind(kind: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"collectives must be of {', '.join(KINDS)}, got {kind!r}")
    return kind


def _flag(values: dict[str, Any], key: str, *, default: bool) -> bool:
    value = values.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, got {shown(value)}")  # noqa: TRY004
    return value


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not SLOWEST <= value <= FASTEST:
        raise ValueError(
            f"{key} must be a positive number from {SLOWEST:g} to {FASTEST:g}, got {shown(value)}"
        )
    return float(value)


def _link(key: str, value: Any) -> Link:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{key} must be a latency in seconds and bytes per second, got {shown(value)}")
    latency = value[0]
    if isinstance(latency, bool) or not isinstance(latency, (int, float)) or not 0 <= latency <= LATEST:
        raise ValueError(f"{key}: the latency must be a number >= 0 and <= {LATEST:g}, got {shown(latency)}")
    return Link(float(latency), _positive(key, value[1]))
