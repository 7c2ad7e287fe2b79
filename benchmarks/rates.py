"""What this machine does at best in products and memory traffic; the floors of `floors.py` go by it.

Run by `step.py` with one JSON argument; prints one JSON line last.
"""

from __future__ import annotations

import functools
import json
import sys
from typing import Any

#: Of the products; that of `eligible.py` where a type is emulated.
SIDE = 2048
#: Of the matrix of an iteration, all of which stays in a second-level cache or nearly so.
OWN_SIDE = 1024
ELEMENTS = 1 << 25
REPEATS = 7


def rates(threads: int) -> dict[str, Any]:
    """Operations a second of products in float32 and bfloat16, bytes a second of `a + b -> c` in memory.

    Products are those of torch or of this package's iterations, whichever are faster.
    """
    import torch

    from eligible import EMULATED, rate, seconds_of
    from floors import OPERATIONS
    from oxidion.functional import newton_schulz
    from workloads import MUON

    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        if rate(dtype) * EMULATED < rate(torch.float32):
            found[name] = rate(dtype)  # a larger product takes minutes
            continue
        left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        out = torch.empty(SIDE, SIDE, dtype=dtype)
        multiply = functools.partial(torch.mm, left, right, out=out)
        square = torch.randn(OWN_SIDE, OWN_SIDE).to(dtype)
        iterate = functools.partial(newton_schulz, square, steps=5)
        operations = OPERATIONS[MUON]((OWN_SIDE, OWN_SIDE))
        found[name] = max(
            2 * SIDE**3 / seconds_of(multiply, REPEATS), operations / seconds_of(iterate, REPEATS)
        )
    one, two = (torch.ones(ELEMENTS) for _ in range(2))
    total = torch.zeros(ELEMENTS)
    found["bytes"] = 12 * ELEMENTS / seconds_of(functools.partial(torch.add, one, two, out=total), REPEATS)
    return found


def main() -> None:
    """Answer the request in ``argv[1]``."""
    print(json.dumps(rates(json.loads(sys.argv[1])["threads"])))


if __name__ == "__main__":
    main()
