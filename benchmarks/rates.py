"""What this machine does at best in products and memory traffic; the floors of `floors.py` go by it.

Run by `step.py` with one JSON argument; prints one JSON line last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

SIDE = 2048
ELEMENTS = 1 << 25
REPEATS = 7


def rates(threads: int) -> dict[str, Any]:
    """Operations a second of products in float32 and bfloat16, bytes a second of `a + b -> c` in memory."""
    import torch

    torch.set_num_threads(threads)
    found: dict[str, Any] = {"threads": threads}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        left, right = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        out = torch.empty(SIDE, SIDE, dtype=dtype)
        found[name] = 2 * SIDE**3 / _seconds(lambda a=left, b=right, c=out: torch.mm(a, b, out=c))
    one, two = (torch.ones(ELEMENTS) for _ in range(2))
    total = torch.zeros(ELEMENTS)
    found["bytes"] = 12 * ELEMENTS / _seconds(lambda: torch.add(one, two, out=total))
    return found


def _seconds(work: Callable[[], Any]) -> float:
    """Median wall time of a call, after one that is not counted."""
    work()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def main() -> None:
    """Answer the request in ``argv[1]``."""
    print(json.dumps(rates(json.loads(sys.argv[1])["threads"])))


if __name__ == "__main__":
    main()
