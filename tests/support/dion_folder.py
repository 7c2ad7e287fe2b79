"""Checkpoints in the layout of microsoft/dion's training script, and naive float64 steps from them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from oxidion._reference.dion import dion_step
from oxidion._reference.registry import REFERENCE

from .inputs import gaussian

STEP = 200
RATE, SCALAR_RATE = 0.015625, 0.00390625  # float32 has them
SHARED = {"mu": 0.9, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.01, "epsilon": 1e-8, "step": STEP}
KEYS: dict[str, dict[str, Any]] = {
    "Dion": {**SHARED, "rank_fraction": 0.5, "rank_multiple_of": 1, "oversample": 1.25},
    "Muon": {
        **SHARED,
        "cautious_wd": False,
        "nesterov": True,
        "flatten": False,
        "adjust_lr": "spectral_norm",
    },
}
"""What groups of the two classes have there, in addition to ``algorithm``, ``lr`` and ``params``."""
EXTRA = {"step": STEP, "wandb_id": None, "train_loader": {"current_shard_rank_0": 3}}


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of parameters by their names."""
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def tensors(
    shapes: dict[str, tuple[int, ...]], kind: str, scalar: str, side: str
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """Weights and states of a run that has taken some steps.

    Args:
        shapes: of parameters by their names.
        kind: "Dion" or "Muon".
        scalar: the algorithm of vectors, "adamw" or "lion".
        side: to which Q belongs: "short", or "rows" as where rows are sharded.
    """
    weights, states = {}, {}
    for at, (name, shape) in enumerate(shapes.items()):
        weights[name] = gaussian(shape, at, 0, scale=0.3)
        own = {"momentum": gaussian(shape, at, 1, scale=0.1)}
        if len(shape) == 2 and kind == "Dion":
            length = shape[0] if side == "rows" else min(shape)
            q = gaussian((length, -(-min(shape) // 2)), at, 2)
            own["Q"] = q / q.norm(dim=0)
        if len(shape) == 1 and scalar == "adamw":
            own["variance"] = gaussian(shape, at, 3, scale=0.1).square()
            if kind == "Muon":
                own["step_dev"] = torch.tensor(float(STEP))
        states[name] = own
    return weights, states


def groups_of(shapes: dict[str, tuple[int, ...]], kind: str, scalar: str) -> list[dict[str, Any]]:
    """The groups: matrices, and vectors with a ``betas`` that no optimizer there reads."""
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    vectors = [name for name, shape in shapes.items() if len(shape) == 1]
    lr: Callable[[float], Any] = torch.tensor if kind == "Muon" else float
    return [
        {"algorithm": kind.lower(), **KEYS[kind], "lr": lr(RATE), "params": matrices},
        {"algorithm": scalar, "betas": (0.7, 0.8), **KEYS[kind], "lr": lr(SCALAR_RATE), "params": vectors},
    ]


def write(
    folder: Path | str,
    model: nn.Module,
    kind: str,
    scalar: str,
    side: str = "short",
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    change: Callable[[dict[str, Any]], None] = lambda _state: None,
) -> None:
    """Writes the folder; ``place`` makes a tensor one of the ranks, ``change`` spoils what is written."""
    shapes = shapes_of(model)
    weights, states = tensors(shapes, kind, scalar, side)
    state = {
        "model": {name: place(value) for name, value in weights.items()},
        "optimizer": {
            "state": {
                name: {key: place(value) if value.ndim else value for key, value in own.items()}
                for name, own in states.items()
            },
            "param_groups": groups_of(shapes, kind, scalar),
        },
        **copy.deepcopy(EXTRA),
    }
    change(state)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder)


def adamw(weight: Tensor, grad: Tensor, kept: dict[str, Tensor], group: dict[str, Any], step: int) -> None:
    """AdamW, with the count of the group."""
    kept["momentum"].lerp_(grad, 1 - group["beta1"])
    kept["variance"].lerp_(grad.square(), 1 - group["beta2"])
    first = kept["momentum"] / (1 - group["beta1"] ** step)
    second = kept["variance"] / (1 - group["beta2"] ** step)
    weight.mul_(1 - float(group["lr"]) * group["weight_decay"])
    weight.sub_(float(group["lr"]) * first / (second.sqrt() + group["epsilon"]))


def lion(weight: Tensor, grad: Tensor, kept: dict[str, Tensor], group: dict[str, Any]) -> None:
    """Lion."""
    sign = torch.lerp(kept["momentum"], grad, 1 - group["beta1"]).sign()
    weight.mul_(1 - float(group["lr"]) * group["weight_decay"]).sub_(float(group["lr"]) * sign)
    kept["momentum"].lerp_(grad, 1 - group["beta2"])


def go_on(
    model: nn.Module,
    kind: str,
    scalar: str,
    side: str,
    settings: dict[str, Any],
    batches: list[tuple[Tensor, Tensor]],
) -> list[Tensor]:
    """The weights after naive steps from where the checkpoint stands; ``settings`` are of Muon's matrices."""
    shapes = shapes_of(model)
    weights, states = tensors(shapes, kind, scalar, side)
    groups = groups_of(shapes, kind, scalar)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(weights[name])
    for count, (x, y) in enumerate(batches, STEP + 1):
        model.zero_grad()
        (model(x.double()) - y).square().mean().backward()
        with torch.no_grad():
            for name, param in model.named_parameters():
                assert param.grad is not None
                group = groups[0 if param.ndim == 2 else 1]
                own, rate = states[name], {"lr": float(group["lr"])}
                if param.ndim == 2 and kind == "Dion":
                    is_turned = own["Q"].shape[0] == param.shape[0] and (
                        side == "rows" or param.shape[0] < param.shape[1]
                    )
                    dion_step(param, param.grad, own, {**group, **rate, "transposed": is_turned})
                elif param.ndim == 2:
                    REFERENCE["muon"](param, param.grad, own, {**settings, **group, **rate})
                elif scalar == "adamw":
                    adamw(param, param.grad, own, group, count)
                else:
                    lion(param, param.grad, own, group)
    return [param.detach() for param in model.parameters()]
