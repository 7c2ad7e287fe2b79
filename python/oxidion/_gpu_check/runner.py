"""Runs parts of a check, each in a session of its own with a time limit, and rewrites the report after each.

This module needs the standard library alone: `benchmarks/device.py` loads it where no package is installed.
"""

from __future__ import annotations

import ctypes
import faulthandler
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

SPARE = 15.0
"""Seconds that must be left in addition to a part's limit for it to begin, unless a runner has others."""
MOST_AGE = 120.0
"""Seconds above which the age of a process is not believed."""
LOOKS = 0.25
"""Seconds between two looks at the preliminary outcome of a part that runs."""
TRACEBACK = 4096
"""Characters that are kept of a traceback."""
LOG_OF_A_PART, LOG_IN_ALL = 1 << 20, 12 << 20
"""Bytes that the log keeps of what a part prints, half of them its end, and of all parts."""
NOT_BEGUN = "it had not begun when the report was written"
RUNNING = "it was running when the report was written"
CUT = "what runs all parts ended while this one ran"
"""Reason of a part that counts as crashed since it ran when the report was cut."""
FIELDS = ("row", "name", "status", "seconds", "limit", "bar", "figures", "reason", "traceback", "env")
"""Fields of a part in a report."""
_SET_DEATH_SIGNAL = 1


class Process(Protocol):
    """A process that was started."""

    pid: int

    def poll(self) -> int | None:
        """Returns its exit code, or minus the number of the signal that ended it; None while it runs."""


Start = Callable[[Path, int], Process]
"""Starts a process that writes its outcome to a file and prints to a descriptor."""


@dataclass(frozen=True)
class Part:
    """A part of a check.

    Attributes:
        name: its name.
        limit: seconds after which it is killed.
        start: starts its process.
        row: number of the row of ``gpu-check`` that it belongs to; 0 if none.
        alone: True if no other part may run at the same time.
        env: environment variables that it has in addition to the others, for the report.
        statuses: exit statuses with which it has not crashed.
    """

    name: str
    limit: float
    start: Start
    row: int = 0
    alone: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    statuses: tuple[int, ...] = (0,)


class Fork:
    """A fork of this process as a `Process`."""

    def __init__(self, pid: int) -> None:
        """Wraps the child with this process number."""
        self.pid = pid
        self._ended: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code once it has ended."""
        if self._ended is None:
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._ended = os.waitstatus_to_exitcode(status)
        return self._ended


def write_json(file: Path, content: Any) -> None:
    """Writes JSON such that the file has the old or the new content at any time."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(json.dumps(content, indent=1, default=str) + "\n", "utf-8")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one if there is none."""
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def age() -> float:
    """Returns the seconds since this process began, which include its imports (Linux)."""
    try:
        begun = int(Path("/proc/self/stat").read_text("utf-8").rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text("utf-8").split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    seconds = up - begun / os.sysconf("SC_CLK_TCK")
    # In some containers the two have not the same beginning.
    return seconds if 0 <= seconds < MOST_AGE else 0.0


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the outcome of a part that raised."""
    text = "".join(traceback.format_exception(error))
    first = (str(error).strip().splitlines() or [""])[0]
    reason = f"{type(error).__name__}: {first}"[:400]
    return {"status": "FAIL", "figures": {}, "reason": reason, "traceback": text[-TRACEBACK:]}


def end_with_parent() -> None:
    """Has Linux kill this process when its parent ends, however that ends."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def forked(work: Callable[[Callable[[Any], None]], Any], env: Mapping[str, str] | None = None) -> Start:
    """Returns a starter that runs a function in a fork of this process.

    Args:
        work: returns the outcome; it is called with a function that writes a preliminary one.
        env: environment variables of the fork in addition to those of this process.
    """

    def start(outcome: Path, output: int) -> Process:
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            return Fork(pid)
        code = 1
        try:
            os.setsid()
            end_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            for descriptor in (1, 2):
                os.dup2(output, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, closefd=False) for number in (1, 2))
            faulthandler.enable(2)
            os.environ.update(env or {})
            try:
                found = work(lambda found: write_json(outcome, found))
            except Exception as error:  # whatever it is belongs in the report
                found = failure(error)
            write_json(outcome, found)
            code = 0
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    return start


def started(command: Sequence[str], env: Mapping[str, str]) -> Start:
    """Returns a starter of a command; the word ``{outcome}`` in it becomes the name of the outcome's file."""

    def start(outcome: Path, output: int) -> Process:
        return subprocess.Popen(
            [word.replace("{outcome}", str(outcome)) for word in command],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )

    return start


