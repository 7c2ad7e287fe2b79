"""Takes the first steps of a user: with checks, timing and warnings, then again in a second process."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oxidion._cuda.child import END_WITH_PARENT
from oxidion._cuda.device import EMULATED
from oxidion._cuda.records import folder as given_cache
from oxidion._cuda.self_check import SECONDS
from oxidion._gpu_check.found import Found

CACHE = "OXIDION_CACHE"
"""Environment variable: the folder of machine code and verdicts."""
BAR = 0.5
"""Seconds that a first step may take in a process that finds machine code and verdicts."""
LIMIT = 85.0
"""Seconds that the two processes may take together if nothing else is asked for."""
EMULATED_SECONDS = "600"
"""Seconds that the check of a source may take on an emulated device, if the caller does not say."""
KEPT = 4000
"""Characters that are kept of what a failed process wrote to stderr."""
LARGE = {
    "AdamW": ((1024, 1024), (4096, 1024), (1024,)),
    "Muon": ((1024, 1024), (1024, 1024), (4096, 1024), (1024, 4096)),
}
"""Shapes of the parameters, by class."""
SMALL = {"AdamW": ((20, 12), (17,)), "Muon": ((136, 200),)}
"""Shapes where the device is emulated: Muon's matrix is large enough for the kernels of products."""

PROGRAM = """
import json, logging, sys, time, warnings
sys.path[:], job = json.loads(sys.argv[1])
started = time.perf_counter()
import torch
caught = warnings.catch_warnings(record=True)
warned, logged = caught.__enter__(), []
warnings.simplefilter("always")

class Logged(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())

logging.getLogger("oxidion.cuda").addHandler(Logged(logging.WARNING))
import oxidion
result = {"import_s": time.perf_counter() - started, "steps": {}, "kernels": {}}
if job["emulated"]:
    from oxidion._cuda import device
    device.prepare(emulated=True)
    torch.set_num_threads(1)
place = torch.device(job["device"])

def seconds(work):
    wait = (lambda: torch.cuda.synchronize(place)) if place.type == "cuda" else (lambda: None)
    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun

result["context_s"] = seconds(lambda: torch.zeros(1, device=place))
torch.manual_seed(0)
for name, shapes in job["shapes"].items():
    params = [torch.nn.Parameter(torch.randn(shape, device=place)) for shape in shapes]
    before = [param.detach().clone() for param in params]
    keys = {"orth_dtype": "bfloat16"} if name == "Muon" else {}
    optimizer = getattr(oxidion, name)(params, lr=0.01, **keys)
    spent = []
    for step in range(2):
        optimizer.zero_grad()
        for param in params:  # a model has multiplied before its optimizer takes a step
            (torch.randn(8, param.shape[0], device=place) @ param).square().mean().backward()
        spent.append(seconds(optimizer.step))
    right = all(bool(p.isfinite().all()) and not torch.equal(p, old) for p, old in zip(params, before))
    result["steps"][name] = {"first_s": spent[0], "next_s": spent[1], "right": right}
    result["kernels"][name] = optimizer.explain().kernels
# Python shows a user no others unless asked to.
hidden = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
shown = [w for w in warned if not issubclass(w.category, hidden)]
result["warnings"] = [f"{w.category.__name__}: {w.message}" for w in shown] + logged
print("\\n" + json.dumps(result))
"""
"""A process of a user; it prints a line of JSON."""


def first(number: str, seconds: float = LIMIT) -> Found:
    """Takes first steps in a process with machine code but no verdicts, then in one that finds both.

    The second has to take each first step in less than half a second, and to warn of nothing. This process
    itself does not touch the device.

    Args:
        number: of the device, or "emulated".
        seconds: that the two processes may take together; what runs then is killed.
    """
    until = time.monotonic() + seconds
    processes: list[dict[str, Any]] = []
    figures: dict[str, Any] = {"processes": processes}
    with tempfile.TemporaryDirectory(prefix="oxidion-first-") as folder:
        cache = Path(folder, "cache")
        cache.mkdir(mode=0o700)
        _copy_machine_code(cache)
        for which in ("first", "second"):
            result, reason, complaints = _process(number, cache, until - time.monotonic())
            figures["verdicts"] = _verdicts(cache)
            figures["products_timed"] = any(cache.glob("products-*.json"))
            if reason:
                return Found("FAIL", figures, f"the {which} process {reason}", complaints)
            processes.append(result)
    status, reason = judged(processes, is_timed=number != EMULATED)
    return Found(status, figures, reason)


