"""Commands: ``env`` for a bug report, ``plan`` for what a step costs, ``rank`` for what low ranks capture."""

from __future__ import annotations

import argparse
import sys

from oxidion import __version__, env_report
from oxidion._energy import command as rank
from oxidion._planning import command as plan


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m oxidion", description="Tools of oxidion.")
    parser.add_argument("--version", action="version", version=f"oxidion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print versions and processor features")
    runs = {"plan": plan.run, "rank": rank.run}
    parsers = {"plan": plan.add(commands), "rank": rank.add(commands)}
    given = parser.parse_args(arguments)
    if given.command in runs:
        return runs[given.command](parsers[given.command], given)
    sys.stdout.write(env_report() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
