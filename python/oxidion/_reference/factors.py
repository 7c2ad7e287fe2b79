"""Second moments as products of two vectors, of whole parameters.

Roles of states: ``row``, ``col`` and ``mean``, and with a prefix ``res_`` those of CAME: averages along the
last dimension, along the one before it, and along both. The averages along both say nothing new and are kept
only because the core keeps them.
"""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.update import Group, State, average


def rms(x: Tensor) -> float:
    """Root of the mean square of all elements."""
    return float(x.square().mean().sqrt())


def factored(state: State, prefix: str, s: Tensor, beta: float) -> Tensor:
    """``V = R C^T / mean(R)`` of the averages R and C of s along the last dimension and the one before."""
    row = average(state, f"{prefix}row", s.mean(dim=-1), beta)
    col = average(state, f"{prefix}col", s.mean(dim=-2), beta)
    average(state, f"{prefix}mean", s.mean(dim=(-2, -1)), beta)
    return row.unsqueeze(-1) * col.unsqueeze(-2) / row.mean(dim=-1)[..., None, None]


def normalized(grad: Tensor, state: State, group: Group, beta2: float) -> Tensor:
    """``u = g / sqrt(V)``, clipped to an RMS of ``clip_threshold``; all NaN where one element is."""
    s = grad.square() + float(group["eps"][0])
    v = factored(state, "", s, beta2) if grad.ndim >= 2 else average(state, "variance", s, beta2)
    u = grad / v.sqrt()
    return u / (u.square().mean().sqrt() / float(group["clip_threshold"])).clamp(min=1.0)
