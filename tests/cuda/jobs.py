"""Launches of elementwise passes over many runs of memory, and what the passes do, in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from .operations import OPERATIONS

MOST_OPERANDS, MOST_SCALARS, THREADS, PIECE = 5, 12, 256, 1 << 14
MOST = {"few": 32, "many": 338, "wide": 32}
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}

Values = list[Tensor]


class Rate(ctypes.Structure):
    """Mirror of ``Rate``."""

    _fields_ = (("at", ctypes.c_void_p), ("scalars", ctypes.c_uint), ("type", ctypes.c_ubyte))

    @classmethod
    def of(cls, rate: Tensor | None, scalars: Sequence[int] = ()) -> Rate:
        """The rate in a tensor, by which these scalars are multiplied; nowhere without one."""
        if rate is None:
            return cls()
        return cls(rate.data_ptr(), sum(1 << scalar for scalar in scalars), TYPES[rate.dtype])


class Scalars(ctypes.Structure):
    """Mirror of ``Scalars``."""

    _fields_ = (("rate", Rate), ("value", ctypes.c_double * MOST_SCALARS))


class Job(ctypes.Structure):
    """Mirror of ``Job``."""

    _fields_ = (
        ("operand", ctypes.c_void_p * MOST_OPERANDS),
        ("length", ctypes.c_longlong),
        ("factor", ctypes.c_double * 2),
        ("steps", ctypes.c_void_p),
        ("live", ctypes.c_void_p),
        ("end", ctypes.c_uint),
        ("type", ctypes.c_ubyte * MOST_OPERANDS),
    )


def pieces(length: int) -> int:
    """Blocks of a job."""
    return -(-length // PIECE)


def table(
    most: int,
    jobs: Sequence[Values],
    scalars: Sequence[float],
    factors: Sequence[tuple[float, float]],
    steps: Sequence[Tensor] = (),
    live: Sequence[Tensor] = (),
    rate: Rate | None = None,
) -> tuple[ctypes.Structure, int]:
    """The parameter of a launch, and its blocks."""
    fields = (("scalars", Scalars), ("count", ctypes.c_int), ("job", Job * most))
    structure = type("Jobs", (ctypes.Structure,), {"_fields_": fields})
    made = structure()
    made.scalars.rate = rate or Rate()
    made.scalars.value = (ctypes.c_double * MOST_SCALARS)(*scalars)
    made.count, end = len(jobs), 0
    for job, operands, factor in zip(made.job, jobs, factors, strict=False):
        end += pieces(operands[0].numel())
        job.length, job.end, job.factor = operands[0].numel(), end, (ctypes.c_double * 2)(*factor)
        for n, operand in enumerate(operands):
            job.operand[n], job.type[n] = operand.data_ptr(), TYPES[operand.dtype]
    for job, counter in zip(made.job, steps, strict=False):
        job.steps = counter.data_ptr()
    for job, own in zip(made.job, live, strict=False):
        job.live = own.data_ptr()
    return made, end


@dataclass(frozen=True)
class Pass:
    """Arguments of an operation (scalars, factors by value and live), and its effect on float64 operands.

    ``factor_too``: the first factor is proportional to the learning rate.
    """

    name: str
    equation: Callable[[Values, SimpleNamespace], None]
    values: dict[str, float]
    factors: tuple[float, float] = (0.0, 0.0)
    live: tuple[float, ...] = ()
    factor_too: bool = False

    @property
    def operands(self) -> int:
        """How many there are."""
        return len(OPERATIONS[self.name].operands)

    @property
    def scalars(self) -> tuple[float, ...]:
        """Scalars in the order of the kernel."""
        return OPERATIONS[self.name].arguments(self.values)

    @property
    def per_rate(self) -> tuple[int, ...]:
        """Scalars that are proportional to a learning rate."""
        return tuple(n for n, follows in enumerate(OPERATIONS[self.name].follows_rate) if follows)

    def arguments(self, factors: Sequence[float] = ()) -> SimpleNamespace:
        """All numbers by name."""
        return SimpleNamespace(**self.values, factors=factors or self.factors, live=self.live)

    def compute(self, x: Values, factors: Sequence[float] = ()) -> None:
        """The equation; with other factors where they are given."""
        self.equation(x, self.arguments(factors))


def _sign_of(x: Tensor, u: Tensor) -> Tensor:
    return (x * u >= 0).double()


def _count(x: Values, _: SimpleNamespace) -> None:
    x[0].add_(1)


def _momentum(x: Values, s: SimpleNamespace) -> None:
    g, m, *u = x
    m.copy_(s.mu * m + s.grad_factor * g)
    if u:
        u[0].copy_(s.mu * m + s.grad_factor * g if s.nesterov else m)


def _accumulate(x: Values, s: SimpleNamespace) -> None:
    x[2].copy_(x[1] + s.grad_factor * x[0])


def _apply(x: Values, s: SimpleNamespace) -> None:
    step = s.rate * x[1]
    before = x[0] - step if s.late else x[0]
    kept = before * (1 - s.decay * (_sign_of(before, x[1]) if s.cautious else 1.0))
    x[0].copy_(kept if s.late else kept - step)


def _convert(x: Values, s: SimpleNamespace) -> None:
    x[1].copy_(s.factor * x[0])


def _release(x: Values, s: SimpleNamespace) -> None:
    x[1].copy_(x[0])
    x[0].mul_(s.keep)


def _decay(x: Values, s: SimpleNamespace) -> None:
    x[0].mul_(1 - s.decay)


def _adamw(x: Values, s: SimpleNamespace) -> None:
    w, g, m, v, *largest = x
    m.copy_(s.beta1 * m + (1 - s.beta1) * s.grad_factor * g)
    v.copy_(s.beta2 * v + (1 - s.beta2) * (s.grad_factor * g) ** 2)
    second = v
    if largest:
        second = largest[0].copy_(torch.maximum(largest[0], v))
    rate, inverse_root = s.factors
    step = rate * m / (second.sqrt() * inverse_root + s.epsilon)
    if s.late:
        w.sub_(step).mul_(1 - s.decay * (_sign_of(w, m) if s.cautious else 1.0))
    else:
        w.copy_(w * (1 - s.decay * (_sign_of(w, m) if s.cautious else 1.0)) - step)


def _lion(x: Values, s: SimpleNamespace) -> None:
    w, g, m = x
    u = torch.sign(s.beta1 * m + (1 - s.beta1) * s.grad_factor * g)
    m.copy_(s.beta2 * m + (1 - s.beta2) * s.grad_factor * g)
    w.copy_(w * (1 - s.decay * (_sign_of(w, u) if s.cautious else 1.0)) - s.lr * u)


def _direction(x: Values, s: SimpleNamespace) -> None:
    r, m, v = x
    m.copy_(s.beta1 * m + (1 - s.beta1) * s.grad_factor * r)
    v.copy_(s.beta2 * v + (1 - s.beta2) * (s.grad_factor * r) ** 2)
    rate, inverse_root = s.factors
    r.copy_(s.unit * rate * m / (v.sqrt() * inverse_root + s.epsilon))


def _whiten(x: Values, s: SimpleNamespace) -> None:
    n, y, v = x
    v.copy_(s.beta2 * v + (1 - s.beta2) * y**2)
    n.copy_(s.factors[0] * n / (v.sqrt() + s.epsilon))


def _temper(x: Values, s: SimpleNamespace) -> None:
    y, v = x
    v.copy_(s.beta2 * v + (1 - s.beta2) * y**2)
    y.copy_(y / v.clamp_min(s.least) ** getattr(s, "power", 0.5))


def _scaled(x: Values, s: SimpleNamespace) -> None:
    w, u = x
    factor, radius, square, along, step = s.live
    update = s.rate * factor * u
    before = w - update if s.late else w
    decayed = before * (1 - s.decay * (_sign_of(before, u) if s.cautious else 1.0))
    moved = decayed if s.late else decayed - update
    norm = (square - 2 * s.rate * along + s.rate**2 * step) ** 0.5
    w.copy_(moved * (radius / norm if s.spherical else 1.0))


def _divided(x: Values, s: SimpleNamespace) -> None:
    x[1].copy_(x[0] / max(s.factor * s.live[0] ** 0.5 + s.epsilon, 1e-37))


def _average(x: Values, s: SimpleNamespace) -> None:
    x[1].copy_((1 - s.share) * x[1] + s.share * x[0])


def _schedule_free_begin(x: Values, s: SimpleNamespace) -> None:
    y, z = x[0].clone(), x[1].clone()
    x[0].copy_(z - s.decay * y)
    x[1].copy_((y - (1 - s.beta) * z) / s.beta)


def _schedule_free_end(x: Values, s: SimpleNamespace) -> None:
    z, mean = x[0].clone(), (1 - s.share) * x[1] + s.share * x[0]
    x[0].copy_((1 - s.beta) * z + s.beta * mean)
    x[1].copy_(z)


def lamb_direction(w: Tensor, m: Tensor, v: Tensor, s: SimpleNamespace) -> Tensor:
    """Direction of LAMB."""
    first, second, _, _ = s.live
    adam = m * first / (v.sqrt() * second + s.epsilon)
    return adam + s.weight_decay * w * (_sign_of(w, adam) if s.cautious else 1.0)


def lamb_moments(x: Values, s: SimpleNamespace) -> None:
    """Updates both moments of LAMB."""
    _, g, m, v = x
    factor = s.live[2]
    m.copy_(s.beta1 * m + s.blend * factor * g)
    v.copy_(s.beta2 * v + (1 - s.beta2) * (factor * g) ** 2)


def _lamb(x: Values, s: SimpleNamespace) -> None:
    lamb_moments(x, s)
    x[0].sub_(s.live[3] * lamb_direction(x[0], x[2], x[3], s))


def _lamb_along(x: Values, s: SimpleNamespace) -> None:
    x[0].sub_(s.live[3] * lamb_direction(*x, s))


#: Arguments of each operation; several where a number is another: names with their values in turn.
ARGUMENTS: dict[str, list[dict[str, float]]] = {
    "count": [{}],
    "momentum": [
        {"mu": 0.9, "grad_factor": 0.5, "nesterov": 1},
        {"mu": 0.9, "grad_factor": -1, "nesterov": 0},
    ],
    "momentum_alone": [{"mu": 0.9, "grad_factor": 0.5, "nesterov": 0}],
    "accumulate": [{"grad_factor": 0.5}],
    "apply": [
        {"rate": 0.3, "decay": 0.1, "cautious": cautious, "late": late}
        for late in (0, 1)
        for cautious in (0, 1)
    ],
    "convert": [{"factor": 0.25}],
    "release": [{"keep": 0.7}],
    "decay": [{"decay": 0.1}],
}
ADAM = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-6, "decay": 0.03, "grad_factor": 0.5}
ARGUMENTS["adamw"] = [{**ADAM, "cautious": cautious, "late": late} for cautious in (0, 1) for late in (0, 1)]
ARGUMENTS["adamw_largest"] = ARGUMENTS["adamw"][:1]
LION = {"beta1": 0.9, "beta2": 0.95, "lr": 0.02, "decay": 0.1}
ARGUMENTS["lion"] = [{**LION, "cautious": 0, "grad_factor": 0.5}, {**LION, "cautious": 1, "grad_factor": -1}]
ARGUMENTS["direction"] = [{"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-6, "grad_factor": 0.5, "unit": 1}]
ARGUMENTS["whiten"] = [{"beta2": 0.98, "epsilon": 1e-6}]
ARGUMENTS["temper"] = [{"beta2": 0.9, "least": 1e-2}]
ARGUMENTS["temper_to"] = [{**ARGUMENTS["temper"][0], "power": power} for power in (0.25, 0.0)]
ARGUMENTS["scaled"] = [
    {"rate": 0.3, "decay": 0.1, "cautious": cautious, "late": late, "spherical": spherical}
    for cautious in (0, 1)
    for late in (0, 1)
    for spherical in (0, 1)
]
ARGUMENTS["divided"] = [{"factor": 0.7, "epsilon": 0.1}]
ARGUMENTS["average"] = [{"share": share} for share in (0.25, 1.0)]
ARGUMENTS["schedule_free_begin"] = [{"beta": 0.75, "decay": decay} for decay in (0.0, 0.1)]
ARGUMENTS["schedule_free_end"] = [{"beta": 0.75, "share": share} for share in (0.25, 1.0)]
LAMB_VALUES = {"beta1": 0.9, "blend": 0.1, "beta2": 0.98, "epsilon": 1e-6, "weight_decay": 0.03}
ARGUMENTS["lamb"] = [{**LAMB_VALUES, "cautious": cautious} for cautious in (0, 1)]
ARGUMENTS["lamb_along"] = ARGUMENTS["lamb"][:1]

#: Corrections of m and of the root of v, factor of the gradient, rate.
LIVE_LAMB = (1.3, 1.2, 0.5, 0.1)
#: Factor of the update, radius, and what the norm after it follows from.
LIVE_SCALED = (0.4, 2.0, 9.0, 0.5, 4.0)

EQUATIONS: dict[str, Callable[[Values, SimpleNamespace], None]] = {
    "count": _count,
    "momentum": _momentum,
    "momentum_alone": _momentum,
    "accumulate": _accumulate,
    "apply": _apply,
    "convert": _convert,
    "release": _release,
    "decay": _decay,
    "adamw": _adamw,
    "adamw_largest": _adamw,
    "lion": _lion,
    "direction": _direction,
    "whiten": _whiten,
    "temper": _temper,
    "temper_to": _temper,
    "scaled": _scaled,
    "divided": _divided,
    "average": _average,
    "schedule_free_begin": _schedule_free_begin,
    "schedule_free_end": _schedule_free_end,
    "lamb": _lamb,
    "lamb_along": _lamb_along,
}
#: Factors of a job, by value and live, and whether the first one follows the learning rate.
FACTORS: dict[str, tuple[tuple[float, float], tuple[float, ...], bool]] = {
    "adamw": ((0.02, 1.4), (), True),
    "adamw_largest": ((0.02, 1.4), (), True),
    "direction": ((0.3, 1.4), (), False),
    "whiten": ((0.3, 1.0), (), False),
    "scaled": ((0.0, 0.0), LIVE_SCALED, False),
    "divided": ((0.0, 0.0), (9.0,), False),
    "lamb": ((0.0, 0.0), LIVE_LAMB, False),
    "lamb_along": ((0.0, 0.0), LIVE_LAMB, False),
}

#: By the name of the kernel, without what says how many jobs it takes.
PASSES: dict[str, list[Pass]] = {
    name: [Pass(name, equation, values, *FACTORS.get(name, ())) for values in ARGUMENTS[name]]
    for name, equation in EQUATIONS.items()
}
LAMB = PASSES["lamb"][0].scalars
#: All arguments of LAMB.
LAMB_ARGUMENTS = PASSES["lamb"][0].arguments()
#: Second moments, which are not negative, by operand. What is converted may be.
POSITIVE = {
    each.name: tuple(n for n, content in enumerate(each.contents) if content == "unsigned")
    for each in OPERATIONS.values()
    if each.name != "convert"
}
