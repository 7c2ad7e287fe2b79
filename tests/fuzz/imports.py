"""State dicts of other packages with anything in any place: taken over whole, or refused.

A refusal is a ``ValueError``. An import changes neither the state dict nor the optimizer. What was taken over
is loaded whole or refused with nothing changed, and the optimizer steps on.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import oxidion
from oxidion.checkpoint import import_state_dict

from .draw import Draw
from .state_dicts import LEAST_WORDS, NUMBERS, OTHERS, equal, snapshot, spoil

MATRIX, VECTOR = (6, 4), (5,)
ADAM: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.125}
SOAP = {"shampoo_beta": -1, "precondition_frequency": 2, "merge_dims": False, "correct_bias": True}
OURS = {"exp_avg": "momentum", "exp_avg_sq": "variance", "momentum_buffer": "momentum", "eps": "epsilon"}
"""What this package calls some keys, in errors about shapes."""


class Alien:
    """An object of a class that no package knows, with attributes that some look for."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Format(NamedTuple):
    """A state dict as a package writes it, and what it is loaded into.

    Attributes:
        source: the word for the package.
        groups: keys of its groups, without 'params'.
        shapes: of the parameters of each group.
        state: makes the state of a parameter of a group.
        optimizer: makes one of this package, of groups of parameters.
    """

    source: str
    groups: list[dict[str, Any]]
    shapes: list[list[tuple[int, ...]]]
    state: Callable[[Draw, tuple[int, ...], dict[str, Any]], dict[str, Any]]
    optimizer: Callable[[list[dict[str, Any]]], Any]


def square(draw: Draw, size: int) -> Tensor:
    """A factor: a matrix that has a basis."""
    x = draw.normal((size, size))
    return x @ x.mT


def basis(draw: Draw, rows: int, columns: int) -> Tensor:
    """Orthonormal columns."""
    return torch.linalg.qr(draw.normal((rows, columns)))[0]


def adam(draw: Draw, shape: tuple[int, ...], _group: Any = None) -> dict[str, Any]:
    """Adam's state."""
    return {"step": 3, "exp_avg": draw.normal(shape), "exp_avg_sq": draw.normal(shape).square()}


def factored(*prefixes: str) -> Callable[..., dict[str, Any]]:
    """A state of row and column factors, with the first moment."""

    def state(draw: Draw, shape: tuple[int, ...], group: dict[str, Any]) -> dict[str, Any]:
        made = adam(draw, shape)
        if len(shape) > 1:
            del made["exp_avg_sq"]
            for prefix in prefixes:
                made[f"{prefix}_row"] = draw.normal(shape[:-1]).square()
                made[f"{prefix}_col"] = draw.normal(shape[-1:]).square()
        if "beta1" in group and group["beta1"] is None:
            del made["exp_avg"]
        return {**made, "RMS": 0.5}

    return state


def galore(draw: Draw, shape: tuple[int, ...], group: dict[str, Any]) -> dict[str, Any]:
    """Moments in a subspace, and the object that has its basis."""
    if "rank" not in group:
        return adam(draw, shape)
    (m, n), r = shape, group["rank"]
    if group["proj_type"] == "full":
        both = [basis(draw, m, r), basis(draw, n, r).mT]
        return {**adam(draw, (r, r)), "projector": Alien(ortho_matrix=both, proj_type="full")}
    return {**adam(draw, (m, r)), "projector": Alien(ortho_matrix=basis(draw, n, r).mT, proj_type="std")}


def soap(draw: Draw, shape: tuple[int, ...], _group: Any) -> dict[str, Any]:
    """Lists of factors and bases."""
    sides = [square(draw, n) if len(shape) > 1 else [] for n in shape]
    bases = [torch.linalg.qr(side)[0] if len(side) else [] for side in sides]
    return {**adam(draw, shape), "GG": sides, "Q": bases}


def soap_of_groups(draw: Draw, shape: tuple[int, ...], group: Any) -> dict[str, Any]:
    """The same of a package that counts by group."""
    return {key: value for key, value in soap(draw, shape, group).items() if key != "step"}


def flat_soap(draw: Draw, shape: tuple[int, ...], _group: Any) -> dict[str, Any]:
    """Factors and bases under names of their own."""
    left, right = (square(draw, n) for n in shape)
    made = {"L": left, "R": right, "Q_L": torch.linalg.qr(left)[0], "Q_R": torch.linalg.qr(right)[0]}
    return {**adam(draw, shape), **made}


def muon(draw: Draw, shape: tuple[int, ...], group: dict[str, Any]) -> dict[str, Any]:
    """One average, or Adam's moments where the group says so."""
    return {"momentum_buffer": draw.normal(shape)} if group.get("use_muon", True) else adam(draw, shape)


