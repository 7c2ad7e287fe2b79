"""State dicts of other packages' optimizers, as the classes of this package load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from oxidion._core.base import OxOptimizer

State = dict[str, Any]
Group = dict[str, Any]


class Source(NamedTuple):
    """A package's format.

    Attributes:
        algorithm: what its optimizer is called here; None where groups say it.
        needs: keys that each of its groups has.
        group: makes one of its groups one of ours.
        state: makes the state of a parameter ours, given our group.
    """

    algorithm: str | None
    needs: tuple[str, ...]
    group: Callable[[Group], Group]
    state: Callable[[State, Group], State]


def import_state_dict(
    state_dict: Mapping[str, Any], source: str, optimizer: OxOptimizer | None = None
) -> dict[str, Any]:
    """A state dict for the class of this package that does what the other package's optimizer does.

    Training goes on where it stood: states, step counters and hyper-parameters are taken over; nothing of
    ``state_dict`` is changed or shared. Averages that the class here keeps besides are computed.

    Args:
        state_dict: of the other optimizer: ``{"state": ..., "param_groups": ...}``.
        source: "hf-adafactor" (``transformers.Adafactor``, fairseq's) for `Adafactor`; "came-pytorch" for
            `CAME`; "galore-torch" (``GaLoreAdamW``) for `GaLoreAdamW`; "colossalai-lamb" (``Lamb``,
            ``DistributedLamb``) for `Lamb`; "torch-muon" (``torch.optim.Muon``) and "keller-jordan-muon"
            (``SingleDeviceMuon``, ``SingleDeviceMuonWithAuxAdam``; of ``Muon`` and ``MuonWithAuxAdam`` what
            a process has) for `Muon`; "microsoft-dion" for its namesakes.
        optimizer: where the result will be loaded. Its groups give the keys that the other package does not
            know, and its parameters' shapes are compared with the states'.

    Returns:
        What ``load_state_dict`` of the class takes.

    Raises:
        ValueError: for an unknown source, for groups and states without the keys that the source writes, for
            settings that no class here has, and for states that do not belong to ``optimizer``.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}")
    form = SOURCES[source]
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"a {source} state dict has 'state' and 'param_groups', got {got}")
    states: dict[Any, State] = {}
    groups = []
    for number, theirs in enumerate(state_dict["param_groups"]):
        _require(theirs, ("params", *form.needs), f"group {number}", source)
        group = form.group(dict(theirs))
        group["algorithm"] = form.algorithm or group["algorithm"]
        for place, key in enumerate(theirs["params"]):
            if not state_dict["state"].get(key):
                continue  # no gradient yet
            name = theirs.get("param_names", {place: f"parameter {place} of group {number}"})[place]
            try:
                states[key] = _own(form.state(dict(state_dict["state"][key]), group))
            except ValueError as error:
                raise ValueError(f"{name} of a {source} state dict: {error}") from None
        counts = [float(states[key]["step"]) for key in theirs["params"] if "step" in states.get(key, {})]
        group.setdefault("step", int(max(counts, default=0.0)))
        groups.append(group)
    result = {"state": states, "param_groups": groups}
    return result if optimizer is None else _fitted(result, source, optimizer)


def _require(held: Mapping[str, Any], keys: tuple[str, ...], what: str, source: str) -> None:
    missing = [key for key in keys if key not in held]
    if missing:
        raise ValueError(f"{what} of a {source} state dict must have {missing}, it has {sorted(held)}")


def _own(state: State) -> State:
    """Tensors of its own, and the counter as the classes here keep it."""
    made = {
        key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }
    if "step" in made:
        made["step"] = torch.tensor(float(made["step"]), dtype=torch.float32)
    return made


