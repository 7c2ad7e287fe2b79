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

#: Steps after the first: so many at most, and at least, where they take longer than so many seconds.
WARM_STEPS, LEAST_WARM_STEPS, WARM_SECONDS = 9, 3, 10.0

#: Seconds before each step in which memory is worked on, as training computes gradients: those of a layer of
#: GPT-160M for a sequence of 1024 tokens take one core as long.
FORWARD_AND_BACKWARD = 0.3


def import_times() -> dict[str, float]:
    """Seconds to import torch, and then oxidion on top of it."""
    start = time.perf_counter()
    import torch  # noqa: F401

    middle = time.perf_counter()
    import oxidion  # noqa: F401

    return {"torch": middle - start, "oxidion": time.perf_counter() - middle}


def first_step(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds to construct an optimizer, of its first step, and the median of the steps after it.

    Before each step other memory goes through the caches. What torch imports for its first optimizer is
    imported before. Extra memory is what the resident peak grows from the construction on, beyond the states.
    What the system does for the process between construction and first step, as clearing pages that a thread
    asked for, is given apart.
    """
    import torch
    import torch._dynamo

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
    activations = torch.zeros(2**27)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resident, system = usage.ru_maxrss, [usage.ru_stime]
    start = time.perf_counter()
    optimizers = entry.build(tensors)
    built = time.perf_counter()
    step = stepper(optimizers, compiled=True)  # eager contenders run under TORCHDYNAMO_DISABLE=1 here
    samples: list[tuple[float, float]] = []
    while len(samples) <= WARM_STEPS:
        warm = [wall for wall, _ in samples[1:]]
        if len(warm) >= LEAST_WARM_STEPS and sum(warm) > WARM_SECONDS:
            break
        computed = time.perf_counter() + FORWARD_AND_BACKWARD
        while time.perf_counter() < computed:
            activations.add_(1.0)
        system.append(resource.getrusage(resource.RUSAGE_SELF).ru_stime)
        samples.append(timed(step, 1))
    declared = state_bytes(optimizers)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    return {
        "construct": built - start,
        "first": samples[0][0],
        "warm": statistics.median(wall for wall, _ in samples[1:]),
        "before_first": system[1] - system[0],
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
