"""``benchmarks/convergence.py``: its table against its raw curves, going on after a cut, its page."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

import oxidion
from support import forks

ROOT = Path(__file__).resolve().parents[2]
TINY = shlex.split(
    "--quick --steps 24 --layers 1 --dim 32 --heads 2 --seq-len 32 --batch-size 4 --eval-every 6 "
    "--eval-windows 8 --corpus-mb 0.4 --scalar-lr 0.01 --threads 1 --name tiny"
)
RATES = {"adamw": [0.0005, 0.02, 1e30], "muon": [0.01, 0.02]}
WHAT = [
    *("--optimizers", "adamw,muon"),
    *("--lrs", "adamw=0.02,0.0005,1e30;muon=0.01,0.02"),
]
PAGE = "before\n<!-- convergence: begin -->\nold\n<!-- convergence: end -->\nafter\n"


def run_script(folder: Path, *arguments: str) -> forks.Ended:
    script = ROOT / "benchmarks" / "convergence.py"
    return forks.common().run(
        script, "--out", str(folder), "--runs", str(folder / "runs"), *TINY, *arguments
    )[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark with one seed, then gone on with a second; first.json is what was there."""
    folder = tmp_path_factory.mktemp("convergence")
    done = run_script(folder, *WHAT, "--seeds", "0")
    assert done.returncode == 0, done.stderr
    assert "5 runs, 0 of them done before" in done.stderr
    (folder / "first.json").write_text((folder / "runs" / "tiny.json").read_text())
    (folder / "page.md").write_text(PAGE)
    done = run_script(folder, *WHAT, "--seeds", "0,1", "--page", str(folder / "page.md"))
    assert done.returncode == 0, done.stderr
    assert "10 runs, 5 of them done before" in done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def result(finished: Path) -> dict[str, Any]:
    return both(finished)


def both(folder: Path) -> dict[str, Any]:
    """The runs with all that the summary has."""
    kept = json.loads((folder / "tiny.json").read_text())
    assert "runs" not in kept
    return {**kept, **json.loads((folder / "runs" / "tiny.json").read_text())}


def runs_of(result: dict[str, Any], name: str, lr: float) -> list[dict[str, Any]]:
    return [run for run in result["runs"] if (run["optimizer"], run["lr"]) == (name, lr)]


def test_convergence_runs_every_rate_and_seed_once(result: dict[str, Any]) -> None:
    found = sorted((run["optimizer"], run["lr"], run["seed"]) for run in result["runs"])
    assert found == [(name, lr, seed) for name, lrs in RATES.items() for lr in lrs for seed in (0, 1)]
    assert result["plan"]["learning_rates"] == RATES
    assert result["versions"]["oxidion"] == oxidion.__version__
    assert result["machine"]["cores"] >= 1
    assert result["settings"]["steps"] == 24


def test_convergence_trains_classes_that_the_example_lacks(tmp_path: Path) -> None:
    rates = {
        "soap": 0.004,
        "soap_muon": 0.02,
        "came": 0.002,
        "adafactor": 0.004,
        "lamb": 0.01,
        "apollo_adamw": 0.01,
        "galore_adamw": 0.01,
        "adamw_schedule_free": 0.01,
        "adamw_ema": 0.01,
    }
    lrs = ";".join(f"{name}={lr}" for name, lr in rates.items())
    done = run_script(tmp_path, "--optimizers", ",".join(rates), "--lrs", lrs, "--seeds", "0")
    assert done.returncode == 0, done.stderr
    result = both(tmp_path)
    assert {run["optimizer"]: run["lr"] for run in result["runs"]} == rates
    for run in result["runs"]:
        losses = run["curve"]["held_out_loss"]
        assert losses[-1] < losses[0], run["optimizer"]
        last = run["curve"].get("last_weights_loss")
        assert (last is not None) == run["optimizer"].endswith(("_free", "_ema"))
        assert last is None or (len(last) == len(losses) and last[-1] != losses[-1])


def test_convergence_losses_go_down_and_a_diverged_run_says_so(result: dict[str, Any]) -> None:
    for run in result["runs"]:
        curve = run["curve"]
        if run["lr"] == 1e30:
            assert run["final_held_out_loss"] is None
            assert run["steps"] < 24
            continue
        assert curve["held_out_step"] == [0, 6, 12, 18, 24]
        assert curve["held_out_loss"][0] == pytest.approx(math.log(256), abs=0.15)
        fall = 0.1 if run["lr"] == 0.0005 else 1.0
        assert curve["held_out_loss"][-1] < curve["held_out_loss"][0] - fall
        assert run["final_held_out_loss"] == curve["held_out_loss"][-1]
        assert len(curve["train_loss"]) == 24
        assert curve["train_loss"][-1] < curve["train_loss"][0]


def test_compared_optimizers_share_weights_and_batches_of_a_seed(result: dict[str, Any]) -> None:
    whole = [run for run in result["runs"] if run["lr"] != 1e30]
    for key in ("initial_weights_sha256", "batches_sha256"):
        digests = [{run[key] for run in whole if run["seed"] == seed} for seed in (0, 1)]
        assert [len(some) for some in digests] == [1, 1]
        assert digests[0] != digests[1]