def _fitted(result: dict[str, Any], source: str, optimizer: OxOptimizer) -> dict[str, Any]:
    """The state dict with the keys of the optimizer's groups that it lacks, if its shapes fit."""
    groups, own = result["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in side] for side in (groups, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the {source} state dict has groups of {sizes[0]} parameters, the optimizer {sizes[1]}"
        )
    for group, target in zip(groups, own, strict=True):
        if group["algorithm"] not in (type(optimizer).ALGORITHM, target["algorithm"]):
            raise ValueError(
                f"a {source} state dict is for algorithm {group['algorithm']!r}, the optimizer is "
                f"{type(optimizer).__name__}"
            )
        for key, param in zip(group["params"], target["params"], strict=True):
            for name, value in result["state"].get(key, {}).items():
                wanted = _shape(name, tuple(param.shape), group)
                if wanted is not None and tuple(value.shape) != wanted:
                    raise ValueError(
                        f"{name} of a parameter of shape {tuple(param.shape)} must have shape {wanted}, the "
                        f"{source} state dict has {tuple(value.shape)}"
                    )
    merged = [
        {**{key: value for key, value in target.items() if key != "params"}, **group}
        for group, target in zip(groups, own, strict=True)
    ]
    return {**result, "param_groups": merged}


def _shape(name: str, param: tuple[int, ...], group: Group) -> tuple[int, ...] | None:
    """The shape of a state where the parameter's tells it."""
    if name.endswith(("_row", "_col", "_mean")):
        return {"row": param[:-1], "col": (*param[:-2], *param[-1:]), "mean": param[:-2]}[name.split("_")[-1]]
    projected = group.get("rank") is not None
    whole = ("momentum", "variance", "exp_avg", "exp_avg_sq")
    return param if name in whole and not projected else None


# ------------------------------------------------------------------ formats


def _pick(state: State, *keys: str) -> State:
    """The counter and the tensors of these names."""
    tensors = [key for key in keys if key == "step" or isinstance(state.get(key), Tensor)]
    if tensors != list(keys) or not set(keys) <= set(state):
        raise ValueError(f"expected {list(keys)}, got {sorted(state)}")
    return {key: state[key] for key in keys}


def _factored(state: State, *prefixes: str) -> State:
    """The factors in float32 at least, with the mean of each matrix, which is the mean of its row factor."""
    made = _pick(state, "step", *(f"{prefix}_{part}" for prefix in prefixes for part in ("row", "col")))
    for prefix in prefixes:
        for part in ("row", "col"):
            value = made[f"{prefix}_{part}"]
            made[f"{prefix}_{part}"] = value.to(torch.promote_types(value.dtype, torch.float32))
        made[f"{prefix}_mean"] = made[f"{prefix}_row"].mean(dim=-1)
    return made


def _adafactor_group(group: Group) -> Group:
    # A schedule that only shows the relative step writes it into lr, which nothing reads there.
    return {**group, "lr": None} if group["relative_step"] else group


def _adafactor_state(state: State, group: Group) -> State:
    made = _pick(state, "step", "exp_avg_sq") if "exp_avg_sq" in state else _factored(state, "exp_avg_sq")
    return {**made, **(_pick(state, "exp_avg") if group["beta1"] is not None else {})}


def _came_state(state: State, _group: Group) -> State:
    if "exp_avg_sq" in state:
        return _pick(state, *_MOMENTS)
    return {**_pick(state, "exp_avg"), **_factored(state, "exp_avg_sq", "exp_avg_res")}


def _galore_group(group: Group) -> Group:
    if not group.pop("correct_bias"):
        raise ValueError("correct_bias=False of a galore-torch state dict has no counterpart")
    if "rank" in group:
        _require(group, ("update_proj_gap", "scale", "proj_type"), "a group with 'rank'", "galore-torch")
    group.setdefault("rank", None)
    return {**group, "decay_order": "galore", "state_bits": 32}


