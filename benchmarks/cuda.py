"""Step time on one CUDA device against torch and microsoft/dion, with the ceilings of the same run.

Contenders of a family step over equal parameters with equal gradients, interleaved in rounds of A B ... B A.
Each sample has two clocks: the time between two events on the stream, and the time until the call of the step
came back, which is what the host spends. A ratio is the peer's time over ours, median of the rounds with a
95 % bootstrap interval. A peer that is missing is listed as missing, one that fails with its error.

Writes ``<out>/<name>.json`` (device, versions, ceilings, raw samples) and ``.md``.

    python benchmarks/cuda.py --peer-path ~/src/dion
    python benchmarks/cuda.py --device cpu --only tiny --rounds 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from contenders import availability, contenders
from harness import Series, Step, in_turns, machine, ratio
from race import start
from workloads import ADAMW, LION, MUON, Shape, Workload, gpt_layers, gradients, make_tensors

GIGA = 1e9


def llama(layers: int) -> tuple[Shape, ...]:
    """Matrices of Llama-1B layers: width 2048, 512 for keys and values, 8192 inside."""
    layer = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192))
    return layer * layers


def lists() -> tuple[Workload, ...]:
    """What is stepped over; all of it float32."""
    matrices, gains = gpt_layers(768, 12)
    return (
        Workload("gpt160m", "GPT-160M, 12 layers", matrices, gains, (MUON, ADAMW, LION)),
        Workload("llama-1b", "Llama-1B, 16 layers", llama(16), ((2048,),) * 33, (MUON, ADAMW, LION)),
        Workload("4096x4096", "four of 4096x4096", ((4096, 4096),) * 4, (), (MUON,)),
        Workload("4096x11008", "three of 4096x11008", ((4096, 11008),) * 3, (), (MUON,)),
        Workload("1b", "1 billion elements in 100 tensors", (), ((10_000_000,),) * 100, (ADAMW, LION)),
        Workload("tiny", "to try the script", ((64, 32),) * 2, ((7,),), (MUON, ADAMW, LION)),
    )


class Clock:
    """Times a call by events on the stream, and by the host's clock until the call comes back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def synchronize(self) -> None:
        """Waits for what was launched."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def sample(self, step: Step) -> tuple[float, float]:
        """Seconds on the device and on the host."""
        self.synchronize()
        if self.device.type != "cuda":
            start = time.perf_counter()
            step()
            spent = time.perf_counter() - start
            return spent, spent
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3, host


def ceilings(clock: Clock, *, small: bool) -> dict[str, float]:
    """Rates that bound a step: a product of bfloat16 matrices, a copy, the host's time for a launch."""
    side, elements, device = (256, 1 << 16, clock.device) if small else (8192, 1 << 28, clock.device)
    a = torch.randn(side, side, device=device).bfloat16()
    source = torch.empty(elements, device=device)
    target, one = torch.empty_like(source), torch.zeros(1, device=device)

    def best(step: Callable[[], object], which: int) -> float:
        return min(clock.sample(lambda: (step(), None)[1])[which] for _ in range(10))

    return {
        "bfloat16_tflops": 2 * side**3 / best(lambda: torch.mm(a, a), 0) / 1e12,
        "copy_gb_per_s": 8 * elements / best(lambda: target.copy_(source), 0) / GIGA,
        "launch_us": best(lambda: one.add_(1), 1) * 1e6,
    }


def race(workload: Workload, family: str, rounds: int, clock: Clock, *, compiled: bool) -> dict[str, Any]:
    """One list, one family: rows of contenders with their samples."""
    versions = availability()
    matrices, others = gradients(workload)
    count = len(matrices) + len(others)
    grads = [g.to(clock.device) for g in matrices], [g.to(clock.device) for g in others]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for entry in contenders(family, compiled=compiled):
        rows[entry.name] = {"source": entry.source}
        start(entry, versions[entry.source], count, lambda: make_tensors(grads), rows[entry.name], steps)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for name in in_turns(steps, rounds):
        samples[name].append(clock.sample(steps[name]))
    for name, pairs in samples.items():
        rows[name]["device"], rows[name]["host"] = (list(column) for column in zip(*pairs, strict=True))
    return {"workload": workload.name, "family": family, "numel": workload.numel, "contenders": rows}


def table(result: dict[str, Any]) -> Iterator[str]:
    """The page of a result."""
    yield f"# On {result['device']}\n"
    sources = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    yield f"{result['machine']['date']}; {sources}.\n"
    yield "; ".join(f"{name} {value:.1f}" for name, value in result["ceilings"].items()) + ".\n"
    yield "| list | family | contender | device, ms | host, ms | device, of ours | host, of ours |"
    yield "|---|---|---|---|---|---|---|"
    for race in result["races"]:
        rows = race["contenders"]
        ours = next(
            (row for row in rows.values() if row["source"] == "oxidion" and row["status"] == "ok"), None
        )
        for name, row in rows.items():
            start = f"| {race['workload']} | {race['family']} | {name} |"
            if row["status"] != "ok" or ours is None:
                yield f"{start} {row['status']} | | | |"
                continue
            times = " | ".join(f"{statistics.median(row[which]) * 1e3:.3f}" for which in ("device", "host"))
            yield f"{start} {times} | {compared(row, ours, 'device')} | {compared(row, ours, 'host')} |"


def compared(row: dict[str, Any], ours: dict[str, Any], which: str) -> str:
    """A ratio with its interval."""
    found = ratio(Series(1, wall=row[which]), Series(1, wall=ours[which]), "wall")
    return f"{found['median']:.2f} [{found['low']:.2f}, {found['high']:.2f}]"


def main() -> None:
    """Run what is asked for."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    parser.add_argument(
        "--only", default="", help="run pairs whose 'list/family' contains one of these, by comma"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--compiled", action="store_true", help="also peers under their own torch.compile")
    parser.add_argument("--peer-path", action="append", default=[], metavar="DIR")
    parser.add_argument("--out", type=Path, default=here / "results")
    parser.add_argument("--name", default="cuda")
    options = parser.parse_args()
    sys.path[:0] = [str(Path(path).expanduser().resolve()) for path in options.peer_path]
    device = torch.device(options.device)
    clock, wanted = Clock(device), [part for part in options.only.split(",") if part]
    pairs = [(work, family) for work in lists() for family in work.families]
    chosen = [p for p in pairs if any(part in f"{p[0].name}/{p[1]}" for part in wanted)] if wanted else pairs
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU",
        "machine": machine(),
        "versions": availability(),
        "ceilings": ceilings(clock, small=device.type != "cuda"),
        "races": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for workload, family in chosen:
        result["races"].append(race(workload, family, options.rounds, clock, compiled=options.compiled))
        (options.out / f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / f"{options.name}.md").write_text("\n".join(table(result)) + "\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
