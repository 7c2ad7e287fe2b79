"""The shortest time that a step can take on a machine of given rates: operations, then memory traffic.

m <= n are the sides of a matrix, r is a rank, f a fraction. Symmetric products count half. Bytes are those of
an element in float32 that no pass can do without: parameter read and written 8, gradient read 4, each state
read and written 8. A value that a norm or mean of the whole parameter has to come before is read once more.

- Muon, NorMuon, five steps: the fewer of 15 m²n + 5 m³ (on the matrix) and 9 m²n + 11 m³ (on its Gram matrix
  with two restarts); 24 bytes (parameter, gradient and momentum, bfloat16 update written and read).
- Dion2, NorDion2: those operations for the part that is selected, rows of a NorDion2; 20 + 12 f bytes (the
  selected momentum is read and decayed once more, its update written and read in bfloat16).
- Dion: 8 m n r for its products and 2 n r² + r³/3 for the Cholesky QR of P; 32 bytes.
- AdamW 28 and Lion 20 bytes; AdamW with 8-bit states 16, vectors 28.
- Lamb 40: norms of update and parameter come before the step, so the update is written and read and the
  parameter read once more.
- Adafactor 24: the gradient for the factors, for the norm of the update and for the update, and the parameter
  for its norm; vectors, whose second moment has all its elements, 32.
- CAME 32: the same without the norm of the parameter, the momentum, and this once more with the confidence;
  vectors 36.
- GaLore: 4 m n r to project and back; 12 + 4 r / m bytes, with moments of 8 bits. A refresh has no formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from workloads import (
    ADAFACTOR,
    ADAMW,
    ADAMW8,
    CAME,
    DION2,
    DION_4,
    DION_16,
    GALORE,
    LAMB,
    LION,
    MUON,
    NORDION2,
    NORMUON,
    Shape,
    Workload,
)

#: Bytes an element of a matrix.
BYTES: dict[str, float] = {
    **dict.fromkeys((MUON, NORMUON), 24),
    **dict.fromkeys((DION2, NORDION2), 20 + 12 / 4),
    **dict.fromkeys((DION_4, DION_16), 32),
    **{ADAMW: 28, LION: 20, LAMB: 40, ADAFACTOR: 24, CAME: 32, ADAMW8: 16, GALORE: 12},
}
#: Of the other parameters, where it is not AdamW's.
OTHERS = {LION: 20, LAMB: 40, ADAFACTOR: 32, CAME: 36}
#: Bytes of an element of GaLore's moments, which are (r, n).
MOMENTS = 4
GALORE_RANK = 128


def floor_seconds(workload: Workload, family: str, rates: dict[str, Any]) -> float | None:
    """Seconds of one step, None for a family without a formula. Vectors beside matrices are AdamW's."""
    if family not in BYTES:
        return None
    traffic = sum(BYTES[family] * math.prod(shape) for shape in workload.matrices)
    traffic += sum(OTHERS.get(family, BYTES[ADAMW]) * math.prod(shape) for shape in workload.others)
    if family == GALORE:
        traffic += sum(MOMENTS * min(GALORE_RANK, *shape) * max(shape) for shape in workload.matrices)
    operations = sum(OPERATIONS[family](shape) for shape in workload.matrices if family in OPERATIONS)
    iterated = family in (MUON, NORMUON, DION2, NORDION2)
    rate = max(rates["float32"], rates["bfloat16"]) if iterated else rates["float32"]
    return operations / rate + traffic / float(rates["bytes"])


def _polynomial(shape: Shape) -> float:
    m, n = min(shape), max(shape)
    return min(15 * m * m * n + 5 * m**3, 9 * m * m * n + 11 * m**3)


def _of_short_side(shape: Shape) -> float:
    return _polynomial((math.ceil(min(shape) / 4), max(shape)))


def _of_rows(shape: Shape) -> float:
    return _polynomial((math.ceil(shape[0] / 4), shape[1]))


def _dion(share: float) -> Callable[[Shape], float]:
    def operations(shape: Shape) -> float:
        m, n = min(shape), max(shape)
        rank = max(1, round(share * m))
        return 8 * m * n * rank + 2 * n * rank**2 + rank**3 / 3

    return operations


def _galore(shape: Shape) -> float:
    return 4 * math.prod(shape) * min(GALORE_RANK, *shape)


OPERATIONS: dict[str, Callable[[Shape], float]] = {
    MUON: _polynomial,
    NORMUON: _polynomial,
    DION2: _of_short_side,
    NORDION2: _of_rows,
    DION_4: _dion(1 / 4),
    DION_16: _dion(1 / 16),
    GALORE: _galore,
}
