"""Groups of an optimizer in a line each: what differs from what the class does by itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from oxidion._core import schema
from oxidion._core.table import Table, aligned
from oxidion._core.validate import Field, is_pair

WIDEST = 60
"""Characters of a value that are shown."""

SHOWN_ELSEWHERE = frozenset({"params", "param_names", "algorithm", "lr"})


def summary(
    cls: type,
    defaults: Mapping[str, Any],
    own: Mapping[str, Field],
    schemas: Mapping[str, Mapping[str, Field]],
    groups: list[dict[str, Any]],
) -> Table:
    """One row per group.

    Args:
        cls: class of the optimizer, whose signature has its defaults.
        defaults: of the optimizer.
        own: schema of the class.
        schemas: by algorithm.
        groups: of the optimizer.

    Returns:
        Columns group, algorithm, parameters, elements, lr and settings: those that differ from what a group
        with nothing but parameters and its algorithm has, in an optimizer with nothing but parameters. What
        the group's algorithm does not read is left out.
    """
    usual = {**defaults, **_of_signature(cls, defaults)}
    rows = []
    for number, group in enumerate(groups):
        algorithm = str(group.get("algorithm", ""))
        expected = _untouched(algorithm, usual, own, schemas)
        unread = set().union(*schemas.values()) - schemas.get(algorithm, {}).keys() - schema.COMMON.keys()
        hidden = SHOWN_ELSEWHERE.union(_mirrors(group, schemas.get(algorithm, {}), expected), unread)
        if "param_names" not in group and group.get("seed_by") == "position":
            hidden |= {"seed_by"}  # there is nothing else
        others = [
            f"{key}: {_short(value)}"
            for key, value in sorted(group.items(), key=lambda item: str(item[0]))
            if key not in hidden and not (key in expected and _are_equal(value, expected[key]))
        ]
        rows.append(
            {
                "group": number,
                "algorithm": algorithm,
                "parameters": len(group["params"]),
                "elements": sum(param.numel() for param in group["params"]),
                "lr": _short(group.get("lr")),
                "settings": ", ".join(others) or None,
            }
        )
    return Table(rows, title=cls.__name__)


def text(table: Table) -> str:
    """The rows as torch's optimizers print their groups: the name, and a line for each."""
    lines = [
        [
            f"Parameter Group {row['group']}",
            str(row["algorithm"]),
            f"parameters: {row['parameters']}",
            f"elements: {row['elements']}",
            f"lr: {row['lr']}",
            row["settings"] or "",
        ]
        for row in table
    ]
    return "\n".join([f"{table.title} (", *aligned(lines), ")"])


def _of_signature(cls: type, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of a constructor's arguments that are group keys."""
    arguments = inspect.signature(cls).parameters
    return {
        key: arguments[key].default
        for key in defaults
        if key in arguments and arguments[key].default is not inspect.Parameter.empty
    }


def _untouched(
    algorithm: str,
    usual: Mapping[str, Any],
    own: Mapping[str, Field],
    schemas: Mapping[str, Mapping[str, Field]],
) -> dict[str, Any]:
    """The settings of a group of an algorithm for which nothing was said."""
    group: dict[str, Any] = {"algorithm": algorithm}
    schema.fill_defaults(group, own, schemas)
    group = {**usual, **group, "step": 0}
    schema.complete(group, usual, schemas)
    return group


def _mirrors(
    group: Mapping[str, Any], fields: Mapping[str, Field], expected: Mapping[str, Any]
) -> tuple[str, ...]:
    """Keys that say what another does: the first of ``betas`` mirrors the momentum factor where one is."""
    pair, usual = group.get("betas"), expected.get("betas")
    if not is_pair(pair) or not _are_equal((group.get("beta1"), group.get("beta2")), pair):
        return ()
    factor = next((group[key] for key in schema.MOMENTA if key in fields and key in group), None)
    if factor is not None and isinstance(usual, tuple) and _are_equal(pair, (factor, *usual[1:])):
        return "betas", "beta1", "beta2"
    return "beta1", "beta2"


def _are_equal(value: object, other: object) -> bool:
    """Equality of settings, whatever a user has written into a group."""
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    try:
        return bool(value == other)
    except (RuntimeError, TypeError, ValueError):  # arrays
        return False


def _short(value: object) -> str:
    """A value in one line."""
    shown = " ".join(str(value).split())
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 1]}…"
