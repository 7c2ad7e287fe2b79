"""Rows of facts about parameters, for reading and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Table:
    """One row per parameter. ``str()`` prints it; ``to_dict()`` and ``to_numpy()`` give the columns."""

    def __init__(self, rows: list[dict[str, Any]], **facts: Any) -> None:
        """Keeps the rows; ``facts`` become attributes."""
        self.rows = rows
        self.__dict__.update(facts)

    def __getattr__(self, name: str) -> Any:
        """Facts are attributes."""
        raise AttributeError(
            f"this table has no fact {name!r}; it has {sorted(set(self.__dict__) - {'rows'})}"
        )

    @property
    def columns(self) -> list[str]:
        """Names of the columns, in order."""
        return list(dict.fromkeys(key for row in self.rows for key in row))

    def to_dict(self) -> dict[str, list[Any]]:
        """The columns as lists; a cell that a row lacks is None."""
        return {key: [row.get(key) for row in self.rows] for key in self.columns}

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """The columns as arrays: numbers as float64 with NaN for what is missing, the rest as objects."""
        return {key: _array(values) for key, values in self.to_dict().items()}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """The rows as mappings."""
        return iter(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """One row."""
        return self.rows[index]

    def __str__(self) -> str:
        """Aligned columns."""
        columns = self.columns
        cells = [columns, *([_cell(row.get(key)) for key in columns] for row in self.rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells
        ]
        return "\n".join(line.rstrip() for line in lines)

    __repr__ = __str__


def _array(values: list[Any]) -> np.ndarray[Any, Any]:
    numbers = all(value is None or isinstance(value, (int, float)) for value in values)
    if not numbers:
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, tuple):
        return "×".join(map(str, value)) or "scalar"
    return str(value)
