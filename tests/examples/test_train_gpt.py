"""The command line of ``examples/train_gpt.py``: comparison, sweep, checkpoints and bad arguments."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import oxidion
from support import forks

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "train_gpt.py"
FAMILY = {"NorMuon": "normuon", "Dion2": "dion2", "NorDion2": "nordion2"}
OPTIMIZERS = ("dion", "muon", "adamw", "lion", *(n for c, n in FAMILY.items() if hasattr(oxidion, c)))
RATES = "adamw=0.01,lion=0.004"
TINY = shlex.split(
    "--layers 2 --dim 32 --heads 2 --seq-len 32 --batch-size 8 --steps 24 --corpus-mb 0.4 --eval-every 8 "
    "--eval-windows 16 --scalar-lr 0.01 --threads 1 --quiet"
)


def run_script(*arguments: str) -> forks.Ended:
    return forks.common().run(SCRIPT, *arguments, limit=120)[0]


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of one tiny comparison of all optimizers."""
    out = tmp_path_factory.mktemp("comparison")
    done = run_script("--compare", ",".join(OPTIMIZERS), "--lr", RATES, "--out", str(out), *TINY)
    assert done.returncode == 0, done.stderr
    (out / "stdout.txt").write_text(done.stdout)
    return out


def runs_of(out: Path) -> dict[str, dict[str, Any]]:
    return {run["optimizer"]: run for run in json.loads((out / "figures.json").read_text())["runs"]}


# ---- comparison and sweep ------------------------------------------------------------


