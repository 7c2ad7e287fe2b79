"""The two-step example of a 2 x 3 matrix that the recorded vectors of every optimizer are about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

INITIAL = ((0.5, -1.0, 2.0), (1.5, 0.25, -0.75))
GRADS = (((1.0, 2.0, -1.0), (0.5, -0.5, 3.0)), ((-1.0, 0.5, 0.25), (2.0, 1.0, -0.5)))
SETTINGS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1}


def two_steps(
    cls: type, *, q: object = None, keys: Mapping[str, object] | None = None, **kwargs: object
) -> tuple[Tensor, dict[str, Tensor]]:
    """Parameter and state after both gradients, in float32, from the given Q, with the given group keys."""
    param = nn.Parameter(torch.tensor(INITIAL))
    optimizer: Any = cls([{"params": [param], **(keys or {})}], **{**SETTINGS, **kwargs})
    optimizer.init_state()
    if q is not None:
        optimizer.state[param]["Q"].copy_(torch.tensor(q))
    for grad in GRADS:
        param.grad = torch.tensor(grad)
        optimizer.step()
    return param.detach(), optimizer.state[param]


def assert_near(actual: Tensor, expected: object, atol: float) -> None:
    """Assert element-wise closeness to recorded numbers."""
    torch.testing.assert_close(actual.float(), torch.tensor(expected), rtol=0, atol=atol)
