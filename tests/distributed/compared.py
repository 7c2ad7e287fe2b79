"""Steps of all ranks of a simulated mesh, compared with those of one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from support.cases import Case
from support.inputs import Shape, gaussian
from support.layouts import Setting
from support.sim_mesh import SimMesh, cut, layouts_for

from .comparison import on_grid

Looks = Callable[[int, Any, list[nn.Parameter]], None]
"""Callback after each step of the one process: step number, optimizer, parameters."""


def normal(shapes: Sequence[Shape], steps: int, *seed: int) -> list[list[Tensor]]:
    """Gradients [step][parameter] whose sums are exact, as many different ones as there are."""
    return [
        [on_grid(gaussian(shape, *seed, step, i)) for i, shape in enumerate(shapes)] for step in range(steps)
    ]


def shares(setting: Setting, at: Mapping[str, int], grads: Sequence[Tensor]) -> list[Tensor]:
    """What a rank has of gradients, which are the mean of that where copies are not averaged."""
    found = list(grads)
    for name, is_averaged in setting.extra.items():
        if not is_averaged:
            away = at[name] - (setting.axes[name] - 1) / 2
            found = [grad * (1.0 + away) for grad in found]
    return found


def one_process(
    case: Case, grads: Sequence[Sequence[Tensor]], dtype: torch.dtype, looks: Looks | None = None
) -> tuple[Any, list[nn.Parameter]]:
    """The optimizer of one process after its steps, and its parameters."""
    params = case.parameters(dtype)
    optimizer = case.build(params, orth_dtype=name_of(dtype))
    for step, own in enumerate(grads):
        for param, grad in zip(params, own, strict=True):
            param.grad = grad.clone().to(dtype)
        optimizer.step()
        if looks is not None:
            looks(step, optimizer, params)
    return optimizer, params


def all_ranks(case: Case, setting: Setting, grads: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> SimMesh:
    """A mesh after the same steps."""
    mesh = SimMesh(
        setting.axes,
        lambda params: case.build(params, orth_dtype=name_of(dtype)),
        layouts_for(case, setting.place),
        extra=setting.extra,
    )
    mesh.build([p.detach() for p in case.parameters(dtype)])
    for own in grads:
        mesh.step(lambda rank, own=own: shares(setting, rank.at, own))  # type: ignore[misc]
    return mesh


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype."""
    return str(dtype).removeprefix("torch.")


def parts(mesh: SimMesh, whole: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of all ranks, each with its part of the whole one."""
    return [
        (param.detach(), cut(other.detach(), rank.spans(i, other.shape)))
        for rank in mesh.ranks
        for i, (param, other) in enumerate(zip(rank.params, whole, strict=True))
    ]


def distance(mesh: SimMesh, case: Case, whole: Sequence[Tensor]) -> float:
    """Largest distance of a rank's parameter from its part of one process's, relative to the way of that."""
    starts = case.parameters(whole[0].dtype)
    ways = [float((end.detach() - start.detach()).norm()) for end, start in zip(whole, starts, strict=True)]
    assert max(ways) > 0
    worst = 0.0
    for (own, wanted), way in zip(parts(mesh, whole), ways * len(mesh.ranks), strict=True):
        assert own.isfinite().all()
        error = float((own - wanted).norm())
        worst = max(worst, error / way if way else math.inf * error if error else 0.0)
    return worst
