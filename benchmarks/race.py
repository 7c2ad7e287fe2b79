"""One interleaved race in a fresh process: every contender of one family on one workload at one thread count.

Run by `step.py` with one JSON argument; prints one JSON line last.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # peers are found after the path is set
    from contender import Contender
    from harness import Step
    from workloads import Tensors

WARM_STEPS = 2
#: A compiled contender specializes on its second step at the latest.
COMPILED_WARM_STEPS = 3


def start(
    entry: Contender,
    refused: str,
    make: Callable[[], Tensors],
    row: dict[str, Any],
    steps: dict[str, Step],
) -> None:
    """Builds a contender that is not ``refused`` and warms its step up; why not, if not, is in its row."""
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
        what = "not compiled" if entry.compiled else "failed"
        row["status"] = f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        return
    row.update(status="ok", state_bytes=state_bytes(optimizers))
    steps[entry.name] = step


def race(request: dict[str, Any]) -> dict[str, Any]:
    """Build, warm up and time the contenders; one that fails is reported with its error, not dropped."""
    import torch

    from contenders import availability, contenders
    from eligible import reason
    from harness import interleave, load_average, machine
    from workloads import gradients, make_tensors, named

    torch.set_num_threads(request["threads"])
    workload = named(request["workload"])
    versions = availability()
    grads = gradients(workload)
    steps: dict[str, Step] = {}
    entries: dict[str, dict[str, Any]] = {}
    load_before = load_average()
    for entry in contenders(request["family"], compiled=request["compiled"]):
        row: dict[str, Any] = {"source": entry.source, "note": entry.note}
        entries[entry.name] = row
        refused = reason(entry, versions[entry.source], workload)
        start(entry, refused, lambda: make_tensors(grads), row, steps)
    for name, series in interleave(steps, request["rounds"]).items():
        entries[name].update(inner=series.inner, wall=series.wall, cpu=series.cpu)
    return {
        "workload": workload.name,
        "family": request["family"],
        "threads": request["threads"],
        "numel": workload.numel,
        "date": machine()["date"],
        "oxidion": versions["oxidion"],
        "load": [load_before, load_average()],
        "contenders": entries,
    }


def qualities(request: dict[str, Any]) -> dict[str, Any]:
    """Quality of every installed contender of an orthonormal family on the shapes of a workload."""
    import torch

    from contenders import availability, contenders
    from eligible import emulated, missing
    from quality import quality
    from workloads import DION_16, named

    torch.set_num_threads(request["threads"])
    workload = named(request["workload"])
    versions, rows = availability(), {}
    fraction = 1 / 16 if request["family"] == DION_16 else 1 / 4
    for entry in contenders(request["family"], compiled=False):
        if missing(versions[entry.source]):
            continue
        if refused := emulated(entry, workload):
            rows[entry.name] = {"status": refused}
            continue
        try:
            rows[entry.name] = quality(entry, workload, fraction)
        except Exception as error:
            rows[entry.name] = {
                "status": f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
            }
    return {"workload": workload.name, "family": request["family"], "rows": rows}


def main() -> None:
    """Answer the request in ``argv[1]``."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    sys.path[:0] = request["paths"]
    answer = race(request) if request["job"] == "race" else qualities(request)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
