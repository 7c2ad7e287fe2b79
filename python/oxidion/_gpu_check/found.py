"""Outcome of a part of the check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Found:
    """Outcome of a part.

    Attributes:
        status: "PASS", "FAIL", "SLOW" (below a bar of speed), "SKIP" (not for this device) or "LEFT_OUT".
        figures: what it measured, by name.
        reason: what was wrong, or why it was left out.
        traceback: the end of the traceback where something was raised.
    """

    status: str
    figures: dict[str, Any]
    reason: str = ""
    traceback: str = ""
