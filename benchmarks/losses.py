"""Held-out losses of the small GPT of `examples/train_gpt.py`, trained in several variants of one setting.

All variants of a seed begin with the same weights and see the same batches.

- `orthonormalization` guards the polynomials: a naive Muon whose five Polar Express steps are computed in
  float64 (the reference), `oxidion.Muon` ("exact") and `oxidion.Muon(orth_preset="fast")`. The mean loss may
  be larger than the reference's by 1 % for "exact" and 2 % for "fast".
- `weights` keeps bfloat16 weights in the ways that there are: rounded to nearest, rounded stochastically, and
  with their float32 remainders, the last two also with smaller moments; and float32 weights under
  ``torch.autocast``. The mean loss with remainders must lie within the spread of the seeds from that of
  float32 weights, and with rounding to the nearest above it by more than that.

Prints a table and writes ``<out>/guard.json`` or ``<out>/bf16_weights.json``; ends with 1 where a bar is
missed. Options that are not named here, as --layers or --dim, go to the example.

    python benchmarks/losses.py orthonormalization
    python benchmarks/losses.py weights --seeds 0
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
from torch import Tensor

import harness
import oxidion
from corpus import load_corpus
from options import build_parser, planned_settings
from recipes import build_scheduler
from training import Training

Losses = dict[str, list[float]]
LEEWAY = {"reference": 0.0, "exact": 0.01, "fast": 0.02}
#: Polar Express (arXiv:2505.16932), lower bound 1e-3, with the factor 1.02 of its authors on the norm.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
WEIGHTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "nearest": {},
    "stochastic": {"stochastic_rounding": True},
    "masters": {"master_weights": True},
    "masters, moments in bfloat16": {"master_weights": True, "state_dtype": torch.bfloat16},
    "masters, moments in 8 bits": {"master_weights": True, "state_bits": 8},
    "stochastic, moments in 8 bits": {"stochastic_rounding": True, "state_bits": 8},
}


@dataclass(frozen=True)
class Study:
    """File of a result, options of ``train_gpt.py``, and variants; the first variant is the reference.

    ``prepare`` makes a variant of a run and returns the context to train in; ``missed`` names the variants
    whose losses are not as they have to be.
    """

    file: str
    words: str
    variants: Iterable[str]
    prepare: Callable[[Training, str], AbstractContextManager[Any]]
    missed: Callable[[Losses], list[str]]


# --- orthonormalization --------------------------------------------------------------------------


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


def orthonormalized(run: Training, variant: str) -> AbstractContextManager[Any]:
    """Lets a run of Muon orthonormalize in another way."""
    groups = run.optimizer.param_groups
    if variant == "fast":
        for group in groups:
            if group["algorithm"] == "muon":
                group["orth_preset"] = "fast"
    if variant == "reference":
        if any(group.get("adjust_lr", "spectral_norm") != "spectral_norm" for group in groups):
            raise SystemExit("the naive Muon knows spectral_norm only")
        run.optimizer = NaiveMuon(groups)  # type: ignore[assignment]
        run.scheduler = build_scheduler(run.optimizer, run.settings)
    return nullcontext()


def above_leeway(losses: Losses) -> list[str]:
    """Variants whose mean loss is too far above the reference's."""
    reference = statistics.fmean(losses["reference"])
    return [name for name, all_ in losses.items() if statistics.fmean(all_) > reference * (1 + LEEWAY[name])]


# --- weights -------------------------------------------------------------------------------------


def kept(run: Training, variant: str) -> AbstractContextManager[Any]:
    """Keeps the weights of a run in another way; all begin rounded to bfloat16."""
    run.model.to(torch.bfloat16)
    is_whole = variant == "float32"
    if is_whole:
        run.model.to(torch.float32)
    keys = {"lr": run.settings.lr, "betas": (0.9, 0.95), "weight_decay": 0.0, **WEIGHTS[variant]}
    run.optimizer = oxidion.AdamW(run.model.parameters(), **keys)
    run.scheduler = build_scheduler(run.optimizer, run.settings)
    # Casts are kept as long as the context is entered: weights change in it.
    return torch.autocast("cpu", torch.bfloat16, enabled=is_whole, cache_enabled=False)


def beyond_spread(losses: Losses) -> list[str]:
    """Variants on the wrong side of the spread of the seeds with float32 weights."""
    spread = max(losses["float32"]) - min(losses["float32"])
    above = {
        name: statistics.fmean(all_) - statistics.fmean(losses["float32"]) for name, all_ in losses.items()
    }
    return [
        *(["masters"] if abs(above.get("masters", 0.0)) > spread else []),
        *(["nearest"] if above.get("nearest", math.inf) <= spread else []),
    ]


MUON = (
    "--optimizer muon --layers 3 --dim 128 --heads 4 --seq-len 128 --eval-every 50 --warmup 0.1 --steps 250"
)
ADAMW = "--optimizer adamw --layers 2 --dim 64 --heads 2 --eval-every 100 --lr 2e-4 --steps 500 --corpus-mb 4"
STUDIES = {
    "orthonormalization": Study("guard", f"{MUON} --batch-size 8", LEEWAY, orthonormalized, above_leeway),
    "weights": Study("bf16_weights", ADAMW, WEIGHTS, kept, beyond_spread),
}


def trained(study: Study, words: Sequence[str], variant: str) -> tuple[float, float]:
    """Held-out loss at the end of a run, and the share of the norms' weights that are 1 as at first."""
    parser = build_parser(None)
    (settings,) = planned_settings(parser, parser.parse_args([*study.words.split(), *words]))
    run = Training(settings, load_corpus(round(settings.corpus_mb * 1e6)), torch.device("cpu"))
    with study.prepare(run, variant):
        run.run(settings.steps, None, 0, quiet=True)
    vectors = torch.cat([p.detach().float().flatten() for p in run.model.parameters() if p.ndim == 1])
    return run.record.held_out_loss[-1], (vectors == 1).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains every variant with every seed; 1 where a bar is missed."""
    parser = harness.command(__doc__, allow_abbrev=False)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--seeds", default="0,1,2", help="whole numbers by comma")
    options, words = parser.parse_known_args(arguments)
    study = STUDIES[options.study]
    runs: dict[str, list[tuple[float, float]]] = {variant: [] for variant in study.variants}
    for seed in options.seeds.split(","):
        for variant, found in runs.items():
            found.append(trained(study, [*words, "--seed", seed], variant))
            print(f"seed {seed}, {variant}: {found[-1][0]:.4f}", file=sys.stderr)
    losses = {variant: [loss for loss, _ in found] for variant, found in runs.items()}
    means = {variant: statistics.fmean(found) for variant, found in losses.items()}
    reference, missed = next(iter(means.values())), study.missed(losses)
    result = {
        **harness.facts(),
        "settings": {"words": study.words, "more": words, "seeds": options.seeds},
        "losses": losses,
        "excess": {variant: mean / reference - 1 for variant, mean in means.items()},
        "norms_at_one": {variant: statistics.fmean(n for _, n in found) for variant, found in runs.items()},
        "missed": missed,
    }
    harness.write(result, options.out, study.file)
    rows = [
        [
            variant,
            ", ".join(f"{loss:.4f}" for loss in found),
            f"{means[variant]:.4f}",
            f"{100 * (means[variant] / reference - 1):+.2f} %",
            "no" if variant in missed else "yes",
        ]
        for variant, found in losses.items()
    ]
    print(harness.table(["variant", "held-out loss by seed", "mean", "above the first", "as expected"], rows))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
