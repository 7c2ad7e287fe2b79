"""Optimizers for PyTorch with a Rust core.

Dion, Dion2, NorDion2, Muon, NorMuon, AdamW, Lion, Lamb, Adafactor, CAME, GaLore, APOLLO.

Swap one in for a ``torch.optim`` class::

    optimizer = oxidion.Dion(oxidion.param_groups(model, algorithm="dion", lr=0.01))
"""

from __future__ import annotations

import os

import torch  # loads libtorch, which the extension links against

from oxidion._core.abi import check_torch

check_torch(torch.__version__)

from oxidion import _oxidion, checkpoint, functional, hf, qk_clip  # noqa: E402
from oxidion._core.env import env_report  # noqa: E402
from oxidion._oxidion import LayoutError, PlanMismatch, PoisonedOptimizer, __version__  # noqa: E402
from oxidion.groups import param_groups  # noqa: E402
from oxidion.low_rank_groups import galore_param_groups  # noqa: E402
from oxidion.optim.adafactor import Adafactor  # noqa: E402
from oxidion.optim.adamw import AdamW  # noqa: E402
from oxidion.optim.apollo import APOLLOAdamW  # noqa: E402
from oxidion.optim.apollo_mini import APOLLOMini  # noqa: E402
from oxidion.optim.came import CAME  # noqa: E402
from oxidion.optim.dion import Dion  # noqa: E402
from oxidion.optim.dion2 import Dion2  # noqa: E402
from oxidion.optim.galore import GaLoreAdamW  # noqa: E402
from oxidion.optim.lamb import Lamb  # noqa: E402
from oxidion.optim.lion import Lion  # noqa: E402
from oxidion.optim.mixed_precision import DionMixedPrecisionConfig  # noqa: E402
from oxidion.optim.muon import Muon  # noqa: E402
from oxidion.optim.nordion2 import NorDion2  # noqa: E402
from oxidion.optim.normuon import NorMuon  # noqa: E402

Dion3 = NorDion2

__all__ = [
    "CAME",
    "APOLLOAdamW",
    "APOLLOMini",
    "Adafactor",
    "AdamW",
    "Dion",
    "Dion2",
    "Dion3",
    "DionMixedPrecisionConfig",
    "GaLoreAdamW",
    "Lamb",
    "LayoutError",
    "Lion",
    "Muon",
    "NorDion2",
    "NorMuon",
    "PlanMismatch",
    "PoisonedOptimizer",
    "__version__",
    "checkpoint",
    "env_report",
    "functional",
    "galore_param_groups",
    "hf",
    "param_groups",
    "qk_clip",
]

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_oxidion.forget_threads_after_fork)
