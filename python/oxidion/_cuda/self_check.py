"""Self-test of kernels: on first use of a source, its kernels are compared with libtorch on the device.

A child takes some steps of small parameters by the kernels, twice and between guards, then by libtorch. It
needs some seconds and 64 MB. Compiling kernels and loading cuBLAS and cuSOLVER do not count for the time
limits. After a crash the source that the child was at is the culprit, and the others are tried again.

Verdicts are kept next to the machine code. A first time-out holds for this process and those that waited for
it. A second one is kept as a failure, and a crash at once. Where no other process can use the device
(exclusive compute mode, no ``sys.executable``, no memory), kernels are used without a check, and the log says
so. Only ``symmetric_wgmma.cu``, the kernel most at risk, is never used without a check, and by default only
where a report proves it (`proof`).

Ranks exchange once for each plan which sources are off: with different kernels, replicas would drift.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from oxidion._cuda import device, tuning
from oxidion._cuda.child import VARIABLE, command, environment
from oxidion._cuda.records import Facts, folder, read, turn, write
from oxidion._oxidion import (
    __version__,
    device_facts,
    load_sources,
    source_images,
    source_states,
    turn_source_off,
)

SECONDS = "OXIDION_SELF_CHECK_SECONDS"
"""Environment variable: seconds that the check of a source may take, without compiling."""
CHECKS = 5
"""Version of what is checked: verdicts of another one do not count."""
LIMIT, STARTING = 20.0, 120.0
"""Seconds for a source, and until the process that compares has loaded all libraries."""
SOURCES_IN_ALL = 3
"""Limit for all sources together, as a multiple of the seconds of one."""
MARK = "oxidion-self-check "
"""Before each line that the child says to its parent."""
REPORT = "python -m oxidion gpu-check"
PROVEN: frozenset[str] = frozenset()
"""Architectures for which a report in ``docs/gpu-reports`` shows that ``symmetric_wgmma.cu`` is right."""
GROUPS = ("symmetric_wgmma.cu", "symmetric_mma.cu")
"""A source that is used by default only where it is proven, and the one that does the same everywhere."""
SOURCES = (
    *(
        "updates.cu",
        "sums.cu",
        "totals.cu",
        "factors.cu",
        "means.cu",
        "rows.cu",
        "quantized.cu",
        "quantized_sums.cu",
    ),
    *("gram.cu", "cholesky.cu", "select.cu", "normals.cu"),
    *("copies.cu", "messages.cu", "symmetric_mma.cu", "symmetric_wgmma.cu"),
)
"""All sources, in the order in which they are checked: those that others are used with come first."""
ENDED_BY_OTHERS = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
"""Exit statuses of a child that says nothing about its kernels."""

KEPT = ("pass", "fail", "timeout")
"""Results that are written to a file."""

_log = logging.getLogger("oxidion.cuda")


@dataclass(frozen=True)
class Verdict:
    """The outcome of the check of a source.

    Attributes:
        result: "pass", "fail"; "timeout" where the check took too long for the first time; "late" where no
            time was left to begin it, "unknown" where nothing could be checked.
        reason: the cause of a result other than "pass".
        error: the largest relative difference of an update.
        seconds: the time that the check took.
    """

    result: str
    reason: str = ""
    error: float = 0.0
    seconds: float = 0.0


_known: dict[str, Verdict] = {}
"""Verdicts by key, of this process."""
_applied: set[tuple[int, str]] = set()
"""Devices and sources that were dealt with in this process."""
_used: set[int] = set()
"""Devices that steps were planned for in this process."""


def is_on() -> bool:
    """True where sources are checked before they are used.

    Raises:
        ValueError: for another word in ``OXIDION_SELF_CHECK``.
    """
    word = os.environ.get(VARIABLE) or "1"
    if word not in ("0", "1", "child"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got '{word}'")
    return word == "1" and device.tier() == "auto"


def seconds_of_a_source() -> float:
    """Returns the seconds that the check of a source may take.

    Raises:
        ValueError: for anything but a positive number in ``OXIDION_SELF_CHECK_SECONDS``.
    """
    word = os.environ.get(SECONDS) or str(LIMIT)
    try:
        seconds = float(word)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{SECONDS} must be a positive number of seconds, got '{word}'")
    return seconds


def in_all() -> float:
    """The time that the checks of all sources together may take."""
    return SOURCES_IN_ALL * seconds_of_a_source()


def asked_for(names: Sequence[str], capability: str) -> list[str]:
    """The sources to load for those that a plan asks for: with the products by warpgroups where they count.

    Raises:
        ValueError: for another word in ``OXIDION_SYMMETRIC``.
    """
    word = os.environ.get("OXIDION_SYMMETRIC") or "auto"
    if word not in ("auto", "wgmma"):
        raise ValueError(f"OXIDION_SYMMETRIC must be auto or wgmma, got '{word}'")
    by_groups, usual = GROUPS
    is_taken = usual in names and (word == "wgmma" or capability in PROVEN)
    return [*names, by_groups] if is_taken and by_groups not in names else list(names)


def approve(where: torch.device, names: Sequence[str]) -> None:
    """Loads the sources that a plan asks for, outside of a step, and turns off those that are not right.

    Warns:
        UserWarning: for each source that is turned off.
    """
    number = device.number_of(where)
    if number is None or device.tier() != "auto" or os.environ.get(VARIABLE) == "child":
        return
    device.prepare(emulated=where.type == "cpu")
    try:
        facts = Facts(*device_facts(number))
        stream = torch.cuda.current_stream(where).cuda_stream if where.type == "cuda" else 0
        load_sources(number, stream, asked_for(names, facts.capability))
    except RuntimeError:
        return  # without kernels libtorch computes, and the step says so
    _used.add(number)
    if is_on():
        images = source_images(number)
        new = {name: image for name, image in images.items() if (number, name) not in _applied}
        _apply_verdicts(number, facts, judged(number, facts, new))
        loaded = {name for name, state, *_ in source_states(number) if state == "loaded"}
        tuning.choose(number, facts, {name: images[name] for name in images if name in loaded})


def repeated(where: torch.device) -> dict[str, Verdict]:
    """Verdicts on all sources that a device has, checked once more.

    Raises:
        RuntimeError: where there is no driver or no such device.
    """
    device.prepare(emulated=where.type == "cpu")
    number = device.number_of(where) or 0
    facts = Facts(*device_facts(number))
    forget(facts)
    load_sources(number, 0, asked_for(SOURCES, facts.capability))
    off = {
        name: Verdict("off", reason or "")
        for name, state, _, _, reason in source_states(number)
        if state == "off" and name != GROUPS[0]
    }
    return {**off, **judged(number, facts, source_images(number))}


def _apply_verdicts(number: int, facts: Facts, verdicts: Mapping[str, Verdict]) -> None:
    """Acts on verdicts."""
    unchecked = []
    for name, verdict in verdicts.items():
        _applied.add((number, name))
        if verdict.result == "pass":
            continue
        if verdict.result == "unknown" and name != GROUPS[0]:
            unchecked.append(name)
            continue
        turn_source_off(name, verdict.reason, number)
        other = GROUPS[1] if name == GROUPS[0] else "libtorch"
        warnings.warn(
            f"{name} is not used on {facts.gpu} (driver {facts.driver}): {verdict.reason}. {other} computes "
            f"instead, which is slower. Please report what `{REPORT} --json report.json` finds; "
            f"`{REPORT} --recheck` checks again",
            stacklevel=3,
        )
    if unchecked:
        _log.warning(
            "%s: used on %s without a check: %s",
            ", ".join(unchecked),
            facts.gpu,
            verdicts[unchecked[0]].reason,
        )


def key_of(facts: Facts, name: str, image: str) -> str:
    """The name of a verdict: a hash of all that it depends on."""
    parts = [*map(str, facts), name, image, str(CHECKS), __version__]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def judged(number: int, facts: Facts, images: Mapping[str, str]) -> dict[str, Verdict]:
    """Verdicts on sources, by their machine code: those that are kept, others by a check in a child."""
    keys = {name: key_of(facts, name, image) for name, image in images.items()}
    found = _kept(keys)
    if len(found) == len(keys):
        return found
    before = _timed_out(keys)
    with turn(STARTING + in_all() + 10) as has_turn:
        # Another process may have checked them meanwhile: a time-out there counts here as well.
        for name, verdict in _timed_out(keys).items():
            if name not in before:
                _known[keys[name]] = verdict
        found = _kept(keys)
        missing = [name for name in SOURCES if name in keys and name not in found]
        if missing and not has_turn:
            late = Verdict("unknown", "another process has not checked it in time")
            return {**found, **dict.fromkeys(missing, late)}
        if missing:
            _log.warning(
                "checking %d CUDA sources on %s against libtorch, once: some seconds", len(missing), facts.gpu
            )
            word = device.EMULATED if device.is_emulated() else str(number)
            new = compared(word, missing, [name for name in found if found[name].result == "pass"])
            for name, verdict in new.items():
                found[name] = _counted(verdict, is_second=name in before)
                _keep(keys[name], name, facts, found[name])
    return {name: found[name] for name in keys}


def _counted(verdict: Verdict, *, is_second: bool) -> Verdict:
    """Returns the verdict after one more time-out: the first is tried again, the second is a failure.

    The first may be due to other work on the machine or on the device.
    """
    if verdict.result != "timeout":
        return verdict
    if is_second:
        return replace(verdict, result="fail", reason=f"{verdict.reason}, nor in an earlier process")
    return replace(verdict, reason=f"{verdict.reason}; the next process checks it once more")


def _file(where: Path, name: str, key: str) -> Path:
    return where / f"check-{name.removesuffix('.cu')}-{key[:24]}.json"


def _kept(keys: Mapping[str, str]) -> dict[str, Verdict]:
    """Returns the verdicts that are kept for these keys and still hold.

    A first time-out holds in the process in which it happened; others check the source once more.
    """
    found = {name: _known[key] for name, key in keys.items() if key in _known}
    for name, verdict in _recorded(keys).items():
        if name not in found and verdict.result in ("pass", "fail"):
            found[name] = _known[keys[name]] = verdict
    return found


def _timed_out(keys: Mapping[str, str]) -> dict[str, Verdict]:
    """Returns the first time-outs that are kept for these keys."""
    return {name: verdict for name, verdict in _recorded(keys).items() if verdict.result == "timeout"}


def _recorded(keys: Mapping[str, str]) -> dict[str, Verdict]:
    """Returns the verdicts that the files of these keys have."""
    where, found = folder(), dict[str, Verdict]()
    if where is None:
        return found
    for name, key in keys.items():
        if (stored := _read(_file(where, name, key))) and stored.get("key") == key:
            verdict = Verdict(*(stored[field] for field in Verdict.__dataclass_fields__))
            reason = verdict.reason and f"{verdict.reason} (found before, and kept in {where})"
            found[name] = replace(verdict, reason=reason)
    return found


def _read(file: Path) -> dict[str, Any]:
    """The record of a verdict; empty where there is none."""
    stored = read(file, {"source", *Verdict.__dataclass_fields__})
    return stored if stored.get("result") in KEPT else {}


def _keep(key: str, name: str, facts: Facts, verdict: Verdict) -> None:
    """Keeps a verdict: the file is there whole or not at all."""
    if verdict.result not in KEPT:
        return
    _known[key] = verdict
    where = folder()
    if where is not None:
        versions = {"oxidion": __version__, "torch": torch.__version__, "checks": CHECKS}
        stored = {"key": key, "source": name, **asdict(verdict), **facts._asdict(), **versions}
        write(_file(where, name, key), stored)


def forget(facts: Facts) -> None:
    """Removes the verdicts that are kept for a device."""
    _known.clear()
    for file in sorted((folder() or Path("/nowhere")).glob("check-*.json")):
        stored = _read(file)
        if all(stored.get(field, value) == value for field, value in facts._asdict().items()):
            file.unlink(missing_ok=True)
    tuning.forget(facts)


def compared(word: str, names: Sequence[str], proven: Sequence[str]) -> dict[str, Verdict]:
    """Verdicts of child processes on sources.

    Where one crashes or hangs, the source it was at is the culprit, and another goes on with the others.

    Args:
        word: number of the device.
        names: sources to be checked.
        proven: sources that passed before, which may be used meanwhile.
    """
    found: dict[str, Verdict] = {}
    spent = 0.0
    while left := [name for name in names if name not in found]:
        passed = [*proven, *(name for name, verdict in found.items() if verdict.result == "pass")]
        child = Child.started(word, left, passed)
        if isinstance(child, str):
            return {**found, **dict.fromkeys(left, Verdict("unknown", child))}
        found.update(child.verdicts(left, spent))
        spent += child.spent
    return found


class Child:
    """A process that compares sources with libtorch and says a line before and after each.

    Attributes:
        spent: seconds that it took from its first source on.
    """

    def __init__(self, process: subprocess.Popen[str], complaints: Any) -> None:
        """Takes charge of the process, and of the file to which it complains."""
        self.spent = 0.0
        self._process = process
        self._complaints = complaints
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    @classmethod
    def started(cls, word: str, names: Sequence[str], passed: Sequence[str]) -> Child | str:
        """A child; else why there can be none."""
        complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the child)
        try:
            process = subprocess.Popen(
                [*command(word), "--self", ",".join(names), ",".join(passed)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                errors="replace",
                start_new_session=True,  # an interrupt of the terminal is not its kernels' fault
            )
        except OSError as error:
            complaints.close()
            return f"another process could not be started: {error}"
        return cls(process, complaints)

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            if line.startswith(MARK):
                with suppress(ValueError):
                    self._lines.put(json.loads(line.removeprefix(MARK)))
        self._lines.put(None)

    def _next(self, until: float) -> dict[str, Any] | None:
        """The next that it says, None where it ended.

        Raises:
            queue.Empty: if it says nothing in time.
        """
        return self._lines.get(timeout=max(until - time.monotonic(), 0.001))

    def verdicts(self, names: Sequence[str], spent: float) -> dict[str, Verdict]:
        """Returns the verdicts reached before it ended, at least one; ``spent`` seconds are used already."""
        found: dict[str, Verdict] = {}
        limit = seconds_of_a_source()
        at, since, in_time = "", 0.0, True
        until = time.monotonic() + STARTING
        try:
            while (stored := self._next(until)) is not None:
                now = time.monotonic()
                since = since or now
                at = stored.get("begin", "")
                until = min(now + limit, since + in_all() - spent)
                if "source" in stored:
                    found[stored["source"]] = Verdict(*(stored[f] for f in Verdict.__dataclass_fields__))
            why = self._why()
        except queue.Empty:
            in_time = False
            why = f"it gave no answer within {limit if since else STARTING:g} s"
            if since and time.monotonic() - since >= in_all() - spent:
                late = Verdict("late", f"there was no time left to check it: {in_all():g} s in all")
                found.update(dict.fromkeys((name for name in names if name not in found), late))
        finally:
            self._end()
            self.spent = time.monotonic() - since if since else 0.0
        if at and at not in found:
            ended_by_others = in_time and self._process.returncode in ENDED_BY_OTHERS
            result = "unknown" if ended_by_others else "fail" if in_time else "timeout"
            found[at] = Verdict(result, why, float("inf"), limit)
        if not found:
            return dict.fromkeys(names, Verdict("unknown", f"the process that checks did not begin: {why}"))
        return found

    def _why(self) -> str:
        """Says how it ended."""
        code = self._process.wait()
        self._complaints.seek(0)
        last = (self._complaints.read().strip().splitlines() or ["nothing was said"])[-1]
        return f"the process that ran it ended with {code}: {last[:300]}"

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._listener.join(1.0)
        if not self._listener.is_alive() and self._process.stdout:
            self._process.stdout.close()
        self._complaints.close()


def flags(where: torch.device) -> list[int]:
    """One number for each source, 1 where it is off; then whether kernels alone compute, and whether not.

    Behind them, what is to be alike of the products that are faster by the library.
    """
    tier, number = device.tier(), device.number_of(where) or 0
    try:
        states = [] if tier == "libtorch" else source_states(number)
    except RuntimeError:
        states = []
    # Which kernel multiplies depends on whether the one of warpgroups was asked for.
    on = {name for name, state, *_ in states if state == "loaded" or (state != "off" and name != GROUPS[0])}
    alone = [int(tier == "kernels"), int(tier != "kernels")]
    return [*(int(name not in on) for name in SOURCES), *alone, *tuning.flags(number)]


def turn_off(where: torch.device, off: Sequence[int]) -> str:
    """Turns off what any rank has off, and says so once. Returns what is wrong where ranks cannot agree."""
    alone = len(SOURCES)
    if off[alone] and off[alone + 1]:
        return "OXIDION_CUDA=kernels is set on some ranks only: set it on all of them, or on none"
    pairs = zip(SOURCES, flags(where), off, strict=False)
    others = [name for name, mine, any_has in pairs if any_has and not mine]
    if off[alone]:
        return ""
    tuning.agree(device.number_of(where) or 0, off[alone + 2 :])
    if not others:
        return ""
    for name in others:
        turn_source_off(name, "another rank has it off", device.number_of(where))
    _log.warning("%s: not used on this rank, since another one has it off", ", ".join(others))
    return ""


def states(where: torch.device, names: Sequence[str] | None = None) -> dict[str, str]:
    """By source what computes on a device: "kernels", "libtorch (reason)", or "not loaded".

    Args:
        where: the device.
        names: sources; all that something has asked for if not given.
    """
    number = device.number_of(where)
    if number is None:
        return {}
    if device.tier() == "libtorch":
        return dict.fromkeys(names or (), "libtorch (OXIDION_CUDA=libtorch)")
    try:
        states = source_states(number)
    except RuntimeError as error:
        return dict.fromkeys(names or (), f"libtorch ({error})")
    words = {"loaded": "kernels", "not loaded": "not loaded"}
    return {
        name: words.get(state, f"libtorch ({reason})")
        for name, state, _, _, reason in states
        if name in (names if names is not None else [name] if state != "not loaded" else [])
    }


def states_everywhere() -> dict[str, str]:
    """The same of all devices that this process has used, for sources that something has asked for."""
    found = {}
    for number in sorted(_used):
        where = torch.device("cpu") if device.is_emulated() else torch.device("cuda", number)
        found.update({f"{name} on device {number}": word for name, word in states(where).items()})
    return found


def records() -> list[str]:
    """The verdicts that are kept, one line for each, for a report."""
    where = folder()
    files = sorted(where.glob("check-*.json")) if where is not None else []
    rows = [row for row in map(_read, files) if row]
    return [
        f"{row['source']} {'kernels' if row['result'] == 'pass' else 'libtorch'}"
        f"{' (' + row['reason'] + ')' if row['reason'] else ''}, on {row['gpu']}, driver {row['driver']}"
        for row in rows
    ] + tuning.described()
