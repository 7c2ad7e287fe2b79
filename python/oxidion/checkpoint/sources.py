"""State dicts of other packages' optimizers, as the classes of this package load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from oxidion._core import foreign, masters, validate
from oxidion._core.schema import COMMON
from oxidion._core.validate import Field, names_of

if TYPE_CHECKING:
    from oxidion._core.base import OxOptimizer

State = dict[str, Any]
Group = dict[str, Any]


class Source(NamedTuple):
    """A package's format.

    Attributes:
        algorithm: what its optimizer is called here; None where groups say it.
        needs: keys that each of its groups has, and what they are.
        group: makes one of its groups one of ours.
        state: makes the state of a parameter ours, given our group.
        may_have: keys that some of its groups have, if ``group`` or ``state`` reads them.
        entries: keys of a parameter's state that are read.
    """

    algorithm: str | None
    needs: Mapping[str, Field]
    group: Callable[[Group], Group]
    state: Callable[[State, Group], State]
    may_have: Mapping[str, Field]
    entries: Mapping[str, Field]


def import_state_dict(
    state_dict: Mapping[str, Any], source: str, optimizer: OxOptimizer | None = None
) -> dict[str, Any]:
    """A state dict for the class of this package that does what the other package's optimizer does.

    Training goes on where it stood: states, step counters and hyper-parameters are taken over; nothing of
    ``state_dict`` is changed or shared. Averages that the class here keeps besides are computed. The float32
    weight of a bfloat16 parameter under "master", "master_weight" or "master_param", of any source, is what
    ``master_weights=True`` goes on from.

    Args:
        state_dict: of the other optimizer: ``{"state": ..., "param_groups": ...}``.
        source: "hf-adafactor" (``transformers.Adafactor``, fairseq's) for `Adafactor`; "came-pytorch" for
            `CAME`; "galore-torch" (``GaLoreAdamW``) for `GaLoreAdamW`; "colossalai-lamb" (``Lamb``,
            ``DistributedLamb``) for `Lamb`; "fused-adam" (``FusedAdam`` of apex and Transformer Engine) for
            `AdamW`; "torch-muon" (``torch.optim.Muon``) and "keller-jordan-muon"
            (``SingleDeviceMuon``, ``SingleDeviceMuonWithAuxAdam``; of ``Muon`` and ``MuonWithAuxAdam`` what
            a process has) for `Muon`; "soap" (``SOAP`` of the authors, of pytorch_optimizer and of
            Emerging-Optimizers) for `SOAP`; "microsoft-dion" for its namesakes.
        optimizer: where the result will be loaded. Its groups give the keys that the other package does not
            know, and its parameters' shapes are compared with the states'.

    Returns:
        What ``load_state_dict`` of the class takes.

    Raises:
        ValueError: for an unknown source, for groups and states without the keys and the values that the
            source writes, for settings that no class here has, and for states that do not belong to
            ``optimizer``.
    """
    if not isinstance(source, str) or source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(map(repr, SOURCES))}, got {source!r}")
    form = SOURCES[source]
    entries = {**form.entries, **dict.fromkeys(_MASTERS, foreign.MASTERS)}
    state_dict = foreign.check(state_dict, source, form.needs, form.may_have, entries)
    states: dict[Any, State] = {}
    weights: dict[Any, Tensor] = {}
    groups = []
    for number, theirs in enumerate(state_dict["param_groups"]):
        try:
            group = form.group({**theirs, "params": list(theirs["params"])})
        except ValueError as error:
            raise ValueError(f"group {number} of a {source} state dict: {error}") from None
        group["algorithm"] = form.algorithm or group["algorithm"]
        for key, name in zip(theirs["params"], names_of(theirs, number), strict=True):
            if not state_dict["state"].get(key):
                continue  # no gradient yet
            try:
                held = dict(state_dict["state"][key])
                found = [held.pop(name) for name in _MASTERS if held.get(name) is not None]
                states[key] = _own(form.state(held, group))
                for weights[key] in found[:1]:
                    states[key][masters.KEY] = masters.remainder(weights[key])
            except ValueError as error:
                raise ValueError(f"{name} of a {source} state dict: {error}") from None
        counts = [float(states[key]["step"]) for key in theirs["params"] if "step" in states.get(key, {})]
        group.setdefault("step", int(max(counts, default=0.0)))
        groups.append(group)
    result = {"state": states, "param_groups": groups}
    return result if optimizer is None else _fitted(result, source, optimizer, weights)


def _own(state: State) -> State:
    """Tensors of its own, and the counter as the classes here keep it."""
    made = {
        key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in state.items()
    }
    if "step" in made:
        made["step"] = torch.tensor(float(made["step"]), dtype=torch.float32)
    return made


def _fitted(
    result: dict[str, Any], source: str, optimizer: OxOptimizer, weights: Mapping[Any, Tensor]
) -> dict[str, Any]:
    """The state dict with the keys of the optimizer's groups that it lacks, if its shapes and weights fit."""
    groups, own = result["param_groups"], optimizer.param_groups
    sizes = [[len(group["params"]) for group in side] for side in (groups, own)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the {source} state dict has groups of {sizes[0]} parameters, the optimizer {sizes[1]}"
        )
    for group, target in zip(groups, own, strict=True):
        if group["algorithm"] not in (type(optimizer)._ALGORITHM, target["algorithm"]):
            raise ValueError(
                f"a {source} state dict is for algorithm {group['algorithm']!r}, the optimizer is "
                f"{type(optimizer).__name__}"
            )
        for key, param, own_name in zip(group["params"], target["params"], names_of(target, 0), strict=True):
            if key in weights and not masters.fits(weights[key], param):
                raise ValueError(
                    f"{own_name}: the {source} state dict has a float32 weight that does not round to this "
                    "bfloat16 parameter: load the model's checkpoint before the optimizer's"
                )
            for name, value in result["state"].get(key, {}).items():
                wanted = _shape(name, tuple(param.shape), group)
                found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                if wanted is not None and found != wanted:
                    raise ValueError(
                        f"{name} of a parameter of shape {tuple(param.shape)} must have shape {wanted}, the "
                        f"{source} state dict has {found}"
                    )
    merged = [
        {**{k: v for k, v in target.items() if k not in ("params", *optimizer._words(target))}, **group}
        for group, target in zip(groups, own, strict=True)
    ]
    return {**result, "param_groups": merged}


def _shape(name: object, param: tuple[int, ...], group: Group) -> tuple[int, ...] | None:
    """Returns the shape of a state where the parameter's shape determines it."""
    if not isinstance(name, str):
        return None
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
        raise ValueError(f"expected {list(keys)}, got {foreign.listed(state)}")
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
        raise ValueError("correct_bias=False has no counterpart here")
    if "rank" in group:
        foreign.require(group, ("update_proj_gap", "scale", "proj_type"), "a group with 'rank'")
    group.setdefault("rank", None)
    return {**group, "decay_order": "galore", "state_bits": 32}


def _galore_state(state: State, group: Group) -> State:
    made = _pick(state, *_MOMENTS)
    if group["rank"] is None:
        return made
    projector = state.get("projector")
    if projector is None:
        raise ValueError(f"expected 'projector' with ortho_matrix and proj_type, got {foreign.listed(state)}")
    basis = projector.ortho_matrix
    if projector.proj_type == "full":
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
        raise ValueError("a momentum of 1 never takes a gradient in: it must be below 1")
    return 1.0 - mu


def _keller_jordan_group(group: Group) -> Group:
    muon = group.pop("use_muon", True)
    foreign.require(group, ("momentum",) if muon else ("betas", "eps"), f"a group with use_muon={muon}")
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


def _soap_group(group: Group) -> Group:
    """Of the authors' ``SOAP``, of pytorch_optimizer's, or of Emerging-Optimizers', which has no limit."""
    if not {"max_precond_dim", "max_precondition_dim", "precondition_frequency"} & group.keys():
        return _emerging_soap_group(group)
    theirs = "max_precondition_dim" in group
    limit = "max_precondition_dim" if theirs else "max_precond_dim"
    foreign.require(group, ("shampoo_beta", "precondition_frequency", limit), f"a group with {limit!r}")
    for key in ("merge_dims", "precondition_1d"):
        if group.pop(key, False):
            raise ValueError(f"{key}=True cannot be taken over")
    if "normalize_gradient" in group:
        group["normalize_grads"] = group.pop("normalize_gradient")
    return {
        **group,
        "shampoo_beta": _shampoo_beta(group),
        "max_precondition_dim": group.pop(limit),
        "decay_order": "galore",
    }


def _shampoo_beta(group: Group) -> float | None:
    """The decay rate of factors; a negative one is the second of ``betas``, as None is."""
    beta: float | None = group.pop("shampoo_beta", None)
    return None if beta is None or beta < 0 else beta


def _emerging_soap_group(group: Group) -> Group:
    """New bases in every step, of all sides; its switches are no group keys and have their defaults."""
    fixed = {"sides": "both", "merge_dims": False, "normalize_grads": False}
    return {
        **group,
        "shampoo_beta": _shampoo_beta(group),
        "precondition_frequency": 1,
        "max_precondition_dim": 2**31,
        "correct_bias": True,
        "decay_order": "torch",
        **fixed,
    }


def _soap_state(state: State, group: Group) -> State:
    """Factors and bases under names of their own, and the first moment in the frame of the parameter."""
    if "GG" not in state and {"L", "R", "Q_L", "Q_R"} & state.keys():
        return _emerging_soap_state(state)
    # pytorch_optimizer counts gradients by group. The authors do by parameter and without the first one, and
    # have the first moment in the bases.
    is_turned = "step" in state
    step = float(state["step"]) + 1.0 if is_turned else group.get("step")
    if step is None:
        raise ValueError(f"expected 'step' in the state or in its group, got {foreign.listed(state)}")
    made = _pick({**state, "step": step}, *_MOMENTS)
    sides = made["exp_avg"].ndim
    factors, bases = state.get("GG"), state.get("Q")
    if factors is None or bases is None or len(factors) != sides or len(bases) != sides:
        raise ValueError(
            f"expected 'GG' and 'Q', lists of one entry for each dimension, got {foreign.listed(state)}"
        )
    if sides < 2:
        return made
    if sides > 2:
        raise ValueError(
            f"a tensor of {sides} dimensions has a basis for each there, and is a stack of matrices here; "
            "there is no such state"
        )
    found = {name: (factors[side], bases[side]) for side, name in enumerate(("L", "R")) if len(bases[side])}
    return _with_bases(made, found, is_turned=is_turned)


def _with_bases(made: State, found: dict[str, tuple[Tensor, Tensor]], *, is_turned: bool) -> State:
    """The state with the factors and bases of its sides; ``is_turned``: the first moment is in the bases."""
    moment = made["exp_avg"]
    for name, (factor, own) in found.items():
        length = moment.shape[0 if name == "L" else 1]
        for what, matrix in (("factor", factor), ("basis", own)):
            shape = tuple(matrix.shape) if isinstance(matrix, Tensor) else ()
            if shape != (length, length):
                raise ValueError(
                    f"the {what} of side {name} must have shape {(length, length)}, as exp_avg has "
                    f"{tuple(moment.shape)}, got {shape}"
                )
        basis = own.to(torch.promote_types(own.dtype, torch.float32))
        if is_turned:
            turn = basis.to(moment.dtype)
            moment = turn @ moment if name == "L" else moment @ turn.mT
        made |= {name: factor.to(basis.dtype), f"Q_{name}": basis}
        made["basis_step"] = torch.ones((), dtype=basis.dtype)
    return {**made, "exp_avg": moment}


def _emerging_soap_state(state: State) -> State:
    """Flat names; what was made before the first gradient is left out."""
    made = _pick(state, *_MOMENTS, "L", "R", "Q_L", "Q_R")
    if made["exp_avg"].ndim != 2:
        raise ValueError(f"exp_avg must be a matrix, got shape {tuple(made['exp_avg'].shape)}")
    moments = {key: made[key] for key in _MOMENTS}
    if float(made["step"]) == 0:
        return moments
    found = {name: (made[name], made[f"Q_{name}"]) for name in ("L", "R")}
    return _with_bases({**moments, "step": float(made["step"]) + 1.0}, found, is_turned=True)


def _dion_group(group: Group) -> Group:
    """AdamW and Lion there compute with ``beta1`` and ``beta2``, and read no ``betas`` of a group."""
    if "adjust_lr" in group:  # it may be a fork's
        group = {**group, "adjust_lr": validate.own_word(group["adjust_lr"])}
    pair = group.get("beta1"), group.get("beta2")
    return group if None in pair else {**group, "betas": pair}


def _dion_state(state: State, _group: Group) -> State:
    for key, value in state.items():
        if isinstance(value, Tensor) and not foreign.is_dense(value):
            raise ValueError(f"{key!r} must be a dense tensor with its values, got {foreign.shown(value)}")
    return state


def _fused_adam_group(group: Group) -> Group:
    if not group.pop("bias_correction", True):
        raise ValueError("bias_correction=False has no counterpart here")
    return group


def _fused_adam_state(state: State, group: Group) -> State:
    """Steps are counted by group there."""
    return _pick({"step": group.get("step", 0), **state}, *_MOMENTS)


_MASTERS = ("master", "master_weight", "master_param")
"""Keys under which optimizers keep the float32 weight of a parameter."""
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_NUMBER, _COUNTER, _FLAG = validate.number(0.0), validate.count(1), validate.flag(False)
_ADAM_KEYS = {"lr": _NUMBER, "betas": validate.betas((0.9, 0.999)), "eps": _NUMBER, "weight_decay": _NUMBER}
_GROUP_STEP = {"step": foreign.COUNT}
_ADAM = {"step": foreign.COUNT, "exp_avg": foreign.FLOATS, "exp_avg_sq": foreign.FLOATS}
_FACTORS = {
    f"{name}_{part}": foreign.FLOATS for name in ("exp_avg_sq", "exp_avg_res") for part in ("row", "col")
}
_HF_KEYS = {
    "lr": validate.optional(_NUMBER),
    "eps": validate.numbers((1e-30, 1e-3)),
    "clip_threshold": _NUMBER,
    "decay_rate": validate.exponent(-0.8),
    "beta1": validate.beta(None),
    "weight_decay": _NUMBER,
    "scale_parameter": _FLAG,
    "relative_step": _FLAG,
    "warmup_init": _FLAG,
}
_CAME_KEYS = {
    **_ADAM_KEYS,
    "betas": validate.betas((0.9, 0.999, 0.9999)),
    "eps": validate.numbers((1e-30, 1e-16)),
    "clip_threshold": _NUMBER,
}
_LOW_RANK_KEYS = {
    "rank": _COUNTER,
    "update_proj_gap": _COUNTER,
    "scale": _NUMBER,
    "proj_type": validate.word("std", "std", "reverse_std", "left", "right", "full"),
}
_TORCH_MUON_KEYS = {
    "lr": _NUMBER,
    "weight_decay": _NUMBER,
    "momentum": validate.number(0.95, high=1.0),
    "nesterov": _FLAG,
    "ns_coefficients": foreign.coefficients(),
    "eps": _NUMBER,
    "ns_steps": _COUNTER,
    "adjust_lr_fn": validate.word(None, None, "original", "match_rms_adamw"),
}
_SOAP_KEYS = {
    "shampoo_beta": foreign.decay_rate(),
    **dict.fromkeys(("precondition_frequency", "max_precond_dim", "max_precondition_dim"), _COUNTER),
    **dict.fromkeys(("merge_dims", "precondition_1d", "correct_bias"), _FLAG),
    **dict.fromkeys(("normalize_grads", "normalize_gradient"), _FLAG),
}
_SOAP = {
    **_ADAM,
    **dict.fromkeys(("GG", "Q"), foreign.SIDES),
    **dict.fromkeys(("L", "R", "Q_L", "Q_R"), foreign.FLOATS),
}
_DION_KEYS = {"algorithm": COMMON["algorithm"], "lr": _NUMBER}

SOURCES: dict[str, Source] = {
    "hf-adafactor": Source(
        "adafactor", _HF_KEYS, _adafactor_group, _adafactor_state, _GROUP_STEP, {**_ADAM, **_FACTORS}
    ),
    "came-pytorch": Source("came", _CAME_KEYS, dict, _came_state, _GROUP_STEP, {**_ADAM, **_FACTORS}),
    "galore-torch": Source(
        "galore_adamw",
        {**_ADAM_KEYS, "correct_bias": _FLAG},
        _galore_group,
        _galore_state,
        {**_GROUP_STEP, **_LOW_RANK_KEYS},
        {**_ADAM, "projector": foreign.PROJECTOR},
    ),
    "colossalai-lamb": Source(
        "lamb",
        _ADAM_KEYS,
        _lamb_group,
        lambda state, _: _pick(state, *_MOMENTS),
        {**_GROUP_STEP, "bias_correction": _FLAG},
        _ADAM,
    ),
    "fused-adam": Source(
        "adamw",
        _ADAM_KEYS,
        _fused_adam_group,
        _fused_adam_state,
        {**_GROUP_STEP, "bias_correction": _FLAG},
        _ADAM,
    ),
    "soap": Source("soap", _ADAM_KEYS, _soap_group, _soap_state, {**_GROUP_STEP, **_SOAP_KEYS}, _SOAP),
    "torch-muon": Source(
        "muon",
        _TORCH_MUON_KEYS,
        _torch_muon_group,
        _torch_muon_state,
        _GROUP_STEP,
        {"momentum_buffer": foreign.FLOATS},
    ),
    "keller-jordan-muon": Source(
        None,
        {"lr": _NUMBER, "weight_decay": _NUMBER},
        _keller_jordan_group,
        _keller_jordan_state,
        {
            **_ADAM_KEYS,
            "momentum": _TORCH_MUON_KEYS["momentum"],
            "use_muon": _FLAG,
            **_GROUP_STEP,
        },
        {**_ADAM, "momentum_buffer": foreign.FLOATS},
    ),
    "microsoft-dion": Source(
        None, _DION_KEYS, _dion_group, _dion_state, _GROUP_STEP, {"step": foreign.COUNT}
    ),
}
"""The formats, by the name that `import_state_dict` takes."""
