"""``python -m oxidion plan``: memory, communication and work of one rank of a mesh that is not there."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from oxidion._core.table import Table
from oxidion._dist.comm import Meshes
from oxidion._oxidion import Plan
from oxidion._planning import clock, hardware
from oxidion._planning.clock import StepTime
from oxidion._planning.models import Config, Mesh, Parameter, cut_dim, lines, load, spelled, stored
from oxidion._planning.traffic import Traffic, sent, summed, traffic

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes of an element by dtype."""

VIEWING = ("muon", "normuon", "dion", "dion2", "nordion2")
"""Algorithms that cut weights into matrices."""

ROUTES_NOTE = """
mean sent: by a rank if all own equally many matrices, which decides the route
sent: by rank {rank}, as in the table of axes, where an all-gather is padded to the rank that owns most"""

Axis = tuple[str, list[int], int, str, int]


@dataclass(frozen=True)
class Settings:
    """Settings of a simulated optimizer, in addition to model and mesh.

    Attributes:
        algorithm: of the matrices; embedding, head and vectors go to AdamW.
        rank_fraction: of Dion.
        dtype: of parameters and gradients.
        state_dtype: of the states; None is the parameters'.
        compressed: whether the optimizer averages over dp.
        rank: whose plan it is.
        fraction: of the rows or columns that Dion2 and NorDion2 select.
        selection_scope: of those two.
        device: "cuda" or "cpu", whose types of products and sizes of buckets the plan has; None is "cuda" on
            more than one rank.
        state_bits: 8 for moments in one byte.
        master_weights: whether bfloat16 parameters have float32 weights, at two more bytes.
        block_size: elements that share a scale in 8 bits; None is the default.
        projection_rank: of GaLore and APOLLO.
        owned_states: owner-sharded states of SOAP and SOAPMuon also for copies and uncut sides, and of
            GaLoreAdamW, APOLLOAdamW, Muon and NorMuon where several ranks have the same moments.
        sides: of SOAP and SOAPMuon: the sides with a basis, "both", "short" or "unsharded".
        hardware: machine for which times are estimated, a name or file; None for no times.
        links: of a built-in machine.
        tokens: of a training step, over all ranks; 0 if not given.
        max_batch_bytes: bound on the workspace of matrices that are handled together; None is the default.
        workspace_limit: bytes of workspace; None is the default.
        route: of Dion: "auto", "keep", "gather", or the axes that are gathered.
    """

    algorithm: str = "dion"
    rank_fraction: float = 1.0
    dtype: str = "bfloat16"
    state_dtype: str | None = None
    compressed: bool = False
    rank: int = 0
    fraction: float = 0.25
    selection_scope: str = "local"
    device: str | None = None
    state_bits: int = 32
    master_weights: bool = False
    block_size: int | None = None
    projection_rank: int = 128
    owned_states: bool = False
    sides: str = "both"
    hardware: str | None = None
    links: str = "nvlink+ib400"
    tokens: int = 0
    max_batch_bytes: int | None = None
    workspace_limit: int | None = None
    route: str | tuple[str, ...] = "auto"

    @property
    def products(self) -> str:
        """The dtype of products of whole matrices on a device with matrix units."""
        if self.dtype == "float64":
            return "float64"
        if self.algorithm == "dion":
            return "tf32"
        return "bfloat16" if self.algorithm in ("muon", "normuon", "dion2", "nordion2") else "float32"

    @property
    def method(self) -> str:
        """The algorithm in words."""
        if self.algorithm == "dion":
            return f"dion at rank fraction {self.rank_fraction:g}"
        if self.algorithm in ("dion2", "nordion2"):
            return f"{self.algorithm} at fraction {self.fraction:g} ({self.selection_scope})"
        return self.algorithm


