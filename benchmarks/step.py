"""Step time, first-step time and update quality of every optimizer class against its peers.

Each race runs in its own process: all contenders of a family on one parameter list, interleaved in rounds
(each runs them in order and then in reverse), at one thread and at all threads. The clock to read is process
CPU time at one thread, which other work on the machine disturbs least, and wall time at more. A ratio is peer
time over the time of the oxidion class in one round, so above 1 oxidion is faster; the median and a 95 %
bootstrap interval are kept. An absent peer is recorded as ``not installed``, a failing one with its error.

Writes ``<out>/<name>.json`` (machine, versions, medians, ratios) and ``.png`` (a few ratios, for a reader),
and prints tables and which of the bars of `bars.py` are held.

    python benchmarks/step.py --quick
    python benchmarks/step.py --peer-path ~/src/dion --compiled --name step
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

import contenders as registry
import floors
from bars import against_compiled, first_step_counts
from bars import rows as rows_of_bars
from gains import fallen, plot
from harness import command, load_average, machine, rounded, table, write
from workloads import ORTHONORMAL, RELATIVES, Workload, catalogue

HERE = Path(__file__).resolve().parent
IMPORT_RUNS = 7
FRESH_RUNS = 3
#: Seconds that a process may take; compiling takes minutes.
LIMIT = 1800
#: Lists of a result, and the part of a run that fills each.
KINDS = {"races": "race", "qualities": "quality", "first_steps": "first"}
#: Medians of a first step that are kept.
FIRST = ("construct", "before_first", "first", "warm", "state_bytes", "extra_bytes")
#: Prints the seconds to import torch, and then oxidion on top of it.
IMPORTS = """
import json, time
begun = time.perf_counter()
import torch
middle = time.perf_counter()
import oxidion
print(json.dumps({"torch": middle - begun, "oxidion": time.perf_counter() - middle}))
"""
SETTINGS = ("quick", "only", "threads", "rounds", "compiled", "skip", "update")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = command(__doc__)
    quick = "a few short races at all threads, 7 rounds, nothing else: under two minutes on two cores"
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--only", default="", help="races whose 'workload/family' contains one of these")
    parser.add_argument("--threads", default="1,all", help="thread counts by comma; 'all' is every core")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, at least 7")
    parser.add_argument(
        "--peer-path", action="append", default=[], metavar="DIR", help="with peers to import"
    )
    compiled = "also run peers under their own torch.compile, all or where a bar is against them"
    parser.add_argument("--compiled", nargs="?", const="all", choices=("bars", "all"), help=compiled)
    parser.add_argument("--skip", default="", help="of race,first,import,quality: parts to leave out")
    parser.add_argument("--update", action="store_true", help="keep the other rows of an existing result")
    parser.add_argument("--name", help="file name of the results (default: step; quick -quick)")
    compare = "fail where a ratio fell clearly below this result's"
    parser.add_argument("--compare", type=Path, metavar="JSON", help=compare)
    options = parser.parse_args(arguments)
    options.name = options.name or ("step-quick" if options.quick else "step")
    if options.quick:
        options.threads, options.rounds, options.skip = "all", 7, "first,import,quality"
    if options.rounds < 7:
        parser.error("--rounds must be at least 7")
    options.peer_path = [str(Path(path).expanduser().resolve()) for path in options.peer_path]
    cores = os.cpu_count() or 1
    options.threads = sorted({cores if text == "all" else int(text) for text in options.threads.split(",")})
    return options


def in_process(words: list[str], *, compiled: bool = True) -> dict[str, Any]:
    """The JSON that a fresh process prints last; it has empty compiler caches."""
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache)
        if not compiled:
            environment["TORCHDYNAMO_DISABLE"] = "1"
        keys: dict[str, Any] = {"capture_output": True, "text": True, "check": False, "env": environment}
        try:
            done = subprocess.run([sys.executable, *words], timeout=LIMIT, **keys)
        except subprocess.TimeoutExpired:
            return {"status": f"failed: took longer than {LIMIT} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"status": f"failed: {last[:200]}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def ask(request: dict[str, Any], *, compiled: bool = True) -> dict[str, Any]:
    """The answer of `race.py` to a request."""
    return in_process([str(HERE / "race.py"), json.dumps(request)], compiled=compiled)


def selected(options: argparse.Namespace) -> list[tuple[Workload, str]]:
    """The (workload, family) pairs that the options ask for."""
    wanted = [part for part in options.only.split(",") if part]
    pairs = [
        (workload, family)
        for workload in catalogue()
        for family in (workload.quick if options.quick else workload.families)
        if (not wanted or any(part in f"{workload.name}/{family}" for part in wanted))
    ]
    if not pairs:
        raise SystemExit(f"--only {options.only}: no workload/family contains it")
    return pairs


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for, as one dictionary; written after each pair."""
    sys.path[:0] = options.peer_path
    before = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ["PYTHONPATH"] = os.pathsep.join([*options.peer_path, *before])
    skip = options.skip.split(",")
    pairs = selected(options)
    every = [(workload.name, family) for workload in catalogue() for family in workload.families]
    order = {pair: place for place, pair in enumerate(every)}
    empty: dict[str, Any] = {"imports": {}, "rates": [], **{kind: [] for kind in KINDS}}
    kept = earlier(options, pairs) if options.update else empty
    facts = {"machine": machine(), "versions": registry.availability()}
    settings = {key: getattr(options, key) for key in SETTINGS}
    load = load_average()
    result = {**facts, "settings": settings, "load_at_start": load, "load_at_end": load, **kept}
    if "race" not in skip:
        measured = [ask({"job": "rates", "threads": threads}) for threads in options.threads]
        others = [row for row in result["rates"] if row.get("threads") not in options.threads]
        rates = [*others, *(row for row in measured if "bytes" in row)]
        result["rates"] = sorted(rates, key=lambda row: row["threads"])
    if "import" not in skip and not registry.missing(result["versions"][registry.OURS]):
        found = [in_process(["-c", IMPORTS]) for _ in range(IMPORT_RUNS)]
        good = [one for one in found if "torch" in one]
        result["imports"] = {key: statistics.median(one[key] for one in good) for key in good[0]}
    for workload, family in tqdm(pairs, desc="races", file=sys.stderr):
        request = {"workload": workload.name, "family": family, "threads": options.threads[-1]}
        only_bars = options.compiled == "bars" and against_compiled(workload.name, family)
        compiled = options.compiled == "all" or only_bars
        if "race" not in skip:
            own = {"job": "race", "rounds": options.rounds, "compiled": compiled}
            counts = options.threads if workload.one_thread else options.threads[-1:]
            for threads in counts:
                result["races"].append(raced({**request, **own, "threads": threads}))
        if "quality" not in skip and family in (*ORTHONORMAL, *RELATIVES):
            result["qualities"].append(ask({**request, "job": "quality"}))
        if "first" not in skip:
            result["first_steps"] += first_steps(request, workload, compiled, result["versions"])
        result["load_at_end"] = load_average()
        for kind in KINDS:
            result[kind].sort(key=lambda row: order.get((row.get("workload"), row.get("family")), len(order)))
        write(result, options.out, options.name)
    return dict(rounded(result))


