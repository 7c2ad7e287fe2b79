"""Trains small problems whose outcome is known, and fails where an optimizer misses what is known of it.

Two networks on MNIST-1D (generated data of the package `mnist1d`), and an associative memory of 99 pairs,
where the k-th pair has a frequency of 1/k: the last facts are rare. Wrong code shows here (a sign, a scale, a
transposition, a basis), in two minutes; of large models these problems say nothing.

Prints tables and writes `<out>/tasks.json` (machine, versions, means over seeds); ends with 1 where a bar is
missed.

    python benchmarks/peers.py .cache/peers --only mnist1d==0.0.2.post1
    python benchmarks/tasks.py --peer-path .cache/peers/packages
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import harness
import oxidion

FACTS = 99
"""Pairs of the associative memory: the first is the most frequent one, the last the rarest."""


Figures = dict[str, float]
"""By name; accuracies are shares of the test set, probabilities those of the right answer."""
Make = Callable[[nn.Module], Any]
"""Makes an optimizer for a model."""


class Problem(NamedTuple):
    """Steps of a run, optimizers by name, and what trains one with a number of steps and a seed."""

    steps: int
    optimizers: dict[str, Make]
    train: Callable[[Make, int, int], Figures]


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


def on_signals(make: Callable[[], nn.Module]) -> Callable[[Make, int, int], Figures]:
    """Training of a network on MNIST-1D with batches of 100 and a cosine schedule."""

    def train(optimizer_of: Make, steps: int, seed: int) -> Figures:
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


def matrices(name: str, **keys: Any) -> Make:
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


def on_facts(optimizer_of: Make, steps: int, seed: int) -> Figures:
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


def on_memory(name: str, **keys: Any) -> Make:
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
    ),
}
BARS: dict[str, dict[str, Callable[[dict[str, Figures]], bool]]] = {
    "perceptron": {
        "AdamW reaches 64 %": lambda means: means["AdamW, lr 0.01"]["accuracy"] >= 0.64,
        "Muon reaches 64 %": lambda means: means["Muon, lr 0.02"]["accuracy"] >= 0.64,
    },
    "convolutions": {
        "Muon reaches 93 %": lambda means: means["Muon, lr 0.02"]["accuracy"] >= 0.93,
        "Muon is 2 points ahead of AdamW": lambda means: (
            means["Muon, lr 0.02"]["accuracy"] >= means["AdamW, lr 0.01"]["accuracy"] + 0.02
        ),
    },
    "memory": {
        "worst / best of Muon is 0.6 or more": lambda means: means[MUON]["worst / best"] >= 0.6,
        "worst / best of SOAP is 0.95 or more": lambda means: means[SOAP]["worst / best"] >= 0.95,
        "worst / best of AdamW is 0.05 or less": lambda means: means[ADAM]["worst / best"] <= 0.05,
    },
}
"""What has to hold of the means over seeds."""


def trained(name: str, steps: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """A row for each optimizer of a problem: mean, least and largest figures over seeds.

    Seconds are those of the processor, with evaluation; other work on the machine hardly counts.
    """
    problem, rows = PROBLEMS[name], []
    for optimizer, make in problem.optimizers.items():
        start = time.process_time()
        found = [problem.train(make, steps, seed) for seed in seeds]
        seconds = (time.process_time() - start) / len(seeds)
        columns = {key: [figures[key] for figures in found] for key in found[0]}
        assert all(map(math.isfinite, itertools.chain(*columns.values())))
        figures = {key: [statistics.fmean(each), min(each), max(each)] for key, each in columns.items()}
        row = {"problem": name, "optimizer": optimizer, "steps": steps, "seeds": len(seeds)}
        rows.append({**row, "figures": figures, "seconds": seconds})
        print(rows[-1], file=sys.stderr)
    return rows


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Problem, text and outcome of every bar whose problem was run."""
    means: dict[str, dict[str, Figures]] = {}
    for row in rows:
        of_problem = means.setdefault(row["problem"], {})
        of_problem[row["optimizer"]] = {key: figure[0] for key, figure in row["figures"].items()}
    return [
        {"problem": problem, "bar": text, "holds": holds(found)}
        for problem, found in means.items()
        for text, holds in BARS[problem].items()
    ]


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
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, help="of every run instead; bars are for the usual numbers")
    parser.add_argument("--peer-path", type=Path, help="folder of packages with mnist1d")
    parser.add_argument("--page", type=Path, help="page to put the tables in, between its marks")
    options = parser.parse_args(arguments)
    if options.peer_path is not None:
        sys.path.append(str(options.peer_path.expanduser().resolve()))
    torch.set_num_threads(1)
    if {*options.problems} - {"memory"}:
        data()  # before the first run: a package that is missing says so now
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    result = {**harness.facts(), "command": f"python benchmarks/tasks.py {given}".strip()}
    steps = [options.steps or PROBLEMS[name].steps for name in options.problems]
    rows = [trained(name, count, options.seeds) for name, count in zip(options.problems, steps, strict=True)]
    result["rows"] = [*itertools.chain(*rows)]
    result["bars"] = verdicts(result["rows"])
    result = harness.rounded(result)
    harness.write(result, options.out, "tasks")
    harness.rewrite(options.page, "tasks", markdown(result))
    sys.stdout.write(markdown(result))
    return 0 if all(bar["holds"] for bar in result["bars"]) else 1


if __name__ == "__main__":
    sys.exit(main())
