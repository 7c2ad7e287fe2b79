"""Kernel or library: symmetric products of each size are timed once, and the faster way is kept."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from oxidion._cuda import device
from oxidion._cuda.child import command, environment
from oxidion._cuda.records import Facts, folder, read, turn, write
from oxidion._oxidion import __version__, set_symmetric_wins, symmetric_classes

VARIABLE = "OXIDION_TUNE"
"""Environment variable: "0" leaves the choice to a fixed rule."""
SOURCES = ("symmetric_mma.cu", "symmetric_wgmma.cu")
"""The kernels that compute symmetric products: the first is there wherever the other one is."""
MARGIN = 1.05
"""Ratio of the library's time to the kernel's from which the kernel is used."""
SECONDS = 60.0
"""The time that the process that measures may take."""
MEASURES = 1
"""Version of what is measured: answers of another one do not count."""

_log = logging.getLogger("oxidion.cuda")
_known: dict[str, list[float | None]] = {}
"""Ratios by key, of this process."""
_in_use: dict[int, list[bool | None]] = {}
"""By device, whether the kernel is the faster way for each class, None where that is not known."""


def is_on() -> bool:
    """True where products are timed.

    Raises:
        ValueError: for another word in ``OXIDION_TUNE``.
    """
    word = os.environ.get(VARIABLE) or "1"
    if word not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got '{word}'")
    return word == "1"


def choose(number: int, facts: Facts, images: Mapping[str, str]) -> None:
    """Has the faster way taken for each class, as is kept or by timing it; images are of sources in use.

    Outside of a step, and of a capture: a process of its own does it.
    """
    own = [name for name in SOURCES if name in images]
    if number in _in_use or SOURCES[0] not in own or not is_on():
        return
    found = ratios(number, facts, {name: images[name] for name in own})
    _in_use[number] = []
    if found is not None:
        _use(number, [None if ratio is None else ratio >= MARGIN for ratio in found])


def _use(number: int, wins: list[bool | None]) -> None:
    _in_use[number] = wins
    set_symmetric_wins(number, wins)


def ratios(number: int, facts: Facts, images: Mapping[str, str]) -> list[float | None] | None:
    """Ratios of the library's time to the kernel's, by class; None where they cannot be measured."""
    # The library is torch's.
    parts = [*map(str, facts), *images, *images.values(), torch.__version__, str(MEASURES), __version__]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return _known.get(key) or _kept(key) or _measured(number, facts, images, key)


def _file(where: Path, key: str) -> Path:
    return where / f"products-{key[:24]}.json"


def _kept(key: str) -> list[float | None] | None:
    where = folder()
    record = read(_file(where, key), ("ratios",)) if where is not None else {}
    found = record.get("ratios")
    if record.get("key") != key or not isinstance(found, list) or len(found) != len(symmetric_classes()):
        return None
    _known[key] = [None if ratio is None else float(ratio) for ratio in found]
    return _known[key]


def _measured(number: int, facts: Facts, images: Mapping[str, str], key: str) -> list[float | None] | None:
    with turn(2 * SECONDS) as has_turn:
        if kept := _kept(key):  # another process may have measured meanwhile
            return kept
        if not has_turn:
            found, why = None, "another process did not do it in time"
        else:
            _log.warning("timing products on %s by kernels and by the library, once: some seconds", facts.gpu)
            word = device.EMULATED if device.is_emulated() else str(number)
            found, why = _child(word, images)
        if found is None:
            _log.warning("products on %s are not timed (%s): a fixed rule chooses", facts.gpu, why)
            return None
        _known[key] = found
        where = folder()
        if where is not None:
            versions = {"oxidion": __version__, "torch": torch.__version__, "measures": MEASURES}
            record = {"key": key, "sources": list(images), "ratios": found, **facts._asdict(), **versions}
            write(_file(where, key), record)
        return found


def _child(word: str, images: Mapping[str, str]) -> tuple[list[float | None] | None, str]:
    """Ratios from a process of its own, else what went wrong."""
    try:
        done = subprocess.run(
            [*command(word), "--products", ",".join(images)],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=SECONDS,
        )
        found = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None, f"no answer within {SECONDS:g} s"
    except (OSError, ValueError, IndexError) as error:
        return None, f"{type(error).__name__}: {error}"
    if not isinstance(found, list) or len(found) != len(symmetric_classes()):
        last = (done.stderr.strip().splitlines() or ["nothing was said"])[-1]
        return None, f"the process ended with {done.returncode}: {last[:300]}"
    return [None if ratio is None else float(ratio) for ratio in found], ""


def flags(number: int) -> list[int]:
    """Returns two numbers for each class, whose maxima over all ranks are used.

    The first is 1 if the kernel is not the faster way, the second if that is not known.
    """
    wins = _in_use.get(number) or [None] * len(symmetric_classes())
    return [n for win in wins for n in (int(not win), int(win is None))]


def agree(number: int, largest: Sequence[int]) -> None:
    """Has the kernel used where it is faster on all ranks, and the rule where a rank does not know."""
    pairs = zip(largest[::2], largest[1::2], strict=True)
    wins = [None if is_unknown else not loses for loses, is_unknown in pairs]
    if wins != (_in_use.get(number) or [None] * len(wins)):
        _use(number, wins)


def forget(facts: Facts) -> None:
    """Removes what is kept for a device."""
    _known.clear()
    for file in sorted((folder() or Path("/nowhere")).glob("products-*.json")):
        record = read(file, ("ratios",))
        if all(record.get(field, value) == value for field, value in facts._asdict().items()):
            file.unlink(missing_ok=True)


def described() -> list[str]:
    """Lines of a report on what is kept, one for each device."""
    where = folder()
    files = sorted(where.glob("products-*.json")) if where is not None else []
    lines = []
    for row in (read(file, ("ratios", "gpu", "driver")) for file in files):
        if row:
            known = [ratio for ratio in row["ratios"] if ratio is not None]
            won = sum(ratio >= MARGIN for ratio in known)
            lines.append(
                f"symmetric products: kernels in {won} of {len(known)} classes of sizes, the library in the "
                f"others, on {row['gpu']}, driver {row['driver']}"
            )
    return lines