def _galore_state(state: State, group: Group) -> State:
    made = _pick(state, *_MOMENTS)
    if group["rank"] is None:
        return made
    basis = getattr(state.get("projector"), "ortho_matrix", None)
    kind = getattr(state.get("projector"), "proj_type", None)
    if basis is None or kind is None:
        raise ValueError(f"expected 'projector' with ortho_matrix and proj_type, got {sorted(state)}")
    if kind == "full":
        left, right = basis
        return {**made, "proj": left.contiguous(), "proj_right": right.mT.contiguous()}
    # The basis of rows is (m, r), that of columns (r, n).
    rows, cols = basis.shape
    if rows == cols:
        raise ValueError(
            f"a projection of rank {rows} on a side of {cols} projects nothing; there is no such state"
        )
    return {**made, "proj": (basis if rows > cols else basis.mT).contiguous()}


def _lamb_group(group: Group) -> Group:
    corrected = group.pop("bias_correction", False)
    return {**group, "debias": "step" if corrected else "none", "always_adapt": True}


def _torch_muon_group(group: Group) -> Group:
    rename = {"momentum": "mu", "eps": "epsilon"}
    made = {rename.get(key, key): value for key, value in group.items()}
    made["adjust_lr"] = made.pop("adjust_lr_fn") or "original"
    made["ns_coefficients"] = [tuple(made["ns_coefficients"])]
    return made


def _torch_muon_state(state: State, group: Group) -> State:
    """An average of gradients there, their decayed sum here."""
    share = _share_taken_in(group["mu"])
    return {"momentum": _pick(state, "momentum_buffer")["momentum_buffer"] / share}


def _share_taken_in(mu: float) -> float:
    """Share of a gradient that an average takes in."""
    if mu == 1.0:
        raise ValueError("a momentum of 1 never takes a gradient in")
    return 1.0 - mu


def _keller_jordan_group(group: Group) -> Group:
    muon = group.pop("use_muon", True)
    _require(group, ("momentum",) if muon else ("betas", "eps"), "a group", "keller-jordan-muon")
    if not muon:
        return {"epsilon": group.pop("eps"), "algorithm": "adamw", **group}
    mu = group.pop("momentum")
    fixed = {"nesterov": True, "adjust_lr": "original", "ns_coefficients": "keller_jordan"}
    # Added to the norm of an average there, of a sum here.
    epsilon = 1e-7 / _share_taken_in(mu)
    return {"mu": mu, "epsilon": epsilon, "algorithm": "muon", **fixed, **group}


def _keller_jordan_state(state: State, group: Group) -> State:
    if group["algorithm"] == "muon":
        return _torch_muon_state(state, group)
    made = _pick(state, *_MOMENTS)
    step = torch.tensor(float(made["step"]), dtype=torch.float32)
    return {"momentum": made["exp_avg"], "variance": made["exp_avg_sq"], "step_dev": step}


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_HF_KEYS = ("lr", "eps", "clip_threshold", "decay_rate", "beta1", "weight_decay", "scale_parameter")
_TORCH_MUON_KEYS = (
    "lr",
    "weight_decay",
    "momentum",
    "nesterov",
    "ns_coefficients",
    "eps",
    "ns_steps",
    "adjust_lr_fn",
)
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay")

SOURCES: dict[str, Source] = {
    "hf-adafactor": Source(
        "adafactor", (*_HF_KEYS, "relative_step", "warmup_init"), _adafactor_group, _adafactor_state
    ),
    "came-pytorch": Source("came", (*_ADAM_KEYS, "clip_threshold"), dict, _came_state),
    "galore-torch": Source("galore_adamw", (*_ADAM_KEYS, "correct_bias"), _galore_group, _galore_state),
    "colossalai-lamb": Source("lamb", _ADAM_KEYS, _lamb_group, lambda state, _: _pick(state, *_MOMENTS)),
    "torch-muon": Source("muon", _TORCH_MUON_KEYS, _torch_muon_group, _torch_muon_state),
    "keller-jordan-muon": Source(None, ("lr", "weight_decay"), _keller_jordan_group, _keller_jordan_state),
    "microsoft-dion": Source(None, ("algorithm", "lr"), dict, lambda state, _: state),
}
"""The formats, by the name that `import_state_dict` takes."""
