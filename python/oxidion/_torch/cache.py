"""Folder for what is compiled on this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path


def cache_folder() -> Path | None:
    """Folder of the machine code that was compiled on this machine; None for a user without a home.

    ``OXIDION_CACHE``, or ``oxidion`` in the user's folder for caches. Its files are named by their content.
    """
    if own := os.environ.get("OXIDION_CACHE"):
        return Path(own)
    with contextlib.suppress(RuntimeError):
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "oxidion"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oxidion"
    return None
