"""Steps of one process against the naive float64 reference.

Each step starts on both sides from the same numbers, so a difference is that of one step. Algorithms that
work on each element alone are compared for any gradient whose squares are numbers; the others, which pick
directions and slices, for gradients that have no ties.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from support.cases import ALL_CASES, BASIS_ALGORITHMS, MATRIX_ALGORITHMS, ONLY_OF_MATRICES, Case, Group
from support.trajectory import Twin

from .draw import CONTENTS, Draw

ELEMENTWISE = ("adamw", "lion", "ademamix")
FINITE = CONTENTS[:7]
TEMPLATES = [case for case in ALL_CASES if not any(key in case.name for key in ("fast", "cqr-warmup"))]
FREE = {"merge_dims", "num_heads", "interleaved", "split_sizes", "split_dim", "flatten"}
"""Keys that bind the shapes of a group."""


def own_settings(draw: Draw, case: Case) -> dict[str, Any]:
    """Hyper-parameters of a class, changed at random within what it documents."""
    known = inspect.signature(case.cls).parameters
    beta = [0.0, 0.5, 0.9, 0.999, draw.random()]
    betas: tuple[Any, ...] = (draw.choice(beta), draw.choice([0.5, 0.9, 0.999]))
    if case.algorithm in ("came", "ademamix"):
        betas = (*betas, 0.999)
    values = {
        "lr": [0.0, 1.0, draw.log(1e-6, 1.0), draw.log(1e-3, 1e-1)],
        "weight_decay": [0.0, draw.random(), draw.log(1e-4, 1e-1)],
        "betas": [betas],
        "mu": [0.0, 0.5, 0.95, draw.random()],
        "maximize": [True, False],
        "cautious_wd": [True, False],
        "nesterov": [True, False],
        "amsgrad": [True, False],
        "max_batch_bytes": [None, 1, 500, 10_000],
    }
    relative = case.algorithm == "adafactor" or "lr" not in case.kwargs
    return draw.some({k: v for k, v in values.items() if k in known and not (relative and k == "lr")})


def stacked(algorithm: str) -> dict[str, int]:
    """The key that says that four dimensions are a stack, for algorithms that have it."""
    return {"interleaved": 1} if algorithm in (*MATRIX_ALGORITHMS, *BASIS_ALGORITHMS) else {}


def drawn_case(draw: Draw) -> tuple[Case, dict[str, Any]]:
    """A row of the table with other hyper-parameters and, where its groups bind no shapes, other shapes."""
    template = draw.choice(TEMPLATES)
    settings = own_settings(draw, template)
    if template.kwargs.get("weight_norm") == "hyperball":
        settings.pop("weight_decay", None)  # refused there
    bound = FREE & {*template.kwargs, *(key for group in template.groups for key in group.keys)}
    groups = []
    for group in template.groups:
        algorithm = group.keys.get("algorithm", template.algorithm)
        count = draw.randint(1, 4)
        if bound:
            shapes = tuple(draw.choices(group.shapes, k=count))
        elif algorithm in ONLY_OF_MATRICES:
            shapes = tuple(draw.matrix() for _ in range(count))
        else:
            shapes = tuple(draw.shape() for _ in range(count))
        groups.append(Group(shapes, {**stacked(algorithm), **group.keys}))
    kwargs = {**template.kwargs, **settings}
    return Case(template.name, template.cls, template.algorithm, kwargs, tuple(groups)), settings


def close(found: Tensor, expected: Tensor, before: Tensor, dtype: torch.dtype, elementwise: bool) -> Tensor:
    """Elements that equal the reference but for rounding in their dtype and in one step.

    Sums over a matrix are rounded by the largest of what is summed, so there the bound is that of the largest
    update; elementwise each update has its own.
    """
    way = (expected - before).abs()
    if not elementwise and way.numel():
        way = way.max().expand_as(way)
    if dtype == torch.float64:
        bound = 1e-9 * way + 1e-14 * expected.abs()
    else:
        rounding = torch.finfo(dtype).eps
        bound = (5e-5 if dtype == torch.float32 else 3e-2) * way + rounding * expected.abs()
    same = (found.double() - expected).abs() <= bound + torch.finfo(dtype).tiny
    return same | (found.double() == expected) | (found.isnan() & expected.isnan())


def case(draw: Draw) -> None:
    """A few steps of a random optimizer on random gradients."""
    row, settings = drawn_case(draw)
    free = row.kwargs.get("weight_norm", "free") == "free"
    elementwise = free and all(name in ELEMENTWISE for name in row.algorithms)
    dtypes = [torch.float64] * 3 + ([torch.float32, torch.bfloat16] if elementwise else [])
    dtype = draw.choice(dtypes)
    seed, scale = draw.randrange(1 << 20), draw.choice([0.1, 1.0, 0.0])
    twin = Twin(
        row,
        dtype,
        seed=seed,
        scale=0.5 if row.kwargs.get("weight_norm") == "hyperball" and not scale else scale,
        view=draw.laid_out if draw.often(0.4) else None,
        orth_dtype="float64",
    )
    kinds = CONTENTS if elementwise and dtype == torch.float64 else CONTENTS[:2]
    flatten = bool(row.kwargs.get("flatten"))
    for step in range(draw.randint(1, 3)):
        grads: list[Tensor | None] = []
        drawn = []
        for shape in row.shapes:
            kind = draw.choice(kinds)
            drawn.append(kind)
            grads.append(None if draw.often(0.1) else draw.content(kind, shape, flatten=flatten).to(dtype))
        before = [param.detach().double().clone() for param in twin.params]
        for param, grad in zip(twin.params, grads, strict=True):
            laid_out = grad is not None and draw.often(0.4)
            param.grad = draw.laid_out(grad) if laid_out and grad is not None else grad
        twin.optimizer.step()
        twin.step_reference([None if grad is None else grad.double() for grad in grads])
        rows = zip(twin.params, twin.expected, before, drawn, twin.labels(), strict=True)
        for param, expected, start, kind, label in rows:
            good = close(param.detach(), expected, start, dtype, elementwise)
            where = f"{label} {dtype} step {step + 1} of {kind} with {settings}"
            found = param.detach()[~good]
            assert good.all(), f"{where}: got {found[:4].tolist()}, expected {expected[~good][:4].tolist()}"
        twin.follow()
