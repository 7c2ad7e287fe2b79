"""The table of layouts: how parameters of any shape lie on a mesh, as the usual wrappers lay them out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .inputs import Shape
from .sim_mesh import Axes, Layout, R, S, T


@dataclass(frozen=True)
class Setting:
    """A mesh and where parameters lie on it.

    Attributes:
        name: Identifier in test ids.
        axes: Sizes of the mesh's axes.
        place: Placements of a parameter by its shape.
        extra: Axes that the user passes, and whether gradients on them are averaged.
        outer: Axis of ``outer_shard_mesh``.
        inner: Axis of ``inner_shard_mesh``.
    """

    name: str
    axes: Axes
    place: Callable[[Shape], Layout]
    extra: Mapping[str, bool] = field(default_factory=dict)
    outer: str | None = None
    inner: str | None = None

    def __str__(self) -> str:
        return self.name


def fsdp(dim: int) -> Callable[[Shape], Layout]:
    """``fully_shard`` along a dimension where there is one, else along the first."""
    return lambda shape: {"fs": S(dim if dim < len(shape) else 0) if shape else R}


def copies(shape: Shape) -> Layout:
    """Plain replicas."""
    del shape
    return {"dp": R}


def plane(tp: int, fs: int, *, dp: bool = False, strided: bool = False) -> Callable[[Shape], Layout]:
    """Matrices sharded by tensor parallelism along ``tp`` and by FSDP along ``fs``; vectors by FSDP."""

    def place(shape: Shape) -> Layout:
        axes = {"dp": R} if dp else {}
        if len(shape) < 2:
            return {**axes, "fs": S(0) if shape else R, "tp": R}
        return {**axes, "fs": T(fs) if strided else S(fs), "tp": S(tp)}

    return place


SETTINGS = (
    Setting("fsdp4-dim0", {"fs": 4}, fsdp(0)),
    Setting("fsdp3-dim0", {"fs": 3}, fsdp(0)),
    Setting("fsdp4-dim1", {"fs": 4}, fsdp(1)),
    Setting("fsdp20-empty-shards", {"fs": 20}, fsdp(0)),
    Setting("fsdp4-outer", {"fs": 4}, fsdp(0), outer="fs"),
    Setting("fsdp2-tp2-named", {"fs": 2, "tp": 2}, plane(tp=0, fs=1), outer="fs", inner="tp"),
    Setting("ddp4", {"dp": 4}, copies, {"dp": True}),
    Setting("ddp3-compressed", {"dp": 3}, copies, {"dp": False}),
    Setting("hsdp", {"dp": 2, "fs": 2}, lambda shape: {"dp": R, **fsdp(0)(shape)}),
    Setting("hsdp-compressed", {"dp": 2, "fs": 3}, lambda s: {"dp": R, **fsdp(0)(s)}, {"dp": False}),
    Setting("tp3-columns", {"tp": 3}, lambda s: {"tp": S(0) if len(s) > 1 else R}),
    Setting("tp3-rows", {"tp": 3}, lambda s: {"tp": S(1) if len(s) > 1 else R}),
    Setting("fsdp2-tp2", {"fs": 2, "tp": 2}, plane(tp=1, fs=0)),
    Setting("fsdp2-tp3", {"fs": 2, "tp": 3}, plane(tp=0, fs=1)),
    Setting("fsdp2-tp3-named", {"fs": 2, "tp": 3}, plane(tp=0, fs=1), outer="fs", inner="tp"),
    Setting("fsdp2-tp2-strided", {"fs": 2, "tp": 2}, plane(tp=0, fs=0, strided=True)),
    Setting("dp2-fsdp2-tp2", {"dp": 2, "fs": 2, "tp": 2}, plane(tp=0, fs=1, dp=True)),
    Setting(
        "dp2-fsdp2-tp2-compressed", {"dp": 2, "fs": 2, "tp": 2}, plane(tp=0, fs=1, dp=True), {"dp": False}
    ),
    Setting(
        "dp2-fsdp2-tp2-all-named",
        {"dp": 2, "fs": 2, "tp": 2},
        plane(tp=0, fs=1, dp=True),
        {"dp": False},
        outer="fs",
        inner="tp",
    ),
    Setting(
        "experts2-tp2",
        {"ep": 2, "tp": 2},
        lambda s: {"ep": S(0) if s else R, "tp": S(len(s) - 1) if len(s) > 1 else R},
    ),
    Setting(
        "nested-axes-on-one-dimension",
        {"a": 2, "b": 3},
        lambda s: {"a": S(0), "b": S(0)} if len(s) > 1 else {"a": R, "b": R},
    ),
)
"""Every layout that a step is compared on."""

PAIRS = (
    Setting("fsdp2-dim0", {"fs": 2}, fsdp(0)),
    Setting("fsdp2-dim1", {"fs": 2}, fsdp(1)),
    Setting("ddp2", {"dp": 2}, copies, {"dp": True}),
    Setting("ddp2-compressed", {"dp": 2}, copies, {"dp": False}),
    Setting("tp2-columns", {"tp": 2}, lambda s: {"tp": S(0) if len(s) > 1 else R}),
    Setting("tp2-rows", {"tp": 2}, lambda s: {"tp": S(1) if len(s) > 1 else R}),
)
"""The simplest ones on two ranks, for real processes."""

WIDE = (
    Setting("fsdp64", {"fs": 64}, fsdp(0)),
    Setting("fsdp64-dim1", {"fs": 64}, fsdp(1)),
    Setting("ddp64", {"dp": 64}, copies, {"dp": True}),
    Setting("hsdp64-compressed", {"dp": 4, "fs": 16}, lambda s: {"dp": R, **fsdp(0)(s)}, {"dp": False}),
    Setting("dp2-fsdp8-tp4", {"dp": 2, "fs": 8, "tp": 4}, plane(tp=1, fs=0, dp=True)),
)
"""Some on 64 ranks, more than most of the shapes have rows."""


def setting_named(name: str) -> Setting:
    """The row with this name."""
    (setting,) = (setting for setting in (*SETTINGS, *PAIRS, *WIDE) if setting.name == name)
    return setting
