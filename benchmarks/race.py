"""One measurement in a fresh process: a race, qualities, a first step, rates, or the time of an import.

Run by `step.py` with one JSON argument; prints one JSON line last. A race has all contenders of one family on
one workload at one thread count, in rounds; its samples are summed up here.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # peers are found after the path is set
    from contenders import Contender
    from harness import Step
    from workloads import Tensors

WARM_STEPS = 2
#: A compiled contender specializes on its second step at the latest.
COMPILED_WARM_STEPS = 3
#: Steps after a first one: at most, at least, and the seconds after which the least number is enough.
LATER_STEPS, LEAST_LATER_STEPS, LATER_SECONDS = 9, 3, 10.0
#: Seconds before each of those in which memory is worked on, as training computes gradients: those of a layer
#: of GPT-160M for a sequence of 1024 tokens take one core as long.
FORWARD_AND_BACKWARD = 0.3


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def start(
    entry: Contender,
    refused: str,
    make: Callable[[], Tensors],
    row: dict[str, Any],
    steps: dict[str, Step],
) -> None:
    """Builds a contender that is not ``refused`` and warms its step up; its row says why it is not there."""
    from harness import state_bytes, stepper

    if refused:
        row["status"] = refused
        return
    try:
        optimizers = entry.build(make())
        step = stepper(optimizers, compiled=entry.compiled or entry.source in ("oxidion", "torch"))
        for _ in range(COMPILED_WARM_STEPS if entry.compiled else WARM_STEPS):
            step()
    except Exception as error:
        row["status"] = f"{'not compiled' if entry.compiled else 'failed'}: {said(error)}"
        return
    row.update(status="ok", state_bytes=state_bytes(optimizers))
    steps[entry.name] = step


def race(request: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up and time the contenders; one that fails is reported with its error, not dropped."""
    from contenders import OURS, availability, contenders
    from floors import reason
    from harness import clock_of, interleave, load_average, machine, summed_up
    from workloads import gradients, make_tensors, named

    workload, versions = named(request["workload"]), availability()
    grads = gradients(workload)
    steps: dict[str, Step] = {}
    rows: dict[str, dict[str, Any]] = {}
    load = load_average()
    for entry in contenders(request["family"], compiled=request["compiled"]):
        row = rows.setdefault(entry.name, {})
        start(entry, reason(entry, versions[entry.source], workload), lambda: make_tensors(grads), row, steps)
    ours = [name for name in rows if name.startswith(f"{OURS}.")]
    series = interleave(steps, request["rounds"])
    for name, figures in summed_up(series, ours, clock_of(request["threads"])).items():
        rows[name] |= figures
    where = {key: request[key] for key in ("workload", "family", "threads")}
    facts = {"date": machine()["date"], "oxidion": versions[OURS], "load": [load, load_average()]}
    return {**where, **facts, "base": next(iter(steps), ""), "contenders": rows}


def qualities(request: dict[str, Any]) -> dict[str, Any]:
    """Quality of every installed contender of an orthonormal family on the shapes of a workload."""
    from contenders import availability, contenders, missing
    from floors import emulated
    from quality import quality
    from workloads import named

    workload = named(request["workload"])
    versions, rows = availability(), {}
    for entry in contenders(request["family"], compiled=False):
        if missing(versions[entry.source]):
            continue
        try:
            refused = emulated(entry, workload)
            rows[entry.name] = {"status": refused} if refused else quality(entry, workload)
        except Exception as error:
            rows[entry.name] = {"status": f"failed: {said(error)}"}
    return {"workload": workload.name, "family": request["family"], "rows": rows}


def import_times(_request: dict[str, Any]) -> dict[str, float]:
    """Seconds to import torch, and then oxidion on top of it."""
    begun = time.perf_counter()
    import torch  # noqa: F401

    middle = time.perf_counter()
    import oxidion  # noqa: F401

    return {"torch": middle - begun, "oxidion": time.perf_counter() - middle}


def first_step(request: dict[str, Any]) -> dict[str, Any]:
    """Seconds to construct an optimizer, of its first step, and the median of the steps after it.

    Before each step other memory goes through the caches. What torch imports for its first optimizer is
    imported before. Extra memory is what the resident peak grows from the construction on, beyond the states.
    What the system does for the process between construction and first step, as clearing pages that a thread
    asked for, is a figure of its own.
    """
    import torch
    import torch._dynamo

    from contenders import SOURCES, contenders
    from harness import state_bytes, stepper, timed
    from workloads import gradients, make_tensors, named

    known = {entry.name: entry for entry in contenders(request["family"], compiled=True)}
    entry = known[request["contender"]]
    importlib.import_module(SOURCES[entry.source][0])
    tensors = make_tensors(gradients(named(request["workload"])))
    activations = torch.zeros(2**27)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    resident, system = usage.ru_maxrss, [usage.ru_stime]
    begun = time.perf_counter()
    optimizers = entry.build(tensors)
    built = time.perf_counter()
    step = stepper(optimizers, compiled=True)  # eager contenders run under TORCHDYNAMO_DISABLE=1 here
    samples: list[tuple[float, float]] = []
    while len(samples) <= LATER_STEPS:
        warm = [wall for wall, _ in samples[1:]]
        if len(warm) >= LEAST_LATER_STEPS and sum(warm) > LATER_SECONDS:
            break
        computed = time.perf_counter() + FORWARD_AND_BACKWARD
        while time.perf_counter() < computed:
            activations.add_(1.0)
        system.append(resource.getrusage(resource.RUSAGE_SELF).ru_stime)
        samples.append(timed(step, 1))
    declared = state_bytes(optimizers)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) * 1024
    warm, warm_cpu = (statistics.median(column) for column in zip(*samples[1:], strict=True))
    return {
        "construct": built - begun,
        "before_first": system[1] - system[0],
        "first": samples[0][0],
        "warm": warm,
        "first_cpu": samples[0][1],
        "warm_cpu": warm_cpu,
        "state_bytes": declared,
        "extra_bytes": max(0, grown - declared),
    }


def rates(request: dict[str, Any]) -> dict[str, Any]:
    """Rates of the machine, by which floors go."""
    import floors

    return floors.rates(request["threads"])


def main() -> None:
    """Answer the request in ``argv[1]``."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    sys.path[:0] = request["paths"]
    if threads := request.get("threads"):
        import torch

        torch.set_num_threads(threads)
    jobs = {"race": race, "quality": qualities, "first": first_step, "import": import_times, "rates": rates}
    print(json.dumps(jobs[request["job"]](request)))


if __name__ == "__main__":
    main()
