"""Rows of the table for the classes whose step needs norms or means of whole parameters."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

import oxidion

from .case import BASE, LR, Case, Group
from .inputs import Shape

ADAFACTOR = {"relative_step": False, "scale_parameter": True, "beta1": 0.75, "decay_rate": -0.8}
ALL_KINDS: tuple[Shape, ...] = (
    (16, 12),
    (17, 5),
    (7, 5),
    (3, 12),
    (1, 8),
    (8, 1),
    (13,),
    (),
    (4, 6, 10),
    (8, 3, 3, 3),
)


NORMED: dict[str, type[Optimizer]] = {
    "lamb": oxidion.Lamb,
    "adafactor": oxidion.Adafactor,
    "came": oxidion.CAME,
}


def _normed(name: str, *groups: Group, **kwargs: Any) -> Case:
    """Rows of classes whose step needs norms or means of whole parameters."""
    algorithm = name.partition("-")[0]
    return Case(name, NORMED[algorithm], algorithm, {**BASE, **kwargs}, groups or (Group(ALL_KINDS),))


def _adafactor(name: str, *groups: Group, **kwargs: Any) -> Case:
    return _normed(
        f"adafactor-{name}", *groups, **{"relative_step": False, "scale_parameter": False, **kwargs}
    )


NORMED_MIXED = (
    Group(ALL_KINDS[:4]),
    Group(((5, 3), (4,)), {"algorithm": "lamb", "betas": (0.8, 0.9), "eps": 1e-6, "debias": "step"}),
    Group(((6, 4), (9,)), {"algorithm": "adafactor", "lr": 2 * LR, "eps": (1e-30, 1e-3), **ADAFACTOR}),
    Group(((12, 8), (8, 12)), {"algorithm": "muon", "mu": 0.9, "epsilon": 1e-8}),
)

NORMED_CASES: tuple[Case, ...] = (
    _normed("lamb-default"),
    _normed("lamb-none", debias="none"),
    _normed("lamb-step", debias="step", betas=(0.5, 0.75), eps=0.25),
    _normed("lamb-always", weight_decay=0.0, always_adapt=True),
    _normed("lamb-unadapted", weight_decay=0.0),
    _normed("lamb-phi", phi=(0.5, 1.0), trust_clip=2.0),
    _normed("lamb-clipped", max_grad_norm=0.5),
    _normed("lamb-sums", grad_averaging=False),
    _normed("lamb-cautious", cautious_wd=True),
    _normed("lamb-maximize", maximize=True),
    _adafactor("default"),
    _adafactor("relative", lr=None, relative_step=True, scale_parameter=True),
    _adafactor(
        "warmup", lr=None, relative_step=True, warmup_init=True, scale_parameter=True, eps=(1e-30, 1e4)
    ),
    _adafactor("scaled", scale_parameter=True, eps=(1e-30, 0.05)),
    _adafactor("beta1", beta1=0.75),
    _adafactor("clipped", clip_threshold=0.5, decay_rate=-0.5, eps=(0.25, 1e-3)),
    _adafactor("cautious", cautious_wd=True, beta1=0.75),
    _adafactor("maximize", maximize=True),
    _normed("came-default"),
    _normed("came-betas", betas=(0.5, 0.75, 0.875), eps=(0.25, 0.0625), clip_threshold=0.5),
    _normed("came-no-decay", weight_decay=0.0),
    _normed("came-cautious", cautious_wd=True),
    _normed("came-maximize", maximize=True),
    _normed("came-mixed", *NORMED_MIXED),
)
