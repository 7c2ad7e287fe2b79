"""What the ranks of a process group do in the tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import oxidion
from support.cases import case_named
from support.inputs import gaussian, gradients
from support.layouts import setting_named
from support.sim_mesh import cut, spans


def whole(tensor: Tensor) -> Tensor:
    """The whole of a tensor, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def device() -> str:
    """Where models are: on devices with NCCL."""
    return "cuda" if "nccl" in str(dist.get_backend_config()) else "cpu"


def new_mesh(axes: dict[str, int]) -> DeviceMesh:
    """A mesh over all ranks, with process groups of its own."""
    return init_device_mesh(device(), tuple(axes.values()), mesh_dim_names=tuple(axes))


@cache
def _mesh(axes: tuple[tuple[str, int], ...], kind: str) -> DeviceMesh:
    if kind == device():
        return new_mesh(dict(axes))
    own = _mesh(axes, device())
    groups: Any = [own.get_group(dim) for dim in range(own.ndim)] if own.ndim > 1 else own.get_group()
    return DeviceMesh.from_group(groups, kind, mesh=own.mesh, mesh_dim_names=tuple(dict(axes)))


def mesh_of(axes: dict[str, int], kind: str | None = None) -> DeviceMesh:
    """A mesh over all ranks, reused by all jobs to keep the threads of its process groups.

    Args:
        axes: sizes by name.
        kind: type of device that the mesh says it is of, whose process groups are those of the mesh of this
            process's device; nothing touches a device that is not there.
    """
    return _mesh(tuple(axes.items()), kind or device())


def placed(tensor: Tensor, mesh: DeviceMesh, layout: Any, dims: Sequence[str]) -> DTensor:
    """A DTensor with the placements of a layout."""
    # Also shards as fully_shard does after tensor parallelism. torch itself does not distribute such tensors,
    # nor up to 2.9 those with an empty shard.
    axes = {d: mesh.size(i) for i, d in enumerate(dims)}
    own = {d: layout[d] for d in dims}
    part = cut(tensor, spans(tensor.shape, own, axes, {d: mesh.get_local_rank(d) for d in dims}))

    def placement(at: int) -> Placement:
        kind, dim = layout[dims[at]]
        inner = [axes[d] for d in dims[at + 1 :] if layout[d] == ("S", dim)]
        strided = _StridedShard(dim, split_factor=math.prod(inner))
        return {"R": Replicate(), "S": Shard(dim), "T": strided if inner else Shard(dim)}[kind]

    places = tuple(placement(at) for at in range(len(dims)))
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    made: Any = DTensor  # from_local would move the part to the device of the mesh
    return made(part, DTensorSpec(mesh, places, tensor_meta=meta), requires_grad=False)


def steps_on_a_layout(
    case_name: str, setting_name: str, dtype: torch.dtype, named: bool, kind: str | None = None
) -> float:
    """Largest relative error of steps on DTensors against steps of one process on the same gradients."""
    case, setting = case_named(case_name), setting_named(setting_name)
    mesh = mesh_of(setting.axes, kind)
    full = [p.detach() for p in case.parameters(dtype)]
    dims = list(setting.axes)
    compressed = [name for name, averaged in setting.extra.items() if not averaged]
    tensor_dims = [d for d in dims if d not in setting.extra] if compressed else dims
    sub = mesh if tensor_dims == dims else (mesh[tuple(tensor_dims)] if tensor_dims else None)
    layouts = [setting.place(tuple(p.shape)) for p in full]

    def shard(tensor: Tensor, layout: Any) -> Tensor:
        own = tensor.clone()  # where nothing is cut, a DTensor has the memory that it was made of
        return own if sub is None else placed(own, sub, layout, tensor_dims)

    params = [nn.Parameter(shard(p, layout)) for p, layout in zip(full, layouts, strict=True)]
    single = [nn.Parameter(p.clone()) for p in full]
    orth = "float64" if dtype == torch.float64 else "float32"
    meshes: dict[str, Any] = {}
    if case.cls is oxidion.Dion and named:
        meshes = {
            f"{k}_shard_mesh": mesh[v] for k, v in (("outer", setting.outer), ("inner", setting.inner)) if v
        }
    if case.cls is oxidion.Dion and compressed:
        meshes["replicate_mesh"] = mesh[compressed[0]] if len(dims) > 1 else mesh.get_group()
    if case.cls is oxidion.Muon and named and len(dims) == 1:
        meshes = {"distributed_mesh": mesh}
    optimizer = case.build(params, orth_dtype=orth, **meshes)
    reference = case.build(single, orth_dtype=orth)
    if meshes and named and case.cls is oxidion.Dion:
        # Named meshes choose the orientation; one process takes it from the shape of Q.
        for param, one in zip(params, single, strict=True):
            if one.shape[-2] != one.shape[-1]:
                optimizer.init_state()
                reference.state[one]["Q"] = whole(optimizer.state[param]["Q"]).clone()
    for grads in gradients(case.shapes, 3, 0):
        for param, one, grad, layout in zip(params, single, grads, layouts, strict=True):
            own = grad
            if compressed and case.cls is oxidion.Dion:
                place = mesh.get_local_rank(compressed[0])
                count = setting.axes[compressed[0]]
                own = grad * (1 + 0.25 * (place - (count - 1) / 2))
            param.grad = shard(own.to(dtype), layout)
            one.grad = grad.to(dtype)
        optimizer.step()
        reference.step()
    worst = 0.0
    for param, one, start in zip(params, single, full, strict=True):
        got, wanted = whole(param).double(), one.detach().double()
        worst = max(worst, float((got - wanted).norm() / ((wanted - start.double()).norm() + 1e-300)))
    return worst


