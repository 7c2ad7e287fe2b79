"""Dtypes of Dion's states."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class DionMixedPrecisionConfig:
    """Dtypes of Dion's states; None means float32, or float64 for a float64 parameter.

    Args:
        momentum_dtype: of the momentum, also of AdamW's and Lion's.
        Q_dtype: of the right factor.
        variance_dtype: of AdamW's second moment.
    """

    momentum_dtype: torch.dtype | None = None
    Q_dtype: torch.dtype | None = None
    variance_dtype: torch.dtype | None = None
