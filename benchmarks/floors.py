"""The shortest time that a step can take on a machine of given rates: operations, then memory traffic.

m <= n are the sides of a matrix, r is Dion's rank. Symmetric products count half.

- Muon, five steps: the fewer of 15 m²n + 5 m³ (on the matrix) and 9 m²n + 11 m³ (on its Gram matrix with two
  restarts); 24 bytes an element (float32 parameter, gradient and momentum, bfloat16 update written and read).
- Dion: 8 m n r for its products and 2 n r² + r³/3 for the Cholesky QR of P; 32 bytes an element.
- AdamW 28 and Lion 20 bytes an element.
"""

from __future__ import annotations

import math
from typing import Any

from workloads import ADAMW, DION_4, DION_16, LION, MUON, Shape, Workload

BYTES = {MUON: 24, DION_4: 32, DION_16: 32, ADAMW: 28, LION: 20}
RANKS = {DION_4: 1 / 4, DION_16: 1 / 16}


def floor_seconds(workload: Workload, family: str, rates: dict[str, Any]) -> float | None:
    """Seconds of one step, None for a family without a formula. Vectors beside matrices are AdamW's."""
    if family not in BYTES:
        return None
    elements = {
        key: sum(math.prod(shape) for shape in getattr(workload, key)) for key in ("matrices", "others")
    }
    rest = BYTES[family] if family in (ADAMW, LION) else BYTES[ADAMW]
    traffic = BYTES[family] * elements["matrices"] + rest * elements["others"]
    operations = sum(_operations(shape, family) for shape in workload.matrices)
    rate = max(rates["float32"], rates["bfloat16"]) if family == MUON else rates["float32"]
    return operations / rate + traffic / float(rates["bytes"])


def _operations(shape: Shape, family: str) -> float:
    m, n = min(shape), max(shape)
    if family == MUON:
        return min(15 * m * m * n + 5 * m**3, 9 * m * m * n + 11 * m**3)
    if family in RANKS:
        rank = max(1, round(RANKS[family] * m))
        return 8 * m * n * rank + 2 * n * rank**2 + rank**3 / 3
    return 0.0
