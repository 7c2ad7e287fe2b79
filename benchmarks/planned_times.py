"""Times of steps over gloo processes, and the times that the planner estimates for their plans.

For each number of processes this machine is measured as they share it: every process does the same at the
same time. Found are the rate of products in float32 at one thread, the bandwidth of memory, and latency and
bytes a second of every kind of collective. They are written as a hardware file,
``<out>/<name>-<processes>.json``, that ``python -m oxidion plan --hardware FILE`` takes.

A few optimizers step a small model that ``fully_shard`` has cut. All of this is interleaved in rounds. A
sample is the time of the slowest process. Of the samples the median counts, or with ``--least`` the least:
where a machine has other work too, that only adds to a time. Next to the time of a step stands what
the planner says of ``optimizer.plan()`` with that hardware file. Tables are printed, and their figures go to
``<out>/<name>.json``.

    python benchmarks/planned_times.py
    python benchmarks/planned_times.py --ranks 2 --rounds 3 --out /tmp/times
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import oxidion
from harness import command, facts, in_turns, table, write
from oxidion._dist import collectives
from oxidion._planning import clock, hardware, traffic
from sharded import on_ranks, stack

SHAPES = ((512, 512),) * 4 + ((512, 1024),) * 4 + ((1024, 1024),)
SINGLE: dict[str, Any] = {"orth_dtype": "float32"}
#: Optimizers by what a reader calls them: class and settings.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "AdamW": ("AdamW", {}),
    "Lion": ("Lion", {}),
    "GaLoreAdamW, rank 64": ("GaLoreAdamW", {"rank": 64, "update_proj_gap": 10**6, "state_bits": 32}),
    "Dion 1/16, keep": ("Dion", {"rank_fraction": 1 / 16, "route": "keep", **SINGLE}),
    "Dion 1/16, gather": ("Dion", {"rank_fraction": 1 / 16, "route": "gather", **SINGLE}),
    "Dion 1/4, keep": ("Dion", {"rank_fraction": 1 / 4, "route": "keep", **SINGLE}),
    "Dion 1/4, gather": ("Dion", {"rank_fraction": 1 / 4, "route": "gather", **SINGLE}),
    "Dion2 1/4": ("Dion2", {"fraction": 1 / 4, **SINGLE}),
    "Muon": ("Muon", SINGLE),
    "NorMuon": ("NorMuon", SINGLE),
}
KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
#: Bytes that a process gives to a collective; what it is given from an all-gather is as much.
MESSAGES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)
#: Collectives that follow each other in a sample, as they do in a step.
ROW = 4
#: How many products tell the rate, and the sides of their matrices.
PRODUCTS, SIDE = 32, 512
#: How many sums tell the bandwidth, and the elements of their vectors: about as many bytes as a shard has.
SUMS, ELEMENTS = 2, 1 << 21
#: Steps that are faster or slower by less than this are no order that a model has to tell.
CLEARLY = 1.5


def contender(name: str, mesh: DeviceMesh) -> Any:
    """An optimizer of a model of its own, with gradients."""
    kind, settings = CONTENDERS[name]
    return getattr(oxidion, kind)(stack(SHAPES, mesh).parameters(), lr=1e-3, **settings)


def rates() -> dict[str, Callable[[], float]]:
    """Samples of the seconds of products in float32 and of sums ``a + b -> c``: all processes do as much."""
    left, right, out = (torch.randn(SIDE, SIDE) for _ in range(3))
    one, two, total = (torch.ones(ELEMENTS) for _ in range(3))

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    def sums() -> None:
        for _ in range(SUMS):
            torch.add(one, two, out=total)

    return {"products": functools.partial(timed, products), "memory": functools.partial(timed, sums)}


def transfer(kind: str, given: int) -> dict[str, Any]:
    """A collective as a plan has it, in which all parts are equal."""
    world, rank = dist.get_world_size(), dist.get_rank()
    parts = [given // world] * world
    room = given * world if kind == "all_gather" else given
    return {
        "kind": kind, "ranks": list(range(world)), "coordinate": rank, "dtype": "float32", "lines": [],
        "send": (0, given), "recv": (given, room), "send_bytes": parts, "recv_bytes": parts,
    }  # fmt: skip


def collective(kind: str, given: int) -> Callable[[], float]:
    """Samples of the seconds of a collective, started as a step starts it."""
    about = transfer(kind, given)
    arena = torch.ones((given + about["recv"][1]) // 4)
    (start,) = collectives.bind([about], arena, {tuple(about["ranks"]): dist.group.WORLD})

    def several() -> None:
        for _ in range(ROW):
            start().wait()

    def sample() -> float:
        arena.fill_(1.0)  # and sums do not overflow
        return timed(several) / ROW

    return sample


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call on the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Latency and rate of ``seconds = latency + bytes / rate``, by least squares of relative errors."""
    weights = [1 / t**2 for _, t in points]
    total = sum(weights)
    mean_s = sum(w * s for w, (s, _) in zip(weights, points, strict=True)) / total
    mean_t = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (s - mean_s) ** 2 for w, (s, _) in zip(weights, points, strict=True))
    slope = sum(w * (s - mean_s) * (t - mean_t) for w, (s, t) in zip(weights, points, strict=True)) / spread
    # Where noise hides what bytes cost, all of them cost a hundredth.
    slope = max(slope, 0.01 * mean_t / max(s for s, _ in points))
    return max(mean_t - slope * mean_s, 0.0), 1 / slope


