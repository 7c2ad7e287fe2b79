"""Commands: ``env`` for a bug report, ``plan`` for costs, ``rank`` for low ranks, ``gpu-check``, ``shim``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from oxidion import __version__, env_report
from oxidion._energy import command as rank
from oxidion._gpu_check import command as gpu_check
from oxidion._planning import command as plan
from oxidion.compat import shim


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m oxidion", description="Tools of oxidion.")
    parser.add_argument("--version", action="version", version=f"oxidion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print versions and processor features")
    tools: dict[str, Any] = {"plan": plan, "rank": rank, "gpu-check": gpu_check, "shim": shim}
    parsers = {name: tool.add(commands) for name, tool in tools.items()}
    given = parser.parse_args(arguments)
    if given.command in tools:
        status: int = tools[given.command].run(parsers[given.command], given)
        return status
    sys.stdout.write(env_report() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
