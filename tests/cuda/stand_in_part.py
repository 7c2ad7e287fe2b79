"""Stands in for the programs that ``benchmarks/device.py`` starts: Python imports it as ``sitecustomize``.

It writes the outcome of a part and notes in a ledger that it did, unless an accident is planned for the part.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

WORDS = sys.orig_argv
PLAN: dict[str, str] = json.loads(os.environ.get("STAND_IN", "{}"))
LEDGER = os.environ.get("LEDGER", "")
ROWS = {"1,2": "load", "3": "kernels", "4": "steps", "8": "first", "9": "graph"}
INNER = ("a.cu one", "b.cu two", "c.cu three")
NOT_BEGUN = "it had not begun when the report was written"
RUNNING = "it was running when the report was written"


def write(file: str, content: Any) -> None:
    Path(f"{file}.part").write_text(json.dumps(content))
    Path(f"{file}.part").replace(file)


def note(name: str) -> None:
    with Path(LEDGER).open("a") as ledger:
        ledger.write(f"{name}\n")


def after(word: str) -> str:
    return WORDS[WORDS.index(word) + 1]


def accident(kind: str) -> None:
    if kind == "lost":
        Path(f"{LEDGER}.lost").touch()
    if kind in ("crash", "lost"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "kills its parent":
        os.kill(os.getppid(), signal.SIGKILL)
    if kind == "ends by itself":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise SystemExit(3)
    if kind == "flood":
        for _ in range(400):
            os.write(2, b"x" * 65536)
        return
    if kind == "waits":
        time.sleep(1)
        return
    time.sleep(100)


def inner(name: str, row: int) -> dict[str, Any]:
    figures = {"seconds": 0, "limit": 1, "bar": "", "figures": {}, "traceback": "", "env": {}}
    return {"row": row, "name": name, "status": "LEFT_OUT", "reason": NOT_BEGUN, **figures}


def check(file: str, row: int) -> None:
    """As ``gpu-check`` of a row: it writes its report after each of its parts."""
    parts = {name: inner(name, row) for name in INNER}
    if "--resume" in WORDS:
        parts |= {part["name"]: part for part in json.loads(Path(file).read_text())["parts"]}
    for name, part in parts.items():
        if part["reason"] == RUNNING:
            part.update(status="CRASH", reason="it ended")
        if part["status"] != "LEFT_OUT":
            continue
        part["reason"] = RUNNING
        write(file, {"parts": list(parts.values())})
        time.sleep(0.05)
        if PLAN.get(name) == "kills its parent":
            os._exit(9)
        if PLAN.get(name) == "has no time":
            part["reason"] = "2 s were left, 22 s are needed"
            continue
        is_wrong = PLAN.get(name) == "wrong"
        part.update(status="FAIL" if is_wrong else "PASS", reason="planted" if is_wrong else "")
        note(name)
        write(file, {"parts": list(parts.values())})
    failed = any(part["status"] not in ("PASS", "LEFT_OUT") for part in parts.values())
    tiers = {
        name.split()[0]: "kernels" if part["status"] == "PASS" else f"libtorch: {part['reason']}"
        for name, part in parts.items()
    }
    outcome = {"parts": list(parts.values()), "tiers": tiers if row == 3 else {}, "figures": {}}
    write(file, {**outcome, "status": "FAIL" if failed else "PASS", "reason": ""})
    os._exit(int(failed))  # as gpu-check


def main() -> None:
    if "-c" in WORDS and "json, sys, torch" in after("-c"):
        if not Path(f"{LEDGER}.lost").exists():
            write(WORDS[-1], {"status": "PASS"})
        os._exit(0)
    script = next((word for word in WORDS if word.endswith(("device_parts.py", "device_suite.py"))), None)
    if "--install" in WORDS:
        name, file = "install", WORDS[-1]
    elif script and script.endswith("device_suite.py"):
        name, file = "suite", after(script)
    elif script:
        name, file = after(script), after("--into")
    elif "--part" in WORDS:
        name, file = WORDS[WORDS.index("--part") + 2], after("--into")
    elif "--rows" in WORDS:
        name, file = ROWS[after("--rows")], after("--json")
    else:
        return
    time.sleep(0.05)
    os.write(1, f"a line of {name}\n".encode())
    if name in PLAN:
        accident(PLAN[name])
    if "--rows" in WORDS:
        check(file, int(after("--rows")[-1]))
    given = {"blocking": "CUDA_LAUNCH_BLOCKING", "off": "OXIDION_GPU_CHECK_OFF"}
    outcome: dict[str, Any] = {"figures": {key: os.environ.get(word, "") for key, word in given.items()}}
    if script and script.endswith("device_parts.py"):
        outcome["races"] = [{"workload": name}]
    if name == "env":
        outcome |= {"device": {"name": "a GPU"}, "ceilings": {"copy_gb_per_s": 1.0}}
    note(name)
    write(file, {"status": "PASS", **outcome})
    os._exit(0)


main()