def test_convergence_table_equals_what_the_curves_say(result: dict[str, Any], finished: Path) -> None:
    ends, curves = {}, {}
    for name, lrs in RATES.items():
        for lr in lrs:
            losses = [run["curve"]["held_out_loss"] for run in runs_of(result, name, lr)]
            assert len(losses) == 2
            if lr != 1e30:
                curves[name, lr] = [(a + b) / 2 for a, b in zip(*losses, strict=True)]
                ends[name, lr] = sorted(some[-1] for some in losses)
    text = (finished / "stdout.txt").read_text()
    chosen = {name: min((sum(e), lr) for (n, lr), e in ends.items() if n == name)[1] for name in RATES}
    assert chosen["adamw"] == 0.02
    goal = sum(ends["adamw", 0.02]) / 2
    assert [row["optimizer"] for row in result["table"]] == sorted(
        RATES, key=lambda name: sum(ends[name, chosen[name]])
    )
    for row in result["table"]:
        name, lr = row["optimizer"], row["lr"]
        low, high = ends[name, lr]
        mean = (low + high) / 2
        assert lr == chosen[name]
        assert row["lr_at_edge_of_grid"] == (name == "muon")
        assert row["seeds"] == 2
        assert row["mean_loss"] == pytest.approx(mean, rel=1e-6)
        assert (row["smallest_loss"], row["largest_loss"]) == pytest.approx((low, high), rel=1e-6)
        assert result["losses"][name][str(lr)] == pytest.approx(
            {str(run["seed"]): run["final_held_out_loss"] for run in runs_of(result, name, lr)}, rel=1e-6
        )
        curve = result["curves"][name]
        assert curve["mean"] == pytest.approx(curves[name, lr], rel=1e-6)
        assert (curve["step"], curve["low"][-1], curve["high"][-1]) == (
            [0, 6, 12, 18, 24],
            row["smallest_loss"],
            row["largest_loss"],
        )
        passed = [
            step for step, loss in zip((0, 6, 12, 18, 24), curves[name, lr], strict=True) if loss <= goal
        ]
        assert row["steps_to_adamw_loss"] == (passed[0] if passed and name != "adamw" else None)
        whole = [run for rate in RATES[name] if rate < 1 for run in runs_of(result, name, rate)]
        quickest = min(run["train_seconds"] for run in whole)
        assert row["tokens_per_second"] == pytest.approx(24 * 4 * 32 / quickest)
        (line,) = re.findall(rf"^\| {name} .*", text, re.MULTILINE)
        assert f"| 2 | {mean:.4f} [{low:.4f}, {high:.4f}] |" in line
    assert "1e+30: diverged" in text


def test_convergence_goes_on_with_what_is_there(finished: Path, result: dict[str, Any]) -> None:
    first = json.loads((finished / "first.json").read_text())
    # Times never repeat: equal ones were kept.
    assert [run["train_seconds"] for run in first["runs"]] == [r["train_seconds"] for r in result["runs"][:5]]
    done = run_script(finished, *WHAT, "--seeds", "1")
    assert "5 runs, 5 of them done before" in done.stderr
    again = both(finished)
    assert (again["runs"], again["table"]) == (result["runs"], result["table"])


def test_convergence_leaves_runs_of_other_settings_alone(finished: Path) -> None:
    before = [(finished / name).read_text() for name in ("tiny.json", "runs/tiny.json")]
    done = run_script(finished, *WHAT, "--steps", "12")
    assert done.returncode == 1
    assert "was written with other settings" in done.stderr
    assert [(finished / name).read_text() for name in ("tiny.json", "runs/tiny.json")] == before


def test_convergence_leaves_a_summary_without_its_runs_alone(finished: Path, tmp_path: Path) -> None:
    shutil.copyfile(finished / "tiny.json", tmp_path / "tiny.json")
    done = run_script(tmp_path, *WHAT)
    assert done.returncode == 1
    assert "is the summary of runs that are not in" in done.stderr
    assert (tmp_path / "tiny.json").read_text() == (finished / "tiny.json").read_text()


def test_convergence_page_holds_the_table_between_its_marks(finished: Path) -> None:
    page, table = (finished / "page.md").read_text(), (finished / "stdout.txt").read_text()
    assert page.startswith("before\n<!-- convergence: begin -->\n")
    assert page.endswith("<!-- convergence: end -->\nafter\n")
    assert "old" not in page
    assert table in page


def test_convergence_plot_is_drawn(finished: Path) -> None:
    from matplotlib import image

    pixels = image.imread(finished / "tiny.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optimizers", "adamw,sgd"], "unknown optimizer 'sgd'; known: dion, muon, adamw, lion, normuon"),
        (["--optimizers", "adamw", "--lrs", "muon=0.1"], "--lrs names muon, not among the optimizers"),
        (["--lr", "0.1", "--seed=3"], "--lr, --seed: set by this script"),
        (["--steps", "0"], "must be a whole number >= 1, got '0'"),
        (["--seeds", "0,x"], "must be a whole number >= 0, got 'x'"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_convergence_bad_argument_is_a_clear_error(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run_script(tmp_path / "none", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("benchmark_scripts")
def test_convergence_page_shows_the_stored_result() -> None:
    from convergence_report import by_rate, markdown

    stored = json.loads((ROOT / "benchmarks" / "results" / "convergence.json").read_text())
    page = (ROOT / "benchmarks" / "results" / "convergence.md").read_text()
    between = page.partition("<!-- convergence: begin -->\n")[2].partition("<!-- convergence: end -->")[0]
    assert between == markdown(stored)
    assert len(stored["table"]) > 1
    for row in stored["table"]:
        means = by_rate(stored, row["optimizer"])
        assert row["lr"] == min(means, key=lambda lr: means[lr])
        assert row["mean_loss"] == pytest.approx(means[row["lr"]], rel=1e-6)


def test_convergence_page_without_marks_is_refused_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("no marks")
    done = run_script(tmp_path, *WHAT, "--page", str(tmp_path / "page.md"))
    assert done.returncode == 1
    assert "must hold the lines <!-- convergence: begin -->" in done.stderr
    assert not (tmp_path / "runs").exists()
