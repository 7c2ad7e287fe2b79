"""What the ranks do with parts of matrices that are plain tensors with Megatron's attributes."""

from __future__ import annotations

import importlib
import os
import sys
import types
import typing
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import typing_extensions
from torch import Tensor, nn

import oxidion
from oxidion.compat import megatron
from support.inputs import gaussian

SHAPES = ((8, 6), (6, 12), (5, 7))
DIMS = (0, 1, -1)
SETTINGS = {"lr": 0.05, "weight_decay": 0.1, "nesterov": True, "momentum": 0.9}


def whole(index: int, *more: int) -> Tensor:
    """A matrix that all ranks know."""
    return gaussian(SHAPES[index], 31, index, *more)


def part(value: Tensor, index: int) -> Tensor:
    """What this rank has of it."""
    if DIMS[index] < 0:
        return value.clone()
    return value.chunk(dist.get_world_size(), DIMS[index])[dist.get_rank()].clone()


def mine() -> list[nn.Parameter]:
    """The parts of this rank, with the attributes."""
    params = [nn.Parameter(part(whole(index), index)) for index in range(len(SHAPES))]
    for param, dim in zip(params, DIMS, strict=True):
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = dim >= 0, dim, 1
    return params


def made(params: list[nn.Parameter], tp_mode: str) -> Any:
    """Muon as an entry of Megatron's registry makes it."""
    groups = types.SimpleNamespace(tp=dist.group.WORLD, expt_tp=None)
    layout = megatron.Layout(tp_mode, groups=groups)
    keys = {"wd_mult": 1.0, "is_expert_parallel": False}
    return megatron._build(oxidion.Muon, [{"params": params, **keys}], layout=layout, **SETTINGS)


def expected(steps: int) -> list[Tensor]:
    """Whole matrices after as many steps of one process."""
    params = [nn.Parameter(whole(index)) for index in range(len(SHAPES))]
    optimizer = oxidion.Muon(params, **SETTINGS)
    for step in range(steps):
        for index, param in enumerate(params):
            param.grad = whole(index, step)
        optimizer.step()
    return [param.detach() for param in params]


def give(params: list[nn.Parameter], step: int) -> None:
    """Gradients of a step."""
    for index, param in enumerate(params):
        param.grad = part(whole(index, step), index).to(param.dtype)


def error(params: list[nn.Parameter], steps: int) -> float:
    """The largest distance from what one process has."""
    rows = zip(params, expected(steps), range(len(SHAPES)), strict=True)
    return max(float((param.detach() - part(value, index)).abs().max()) for param, value, index in rows)


def train(tp_mode: str) -> tuple[float, bool, bool, list[tuple[int, ...]]]:
    """Three steps: the error; whether all is plain as before, and planned once; the shapes of states."""
    params = mine()
    optimizer = made(params, tp_mode)
    sessions = set()
    for step in range(3):
        give(params, step)
        optimizer.step()
        sessions.add(id(optimizer._session))
    held = optimizer.param_groups[0]["params"]
    states = [optimizer.state[param]["momentum"] for param in params]
    plain = all(one is other for one, other in zip(held, params, strict=True)) and all(
        type(value) is Tensor for value in states
    )
    return error(params, 3), plain, len(sessions) == 1, [tuple(value.shape) for value in states]


def resume() -> tuple[float, float, float]:
    """Errors after a state dict went into new parameters, after replaced ones, and what `verify` finds."""
    params = mine()
    optimizer = made(params, "distributed")
    for step in range(2):
        give(params, step)
        optimizer.step()
    others = mine()
    for other, param in zip(others, params, strict=True):
        other.data.copy_(param.data)
    restored = made(others, "distributed")
    megatron._init_state(restored)
    restored.load_state_dict(optimizer.state_dict())
    give(others, 2)
    found = max(row["update_error"] for row in restored.verify())
    assert all(row["update_rms"] > 0 for row in restored.metrics())
    assert [tuple(row["shape"]) for row in restored.explain()] == list(SHAPES)
    restored.step()
    after = error(others, 3)
    # As Megatron's optimizer in float16 does: copies take the places of the parameters.
    copies = [param.detach().clone() for param in params]
    for copy, param in zip(copies, params, strict=True):
        for key in ("tensor_model_parallel", "partition_dim", "partition_stride"):
            setattr(copy, key, getattr(param, key))
        optimizer.state[copy] = optimizer.state.pop(param)
    optimizer.param_groups[0]["params"][:] = copies
    give(copies, 2)
    optimizer.step()
    return after, error(copies, 3), found


