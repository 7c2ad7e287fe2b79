"""Checks of hyper-parameters and group keys, each with the same form of message."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from oxidion._core.constructor import ADVICE, nearest

Check = Callable[[Any], bool]


class Field(NamedTuple):
    """One group key: its default, what it must be, the test for that, and the words among its values."""

    default: Any
    wanted: str
    check: Check
    words: tuple[str, ...] = ()


class Word(NamedTuple):
    """Another optimizer's word for a group key.

    Attributes:
        key: the group key that keeps the value.
        field: what the value must be under this word.
        values: what other values are under the group key.
    """

    key: str
    field: Field
    values: Mapping[Any, Any] = MappingProxyType({})


MOST = torch.finfo(torch.float32).max
"""Largest number: kernels compute in float32 with most of them."""


def is_number(value: object) -> bool:
    """True for an int or a float, not for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_number(value: object) -> float | None:
    """A number or one-element tensor as a float, None for anything else."""
    if isinstance(value, torch.Tensor):
        dense = value.layout == torch.strided and not value.is_meta
        return float(value) if dense and value.numel() == 1 and not value.is_complex() else None
    try:
        return float(value) if is_number(value) else None  # type: ignore[arg-type]
    except OverflowError:  # an integer
        return math.inf


def is_finite(value: object) -> bool:
    """True for a number that kernels can hold; a one-element tensor counts as one."""
    x = _as_number(value)
    return x is not None and abs(x) <= MOST


def number(default: float, low: float = 0.0, high: float = math.inf, *, open_low: bool = False) -> Field:
    """A finite number in a range; a one-element tensor counts as one."""

    def check(value: object) -> bool:
        x = _as_number(value)
        if x is None or not is_finite(x):
            return False
        return (x > low if open_low else x >= low) and x <= high

    sign = ">" if open_low else ">="
    upper = "" if high == math.inf else f" and <= {high:g}"
    return Field(default, f"a finite number {sign} {low:g}{upper}", check)


def _is_beta(value: object) -> bool:
    x = _as_number(value)
    return x is not None and 0.0 <= x < 1.0


def beta(default: float | None) -> Field:
    """A decay rate; None too where that is the default."""
    return Field(default, "a number >= 0 and < 1", lambda v: (v is None and default is None) or _is_beta(v))


def _has_length(value: object, length: int) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == length


def is_pair(value: object) -> bool:
    """True for a tuple or list of two."""
    return _has_length(value, 2)


_COUNTS = {2: "two", 3: "three"}


def betas(default: tuple[float, ...]) -> Field:
    """Tuple of decay rates, as many as the default has."""

    def check(value: object) -> bool:
        return _has_length(value, len(default)) and all(_is_beta(b) for b in value)  # type: ignore[attr-defined]

    return Field(default, f"{_COUNTS[len(default)]} numbers >= 0 and < 1", check)


def numbers(default: tuple[float, ...]) -> Field:
    """Tuple of finite numbers of at least 0, as many as the default has."""
    single = number(0.0)

    def check(value: object) -> bool:
        return _has_length(value, len(default)) and all(map(single.check, value))  # type: ignore[call-overload]

    return Field(default, f"{_COUNTS[len(default)]} finite numbers >= 0", check)


def interval() -> Field:
    """None, or the ends of an interval of numbers that are not negative."""
    ends = numbers((0.0, 0.0))

    def check(value: object) -> bool:
        if value is None or not ends.check(value):
            return value is None
        low, high = (float(end) for end in value)  # type: ignore[attr-defined]
        return low <= high and high > 0.0

    return Field(None, "None or two finite numbers (low, high) with 0 <= low <= high and high > 0", check)


def optional(field: Field, default: Any = None) -> Field:
    """Value of ``field``, or None."""
    return Field(default, f"{field.wanted}, or None", lambda v: v is None or field.check(v))


def exponent(default: float) -> Field:
    """A finite number of at most 0."""

    def check(value: object) -> bool:
        x = _as_number(value)
        return x is not None and is_finite(x) and x <= 0.0

    return Field(default, "a finite number <= 0", check)