@dataclass(frozen=True)
class Simulation:
    """One rank's share of a step.

    Attributes:
        model: name.
        mesh: axes and sizes, outermost first.
        settings: what else was asked for.
        parameters: elements of the whole model.
        matrices: parameters of the chosen algorithm.
        others: parameters of AdamW.
        memory: bytes of this rank by part.
        wire: communication by axis.
        routes: where there is a choice, bytes that a rank sends on average, with the matrices divided evenly
            among their owners: "chosen", and were all matrices to go in one way.
        routes_sent: bytes that this rank sends for these matrices, which it may own more or fewer of.
        gradient_sync: bytes that this rank sends to average gradients over dp outside the optimizer.
        local_flops: on what this rank stores.
        whole_flops: on whole matrices that this rank owns.
        busiest_flops: both, of the rank that owns most; an upper bound where fs and tp both shard.
        mean_flops: both, mean over the ranks.
        time: estimate on a machine, if one was named.
    """

    model: str
    mesh: Mesh
    settings: Settings
    parameters: int
    matrices: int
    others: int
    memory: dict[str, int]
    wire: list[Traffic]
    gradient_sync: int
    local_flops: float
    whole_flops: float
    busiest_flops: float
    mean_flops: float
    time: StepTime | None = None
    routes: dict[str, float] = field(default_factory=dict)
    routes_sent: int = 0

    @property
    def balance(self) -> float:
        """Mean over busiest: 1 when all ranks have the same work."""
        return self.mean_flops / self.busiest_flops if self.busiest_flops else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Values that JSON can hold."""
        return asdict(self) | {"balance": self.balance}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Simulation:
        """The simulation that ``to_dict`` gave."""
        fields = {key: value for key, value in values.items() if key != "balance"}
        settings = fields["settings"]
        route = settings["route"]
        fields["settings"] = Settings(
            **settings | {"route": tuple(route) if isinstance(route, list) else route}
        )
        fields["wire"] = [Traffic(**entry) for entry in fields["wire"]]
        if fields.get("time") is not None:
            fields["time"] = StepTime(**fields["time"])
        return cls(**fields)

    def __str__(self) -> str:
        """A head line and three tables."""
        s = self.settings
        words = [
            s.method,
            s.dtype,
            *([f"states {s.state_dtype}"] if s.state_dtype else []),
            *["master weights"] * s.master_weights,
            *["compressed"] * (s.compressed and self.mesh.get("dp", 1) > 1),
        ]
        memory = [{"memory": part, "bytes": human(n, "B")} for part, n in self.memory.items()]
        memory.append({"memory": "total", "bytes": human(sum(self.memory.values()), "B")})
        wire = [
            {
                "axis": t.axis,
                "ranks": t.ranks,
                "collectives": t.collectives,
                "sent": human(t.sent, "B"),
                "input": human(t.bytes, "B"),
                "kinds": ", ".join(f"{n} {kind}" for kind, n in t.kinds.items()) or None,
            }
            for t in self.wire
        ]
        work = {
            "on its shards": self.local_flops,
            "on whole matrices": self.whole_flops,
            "total": self.local_flops + self.whole_flops,
            "busiest rank": self.busiest_flops,
            "mean of ranks": self.mean_flops,
        }
        rows = [{"work": key, "FLOPs": human(value, "")} for key, value in work.items()]
        rows.append({"work": "mean / busiest", "FLOPs": f"{self.balance:.3f}"})
        head = (
            f"{self.model} on {spelled(self.mesh)}: rank {s.rank} of {math.prod(self.mesh.values())}\n"
            f"{human(self.parameters, '')} elements in {self.matrices} matrices ({s.algorithm}) and "
            f"{self.others} other parameters (adamw); {', '.join(words)}"
        )
        parts = [head, str(Table(memory)), str(Table(wire)), str(Table(rows))]
        if len(self.routes) > 1:
            ways = [{"route": way, "mean sent": human(mean, "B")} for way, mean in self.routes.items()]
            own = ({"sent": human(self.routes_sent, "B")}, *[{}] * len(ways))
            parts.append(str(Table([way | this for way, this in zip(ways, own, strict=False)])))
            parts[-1] += ROUTES_NOTE.format(rank=s.rank)
        if self.time is not None:
            parts.append(clock.report(self.time))
        if self.gradient_sync:
            parts[2] += (
                f"\ngradients over dp before the step, not included: {human(self.gradient_sync, 'B')} sent"
            )
        return "\n\n".join(parts) + "\n"


def human(value: float, unit: str) -> str:
    """A number with a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if value < 1000 or prefix == "P":
            break
        value /= 1000
    return f"{value:.4g} {prefix}{unit}".rstrip()


