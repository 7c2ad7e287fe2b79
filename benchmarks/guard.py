"""Whether training goes as well with our orthonormalization as with the exact polynomial.

The small GPT of `examples/train_gpt.py` is trained from the same weights on the same batches by a naive Muon
whose five Polar Express steps are computed in float64 (the reference), by `oxidion.Muon` ("exact") and by
`oxidion.Muon(orth_preset="fast")`, with several seeds. The mean held-out loss at the end may be larger than
the reference's by 1 % for "exact" and 2 % for "fast".

Prints a table and writes ``<out>/<name>.json``; fails where a loss is larger than allowed.

    python benchmarks/guard.py
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples"))

# ruff: noqa: E402 (the folder of the examples has to be on the path first)
import torch
from torch import Tensor

import harness
import oxidion
from corpus import load_corpus
from options import build_parser, planned_settings
from recipes import Settings, build_scheduler
from training import Training

SIZES = "--layers 3 --dim 128 --heads 4 --seq-len 128 --batch-size 8 --eval-every 50 --warmup 0.1"
LEEWAY = {"reference": 0.0, "exact": 0.01, "fast": 0.02}
#: Polar Express (arXiv:2505.16932), lower bound 1e-3, with the factor 1.02 of its authors on the norm.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class NaiveMuon(torch.optim.Optimizer):
    """Momentum, the polynomial in float64 on the matrix, decoupled decay; AdamW for the other groups."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """Takes the groups of an `oxidion.Muon`, with their settings."""
        super().__init__([dict(group) for group in groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of every parameter."""
        for group in self.param_groups:
            rule = self._adamw if group["algorithm"] == "adamw" else self._muon
            for param in group["params"]:
                change = rule(group, self.state[param], param.grad.double(), param.shape)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * change.to(param.dtype))

    @staticmethod
    def _muon(group: dict[str, Any], state: dict[str, Any], grad: Tensor, shape: torch.Size) -> Tensor:
        momentum = state["momentum"] = group["mu"] * state.get("momentum", 0.0) + grad
        x = grad + group["mu"] * momentum if group["nesterov"] else momentum
        x = x / (1.02 * x.norm() + group["epsilon"])
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.mT
            x = a * x + (b * gram + c * gram @ gram) @ x
        return math.sqrt(shape[0] / shape[1]) * x

    @staticmethod
    def _adamw(group: dict[str, Any], state: dict[str, Any], grad: Tensor, _: torch.Size) -> Tensor:
        beta1, beta2 = group["betas"]
        step = state["step"] = state.get("step", 0) + 1
        first = state["first"] = beta1 * state.get("first", 0.0) + (1 - beta1) * grad
        second = state["second"] = beta2 * state.get("second", 0.0) + (1 - beta2) * grad * grad
        return first / (1 - beta1**step) / ((second / (1 - beta2**step)).sqrt() + group["epsilon"])


def trained(settings: Settings, variant: str) -> float:
    """Held-out loss at the end of a run."""
    run = Training(settings, load_corpus(round(settings.corpus_mb * 1e6)), torch.device("cpu"))
    groups = run.optimizer.param_groups
    if variant == "fast":
        for group in groups:
            if group["algorithm"] == "muon":
                group["orth_preset"] = "fast"
    if variant == "reference":
        if any(group.get("adjust_lr", "spectral_norm") != "spectral_norm" for group in groups):
            raise SystemExit("the naive Muon knows spectral_norm only")
        run.optimizer = NaiveMuon(groups)  # type: ignore[assignment]
        run.scheduler = build_scheduler(run.optimizer, settings)
    run.run(settings.steps, None, 0, quiet=True)
    return run.record.held_out_loss[-1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains every variant with every seed and compares the means."""
    parser = harness.command(__doc__)
    parser.add_argument("--seeds", default="0,1,2", help="whole numbers by comma")
    parser.add_argument("--steps", default="250", help="length of a run")
    parser.add_argument("--sizes", default=SIZES, help="options of train_gpt.py")
    parser.add_argument("--name", default="guard", help="file name, without suffix")
    options = parser.parse_args(arguments)
    training = build_parser(None)
    losses: dict[str, list[float]] = {variant: [] for variant in LEEWAY}
    for seed in options.seeds.split(","):
        words = [*options.sizes.split(), "--steps", options.steps, "--seed", seed, "--optimizer", "muon"]
        (settings,) = planned_settings(training, training.parse_args(words))
        for variant, found in losses.items():
            found.append(trained(settings, variant))
            print(f"seed {seed}, {variant}: {found[-1]:.4f}", file=sys.stderr)
    means = {variant: statistics.fmean(found) for variant, found in losses.items()}
    excess = {variant: mean / means["reference"] - 1 for variant, mean in means.items()}
    result = {
        "machine": harness.machine(),
        "versions": {"oxidion": oxidion.__version__, "torch": torch.__version__},
        "load": harness.load_average(),
        "settings": {"steps": options.steps, "seeds": options.seeds, "sizes": options.sizes},
        "losses": losses,
        "excess": excess,
    }
    harness.write(result, options.out, options.name)
    rows = []
    for variant, found in losses.items():
        cells = [variant, ", ".join(f"{loss:.4f}" for loss in found), f"{means[variant]:.4f}"]
        rows.append([*cells, f"{100 * excess[variant]:+.2f} %", f"{100 * LEEWAY[variant]:g} %"])
    head = ["variant", "held-out loss by seed", "mean", "above the reference", "allowed"]
    print(harness.table(head, rows))
    if worse := [variant for variant, leeway in LEEWAY.items() if not excess[variant] <= leeway]:
        raise SystemExit(f"the loss is too large: {', '.join(worse)}")


if __name__ == "__main__":
    main()
