"""Step time, first-step time and update quality of every optimizer class against its peers.

Each race runs in its own process: all contenders of a family on one parameter list, interleaved in rounds
(each runs them in order and then in reverse), at one thread and at all threads. The clock to read is process
CPU time at one thread, which other work on the machine disturbs least, and wall time at more. A ratio is peer
time over the time of the oxidion class in one round, so above 1 oxidion is faster; the table gives the median
and a 95 % bootstrap interval. An absent peer is recorded as ``not installed``, a failing one with its error.

Writes ``<out>/<name>.json`` (machine, versions, raw samples), ``.md`` (tables, and which of the bars of
`bars.py` are held), ``.png`` (a few ratios, for a reader) and ``_scaling.png`` (step time against the number
of parameters), and appends the ratios of the run to ``benchmarks/history.jsonl``.

    python benchmarks/step.py --quick
    python benchmarks/step.py --peer-path ~/src/dion --compiled --name step
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

import contenders as registry
from bars import against_compiled, first_step_counts
from contender import OURS
from eligible import reason
from harness import load_average, machine, ratio, series_of
from workloads import ORTHONORMAL, RELATIVES, Workload, catalogue

HERE = Path(__file__).resolve().parent
IMPORT_RUNS = 7
FRESH_RUNS = 3
#: Seconds that a process may take; compiling takes minutes.
LIMIT = 1800
#: Lists of a result, and the part of a run that fills each.
KINDS = {"imports": "import", "races": "race", "qualities": "quality", "first_steps": "first"}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few short races at all threads, 7 rounds, nothing else: under two minutes on two cores",
    )
    parser.add_argument(
        "--only", default="", help="run races whose 'workload/family' contains one of these, by comma"
    )
    parser.add_argument("--threads", default="1,all", help="thread counts by comma; 'all' is every core")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds, at least 7")
    parser.add_argument(
        "--peer-path", action="append", default=[], metavar="DIR", help="folder to import peers from"
    )
    parser.add_argument(
        "--compiled",
        nargs="?",
        const="all",
        choices=("bars", "all"),
        help="also run peers under their own torch.compile, all or where a bar is against them",
    )
    parser.add_argument(
        "--skip", default="", help="of race,first,import,quality: parts to leave out, by comma"
    )
    parser.add_argument("--update", action="store_true", help="keep the other rows of an existing result")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for the results")
    parser.add_argument(
        "--name", help="file name of the results, without suffix (default: step; quick -quick)"
    )
    parser.add_argument(
        "--compare", type=Path, metavar="JSON", help="fail where a ratio fell clearly below this result's"
    )
    parser.add_argument(
        "--history", type=Path, default=HERE / "history.jsonl", help="file to append the ratios to"
    )
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


def ask(script: str, request: dict[str, Any], *, compiled: bool = True) -> dict[str, Any]:
    """Run a script of this folder in a fresh process, with empty compiler caches, and return its answer."""
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache, TRITON_CACHE_DIR=cache)
        if not compiled:
            environment["TORCHDYNAMO_DISABLE"] = "1"
        command = [sys.executable, str(HERE / script), json.dumps(request)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=LIMIT
            )
        except subprocess.TimeoutExpired:
            return {"status": f"failed: took longer than {LIMIT} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"status": f"failed: {last[:200]}"}
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


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


def run(options: argparse.Namespace, target: Path) -> dict[str, Any]:
    """Everything that the options ask for, as one dictionary; written to ``target`` after each pair."""
    sys.path[:0] = options.peer_path
    skip = options.skip.split(",")
    pairs = selected(options)
    every = [(workload.name, family) for workload in catalogue() for family in workload.families]
    order = {pair: place for place, pair in enumerate(every)}
    shared = {"paths": options.peer_path}
    result = earlier(target, pairs, options) if options.update else {kind: [] for kind in (*KINDS, "rates")}
    result["load_at_start"] = load_average()
    result.update(machine=machine(), versions=registry.availability(), began=machine()["date"])
    result["settings"] = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()
    }
    if "race" not in skip:
        measured = [ask("rates.py", {"threads": threads}) for threads in options.threads]
        others = [row for row in result.get("rates", []) if row["threads"] not in options.threads]
        result["rates"] = sorted([*others, *measured], key=lambda row: row["threads"])
    if "import" not in skip and result["versions"][OURS] != registry.NOT_INSTALLED:
        result["imports"] = [ask("fresh.py", {"job": "import", **shared}) for _ in range(IMPORT_RUNS)]
    for workload, family in tqdm(pairs, desc="races", file=sys.stderr):
        request = {**shared, "workload": workload.name, "family": family, "threads": options.threads[-1]}
        compiled = options.compiled == "all" or (
            options.compiled == "bars" and against_compiled(workload.name, family)
        )
        if "race" not in skip:
            settings = {"job": "race", "rounds": options.rounds, "compiled": compiled}
            for threads in options.threads if workload.one_thread else options.threads[-1:]:
                answer = raced({**request, **settings, "threads": threads})
                result["races"].append(with_ratios(answer))
        if "quality" not in skip and family in (*ORTHONORMAL, *RELATIVES):
            result["qualities"].append(ask("race.py", {**request, "job": "quality"}))
        if "first" not in skip:
            result["first_steps"] += first_steps(request, workload, compiled, result["versions"])
        result["load_at_end"] = load_average()
        for kind in ("races", "qualities", "first_steps"):
            result[kind].sort(key=lambda row: order.get((row.get("workload"), row.get("family")), len(order)))
        target.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def raced(request: dict[str, Any]) -> dict[str, Any]:
    """A race; where compiling ends its process or takes for ever, the race of the others."""
    answer = ask("race.py", request)
    if "contenders" in answer or not request["compiled"]:
        return answer
    others = ask("race.py", {**request, "compiled": False})
    for entry in registry.contenders(request["family"], compiled=True):
        if "contenders" in others and entry.compiled:
            row = {"source": entry.source, "note": entry.note, "status": f"not compiled: {answer['status']}"}
            others["contenders"][entry.name] = row
    return others


def earlier(target: Path, pairs: list[tuple[Workload, str]], options: argparse.Namespace) -> dict[str, Any]:
    """The result that ``target`` holds, without what is about to be measured again."""
    result: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    again = {(workload.name, family) for workload, family in pairs}
    known = {(workload.name, family) for workload in catalogue() for family in workload.families}

    def kept(row: dict[str, Any]) -> bool:
        if (row.get("workload"), row.get("family")) not in known:
            return False  # of a list that is no more
        other = (row.get("workload"), row.get("family")) not in again
        return other or row.get("threads", options.threads[0]) not in options.threads

    for kind, part in KINDS.items():
        if part not in options.skip.split(",") and kind != "imports":
            result[kind] = [row for row in result[kind] if kept(row)]
    return result


def first_steps(
    request: dict[str, Any], workload: Workload, compiled: bool, versions: dict[str, str]
) -> list[dict[str, Any]]:
    """First steps in fresh processes: our classes, and the peers that one of the bars names."""
    rows = []
    for place, entry in enumerate(registry.contenders(request["family"], compiled=compiled)):
        ours = entry.source == OURS
        if not ours and not first_step_counts(workload.name, request["family"], entry.name):
            continue
        if reason(entry, versions[entry.source], workload):
            continue  # the race row says why
        job = {**request, "job": "first", "contender": entry.name}
        runs = FRESH_RUNS if place == 0 else 1
        samples = [ask("fresh.py", job, compiled=entry.compiled) for _ in range(runs)]
        names = {key: job[key] for key in ("workload", "family", "threads", "contender")}
        rows.append({**names, "samples": samples})
    return rows


def with_ratios(answer: dict[str, Any]) -> dict[str, Any]:
    """Add each contender's ratio over the base: the oxidion class, or the first that ran without it."""
    rows = {name: row for name, row in answer.get("contenders", {}).items() if row["status"] == "ok"}
    if rows:
        answer["base"] = next(iter(rows))
        base = series_of(rows[answer["base"]])
        for row in rows.values():
            row["ratio"] = {clock: ratio(series_of(row), base, clock) for clock in ("wall", "cpu")}
    return answer


def main() -> None:
    """Run the suite and write its results."""
    from charts import plot_ratios, plot_scaling
    from history import append, fallen
    from report import markdown

    options = parse()
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else None
    options.out.mkdir(parents=True, exist_ok=True)
    target = options.out / f"{options.name}.json"
    result = run(options, target)
    text = markdown(result)
    target.with_suffix(".md").write_text(text, encoding="utf-8")
    plot_ratios(result, target.with_suffix(".png"))
    plot_scaling(result, target.with_name(f"{options.name}_scaling.png"))
    append(result, options.history)
    sys.stdout.write(text)
    if before is not None and (worse := fallen(before, result)):
        raise SystemExit("\n".join(["slower than before:", *worse]))


if __name__ == "__main__":
    main()
