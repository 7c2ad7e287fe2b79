"""``python -m oxidion env`` prints what a bug report needs."""

from __future__ import annotations

import argparse
import sys

from oxidion import env_report


def main(arguments: list[str] | None = None) -> int:
    """Runs a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m oxidion", description="Tools of oxidion.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("env", help="print versions and processor features")
    parser.parse_args(arguments)
    sys.stdout.write(env_report() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
