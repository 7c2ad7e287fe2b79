"""torch.optim.Muon's formulas, in the dtype of the tensors."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

TRIPLE = (3.4445, -4.775, 2.0315)
RULES = (None, "original", "match_rms_adamw", "spectral_unclamped")


def factor(rule: str | None, rows: int, cols: int) -> float:
    """Factor of the learning rate in torch."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(rows / cols) if rule == "spectral_unclamped" else math.sqrt(max(1.0, rows / cols))


def torch_step(
    x: Tensor, grad: Tensor, average: Tensor, *, rule: str | None, nesterov: bool, **words: Any
) -> None:
    """One step: x and the average are written in place."""
    average.lerp_(grad, 1 - words["momentum"])
    update = grad.lerp(average, words["momentum"]) if nesterov else average
    tall = x.shape[0] > x.shape[1]
    y = update.mT if tall else update
    y = y / y.norm().clamp(min=words["eps"])
    a, b, c = words["ns_coefficients"]
    for _ in range(words["ns_steps"]):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    x.mul_(1 - words["lr"] * words["weight_decay"])
    x.sub_(y.mT if tall else y, alpha=words["lr"] * factor(rule, *x.shape))
