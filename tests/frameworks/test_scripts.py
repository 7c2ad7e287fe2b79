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
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from . import trainers

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
    ("deepspeed", "with_deepspeed.py", 1),
    ("deepspeed", "with_deepspeed.py", 2),
    ("deepspeed", "with_deepspeed.py --stage 2 --bf16", 2),
    ("deepspeed", "with_deepspeed.py --stage 3", 1),
    ("ray", "with_ray.py", 1),
    ("ray", "with_ray.py --workers 2", 1),
    ("torchtune", "with_torchtune.py", 1),
    ("torchtune", "with_torchtune.py --optimizer adamw", 1),
]
OUTSIDE = {"ray", "torchtune"}
"""Packages that the group lacks: one of 240 MB, and one that needs a torchao which peft refuses."""


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("with_dion_groups.py", "NeMo AutoModel: loss"),
        ("with_verl.py", "[('muon', 1), ('adamw', 4)]: loss"),
        ("with_speculators.py", "oxidion.compat.torch, oxidion.optim.adamw, oxidion.optim.adamw: loss"),
    ],
)
def test_calls_of_frameworks_that_are_not_here_train(script: str, said: str, processes: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [sys.executable, *(launcher if processes > 1 else []), str(SCRIPTS / script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert said in done.stdout


@pytest.mark.parametrize("name", ["Muon", "Dion", "AdamW"])
def test_replicas_that_train_separately_meet_with_equal_bits(name: str) -> None:
    if importlib.util.find_spec("torchft") is None and not os.environ.get("OXIDION_REQUIRE_FRAMEWORKS"):
        pytest.skip("no torchft: pip install --group frameworks")
    command = [sys.executable, str(SCRIPTS / "with_torchft.py"), "--optimizer", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "replicas bit-equal True" in done.stdout


def test_script_of_a_framework_hides_no_package() -> None:
    """A script's folder comes first on its path: ``peft.py`` in it would shadow the package peft."""
    names = [path.stem for path in SCRIPTS.glob("*.py")]
    assert names
    assert [name for name in names if importlib.util.find_spec(name) is not None] == []


@pytest.mark.parametrize(
    ("package", "command", "processes"),
    [pytest.param(*run, id=f"{run[1]}, {run[2]}") for run in RUNS],
)
def test_script_resumed_from_its_checkpoint_is_bit_equal(
    package: str, command: str, processes: int, tmp_path: Path
) -> None:
    required = package not in OUTSIDE and os.environ.get("OXIDION_REQUIRE_FRAMEWORKS")
    if importlib.util.find_spec(package) is None and not required:
        pytest.skip(f"no {package}: pip install {package if package in OUTSIDE else '--group frameworks'}")
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


@pytest.mark.parametrize(
    ("stand_in", "command"),
    [
        (trainers.ray, "with_ray.py"),
        (trainers.torchtune, "with_torchtune.py"),
        (trainers.torchtune, "with_torchtune.py --optimizer adamw"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.filterwarnings("default")
def test_script_over_a_stand_in_of_its_framework_is_bit_equal(
    stand_in: Callable[[pytest.MonkeyPatch], None],
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Packages that the group lacks: the script itself runs, and the framework is what it documents."""
    stand_in(monkeypatch)
    threads = torch.get_num_threads()
    name, *arguments = shlex.split(command)
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py"), SCRIPTS / name)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    torch.set_num_threads(1)
    try:
        spec.loader.exec_module(script)
        assert script.main() == 0
    finally:
        torch.set_num_threads(threads)
    assert re.search(r"^resumed .*: bit-equal True$", capsys.readouterr().out, re.MULTILINE)