class Output:
    """Output of a part. The beginning and the end are kept."""

    def __init__(self) -> None:
        """Opens the pipe."""
        self._read, self.write = os.pipe()
        with suppress(OSError):  # a part that prints much would wait for the next look at its output
            fcntl.fcntl(self.write, fcntl.F_SETPIPE_SZ, LOG_OF_A_PART)
        os.set_blocking(self._read, False)
        self._head, self._tail, self._dropped = b"", b"", 0

    def collect(self) -> None:
        """Reads what is there, at most as much as is kept: other parts must not wait for it."""
        for _ in range(2 * LOG_OF_A_PART >> 16):
            try:
                read = os.read(self._read, 1 << 16)
            except BlockingIOError:
                return
            if not read:
                return
            room = LOG_OF_A_PART // 2 - len(self._head)
            self._head += read[:room]
            self._tail += read[room:] if room > 0 else read
            over = len(self._tail) - LOG_OF_A_PART // 2
            if over > 0:
                self._dropped += over
                self._tail = self._tail[over:]

    def text(self) -> str:
        """Returns what was kept."""
        dropped = f"\n... {self._dropped} bytes are left out ...\n".encode() if self._dropped else b""
        return (self._head + dropped + self._tail).decode(errors="replace")

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._read)


class Report:
    """A report, which is written whenever something is known.

    Attributes:
        facts: everything in it but the parts.
        records: the parts in their order.
    """

    def __init__(self, file: Path | None, facts: dict[str, Any]) -> None:
        """Plans nothing yet; a file of None is not written."""
        self.file, self.facts, self.records = file, facts, list[dict[str, Any]]()

    def plan(self, parts: Iterable[Part]) -> None:
        """Notes parts that are to run: a report that is cut says that they did not."""
        known = {(record["row"], record["name"]) for record in self.records}
        self.records += [
            record(part, {}, "LEFT_OUT", NOT_BEGUN) for part in parts if (part.row, part.name) not in known
        ]

    def put(self, new: dict[str, Any]) -> None:
        """Replaces the record of this row and name, or appends one."""
        for i, old in enumerate(self.records):
            if (old["row"], old["name"]) == (new["row"], new["name"]):
                self.records[i] = new
                return
        self.records.append(new)

    def content(self) -> dict[str, Any]:
        """Returns what is written."""
        return {**self.facts, "parts": self.records}

    def write(self) -> None:
        """Writes the report; an error of the file system is printed and stops nothing."""
        if self.file is not None:
            try:
                write_json(self.file, self.content())
            except OSError as error:
                sys.stderr.write(f"{self.file} cannot be written: {error}\n")


def record(
    part: Part, outcome: Mapping[str, Any], status: str, reason: str = "", seconds: float = 0.0
) -> dict[str, Any]:
    """Returns the record of a part in a report."""
    return {
        "row": part.row,
        "name": part.name,
        "status": status,
        "seconds": round(seconds, 2),
        "limit": part.limit,
        "bar": outcome.get("bar", ""),
        "figures": outcome.get("figures", {}),
        "reason": without_folders(reason or str(outcome.get("reason", ""))),
        "traceback": without_folders(str(outcome.get("traceback", "")))[-TRACEBACK:],
        "env": dict(part.env),
    }


