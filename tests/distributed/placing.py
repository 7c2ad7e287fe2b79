"""Gradients that have other placements than their parameters, on the ranks of a process group."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import oxidion

from .jobs import mesh_of, whole

KINDS: dict[str, Placement] = {
    "R": Replicate(),
    "0": Shard(0),
    "1": Shard(1),
    "P": Partial("sum"),
    "A": Partial("avg"),
    "X": Partial("max"),
}


def _as_gradient(full: Tensor, mesh: Any, kinds: str) -> DTensor:
    """A DTensor that redistributes to ``full``; of sums and means every rank has another contribution."""
    placements = [KINDS[kind] for kind in kinds]
    spread = [Replicate() if p.is_partial() else p for p in placements]
    own: Tensor = distribute_tensor(full, mesh, spread, src_data_rank=None).to_local().clone()
    for axis, kind in enumerate(kinds):
        size, rank = mesh.size(axis), mesh.get_local_rank(axis)
        weight = 2 * (rank + 1) / (size * (size + 1))  # they sum up to one
        if kind == "X":
            own -= 0 if rank == size - 1 else own.abs() + 1
        elif kind in "PA":
            own *= weight * (size if kind == "A" else 1)
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _optimizer(name: str, settings: dict[str, Any], params: list[Any]) -> Any:
    return getattr(oxidion, name)(params, **settings)


def _deviation(ours: Sequence[Tensor], theirs: Sequence[Tensor], starts: Sequence[Tensor]) -> float:
    """The largest difference of two ways, relative to the way."""
    pairs = zip(ours, theirs, starts, strict=True)
    return max(float((whole(a) - b.detach()).norm() / (b.detach() - s).norm()) for a, b, s in pairs)


def steps_with_gradients_laid_out_otherwise(
    name: str, settings: dict[str, Any], axes: dict[str, int], param: str, grads: Sequence[str]
) -> float:
    """A step for each of ``grads``, compared with one process; the error relative to the total update."""
    mesh, random = mesh_of(axes), torch.Generator().manual_seed(1)
    new = lambda: torch.randn(8, 12, generator=random, dtype=torch.float64)  # noqa: E731
    starts = [new(), new()]
    kinds = [KINDS[kind] for kind in param]
    ours = [nn.Parameter(distribute_tensor(start.clone(), mesh, kinds)) for start in starts]
    theirs = [nn.Parameter(start.clone()) for start in starts]
    one, other = _optimizer(name, settings, ours), _optimizer(name, settings, theirs)
    for number, grad in enumerate(grads):
        for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            full = new()
            b.grad = full
            # The second parameter's is as the parameter, so that both kinds meet in one step.
            a.grad = _as_gradient(full, mesh, grad if at == 0 else param)
        if number == 1:
            assert max(row["update_error"] for row in one.verify()) <= 1e-9
        one.step()
        other.step()
    states = zip(one.state.values(), other.state.values(), strict=True)
    pairs = [
        (a[key], b[key]) for a, b in states for key in b if isinstance(b[key], Tensor) and b[key].numel() > 1
    ]
    moved = max(float((whole(a).reshape(b.shape) - b).norm() / (b.norm() or 1)) for a, b in pairs)
    return max(_deviation(ours, theirs, starts), moved)


def sequence_parallel_steps(name: str, settings: dict[str, Any], steps: int) -> float:
    """A model with sequence-parallel norms, compared with the same on one process."""
    mesh = mesh_of({"tp": dist.get_world_size()})

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.down(torch.relu(self.up(self.norm(x))))
            return out

    torch.manual_seed(0)
    model = Block().double()
    reference = copy.deepcopy(model)
    starts = [p.detach().clone() for p in reference.parameters()]
    plan = {
        "norm": SequenceParallel(),
        "up": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    parallelize_module(model, mesh, {"up": ColwiseParallel()})
    one = _optimizer(name, settings, list(model.parameters()))
    other = _optimizer(name, settings, list(reference.parameters()))
    rows = dist.get_world_size()
    for step in range(steps):
        x = torch.randn(3, 2 * rows, 16, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        own = DTensor.from_local(x.chunk(rows, 1)[dist.get_rank()], mesh, [Shard(1)], run_check=False)
        out: Any = model(own)
        (out.full_tensor() if isinstance(out, DTensor) else out).pow(2).sum().backward()
        reference(x).pow(2).sum().backward()
        assert step or [type(p) for p in model.norm.weight.grad.placements] == [Partial]
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
    return _deviation(list(model.parameters()), list(reference.parameters()), starts)


def says(case: str) -> str:
    """What a step says to gradients that cannot be used, or that the ranks do not agree on."""
    mesh = mesh_of({"tp": dist.get_world_size()})
    param = nn.Parameter(distribute_tensor(torch.ones(8, 4), mesh, [Replicate()]))
    optimizer = oxidion.AdamW([("gain", param)])
    kinds = "P"
    if case == "another mesh":
        mesh = mesh_of({"x": 1, "y": dist.get_world_size()})
        kinds = "RP"
    elif case == "one rank replicated":
        kinds = "P" if dist.get_rank() == 0 else "R"
    elif case == "one rank sharded":
        kinds = "0" if dist.get_rank() == 0 else "R"
    grad = _as_gradient(torch.ones(8, 4), mesh, kinds)
    param.grad = None if case == "one rank without" and dist.get_rank() == 1 else grad
    try:
        optimizer.step()
    except Exception as error:
        unchanged = torch.equal(whole(param), torch.ones(8, 4)) and optimizer.param_groups[0]["step"] == 0
        return f"{type(error).__name__}: {error} {unchanged}"
    return "a step"


def planned_sums(count: int) -> tuple[int, str, int]:
    """Collectives of a step of ``count`` gains with partial gradients, the plan, and number of plans made."""
    mesh = mesh_of({"tp": dist.get_world_size()})
    params = [nn.Parameter(distribute_tensor(torch.ones(16), mesh, [Replicate()])) for _ in range(count)]
    optimizer: Any = oxidion.AdamW(params)
    bound, bind = 0, optimizer._bind

    def counted(**kwargs: Any) -> Any:
        nonlocal bound
        bound += 1
        return bind(**kwargs)

    optimizer._bind = counted
    for _ in range(3):
        for param in params:
            param.grad = _as_gradient(torch.ones(16), mesh, "P")
        optimizer.step()
    plan = optimizer.plan()
    return len(plan.transfers), str(plan), bound