def simulate(model: str, mesh: Mesh, settings: Settings) -> tuple[Simulation, Plan]:
    """Plans a step of one rank.

    Args:
        model: name or path of a configuration.
        mesh: axes and sizes, outermost first.
        settings: what else is wanted.

    Returns:
        What the rank needs, and its plan.

    Raises:
        ValueError: for an unknown model, a rank that is not on the mesh, or what the core refuses.
    """
    config = load(model)
    parameters = config.parameters()
    world = math.prod(mesh.values())
    if not 0 <= settings.rank < world:
        raise ValueError(f"rank must be from 0 to {world - 1} on {spelled(mesh)}, got {settings.rank}")
    shares = {key: getattr(settings, key) for key in ("rank_fraction", "fraction")}
    for key, share in shares.items():
        if not 0 < share <= 1:
            raise ValueError(f"{key} must be in (0, 1], got {share}")
    at = lines(mesh, settings.rank)
    given = ("state_dtype", "block_size", "max_batch_bytes", "workspace_limit")
    states = {key: value for key in given if (value := getattr(settings, key)) is not None}
    if settings.state_bits != 32:
        states["state_bits"] = settings.state_bits
    states.update({key: True for key in ("master_weights", "owned_states") if getattr(settings, key)})
    if settings.sides != "both":
        states["sides"] = settings.sides
    states["device"] = settings.device or ("cuda" if world > 1 else "cpu")
    own = {"algorithm": settings.algorithm, "selection_scope": settings.selection_scope, **shares, **states}
    own["rank"], own["route"] = settings.projection_rank, settings.route
    groups: list[dict[str, Any]] = [own, {"algorithm": "adamw", **states}]
    # Fused weights are cut into their matrices by classes that know such groups.
    cuts = {p.parts: 0 for p in parameters if p.is_matrix}
    if settings.algorithm in VIEWING:
        for parts in cuts:
            if parts:
                cuts[parts] = len(groups)
                groups.append({**own, "split_sizes": parts})

    def axes(parameter: Parameter) -> list[Axis]:
        dims = {axis: cut_dim(parameter.kind, axis, mesh) for axis in mesh}
        return [(a, *at[a], "R" if dim is None else "S", dim or 0) for a, dim in dims.items()]

    members = [
        (p.name, list(p.shape), settings.dtype, cuts[p.parts] if p.is_matrix else 1, axes(p))
        for p in parameters
    ]
    replicas = [("dp", *at["dp"], not settings.compressed)] if "dp" in mesh else []
    plan = Plan.of_shapes(groups, members, Meshes(replicas))
    rows = plan.rows()
    local = sum(stored(p, mesh, at) for p in parameters) * DTYPES[settings.dtype]
    memory = {
        "parameters": local,
        "gradients": local,
        "states": sum(row["state_bytes"] for row in rows),
        "workspace": plan.arena_bytes,
    }
    shared, whole, most, mean = plan.work()
    matrices = sum(group != 1 for _, _, _, group, _ in members)
    time = _time(plan, config, mesh, settings)
    result = Simulation(
        model=model,
        mesh=mesh,
        settings=settings,
        parameters=sum(p.numel for p in parameters),
        matrices=matrices,
        others=len(members) - matrices,
        memory=memory,
        wire=traffic(plan.transfers, mesh),
        gradient_sync=0 if settings.compressed else summed(local, mesh.get("dp", 1)),
        local_flops=shared,
        whole_flops=whole,
        busiest_flops=shared + most,
        mean_flops=shared + mean,
        time=time,
        routes=_routes(plan),
        routes_sent=_routes_sent(plan),
    )
    return result, plan


