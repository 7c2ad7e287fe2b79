"""What the benchmarks compute from their samples: bars, floors, ratios that fell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def race(ours: list[float], peers: dict[str, list[float]], *, threads: int = 1) -> dict[str, Any]:
    """A race of AdamW with these CPU seconds, two samples a round; wall time is ten times that."""
    entry = {"workload": "4000x768", "family": "adamw", "threads": threads, "date": "2026-11-21"}
    return {**entry, "base": "oxidion.AdamW", "contenders": rows({"oxidion.AdamW": ours, **peers}, threads)}


def rows(times: dict[str, list[float]], threads: int = 1) -> dict[str, Any]:
    """Rows of contenders with these CPU seconds."""
    from harness import Series, clock_of, summed_up

    series = {name: Series(1, [10 * s for s in samples], samples) for name, samples in times.items()}
    ours = [name for name in times if name.startswith("oxidion.")]
    found = summed_up(series, ours, clock_of(threads))
    return {name: {"status": "ok", **row} for name, row in found.items()}


def result(*races: dict[str, Any], firsts: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A result of these races."""
    return {
        "races": list(races),
        "first_steps": firsts or [],
        "machine": {"date": "2026-11-21", "cpu": "x", "cores": 2},
        "versions": {"torch": "2.11"},
        "began": "2026-11-21",
        "load_at_start": 0.0,
        "load_at_end": 0.0,
    }


def test_bars_take_the_median_of_the_ratios_of_a_round() -> None:
    from bars import held

    slow = race([1.0] * 6, {"torch.optim.AdamW fused": [4.0, 4.0, 4.9, 4.9, 9.0, 9.0]})
    fast = race([1.0] * 6, {"torch.optim.AdamW fused": [5.5] * 6}, threads=2)
    found = list(held(result(slow, fast)))
    assert [(must, round(got, 6)) for _, _, must, got in found] == [(5, 4.9), (5, 5.5)]
    assert list(held(result(race([1.0] * 2, {})))) == []


def test_bars_count_the_fastest_of_several_peers() -> None:
    from bars import BARS, held

    bar = next(bar for bar in BARS if bar.ours == "oxidion.Dion" and len(bar.peers) == 2)
    times = {bar.ours: [1.0] * 2, bar.peers[0]: [3.0] * 2, bar.peers[1]: [2.0] * 2}
    entry = {"workload": bar.workload, "family": bar.family, "threads": 1, "contenders": rows(times)}
    ((_, peer, _, got),) = [line for line in held(result(entry)) if line[0].startswith(bar.ours)]
    assert (peer, got) == (bar.peers[1], 2.0)


def test_bars_of_first_step_and_memory_are_shares() -> None:
    from bars import extra_memory, first_steps
    from step import first_summed_up

    def sample(name: str, extra: float) -> dict[str, Any]:
        samples = [{"before_first": 1.0, "first_cpu": 3.0, "warm_cpu": 2.0, "extra_bytes": extra}]
        where = {"workload": "1024x4096", "family": "muon", "contender": name}
        return {**where, **first_summed_up(samples)}

    of = result(firsts=[sample("oxidion.Muon", 10.0), sample("torch.optim.Muon", 40.0)])
    assert [row[2:] for row in first_steps(of)] == [("1.50; with what came before 2.00", True)]
    assert [row[1:] for row in extra_memory(of)] == [("at most 1 of torch.optim.Muon", "0.25", True)]


def test_bars_of_quality_compare_each_measure_with_the_baseline() -> None:
    from bars import quality

    def row(sigma: float, error: float, cosine: float) -> dict[str, float]:
        return {"sigma_max": sigma, "orthogonality": error, "cosine": cosine}

    rows = {"oxidion.Muon": row(0.75, 0.25, 0.5), "torch.optim.Muon": row(1.5, 0.125, 0.75), "other": {}}
    entry = {"workload": "one", "family": "muon", "rows": rows}
    found = list(quality({"qualities": [entry, {"workload": "two", "family": "adamw", "rows": rows}]}))
    distances = "sigma max - 1 0.25, there 0.5; ortho error 0.25, there 0.125; 1 - cosine 0.5, there 0.25"
    what = "quality, oxidion.Muon, one, muon"
    assert found == [(what, "as near to orthonormal as torch.optim.Muon", distances, False)]


