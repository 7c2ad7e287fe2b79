"""Optimizers for PyTorch with a Rust core.

Dion, Dion2, NorDion2, Muon, MuonH, NorMuon, AdamW, AdEMAMix, Lion, Lamb, Adafactor, CAME, GaLore, APOLLO,
SOAP, SOAPMuon.

Swap one in for a ``torch.optim`` class::

    optimizer = oxidion.Muon(model, lr=0.02, scalar_lr=3e-4)
"""

from __future__ import annotations

import sys as _sys

from oxidion._torch import library as _library

_library.serving()  # the extension finds it open

from oxidion import checkpoint, compat, functional, optim, qk_clip  # noqa: E402
from oxidion._core import table as _table  # noqa: E402
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
    "compat",
    "env_report",
    "functional",
    "galore_param_groups",
    "in_backward",
    "optim",
    "param_groups",
    "qk_clip",
]


def __dir__() -> list[str]:
    """The public names, which editors and shells complete."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


# Modules that pickles of earlier versions name: those of tables and of the layers of QK-clip.
_sys.modules["oxidion._table"], _sys.modules["oxidion._heads"] = _table, qk_clip.heads
