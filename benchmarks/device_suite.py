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


class OutcomeRecorder:
    """A plugin that counts outcomes and keeps failures. It ends the process when the time is over."""

    def __init__(self, file: Path, seconds: float) -> None:
        self.file, self.written = file, 0.0
        self.counts: dict[str, int] = {}
        self.failures: list[dict[str, str]] = []
        self.lock = threading.RLock()
        # A test that runs longer than all may is not waited for.
        self.timer = threading.Timer(seconds, self.end)
        self.timer.daemon = True
        self.timer.start()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes the outcome of a test, or of what failed before it."""
        if report.when != "call" and report.outcome == "passed":
            return
        with self.lock:
            self.counts[report.outcome] = self.counts.get(report.outcome, 0) + 1
            if report.failed and len(self.failures) < MOST:
                self.failures.append({"test": report.nodeid, "traceback": report.longreprtext[-KEPT:]})
            if report.failed or time.monotonic() - self.written > EVERY:
                self.write({})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        """Notes that it has begun."""
        self.write({})

    def end(self) -> None:
        """Writes what is known, as the outcome, and ends the process."""
        with self.lock:
            try:
                self.counts["left_out"] = 1
                status = "FAIL" if self.failures else "SLOW"
                self.write({"status": status, "bar": "all tests within the time"})
            finally:
                os._exit(0)

    def write(self, more: dict[str, Any]) -> None:
        """Writes what is known."""
        with self.lock:
            self.written = time.monotonic()
            names = "; ".join(failure["test"] for failure in self.failures)
            shown = "\n\n".join(f"{f['test']}\n{f['traceback']}" for f in self.failures)[:KEPT]
            record = {"figures": self.counts, "reason": names, "traceback": shown, "failures": self.failures}
            part = self.file.with_name(f"{self.file.name}.part")
            part.write_text(json.dumps({**record, **more}), "utf-8")
            part.replace(self.file)


def main() -> None:
    """Runs the command line."""
    plugin = OutcomeRecorder(Path(sys.argv[1]), float(sys.argv[2]))
    words = ["-q", "-W", "default", "-p", "no:cacheprovider", *sys.argv[3:]]
    code = int(pytest.main(words, plugins=[plugin]))
    with plugin.lock:
        plugin.timer.cancel()
        reason = "; ".join(f["test"] for f in plugin.failures) or (
            f"pytest ended with {code}" if code else ""
        )
        plugin.write(
            {"status": "FAIL" if plugin.failures or code not in (0, 1) else "PASS", "reason": reason}
        )
        os._exit(0)


if __name__ == "__main__":
    main()
