"""Optimizers for PyTorch with a Rust core.

Dion, Dion2, NorDion2, Muon, NorMuon, AdamW, Lion, Lamb, Adafactor, CAME, GaLore, APOLLO, SOAP.

Swap one in for a ``torch.optim`` class::

    optimizer = oxidion.Dion(oxidion.param_groups(model, algorithm="dion", lr=0.01))
"""

from __future__ import annotations

import sys

from oxidion._torch import library

library.serving()  # the extension finds it open

from oxidion import checkpoint, functional, hf, optim, qk_clip  # noqa: E402
from oxidion._core import table  # noqa: E402
from oxidion._core.env import env_report  # noqa: E402
from oxidion._oxidion import LayoutError, PlanMismatch, PoisonedOptimizer, __version__  # noqa: E402
from oxidion.backward import in_backward  # noqa: E402
from oxidion.groups import galore_param_groups, param_groups  # noqa: E402
from oxidion.optim import *  # noqa: E402, F403

__all__ = [
    *optim.__all__,
    "LayoutError",
    "PlanMismatch",
    "PoisonedOptimizer",
    "__version__",
    "checkpoint",
    "env_report",
    "functional",
    "galore_param_groups",
    "hf",
    "in_backward",
    "param_groups",
    "qk_clip",
]

# Modules that pickles of earlier versions name: those of tables and of the layers of QK-clip.
sys.modules["oxidion._table"], sys.modules["oxidion._heads"] = table, qk_clip.heads
