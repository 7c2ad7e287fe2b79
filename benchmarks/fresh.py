"""One measurement in a fresh process: first step of an optimizer, or the time to import the package.

Run by `step.py` with one JSON argument; prints one JSON line last.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from typing import Any

WARM_STEPS = 9


def import_times() -> dict[str, float]:
    """Seconds to import torch, and then oxidion on top of it."""
    start = time.perf_counter()
    import torch  # noqa: F401

    middle = time.perf_counter()
    import oxidion  # noqa: F401

    return {"torch": middle - start, "oxidion": time.perf_counter() - middle}


def first_step(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds to construct an optimizer, of its first step, and the median of the steps after it."""
    import torch

    from contenders import SOURCES, contenders
    from harness import state_bytes, stepper, timed
    from workloads import gradients, make_tensors, named

    torch.set_num_threads(request["threads"])
    workload = named(request["workload"])
    entry = next(
        item for item in contenders(request["family"], compiled=True) if item.name == request["contender"]
    )
    importlib.import_module(SOURCES[entry.source][0])
    tensors = make_tensors(gradients(workload))
    start = time.perf_counter()
    optimizers = entry.build(tensors)
    built = time.perf_counter()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step = stepper(optimizers, compiled=True)  # eager contenders run under TORCHDYNAMO_DISABLE=1 here
    samples = [timed(step, 1) for _ in range(1 + WARM_STEPS)]
    declared = state_bytes(optimizers)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    return {
        "construct": built - start,
        "first": samples[0][0],
        "warm": statistics.median(wall for wall, _ in samples[1:]),
        "first_cpu": samples[0][1],
        "warm_cpu": statistics.median(cpu for _, cpu in samples[1:]),
        "state_bytes": declared,
        "extra_bytes": max(0, grown - declared),
    }


def main() -> None:
    """Answer the request in ``argv[1]``."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    sys.path[:0] = request["paths"]
    answer = import_times() if request["job"] == "import" else first_step(request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
