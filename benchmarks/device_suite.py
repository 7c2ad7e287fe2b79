"""The tests that need a GPU, with each failure written the moment it is there: ``device.py`` starts it.

python3 benchmarks/device_suite.py OUTCOME SECONDS [arguments of pytest]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

#: Characters that are kept of a failure, failures that are kept with them, and seconds between two writes.
KEPT, MOST, EVERY = 4096, 60, 1.0


class Told:
    """A plugin that counts outcomes and keeps failures, and ends the session when its time is over."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.until, self.written = file, time.monotonic() + seconds, 0.0
        self.counts: dict[str, int] = {}
        self.failures: list[dict[str, str]] = []
        self.is_late = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a test, or of what failed before it."""
        if report.when != "call" and report.outcome == "passed":
            return
        self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
        if report.failed and len(self.failures) < MOST:
            self.failures.append({"test": report.nodeid, "traceback": report.longreprtext[-KEPT:]})
        if report.failed or time.monotonic() - self.written > EVERY:
            self.write({})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Notes that it has begun."""
        self.write({})

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """Ends the session once its time is over."""
        if time.monotonic() > self.until and not self.is_late:
            self.is_late = True
            pytest.exit("no time is left", returncode=0)

    def end(self) -> None:
        """Writes what is known, as the outcome, and ends the process."""
        self.counts["left_out"] = 1
        self.write({"status": "FAIL" if self.failures else "SLOW", "bar": "all tests within the time"})
        os._exit(0)

    def write(self, more: dict[str, Any]) -> None:
        """Writes what is known."""
        self.written = time.monotonic()
        names = "; ".join(failure["test"] for failure in self.failures)
        shown = "\n\n".join(f"{f['test']}\n{f['traceback']}" for f in self.failures)[:KEPT]
        told = {
            "figures": self.counts,
            "reason": names,
            "traceback": shown,
            "failures": self.failures,
            **more,
        }
        part = self.file.with_name(f"{self.file.name}.part")
        part.write_text(json.dumps(told), "utf-8")
        part.replace(self.file)


def main() -> None:
    """Runs the command line."""
    plugin = Told(Path(sys.argv[1]), float(sys.argv[2]))
    # A test that runs longer than all may is not waited for.
    end = threading.Timer(float(sys.argv[2]) + 1, plugin.end)
    end.daemon = True
    end.start()
    words = ["-q", "-W", "default", "-p", "no:cacheprovider", *sys.argv[3:]]
    code = int(pytest.main(words, plugins=[plugin]))
    if plugin.is_late:
        plugin.counts["left_out"] = 1
    late = "SLOW" if plugin.is_late else "PASS"
    status = "FAIL" if plugin.failures or code not in (0, 1) else late
    reason = "; ".join(f["test"] for f in plugin.failures) or (f"pytest ended with {code}" if code else "")
    plugin.write({"status": status, "reason": reason})


if __name__ == "__main__":
    main()
