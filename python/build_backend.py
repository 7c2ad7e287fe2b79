"""Build backend: maturin, with torch-sys pointed at the torch of the interpreter that builds.

torch-sys asks the ``python`` (``python3`` outside a virtual environment) on ``PATH`` where torch is, and
looks again only when ``LIBTORCH_USE_PYTORCH`` changes. Under pip neither is right by itself: pip may run from
an environment that is not active, and an isolated build environment is deleted after the build. So the
interpreter that runs the build is put first on ``PATH``, and the variable carries the directory of its torch.
Crates are compiled in ``target/pip`` unless ``CARGO_TARGET_DIR`` says otherwise: a development build in
``target`` stays as it is.
"""

import atexit
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from maturin import (
    build_editable,
    build_sdist,
    build_wheel,
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


def _put_interpreter_first_on_path() -> None:
    first = [sysconfig.get_path("scripts")]
    if os.name == "posix":
        directory = tempfile.mkdtemp(prefix="oxidion-python-")
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        for name in ("python", "python3"):
            launcher = Path(directory, name)
            # A symbolic link would lose the virtual environment: it is found beside the path that was called.
            launcher.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
            launcher.chmod(0o755)
        first.insert(0, directory)
    os.environ["PATH"] = os.pathsep.join([*first, os.environ["PATH"]])


def _name_torch() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is not None and spec.origin is not None:
        os.environ.setdefault("LIBTORCH_USE_PYTORCH", str(Path(spec.origin).parent))


_put_interpreter_first_on_path()
_name_torch()
os.environ.setdefault("CARGO_TARGET_DIR", str(Path("target", "pip").resolve()))
os.environ.setdefault("MATURIN_NO_MISSING_BUILD_BACKEND_WARNING", "1")
