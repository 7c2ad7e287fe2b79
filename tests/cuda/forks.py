"""Runs Python code, each in a fork of a process that has imported torch and the package: that takes seconds.

Reads a line of JSON for each: ``code``, and the files that ``stdout`` and ``stderr`` go to. Answers with the
exit code. A fork ends as a process of its own does, with all that an interpreter does then.
"""

import ctypes  # noqa: F401
import json
import logging  # noqa: F401
import os
import sys

import torch  # noqa: F401

import oxidion  # noqa: F401


def serve() -> str:
    """Code that this fork is to run; none in the process that made the forks, once there is no more."""
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return str(job["code"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return ""


exec(compile(serve(), "<string>", "exec"))
