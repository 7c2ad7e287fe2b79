"""The scripts of ``examples/frameworks`` train in other frameworks; a resumed run ends with equal bits.

Every script resumes with other initial weights than it began with, so that what is not loaded shows. The
packages are those of the dependency group ``frameworks``; with ``OXIDION_REQUIRE_FRAMEWORKS`` one that is not
there is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "frameworks"
RUNS = [
    # package, its script with arguments, processes
    ("transformers", "with_transformers.py --bf16", 1),
    ("transformers", "with_transformers.py", 2),
    ("accelerate", "with_accelerate.py", 2),
    ("accelerate", "with_accelerate.py --fsdp2 --mixed-precision bf16", 2),
    ("lightning", "with_lightning.py --precision bf16-mixed", 1),
    ("lightning", "with_lightning.py", 2),
    ("lightning", "with_fabric.py", 1),
    ("lightning", "with_fabric.py --fsdp2 --precision bf16-true", 2),
    ("peft", "with_peft.py", 1),
    ("trl", "with_trl.py", 1),
    ("trl", "with_trl.py --lora", 1),
    ("timm", "with_timm.py", 1),
    ("timm", "with_timm.py --model resnet", 1),
]


def test_script_of_a_framework_hides_no_package() -> None:
    """A script's folder comes first on its path: ``peft.py`` beside it would be what it imports as peft."""
    names = [path.stem for path in SCRIPTS.glob("*.py")]
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is not None] == []


@pytest.mark.parametrize(
    ("package", "command", "processes"),
    [
        pytest.param(*run, marks=[pytest.mark.dist] if run[2] > 1 else [], id=f"{run[1]}, {run[2]}")
        for run in RUNS
    ],
)
def test_script_resumed_from_its_checkpoint_is_bit_equal(
    package: str, command: str, processes: int, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None and not os.environ.get("OXIDION_REQUIRE_FRAMEWORKS"):
        pytest.skip(f"no {package}: pip install --group frameworks")
    script, *arguments = shlex.split(command)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    settings = {
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    done = subprocess.run(
        [sys.executable, *(launcher if processes > 1 else []), str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=tmp_path,
        env=os.environ | settings,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert re.search(r"^resumed .*: bit-equal True$", done.stdout, re.MULTILINE)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("with_")] == []
