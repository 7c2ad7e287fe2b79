"""Shards that were offloaded: they lie on the CPU, their mesh is one of devices, and none is touched."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import oxidion
from oxidion._core import stepper
from oxidion._dist import agree
from support.layouts import fsdp, plane
from support.sim_mesh import Layout, R

from . import jobs
from .wrapped import STEPS, _other_dim

KIND = "cuda"
BEFORE, AFTER = 3, 3


def laid_out(layout: str, shape: torch.Size) -> tuple[dict[str, int], Layout]:
    """Axes of a layout on all ranks, and the placements of a parameter."""
    world = dist.get_world_size()
    axes = {
        "fsdp": {"fs": world},
        "hsdp": {"dp": 2, "fs": world // 2},
        "plane": {"fs": world // 2, "tp": 2},
    }[layout]
    place = {"fsdp": fsdp(0), "hsdp": lambda s: {"dp": R, **fsdp(0)(s)}, "plane": plane(tp=0, fs=1)}[layout]
    return axes, place(tuple(shape))


def placed(tensor: Tensor, layout: str) -> DTensor:
    """A DTensor of a layout, whose part lies on the CPU."""
    axes, places = laid_out(layout, tensor.shape)
    return jobs.placed(tensor, jobs.mesh_of(axes, KIND), places, list(axes))


def build(
    layout: str, name: str, keys: dict[str, Any], dtype: torch.dtype = torch.float64
) -> tuple[nn.Sequential, Any]:
    """The model with offloaded shards, or plain for "one", and an optimizer."""
    network = jobs.model(dtype)
    if layout != "one":
        for layer in network:
            for key, param in [*layer.named_parameters()]:
                setattr(layer, key, nn.Parameter(placed(param.detach().clone(), layout)))
    return network, jobs.optimizer_of(network, name, **keys)


def train(
    network: nn.Sequential, optimizer: Any, layout: str, steps: int, seed: int = 1, scaler: Any = None
) -> None:
    """Steps with the gradients that a plain copy of the model has of whole batches."""
    for x, y in jobs.batches(steps, seed):
        twin = jobs.model(next(network.parameters()).dtype)
        pairs = [*zip(network.parameters(), twin.parameters(), strict=True)]
        with torch.no_grad():
            for param, copy in pairs:
                copy.copy_(jobs.whole(param))
        like = next(twin.parameters())
        loss = (twin(x.to(like)) - y.to(like)).square().mean()
        (loss if scaler is None else scaler.scale(loss)).backward()
        for param, copy in pairs:
            assert copy.grad is not None
            param.grad = copy.grad if layout == "one" else placed(copy.grad, layout)
        if scaler is None:
            optimizer.step()
        else:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()


def weights(network: nn.Module) -> list[Tensor]:
    """All parameters, whole."""
    return [jobs.whole(param).clone() for param in network.parameters()]


def where(value: Any, kind: str = KIND) -> str:
    """Where a tensor lies: the device of its part, if its mesh is of the kind."""
    if not isinstance(value, DTensor):
        return f"plain {value.device.type}"
    assert value.device_mesh.device_type == kind
    assert value.device == value._local_tensor.device
    return value.device.type


def places_of_states(layout: str, name: str, keys: dict[str, Any]) -> tuple[set[str], set[str], set[str]]:
    """Where states lie after a step and after a load, and what ``explain`` says of parameters."""
    network, optimizer = build(layout, name, keys)
    train(network, optimizer, layout, 1)

    def now() -> set[str]:
        held = [value for own in optimizer.state.values() for value in own.values()]
        return {where(value) for value in held if value.ndim}

    before = now()
    optimizer.load_state_dict(optimizer.state_dict())
    train(network, optimizer, layout, 1)
    return before, now(), set(optimizer.explain().to_dict()["device"])


def trained(layout: str, name: str, keys: dict[str, Any]) -> float:
    """Training of offloaded shards, compared with one process."""
    network, optimizer = build(layout, name, keys)
    train(network, optimizer, layout, STEPS)
    return jobs.distance(network, name, STEPS, **keys)


def save(folder: str, layout: str, name: str, keys: dict[str, Any], asynchronous: bool) -> list[Tensor]:
    """Trains, saves, and trains on; the weights at the end."""
    network, optimizer = build(layout, name, keys)
    train(network, optimizer, layout, BEFORE)
    optimizer.synchronize_for_checkpoint()
    model_state, optimizer_state = get_state_dict(network, optimizer)
    whole = {"model": model_state, "optimizer": optimizer_state}
    if asynchronous:
        pending: Any = dcp.async_save(whole, checkpoint_id=folder, process_group=dist.new_group())
        train(network, optimizer, layout, AFTER, seed=2)
        pending.result()
    else:
        dcp.save(whole, checkpoint_id=folder)
        train(network, optimizer, layout, AFTER, seed=2)
    return weights(network)


def load(folder: str, layout: str, name: str, keys: dict[str, Any]) -> tuple[list[Tensor], set[str]]:
    """Loads into a new model and trains on; the weights at the end, and where the states lie."""
    network, optimizer = build(layout, name, keys)
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(0.5)
    model_state, optimizer_state = get_state_dict(network, optimizer)
    whole = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(whole, checkpoint_id=folder, no_dist=layout == "one")
    set_state_dict(network, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    train(network, optimizer, layout, AFTER, seed=2)
    held = [value for own in optimizer.state.values() for value in own.values()]
    return weights(network), {where(value) for value in held if value.ndim}


def offloaded_state_dict(layout: str, name: str, keys: dict[str, Any]) -> tuple[int, float, set[str]]:
    """A state dict on the CPU: how many tensors, their largest distance from the states, where they lie."""
    network, optimizer = build(layout, name, keys)
    train(network, optimizer, layout, 2)
    saved = get_optimizer_state_dict(network, optimizer, options=StateDictOptions(cpu_offload=True))["state"]
    names = {param: key for key, param in network.named_parameters()}
    worst, places, count = 0.0, set(), 0
    for param, own in optimizer.state.items():
        for key, value in own.items():
            found: Any = saved[names[param]][key]  # type: ignore[index]
            places.add(found.device.type)
            assert isinstance(found, DTensor) == isinstance(value, DTensor)
            far = (jobs.whole(found).double() - jobs.whole(value).double()).abs()
            worst = max([worst, *far.reshape(-1).tolist()])
            count += 1
    return count, worst, places


def scaled(layout: str, name: str, keys: dict[str, Any]) -> tuple[float, bool, float]:
    """Distance from training without a scaler, whether an infinity changed anything, and the scale."""
    network, optimizer = build(layout, name, keys)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    train(network, optimizer, layout, STEPS, scaler=scaler)
    far = jobs.distance(network, name, STEPS, **keys)
    before = weights(network)
    for param in network.parameters():
        # Its infinity is in the shard of one rank.
        spoiled = torch.zeros(param.shape, dtype=param.dtype)
        spoiled.view(-1)[0] = float("inf")
        param.grad = placed(spoiled, layout)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    same = all(torch.equal(a, b) for a, b in zip(before, weights(network), strict=True))
    return far, not same, scaler.get_scale()


def without_backend(name: str) -> tuple[str, list[str]]:
    """The error of states over groups that exchange nothing on the CPU, and what of the states is there."""
    group = dist.new_group(backend="cuda:gloo")
    mesh = DeviceMesh.from_group(group, KIND, mesh=list(range(dist.get_world_size())), mesh_dim_names=("fs",))
    param = nn.Parameter(jobs.placed(torch.ones(8, 6), mesh, {"fs": ("S", 0)}, ["fs"]))
    optimizer = getattr(oxidion, name)([param])
    try:
        optimizer.init_state()
    except ValueError as error:
        return str(error), []
    return "", sorted(key for key in optimizer.state[param] if not key.startswith("step"))


def on_another_device() -> tuple[str, str, bool, list[str]]:
    """A step in which one rank reports that its parameters are on a device."""
    network, optimizer = build("fsdp", "Muon", {})
    devices: list[str] = []
    mine = "cpu" if dist.get_rank() == 0 else "cuda"

    def compared(*args: Any, device: str, **keys: Any) -> Any:
        devices.append(device)
        return own_agree(*args, device=mine, **keys)

    own_agree = agree.agree
    before = weights(network)
    with mock.patch.object(stepper.agree, "agree", compared):
        try:
            train(network, optimizer, "fsdp", 1)
            error, text = "", ""
        except oxidion.PlanMismatch as failure:
            error, text = type(failure).__name__, str(failure)
    same = all(torch.equal(a, b) for a, b in zip(before, weights(network), strict=True))
    return error, text, same, devices


def wrapped(layout: str, name: str, pin: bool = False) -> tuple[float, set[str], set[bool]]:
    """FSDP2's own offload: distance from one process, where gradients and states lie, what is pinned."""
    network, world = jobs.model(), dist.get_world_size()
    shard = functools.partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    if layout == "plane":
        mesh = jobs.mesh_of({"fs": world // 2, "tp": 2})
        parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (network[0], network[2], network):
            shard(layer, mesh=mesh["fs"], shard_placement_fn=_other_dim)
        share = (mesh.get_local_rank("fs"), world // 2)
    else:
        axes = {"fs": world} if layout == "fsdp" else {"dp": 2, "fs": world // 2}
        shard(network, mesh=jobs.mesh_of(axes))
        share = (dist.get_rank(), world)
    optimizer = jobs.optimizer_of(network, name)
    jobs.train(network, optimizer, STEPS, share)
    states = [value for own in optimizer.state.values() for value in own.values() if value.ndim]
    pinned = {value._local_tensor.is_pinned() for value in states if value._local_tensor.numel()}
    held = [*states, *(param.grad for param in network.parameters())]
    return jobs.distance(network, name, STEPS), {where(value, jobs.device()) for value in held}, pinned
