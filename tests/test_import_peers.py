"""Checkpoints that other packages write themselves: they train, the import goes on, and both go on together.

The packages are not among those that the tests need. `benchmarks/peers.py` installs them into an environment
of their own and says where it is:

    python benchmarks/peers.py ~/.cache/oxidion-peers
    OXIDION_PEERS=~/.cache/oxidion-peers/packages python -m pytest tests/test_import_peers.py

Without the variable those that this Python can import are compared with, and the others are skipped. What is
noted at the limits was measured with transformers 5.23, came-pytorch 0.1.3 and galore-torch 1.0.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict
from support.asserts import update_relative_error
from support.inputs import Shape, gaussian

BEFORE, AFTER = 3, 3
SHAPES: tuple[Shape, ...] = ((16, 12), (12, 16), (7, 5), (3, 6, 10), (13,), ())
MATRICES: tuple[Shape, ...] = ((16, 12), (12, 16), (9, 9))

MANUAL = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
ADAFACTOR: dict[str, dict[str, Any]] = {
    "relative": {},
    "warm-up": {"warmup_init": True, "weight_decay": 0.125, "clip_threshold": 0.5},
    "manual": {**MANUAL, "beta1": 0.9, "weight_decay": 0.125, "decay_rate": -0.5},
    "scaled": {**MANUAL, "scale_parameter": True, "eps": (1e-12, 0.05)},
}
CAME: dict[str, dict[str, Any]] = {
    "default": {"lr": 0.01},
    "other": {"lr": 0.02, "weight_decay": 0.125, "betas": (0.8, 0.99, 0.999), "clip_threshold": 0.5},
}
# What galore-torch adds to the denominator counts 1 / sqrt(1 - beta2^t) times as much as here: so little that
# it does not show.
GALORE = {"lr": 0.01, "eps": 1e-14, "weight_decay": 0.125, "betas": (0.9, 0.99)}
TABLE = [
    *(("hf-adafactor", name, settings, 0) for name, settings in ADAFACTOR.items()),
    *(("came-pytorch", name, settings, 0) for name, settings in CAME.items()),
    *(
        ("galore-torch", kind, GALORE, gap)
        for kind in ("std", "reverse_std", "left", "right", "full")
        for gap in (100, 2)
    ),
]
# By type, whether it is GaLore, and whether that decomposes gradients after the import, which galore-torch
# does in float32 whatever the parameters are. Adam divides projected gradients by their own size, small ones
# with the rounding of large ones. Measured: 8e-7, 1.2e-5, 2e-5, 3e-15, 7e-14, 2e-5.
LIMITS = {
    (torch.float32, False, False): 5e-6,
    (torch.float32, True, False): 1e-4,
    (torch.float32, True, True): 1e-4,
    (torch.float64, False, False): 1e-12,
    (torch.float64, True, False): 1e-10,
    (torch.float64, True, True): 1e-4,
}
PEERS = {
    "hf-adafactor": ("transformers.optimization", "Adafactor", oxidion.Adafactor),
    "came-pytorch": ("came_pytorch", "CAME", oxidion.CAME),
    "galore-torch": ("galore_torch", "GaLoreAdamW", oxidion.GaLoreAdamW),
}


def peer_of(source: str, monkeypatch: pytest.MonkeyPatch) -> type:
    """The class of the other package; skips where it cannot be imported."""
    module, name, _ = PEERS[source]
    if folder := os.environ.get("OXIDION_PEERS"):
        # Behind this environment's own packages, which are the same ones for both.
        monkeypatch.setattr(sys, "path", [*sys.path, str(Path(folder).expanduser().resolve())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip(
            module, exc_type=ImportError, reason=f"no {module.partition('.')[0]}: see OXIDION_PEERS above"
        )
    peer: type = getattr(found, name)
    return peer


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients that are the same for all with these parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, param in enumerate(params):
        param.grad = gaussian(tuple(param.shape), 2, number, index).to(param.dtype)
    optimizer.step()


def through_a_file(state_dict: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file, weights_only=False)
    return loaded


def groups_of(source: str, params: list[nn.Parameter], low_rank: dict[str, Any]) -> list[dict[str, Any]]:
    """One group; of GaLore one of matrices and one of the vector."""
    if source != "galore-torch":
        return [{"params": params}]
    return [{"params": params[:-1], **low_rank}, {"params": params[-1:]}]


def furthest(params: list[nn.Parameter], expected: list[nn.Parameter], start: list[Tensor]) -> float:
    """The largest difference of an update from what was expected, relative to its norm."""
    rows = zip(params, expected, start, strict=True)
    return max(update_relative_error(p, old, e.detach().double() - old.double()) for p, e, old in rows)


@pytest.mark.parametrize(
    ("source", "name", "settings", "gap"),
    TABLE,
    ids=[f"{s}-{n}-{g}".removesuffix("-0") for s, n, _, g in TABLE],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_imported_state_goes_on_as_the_package_that_wrote_it(
    source: str,
    name: str,
    settings: dict[str, Any],
    gap: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peer, cls = peer_of(source, monkeypatch), PEERS[source][2]
    galore = source == "galore-torch"
    shapes = (*MATRICES, (6,)) if galore else SHAPES
    low_rank = {"rank": 4, "scale": 0.25, "proj_type": name, "update_proj_gap": gap}
    theirs = [nn.Parameter(gaussian(s, 1, i, scale=0.1).to(dtype)) for i, s in enumerate(shapes)]
    quiet = {"no_deprecation_warning": True} if galore else {}
    other: Any = peer(groups_of(source, theirs, low_rank), **settings, **quiet)
    for number in range(BEFORE):
        step(other, number)

    # All that it is given itself: which parameters are projected, and to take vectors with torch's signs.
    start = [param.detach().clone() for param in theirs]
    ours, fresh = ([nn.Parameter(value.clone()) for value in start] for _ in range(2))
    needs: dict[str, Any] = {
        "hf-adafactor": {},
        "came-pytorch": {"lr": 1.0},
        "galore-torch": {"svd": "exact"},
    }
    optimizer: Any = cls(groups_of(source, ours, {"rank": 4}), **needs[source])
    saved = through_a_file(other.state_dict())
    optimizer.load_state_dict(import_state_dict(saved, source, optimizer=optimizer))
    for mine, held in zip(optimizer.param_groups, other.param_groups, strict=True):
        known = held.keys() - {"params", "correct_bias"}
        assert {"lr", "eps", "weight_decay"} <= known
        assert {key: mine[key] for key in known} == {key: held[key] for key in known}
        assert mine["step"] == BEFORE

    # The same settings without the states.
    late = {"decay_order": "galore", "state_bits": 32, "svd": "exact"} if galore else {}
    without: Any = cls(groups_of(source, fresh, low_rank), **settings, **late)
    limit = LIMITS[dtype, galore, gap < BEFORE + AFTER and galore]
    for number in range(BEFORE, BEFORE + AFTER):
        for each in (other, optimizer, without):
            step(each, number)
        assert furthest(ours, theirs, start) <= limit
    assert furthest(fresh, theirs, start) >= 0.05
    for mine, other_param in zip(ours, theirs, strict=True):
        assert float(optimizer.state[mine]["step"]) == other.state[other_param]["step"] == BEFORE + AFTER