def raced(request: dict[str, Any]) -> dict[str, Any]:
    """A race; where compiling ends its process or takes for ever, the race of the others."""
    answer = ask(request)
    if "contenders" in answer or not request["compiled"]:
        return answer
    others = ask({**request, "compiled": False})
    for entry in registry.contenders(request["family"], compiled=True):
        if "contenders" in others and entry.compiled:
            others["contenders"][entry.name] = {"status": f"not compiled: {answer['status']}"}
    return others


def earlier(options: argparse.Namespace, pairs: list[tuple[Workload, str]]) -> dict[str, Any]:
    """Lists of the result that is there, without what is about to be measured again."""
    file = options.out / f"{options.name}.json"
    there: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    again = {(workload.name, family) for workload, family in pairs}
    known = {(workload.name, family) for workload in catalogue() for family in workload.families}

    def kept(row: dict[str, Any]) -> bool:
        if (row.get("workload"), row.get("family")) not in known:
            return False  # of a list that is no more
        other = (row.get("workload"), row.get("family")) not in again
        return other or row.get("threads", options.threads[0]) not in options.threads

    for kind, part in KINDS.items():
        if part not in options.skip.split(","):
            there[kind] = [row for row in there[kind] if kept(row)]
    return {key: there[key] for key in ("imports", "rates", *KINDS)}