def dion(draw: Draw, shape: tuple[int, ...], group: dict[str, Any]) -> dict[str, Any]:
    """The names that this package has too."""
    made = {"momentum": draw.normal(shape)}
    return made if group["algorithm"] == "muon" else {**made, "variance": draw.normal(shape).square()}


HF = {"lr": 0.01, "eps": (1e-30, 1e-3), "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": 0.9}
HF |= {"weight_decay": 0.125, "scale_parameter": False, "relative_step": False, "warmup_init": False}
CAME = {**ADAM, "betas": (0.9, 0.99, 0.999), "eps": (1e-30, 1e-16), "clip_threshold": 1.0}
LOW_RANK = {**ADAM, "correct_bias": True, "rank": 2, "update_proj_gap": 100, "scale": 0.25}
TORCH_MUON = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "eps": 1e-7, "ns_steps": 5}
TORCH_MUON |= {"ns_coefficients": (3.4445, -4.775, 2.0315), "adjust_lr_fn": None}
KELLER_JORDAN = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
DION = {"algorithm": "muon", "lr": 0.01, "mu": 0.9, "step": 3}
BOTH = [MATRIX, VECTOR]

FORMATS = {
    "adafactor": Format("hf-adafactor", [HF], [BOTH], factored("exp_avg_sq"), oxidion.Adafactor),
    "adafactor-relative": Format(
        "hf-adafactor",
        [{**HF, "lr": None, "relative_step": True, "beta1": None}],
        [BOTH],
        factored("exp_avg_sq"),
        oxidion.Adafactor,
    ),
    "came": Format(
        "came-pytorch",
        [CAME],
        [BOTH],
        factored("exp_avg_sq", "exp_avg_res"),
        lambda groups: oxidion.CAME(groups, lr=1.0),
    ),
    "lamb": Format("colossalai-lamb", [{**ADAM, "bias_correction": True}], [BOTH], adam, oxidion.Lamb),
    "galore": Format(
        "galore-torch",
        [{**LOW_RANK, "proj_type": "std"}, {**ADAM, "correct_bias": True}],
        [[MATRIX], [VECTOR]],
        galore,
        lambda groups: oxidion.GaLoreAdamW([{**groups[0], "rank": 2}, *groups[1:]]),
    ),
    "galore-full": Format(
        "galore-torch",
        [{**LOW_RANK, "proj_type": "full"}],
        [[MATRIX]],
        galore,
        lambda groups: oxidion.GaLoreAdamW([{**groups[0], "rank": 2, "proj_type": "full"}]),
    ),
    "soap": Format("soap", [{**ADAM, **SOAP, "max_precond_dim": 10}], [BOTH], soap, oxidion.SOAP),
    "soap-by-group": Format(
        "soap",
        [{**ADAM, **SOAP, "max_precondition_dim": 10, "step": 3}],
        [BOTH],
        soap_of_groups,
        oxidion.SOAP,
    ),
    "soap-flat": Format("soap", [{**ADAM, "shampoo_beta": 0.9}], [[MATRIX]], flat_soap, oxidion.SOAP),
    "torch-muon": Format("torch-muon", [TORCH_MUON], [[MATRIX, MATRIX]], muon, oxidion.Muon),
    "keller-jordan": Format(
        "keller-jordan-muon",
        [KELLER_JORDAN, {**ADAM, "use_muon": False}],
        [[MATRIX], BOTH],
        muon,
        lambda groups: oxidion.Muon([groups[0], {**groups[1], "algorithm": "adamw"}]),
    ),
    "dion": Format(
        "microsoft-dion",
        [DION, {**DION, "algorithm": "adamw"}],
        [[MATRIX], [VECTOR]],
        dion,
        lambda groups: oxidion.Muon([groups[0], {**groups[1], "algorithm": "adamw"}]),
    ),
}
"""Every form of every source."""


def written(draw: Draw, form: Format) -> tuple[dict[str, Any], list[list[nn.Parameter]]]:
    """A state dict as the package writes it, and parameters of its shapes."""
    states: dict[Any, Any] = {}
    groups, params = [], []
    for group, shapes in zip(form.groups, form.shapes, strict=True):
        keys = range(len(states), len(states) + len(shapes))
        states |= {key: form.state(draw, shape, group) for key, shape in zip(keys, shapes, strict=True)}
        named = {"param_names": [f"layer.{key}" for key in keys]} if draw.often(0.2) else {}
        groups.append({**copy.deepcopy(group), **named, "params": [*keys]})
        params.append([nn.Parameter(draw.normal(shape)) for shape in shapes])
    return {"state": states, "param_groups": groups}, params


