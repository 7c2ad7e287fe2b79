"""Steps on simulated meshes of random axes and placements: those of one process."""

from __future__ import annotations

import math

import torch

import oxidion
from distributed.comparison import Comparison, on_grid
from distributed.pairs import ROWS
from support.cases import ONLY_OF_MATRICES, Case, Group
from support.inputs import Shape
from support.layouts import Setting
from support.sim_mesh import Layout, R, S

from .draw import Draw
from .steps import FREE, stacked

TEMPLATES = list({row[0].name: row[0] for row in ROWS}.values())
NAMES = ("dp", "fs", "tp")
MOST_RANKS = 12


def drawn_setting(draw: Draw, shapes: list[Shape]) -> Setting:
    """A mesh of up to three axes, and a placement of each shape along each."""
    axes: dict[str, int] = {}
    for name in draw.sample(NAMES, draw.randint(1, 3)):
        axes[name] = draw.choice([1, 2, 2, 3, 4, 5])
        if math.prod(axes.values()) > MOST_RANKS:
            axes[name] = 1
    copies = [name for name in axes if name == "dp" and draw.often(0.7)]
    places: dict[Shape, Layout] = {}
    for shape in shapes:
        layout = dict.fromkeys(axes, R)
        for name in axes:
            if shape and name not in copies and draw.often(0.75):
                layout[name] = S(draw.randrange(len(shape)))
        places[shape] = layout
    extra = {name: draw.often(0.5) for name in copies}
    return Setting("drawn", axes, lambda shape: places[shape], extra)


def drawn_case(draw: Draw) -> Case:
    """A row of the table, with other shapes where its groups bind none."""
    template = draw.choice(TEMPLATES)
    if FREE & {*template.kwargs, *(key for group in template.groups for key in group.keys)}:
        return template
    groups = []
    for group in template.groups:
        algorithm = group.keys.get("algorithm", template.algorithm)
        matrix = algorithm in ONLY_OF_MATRICES
        shapes = [draw.matrix(most=12) if matrix else draw.shape() for _ in range(draw.randint(1, 4))]
        groups.append(Group(tuple(shapes), {**stacked(algorithm), **group.keys}))
    return Case(template.name, template.cls, template.algorithm, template.kwargs, tuple(groups))


def case(draw: Draw) -> None:
    """Two steps on a random layout and in one process, or a ``LayoutError``."""
    row = drawn_case(draw)
    setting = drawn_setting(draw, row.shapes)
    label = f"{setting.axes} {[dict(setting.place(shape)) for shape in row.shapes]} {dict(setting.extra)}"
    try:
        comparison = Comparison(row, setting, torch.float64, "float64")
    except oxidion.LayoutError:
        return
    single = row.build(comparison.single, orth_dtype="float64")
    flatten = bool(row.kwargs.get("flatten"))
    for _ in range(2):
        grads = [on_grid(draw.content("ordinary", shape, flatten=flatten)) for shape in row.shapes]
        comparison.mesh.step(lambda rank, grads=grads: comparison.replica_gradients(rank, grads))
        for param, grad in zip(comparison.single, grads, strict=True):
            param.grad = grad.clone()
        single.step()
    comparison.expected = [param.detach() for param in comparison.single]
    try:
        comparison.check(1e-10)
    except AssertionError as error:
        raise AssertionError(f"{row.shapes} on {label}: {error}") from None