def test_quality_of_relatives_is_measured_before_normalization() -> None:
    import torch

    import oxidion
    from contenders import contenders
    from quality import before_normalization, moved, quality
    from workloads import Workload, gradient

    shape = (48, 64)
    updates, variance = [], torch.zeros(())
    for cls in (oxidion.Muon, oxidion.NorMuon):
        weight = torch.nn.Parameter(torch.zeros(shape))
        weight.grad = gradient(shape, seed=1)
        optimizer = cls([weight], lr=1.0, weight_decay=0.0, adjust_lr=None, orth_dtype="float32")
        optimizer.step()
        updates.append(-weight.detach().double())
        variance = optimizer.state[weight].get("variance_neuron", variance).double()
    muon, normuon = updates
    assert (muon - normuon).norm() > 0.01 * muon.norm()
    torch.testing.assert_close(before_normalization(normuon, variance, 0.95), muon, rtol=1e-4, atol=1e-6)

    part = torch.zeros(5, 6)
    part[[[1], [4]], [0, 2, 3]] = 1.0
    found, rows, columns = moved(part)
    assert (found.shape, rows.tolist(), columns.tolist()) == ((2, 3), [1, 4], [0, 2, 3])

    one = Workload("one", (shape,))
    for family in ("normuon", "dion2 1/4", "nordion2 1/4"):
        figures = quality(contenders(family, compiled=False)[0], one)
        assert 1 < figures["sigma_max"] < 1.2
        assert 0.01 < figures["orthogonality"] < 0.4
        assert 0.97 < figures["cosine"] < 0.9999


def test_every_bar_names_a_race_and_contenders_that_exist() -> None:
    from bars import BARS
    from contenders import contenders
    from workloads import named

    assert BARS
    for bar in BARS:
        assert bar.family in named(bar.workload).families
        names = {entry.name for entry in contenders(bar.family, compiled=True)}
        assert {bar.ours, *bar.peers} <= names


def test_floors_of_one_matrix_are_the_formula() -> None:
    from floors import floor_seconds
    from workloads import named

    rates = {"float32": 1e9, "bfloat16": 2e9, "bytes": 1e9}
    m, n = 1024, 4096
    gram = 9 * m * m * n + 11 * m**3
    assert gram < 15 * m * m * n + 5 * m**3
    assert floor_seconds(named("1024x4096"), "muon", rates) == pytest.approx(gram / 2e9 + 24 * m * n / 1e9)
    dion = 8 * m * n * 256 + 2 * n * 256**2 + 256**3 / 3
    assert floor_seconds(named("1024x4096"), "dion r=1/4", rates) == pytest.approx((dion + 32 * m * n) / 1e9)
    assert floor_seconds(named("flat-100m"), "adamw", rates) == pytest.approx(2.8)
    assert floor_seconds(named("memory-1024x4096"), "galore r=128 refresh", rates) is None


def test_floors_of_the_relatives_take_what_they_select() -> None:
    from floors import floor_seconds
    from workloads import Workload, named

    rates = {"float32": 1e9, "bfloat16": 2e9, "bytes": 1e9}
    one, m, n, k = named("1024x4096"), 1024, 4096, 256
    assert floor_seconds(one, "normuon", rates) == floor_seconds(one, "muon", rates)
    part = (9 * k * k * n + 11 * k**3) / 2e9 + 23 * m * n / 1e9
    assert floor_seconds(one, "dion2 1/4", rates) == floor_seconds(one, "nordion2 1/4", rates)
    assert floor_seconds(one, "dion2 1/4", rates) == pytest.approx(part)
    # Of a tall matrix Dion2 takes columns, NorDion2 rows, here a square.
    tall = Workload("tall", ((4 * m, m),))
    assert floor_seconds(tall, "dion2 1/4", rates) == pytest.approx(part)
    square = 20 * m**3 / 2e9 + 23 * 4 * m * m / 1e9
    assert floor_seconds(tall, "nordion2 1/4", rates) == pytest.approx(square)


@pytest.mark.parametrize(
    ("family", "matrices", "others"),
    [("lamb", 40, 40), ("adafactor", 24, 32), ("came", 32, 36), ("adamw 8-bit", 16, 28)],
)
def test_floors_of_the_memory_efficient_ones_are_their_bytes(family: str, matrices: int, others: int) -> None:
    from floors import floor_seconds
    from workloads import Workload, named

    rates = {"float32": 1e9, "bfloat16": 2e9, "bytes": 1e9}
    both = Workload("both", ((30, 10),), ((7,),))
    assert floor_seconds(both, family, rates) == pytest.approx((300 * matrices + 7 * others) / 1e9)
    assert family in named("memory-100m").families
    m, n, rank = 1024, 4096, 128
    galore = (4 * m * n * rank + 12 * m * n + 4 * rank * n) / 1e9
    assert floor_seconds(named("memory-1024x4096"), "galore r=128", rates) == pytest.approx(galore)


def test_ratios_clearly_below_those_of_another_result_are_named() -> None:
    from gains import fallen

    before = result(race([1.0] * 6, {"torch.optim.AdamW fused": [5.0] * 6}))
    same = result(race([1.0] * 6, {"torch.optim.AdamW fused": [4.8] * 6}))
    worse = result(race([1.0] * 6, {"torch.optim.AdamW fused": [4.0] * 6}))
    assert fallen(before, same) == []
    assert fallen(before, worse) == ["4000x768/adamw/1/torch.optim.AdamW fused: 5.00 -> 4.00"]


