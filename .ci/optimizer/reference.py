"""ClassName: momentum."""

from __future__ import annotations

from torch import Tensor

from oxidion._reference.update import Group, State, ascending, average, take_elementwise


def optimizer_name_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """ClassName (write it from the paper, not from the Rust file).

    ``m <- mu m + g``; decay, the cautious one where ``m X >= 0``; ``X <- X - lr m``.
    """
    grad = ascending(grad, group)
    momentum = average(state, "momentum", grad, float(group["momentum"]), weight=1.0)
    take_elementwise(param, momentum, momentum, group, state)