def cores() -> int:
    """Cores that these processes may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware_of(middle: dict[str, float], sent: dict[str, int], world: int) -> dict[str, Any]:
    """Contents of a hardware file of a machine, from its seconds by sample."""
    lines = {
        kind: [*line([(sent[name], middle[name]) for name in sent if name.startswith(f"{kind} ")])]
        for kind in KINDS
    }
    return {
        "measured": True,
        "flops": {"float32": 2 * SIDE**3 * PRODUCTS / middle["products"]},
        "memory": 12 * ELEMENTS * SUMS / middle["memory"],
        "inner": lines["all_to_all"],
        "outer": lines["all_to_all"],
        "node": world,
        "collectives": lines,
        "hides": False,
        "share": max(world / cores(), 1.0),
    }


def serve(mesh: DeviceMesh, options: argparse.Namespace) -> dict[str, Any]:
    """Contents of the hardware file, times and estimates; the work of one of the processes."""
    messages = {f"{kind} {given}": (kind, given) for kind in KINDS for given in MESSAGES}
    optimizers = {name: contender(name, mesh) for name in options.only}
    jobs: dict[str, Callable[[], float]] = {
        **rates(),
        **{name: collective(*message) for name, message in messages.items()},
        **{name: functools.partial(timed, optimizer.step) for name, optimizer in optimizers.items()},
    }
    for job in jobs.values():
        job()
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for name in in_turns(jobs, options.rounds):
        samples[name].append(jobs[name]())
    middle = {name: options.counted(values) for name, values in samples.items()}
    sent = {name: traffic.sent(transfer(*message)) for name, message in messages.items()}
    machine = hardware_of(middle, sent, mesh.size())
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(machine, file)
        file.flush()
        known = hardware.load(file.name)
    steps = {name: {**estimated(each, known), "measured": middle[name]} for name, each in optimizers.items()}
    return {"ranks": mesh.size(), "hardware": machine, "steps": steps}


def estimated(optimizer: Any, known: hardware.Hardware) -> dict[str, Any]:
    """What the planner says of the plan of an optimizer."""
    time_of = clock.step_time(optimizer.plan(), known, "float32", {"fs": 1})
    return {
        "estimate": time_of.total,
        "compute": time_of.compute,
        "exposed": time_of.exposed,
        "communication": time_of.communication,
    }


def swapped(steps: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs whose first clearly takes less time, and is not estimated to."""
    return [
        (fast, slow)
        for fast, one in steps.items()
        for slow, other in steps.items()
        if one["measured"] * CLEARLY < other["measured"] and one["estimate"] >= other["estimate"]
    ]


def tables(run_: dict[str, Any]) -> list[str]:
    """Tables of a number of processes, and what is to be said of the order of steps."""
    steps, found = run_["steps"], run_["hardware"]
    ratios = [row["estimate"] / row["measured"] for row in steps.values()]
    rates = f"{found['flops']['float32'] / 1e9:.1f} GFLOP/s and {found['memory'] / 1e9:.1f} GB/s a process"
    links = [
        [kind, f"{1e3 * latency:.2f} ms", f"{bytes_ / 1e9:.2f} GB/s"]
        for kind, (latency, bytes_) in found["collectives"].items()
    ]
    times = [
        [name, *(f"{1e3 * row[key]:.1f} ms" for key in ("measured", "estimate", "exposed"))]
        for name, row in sorted(steps.items(), key=lambda item: float(item[1]["measured"]))
    ]
    wrong = [f"{fast} before {slow}" for fast, slow in swapped(steps)]
    return [
        f"{run_['ranks']} processes, {rates}; estimated / measured {min(ratios):.2f} to {max(ratios):.2f}",
        table(["collective", "latency", "bytes/s"], links),
        table(["optimizer", "measured", "estimated", "of it communication"], times),
        f"Pairs whose times differ by more than a factor of {CLEARLY:g}, in an order that is not estimated: "
        f"{'; '.join(wrong) or 'none'}.",
    ]


def main() -> None:
    """Measures every number of processes and writes the results."""
    parser = command(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of processes")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    least = "count the least of the samples, not the median: for a machine that has other work too"
    parser.set_defaults(counted=statistics.median)
    parser.add_argument("--least", help=least, action="store_const", const=min, dest="counted")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, of two samples each")
    parser.add_argument("--name", default="planned_times", help="file name of the results, without suffix")
    options = parser.parse_args()
    if min(options.ranks) < 2 or options.rounds < 1:
        parser.error("--ranks must be at least 2 and --rounds at least 1")
    how = {"rounds": options.rounds, "counted": options.counted.__name__}
    result: dict[str, Any] = {**facts(), **how, "runs": []}
    for world in options.ranks:
        found = on_ranks(world, serve, options)
        write(found["hardware"], options.out, f"{options.name}-{world}")
        print("\n\n".join(tables(found)), end="\n\n")
        result["runs"].append(found)
    write(result, options.out, options.name)


if __name__ == "__main__":
    main()