def judged(processes: Sequence[Mapping[str, Any]], *, is_timed: bool) -> tuple[str, str]:
    """Returns the status and its reason for the results of two processes.

    Args:
        processes: what each of them printed.
        is_timed: whether the bar on seconds counts.
    """
    wrong = [name for result in processes for name, step in result["steps"].items() if not step["right"]]
    if wrong:
        return "FAIL", f"parameters of {wrong[0]} did not change, or are not finite"
    later = processes[-1]
    if later["warnings"]:
        return "FAIL", f"the second process warns: {later['warnings'][0][:400]}"
    spent = {name: step["first_s"] for name, step in later["steps"].items()}
    slow = [f"{name} {seconds:.2f} s" for name, seconds in spent.items() if seconds >= BAR]
    if slow and is_timed:
        return "SLOW", f"first steps of the second process take {', '.join(slow)}, not less than {BAR:g} s"
    return "PASS", ""


def _copy_machine_code(cache: Path) -> None:
    """Copies kernels that were compiled before, without verdicts on them."""
    given = given_cache()
    for file in sorted(given.glob("*.cubin")) if given is not None else ():
        shutil.copyfile(file, cache / file.name)


def environment(number: str, cache: Path) -> dict[str, str]:
    """Returns the variables of a user who has set none of this package's, but for the cache.

    An emulated device has more: where its kernels are, and the time that checks may take on it.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OXIDION_") or name.startswith("OXIDION_EMULATED_")
    }
    kept.pop("PYTHONWARNINGS", None)
    if number == EMULATED:
        kept[SECONDS] = os.environ.get(SECONDS) or EMULATED_SECONDS
    return {**kept, CACHE: str(cache)}


def _process(number: str, cache: Path, seconds: float) -> tuple[dict[str, Any], str, str]:
    """Returns the result of a user's process; else what went wrong, with the end of its stderr."""
    is_emulated = number == EMULATED
    job = {
        "emulated": is_emulated,
        "device": "cpu" if is_emulated else f"cuda:{number}",
        "shapes": SMALL if is_emulated else LARGE,
    }
    paths = [str(Path(path).absolute()) for path in sys.path]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+", errors="replace") as complaints:
        process = subprocess.Popen(
            [sys.executable, "-c", END_WITH_PARENT + PROGRAM, json.dumps([paths, job])],
            env=environment(number, cache),
            cwd=cache.parent,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complaints,
            start_new_session=True,
        )
        reason = ""
        try:
            code = process.wait(max(seconds, 0.0))
            if code:
                reason = f"ended with {code}"
        except subprocess.TimeoutExpired:
            reason = f"gave no answer within {seconds:.3g} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        complaints.seek(0)
        lines, stderr = said.read().strip().splitlines(), complaints.read()
    if not reason:
        try:
            return json.loads(lines[-1]), "", ""
        except (ValueError, IndexError):
            reason = "printed no figures"
    last = (stderr.strip().splitlines() or ["it printed nothing"])[-1]
    return {}, f"{reason}: {last[:300]}", stderr[-KEPT:]


def _verdicts(cache: Path) -> dict[str, dict[str, Any]]:
    """Returns by source the verdicts that processes kept, which are of this check alone."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(cache.glob("check-*.json")):
        result = json.loads(file.read_text("utf-8"))
        fields = {name: result[name] for name in ("result", "reason", "error", "seconds")}
        if not math.isfinite(fields["error"]):  # JSON has no infinity
            fields["error"] = None
        found[result["source"]] = fields
    return found
