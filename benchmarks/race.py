"""One measurement in a fresh process: a race, qualities, a first step, or rates.

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
from typing import Any

import torch
import torch._dynamo  # what torch imports for its first optimizer

import floors
from contenders import OURS, SOURCES, Contender, availability, contenders, missing
from harness import (
    Step,
    clock_of,
    interleave,
    load_average,
    machine,
    said,
    state_bytes,
    stepper,
    summed_up,
    timed,
)
from quality import quality
from workloads import Workload, gradients, make_tensors, named

WARM_STEPS = 2
#: A compiled contender specializes on its second step at the latest.
COMPILED_WARM_STEPS = 3
#: Steps after a first one: at most, at least, and the seconds after which the least number is enough.
LATER_STEPS, LEAST_LATER_STEPS, LATER_SECONDS = 9, 3, 10.0
#: Seconds before each of those in which memory is worked on, as training computes gradients: those of a layer
#: of GPT-160M for a sequence of 1024 tokens take one core as long.
FORWARD_AND_BACKWARD = 0.3
Row = dict[str, Any]


def started(entry: Contender, grads: Any) -> tuple[Row, Step | None]:
    """Builds a contender and warms its step up; the row says why there is no step."""
    try:
        optimizers = entry.build(make_tensors(grads))
        step = stepper(optimizers, compiled=entry.compiled or entry.source in (OURS, "torch"))
        for _ in range(COMPILED_WARM_STEPS if entry.compiled else WARM_STEPS):
            step()
    except Exception as error:
        return {"status": f"{'not compiled' if entry.compiled else 'failed'}: {said(error)}"}, None
    return {"status": "ok", "state_bytes": state_bytes(optimizers)}, step


def race(workload: Workload, request: Row) -> Row:
    """Build, warm up and time the contenders; one that fails is reported with its error, not dropped."""
    versions, grads = availability(), gradients(workload)
    steps: dict[str, Step] = {}
    rows: dict[str, Row] = {}
    load = load_average()
    for entry in contenders(request["family"], compiled=request["compiled"]):
        if refused := floors.reason(entry, versions[entry.source], workload):
            rows[entry.name] = {"status": refused}
            continue
        rows[entry.name], step = started(entry, grads)
        if step is not None:
            steps[entry.name] = step
    ours = [name for name in rows if name.startswith(f"{OURS}.")]
    series = interleave(steps, request["rounds"])
    for name, figures in summed_up(series, ours, clock_of(request["threads"])).items():
        rows[name] |= figures
    where = {key: request[key] for key in ("workload", "family", "threads")}
    facts = {"date": machine()["date"], "oxidion": versions[OURS], "load": [load, load_average()]}
    return {**where, **facts, "base": next(iter(steps), ""), "contenders": rows}


def qualities(workload: Workload, request: Row) -> Row:
    """Quality of every installed contender of an orthonormal family on the shapes of a workload."""
    versions, rows = availability(), {}
    for entry in contenders(request["family"], compiled=False):
        if missing(versions[entry.source]):
            continue
        try:
            refused = floors.emulated(entry, workload)
            rows[entry.name] = {"status": refused} if refused else quality(entry, workload)
        except Exception as error:
            rows[entry.name] = {"status": f"failed: {said(error)}"}
    return {"workload": workload.name, "family": request["family"], "rows": rows}


def first_step(workload: Workload, request: Row) -> Row:
    """Seconds to construct an optimizer, of its first step, and the median of the steps after it.

    Before each step other memory goes through the caches. Extra memory is what the resident peak grows from
    the construction on, beyond the states. What the system does for the process between construction and
    first step, as clearing pages that a thread asked for, is a figure of its own.
    """
    known = {entry.name: entry for entry in contenders(request["family"], compiled=True)}
    entry = known[request["contender"]]
    importlib.import_module(SOURCES[entry.source][0])
    tensors = make_tensors(gradients(workload))
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


def main() -> None:
    """Answer the request in ``argv[1]``."""
    request: Row = json.loads(sys.argv[1])
    torch.set_num_threads(request["threads"])
    if request["job"] == "rates":
        answer = floors.rates(request["threads"])
    else:
        jobs = {"race": race, "quality": qualities, "first": first_step}
        answer = jobs[request["job"]](named(request["workload"]), request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
