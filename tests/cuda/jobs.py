"""Launches of elementwise passes over many runs of memory, and what the passes do, in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """An operation: operands, scalars, what it does to float64 operands, factors by value and live.

    ``per_rate``: the scalars that are proportional to a learning rate; ``factor_too``, the first factor is.
    """

    operands: int
    scalars: tuple[float, ...]
    equation: Callable[..., None]
    factors: tuple[float, float] = (0.0, 0.0)
    live: tuple[float, ...] = ()
    per_rate: tuple[int, ...] = ()
    factor_too: bool = False


def _sign_of(x: Tensor, u: Tensor) -> Tensor:
    return (x * u >= 0).double()


def _count(x: Values) -> None:
    x[0].add_(1)


def _momentum(x: Values, mu: float, factor: float, nesterov: float) -> None:
    g, m, u = x
    m.copy_(mu * m + factor * g)
    u.copy_(mu * m + factor * g if nesterov else m)


def _momentum_alone(x: Values, mu: float, factor: float) -> None:
    x[1].copy_(mu * x[1] + factor * x[0])


def _accumulate(x: Values, factor: float) -> None:
    x[2].copy_(x[1] + factor * x[0])


def _apply(x: Values, rate: float, decay: float, cautious: float) -> None:
    kept = 1 - decay * (_sign_of(*x) if cautious else 1.0)
    x[0].copy_(x[0] * kept - rate * x[1])


def _apply_late(x: Values, rate: float, decay: float, cautious: float) -> None:
    y = x[0] - rate * x[1]
    x[0].copy_(y * (1 - decay * (_sign_of(y, x[1]) if cautious else 1.0)))


def _convert(x: Values, factor: float) -> None:
    x[1].copy_(factor * x[0])


def _release(x: Values, keep: float) -> None:
    x[1].copy_(x[0])
    x[0].mul_(keep)


def _decay(x: Values, decay: float) -> None:
    x[0].mul_(1 - decay)


def _adamw(x: Values, *scalars: float) -> None:
    beta1, beta2, epsilon, decay, cautious, late, factor, rate, inverse_root = scalars
    w, g, m, v, *largest = x
    m.copy_(beta1 * m + (1 - beta1) * factor * g)
    v.copy_(beta2 * v + (1 - beta2) * (factor * g) ** 2)
    second = v
    if largest:
        second = largest[0].copy_(torch.maximum(largest[0], v))
    step = rate * m / (second.sqrt() * inverse_root + epsilon)
    if late:
        w.sub_(step).mul_(1 - decay * (_sign_of(w, m) if cautious else 1.0))
    else:
        w.copy_(w * (1 - decay * (_sign_of(w, m) if cautious else 1.0)) - step)


def _lion(
    x: Values, lr: float, beta1: float, beta2: float, decay: float, cautious: float, factor: float
) -> None:
    w, g, m = x
    u = torch.sign(beta1 * m + (1 - beta1) * factor * g)
    m.copy_(beta2 * m + (1 - beta2) * factor * g)
    w.copy_(w * (1 - decay * (_sign_of(w, u) if cautious else 1.0)) - lr * u)


def _direction(x: Values, *scalars: float) -> None:
    beta1, beta2, epsilon, factor, unit, rate, inverse_root = scalars
    r, m, v = x
    m.copy_(beta1 * m + (1 - beta1) * factor * r)
    v.copy_(beta2 * v + (1 - beta2) * (factor * r) ** 2)
    r.copy_(unit * rate * m / (v.sqrt() * inverse_root + epsilon))


def lamb_direction(w: Tensor, m: Tensor, v: Tensor, *scalars: float) -> Tensor:
    """Direction of LAMB."""
    _, _, _, epsilon, decay, cautious, first, second, _, _ = scalars
    adam = m * first / (v.sqrt() * second + epsilon)
    return adam + decay * w * (_sign_of(w, adam) if cautious else 1.0)


def lamb_moments(x: Values, *scalars: float) -> None:
    """Updates both moments of LAMB."""
    beta1, blend, beta2, _, _, _, _, _, factor, _ = scalars
    _, g, m, v = x
    m.copy_(beta1 * m + blend * factor * g)
    v.copy_(beta2 * v + (1 - beta2) * (factor * g) ** 2)


def _lamb(x: Values, *scalars: float) -> None:
    lamb_moments(x, *scalars)
    x[0].sub_(scalars[9] * lamb_direction(x[0], x[2], x[3], *scalars))


def _lamb_along(x: Values, *scalars: float) -> None:
    x[0].sub_(scalars[9] * lamb_direction(*x, *scalars))


ADAM = (0.9, 0.98, 1e-6, 0.03)
LAMB = (0.9, 0.1, 0.98, 1e-6, 0.03, 0.0)
CAUTIOUS_LAMB = (*LAMB[:5], 1.0)
#: Corrections of m and of the root of v, factor of the gradient, rate.
LIVE_LAMB = (1.3, 1.2, 0.5, 0.1)

#: By the name of the kernel, without what says how many jobs it takes.
PASSES: dict[str, list[Pass]] = {
    "count": [Pass(1, (), _count)],
    "momentum": [Pass(3, (0.9, 0.5, 1.0), _momentum), Pass(3, (0.9, -1.0, 0.0), _momentum)],
    "momentum_alone": [Pass(2, (0.9, 0.5), _momentum_alone)],
    "accumulate": [Pass(3, (0.5,), _accumulate)],
    "apply": [Pass(2, (0.3, 0.1, cautious), _apply, per_rate=(0, 1)) for cautious in (0.0, 1.0)],
    "apply_late": [Pass(2, (0.3, 0.1, cautious), _apply_late, per_rate=(0, 1)) for cautious in (0.0, 1.0)],
    "convert": [Pass(2, (0.25,), _convert)],
    "release": [Pass(2, (0.7,), _release)],
    "decay": [Pass(1, (0.1,), _decay, per_rate=(0,))],
    "adamw": [
        Pass(4, (*ADAM, cautious, late, 0.5), _adamw, (0.02, 1.4), per_rate=(3,), factor_too=True)
        for cautious in (0.0, 1.0)
        for late in (0.0, 1.0)
    ],
    "adamw_largest": [Pass(5, (*ADAM, 0.0, 0.0, 0.5), _adamw, (0.02, 1.4), per_rate=(3,), factor_too=True)],
    "lion": [
        Pass(3, (0.02, 0.9, 0.95, 0.1, 0.0, 0.5), _lion, per_rate=(0, 3)),
        Pass(3, (0.02, 0.9, 0.95, 0.1, 1.0, -1.0), _lion, per_rate=(0, 3)),
    ],
    "direction": [Pass(3, (0.9, 0.98, 1e-6, 0.5, 1.0), _direction, (0.3, 1.4), per_rate=(4,))],
    "lamb": [Pass(4, LAMB, _lamb, live=LIVE_LAMB), Pass(4, CAUTIOUS_LAMB, _lamb, live=LIVE_LAMB)],
    "lamb_along": [Pass(3, LAMB, _lamb_along, live=LIVE_LAMB)],
}
#: Second moments, which are not negative: operand numbers from the end.
POSITIVE = {"adamw": (3,), "adamw_largest": (3, 4), "direction": (2,), "lamb": (3,), "lamb_along": (2,)}