def test_train_gpt_optimizer_table_is_the_tested_one(modules: dict[str, ModuleType]) -> None:
    assert tuple(modules["recipes"].RECIPES) == OPTIMIZERS
    assert set(modules["recipes"].ALL_RECIPES) == {"dion", "muon", "adamw", "lion", *FAMILY.values()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_gpt_tiny_run_lowers_held_out_loss(comparison: Path, name: str) -> None:
    run = runs_of(comparison)[name]
    losses = run["curve"]["held_out_loss"]
    assert run["curve"]["held_out_step"] == [0, 8, 16, 24]
    assert len(run["curve"]["train_loss"]) == run["steps"] == 24
    # An untrained model is close to uniform over 256 bytes; byte frequencies alone are worth over 1.5 nats.
    assert losses[0] == pytest.approx(math.log(256), abs=0.15)
    assert losses[-1] < losses[0] - 1.5
    assert run["final_held_out_loss"] == losses[-1]
    assert run["best_held_out_loss"] == min(losses)
    assert 0 < run["optimizer_step_share"] < 1
    assert run["tokens_per_second"] == pytest.approx(24 * 8 * 32 / run["train_seconds"])
    assert run["train_seconds"] < run["wall_seconds"]


def test_train_gpt_comparison_has_equal_starts_and_batches(comparison: Path) -> None:
    runs = runs_of(comparison)
    assert list(runs) == list(OPTIMIZERS)
    for key in ("initial_weights_sha256", "batches_sha256"):
        assert len({run[key] for run in runs.values()}) == 1
        assert re.fullmatch("[0-9a-f]{64}", runs["dion"][key])
    first_losses = {run["curve"]["train_loss"][0] for run in runs.values()}
    assert len(first_losses) == 1
    assert len({run["final_held_out_loss"] for run in runs.values()}) == len(OPTIMIZERS)


def test_train_gpt_comparison_writes_plot_and_table(comparison: Path) -> None:
    from matplotlib import image

    pixels = image.imread(comparison / "loss.png")
    assert pixels.shape[0] > 400
    assert pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.05
    text = (comparison / "stdout.txt").read_text()
    assert re.search(
        r"optimizer\s+lr\s+scalar lr\s+held-out\s+best\s+seconds\s+tokens/s\s+optimizer share", text
    )
    for name, run in runs_of(comparison).items():
        assert re.search(rf"^{name} .*\b{run['final_held_out_loss']:.3f}\b", text, re.MULTILINE)


def test_train_gpt_comparison_sets_the_others_against_adamw(comparison: Path) -> None:
    runs = runs_of(comparison)
    text = (comparison / "stdout.txt").read_text()
    goal = runs["adamw"]["final_held_out_loss"]
    assert not re.search(r"^adamw: ", text, re.MULTILINE)
    for name in set(OPTIMIZERS) - {"adamw"}:
        (line,) = re.findall(rf"^{name}: .*$", text, re.MULTILINE)
        curve = runs[name]["curve"]
        assert f"{curve['held_out_loss'][-1] - goal:+.3f} nats per byte against adamw" in line
        steps = [
            step
            for step, loss in zip(curve["held_out_step"], curve["held_out_loss"], strict=True)
            if loss <= goal
        ]
        if steps:
            assert f"by step {steps[0]} of 24" in line
        else:
            assert "by step" not in line


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_train_gpt_dtype_is_that_of_parameters_and_trains(
    modules: dict[str, ModuleType], tmp_path: Path, dtype: str, threads: None
) -> None:
    path = tmp_path / "run.pt"
    options = ["--optimizer", "dion", "--dtype", dtype, "--out", str(tmp_path), *TINY]
    assert modules["train_gpt"].main([*options, "--checkpoint", str(path)]) == 0
    saved = torch.load(path, weights_only=True)
    assert {weight.dtype for weight in saved["model"].values()} == {getattr(torch, dtype)}
    assert saved["record"]["held_out_loss"][-1] < saved["record"]["held_out_loss"][0] - 1.5


def test_train_gpt_sweep_names_the_best_rate_and_the_edge(
    modules: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None
) -> None:
    sweep = "adamw=0.00001,0.01,0.5;lion=0.004,0.00001"
    assert modules["train_gpt"].main(["--sweep", sweep, "--out", str(tmp_path), *TINY]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^adamw: best lr 0\.01, held-out loss \d\.\d{3}$", text, re.MULTILINE)
    assert re.search(r"^lion: best lr 0\.004, .*edge of the grid", text, re.MULTILINE)
    runs = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert [run["lr"] for run in runs] == [0.00001, 0.01, 0.5, 0.004, 0.00001]


# ---- checkpoints ------------------------------------------------------------


def flattened(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        return {prefix: value}
    return {key: leaf for name, inner in items for key, leaf in flattened(inner, f"{prefix}/{name}").items()}


def assert_same_end(first: Path, second: Path) -> None:
    """Two checkpoints are equal to the last bit, except for the times they measured."""
    one, two = (flattened(torch.load(path, weights_only=True)) for path in (first, second))
    assert one.keys() == two.keys()
    assert sum(isinstance(leaf, torch.Tensor) for leaf in one.values()) > 20
    for key, leaf in one.items():
        if isinstance(leaf, torch.Tensor):
            assert torch.equal(leaf, two[key]), key
        elif "seconds" not in key:
            assert leaf == two[key], key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_train_gpt_resume_continues_bit_equal(
    modules: dict[str, ModuleType], tmp_path: Path, name: str, threads: None
) -> None:
    whole, part, rest = (tmp_path / f"{word}.pt" for word in ("whole", "part", "rest"))
    common = ["--optimizer", name, "--rank-fraction", "0.5", "--tied", "--out", str(tmp_path), *TINY]
    assert modules["train_gpt"].main([*common, "--checkpoint", str(whole), "--save-every", "8"]) == 0
    assert modules["train_gpt"].main([*common, "--checkpoint", str(part), "--stop-at", "11"]) == 0
    assert torch.load(part, weights_only=True)["step"] == 11
    assert modules["train_gpt"].main([*common, "--resume", str(part), "--checkpoint", str(rest)]) == 0
    assert_same_end(whole, rest)


def test_train_gpt_resume_in_another_process_continues_bit_equal(tmp_path: Path) -> None:
    whole, part, rest = (tmp_path / f"{word}.pt" for word in ("whole", "part", "rest"))
    common = ["--optimizer", "dion", "--out", str(tmp_path), *TINY]
    for extra in (
        ["--checkpoint", str(whole)],
        ["--checkpoint", str(part), "--save-every", "5", "--stop-at", "10"],
        ["--resume", str(part), "--checkpoint", str(rest)],
    ):
        done = run_script(*common, *extra)
        assert done.returncode == 0, done.stderr
    assert_same_end(whole, rest)


def test_train_gpt_same_command_starts_goes_on_and_finishes(
    modules: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None
) -> None:
    whole, broken = tmp_path / "whole.pt", tmp_path / "broken.pt"
    common = ["--optimizer", "dion", "--out", str(tmp_path), *TINY]
    assert modules["train_gpt"].main([*common, "--checkpoint", str(whole)]) == 0
    command = [*common, "--checkpoint", str(broken), "--resume", "auto"]
    assert modules["train_gpt"].main([*command, "--stop-at", "11"]) == 0
    assert modules["train_gpt"].main(command) == 0
    assert f"goes on from {broken} at step 11\n" in capsys.readouterr().out
    assert_same_end(whole, broken)
    before = broken.stat()
    assert modules["train_gpt"].main(command) == 0
    done = f"nothing to train: {broken} has done 24 steps, and 24 are asked for\n"
    assert done in capsys.readouterr().out
    assert (broken.stat().st_ino, broken.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert len(runs_of(tmp_path)["dion"]["curve"]["train_loss"]) == 24


def test_train_gpt_resume_with_other_settings_is_refused(
    modules: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None
) -> None:
    path = tmp_path / "run.pt"
    common = ["--optimizer", "adamw", "--out", str(tmp_path), *TINY]
    assert modules["train_gpt"].main([*common, "--checkpoint", str(path), "--stop-at", "1"]) == 0
    with pytest.raises(SystemExit):
        modules["train_gpt"].main([*common, "--resume", str(path), "--seed", "7"])
    assert "seed: checkpoint 0, asked for 7" in capsys.readouterr().err
    path.write_bytes(b"text")
    with pytest.raises(SystemExit):
        modules["train_gpt"].main([*common, "--resume", str(path)])
    assert "is not a checkpoint of this script" in capsys.readouterr().err


def test_train_gpt_diverged_run_reports_it_and_fails(
    modules: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str], threads: None
) -> None:
    options = ["--optimizer", "adamw", "--lr", "1e30", "--out", str(tmp_path), *TINY]
    assert modules["train_gpt"].main(options) == 1
    captured = capsys.readouterr()
    assert "diverged" in captured.out
    assert "not finite" in captured.err
    (run,) = json.loads((tmp_path / "figures.json").read_text())["runs"]
    assert run["final_held_out_loss"] is None
    assert run["steps"] < 24


# ---- arguments ------------------------------------------------------------

BAD_ARGUMENTS = [
    (["--optimizer", "sgd"], r"--optimizer: invalid choice: 'sgd'"),
    (["--compare", "dion,sgd"], r"--compare: unknown optimizer 'sgd'; known: dion, muon, adamw, lion"),
    (["--compare", "dion,dion"], r"--compare: names an optimizer twice"),
    (["--optimizer", "dion", "--compare", "dion,muon"], r"not allowed with argument"),
    (["--sweep", "dion=0.1,x"], r"--sweep: must be a finite number > 0, got 'x'"),
    (["--sweep", "dion=0.1", "--lr", "0.1"], r"--sweep names the learning rates itself"),
    (["--lr", "-1"], r"--lr: must be a finite number > 0, got '-1'"),
    (
        ["--optimizer", "dion", "--checkpoint", "."],
        r"--checkpoint must be a file here, got the folder \.",
    ),
    (["--lr", "inf"], r"--lr: must be a finite number > 0, got 'inf'"),
    (
        ["--lr", "lion=0.1"],
        r"--lr names lion, which is not among the optimizers of this run: dion, muon, adamw",
    ),
    (["--rank-fraction", "0"], r"--rank-fraction: must be a number > 0 and <= 1, got '0'"),
    (["--fraction", "0"], r"--fraction: must be a number > 0 and <= 1, got '0'"),
    (["--rank-fraction", "1.5"], r"--rank-fraction: must be a number > 0 and <= 1, got '1.5'"),
    (["--weight-decay", "nan"], r"--weight-decay: must be a finite number >= 0, got 'nan'"),
    (["--steps", "0"], r"--steps: must be a whole number >= 1, got '0'"),
    (["--steps", "2.5"], r"--steps: must be a whole number >= 1, got '2.5'"),
    (["--seed", "-1"], r"--seed: must be a whole number >= 0, got '-1'"),
    (["--dtype", "int8"], r"--dtype: invalid choice: 'int8'"),
    (["--checkpoint", "x.pt"], r"--checkpoint and --resume serve one run"),
    (["--optimizer", "dion", "--save-every", "2"], r"--save-every needs --checkpoint"),
    (["--optimizer", "dion", "--resume", "/nonexistent.pt"], r"--resume: no such file: /nonexistent.pt"),
    (["--optimizer", "dion", "--resume", "auto"], r"--resume auto needs --checkpoint: it goes on from"),
    (["--dim", "36", "--heads", "4"], r"dim must be a multiple of 2 \* heads .*got dim=36, heads=4"),
    (["--corpus-mb", "0.000001"], r"max_bytes must leave room for two documents"),
    (["--corpus-mb", "0.4", "--seq-len", "10000000"], r"seq_len must be less than the number of tokens"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=lambda value: " ".join(value)[:40])
def test_train_gpt_bad_argument_is_a_clear_error(
    modules: dict[str, ModuleType],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as raised:
        modules["train_gpt"].main(
            ["--layers", "1", "--dim", "32", "--out", str(tmp_path / "none"), *arguments]
        )
    assert raised.value.code == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "none").exists()


def test_train_gpt_cuda_without_a_device_is_a_clear_error(
    modules: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        modules["train_gpt"].main(["--device", "cuda"])
    assert "--device cuda: torch sees no CUDA device here" in capsys.readouterr().err
