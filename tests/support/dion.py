"""Dion on one parameter, and what its factors must satisfy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import oxidion

METHODS: tuple[dict[str, Any], ...] = (
    {"qr_method": "rcqr"},
    {"qr_method": "rcqr", "rcqr_oversample": 3.0},
    {"qr_method": "cqr", "cqr_warmup_steps": 0},
    {"qr_method": "qr"},
)
every_method = pytest.mark.parametrize(
    "method", METHODS, ids=lambda method: "-".join(map(str, method.values()))
)


def dion(param: Tensor, **kwargs: object) -> Any:
    """Dion over one parameter, with its state."""
    optimizer: Any = oxidion.Dion([param], **{"lr": 2.0**-6, "weight_decay": 2.0**-3, **kwargs})
    optimizer.init_state()
    return optimizer


def assert_orthonormal_factors(update: Tensor, q: Tensor, atol: float) -> None:
    """Assert that update = P Q^T with unit columns in Q and P^T P = I, given Q of full column rank."""
    q = q.double()
    update = update.double()
    torch.testing.assert_close(q.norm(dim=0), torch.ones(q.shape[1], dtype=torch.float64), rtol=0, atol=atol)
    p = update @ torch.linalg.pinv(q.mT)
    torch.testing.assert_close(p @ q.mT, update, rtol=0, atol=atol)
    torch.testing.assert_close(p.mT @ p, torch.eye(q.shape[1], dtype=torch.float64), rtol=0, atol=atol)
