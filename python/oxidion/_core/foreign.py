"""Groups and states of other packages' optimizers: what they must be before anything is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oxidion._core import validate
from oxidion._core.loading import check_form
from oxidion._core.validate import Field

MOST_LETTERS = 80
"""Letters of a value that an error shows."""
_FLOATS = tuple(getattr(torch, name) for name in validate.DTYPES)


def is_dense(value: Tensor) -> bool:
    """True for a tensor with strides and with memory for each of its elements."""
    if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
        return False
    plain = type(value) in (Tensor, torch.nn.Parameter)  # a wrapper has no memory of its own
    return not plain or value.untyped_storage().nbytes() >= value.numel() * value.element_size()


def _is_floats(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in _FLOATS and is_dense(value)


def _is_halves(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.int16 and is_dense(value)


def _is_matrix(value: object) -> bool:
    return isinstance(value, Tensor) and _is_floats(value) and value.ndim == 2


def _is_sides(value: object) -> bool:
    lists = (list, tuple)
    return isinstance(value, lists) and all(
        _is_matrix(side) or (isinstance(side, lists) and not side) for side in value
    )


def _is_projector(value: object) -> bool:
    basis, kind = (getattr(value, key, None) for key in ("ortho_matrix", "proj_type"))
    if kind != "full":
        return isinstance(kind, str) and _is_matrix(basis)
    return isinstance(basis, (list, tuple)) and len(basis) == 2 and all(map(_is_matrix, basis))


COUNT = validate.number(0.0)
"""A number of steps, as a number or a tensor."""
FLOATS = Field(None, f"a dense tensor of {', '.join(validate.DTYPES)} with its values", _is_floats)
MASTERS = Field(
    None,
    "a dense float32 tensor, a dense int16 one with its low halves, or None",
    lambda value: value is None or (_is_floats(value) and value.dtype == torch.float32) or _is_halves(value),
)
SIDES = Field(None, "a list of floating-point matrices, with [] for a side without one", _is_sides)
PROJECTOR = Field(
    None,
    "an object with a proj_type and an ortho_matrix: a floating-point matrix, or a list of two for 'full'",
    _is_projector,
)


def decay_rate() -> Field:
    """A finite number below 1, negative ones included, or None."""

    def check(value: object) -> bool:
        x = validate.number(0.0, -validate.MOST).check(value)
        return value is None or (x and float(value) < 1.0)  # type: ignore[arg-type]

    return Field(None, "a finite number < 1, or None", check)


def coefficients() -> Field:
    """Three finite numbers."""

    def check(value: object) -> bool:
        return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(validate.is_finite, value))

    return Field(None, "three finite numbers", check)


def listed(keys: Iterable[Any]) -> list[str]:
    """Keys in order, for errors; those that are no strings as strings."""
    return sorted(key if isinstance(key, str) else shown(key) for key in keys)


def require(held: Mapping[str, Any], keys: Iterable[str], what: str) -> None:
    """Refuses what lacks some of these keys.

    Raises:
        ValueError: that names them.
    """
    missing = [key for key in keys if key not in held]
    if missing:
        raise ValueError(f"{what} must have {missing}, it has {listed(held)}")


def check(
    state_dict: object,
    source: str,
    needs: Mapping[str, Field],
    may_have: Mapping[str, Field],
    entries: Mapping[str, Field],
) -> dict[str, Any]:
    """Refuses a state dict that the package cannot have written. Returns it with NumPy's scalars as Python's.

    Args:
        state_dict: what was given for one.
        source: the name of the format.
        needs: what every group has.
        may_have: what some groups have.
        entries: what the states of a parameter may have.

    Raises:
        ValueError: that names the place, what must be there and what is.
    """
    whose = f"a {source} state dict"
    check_form(state_dict, whose, f"Give what state_dict() of the {source} optimizer returned")
    assert isinstance(state_dict, Mapping)
    states = {key: _plain(own) for key, own in state_dict["state"].items()}
    groups, known = [_plain(group) for group in state_dict["param_groups"]], set[Any]()
    for number, group in enumerate(groups):
        require(group, needs, f"group {number} of {whose}")
        _check_values(group, {**needs, **may_have}, f"group {number} of {whose}")
        _check_names(group, f"group {number} of {whose}")
        known |= set(group["params"])
        for key, name in zip(group["params"], validate.names_of(group, number), strict=True):
            held = states.get(key, {})
            if not isinstance(held, Mapping):
                raise ValueError(  # noqa: TRY004
                    f"the state of {name} of {whose} must be a dict, got {shown(held)}"
                )
            _check_values(held, entries, f"the state of {name} of {whose}")
    if states and not known & states.keys():
        raise ValueError(
            f"{whose} has states under {shown(list(states))}, and its groups list "
            f"{shown(list(known))} in 'params': give the keys the type that they were saved with"
        )
    return {**state_dict, "state": states, "param_groups": groups}


def _plain(held: Any) -> Any:
    if not isinstance(held, Mapping):
        return held
    return {key: value.item() if isinstance(value, np.generic) else value for key, value in held.items()}


def _check_values(held: Mapping[str, Any], fields: Mapping[str, Field], where: str) -> None:
    for key, field in fields.items():
        if key in held and not field.check(held[key]):
            raise ValueError(f"{key} must be {field.wanted}, got {shown(held[key])} ({where})")


def shown(value: object) -> str:
    """A value as errors say it: in short, and of a tensor what it is."""
    if isinstance(value, Tensor):
        kind = "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
        return f"{kind}, {value.dtype}, {value.layout} on {value.device}"
    text = validate.shown(value)
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."


def _check_names(group: Mapping[str, Any], where: str) -> None:
    names, count = group.get("param_names"), len(group["params"])
    if names is None:
        return
    if (
        not isinstance(names, (list, tuple))
        or len(names) != count
        or not all(isinstance(n, str) for n in names)
    ):
        raise ValueError(f"param_names must be {count} strings, got {shown(names)} ({where})")
