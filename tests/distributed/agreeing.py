"""What the ranks of a gloo process group do in the tests of what they have to agree on."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import oxidion
from oxidion._dist import agree as _agree
from support.inputs import gaussian
from support.sim_mesh import chunk

from .jobs import mesh_of, placed


def two_errors(action: Callable[[], object]) -> tuple[str, str]:
    """Name and text of the exception that an action raises."""
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def disagreement(kind: str) -> dict[str, Any]:
    """One rank differs from the others; what each hears, and that nothing has changed."""
    rank = dist.get_rank()
    mesh = mesh_of({"fs": dist.get_world_size()})
    shapes = [(8, 6), (6, 8)]
    if kind == "parameters" and rank == 1:
        shapes = [(8, 6), (6, 9)]

    def shard(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        # Without communication: the ranks may differ here.
        start, count = chunk(shape[0], dist.get_world_size(), rank)
        own = torch.ones(tuple(shape), dtype=dtype)[start : start + count].clone()
        size = torch.Size(shape)
        return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=size, stride=(size[1], 1))

    params = [nn.Parameter(shard(shape)) for shape in shapes]
    named = [("first", params[0]), ("second", params[1])]
    lr = 0.02 if kind == "lr" and rank == 1 else 0.01
    fraction = 0.25 if kind == "rank" and rank == 1 else 0.5
    optimizer = oxidion.Dion(named, lr=lr, rank_fraction=fraction)
    for i, (param, shape) in enumerate(zip(params, shapes, strict=True)):
        if kind == "gradient" and rank == 1 and i == 1:
            continue
        param.grad = shard(shape)
    if kind == "dtype" and rank == 1:
        params[1].grad_dtype = None
        params[1].grad = shard(shapes[1], torch.complex64)
    if kind == "found_inf":
        optimizer.found_inf = torch.tensor(float(rank == 1))
        optimizer.grad_scale = None
    name, text = two_errors(optimizer.step)
    answer = {
        "error": name,
        "text": text,
        "unchanged": all(bool((own(param) == 1).all()) for param in params),
        "step": optimizer.param_groups[0]["step"],
    }
    # The optimizer works on once the ranks agree again.
    if kind in ("gradient", "found_inf"):
        for param, shape in zip(params, shapes, strict=True):
            param.grad = shard(shape)
        optimizer.found_inf = None
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 1
        assert not any(bool((own(param) == 1).all()) for param in params if own(param).numel())
    return answer


def gradient_of_lamb_missing_on_one_rank() -> tuple[str, str]:
    """The ranks differ in a gradient alone; Lamb's bound of the gradients' norm is None, which is a NaN."""
    mesh = mesh_of({"fs": dist.get_world_size()})
    weight = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)], run_check=False))
    optimizer = oxidion.Lamb([("weight", weight)])
    if dist.get_rank() == 0:
        weight.grad = torch.ones_like(weight)
    return two_errors(optimizer.step)


def eager_states_of_one_rank() -> tuple[list[str], list[str]]:
    """Rank 0 makes its states when it constructs the optimizer and adds a group, others at the first step."""
    mesh = mesh_of({"fs": dist.get_world_size()})
    weights = [
        nn.Parameter(DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)], run_check=False))
        for _ in range(2)
    ]
    eager = dist.get_rank() == 0
    optimizer = oxidion.NorMuon([weights[0]], init_state=eager)
    optimizer.add_param_group({"params": [weights[1]], "algorithm": "adamw"})
    made = [sorted(optimizer.state.get(weight, {})) for weight in weights]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all(isinstance(optimizer.state[weight]["momentum"], DTensor) for weight in weights)
    return made[0], made[1]


def own(tensor: Tensor) -> Tensor:
    """What this process holds of a DTensor."""
    assert isinstance(tensor, DTensor)
    return tensor.to_local().detach()


def compared_steps(every: int) -> list[int]:
    """The steps before which the ranks compare; after the fifth a checkpoint is loaded."""
    mesh, found, own_agree = mesh_of({"fs": dist.get_world_size()}), [], _agree.agree
    param = nn.Parameter(placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"]))
    optimizer = oxidion.Muon([param])
    optimizer.compare_every = every

    def agree(*args: Any, **keys: Any) -> bool:
        found.append(optimizer.param_groups[0]["step"])
        return own_agree(*args, **keys)

    _agree.agree = agree
    try:
        for step in range(8):
            if step == 5:
                optimizer.load_state_dict(optimizer.state_dict())
            param.grad = placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"])
            optimizer.step()
    finally:
        _agree.agree = own_agree
    return found


def drifted(name: str, kind: str, every: int | None, then: str) -> tuple[int, str]:
    """Steps until one is refused, and why: the last rank leaves one out, or changes a scalar."""
    mesh, last = mesh_of({"fs": dist.get_world_size()}), dist.get_rank() == dist.get_world_size() - 1
    param = nn.Parameter(placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"]))
    optimizer = getattr(oxidion, name)([param])
    if every is not None:
        optimizer.compare_every = every
    for step in range(200):
        if last and step == 3:
            if kind == "step":
                continue
            optimizer.param_groups[0][kind] = 0.0123
        try:
            if step == 6 and then == "load":
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 6 and then == "checkpoint":
                optimizer.synchronize_for_checkpoint()
        except oxidion.PlanMismatch as error:
            return step, str(error)
        param.grad = placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"])
        try:
            optimizer.step()
        except oxidion.PlanMismatch as error:
            return step, str(error)
    return 200, ""


def copies_that_differ(name: str, kind: str) -> tuple[str, str, bool]:
    """The first step on parameters that the ranks should hold copies of."""
    rank, group = dist.get_rank(), dist.group.WORLD
    random, own = torch.Generator().manual_seed(1), torch.Generator().manual_seed(rank)
    dense, expert = (nn.Parameter(torch.randn(16, 16, generator=random)) for _ in range(2))
    dense.grad, expert.grad = (torch.randn(16, 16, generator=random) for _ in range(2))
    with torch.no_grad():
        if kind == "values":
            expert.copy_(torch.randn(16, 16, generator=own))
        elif kind == "one expert is zero":
            expert.mul_(rank)
        elif kind == "gradients of zeros":
            expert.zero_()
            expert.grad.copy_(torch.randn(16, 16, generator=own))
        elif kind == "roundings":
            expert.mul_(1 + 1e-3 * rank)
            expert.grad.mul_(1 + 1e-3 * rank)
        elif kind == "not finite":
            expert.fill_(torch.nan)
    argument = "replicate_mesh" if name == "Dion" else "distributed_mesh"
    averaged = {"replicate_mesh_grad_sync": False} if name == "Dion" else {}
    optimizer = getattr(oxidion, name)(
        [("dense", dense), ("expert", expert)], **{argument: group}, **averaged
    )
    before = dense.detach().clone()
    try:
        optimizer.step()
    except (oxidion.LayoutError, oxidion.PlanMismatch) as error:
        return type(error).__name__, str(error), torch.equal(before, dense)
    return "", "", torch.equal(before, dense)


def disagreement_on_one_line() -> tuple[str, str]:
    """Parameters on two axes of a mesh of 2 × 2; only one line of the second axis sees the difference."""
    mesh = mesh_of({"dp": 2, "tp": 2})
    params = [nn.Parameter(placed(torch.ones(8, 6), mesh[d], {d: ("S", 0)}, [d])) for d in ("dp", "tp")]
    optimizer = oxidion.Muon([("on_dp", params[0]), ("on_tp", params[1])])
    for param, axis in zip(params, ("dp", "tp"), strict=True):
        param.grad = placed(torch.ones(8, 6), mesh[axis], {axis: ("S", 0)}, [axis])
    if dist.get_rank() == 0:
        params[1].grad = None
    return two_errors(optimizer.step)


def axes_that_differ(kind: str) -> tuple[str, str, bool]:
    """Ranks of a mesh of 2 x 2 that do not have the same parameters on both axes, or in another order."""
    rank = dist.get_rank()
    mesh = mesh_of({"dp": 2, "tp": 2})
    params = {d: nn.Parameter(placed(torch.ones(8, 6), mesh[d], {d: ("S", 0)}, [d])) for d in ("dp", "tp")}
    for axis, param in params.items():
        param.grad = placed(torch.ones(8, 6), mesh[axis], {axis: ("S", 0)}, [axis])
    order = {
        "inner": ["dp"] if rank == 1 else ["dp", "tp"],
        "outer": ["tp"] if rank == 1 else ["dp", "tp"],
        "both": [["dp"], ["tp"], ["dp", "tp"], ["tp", "dp"]][rank],
        "order": ["tp", "dp"] if rank in (1, 2) else ["dp", "tp"],
    }[kind]
    optimizer = oxidion.Muon([(f"on_{axis}", params[axis]) for axis in order])
    name, text = two_errors(optimizer.step)
    return name, text, all(bool((own(param) == 1).all()) for param in params.values())


def cut(mesh: Any) -> DTensor:
    """Eight rows of ones in equal parts, made without communication."""
    own = torch.ones(8 // mesh.size(), 6)
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=torch.Size([8, 6]), stride=(6, 1))


def plain_on_one_rank() -> tuple[str, str]:
    """A plain tensor where the other rank holds a DTensor, in process groups that wait for a second."""
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=1)), "cpu", mesh_dim_names=("fs",))
    weight: Any = cut(mesh) if dist.get_rank() == 1 else torch.ones(8, 6)
    optimizer = oxidion.Muon([("w", param := nn.Parameter(weight))])
    param.grad = weight.detach().clone()
    return two_errors(optimizer.step)


def elementwise_that_differ(kind: str) -> list[tuple[str, str]]:
    """Two steps of AdamW, whose ranks differ in the learning rate or in which gradients there are."""
    rank = dist.get_rank()
    mesh = mesh_of({"fs": dist.get_world_size()})
    params = [nn.Parameter(cut(mesh)) for _ in range(2)]
    optimizer = oxidion.AdamW(params, lr=0.1 * (1 + rank) if kind == "lr" else 0.1)
    for param in params[: 1 if kind == "gradient" and rank else 2]:
        param.grad = cut(mesh)
    return [two_errors(optimizer.step) for _ in range(2)]


def different_settings(kind: str) -> tuple[str, str]:
    """Ranks whose plans differ in settings that no shape shows."""
    rank = dist.get_rank()
    mesh = mesh_of({"fs": dist.get_world_size()})
    params = [nn.Parameter(placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"])) for _ in range(4)]
    keys: dict[str, Any] = {}
    groups: list[Any] = [{"params": params}]
    if kind == "max_batch_bytes":
        keys = {"max_batch_bytes": 1 if rank else None}
    if kind == "groups" and rank:
        groups = [{"params": params[:2]}, {"params": params[2:]}]
    if kind == "maximize":
        keys = {"maximize": bool(rank)}
    if kind == "index" and rank:
        groups = [{"params": [nn.Parameter(torch.ones(3))], "algorithm": "lion"}, {"params": params}]
    optimizer = oxidion.Muon(groups, **keys)
    for param in params:
        param.grad = placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"])
    return two_errors(optimizer.step)


def overlapping_replicas(name: str) -> tuple[str, str]:
    """The world as replica axis of a parameter that half of it shards."""
    mesh = mesh_of({"dp": 2, "fs": 2})
    param = nn.Parameter(placed(torch.ones(8, 6), mesh["fs"], {"fs": ("S", 0)}, ["fs"]))
    meshes = (
        {"replicate_mesh": dist.group.WORLD} if name == "Dion" else {"distributed_mesh": dist.group.WORLD}
    )
    optimizer = getattr(oxidion, name)([("w", param)], **meshes)
    param.grad = placed(torch.ones(8, 6), mesh["fs"], {"fs": ("S", 0)}, ["fs"])
    return two_errors(optimizer.step)


def looked_at(kind: str) -> dict[str, Any]:
    """What ``metrics`` and ``verify`` say of one matrix on several ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    weight, grad = gaussian((16, 6), 1).float() * 0.1, gaussian((16, 6), 2).float()
    keys: dict[str, Any] = {"rank_fraction": 0.5}
    if kind == "fsdp":
        mesh = mesh_of({"fs": world})
        layout = {"fs": ("S", 0)}
        param: Any = nn.Parameter(placed(weight, mesh, layout, ["fs"]))
        param.grad = placed(grad, mesh, layout, ["fs"])
    else:
        param = nn.Parameter(weight.clone())
        param.grad = grad * (1 + 0.5 * (rank - (world - 1) / 2))
        keys |= {"replicate_mesh": dist.group.WORLD, "rank_fraction": 0.25}
    optimizer = oxidion.Dion([param, nn.Parameter(weight.clone())][: 1 + (kind == "ddp")], **keys)
    if kind == "ddp":
        optimizer.param_groups[0]["params"][1].grad = param.grad.clone()
    table = optimizer.metrics()
    return {"sent": table.bytes_sent, "row": dict(table[0]), "error": optimizer.verify()[0]["update_error"]}


def copied() -> tuple[bool, str]:
    """A deep copy of an optimizer with meshes goes on as the original; pickling it is refused."""
    weight = gaussian((16, 12), 1).float()
    param = nn.Parameter(weight)
    optimizer = oxidion.Dion([param], replicate_mesh=dist.group.WORLD, rank_fraction=0.125)
    other_param, other = copy.deepcopy((param, optimizer))
    for p, o in ((param, optimizer), (other_param, other)):
        p.grad = gaussian((16, 12), 5, dist.get_rank()).float()
        o.step()
    _, text = two_errors(lambda: pickle.dumps(optimizer))
    return torch.equal(param, other_param), text


def averaged_or_not(sync: bool, equal: bool) -> tuple[str, str, list[str]]:
    """A step that checks whether gradients are averaged: its exception and warnings."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(8, 6))
    group = dist.group.WORLD
    keys = {"replicate_mesh_grad_sync": sync, "rank_fraction": 0.25, "check_grad_sync": True}
    optimizer = oxidion.Dion([("w", param)], replicate_mesh=group, **keys)
    param.grad = torch.ones(8, 6) * (1.0 if equal else 1.0 + rank)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name, text = two_errors(optimizer.step)
    return name, text, [str(w.message) for w in caught]
