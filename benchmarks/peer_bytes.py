"""Bytes that a step hands to collectives: optimizers of other packages and ours on the same matrices.

Gloo processes shard the matrices of a small model by ``fully_shard`` along their rows. Of the second and
third step of each optimizer every call of a process group is counted, below DTensor: what a process gives to
it, and what of that leaves the process if each collective sends as few bytes as it can. Both steps have to
give the same, and of ours the count has to be that of ``optimizer.plan()`` and the small comparison of the
ranks. Times are not taken. ``torch.compile`` is off, and random numbers, which DTensor has not on CPUs, are
drawn here.

The sources are not on the path: microsoft/dion is a checkout of the commit in ``peers.txt``, torchtitan is an
unpacked wheel, whose ``distributed/flex_shard`` alone is imported. DistMuon is for CUDA devices: its check
for one, its streams and its events are left out here. Tables are printed, and their figures go to
``<out>/peer_bytes.json``: means over the processes.

    git clone https://github.com/microsoft/dion FOLDER && git -C FOLDER checkout COMMIT
    pip install --no-deps --target TITAN torchtitan==0.3.0
    python benchmarks/peer_bytes.py --dion FOLDER --titan TITAN
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import oxidion
from harness import command, table, write
from oxidion._planning.traffic import sent
from sharded import Stack, on_ranks, stack

OURS, DION, TITAN = "oxidion", "microsoft/dion", "torchtitan 0.3"
#: Matrices of a layer: their shapes, and how many.
LAYER = {(256, 256): 4, (1024, 256): 1, (256, 1024): 1}
#: Kind of each operation of a process group that is met, and the position of what a process gives to it.
OPERATIONS: dict[str, tuple[str, int]] = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::alltoall_": ("all_to_all", 1),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
#: Operations that send nothing.
WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd")
#: Bytes that ranks of ours compare before a step, one all-reduce on one axis.
COMPARED = 112


@dataclass
class Given:
    """What a process gave to collectives of a kind.

    Attributes:
        calls: how many.
        given: bytes of their inputs.
        sent: bytes that leave the process: ``b - own`` of an all-to-all or reduce-scatter, ``b (n - 1)`` of
            an all-gather, ``2 b (n - 1) / n`` of an all-reduce.
    """

    calls: int = 0
    given: int = 0
    sent: float = 0.0


class Counted(TorchDispatchMode):
    """Counts operations of process groups in a block; ``.kinds`` has them by kind."""

    def __init__(self) -> None:
        """Starts with nothing counted."""
        super().__init__()
        self.kinds: dict[str, Given] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts an operation and does it; DTensors unfold first."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._schema.name
        if name in OPERATIONS:
            self._count(*OPERATIONS[name], args)
        elif "c10d" in name and name not in WAITS:
            raise NotImplementedError(f"{name} is not counted")
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, position: int, args: Any) -> None:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        pieces = [args[position]] if isinstance(args[position], Tensor) else [*args[position]]
        given = sum(piece.nbytes for piece in pieces)
        own = given / ranks
        splits = next(
            (a for a in reversed(args) if isinstance(a, list) and a and isinstance(a[0], int)), None
        )
        if kind == "all_to_all" and splits is not None:  # of the input, after those of the output
            own = splits[rank] * pieces[0][:1].nbytes
        sent = {"all_reduce": 2 * (given - own), "all_gather": given * (ranks - 1)}.get(kind, given - own)
        found = self.kinds.setdefault(kind, Given())
        found.calls, found.given, found.sent = found.calls + 1, found.given + given, found.sent + sent


Make = Callable[[Stack, DeviceMesh], Any]


def contenders(options: argparse.Namespace) -> dict[tuple[str, str, str], Make]:
    """Optimizers by source, name and what they send matrices or factors in."""
    found: dict[tuple[str, str, str], Make] = {}
    for part in options.rank_fractions:
        text = f"Dion 1/{round(1 / part)}"
        if options.dion is not None:
            found[DION, f"{text}, outer_shard_mesh", "float32"] = functools.partial(dion_of, "Dion", part)
        for sided in (True, False):
            for route in ("keep", "gather", "auto"):
                name = f"{text}, {route}{', outer_shard_mesh' if sided else ''}"
                found[OURS, name, "float32"] = functools.partial(our_dion, part, route, sided)
    if options.dion is not None:
        found[DION, "Muon", "bfloat16"] = functools.partial(dion_of, "Muon", None)
    if options.titan is not None:
        found[TITAN, "DistMuon", "float32"] = dist_muon
    for dtype in ("bfloat16", "float32"):
        found[OURS, "Muon", dtype] = lambda model, _, dtype=dtype: oxidion.Muon(
            model.parameters(), orth_dtype=dtype
        )
    return found


def our_dion(part: float, route: str, sided: bool, model: Stack, mesh: DeviceMesh) -> Any:
    """Our Dion on a route; ``sided``: with Q of the side that is cut, as microsoft/dion has it."""
    own = {"outer_shard_mesh": mesh} if sided else {}
    return oxidion.Dion(model.parameters(), rank_fraction=part, route=route, **own)


def dion_of(name: str, part: float | None, model: Stack, mesh: DeviceMesh) -> Any:
    """An optimizer of microsoft/dion with the meshes that its README gives it under FSDP2."""
    importlib.import_module("dion.dion").dtensor_randn = randn  # type: ignore[attr-defined]
    made = getattr(importlib.import_module("dion"), name)
    if part is None:
        return made([*model.parameters()], distributed_mesh=mesh)
    return made([*model.parameters()], outer_shard_mesh=mesh, rank_fraction=part)


def randn(size: Any, *, dtype: torch.dtype, device_mesh: DeviceMesh, placements: Any, **_: Any) -> DTensor:
    """Normal numbers: all processes draw the whole, and each keeps its part."""
    return distribute_tensor(torch.randn(size, dtype=dtype), device_mesh, placements, src_data_rank=None)


def dist_muon(model: Stack, _mesh: DeviceMesh) -> Any:
    """DistMuon with whole matrices owned by ranks, one bucket for two layers, as its recipe has it."""
    flex = importlib.import_module("flex_shard")
    kind = importlib.import_module("flex_shard.dist_muon").DistMuon
    named = [*model.named_parameters()]
    several = 2 * sum(LAYER.values())
    buckets = [
        flex.BucketConfig(patterns=tuple(name for name, _ in named[at : at + several]), name=str(at))
        for at in range(0, len(named), several)
    ]
    group = {"params": [p for _, p in named], "param_names": [name for name, _ in named]}
    layout = flex.ComputeLayout(shardings_by_mesh_axis={"fs": flex.Owned()})
    with (
        no_streams(),
        mock.patch.object(kind, "_validate_parameter_storage", return_value=torch.device("cpu")),
    ):
        return flex.build_dist_muon(
            [group], compute_sharding_by_fqn={name: layout for name, _ in named}, bucket_configs=buckets
        )


@contextmanager
def no_streams() -> Iterator[None]:
    """Lets what is written for streams of a device run in order on the CPU."""
    with (
        mock.patch.object(torch, "get_device_module", return_value=mock.MagicMock()),
        mock.patch.object(Tensor, "record_stream", return_value=None),
    ):
        yield


@contextmanager
def lists_over_gloo() -> Iterator[None]:
    """Lets ``all_to_all`` of lists, which gloo has not, go as one of a tensor: the bytes are the same."""

    class Later:
        def __init__(self, work: Any, lists: list[Tensor], flat: Tensor) -> None:
            self._parts = work, lists, flat

        def wait(self) -> None:
            work, lists, flat = self._parts
            work.wait()
            for target, part in zip(lists, flat.split([t.numel() for t in lists]), strict=True):
                target.copy_(part.view_as(target))

    def all_to_all(
        output: list[Tensor], given: list[Tensor], group: Any = None, async_op: bool = False
    ) -> Any:
        flat, sizes = torch.cat([t.reshape(-1) for t in given]), [t.numel() for t in given]
        into, room = flat.new_empty(sum(t.numel() for t in output)), [t.numel() for t in output]
        work = dist.all_to_all_single(into, flat, room, sizes, group=group, async_op=True)
        later = Later(work, output, into)
        return later if async_op else later.wait()

    with mock.patch.object(dist, "all_to_all", all_to_all):
        yield


def counted(optimizer: Any) -> dict[str, Given]:
    """What the second step gives to collectives; the third has to give the same."""
    found = []
    with torch.compiler.set_stance("force_eager"), lists_over_gloo(), no_streams():
        optimizer.step()
        for _ in range(2):
            with Counted() as counts:
                optimizer.step()
            found.append(counts.kinds)
    assert found[0] == found[1], "steps differ in what they send"
    return found[0]


def planned(optimizer: Any, kinds: dict[str, Given]) -> dict[str, int]:
    """What ``plan()`` says of a step, which has to be what was counted."""
    transfers = optimizer.plan().transfers
    given = sum(transfer["send"][1] for transfer in transfers)
    found = sum(kind.given for kind in kinds.values()) - COMPARED
    assert given == found, f"plan() says {given}, and {found} were counted"
    return {"given": given, "sent": sum(map(sent, transfers)), "calls": len(transfers)}


def serve(mesh: DeviceMesh, given: tuple[argparse.Namespace, int]) -> dict[str, Any]:
    """Rows of all optimizers; the work of one of the processes."""
    options, layers = given
    paths = [options.dion, options.titan and options.titan / "torchtitan" / "distributed"]
    sys.path[:0] = [str(path) for path in paths if path is not None]
    rows, shapes = [], [shape for shape, many in LAYER.items() for _ in range(many)] * layers
    for (source, name, dtype), make in contenders(options).items():
        optimizer = make(stack(shapes, mesh), mesh)
        kinds = counted(optimizer)
        plan = planned(optimizer, kinds) if source == OURS else None
        gathered: list[Any] = [None] * mesh.size()
        dist.all_gather_object(gathered, ({kind: asdict(given) for kind, given in kinds.items()}, plan))
        rows.append({"source": source, "name": name, "dtype": dtype, **summed_up(gathered)})
    return {"ranks": mesh.size(), "layers": layers, "rows": rows}


def summed_up(gathered: list[Any]) -> dict[str, Any]:
    """Collectives of the first process, and bytes as means over the processes."""
    calls = {kind: found["calls"] for kind, found in sorted(gathered[0][0].items())}
    given, sent_ = (
        statistics.fmean(sum(found[what] for found in kinds.values()) for kinds, _ in gathered)
        for what in ("given", "sent")
    )
    plans = [plan["sent"] for _, plan in gathered if plan is not None]
    row = {"calls": calls, "given": given, "sent": sent_}
    return {**row, "planned": statistics.fmean(plans)} if plans else row


def tables(run_: dict[str, Any]) -> str:
    """The table of a run."""
    shapes = ", ".join(f"{many * run_['layers']} of {m} x {n}" for (m, n), many in LAYER.items())
    head = ["package", "optimizer", "dtype sent", "collectives", "MB given", "MB sent", "`plan()` says sent"]
    rows = [
        [row["source"], row["name"], row["dtype"]]
        + [", ".join(f"{many} {kind}" for kind, many in row["calls"].items())]
        + [f"{row[key] / 1e6:.3f}" if key in row else "" for key in ("given", "sent", "planned")]
        for row in run_["rows"]
    ]
    return f"{run_['ranks']} processes, {run_['layers']} layers: {shapes}\n\n{table(head, rows)}\n"


def main() -> None:
    """Counts on every number of processes and writes the results."""
    parser = command(__doc__)
    parser.add_argument("--dion", type=Path, help="checkout of microsoft/dion; left out without one")
    parser.add_argument("--titan", type=Path, help="folder of torchtitan; left out without one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8], help="numbers of processes")
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 5], help="numbers of layers")
    parser.add_argument("--rank-fractions", type=float, nargs="+", default=[1 / 4, 1 / 16])
    options = parser.parse_args()
    runs = [on_ranks(world, serve, (options, layers)) for layers in options.layers for world in options.ranks]
    write({"torch": torch.__version__, "runs": runs}, options.out, "peer_bytes")
    print("\n".join(map(tables, runs)))


if __name__ == "__main__":
    main()