def deep(levels: int) -> list[Any]:
    """Lists within lists."""
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def replaced(draw: Draw, saved: dict[str, Any]) -> str:
    """Changes a key or a value of a state dict to what others do not think of; returns what."""
    groups, state = saved["param_groups"], saved["state"]
    kind = draw.choice(["keys", "twice", "odd", "unhashable", "key"])
    if kind == "keys":  # as JSON has them
        saved["state"] = {str(key): value for key, value in state.items()}
        return "keys of states are strings"
    if kind == "twice":
        groups[-1]["params"] = [*groups[-1]["params"][:-1], groups[0]["params"][0]]
        return "a parameter is there twice"
    if kind == "unhashable":
        groups[0]["params"][0] = draw.choice([(1, []), [], {}, torch.ones(()), deep(3)])
        return f"a key of a state is {groups[0]['params'][0]!r}"
    place = draw.choice([draw.choice(groups), state[draw.choice([*state])]])
    key = draw.choice([*place])
    if kind == "key":
        place[draw.choice([3, None, (1, 2), Alien(a=1)])] = place.pop(key)
        return f"the key {key!r} is another one"
    jagged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    odd = [Alien(), Alien(ortho_matrix=3, proj_type="full"), Alien(ortho_matrix=None, proj_type=[])]
    odd += [
        deep(5000),
        [place[key]],
        {0: place[key]},
        "3",
        "nan",
        10**400,
        torch.ones(1).expand(2**20, 2**20),
    ]
    odd += [jagged, torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), torch.ones(3).to_sparse()]
    place[key] = draw.choice(odd)
    return f"[{key!r}] = an odd {type(place[key]).__name__}"


def spoilt(draw: Draw, saved: dict[str, Any]) -> tuple[Any, list[str]]:
    """The state dict with one to three changes, and what they are."""
    if draw.often(0.03):
        other: Any = draw.choice([*NUMBERS, *OTHERS, torch.ones(2), Alien(), [saved]])
        return other, [f"it is {str(other)[:60]!r}"]
    if draw.often(0.25):
        return saved, [replaced(draw, saved)]
    return saved, [spoil(draw, saved) for _ in range(draw.choice([1, 1, 1, 2, 3]))]


def names_the_place(message: str, changes: list[str]) -> bool:
    """True where a message says the last key of the place of a single change, or what lies around it."""
    found = re.findall(r"'(\w+)'", changes[0].partition(" = ")[0])
    words = {*found, *(OURS[key] for key in found if key in OURS)}
    around = {"param", "must be a dict", "a list of dicts", "has states under"}
    return len(changes) > 1 or any(word in message for word in words | around)


def marks(value: Any) -> list[tuple[int, int]]:
    """Every object in a state dict, and how often a tensor was written to."""
    found, left = [], [value]
    while left:
        each = left.pop()
        found.append((id(each), each._version if isinstance(each, Tensor) else 0))
        if isinstance(each, dict):
            left += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            left += each
        elif isinstance(each, Alien):
            left += vars(each).values()
    return found


def case(draw: Draw) -> None:
    """A state dict of a random format, spoilt, imported, loaded and stepped with."""
    name = draw.choice([*FORMATS])
    form = FORMATS[name]
    saved, params = written(draw, form)
    optimizer = form.optimizer([{"params": own} for own in params])
    flat = [param for own in params for param in own]

    def step() -> None:
        for param in flat:
            param.grad = draw.normal(param.shape, 0.1)
        optimizer.step()

    step()
    before = snapshot(optimizer, flat)
    saved, changes = spoilt(draw, saved) if draw.often(0.95) else (saved, [])
    shown = f"{name}, {'; '.join(changes) or 'unchanged'}"
    given, refused, made = marks(saved), None, None
    try:
        made = import_state_dict(saved, form.source, optimizer if draw.often(0.5) else None)
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{shown}: {error!r}") from error
    assert marks(saved) == given, f"{shown}: the import changed what was given"
    assert equal(snapshot(optimizer, flat), before), f"{shown}: the import changed the optimizer"
    assert changes or refused is None, f"{shown}: {refused}"
    if refused is not None:
        assert form.source in refused, f"{shown}: {refused}"
        assert len(refused) >= LEAST_WORDS, f"{shown}: {refused}"
        assert names_the_place(refused, changes), f"{shown}: {refused}"
        return
    try:
        optimizer.load_state_dict(made)
    except ValueError as error:
        refused = str(error)
    except Exception as error:
        raise AssertionError(f"{shown}: imported, and then {error!r}") from error
    if refused is not None:
        assert changes, f"unchanged {shown}: {refused}"
        assert len(refused) >= LEAST_WORDS, f"{shown}: no words in {refused!r}"
        assert equal(snapshot(optimizer, flat), before), f"{shown}: refused and changed something"
    step()
