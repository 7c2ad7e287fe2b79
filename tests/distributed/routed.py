"""What the ranks do in the tests of routes: the same training on each, counted and measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from oxidion._core import stepper

from . import jobs
from .wrapped import _other_dim

STEPS, WIDTH, HIDDEN, PAIRS, OUT = 3, 16, 24, 3, 5
Route = str | tuple[str, ...]


class Given(TorchDispatchMode):
    """Bytes that collectives of the workspace are given within a block, by ranks of their process group.

    They are read where calls reach the group. Whole numbers are those of the ranks' comparison.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            # The first is written, the second sent; a sum has one list for both.
            sent = args[0] if isinstance(args[0], list) else [args[1]]
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group)))
            self.bytes[ranks] += sum(t.nbytes for t in sent if t.dtype != torch.int64)
        return func(*args, **(kwargs or {}))


@contextmanager
def arenas() -> Iterator[list[int]]:
    """Bytes of the memory of each workspace that is allocated within a block."""
    found: list[int] = []
    session = stepper.Session

    def bound(plan: Any, groups: Any, states: Any, state: Any, arena: list[Tensor]) -> Any:
        found.append(sum(part.untyped_storage().nbytes() for part in arena))
        return session(plan, groups, states, state, arena)

    with mock.patch.object(stepper, "Session", bound):
        yield found


def network() -> nn.Sequential:
    """Several matrices of each shape, and one with fewer rows than eight ranks."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(PAIRS):
        layers += [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH, bias=False), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, OUT)).double()


class Training:
    """The network on a mesh, and Dion on a route."""

    def __init__(self, axes: dict[str, int], route: Route, *, strided: bool = False, **keys: Any) -> None:
        self.mesh = jobs.mesh_of(axes)
        self.network = network()
        if "tp" in axes:
            each = ColwiseParallel(), RowwiseParallel()
            plan = {str(4 * pair + 2 * at): each[at] for pair in range(PAIRS) for at in range(2)}
            parallelize_module(self.network, self.mesh["tp"], plan)
        placing = None if strided or "tp" not in axes else _other_dim
        for layer in [*(m for m in self.network if isinstance(m, nn.Linear)), self.network]:
            fully_shard(layer, mesh=self.mesh["fs"], shard_placement_fn=placing)
        self.compressed = "dp" in axes
        if self.compressed:
            keys["replicate_mesh"] = self.mesh["dp"]
        self.optimizer = jobs.optimizer_of(self.network, "Dion", route=route, **keys)
        self.steps_done = 0

    def backward(self) -> None:
        """Gradients of the next step, of this rank's part of the batch."""
        self.optimizer.zero_grad()
        count = self.mesh["fs"].size() * (self.mesh["dp"].size() if self.compressed else 1)
        place = self.mesh.get_local_rank("fs")
        if self.compressed:
            place += self.mesh.get_local_rank("dp") * self.mesh["fs"].size()
        generator = torch.Generator().manual_seed(self.steps_done)
        x = torch.randn(8 * count, WIDTH, generator=generator, dtype=torch.float64).chunk(count)[place]
        (self.network(x) - 1).square().mean().backward()
        self.steps_done += 1

    def step(self) -> None:
        """One step."""
        self.backward()
        self.optimizer.step()

    def counted(self) -> tuple[dict[str, int], dict[str, int]]:
        """One step; bytes that its collectives are given by axis, and those of the plan."""
        self.backward()
        with Given() as given:
            self.optimizer.step()
        names = {
            tuple(dist.get_process_group_ranks(self.mesh.get_group(axis))): axis
            for axis in self.mesh.mesh_dim_names or ()
        }
        planned: Counter[str] = Counter()
        for transfer in self.optimizer.plan().transfers:
            assert tuple(transfer["ranks"]) in names
            planned[names[tuple(transfer["ranks"])]] += transfer["send"][1]
        return {names[ranks]: n for ranks, n in given.bytes.items() if n}, dict(planned)

    def routes(self) -> tuple[str, ...]:
        """Those of the matrices, as ``explain`` says."""
        rows = self.optimizer.explain()
        return tuple(dict.fromkeys(str(row["route"]) for row in rows if row["algorithm"] == "dion"))

    def states(self) -> list[tuple[str, Any, Tensor]]:
        """Name, placements and local elements of each state."""
        found: list[tuple[str, Any, Tensor]] = []
        for param in self.network.parameters():
            for name, value in sorted(self.optimizer.state[param].items()):
                is_placed = isinstance(value, DTensor)
                own = value.to_local() if is_placed else value
                found.append((name, value.placements if is_placed else None, own.clone()))
        return found

    def weights(self) -> list[Tensor]:
        """Whole parameters."""
        return [jobs.whole(param) for param in self.network.parameters()]