def differ() -> str:
    """What is said where ranks would not take the same step."""
    params = mine()
    optimizer = made(params, "duplicated")
    give(params, 0)
    if dist.get_rank():
        params[0].grad = None
    try:
        optimizer.step()
    except oxidion.PlanMismatch as mismatch:
        return str(mismatch)
    return ""


def registry() -> tuple[Any, str]:
    """Megatron's registry of optimizers, or why it cannot be had."""
    if folder := os.environ.get("OXIDION_PEERS"):
        sys.path.append(str(Path(folder).expanduser().resolve()))
    if not hasattr(typing, "override"):  # for which alone some of them need Python 3.12
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found: Any = importlib.import_module("megatron.core.optimizer.emerging_optimizers")
    except ImportError as error:
        return None, str(error)
    return found, "" if found.HAVE_EMERGING_OPTIMIZERS else "no Emerging-Optimizers"


MODEL = types.SimpleNamespace(num_attention_heads=2, num_query_groups=2, kv_channels=2)
"""What is read of the configuration of a model."""


def compare_with_megatron(tp_mode: str) -> tuple[float, str]:
    """Relative distance from what Megatron's own Muon makes of the same parts, or why it cannot be had."""
    entries, missing = registry()
    if missing:
        return 0.0, missing
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.process_groups_config import ProcessGroupCollection

    megatron.register("Muon", orth_dtype="float32")
    config = OptimizerConfig(
        lr=0.05,
        weight_decay=0.1,
        muon_split_qkv=False,
        muon_extra_scale_factor=0.2,
        muon_fp32_matmul_prec="highest",
        muon_tp_mode=tp_mode,
    )
    groups = ProcessGroupCollection(tp=dist.group.WORLD)
    model = types.SimpleNamespace(config=MODEL)
    both = []
    for name in ("muon", "oxidion_muon"):
        params = mine()
        for param in params:
            param.data = param.data.float()
        optimizer, _ = entries._create_emerging_optimizer(
            config, [{"params": params, "wd_mult": 1.0}], name, [model], groups
        )
        for step in range(3):
            give(params, step)
            optimizer.step()
        both.append(params)
    found = 0.0
    for theirs, ours, start in zip(*both, mine(), strict=True):
        moved = float((theirs.detach() - start.detach().float()).norm())
        found = max(found, float((theirs.detach() - ours.detach()).norm()) / moved)
    return found, ""


def layer_wise() -> tuple[float, list[int], str]:
    """Whole matrices that Megatron shares out over data parallelism: the error after its all-gather."""
    _, missing = registry()
    if missing:
        return 0.0, [], missing
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    names = ("tp", "mp", "pp", "expt_dp", "expt_tp", "tp_ep_pp")
    groups = ProcessGroupCollection(
        **dict.fromkeys(names, alone), dp=dist.group.WORLD, dp_cp=dist.group.WORLD
    )
    megatron.register("Muon", orth_dtype="float32")
    config = OptimizerConfig(
        optimizer="oxidion_muon",
        lr=0.05,
        weight_decay=0.1,
        muon_split_qkv=False,
        muon_extra_scale_factor=0.2,
        use_layer_wise_distributed_optimizer=True,
    )
    shapes = [(8, 8)] * 4  # gloo gathers equal parts only
    models = [
        nn.ParameterList([gaussian(shape, 37, i).float() for i, shape in enumerate(shapes)]) for _ in "ab"
    ]
    models[0].config = MODEL
    made = get_megatron_optimizer(config, models[:1], pg_collection=groups, use_gloo_process_groups=False)
    one = {**SETTINGS, "nesterov": False, "momentum": 0.95, "adjust_lr": "match_rms_adamw"}
    rows = importlib.import_module("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    one |= {"ns_coefficients": rows._COEFFICIENT_SETS["quintic"], "orth_dtype": "float32"}
    alike = oxidion.Muon(models[1].parameters(), **one)
    for step in range(2):
        for model in models:
            for index, param in enumerate(model):
                param.grad = gaussian(shapes[index], 41, index, step).float()
        for optimizer in made.chained_optimizers:
            optimizer.step()
        made.allgather_params()
        alike.step()
    held = [len(group["params"]) for group in made.param_groups]
    return max(float((a - b).detach().abs().max()) for a, b in zip(*models, strict=True)), held, ""