def test_race_goes_on_without_an_entry_that_crashes_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    import step

    asked: list[bool] = []
    request = {"family": "dion2 1/4", "compiled": True}

    def ask(request: dict[str, Any], **_: Any) -> dict[str, Any]:
        asked.append(request["compiled"])
        return {"status": "failed: crash"} if request["compiled"] else {"contenders": {"oxidion.Dion2": {}}}

    monkeypatch.setattr(step, "ask", ask)
    rows = step.raced(request)["contenders"]
    assert asked == [True, False]
    assert list(rows) == ["oxidion.Dion2", "dion.Dion2 compiled"]
    assert rows["dion.Dion2 compiled"]["status"] == "not compiled: failed: crash"
    monkeypatch.setattr(step, "ask", lambda *_, **__: {"status": "failed: other"})
    assert step.raced(request) == {"status": "failed: other"}


def test_peers_are_compiled_where_a_bar_is_against_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import contenders
    import floors
    import step

    monkeypatch.setattr(floors, "emulated", lambda *_: "")  # as it is on any machine
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        step,
        "ask",
        lambda request, **_: asked.append(request) or {**request, "status": "x", "contenders": {}},
    )
    monkeypatch.setattr(contenders, "availability", lambda: dict.fromkeys(contenders.SOURCES, "1.0"))
    only = ["--only", "memory-100m/lamb,1024x4096/dion2,mixed/muon,1024x4096/muon"]
    only += ["--skip", "import,quality", "--threads", "1,2"]
    step.run(step.parse([*only, "--compiled", "bars", "--out", str(tmp_path)]))
    races = [
        (r["workload"], r["threads"], r["compiled"])
        for r in asked
        if r.get("job") == "race" and r["family"] != "muon"
    ]
    assert races == [("1024x4096", 1, True), ("1024x4096", 2, True), ("memory-100m", 2, False)]
    firsts = [(r["workload"], r["contender"]) for r in asked if r.get("job") == "first"]
    assert firsts.count(("1024x4096", "oxidion.Dion2")) == firsts.count(("mixed", "oxidion.Muon")) == 3
    assert firsts.count(("1024x4096", "oxidion.Muon fast")) == 1
    assert firsts.count(("1024x4096", "dion.Muon compiled")) == 1
    assert firsts.count(("mixed", "dion.Muon eager")) == 1  # extra memory
    assert not {("1024x4096", "dion.Dion2 eager"), ("mixed", "pytorch_optimizer.Muon")} & {*firsts}


def test_make_bench_runs_compiled_peers_and_the_guard() -> None:
    makefile = (BENCHMARKS.parent / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("\nbench:")[1].split("\n\n")[0]
    assert "benchmarks/step.py --peer-path $(PEERS)/packages --compiled bars $(ARGS)" in recipe
    assert "benchmarks/losses.py orthonormalization $(GUARD)" in recipe


def test_a_short_race_writes_all_its_files(tmp_path: Path) -> None:
    arguments = ["--only", "mixed/adamw", "--threads", "1", "--rounds", "7", "--skip", "import,first"]
    command = [sys.executable, str(BENCHMARKS / "step.py"), *arguments, "--out", str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    written = json.loads((tmp_path / "step.json").read_text())
    rows = written["races"][0]["contenders"]
    own = rows["oxidion.AdamW"]
    assert own["status"] == "ok"
    assert own["ms"] > 0
    median, low, high = rows["torch.optim.AdamW fused"]["ratio"]["oxidion.AdamW"]
    assert 0 < low <= median <= high
    assert rows["dion adamw group eager"]["status"] == "not installed"
    assert "| mixed | adamw | 1 | oxidion.AdamW |" in done.stdout
    assert {file.name for file in tmp_path.iterdir()} == {"step.json", "step.png"}


@pytest.mark.slow
def test_guard_holds_for_one_seed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "losses.py"), "orthonormalization", "--seeds", "0"]
    command += ["--steps", "120"]
    subprocess.run([*command, "--out", str(tmp_path)], check=True, capture_output=True, timeout=900)
    losses = json.loads((tmp_path / "guard.json").read_text())["losses"]
    assert losses["fast"] != losses["exact"], "the preset changed nothing"


def test_races_for_devices_run_on_the_cpu_too(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "cuda.py"), "--device", "cpu", "--only", "tiny"]
    done = subprocess.run(
        [*command, "--rounds", "3", "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "cuda.json").read_text())
    assert [race["family"] for race in result["races"]] == ["muon", "adamw", "lion"]
    for race in result["races"]:
        rows = {
            name: row for name, row in race["contenders"].items() if row["source"] in ("oxidion", "torch")
        }
        assert all(row["status"] == "ok" and row["device_ms"] > 0 for row in rows.values()), rows
    assert "| tiny | adamw | oxidion.AdamW |" in done.stdout
    assert "1.00 [1.00, 1.00]" in done.stdout