def first_steps(
    request: dict[str, Any], workload: Workload, compiled: bool, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """First steps in fresh processes: our classes, and the peers that one of the bars names."""
    rows = []
    for place, entry in enumerate(registry.contenders(request["family"], compiled=compiled)):
        ours = entry.source == registry.OURS
        if not ours and not first_step_counts(workload.name, request["family"], entry.name):
            continue
        if floors.reason(entry, versions[entry.source], workload):
            continue  # the race row says why
        where = {**request, "contender": entry.name}
        runs = FRESH_RUNS if place == 0 else 1
        samples = [ask({**where, "job": "first"}, compiled=entry.compiled) for _ in range(runs)]
        rows.append({**where, **first_summed_up(samples)})
    return rows


def first_summed_up(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over processes of a first step, and its shares of a warm step by wall and by CPU time."""
    good = [sample for sample in samples if "first_cpu" in sample]
    if not good:
        return {"status": samples[0]["status"]}
    row = {key: statistics.median(one[key] for one in good) for key in FIRST if key in good[0]}
    if "first" in row:
        row["by_wall"] = statistics.median(one["first"] / one["warm"] for one in good)
    for name, before in (("by_cpu", 0.0), ("by_cpu_with_before", 1.0)):
        row[name] = statistics.median(
            (one["first_cpu"] + before * one.get("before_first", 0.0)) / one["warm_cpu"] for one in good
        )
    return row


def report(result: dict[str, Any]) -> Iterator[str]:
    """Tables for the terminal: bars, races with their share of the floor and the quality, first steps."""
    bars = [
        [what, must, found, "held" if good else "MISSED"] for what, must, found, good in rows_of_bars(result)
    ]
    if bars:
        yield table(["what", "must be", "measured", ""], bars)
    head = ["workload", "family", "threads", "contender", "ms", "ratio", "of floor", "sigma max", "error"]
    yield table([*head, "cosine"], _rows_of_races(result))
    for row in result["first_steps"]:
        text = f"{row['by_wall']:.2f} warm steps" if "by_wall" in row else row.get("status", "")
        yield f"first step of {row['contender']}, {row['workload']}, {row['family']}: {text}"


def _rows_of_races(result: dict[str, Any]) -> Iterator[list[str]]:
    rates = {row["threads"]: row for row in result["rates"]}
    lists = {workload.name: workload for workload in catalogue()}
    qualities = {(e.get("workload"), e.get("family")): e.get("rows", {}) for e in result["qualities"]}
    for race in result["races"]:
        for name, row in race.get("contenders", {}).items():
            threads, where = race["threads"], (race["workload"], race["family"])
            cells = [*where, str(threads), name, *[row["status"], "", ""]]
            if row["status"] == "ok":
                median, low, high = row["ratio"].get(race["base"], [1.0] * 3)
                cells[4:] = [f"{row['ms']:.2f}", f"{median:.2f} [{low:.2f}, {high:.2f}]", ""]
                floor = (
                    floors.floor_seconds(lists[where[0]], where[1], rates[threads])
                    if threads in rates
                    else None
                )
                cells[6] = "" if floor is None else f"{100 * 1e3 * floor / row['ms']:.0f} %"
            figures = qualities.get(where, {}).get(name.replace(" compiled", " eager"), {})
            shown = {"sigma_max": ".3f", "orthogonality": ".2g", "cosine": ".5f"}
            yield [
                *cells,
                *(format(figures[key], how) if key in figures else "" for key, how in shown.items()),
            ]
    for race in result["races"]:
        if "contenders" not in race:
            yield [race["status"], *[""] * 9]


def main() -> None:
    """Run the suite and write its results."""
    options = parse()
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    result = run(options)
    plot(result, options.out / f"{options.name}.png")
    print("\n\n".join(report(result)))
    if before is not None and (worse := fallen(before, result)):
        raise SystemExit("\n".join(["slower than before:", *worse]))


if __name__ == "__main__":
    main()
