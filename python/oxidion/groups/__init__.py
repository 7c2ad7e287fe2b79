"""Parameter groups of a model: which weights are orthonormalized or projected, and which are not."""

from __future__ import annotations

from oxidion._core.base import OxOptimizer
from oxidion.groups.matrices import param_groups
from oxidion.groups.projected import galore_param_groups
from oxidion.groups.sorter import ModelSorter
from oxidion.groups.summary import ParamGroups

OxOptimizer._sorter = ModelSorter()

__all__ = ["ParamGroups", "galore_param_groups", "param_groups"]