def _routes(plan: Plan) -> dict[str, float]:
    """Bytes that a rank sends on average by way, where there is a choice."""
    sums: dict[str, float] = {}
    for _, chosen, ways in plan.routes():
        for way, by_axis in ways:
            total = sum(bytes_ for _, bytes_ in by_axis)
            sums[way] = sums.get(way, 0.0) + total
            if way == chosen:
                sums["chosen"] = sums.get("chosen", 0.0) + total
    return {"chosen": sums.pop("chosen"), **sums} if sums else {}


def _routes_sent(plan: Plan) -> int:
    """Bytes that this rank sends for the matrices for which there is a choice."""
    buckets = {number for number, _, _ in plan.routes()}
    own = (each for each in plan.transfers if each["bucket"] in buckets and not each["when_due"])
    return sum(map(sent, own))


def _strides(mesh: Mesh) -> dict[str, int]:
    """Distance of neighbours by axis, in ranks."""
    strides, stride = {}, math.prod(mesh.values())
    for axis, size in mesh.items():
        stride //= size
        strides[axis] = stride
    return strides


def _time(plan: Plan, config: Config, mesh: Mesh, settings: Settings) -> StepTime | None:
    """The estimate of a step's time on the machine that was named."""
    if settings.hardware is None:
        return None
    machine = hardware.load(settings.hardware, settings.links)
    world, strides = math.prod(mesh.values()), _strides(mesh)
    time = clock.step_time(plan, machine, settings.products, strides)
    if not settings.tokens:
        return time
    training = clock.training_time(machine, config.active, settings.tokens, world, settings.dtype)
    return replace(time, training=training)


def plot(simulations: list[Simulation], path: Path) -> None:
    """Draws memory by part, bytes by axis and work as bars, as SVG by the name of the file, else as PNG.

    Raises:
        ImportError: without matplotlib.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    memory, wire, work = figure.subplots(1, 3)
    places = range(len(simulations))
    floor = [0.0] * len(simulations)
    for part in simulations[0].memory:
        values = [s.memory[part] / 1e9 for s in simulations]
        memory.bar(places, values, 0.6, bottom=floor, label=part)
        floor = [a + b for a, b in zip(floor, values, strict=True)]
    memory.set(title="Memory of a rank", ylabel="GB")
    axes = list(dict.fromkeys(traffic.axis for s in simulations for traffic in s.wire))
    by_axis = {
        axis: [sum(t.sent for t in s.wire if t.axis == axis) / 1e9 for s in simulations] for axis in axes
    }
    by_rank = {
        "busiest rank": [s.busiest_flops / 1e12 for s in simulations],
        "mean of ranks": [s.mean_flops / 1e12 for s in simulations],
    }
    for drawing, bars in ((wire, by_axis), (work, by_rank)):
        width = 0.8 / len(bars)
        for i, (label, values) in enumerate(bars.items()):
            shift = (i - (len(bars) - 1) / 2) * width
            drawing.bar([place + shift for place in places], values, width, label=label)
    wire.set(title="Bytes that a rank sends in a step", ylabel="GB")
    work.set(title="Floating-point operations of a step", ylabel="TFLOPs")
    for drawing in (memory, wire, work):
        labels = [f"{Path(s.model).stem}\n{spelled(s.mesh)}" for s in simulations]
        drawing.set_xticks(places, labels, rotation=20 if len(labels) > 2 else 0)
        drawing.set_ylim(bottom=0)
    for drawing, columns in ((memory, 2), (wire, len(by_axis)), (work, 2)):
        drawing.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=columns)
    figure.savefig(path, format="svg" if path.suffix.lower() == ".svg" else "png", dpi=120)
