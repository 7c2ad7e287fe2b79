"""Checkpoints that ranks write on one layout and read on another."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import oxidion
from oxidion._reference.dion import dion_step
from oxidion._reference.registry import REFERENCE
from support.inputs import gaussian

from . import jobs
from .wrapped import _other_dim

BEFORE, AFTER = 3, 3


def build(
    layout: str, name: str, keys: dict[str, Any], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any, tuple[int, int]]:
    """A model and optimizer on a layout, and this rank's share of each batch."""
    network = jobs.model(dtype)
    if layout == "one":
        return network, jobs.optimizer_of(network, name, **keys), (0, 1)
    world = dist.get_world_size()
    if layout == "fsdp":
        fully_shard(network, mesh=jobs.mesh_of({"fs": world}))
        return network, jobs.optimizer_of(network, name, **keys), (dist.get_rank(), world)
    if layout == "hsdp":
        mesh = jobs.mesh_of({"dp": 2, "fs": world // 2})
        # Dion averages over the replicas itself.
        fully_shard(network, mesh=mesh["fs"] if name == "Dion" else mesh)
        own = {"replicate_mesh": mesh["dp"], **keys} if name == "Dion" else keys
        return network, jobs.optimizer_of(network, name, **own), (dist.get_rank(), world)
    assert layout in ("plane", "strided")
    mesh = jobs.mesh_of({"fs": world // 2, "tp": 2})
    parallelize_module(network, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (network[0], network[2], network):
        fully_shard(layer, mesh=mesh["fs"], shard_placement_fn=None if layout == "strided" else _other_dim)
    share = (mesh.get_local_rank("fs"), mesh.size(0))
    return network, jobs.optimizer_of(network, name, **keys), share


def weights(network: nn.Module) -> list[Tensor]:
    """All parameters, whole."""
    return [jobs.whole(p).clone() for p in network.parameters()]


def save(
    folder: str, layout: str, name: str, keys: dict[str, Any], dtype: torch.dtype, asynchronous: bool = False
) -> list[Tensor]:
    """Trains, saves, and trains on; the weights at the end."""
    network, optimizer, share = build(layout, name, keys, dtype)
    jobs.train(network, optimizer, BEFORE, share, seed=1)
    optimizer.synchronize_for_checkpoint()
    model_state, optimizer_state = get_state_dict(network, optimizer)
    whole = {"model": model_state, "optimizer": optimizer_state}
    if asynchronous:
        # The thread that saves needs a group of its own: the training's collectives go on meanwhile.
        pending = dcp.async_save(whole, checkpoint_id=folder, process_group=dist.new_group())
        jobs.train(network, optimizer, AFTER, share, seed=2)
        pending.result()
    else:
        dcp.save(whole, checkpoint_id=folder, no_dist=layout == "one")
        jobs.train(network, optimizer, AFTER, share, seed=2)
    with optimizer.averaged():
        return weights(network)


def load(
    folder: str,
    layout: str,
    name: str,
    keys: dict[str, Any],
    dtype: torch.dtype,
    other: dict[str, Any] | None = None,
) -> tuple[list[Tensor], dict[str, str]]:
    """Loads into a new model and trains on; the weights at the end, and the dtypes of the states.

    Settings that are to be ``other`` than in the checkpoint are changed in what was read.
    """
    network, optimizer, share = build(layout, name, keys, dtype)
    with torch.no_grad():
        for param in network.parameters():
            param.mul_(0.5)  # nothing may come from the initial weights
    model_state, optimizer_state = get_state_dict(network, optimizer)
    whole = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(whole, checkpoint_id=folder, no_dist=layout == "one")
    for group in whole["optimizer"]["param_groups"]:
        group.update(other or {})
    set_state_dict(network, optimizer, model_state_dict=whole["model"], optim_state_dict=whole["optimizer"])
    dtypes = {
        f"{type(value).__name__} {key}": str(value.dtype)
        for state in optimizer.state.values()
        for key, value in state.items()
    }
    jobs.train(network, optimizer, AFTER, share, seed=2)
    dtypes |= {
        f"stepped {type(value).__name__} {key}": str(value.dtype)
        for state in optimizer.state.values()
        for key, value in state.items()
    }
    with optimizer.averaged():
        return weights(network), dtypes


def plain_resume(layout: str, name: str, keys: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """``state_dict`` into a fresh optimizer on the same layout; weights of both runs."""
    network, optimizer, share = build(layout, name, keys)
    jobs.train(network, optimizer, BEFORE, share, seed=1)
    optimizer.synchronize_for_checkpoint()
    saved = optimizer.state_dict()
    again, second, _ = build(layout, name, keys)
    with torch.no_grad():
        for target, source in zip(again.parameters(), network.parameters(), strict=True):
            jobs_local(target).copy_(jobs_local(source))
    second.load_state_dict(saved)
    before = [len(o.plan().transfers) for o in (optimizer, second)]
    assert before[0] == before[1]
    for one, other in ((network, optimizer), (again, second)):
        jobs.train(one, other, AFTER, share, seed=2)
    return weights(network), weights(again)


def broadcast_resume(layout: str, name: str, keys: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], int]:
    """A whole state dict that only rank 0 has, into fresh ones on all; weights of both runs, and its size."""
    network, optimizer, share = build(layout, name, keys)
    jobs.train(network, optimizer, BEFORE, share, seed=1)
    optimizer.synchronize_for_checkpoint()
    gathered = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model_state, optimizer_state = get_state_dict(network, optimizer, options=gathered)
    again, second, _ = build(layout, name, keys)
    with torch.no_grad():
        for param in again.parameters():
            param.mul_(0.5)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, model_state, options=options)
    set_optimizer_state_dict(again, second, optimizer_state, options=options)
    for one, other in ((network, optimizer), (again, second)):
        jobs.train(one, other, AFTER, share, seed=2)
    return weights(network), weights(again), len(optimizer_state)


def jobs_local(tensor: Tensor) -> Tensor:
    """What this process holds."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def placements(layout: str) -> list[tuple[str, str, str, str]]:
    """Names with the placements of parameter, momentum and Q after a step."""
    network, optimizer, share = build(layout, "Dion", {})
    jobs.train(network, optimizer, 1, share)
    rows = []
    for name, param in network.named_parameters():
        state = optimizer.state[param]
        assert isinstance(param, DTensor)
        if "Q" in state:
            for value in (state["momentum"], state["Q"]):
                assert isinstance(value, DTensor)
                assert value.device_mesh == param.device_mesh
            rows.append((name, *(str(v.placements) for v in (param, state["momentum"], state["Q"]))))
    return rows


def spread_of_momentum() -> tuple[float, float]:
    """Largest difference between the momenta of two replicas before and after synchronizing."""
    network, optimizer, share = build("hsdp", "Dion", {"rank_fraction": 0.25})
    jobs.train(network, optimizer, 2, share)
    out = []
    for sync in (False, True):
        if sync:
            optimizer.synchronize_for_checkpoint()
        worst = 0.0
        for param in optimizer.param_groups[0]["params"]:
            mine = jobs_local(optimizer.state[param]["momentum"])
            group = optimizer._meshes.pending[next(iter(optimizer._meshes.pending))]
            both = [torch.empty_like(mine) for _ in range(2)]
            dist.all_gather(both, mine.contiguous(), group=group)
            if mine.numel():
                worst = max(worst, float((both[0] - both[1]).abs().max()))
        out.append(worst)
    return out[0], out[1]


def foreign(state_dict: dict[str, Any], full: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    """A checkpoint of plain tensors into an optimizer over DTensors, and one step."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    layout = {"fs": ("S", 0)}
    params = [nn.Parameter(jobs.placed(p, mesh, layout, ["fs"])) for p in full]
    optimizer = oxidion.Dion(params, rank_fraction=0.5)
    optimizer.load_state_dict(state_dict)
    for param, grad in zip(params, grads, strict=True):
        param.grad = jobs.placed(grad, mesh, layout, ["fs"])
    optimizer.step()
    return [jobs.whole(p) for p in params]


def of_the_reference(named: bool) -> list[float]:
    """A checkpoint as microsoft/dion writes it under FSDP2, with Q of the sharded side, and one step."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    shard = {"fs": ("S", 0)}
    errors = []
    for rows, cols in ((12, 8), (6, 10)):
        weight, grad, momentum = (gaussian((rows, cols), rows, i).float() for i in range(3))
        q = gaussian((rows, 4), rows, 3).float()
        weight *= 0.01  # its rounding is small compared with the update
        param = nn.Parameter(jobs.placed(weight, mesh, shard, ["fs"]))
        keys: dict[str, Any] = {"outer_shard_mesh": mesh} if named else {}
        optimizer = oxidion.Dion([param], rank_fraction=4 / min(rows, cols), **keys)
        group = {
            "params": [0],
            "rank_fraction": 4 / min(rows, cols),
            "rank_multiple_of": 1,
            "lr": 0.02,
            "mu": 0.9,
        }
        group |= {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "epsilon": 1e-8, "oversample": 1.25}
        group |= {"algorithm": "dion", "step": 7}
        state = {
            name: jobs.placed(value, mesh, shard, ["fs"])
            for name, value in (("momentum", momentum), ("Q", q))
        }
        optimizer.load_state_dict({"state": {0: state}, "param_groups": [group]})
        param.grad = jobs.placed(grad, mesh, shard, ["fs"])
        optimizer.step()
        wanted, kept = weight.double(), {"momentum": momentum.double(), "Q": q.double()}
        dion_step(wanted, grad.double(), kept, {**group, "transposed": True})
        update = (wanted - weight.double()).norm()
        errors.append(float((jobs.whole(param).double() - wanted).norm() / update))
        # The sign of a column is that of P's, which no factorization fixes.
        got = jobs.whole(optimizer.state[param]["Q"]).double().abs()
        errors.append(float((got - kept["Q"].abs()).norm() / kept["Q"].norm()))
        assert optimizer.param_groups[0]["step"] == 8
    return errors


def orthonormal_of_the_reference(algorithm: str) -> list[float]:
    """The same of Muon and NorMuon, whose states lie as the parameter does."""
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    shard = {"fs": ("S", 0)}
    keys: dict[str, Any] = {"lr": 0.02, "mu": 0.9, "weight_decay": 0.01, "epsilon": 1e-8, "nesterov": True}
    if algorithm == "normuon":
        keys["muon_beta2"] = 0.9
    cls = {"muon": oxidion.Muon, "normuon": oxidion.NorMuon}[algorithm]
    saved = {**keys, "beta1": 0.9, "beta2": 0.95, "cautious_wd": False, "algorithm": algorithm, "step": 7}
    saved |= {"flatten": False, "adjust_lr": "spectral_norm", "params": [0]}
    errors = []
    for rows, cols in ((12, 8), (6, 10)):
        weight, grad, momentum = (gaussian((rows, cols), rows, i) for i in range(3))
        state = {"momentum": momentum}
        if algorithm == "normuon":
            state["variance_neuron"] = gaussian((rows, 1), rows, 3).square()
        param = nn.Parameter(jobs.placed(weight, mesh, shard, ["fs"]))
        optimizer = cls([param], orth_dtype="float64")
        placed = {name: jobs.placed(value, mesh, shard, ["fs"]) for name, value in state.items()}
        optimizer.load_state_dict({"state": {0: placed}, "param_groups": [saved]})
        param.grad = jobs.placed(grad, mesh, shard, ["fs"])
        optimizer.step()
        wanted, kept = weight.clone(), {name: value.clone() for name, value in state.items()}
        REFERENCE[algorithm](wanted, grad, kept, {**optimizer.param_groups[0], "lr": 0.02})
        errors.append(float((jobs.whole(param) - wanted).norm() / (wanted - weight).norm()))
        for name, value in kept.items():
            errors.append(float((jobs.whole(optimizer.state[param][name]) - value).norm() / value.norm()))
        assert optimizer.param_groups[0]["step"] == 8
    return errors


def whole_folder_of_ranks(root: str, failing: int | None) -> tuple[str | None, str | None, list[str]]:
    """Every rank writes a file of its own to a folder; one may fail.

    Returns:
        What was raised, the newest folder, and the names of the files in it.
    """
    said, rank = None, dist.get_rank()
    try:
        with oxidion.checkpoint.whole_folder(root, 3) as folder:
            time.sleep(0.2 * rank)  # the folder gets its name after the last rank has written
            place = folder / "none" / "file" if rank == failing else folder / f"rank{rank}"
            place.write_text("content")
    except (OSError, RuntimeError) as error:
        said = f"{type(error).__name__}: {error}"
    newest = oxidion.checkpoint.latest_folder(root)
    return said, newest and newest.name, sorted(path.name for path in newest.iterdir()) if newest else []


def save_during_steps(folder: str, is_ours: bool) -> list[Tensor]:
    """Takes steps over the default group while checkpoints are written; how far off the last one is."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    params = [nn.Parameter(distribute_tensor(torch.randn(24, 16), mesh, [Shard(0)])) for _ in range(3)]
    optimizer = oxidion.Muon([(f"weight {at}", param) for at, param in enumerate(params)], lr=0.1)

    def steps(count: int) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

    kept: list[Tensor] = []
    for number in range(4):
        steps(1)
        kept = [param.detach().clone() for param in params]
        state = {f"weight {at}": value for at, value in enumerate(kept)}
        if is_ours:
            saving = oxidion.checkpoint.async_save(state, folder, number)
        else:
            saving = dcp.async_save(state, checkpoint_id=f"{folder}/step-{number:08d}")
        steps(20)
        saving.result()
    read = {f"weight {at}": torch.zeros_like(value) for at, value in enumerate(kept)}
    newest = oxidion.checkpoint.latest_folder(folder)
    assert newest is not None
    assert newest.name == "step-00000003"
    dcp.load(read, checkpoint_id=newest)
    pairs: Any = zip(read.values(), kept, strict=True)
    return [one.to_local() - other.to_local() for one, other in pairs]