def one_expert_on_two_ranks(name: str) -> float:
    """Stacks of one matrix over an axis of two: half of the ranks store nothing of them."""
    mesh = mesh_of({"ep": 2, "tp": 2})
    shapes = [(8, 6), (1, 5, 4), (3, 4, 6), (8, 6)]
    full = [gaussian(shape, i) for i, shape in enumerate(shapes)]
    layout = {"ep": ("S", 0), "tp": ("S", 0)}

    def shard(tensor: Tensor) -> Tensor:
        return placed(tensor, mesh, {**layout, "tp": ("S", tensor.ndim - 1)}, ["ep", "tp"])

    params = [nn.Parameter(shard(p)) for p in full]
    single = [nn.Parameter(p.clone()) for p in full]
    keys = {"rank_fraction": 0.5} if name == "Dion" else {}
    optimizers = [getattr(oxidion, name)(p, **keys) for p in (params, single)]
    for step in range(2):
        for i, (param, one) in enumerate(zip(params, single, strict=True)):
            one.grad = gaussian(shapes[i], 7, step, i)
            param.grad = shard(one.grad)
        for optimizer in optimizers:
            optimizer.step()
    return max(
        float((whole(a) - b.detach()).norm() / (b.detach() - c).norm())
        for a, b, c in zip(params, single, full, strict=True)
    )


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A small network; its three outputs are fewer than four ranks.

    In float64 the gradients of all wrappers are the same to 15 digits, in whatever order they sum them.
    """
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    ).to(dtype)


def placed_model() -> nn.Sequential:
    """The network where this process trains it."""
    return model().to(device())


def optimizer_of(network: nn.Module, name: str, **keys: Any) -> Any:
    """An optimizer over matrices, with AdamW for the rest, or of one group; some are keys of groups."""
    of_groups = ("average", "min_quant_numel", "block_size")
    own = {key: keys.pop(key) for key in [*keys] if key.startswith(of_groups)}
    optimizer = _optimizer_of(network, name, keys)
    for group in optimizer.param_groups:
        group.update(own)
    return optimizer


def _optimizer_of(network: nn.Module, name: str, keys: dict[str, Any]) -> Any:
    if name == "Dion":
        keys.setdefault("rank_fraction", 0.5)
    if name == "Muon":
        dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
        keys.setdefault("orth_dtype", dtype)  # "auto" is another one on CUDA devices
    if name in ("AdamW", "Lion", "Lamb", "Adafactor", "CAME"):
        return getattr(oxidion, name)(network.named_parameters(), **{"lr": 0.01, **keys})
    matrices = [(n, p) for n, p in network.named_parameters() if p.ndim >= 2]
    vectors = [(n, p) for n, p in network.named_parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "algorithm": "adamw", "lr": 0.003}]
    return getattr(oxidion, name)(groups, lr=0.02, **keys)


def batches(steps: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[[int], Tensor] = lambda width: torch.randn(24, width, generator=generator)  # noqa: E731
    return [(draw(8), draw(3)) for _ in range(steps)]


def train(
    network: nn.Module, optimizer: Any, steps: int, share: tuple[int, int] = (0, 1), seed: int = 1
) -> None:
    """Some steps on this rank's share of each batch."""
    place, count = share
    for x, y in batches(steps, seed):
        optimizer.zero_grad()
        part = slice(place * 24 // count, (place + 1) * 24 // count)
        like = next(network.parameters())
        out = network(x[part].to(like))
        (out - y[part].to(out)).square().mean().backward()  # where parameters were offloaded it is elsewhere
        optimizer.step()


def distance(network: nn.Module, name: str, steps: int, **keys: Any) -> float:
    """Largest distance of a parameter from that of a model that one process trains, relative to its way."""
    reference = model()
    train(reference, optimizer_of(reference, name, **keys), steps)
    trained = [whole(param).cpu() for param in network.parameters()]
    return furthest(trained, [param.detach() for param in reference.parameters()])


def furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Largest distance of two weights of the model, relative to the way of the others from its first ones."""
    start = [param.detach() for param in model().parameters()]
    rows = zip(some, others, start, strict=True)
    return max(float((a - b).norm() / (b - c.to(b)).norm()) for a, b, c in rows)
