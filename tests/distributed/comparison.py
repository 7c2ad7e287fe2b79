"""A case on a simulated mesh, compared with the float64 reference of one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import oxidion
from oxidion._reference.matrices import is_split, matrices, split_dim
from oxidion._reference.registry import REFERENCE
from support.cases import EMULATED, Case
from support.inputs import Shape, gaussian
from support.layouts import Setting
from support.sim_mesh import Rank, SimMesh, cut, layouts_for
from support.trajectory import as_float64, role_state


def named_orientation(setting: Setting, shape: Shape, flatten: bool) -> bool | None:
    """Whether named meshes put Q on the rows: outer shards rows, or inner shards columns."""
    if (setting.outer is None and setting.inner is None) or len(shape) < 2:
        return None
    rows = 0 if flatten else len(shape) - 2
    swapped = None
    for axis, (kind, dim) in setting.place(shape).items():
        if kind != "R" and setting.axes[axis] > 1 and dim in (rows, rows + 1):
            swapped = (dim == rows) == (axis == setting.outer)
    return swapped


def on_grid(x: Tensor) -> Tensor:
    """The nearest multiples of 2^-14: sums and means of such gradients are exact in float32."""
    return (x * 2.0**14).round() / 2.0**14


class Comparison:
    """A case on a simulated mesh, and the float64 reference of one process."""

    def __init__(self, case: Case, setting: Setting, dtype: torch.dtype, orth_dtype: str) -> None:
        self.case, self.setting, self.dtype = case, setting, dtype
        self.full = [p.detach() for p in case.parameters(dtype)]

        def make(params: Sequence[Tensor]) -> Any:
            return case.build(params, orth_dtype=orth_dtype)

        layouts = layouts_for(case, setting.place)
        self.mesh = SimMesh(
            setting.axes, make, layouts, extra=setting.extra, outer=setting.outer, inner=setting.inner
        )
        self.mesh.build(self.full)
        # One process draws the same Q: the numbers depend on seed, parameter and element only.
        self.single = [nn.Parameter(p.clone()) for p in self.full]
        optimizer = make(self.single)
        optimizer.init_state()
        self.expected = [p.double().clone() for p in self.full]
        self.states = [as_float64(role_state(optimizer, p)) for p in self.single]
        self.groups = case.reference_groups(on_device=EMULATED)
        self.seed_swapped_q(optimizer)

    def seed_swapped_q(self, optimizer: Any) -> None:
        """Where named meshes swap the orientation, Q has the other side's shape."""
        for i, shape in enumerate(self.case.shapes):
            swapped = named_orientation(self.setting, shape, bool(self.groups[i].get("flatten")))
            self.groups[i] = {**self.groups[i], "transposed": swapped}
            if swapped is None or self.case.algorithms[i] != "dion":
                continue
            leading = 0 if self.groups[i].get("flatten") else len(shape) - 2
            side = shape[leading : leading + 1] if swapped else shape[leading + 1 :]
            rank = optimizer.state[self.single[i]]["Q"].shape[-1]
            # Blocks that do not cut the side of Q have a matrix each.
            group = self.groups[i]
            scattered = is_split(group) and (split_dim(group) == 0) != swapped
            count = len(matrices(self.full[i], group)) // math.prod(shape[:leading])
            numbers = torch.empty(*shape[:leading], *([count] if scattered else []), *side, rank)
            oxidion._oxidion.fill_normal(numbers, 0, i)
            self.states[i]["Q"] = numbers.double()

    def replica_gradients(self, rank: Rank, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of a rank: with un-averaged replicas each has its own, whose mean is the true one."""
        out: list[Tensor | None] = []
        for index, grad in enumerate(grads):
            for name, averaged in self.setting.extra.items():
                if not averaged and grad is not None:
                    count, place = self.setting.axes[name], rank.at[name]
                    noise = [on_grid(gaussian(grad.shape, index, k, scale=0.1)) for k in range(count - 1)]
                    noise.append(-sum(noise))
                    grad = grad + noise[place]
            out.append(grad)
        return out

    def step(self, grads: Sequence[Tensor]) -> None:
        """One step on both sides."""
        self.mesh.step(lambda rank: self.replica_gradients(rank, grads))
        groups = self.case.groups_with_norms(self.groups, grads)
        for expected, grad, state, group in zip(self.expected, grads, self.states, groups, strict=True):
            REFERENCE[group["algorithm"]](expected, grad.double(), state, group)

    def check(self, tolerance: float) -> None:
        """Every shard of every rank equals the reference's, relative to the parameter's way so far."""
        for rank in self.mesh.ranks:
            for i, (param, expected, start) in enumerate(
                zip(rank.params, self.expected, self.full, strict=True)
            ):
                parts = rank.spans(i, expected.shape)
                way = float((expected - start.double()).norm())
                error = float((param.detach().double() - cut(expected, parts)).norm())
                where = f"{self.case.name} {self.case.algorithms[i]} {self.case.shapes[i]} rank {rank.number}"
                assert param.isfinite().all(), where
                assert error <= tolerance * way, f"{where}: {error / (way or 1):.2e}"
