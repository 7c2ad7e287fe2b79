"""``examples/swap_from_torch.py`` runs and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "swap_from_torch.py"


def test_swap_from_torch_learns_with_both_optimizers() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^(\S+): +loss ([0-9.]+) -> ([0-9.]+)$", done.stdout, re.MULTILINE)
    assert [name for name, _, _ in found] == ["torch.optim.AdamW", "oxidion.Dion"]
    assert found[0][1] == found[1][1]  # equal initial weights
    for _, before, after in found:
        assert float(after) < float(before) / 50
    assert len(SCRIPT.read_text().splitlines()) <= 60
