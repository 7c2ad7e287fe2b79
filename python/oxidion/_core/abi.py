"""The torch that this build is for."""

from __future__ import annotations

TORCH = "2.11"
"""The minor version of torch that the locked tch is made for; one build serves one minor version."""


def check_torch(version: str) -> None:
    """Checks the installed torch.

    Raises:
        ImportError: for another minor version, with the command that rebuilds.
    """
    minor = ".".join(version.split(".")[:2])
    if minor != TORCH:
        raise ImportError(
            f"this build of oxidion is for torch {TORCH}, but torch {version} is installed. "
            f"Install torch=={TORCH}.*, or rebuild from the source directory with: make build TORCH={minor}"
        )
