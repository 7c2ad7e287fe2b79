"""A process that has everything imported and runs scripts in copies of itself, on one rank or on several.

Importing torch takes seconds a process; a fork of one that has it takes milliseconds. Requests and answers
are lines of JSON on the standard streams: ``{"script": path, "ranks": n, "folder": path}`` and
``{"codes": [...], "errors": text}``.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LIMIT = 120.0
"""Seconds that a script may take."""


def _child(script: str, folder: Path, rank: int, ranks: int, port: int) -> None:
    """Runs the script as the only program of this process, with the variables that torchrun sets."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.chdir(folder)
    sys.argv = [script]
    if ranks:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({key: str(value) for key, value in numbers.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(script: str, ranks: int, folder: Path) -> dict[str, Any]:
    """Runs a script on as many ranks; 0 ranks is a process without torchrun's variables."""
    port, end = _free_port(), time.monotonic() + LIMIT
    codes: dict[int, int] = {}
    for rank in range(max(ranks, 1)):
        pid = os.fork()
        if pid == 0:
            _child(script, folder, rank, ranks, port)
        codes[pid] = -1
    waiting = set(codes)
    while waiting and time.monotonic() < end:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
                waiting.remove(pid)
                if codes[pid]:
                    end = min(end, time.monotonic() + 5.0)  # its peers may wait for it for ever
        time.sleep(0.005)
    for pid in waiting:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    errors = "".join(log.read_text() for log in sorted(folder.glob("rank*.log")))
    return {"codes": list(codes.values()), "errors": errors}


def main() -> None:
    """Answers requests until the standard input ends."""
    for module in ("checkpoint.state_dict", "device_mesh", "fsdp", "tensor.parallel"):
        importlib.import_module(f"torch.distributed.{module}")
    importlib.import_module("oxidion")

    for line in sys.stdin:
        request = json.loads(line)
        answer = _run(request["script"], request["ranks"], Path(request["folder"]))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
