"""Reads reports of devices: which of them prove that a device computes correctly. It needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROWS = (1, 2, 3, 4)
"""Rows of the check in which everything has to pass: environment, loading, kernels and steps."""
BY_GROUPS = "symmetric_wgmma.cu"
"""Source that is off until a report proves it: its parts have to pass, where others may be skipped."""


def capability(report: Mapping[str, Any]) -> str:
    """Returns the compute capability of a report's device, as "9.0"; empty where the report has none.

    Args:
        report: of ``gpu-check``, with the capability at the top, or of a device, with it under "device".
    """
    where = report if "capability" in report else report.get("device", {})
    return str(where.get("capability") or "")


def proven(report: Mapping[str, Any]) -> bool:
    """Returns whether a report proves that the products by warpgroups may be used on its kind of device.

    Each of rows 1 to 4 has a part that passed and no part that failed or is missing. A part may be skipped,
    but not one of ``symmetric_wgmma.cu``. At least one part of that source has to be there.

    Args:
        report: of ``gpu-check`` or of a device, with records of "parts" that have "row", "name" and "status".
    """
    parts = [part for part in report.get("parts", ()) if part.get("row") in ROWS]
    groups = [part["status"] for part in parts if BY_GROUPS in part["name"].split()]
    others = [part["status"] for part in parts if BY_GROUPS not in part["name"].split()]
    passed = {part["row"] for part in parts if part["status"] == "PASS"}
    return bool(groups) and {*groups} == {"PASS"} and {*others} <= {"PASS", "SKIP"} and passed == {*ROWS}
