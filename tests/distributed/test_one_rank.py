"""Layouts over axes of one rank, and what is refused of meshes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import oxidion
from oxidion._dist import collectives, comm


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("fs",))
    dist.destroy_process_group()


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """A process group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[DeviceMesh]:
    with fake_group(2):
        yield init_device_mesh("cpu", (2,), mesh_dim_names=("fs",))


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    keys = {"rank_fraction": 0.5} if name == "Dion" else {}
    return getattr(oxidion, name)(model.parameters(), strict=False, **keys)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()


def full(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


@pytest.mark.parametrize("name", ["Dion", "Muon", "AdamW", "Lion"])
def test_fully_shard_on_one_rank_equals_the_plain_model(mesh: DeviceMesh, name: str) -> None:
    plain, sharded = build(), build()
    fully_shard(sharded, mesh=mesh)
    for model in (plain, sharded):
        train(model, optimizer_of(model, name), 3, seed=1)
    for (key, a), b in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert isinstance(b, DTensor)
        torch.testing.assert_close(a.detach(), full(b).detach(), rtol=0, atol=1e-6, msg=key)


def test_state_of_a_distributed_parameter_is_distributed_like_it(mesh: DeviceMesh) -> None:
    model = build()
    fully_shard(model, mesh=mesh)
    optimizer = optimizer_of(model, "Dion")
    train(model, optimizer, 1, seed=2)
    param = model[0].weight
    state = optimizer.state[param]
    assert isinstance(state["momentum"], DTensor)
    assert state["momentum"].placements == param.placements
    assert isinstance(state["Q"], DTensor)
    assert "fs:Shard(0)/1" in str(optimizer.explain())


def test_distributed_state_dict_resumes_bit_equal(mesh: DeviceMesh) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = build()
        fully_shard(model, mesh=mesh)
        return model, optimizer_of(model, "Dion")

    model, optimizer = start()
    train(model, optimizer, 2, seed=3)
    saved = get_optimizer_state_dict(model, optimizer)
    weights = {k: full(v).clone() for k, v in model.state_dict().items()}
    resumed, second = start()
    for key, value in resumed.state_dict().items():
        value.copy_(distribute_tensor(weights[key], mesh, value.placements))
    set_optimizer_state_dict(resumed, second, saved)
    train(model, optimizer, 2, seed=4)
    train(resumed, second, 2, seed=4)
    for a, b in zip(model.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(full(a), full(b))


def test_version_counter_of_a_distributed_parameter_advances(mesh: DeviceMesh) -> None:
    param = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)]))
    loss = (param * param).sum()
    optimizer = oxidion.Muon([param])
    param.grad = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradient_with_other_placements_is_redistributed(mesh: DeviceMesh) -> None:
    start, grad = torch.randn(4, 4), torch.randn(4, 4)
    param = nn.Parameter(distribute_tensor(start.clone(), mesh, [Shard(0)]))
    param.grad = distribute_tensor(grad, mesh, [Replicate()])
    oxidion.Muon([param]).step()
    plain = nn.Parameter(start.clone())
    plain.grad = grad
    oxidion.Muon([plain]).step()
    torch.testing.assert_close(param.to_local(), plain, rtol=0, atol=0)


def test_mesh_argument_is_checked(two_ranks: DeviceMesh) -> None:
    params = [nn.Parameter(torch.randn(4, 4))]
    with pytest.raises(TypeError, match="replicate_mesh must be a DeviceMesh"):
        oxidion.Dion(params, replicate_mesh="dp")
    with pytest.raises(TypeError, match="distributed_mesh must be a DeviceMesh"):
        oxidion.Muon(params, distributed_mesh=3)
    with pytest.raises(ValueError, match="outer_shard_mesh has the ranks"):
        oxidion.Dion(params, replicate_mesh=two_ranks, outer_shard_mesh=two_ranks)
    with pytest.raises(ValueError, match="inner_shard_mesh has the ranks"):
        oxidion.Dion(params, outer_shard_mesh=two_ranks, inner_shard_mesh=two_ranks)


def test_mesh_of_two_dimensions_is_refused_for_shards() -> None:
    with fake_group(4):
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fs"))
        with pytest.raises(ValueError, match=r"outer_shard_mesh must have one dimension, got 2"):
            oxidion.Dion([nn.Parameter(torch.randn(4, 4))], outer_shard_mesh=plane)


