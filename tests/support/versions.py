"""What tests ask of the version of torch."""

from __future__ import annotations

import torch

IS_OLD_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
"""Up to 2.9, where torch warns about itself and refuses some layouts."""
