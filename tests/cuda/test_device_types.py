"""Types in which devices multiply: float16 of what is orthonormalized, TF32 of Dion's products.

Steps by libtorch with memory of the host as a device's; `test_half_gram.py` has the kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
START = """
import torch, oxidion
from torch.nn import Parameter
from oxidion._cuda import device
device.prepare(emulated=True)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)

def update(name, grad, **keys):
    param = Parameter(torch.zeros(grad.shape))
    param.grad = grad
    made = getattr(oxidion, name)([param], lr=1.0, weight_decay=0.0, adjust_lr=None, **keys)
    made.init_state()
    before = {key: value.clone() for key, value in made.state[param].items()}
    made.step()
    return -param.detach().double(), before, made.state[param]

def far(found, exact):
    return float((found - exact).norm() / exact.norm())
"""


def run(*command: str) -> None:
    environment = {**os.environ, "OXIDION_CUDA": "libtorch"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]


def test_no_matrix_of_the_safety_study_explodes(tmp_path: Path) -> None:
    study = str(BENCHMARKS / "device_types.py")
    run(study, "--only", "float16", "--count", "300", "--largest", "256", "--out", str(tmp_path))
    tables: dict[str, list[dict[str, Any]]] = json.loads((tmp_path / "device_types.json").read_text())
    assert len(tables["float16"]) == 14
    assert sum(row["matrices"] for row in tables["float16"]) > 200
    for row in tables["float16"]:
        forms = [row[f"float16 {form}: largest"] for form in ("gram", "standard")]
        assert min(forms) > 0.8, row
        assert max(forms) < 1.3, row
    assert len(tables["polynomials"]) == 6
    assert max(row["gram: largest"] for row in tables["polynomials"]) < 1.3


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (150, 240)], ids=str)
def test_float16_takes_any_gradient_and_is_nearer_than_bfloat16(shape: tuple[int, int]) -> None:
    code = f"""
grad = torch.randn({shape}, generator=generator)
for name in ("Muon", "NorMuon", "Dion2"):
    keys = {{"epsilon": 0.0}} | ({{"fraction": 1.0}} if name == "Dion2" else {{}})
    exact = update(name, grad, orth_dtype="float64", **keys)[0]
    narrow = far(update(name, grad, orth_dtype="bfloat16", **keys)[0], exact)
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e30):
        found = far(update(name, grad * size, orth_dtype="float16", **keys)[0], exact)
        assert 0 < found < min(narrow, 0.03), (name, size, found, narrow)
"""
    run("-c", START + code)


def test_tf32_rounds_the_operands_of_dion_and_float32_does_not() -> None:
    code = """
for shape in ((200, 120), (120, 200)):
    grad = torch.randn(shape, generator=generator)
    for share in (1.0, 0.25):
        keys = dict(rank_fraction=share)
        exact, _, _ = update("Dion", grad, orth_dtype="float64", **keys)
        rounded, _, _ = update("Dion", grad, orth_dtype="tf32", **keys)
        plain, _, _ = update("Dion", grad, orth_dtype="float32", **keys)
        assert far(plain, exact) < 1e-4, far(plain, exact)
        assert 1e-4 < far(rounded, exact) < 5e-3, far(rounded, exact)
"""
    run("-c", START + code)


def test_directions_that_tf32_makes_up_are_not_stepped_along() -> None:
    code = """
for shape in ((200, 120), (120, 200)):
    left, right = (torch.randn(n, 3, generator=generator) for n in shape)
    grad = left @ right.mT
    for right_factor in ("column", "orthonormal"):
        keys = dict(rank_fraction=0.25, right_factor=right_factor)
        found, before, after = update("Dion", grad, orth_dtype="tf32", **keys)
        values = torch.linalg.svdvals(found)
        assert values[:3].min() > 0.3, values[:6]
        assert values[3] < 1e-3, values[:6]
"""
    run("-c", START + code)


def test_page_has_the_recorded_tables() -> None:
    code = f"""
import json, sys
from pathlib import Path
sys.path.insert(0, {str(BENCHMARKS)!r})
from device_types import TITLES, page
recorded = json.loads(Path({str(BENCHMARKS / "results" / "device_types.json")!r}).read_text())
tables = {{name: recorded[name] for name in TITLES}}
assert Path({str(BENCHMARKS / "results" / "device_types.md")!r}).read_text() == page(tables)
"""
    run("-c", code)
