"""Trains small problems whose outcome is known, and fails where an optimizer misses what is known of it.

Two networks on MNIST-1D (generated data of the package `mnist1d`), and an associative memory with rare facts,
the last of 99 pairs of which the k-th has a frequency of 1/k. Wrong code shows here (a sign, a scale, a
transposition, a basis), in two minutes; of large models these problems say nothing.

Prints tables and writes `<out>/tasks.json` (machine, versions, means over seeds); ends with 1 where a bar is
missed.

    python benchmarks/peers.py .cache/peers --only mnist1d==0.0.2.post1
    python benchmarks/tasks.py --peer-path .cache/peers/packages
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import harness
import oxidion

FACTS = 99
"""Pairs of the associative memory: the first is the most frequent one, the last the rarest."""


@dataclass(frozen=True)
class Run:
    """One training: of an optimizer on a problem with a seed.

    Attributes:
        problem: one of `PROBLEMS`.
        optimizer: its name in the table.
        seed: of initial weights, batches and embeddings.
        steps: that were taken.
        figures: by name; accuracies are shares of the test set, probabilities those of the right answer.
        seconds: of the processor, for training and evaluation; other work on the machine hardly counts.
    """

    problem: str
    optimizer: str
    seed: int
    steps: int
    figures: dict[str, float]
    seconds: float


@dataclass(frozen=True)
class Bar:
    """What has to hold of the mean over seeds."""

    problem: str
    text: str
    holds: Callable[[dict[str, dict[str, float]]], bool]


@dataclass(frozen=True)
class Problem:
    """How a problem is trained.

    Attributes:
        steps: of a run.
        optimizers: by name, what makes one for a model.
        train: trains with a function of the model, a number of steps and a seed; returns the figures.
        needs_data: whether it needs the package with the data.
    """

    steps: int
    optimizers: dict[str, Callable[[nn.Module], Any]]
    train: Callable[[Callable[[nn.Module], Any], int, int], dict[str, float]]
    needs_data: bool = field(default=True)


# ------------------------------------------------------------------------------------------- MNIST-1D


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Signals and digits to train with, and those to test with: 4000 and 1000 of 40 numbers each."""
    from mnist1d.data import get_dataset_args, make_dataset

    made = make_dataset(get_dataset_args())
    x, y = (torch.tensor(made[key]) for key in ("x", "y"))
    x_test, y_test = (torch.tensor(made[key]) for key in ("x_test", "y_test"))
    return x.float(), y.long(), x_test.float(), y_test.long()


def perceptron() -> nn.Module:
    """Two hidden layers of 100."""
    return nn.Sequential(nn.Linear(40, 100), nn.ReLU(), nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))


def convolutions() -> nn.Module:
    """Three convolutions of 25 channels, each halving the length: 40, 19, 10, 5."""

    def layer(width: int, size: int) -> list[nn.Module]:
        return [nn.Conv1d(width, 25, size, stride=2, padding=1), nn.ReLU()]

    return nn.Sequential(
        nn.Unflatten(1, (1, 40)), *layer(1, 5), *layer(25, 3), *layer(25, 3), nn.Flatten(), nn.Linear(125, 10)
    )


def batches(count: int, size: int, seed: int) -> Iterator[Tensor]:
    """Indices of batches without end: every pass has an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def on_signals(make: Callable[[], nn.Module]) -> Callable[[Callable[[nn.Module], Any], int, int], Any]:
    """Training of a network on MNIST-1D with batches of 100 and a cosine schedule."""

    def train(optimizer_of: Callable[[nn.Module], Any], steps: int, seed: int) -> dict[str, float]:
        torch.manual_seed(seed)
        model = make()
        optimizer = optimizer_of(model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        x, y, x_test, y_test = data()
        for _, batch in zip(range(steps), batches(len(x), 100, seed), strict=False):
            loss: Any = cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        with torch.no_grad():
            right = (model(x_test).argmax(1) == y_test).float().mean()
        return {"accuracy": float(right)}

    return train


def adamw(model: nn.Module) -> Any:
    """AdamW for everything."""
    return oxidion.AdamW(model.named_parameters(), lr=0.01)


def matrices(name: str, **keys: Any) -> Callable[[nn.Module], Any]:
    """A class for the weights but the last, with AdamW for biases and the last layer."""

    def made(model: nn.Module) -> Any:
        cls = getattr(oxidion, name)
        *inner, last = [n for n, p in model.named_parameters() if p.ndim > 1]
        named = dict(model.named_parameters())
        weights = [(n, named[n]) for n in inner]
        rest = [(n, p) for n, p in named.items() if p.ndim < 2 or n == last]
        groups = [
            {"params": weights, **({"flatten": True} if weights[0][1].ndim > 2 else {})},
            {"params": rest, "algorithm": "adamw", "lr": 0.01},
        ]
        return cls(groups, lr=0.02, **keys)

    return made


# ---------------------------------------------------------------------------------- associative memory


class Memory(nn.Module):
    """Answers to questions, both orthonormal vectors in an order of no meaning, by one matrix.

    ``logits[q, a] = answers[a] W questions[q]``, with W of zeros at the start.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.zeros(FACTS, FACTS))
        made = (torch.linalg.qr(torch.randn(FACTS, FACTS, generator=generator))[0] for _ in range(2))
        self.questions, self.answers = made

    def forward(self) -> Tensor:
        """Logits of every answer to every question."""
        return self.questions @ self.weight.T @ self.answers.T


