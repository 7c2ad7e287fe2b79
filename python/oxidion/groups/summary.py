"""Summary of the decisions of `param_groups`, a line for each rule."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from oxidion._core.table import Table
from oxidion._dist.comm import is_first_rank


class ParamGroups(list[dict[str, Any]]):
    """Groups for an optimizer, with the decisions that led to them; they print as the summary.

    Attributes:
        summary: a table with a row for each rule: which algorithm takes what it found, at which learning rate
            ("default": that of the optimizer), how many parameters and elements, some names.
        decisions: the algorithm and the rule of each parameter by name; "frozen, left out" for those
            without a gradient.
    """

    summary: Table = Table([])
    decisions: Mapping[str, str] = MappingProxyType({})

    def __repr__(self) -> str:
        """A line for each rule; ``list(groups)`` prints the groups themselves, with every weight."""
        return repr(self.summary)

    def _repr_html_(self) -> str:
        """The summary as an HTML table, for notebooks."""
        return self.summary._repr_html_()

    def __rich__(self) -> Table:
        """The summary for rich."""
        return self.summary


def pattern(name: str) -> str:
    """A name with its numbers replaced: the same for all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def table(decisions: list[dict[str, Any]]) -> Table:
    """A row for each rule, algorithm and learning rate, from a dict for each parameter."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for made in decisions:
        lr = rate(made["lr"])
        row = found.setdefault(
            (made["rule"], made["algorithm"], lr),
            {
                "rule": made["rule"],
                "algorithm": made["algorithm"],
                "lr": lr,
                "parameters": 0,
                "elements": 0,
                "known": "yes" if made["known"] else "guess",
                "names": {},
            },
        )
        row["parameters"] += 1
        row["elements"] += made["elements"]
        short = pattern(made["name"])
        row["names"][short] = short if short in row["names"] else made["name"]
    for row in found.values():
        names = list(row["names"].values())
        row["names"] = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return Table(list(found.values()))


def rate(lr: Any) -> Any:
    """A learning rate as a cell: a number, or "tensor" for one that the host would have to wait for."""
    if isinstance(lr, Tensor):
        return float(lr) if lr.device.type == "cpu" and lr.numel() == 1 else "tensor"
    return "default" if lr is None else lr


_shown: set[str] = set()


def show(summary: Table) -> None:
    """Prints a summary to stderr on the first rank, each once."""
    text = str(summary)
    if text not in _shown and is_first_rank():
        _shown.add(text)
        sys.stderr.write(f"oxidion.param_groups:\n{text}\n")
