"""What the ranks do in the tests of steps in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import oxidion
from oxidion._cuda import device
from support.inputs import gaussian

from . import jobs, offloaded
from .wrapped import _dim_one, _other_dim

STEPS = 50


def network_on(layout: str) -> nn.Sequential:
    """The model on all ranks: a shard for each layer and the rest, so hooks are called layer by layer."""
    world = dist.get_world_size()
    network = jobs.placed_model().float()
    keys: dict[str, Any] = {}
    if layout in ("plane", "tp"):
        axes = {"fs": world // 2, "tp": 2} if layout == "plane" else {"tp": world}
        mesh = jobs.mesh_of(axes)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(network, mesh["tp"] if layout == "plane" else mesh, plan)
        if layout == "tp":
            return network
        keys = {"mesh": mesh["fs"], "shard_placement_fn": _other_dim}
    elif layout == "hsdp":
        keys = {"mesh": jobs.mesh_of({"dp": 2, "fs": world // 2})}
    else:
        keys = {"mesh": jobs.mesh_of({"fs": world})}
        if layout == "columns":
            keys["shard_placement_fn"] = _dim_one
        if layout == "offload":
            keys["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for layer in (network[0], network[2], network):
        fully_shard(layer, **keys)
    return network


def build(name: str, keys: dict[str, Any], inside: bool, network: nn.Module, per: str = "module") -> Any:
    """An optimizer that steps after the backward pass or inside of it."""

    def made(_named: object) -> Any:
        return jobs.optimizer_of(network, name, **keys)

    return oxidion.in_backward(network, made, per=per) if inside else made(None)


def losses(network: nn.Module, layout: str, steps: int, seed: int = 1) -> list[Callable[[], Tensor]]:
    """Functions of the loss of each step on this rank's share."""
    world = dist.get_world_size()
    count = {"tp": 1, "plane": max(1, world // 2)}.get(layout, world)
    place = dist.get_rank() // (world // count)

    def loss_of(x: Tensor, y: Tensor) -> Callable[[], Tensor]:
        part = slice(place * 24 // count, (place + 1) * 24 // count)
        return lambda: (network(x[part]) - y[part]).square().mean()

    return [loss_of(x, y) for x, y in jobs.batches(steps, seed)]


def train(network: nn.Module, optimizer: Any, layout: str, steps: int, seed: int = 1) -> None:
    """Some steps."""
    for loss in losses(network, layout, steps, seed):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def alike(some: nn.Module, others: nn.Module) -> bool:
    """True for two models whose parts on this rank are equal bit for bit."""
    pairs = zip(some.parameters(), others.parameters(), strict=True)
    return all(torch.equal(local(one), local(other)) for one, other in pairs)


def local(value: Tensor) -> Tensor:
    """The part of this rank."""
    return value.to_local().detach() if isinstance(value, DTensor) else value.detach()


def same_states(some: Any, others: Any) -> bool:
    """True for state dicts that are equal on this rank bit for bit."""
    pairs = [
        (value, others["state"][key][role])
        for key, own in some["state"].items()
        for role, value in own.items()
    ]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in some["param_groups"]]
    wanted = [{k: v for k, v in g.items() if k != "params"} for g in others["param_groups"]]
    return bool(pairs) and groups == wanted and all(torch.equal(local(a), local(b)) for a, b in pairs)


def steps(name: str, keys: dict[str, Any], layout: str, per: str) -> tuple[bool, bool, bool]:
    """Compares steps in the backward pass with those after it: equal, moved, and without collectives."""
    networks = [network_on(layout), network_on(layout)]
    optimizers = [
        build(name, keys, inside, network, per)
        for inside, network in zip((False, True), networks, strict=True)
    ]
    for network, optimizer in zip(networks, optimizers, strict=True):
        train(network, optimizer, layout, STEPS)
    quiet = all(not unit._comms and not unit._groups for unit in optimizers[1].units)
    equal = alike(*networks) and same_states(*(optimizer.state_dict() for optimizer in optimizers))
    free = all(param.grad is None for param in networks[1].parameters())
    return equal and free, not alike(networks[1], network_on(layout)), quiet


def refusal(name: str, keys: dict[str, Any], layout: str) -> str:
    """Error of the construction."""
    try:
        build(name, keys, True, network_on(layout))
    except (oxidion.LayoutError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def mesh_of_the_constructor() -> str:
    """Error where the optimizer was given a mesh."""
    return refusal("AdamW", {"distributed_mesh": jobs.mesh_of({"fs": dist.get_world_size()})}, "rows")


def accumulation(name: str) -> tuple[bool, str]:
    """Two passes for each step by FSDP2's switch, as after the backward pass; then without the switch."""
    networks: list[Any] = [network_on("rows"), network_on("rows")]
    optimizers = [
        build(name, {}, inside, network) for inside, network in zip((False, True), networks, strict=True)
    ]
    for network, optimizer in zip(networks, optimizers, strict=True):
        for first, second in zip(losses(network, "rows", 6), losses(network, "rows", 6, 2), strict=True):
            network.set_requires_gradient_sync(False)
            first().backward()
            network.set_requires_gradient_sync(True)
            second().backward()
            optimizer.step()
            optimizer.zero_grad()
    equal = alike(*networks)
    (loss,) = losses(networks[1], "rows", 1)
    loss().backward()
    try:
        loss().backward()
    except RuntimeError as error:
        return equal, str(error)
    return equal, ""


def most_alive(inside: bool) -> int:
    """The most bytes of sharded gradients that were alive at once while hooks were called."""
    network = network_on("rows")
    alive: list[weakref.ref[Tensor]] = []
    most = [0]

    def note(param: Tensor) -> None:
        assert isinstance(param.grad, DTensor)
        alive.append(weakref.ref(param.grad))
        held = {id(grad): local(grad).nbytes for ref in alive if (grad := ref()) is not None}
        most[0] = max(most[0], sum(held.values()))

    for param in network.parameters():
        param.register_post_accumulate_grad_hook(note)
    train(network, build("AdamW", {}, inside, network), "rows", 3)
    return most[0]


def wrapped_by_ddp(before: bool) -> str:
    """Error where DDP is around the model, made before the optimizer or after it."""
    network: nn.Module = jobs.placed_model()
    try:
        if before:
            build("AdamW", {}, True, DistributedDataParallel(network))
        else:
            build("AdamW", {}, True, network)
            DistributedDataParallel(network)(torch.ones(2, 8, dtype=torch.float64))
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Experts(nn.Module):
    """A stack of matrices, distributed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        mesh = jobs.mesh_of({"ep": dist.get_world_size()})
        self.weight = nn.Parameter(distribute_tensor(gaussian((4, 8, 6), 1).float(), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        """What this rank's matrices make of x."""
        own: Any = self.weight
        out: Tensor = x @ own.to_local()
        return out


def experts(name: str) -> tuple[bool, bool]:
    """Steps over such a stack; equal to those after the backward pass, and moved."""
    networks = [Experts(), Experts()]
    cls = getattr(oxidion, name)
    optimizers = [
        cls(networks[0].named_parameters(), lr=0.02),
        oxidion.in_backward(networks[1], lambda named: cls(named, lr=0.02)),
    ]
    for network, optimizer in zip(networks, optimizers, strict=True):
        for _ in range(STEPS):
            network(torch.ones(3, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return alike(*networks), not alike(networks[1], Experts())


def resumed(name: str, keys: dict[str, Any]) -> tuple[bool, bool]:
    """A checkpoint by torch's functions goes on in another optimizer of the kind and in an ordinary one."""
    network = network_on("rows")
    optimizer = build(name, keys, True, network)
    train(network, optimizer, "rows", 5)
    optimizer.synchronize_for_checkpoint()
    saved = get_optimizer_state_dict(network, optimizer)
    weights = {key: value.clone() for key, value in network.state_dict().items()}
    others: list[Any] = [network_on("rows"), network_on("rows")]
    made = [build(name, keys, inside, other) for inside, other in zip((False, True), others, strict=True)]
    for other, own in zip(others, made, strict=True):
        other.load_state_dict(weights)
        set_optimizer_state_dict(other, own, saved)
    for other, own in [(network, optimizer), *zip(others, made, strict=True)]:
        train(other, own, "rows", 5, seed=3)
    return alike(network, others[0]), alike(network, others[1])


def gradient_placed_as(placement: Placement) -> str:
    """Error of the hook where a replicated parameter has a gradient of another placement."""
    mesh = jobs.mesh_of({"tp": dist.get_world_size()})
    holder = nn.Module()
    holder.weight = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()], run_check=False))
    optimizer = oxidion.in_backward(holder, oxidion.AdamW)
    shape = (4 // mesh.size(), 4) if isinstance(placement, Shard) else (4, 4)
    holder.weight.grad = DTensor.from_local(torch.ones(shape), mesh, [placement], run_check=False)
    before = local(holder.weight).clone()
    try:
        optimizer._arrived(optimizer.units[0], holder.weight)
    except oxidion.LayoutError as error:
        return str(error) if torch.equal(before, local(holder.weight)) else "written"
    return ""


def partial_gradient() -> str:
    """As above, for contributions to a sum."""
    return gradient_placed_as(Partial())


def sharded_gradient() -> str:
    """As above, for shards."""
    return gradient_placed_as(Shard(0))


def copies_awaited() -> list[str]:
    """Kinds of devices whose copies are awaited before a step on shards that were offloaded from them."""
    network, _ = offloaded.build("fsdp", "AdamW", {}, torch.float32)
    optimizer = build("AdamW", {}, True, network)
    with mock.patch.object(device, "finish_copies") as waited:
        for unit in optimizer.units:
            for param in unit.parameters():
                param.grad = offloaded.placed(torch.ones(param.shape), "fsdp")
                optimizer._arrived(unit, param)
    return [call.args[0] for call in waited.call_args_list]
