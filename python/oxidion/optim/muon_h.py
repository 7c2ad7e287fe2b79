"""MuonH."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from oxidion.optim.muon import Muon


def MuonH(
    params: ParamsT,
    lr: float | Tensor = 0.018,
    mu: float = 0.95,
    *,
    nesterov: bool = True,
    **settings: Any,
) -> Muon:
    r"""MuonH: `Muon` on a sphere, whose weights keep their norm (arXiv:2606.16899).

    With R the Frobenius norm of a matrix at its first step and U the update of `Muon`:

    .. math::
        X' = X - \mathrm{lr}\, \frac{R}{\lVert U \rVert_F} U, \qquad
        X \leftarrow R \frac{X'}{\lVert X' \rVert_F}

    A step turns a matrix by the angle ``arctan(lr)`` at most, whatever its shape and norm: ``adjust_lr``
    changes nothing, and there is no decay. It is `Muon` with ``weight_norm="hyperball"`` and defaults of its
    own. As R stays for ever, matrices should start with elements of deviation about ``1 / sqrt(d_in)``.

    State: ``momentum``, shaped like the parameter, and ``radius`` (R), a number for each matrix, 0 until the
    first step. Parameters and state are written in place. A non-finite gradient makes its own parameter NaN,
    no other.

    Args:
        params: parameters, groups, or pairs of names and parameters.
        lr: the tangent of the largest angle of a step.
        mu: momentum factor.
        nesterov: look one step ahead.
        settings: any other argument of `Muon`.

    Raises:
        ValueError: for ``weight_decay`` other than 0, and in the first step for a matrix of zeros, which
            could never move; the error names it.
    """
    settings = {"weight_decay": 0.0, "weight_norm": "hyperball", **settings}
    return Muon(params, lr=lr, mu=mu, nesterov=nesterov, **settings)
