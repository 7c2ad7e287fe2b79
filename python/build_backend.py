"""Build backend: maturin, with the source of the library over libtorch and its compiled files.

What ``oxidion/_torch`` holds is made in ``target/shim`` before maturin runs: the generated source, and a
library for each torch that ``OXIDION_SHIMS`` names (folders of torch or virtual environments, separated by
colons). Without it the first import compiles one for the torch that is there: a build needs no torch.
Crates are compiled in ``target/pip`` unless ``CARGO_TARGET_DIR`` says otherwise: a development build in
``target`` stays as it is.
"""

import os
import sys
from pathlib import Path
from typing import Any

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def _make_library() -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    import build_shim

    into = Path("target", "shim", "wheel").resolve()
    build_shim.main(["--into", str(into)])
    os.environ["OXIDION_TORCH_FILES"] = str(into)


def build_wheel(*arguments: Any, **options: Any) -> str:
    """Builds a wheel, as the standard of build backends says."""
    _make_library()
    return maturin.build_wheel(*arguments, **options)


def build_editable(*arguments: Any, **options: Any) -> str:
    """Builds an editable wheel, as the standard of build backends says."""
    _make_library()
    return maturin.build_editable(*arguments, **options)


os.environ.setdefault("CARGO_TARGET_DIR", str(Path("target", "pip").resolve()))
os.environ.setdefault("MATURIN_NO_MISSING_BUILD_BACKEND_WARNING", "1")