def count(default: int | None, low: int = 1, *, optional: bool = False, high: int = 2**63 - 1) -> Field:
    """An integer from ``low`` to ``high``, which the core can hold."""

    def check(value: object) -> bool:
        if value is None:
            return optional
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    upper = "< 2**63" if high == 2**63 - 1 else f"<= {high}"
    return Field(default, f"an integer >= {low} and {upper}" + (" or None" if optional else ""), check)


def flag(default: bool | None) -> Field:
    """A bool; None too where that is the default."""
    return Field(default, "True or False", lambda v: isinstance(v, bool) or (default is None and v is None))


def word(default: str | None, *words: str | None) -> Field:
    """One of several words."""
    shown = ", ".join(repr(w) for w in words)
    known = tuple(w for w in words if w is not None)
    return Field(
        default, f"one of {shown}", lambda v: (v is None or isinstance(v, str)) and v in words, known
    )


def one_of(default: int, *numbers: int) -> Field:
    """One of several integers."""
    shown = ", ".join(map(str, numbers))
    return Field(default, f"one of {shown}", lambda v: type(v) is int and v in numbers)


def counts(default: tuple[int, ...] | None) -> Field:
    """None, or two or more positive integers."""

    def check(value: object) -> bool:
        if value is None:
            return True
        return (
            isinstance(value, (tuple, list))
            and len(value) >= 2
            and all(isinstance(v, int) and not isinstance(v, bool) and v > 0 for v in value)
        )

    return Field(default, "a tuple of two or more positive integers", check)


def memory() -> Field:
    """Bytes, or a share of the memory of a device, in (0, 1]; None for neither."""

    def check(value: object) -> bool:
        if isinstance(value, float):
            return 0 < value <= 1
        return value is None or (isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**63)

    return Field(None, "an integer > 0 and < 2**63, a float in (0, 1] or None", check)


def route() -> Field:
    """A word, or the names of axes of a mesh."""
    known = ("auto", "keep", "gather")

    def check(value: object) -> bool:
        if isinstance(value, str):
            return value in known
        return isinstance(value, (tuple, list)) and all(isinstance(name, str) and name for name in value)

    return Field("auto", "'auto', 'keep', 'gather' or a tuple of names of mesh axes", check, known)


_LISTS = ("params", "param_names")
"""Keys of groups with an entry for each parameter."""
_PLAIN = {str, int, float, bool, type(None)}
DTYPES = ("float16", "bfloat16", "float32", "float64")


def dtype(default: str | None = None) -> Field:
    """None or the name of a floating-point dtype."""
    return word(default, None, *DTYPES)


def dtype_name(value: torch.dtype | str | None, key: str) -> str | None:
    """A dtype as the name that groups keep: groups hold plain values only.

    Raises:
        ValueError: for anything but a floating-point dtype, its name or None.
    """
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"{key} must be one of {', '.join(DTYPES)} or None, got {value!r}")
    return name


def plain(key: str, value: Any) -> Any:
    """A value of a group as groups keep it: the name of a dtype, and Python's own types.

    Members of enumerations and numbers of NumPy have types that ``torch.load(weights_only=True)`` refuses.
    """
    return dtype_name(value, key) if isinstance(value, torch.dtype) else _plain(key, value)


