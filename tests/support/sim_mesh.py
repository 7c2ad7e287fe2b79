"""All ranks of a mesh in one process: each has its plan, session and shards; collectives are simulated.

Every rank runs its own schedule until it waits for a collective that another rank has not started. What is
received is filled with NaN when the collective is issued and arrives when all ranks have issued it: a plan
that reads too early gives wrong numbers. What is sent is compared with what it was at the start.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from oxidion._core.state import existing, materialise
from oxidion._dist.comm import Meshes
from oxidion._oxidion import Plan, Session

from .cases import Case

Placement = tuple[str, int]
R: Placement = ("R", 0)


def S(dim: int) -> Placement:
    """Sharded along a dimension."""
    return ("S", dim)


def T(dim: int) -> Placement:
    """Sharded along a dimension within what the other axes leave (``_StridedShard``)."""
    return ("T", dim)


Axes = dict[str, int]
Layout = Mapping[str, Placement]


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and length of a chunk of ``torch.chunk``, with empty chunks at the end."""
    full = -(-size // parts)
    start = min(full * index, size)
    return start, min(full, size - start)


def spans(shape: Sequence[int], layout: Layout, axes: Axes, at: Mapping[str, int]) -> list[tuple[int, int]]:
    """Offset and length by dimension of what the rank at ``at`` stores."""
    out = [(0, size) for size in shape]
    for kind in "ST":
        for name, (what, dim) in layout.items():
            if what == kind:
                start, size = out[dim]
                offset, length = chunk(size, axes[name], at[name])
                out[dim] = (start + offset, length)
    return out


def cut(tensor: Tensor, parts: Sequence[tuple[int, int]]) -> Tensor:
    """A copy of the part of a tensor."""
    for dim, (start, length) in enumerate(parts):
        tensor = tensor.narrow(dim, start, length)
    return tensor.clone(memory_format=torch.contiguous_format)


@dataclass
class Exchange:
    """One collective that some ranks have issued."""

    members: list[tuple[Rank, Mapping[str, Any]]] = field(default_factory=list)
    sent: dict[int, Tensor] = field(default_factory=dict)
    done: bool = False


class Rank:
    """One rank: its shards, plan and session."""

    def __init__(self, mesh: SimMesh, number: int) -> None:
        self.mesh, self.number = mesh, number
        self.at = dict(zip(mesh.axes, mesh.coordinates[number], strict=True))
        self.params: list[Tensor] = []
        self.waiting: Exchange | None = None

    def line(self, axis: str) -> list[int]:
        """Global ranks along an axis through this rank."""
        return [
            other
            for other, place in enumerate(self.mesh.coordinates)
            if all(place[i] == self.at[n] for i, n in enumerate(self.mesh.axes) if n != axis)
        ]

    def build(self, full: Sequence[Tensor]) -> None:
        """Cut the parameters and plan a step."""
        mesh = self.mesh
        self.params = [nn.Parameter(cut(p, self.spans(i, p.shape))) for i, p in enumerate(full)]
        self.optimizer = mesh.make(self.params)
        own = [{n: p for n, p in mesh.layouts[i].items() if n not in mesh.extra} for i in range(len(full))]
        self.layouts = [
            (list(p.shape), [(n, self.line(n), self.at[n], *layout[n]) for n in layout])
            for p, layout in zip(full, own, strict=True)
        ]
        replicas = [(n, self.line(n), self.at[n], averaged) for n, averaged in mesh.extra.items()]
        named = [self.line(n) if n else None for n in (mesh.outer, mesh.inner)]
        self.meshes = Meshes(replicas, *named)
        self.bind()

    def bind(self) -> None:
        """Plan and bind, as ``OxOptimizer._bind`` does."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        names = self.optimizer._STATE_NAMES
        self.plan = Plan(groups, existing(groups, state, names), self.meshes, self.layouts)
        self.transfers = self.plan.transfers  # rebuilt at every access
        optional = {name: self.optimizer._class_of(name)._OPTIONAL_ROLES for name in self.plan.algorithms}
        states = materialise(self.plan, groups, state, names, optional, [g["step"] for g in groups])
        self.arena = torch.empty(-(-self.plan.arena_bytes // 4), dtype=torch.float32)
        self.arena.fill_(math.nan)
        self.session = Session(self.plan, groups, states, state, [self.arena])

    def spans(self, index: int, shape: Sequence[int]) -> list[tuple[int, int]]:
        """The part of a parameter that this rank stores."""
        return spans(shape, self.mesh.layouts[index], self.mesh.axes, self.at)

    def begin(self, grads: Sequence[Tensor | None]) -> None:
        """Start a step with the full gradients of this rank's replica."""
        for i, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
            dtype = self.mesh.grad_dtype or param.dtype
            if dtype != param.dtype:
                param.grad_dtype = dtype
            param.grad = None if grad is None else cut(grad, self.spans(i, grad.shape)).to(dtype)
        for group in self.optimizer.param_groups:
            group["step"] += 1
        assert self.session.begin(self.optimizer.param_groups, self.optimizer.state, 1.0, 1)
        self.session.average(False)
        idle = self.session.idle()
        self.todo = [(op, k) for op, k in self.plan.schedule if op == 0 or k not in idle]
        self.flying: dict[int, Exchange] = {}

    def advance(self) -> bool:
        """Run until blocked or finished; whether anything was done."""
        moved = False
        while self.todo:
            op, k = self.todo[0]
            if op == 0:
                self.session.compute(k)
            elif op == 1:
                self.flying[k] = self.mesh.issue(self, self.transfers[k])
            elif not self.flying[k].done:
                return moved
            self.todo.pop(0)
            moved = True
        return moved

    def memory(self, place: tuple[int, int], dtype: torch.dtype = torch.uint8) -> Tensor:
        """Bytes of the arena."""
        offset, count = place
        return self.arena.view(torch.uint8)[offset : offset + count].view(dtype)


@dataclass
class Sent:
    """One collective of one rank: its kind, the ranks of its axis, the bytes that the rank gives to it."""

    kind: str
    ranks: int
    bytes: int

    @property
    def wire(self) -> float:
        """Bytes that leave the rank when the collective is a ring or direct exchange."""
        others = self.ranks - 1
        share = {"all_gather": others, "all_reduce": 2 * others / self.ranks}
        return self.bytes * share.get(self.kind, others / self.ranks)


class SimMesh:
    """A mesh of ``prod(axes)`` ranks over the parameters of a case.

    Args:
        axes: name and size of each axis, outermost first.
        make: builds the optimizer of a rank over its shards.
        layouts: placements of each parameter by axis; axes that are left out do not concern it.
        extra: axes that the user passes: whether gradients on them are averaged.
        outer: axis of ``outer_shard_mesh``.
        inner: axis of ``inner_shard_mesh``.
    """

    def __init__(
        self,
        axes: Axes,
        make: Callable[[list[Tensor]], Any],
        layouts: Sequence[Layout],
        *,
        extra: Mapping[str, bool] | None = None,
        outer: str | None = None,
        inner: str | None = None,
    ) -> None:
        self.axes, self.make, self.layouts = axes, make, layouts
        self.extra, self.outer, self.inner = dict(extra or {}), outer, inner
        self.coordinates = list(itertools.product(*(range(n) for n in axes.values())))
        self.ranks = [Rank(self, i) for i in range(len(self.coordinates))]
        self.lines: dict[tuple[int, ...], list[Exchange]] = {}
        self.sent: list[Sent] = []
        self.grad_dtype: torch.dtype | None = None
        """Type of gradients, if it is another than that of their parameters."""

    def build(self, full: Sequence[Tensor]) -> None:
        """Give every rank its shards."""
        for rank in self.ranks:
            rank.build(full)

    def issue(self, rank: Rank, transfer: Mapping[str, Any]) -> Exchange:
        """A rank starts a collective: it joins the first one of its line that it is not in yet."""
        line = self.lines.setdefault(tuple(transfer["ranks"]), [])
        exchange = next((e for e in line if rank.number not in e.sent), None)
        if exchange is None:
            exchange = Exchange()
            line.append(exchange)
        exchange.members.append((rank, transfer))
        exchange.sent[rank.number] = rank.memory(transfer["send"]).clone()
        rank.memory(transfer["recv"]).fill_(255)
        if rank is self.ranks[0]:
            self.sent.append(Sent(transfer["kind"], len(transfer["ranks"]), transfer["send"][1]))
        if len(exchange.members) == len(transfer["ranks"]):
            members = sorted(exchange.members, key=lambda m: m[0].number)
            assert [r.number for r, _ in members] == list(transfer["ranks"])
            for member, what in members:
                if what["kind"] != "all_reduce":
                    kept = member.memory(what["send"])
                    assert torch.equal(kept, exchange.sent[member.number]), "written to in flight"
            perform(members, exchange.sent)
            exchange.done = True
        return exchange

    def step(self, grads: Callable[[Rank], Sequence[Tensor | None]]) -> None:
        """One step of all ranks in lockstep."""
        self.sent.clear()
        for rank in self.ranks:
            rank.begin(grads(rank))
        while any(rank.todo for rank in self.ranks):
            moved = [rank.advance() for rank in self.ranks]
            assert any(moved), "deadlock: every rank waits"
        assert all(e.done for line in self.lines.values() for e in line)
        self.lines.clear()
        for rank in self.ranks:
            rank.session.average(True)
            rank.session.end()


def perform(members: Sequence[tuple[Rank, Mapping[str, Any]]], sent: Mapping[int, Tensor]) -> None:
    """Moves the data of one collective; ``sent`` is what each rank had when it started."""
    kinds = {transfer["kind"] for _, transfer in members}
    assert len(kinds) == 1, f"ranks meet in different collectives: {kinds}"
    kind = kinds.pop()
    if kind == "all_reduce":
        dtype = getattr(torch, members[0][1]["dtype"])
        values = [sent[rank.number].view(dtype) for rank, _ in members]
        assert len({v.numel() for v in values}) == 1
        total = torch.stack(values).double().sum(0).to(dtype)
        for rank, transfer in members:
            rank.memory(transfer["recv"], dtype).copy_(total)
        return
    send = [sent[rank.number] for rank, _ in members]
    if kind == "all_gather":
        for rank, transfer in members:
            rank.memory(transfer["recv"]).copy_(torch.cat(send))
        return
    starts = [[0, *itertools.accumulate(transfer["send_bytes"])] for _, transfer in members]
    for j, (rank, transfer) in enumerate(members):
        parts = []
        for i, start in enumerate(starts):
            length = start[j + 1] - start[j]
            assert length == transfer["recv_bytes"][i], "sent and expected bytes differ"
            parts.append(send[i][start[j] : start[j + 1]])
        rank.memory(transfer["recv"]).copy_(torch.cat(parts))


def layouts_for(case: Case, choose: Callable[[tuple[int, ...]], Layout]) -> list[Layout]:
    """The layout of each parameter of a case by its shape."""
    return [choose(shape) for shape in case.shapes]