def on_facts(optimizer_of: Callable[[nn.Module], Any], steps: int, seed: int) -> dict[str, float]:
    """Training on all facts at once, each with its frequency; probabilities of the right answers."""
    model = Memory(seed)
    optimizer = optimizer_of(model)
    frequency = 1 / torch.arange(1, FACTS + 1)
    frequency /= frequency.sum()
    facts = torch.arange(FACTS)
    for _ in range(steps):
        loss: Any = (frequency * cross_entropy(model(), facts, reduction="none")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        right = model().softmax(1).diagonal()
    worst, best = float(right.min()), float(right.max())
    return {"best": best, "worst": worst, "worst / best": worst / best}


def on_memory(name: str, **keys: Any) -> Callable[[nn.Module], Any]:
    """A class without decay for the one matrix."""
    return lambda model: getattr(oxidion, name)(model.named_parameters(), weight_decay=0.0, **keys)


SIGNALS = {
    "AdamW, lr 0.01": adamw,
    "Muon, lr 0.02": matrices("Muon"),
    "Dion 1/4, lr 0.02": matrices("Dion", rank_fraction=0.25),
}
MUON, SOAP, ADAM = "Muon without momentum, lr 0.1", "SOAP, lr 0.1", "AdamW, lr 0.01"
PROBLEMS = {
    "perceptron": Problem(6000, SIGNALS, on_signals(perceptron)),
    "convolutions": Problem(3000, SIGNALS, on_signals(convolutions)),
    "memory": Problem(
        50,
        {
            MUON: on_memory("Muon", lr=0.1, mu=0.0, nesterov=False, adjust_lr=None, orth_dtype="float32"),
            SOAP: on_memory("SOAP", lr=0.1, betas=(0.9, 0.95)),
            ADAM: on_memory("AdamW", lr=0.01),
        },
        on_facts,
        needs_data=False,
    ),
}
BARS = (
    Bar("perceptron", "AdamW reaches 64 %", lambda m: m["AdamW, lr 0.01"]["accuracy"] >= 0.64),
    Bar("perceptron", "Muon reaches 64 %", lambda m: m["Muon, lr 0.02"]["accuracy"] >= 0.64),
    Bar("convolutions", "Muon reaches 93 %", lambda m: m["Muon, lr 0.02"]["accuracy"] >= 0.93),
    Bar(
        "convolutions",
        "Muon is 2 points ahead of AdamW",
        lambda m: m["Muon, lr 0.02"]["accuracy"] >= m["AdamW, lr 0.01"]["accuracy"] + 0.02,
    ),
    Bar("memory", "worst / best of Muon is 0.6 or more", lambda m: m[MUON]["worst / best"] >= 0.6),
    Bar("memory", "worst / best of SOAP is 0.95 or more", lambda m: m[SOAP]["worst / best"] >= 0.95),
    Bar("memory", "worst / best of AdamW is 0.05 or less", lambda m: m[ADAM]["worst / best"] <= 0.05),
)


def means(runs: Sequence[Run], problem: str) -> dict[str, dict[str, float]]:
    """Mean figures over seeds, by optimizer."""
    found: dict[str, dict[str, float]] = {}
    for name in PROBLEMS[problem].optimizers:
        own = [run.figures for run in runs if (run.problem, run.optimizer) == (problem, name)]
        if own:
            found[name] = {key: statistics.fmean(figures[key] for figures in own) for key in own[0]}
    return found


def verdicts(runs: Sequence[Run]) -> list[tuple[str, str, bool]]:
    """Problem, text and outcome of every bar whose problem was run."""
    there = {run.problem for run in runs}
    return [
        (bar.problem, bar.text, bar.holds(means(runs, bar.problem))) for bar in BARS if bar.problem in there
    ]


def summed_up(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each problem and optimizer: mean, least and largest figures over seeds."""
    own: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        own.setdefault((run.problem, run.optimizer), []).append(run)
    found = []
    for (problem, optimizer), same in own.items():
        figures = {}
        for key in same[0].figures:
            every = [run.figures[key] for run in same]
            figures[key] = [statistics.fmean(every), min(every), max(every)]
        seconds = statistics.fmean(run.seconds for run in same)
        row = {"problem": problem, "optimizer": optimizer, "steps": same[0].steps, "seeds": len(same)}
        found.append({**row, "figures": figures, "seconds": seconds})
    return found


def markdown(result: dict[str, Any]) -> str:
    """Tables of figures and of bars."""
    own, versions = result["machine"], result["versions"]
    threads = f"{result['threads']} thread{'s' * (result['threads'] > 1)}"
    about = (
        f"{own['cpu']}, {threads}, oxidion {versions['oxidion']}, torch {versions['torch']}, "
        f"{own['date'][:10]}; `{result['command']}`. Means over seeds, least and most "
        "in brackets; seconds of the processor, with evaluation."
    )
    rows = []
    for row in result["rows"]:
        where = [row["problem"], row["optimizer"], str(row["steps"]), str(row["seeds"])]
        for key, (mean, low, high) in row["figures"].items():
            rows.append([*where, f"{key} {mean:.3f} [{low:.3f}, {high:.3f}]", f"{row['seconds']:.1f}"])
    bars = [[bar["problem"], bar["bar"], "yes" if bar["holds"] else "**no**"] for bar in result["bars"]]
    first = harness.table(["problem", "optimizer", "steps", "seeds", "figure", "seconds"], rows)
    return "\n\n".join([about, first, harness.table(["problem", "bar", "holds"], bars)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains what is asked for; 1 where a bar is missed."""
    parser = harness.command(__doc__)
    parser.add_argument("--problems", default=",".join(PROBLEMS), help="names by comma (default: all)")
    parser.add_argument("--seeds", default="0,1", help="whole numbers by comma (default: 0,1)")
    parser.add_argument("--steps", type=int, help="of every run instead; bars are for the usual numbers")
    parser.add_argument("--peer-path", type=Path, help="folder of packages with mnist1d")
    parser.add_argument("--page", type=Path, help="page to put the tables in, between its marks")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the networks are small")
    options = parser.parse_args(arguments)
    names = options.problems.split(",")
    if unknown := [name for name in names if name not in PROBLEMS]:
        parser.error(f"--problems: unknown {', '.join(unknown)}; known: {', '.join(PROBLEMS)}")
    if options.peer_path is not None:
        sys.path.append(str(options.peer_path.expanduser().resolve()))
    torch.set_num_threads(options.threads)
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    if any(PROBLEMS[name].needs_data for name in names):
        data()  # before the first run: a package that is missing says so now
    result: dict[str, Any] = {
        "machine": harness.machine(),
        "versions": {"oxidion": oxidion.__version__, "torch": torch.__version__},
        "threads": torch.get_num_threads(),
        "load": harness.load_average(),
        "command": f"python benchmarks/tasks.py {given}".strip(),
    }
    runs: list[Run] = []
    for problem in names:
        row = PROBLEMS[problem]
        for name, make in row.optimizers.items():
            for seed in map(int, options.seeds.split(",")):
                start, steps = time.process_time(), options.steps or row.steps
                figures = row.train(make, steps, seed)
                assert all(map(math.isfinite, figures.values()))
                runs.append(Run(problem, name, seed, steps, figures, time.process_time() - start))
                print(problem, name, seed, figures, f"{runs[-1].seconds:.1f} s", file=sys.stderr)
    result["bars"] = [dict(zip(("problem", "bar", "holds"), each, strict=True)) for each in verdicts(runs)]
    result = harness.rounded({**result, "rows": summed_up(runs)})
    harness.write(result, options.out, "tasks")
    if options.page is not None:
        page = harness.between(options.page.read_text(encoding="utf-8"), "tasks", markdown(result))
        options.page.write_text(page, encoding="utf-8")
    sys.stdout.write(markdown(result))
    return 0 if all(bar["holds"] for bar in result["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