@dataclass(frozen=True)
class Found:
    """Training on one route, and within the least workspace.

    Attributes:
        routes: of the matrices, as ``explain`` says.
        distance: largest difference of a parameter from that of the first route.
        given: bytes that collectives were given in a step, by axis.
        planned: the same, of the plan.
        arena: bytes of the workspace that was allocated.
        arena_bytes: of the plan.
        limit: the least ``workspace_limit``; 0 if there was none.
    """

    routes: tuple[str, ...]
    distance: float
    given: dict[str, int]
    planned: dict[str, int]
    arena: int
    arena_bytes: int
    limit: int = 0


def least_limit(axes: dict[str, int], route: Route, **keys: Any) -> int:
    """The least workspace that the plan of every rank keeps to, as its refusals say."""
    limit = 1
    while (least := _refusal(Training(axes, route, workspace_limit=limit, **keys))) is not None:
        assert least > limit
        limit = least
    return limit


def _refusal(training: Training) -> int | None:
    """The limit that the error about a limit asks for, if there is one."""
    try:
        training.optimizer.plan()
    except ValueError as error:
        (least,) = re.findall(r"workspace_limit must be at least (\d+) bytes", str(error))
        return int(least)
    return None


def furthest(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Largest difference of two elements."""
    return max(float((a - b).abs().max()) for a, b in zip(some, others, strict=True))


def train(axes: dict[str, int], routes: Sequence[Route], strided: bool, is_tight: bool) -> list[Found]:
    """Steps on each route; with ``is_tight`` then on each within the least workspace."""
    first: list[Tensor] = []
    found = []
    for route, has_limit in [(r, False) for r in routes] + [(r, True) for r in routes if is_tight]:
        limit = least_limit(axes, route, strided=strided) if has_limit else 0
        with arenas() as allocated:
            keys = {"workspace_limit": limit} if has_limit else {}
            training = Training(axes, route, strided=strided, **keys)
            for _ in range(STEPS - 1):
                training.step()
            given, planned = training.counted()
        weights = training.weights()
        first = first or weights
        (arena,) = allocated
        total = training.optimizer.plan().arena_bytes
        distance = furthest(weights, first)
        found.append(Found(training.routes(), distance, given, planned, arena, total, limit))
    return found


def goes_on(
    axes: dict[str, int], saved: Route, loaded: Route
) -> tuple[float, bool, tuple[str, ...], tuple[str, ...]]:
    """Compares training that is resumed on another route with uninterrupted training.

    Returns:
        Their largest difference, whether states have the layout and values that were saved, and the routes
        of both.
    """
    before, after = Training(axes, saved), Training(axes, loaded)
    for _ in range(STEPS):
        before.step()
    with torch.no_grad():
        for one, other in zip(after.network.parameters(), before.network.parameters(), strict=True):
            one.copy_(other)
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    pairs = zip(before.states(), after.states(), strict=True)
    same = all(a[:2] == b[:2] and torch.equal(a[2], b[2]) for a, b in pairs)
    after.optimizer.param_groups[0]["route"] = loaded  # that of the checkpoint was loaded with the group
    after.steps_done = before.steps_done
    for _ in range(STEPS):
        before.step()
        after.step()
    return furthest(after.weights(), before.weights()), same, before.routes(), after.routes()