def _plain(key: str, value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return int(value) if isinstance(value, int) else float(value)
    if type(value) in (tuple, list):
        return type(value)(_plain(key, each) for each in value)
    shape = None if isinstance(value, torch.Tensor) else getattr(value, "shape", None)
    if key == "betas" and shape is not None and len(shape) == 1:
        return tuple(value.tolist())
    return value.item() if shape == () else value


def plain_group(group: Mapping[str, Any], own: Collection[str] = ()) -> dict[str, Any]:
    """A group with values of Python's own types; those of a user's own keys keep their dtypes."""
    return {
        key: value if key in _LISTS else _plain(key, value) if key in own else plain(key, value)
        for key, value in group.items()
    }


def is_same(value: object, other: object) -> bool:
    """True for equal values of one type; False for values, as tensors, whose comparison is no single bool."""
    try:
        return value is other or bool(value == other and type(value) is type(other))
    except (RuntimeError, TypeError, ValueError):
        return False


def names_of(group: Mapping[str, Any], number: int) -> list[str]:
    """The names of a group's parameters; their positions where the user gave none.

    Positions too where a framework has put other parameters there, as DeepSpeed's ZeRO one for all.
    """
    names, count = group.get("param_names"), len(group["params"])
    if names and len(names) == count:
        return list(names)
    return [f"parameter {i} of group {number}" for i in range(count)]


def shown(value: object) -> str:
    """A value as errors say it; of lists within too many lists, and of too long integers, the type."""
    try:
        return repr(value)
    except (RecursionError, ValueError):
        return f"a {type(value).__name__} that cannot be printed"


_WORDS = {"keller_muon": "original"}
"""Values of other packages, and ours for the same."""


def own_word(value: Any) -> Any:
    """The word that groups keep for a value of another package; any other value is returned unchanged."""
    return _WORDS.get(value, value) if isinstance(value, str) else value


def _nearest(value: object, field: Field) -> str:
    """Says which word of the field a wrong one is like."""
    if not isinstance(value, str):
        return ""
    known = own_word(value)
    near = [known] if known in field.words else difflib.get_close_matches(value.lower(), field.words, n=1)
    if near:
        return f"; the nearest is {near[0]!r}"
    try:
        return f"; it is text: pass the number {float(value):g}"
    except ValueError:
        return ""


def _too_large(value: object) -> str:
    """Says of a number that it is finite, and still too large."""
    values = map(_as_number, value if isinstance(value, (tuple, list)) else [value])
    large = any(x is not None and MOST < abs(x) < math.inf for x in values)
    return f"; kernels compute in float32, whose largest number is {MOST:.3g}" if large else ""


def check_decay(group: Mapping[str, Any], where: str) -> None:
    """Refuses a decay rate whose product with the step size is too large, and decay by the gradient.

    Raises:
        ValueError: that names both.
    """
    lr, decay = _as_number(group.get("lr")), _as_number(group.get("weight_decay"))
    if decay and group.get("decoupled_weight_decay") is False:
        raise ValueError(
            f"decoupled_weight_decay must be True with weight_decay={decay!r} ({where}): weights decay "
            "by a factor of their own, and not by their gradients as in torch.optim.Adam"
        )
    if lr is not None and decay is not None and not is_finite(lr * decay):
        raise ValueError(
            f"lr * weight_decay must be finite in float32, got lr={lr!r} and weight_decay={decay!r} ({where})"
        )


def check_group(
    group: Mapping[str, Any],
    schema: Mapping[str, Field],
    known: set[str],
    where: str,
    words: Iterable[str] = (),
) -> None:
    """Checks the keys and values of a group.

    Args:
        group: keys and values.
        schema: what the values of some keys must be.
        known: keys that may have any value.
        where: what an error calls the group.
        words: words for keys that the group could have had, for errors.

    Raises:
        ValueError: for an unknown key, with the nearest known one, or a value out of range.
    """
    for key, value in group.items():
        field = schema.get(key)
        if field is not None:
            if key == "lr" and isinstance(value, torch.Tensor) and value.numel() != 1:
                raise ValueError(f"Tensor lr must be 1-element, got shape {tuple(value.shape)} ({where})")
            if not field.check(value):
                near = _nearest(value, field) or _too_large(value)
                raise ValueError(f"{key} must be {field.wanted}, got {shown(value)} ({where}){near}")
        elif key not in known:
            like = nearest(key, {*schema, *words}, known)
            advice = (
                f"the nearest known key is {like!r}"
                if like
                else f"known keys are {', '.join(schema)}; extra_keys=({key!r},) keeps one of your own"
            )
            raise ValueError(f"unknown group key {key!r} ({where}); {ADVICE.get(key, advice)}")