def last_words(text: str) -> str:
    """Returns the end of an output, or what Python writes at a fatal error, which begins with the place."""
    fatal = text.rfind("Fatal Python error")
    return text[-TRACEBACK:] if fatal < 0 else text[max(0, fatal - TRACEBACK // 4) :][:TRACEBACK]


def without_folders(text: str) -> str:
    """Returns a text with words for the folders that would name a user or a machine."""
    folders = {
        "~": os.path.expanduser("~"),  # `Path.home` raises where a user has none
        "<python>": sys.prefix,
        "<here>": os.getcwd(),
        "<tmp>": tempfile.gettempdir(),
    }
    for word, folder in sorted(folders.items(), key=lambda item: -len(item[1])):
        if len(folder) > 1:
            text = text.replace(folder, word)
    return text


@dataclass
class _Running:
    part: Part
    process: Process
    output: Output
    outcome: Path
    began: float
    looked: float = 0.0
    seen: int = 0


class Runner:
    """Runs parts, several at once, until all have an outcome or no time is left.

    Attributes:
        lost: why nothing more is begun on the device; empty if it answers.
    """

    def __init__(
        self,
        report: Report,
        *,
        until: float = float("inf"),
        spare: float = SPARE,
        least: float = float("inf"),
        probe: Part | None = None,
        log: Path | None = None,
        ended: Callable[[dict[str, Any], dict[str, Any]], None] = lambda _record, _outcome: None,
        begun: Callable[[Part, dict[str, Any]], None] = lambda _part, _outcome: None,
    ) -> None:
        """Prepares a runner.

        Args:
            report: where outcomes go.
            until: reading of `time.monotonic` by which all must have ended.
            spare: seconds that must be left in addition to a part's limit for it to begin.
            least: seconds with which a part begins whose limit is longer than what is left.
            probe: part that says, after a crash or a time-out, whether the device still answers.
            log: file to which is appended what parts print.
            ended: is called with the record and the outcome of each part that has ended.
            begun: is called with a part that runs and its preliminary outcome whenever that is written.
        """
        self.lost = ""
        self._report, self._until, self._probe, self._log = report, until, probe, log
        self._spare, self._least = spare, least
        self._ended, self._begun, self._running = ended, begun, list[_Running]()
        self._folder, self._count = Path(), 0

    def run(self, parts: Sequence[Part], jobs: int = 1) -> None:
        """Runs parts in their order, up to `jobs` at once."""
        self._report.plan(parts)
        self._report.write()
        waiting = deque(parts)
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            try:
                while waiting or self._running:
                    while waiting and self._may_begin(waiting[0], jobs):
                        self._begin(waiting.popleft())
                    self._poll()
            finally:
                for running in self._running:
                    self._kill(running)
                self._running.clear()
                self._report.write()

    def _may_begin(self, part: Part, jobs: int) -> bool:
        alone = part.alone or any(running.part.alone for running in self._running)
        return len(self._running) < (1 if alone else jobs)

    def _begin(self, part: Part) -> None:
        left = self._until - time.monotonic()
        needed = min(part.limit, self._least) + self._spare
        part = replace(part, limit=round(min(part.limit, max(left - self._spare, 0.0)), 1))
        if self.lost or left < needed:
            why = self.lost or f"{max(left, 0):.0f} s were left, {needed:.0f} s are needed"
            self._close(record(part, {}, "LEFT_OUT", why), {})
            return
        self._report.put(record(part, {}, "LEFT_OUT", RUNNING))
        self._report.write()
        self._running.append(self._start(part))

    def _start(self, part: Part) -> _Running:
        output = Output()
        self._count += 1
        outcome = self._folder / f"{self._count}.json"
        began = time.monotonic()
        try:
            process = part.start(outcome, output.write)
        except OSError as error:
            write_json(outcome, failure(error))
            process = subprocess.Popen([sys.executable, "-c", ""])
        finally:
            os.close(output.write)
        return _Running(part, process, output, outcome, began)

    def _poll(self) -> None:
        for running in list(self._running):
            running.output.collect()
            if self._has_ended(running):
                self._running.remove(running)
                self._finish(running)
            elif time.monotonic() - running.looked > LOOKS:
                self._look(running)
        time.sleep(0.01)

    def _look(self, running: _Running) -> None:
        """Notes what a part has written so far: it may be all that there will be of it."""
        running.looked = time.monotonic()
        with suppress(FileNotFoundError):
            written = running.outcome.stat().st_mtime_ns
            if written != running.seen:
                running.seen, outcome = written, read_json(running.outcome)
                self._report.put(record(running.part, outcome, "LEFT_OUT", RUNNING))
                self._begun(running.part, outcome)
                self._report.write()

    @staticmethod
    def _has_ended(running: _Running) -> bool:
        return running.process.poll() is not None or time.monotonic() - running.began > running.part.limit

    def _finish(self, running: _Running) -> None:
        found, outcome = self._outcome(running)
        self._note(running, found)
        self._close(found, outcome)
        if found["status"] in ("CRASH", "TIMEOUT") and self._probe is not None and not self.lost:
            self.lost = self._answers(self._probe)

    def _outcome(self, running: _Running) -> tuple[dict[str, Any], dict[str, Any]]:
        part, code = running.part, running.process.poll()
        self._kill(running)  # whatever it has started ends with it
        running.output.collect()
        seconds = time.monotonic() - running.began
        outcome = read_json(running.outcome)
        if code in part.statuses and outcome.get("status"):
            return record(part, outcome, outcome["status"], seconds=seconds), outcome
        if code is None:
            status, reason = "TIMEOUT", f"no answer within {part.limit:g} s"
        else:
            status, reason = "CRASH", f"the process ended {_ending(code)}"
        said = outcome.get("traceback") or last_words(running.output.text())
        return record(part, {**outcome, "traceback": said}, status, reason, seconds), outcome

    def _kill(self, running: _Running) -> None:
        """Kills the session of a part; one that does not die within 2 s, in the driver say, is left."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(running.process.pid, signal.SIGKILL)
        until = time.monotonic() + 2.0
        while running.process.poll() is None and time.monotonic() < until:
            running.output.collect()
            time.sleep(0.005)

    def _answers(self, probe: Part) -> str:
        """Returns why the device does not answer; empty if it does, at the second try at the latest."""
        why = ""
        for _ in range(2):
            left = max(self._until - time.monotonic(), 1.0)
            running = self._start(replace(probe, limit=min(probe.limit, left)))
            while not self._has_ended(running):
                running.output.collect()
                time.sleep(0.01)
            found, _ = self._outcome(running)
            if found["status"] == "PASS":
                return ""
            why = f"the device does not answer any more: {found['status']}, {found['reason']}"
            self._note(running, found)
        return why

    def _note(self, running: _Running, found: Mapping[str, Any]) -> None:
        """Appends to the log what a part has printed."""
        said = running.output.text()
        running.output.close()
        if self._log is None or not said:
            return
        with suppress(OSError), self._log.open("a", encoding="utf-8", errors="replace") as file:
            if file.tell() < LOG_IN_ALL:
                file.write(f"===== {found['name']}: {found['status']}, {found['seconds']} s\n{said}\n")

    def _close(self, found: dict[str, Any], outcome: dict[str, Any]) -> None:
        self._report.put(found)
        self._ended(found, outcome)
        self._report.write()


def _ending(code: int) -> str:
    """Returns how a process ended, for a sentence."""
    if code >= 0:
        return f"with {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"