def test_parameter_sharded_over_an_unnamed_axis_is_refused() -> None:
    with fake_group(4):
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fs", "tp"))
        local = torch.randn(2, 2)
        param = nn.Parameter(DTensor.from_local(local, plane, [Shard(0), Shard(1)], run_check=False))
        optimizer = oxidion.Dion([param], outer_shard_mesh=plane["fs"])
        with pytest.raises(
            oxidion.LayoutError, match=r"axis 'tp'.*neither outer_shard_mesh nor inner_shard_mesh"
        ):
            optimizer.plan()
        oxidion.Dion([param]).plan()


def test_group_unable_to_exchange_device_memory_is_refused(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    collectives.check_backend(group, (0,), torch.device("cpu"))
    with pytest.raises(ValueError, match=r"ranks \[0\] .* on cuda: it has 'gloo'.*cpu:gloo,cuda:nccl"):
        collectives.check_backend(group, (0,), torch.device("cuda"))
    with pytest.raises(ValueError, match="cannot exchange tensors on xpu"):
        collectives.check_backend(group, (0,), torch.device("xpu"))


@pytest.mark.parametrize(("kinds", "waits"), [(["cuda"], True), (["cpu", "cuda"], False), ([], False)])
def test_ranks_compare_on_the_host_where_the_group_can(kinds: list[str], waits: bool) -> None:
    group: Any = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
    assert collectives.needs_device(group) == waits


def test_partial_parameter_is_refused(two_ranks: DeviceMesh) -> None:
    param = nn.Parameter(DTensor.from_local(torch.randn(4, 4), two_ranks, [Partial()], run_check=False))
    with pytest.raises(oxidion.LayoutError, match="sharded or replicated"):
        oxidion.Muon([param]).plan()


def test_local_tensor_that_is_no_contiguous_chunk_is_refused(two_ranks: DeviceMesh) -> None:
    local = torch.randn(3, 4)  # rank 0 of two would store two rows of four
    param = nn.Parameter(
        DTensor.from_local(
            local, two_ranks, [Shard(0)], run_check=False, shape=torch.Size([4, 4]), stride=(4, 1)
        )
    )
    with pytest.raises(oxidion.LayoutError, match=r"\[3, 4\] of \[4, 4\] are stored here.*\[2, 4\]"):
        oxidion.Muon([param]).plan()


def test_flattened_columns_that_do_not_lie_together_are_refused(two_ranks: DeviceMesh) -> None:
    kernel = distribute_tensor(torch.randn(4, 3, 2, 2), two_ranks, [Shard(2)])
    advice = "shards the columns of the flattened matrix.*Shard dimension 0 or 1 instead"
    with pytest.raises(oxidion.LayoutError, match=advice):
        oxidion.Muon([nn.Parameter(kernel)], flatten=True).plan()
    oxidion.Muon([{"params": [nn.Parameter(kernel)], "interleaved": 1}]).plan()


def test_merged_rows_that_do_not_lie_together_are_refused(two_ranks: DeviceMesh) -> None:
    def plan(limit: int) -> None:
        oxidion.SOAP([nn.Parameter(kernel)], merge_dims=True, max_precondition_dim=limit).plan()

    kernel = distribute_tensor(torch.randn(8, 3, 2, 2), two_ranks, [Shard(1)])
    with pytest.raises(oxidion.LayoutError, match=r"shards the rows of the .*Shard dimension 0 or 2 instead"):
        plan(24)
    with pytest.raises(oxidion.LayoutError, match=r"shards the rows of the .*Shard dimension 0 instead"):
        plan(100)
    plan(12)  # 8 x 12: the columns are cut


def test_mesh_of_one_rank_is_accepted(mesh: DeviceMesh) -> None:
    param = nn.Parameter(torch.randn(4, 4))
    optimizer = oxidion.Dion([param], replicate_mesh=dist.group.WORLD, outer_shard_mesh=mesh)
    param.grad = torch.randn(4, 4)
    before = param.detach().clone()
    optimizer.step()
    assert not torch.equal(before, param)
    optimizer.synchronize_for_checkpoint()


def test_named_meshes_keep_their_names() -> None:
    with fake_group(4):
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fs", "tp"))
        made = comm.read_meshes(("replicate_mesh", None, True), plane["fs"], plane["tp"])
    assert (made.outer, made.inner) == ([0, 2], [0, 1])
