"""Rows of facts about parameters, for reading and for programs."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group
    from rich.table import Table as RichTable
    from rich.text import Text

    from oxidion._oxidion import Plan


class Table:
    """One row per parameter. ``str()`` prints it; ``to_dict()`` and ``to_numpy()`` give the columns.

    Notebooks show it as an HTML table, and ``rich.print`` as one of rich, which is imported only then.
    """

    title = ""
    """Heading in notebooks and in rich."""
    note = ""
    """Line below the rows where they are printed."""

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
        return "\n".join([*aligned([self.columns, *self._cells()]), *filter(None, [self.note])])

    __repr__ = __str__

    def _cells(self) -> list[list[str]]:
        columns = self.columns
        return [[_cell(row.get(key)) for key in columns] for row in self.rows]

    def _numeric(self) -> list[bool]:
        """For each column whether it holds numbers, which stand at the right."""
        return [
            all(value is None or isinstance(value, (int, float)) for value in values)
            for values in self.to_dict().values()
        ]

    def _repr_html_(self) -> str:
        """The rows as an HTML table, for notebooks."""
        return html_table(self.columns, self._cells(), self._numeric(), self.title)

    def __rich_console__(self, _console: Console, options: ConsoleOptions) -> Iterator[RichTable | Text]:
        """A table of rich; on a narrow terminal columns that are the same in all rows are a line below."""
        from rich.text import Text

        columns, cells, numeric = self.columns, self._cells(), self._numeric()
        widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
        is_same = [False] * len(columns)
        if len(cells) > 1 and sum(widths) + 3 * len(widths) + 2 > options.max_width:
            is_same = [len(set(column)) == 1 for column in zip(*cells, strict=True)]
        kept = [i for i, same in enumerate(is_same) if not same]
        body = [[line[i] for i in kept] for line in cells]
        yield rich_table([columns[i] for i in kept], body, [numeric[i] for i in kept], self.title)
        if len(kept) < len(columns):
            same = (f"{columns[i]} {cells[0][i]}" for i in range(len(columns)) if i not in kept)
            yield Text(f"all rows: {', '.join(same)}")


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Lines of cells, each column as wide as its widest."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def html_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], caption: str = ""
) -> str:
    """A table in HTML. Whatever a cell holds is text: names of parameters are whatever a user gave."""
    sides = ["right" if right else "left" for right in numeric]

    def row(tag: str, line: Sequence[str]) -> str:
        made = (
            f'<{tag} style="text-align: {side}">{html.escape(cell)}</{tag}>'
            for cell, side in zip(line, sides, strict=True)
        )
        return f"<tr>{''.join(made)}</tr>"

    head = f"<caption>{html.escape(caption)}</caption>\n" if caption else ""
    body = "\n".join(row("td", line) for line in cells)
    return f"<table>\n{head}<thead>\n{row('th', columns)}\n</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n"


def rich_table(
    columns: Sequence[str], cells: Sequence[Sequence[str]], numeric: Sequence[bool], title: str = ""
) -> RichTable:
    """A table of rich. Whatever a cell holds is text: brackets in it are no markup."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD)
    for column, right in zip(columns, numeric, strict=True):
        table.add_column(Text(column), justify="right" if right else "left", overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    return table


_PLAN = (
    ("buckets", ("bucket", "algorithm", "parameters", "group", "communication"), (0, 3)),
    ("instructions", ("step", "instruction", "work", "memory"), (0,)),
)
"""Tables of a plan: title, columns, and which of these hold numbers."""


def _plan_tables(plan: Plan) -> list[tuple[Sequence[str], Sequence[Sequence[str]], list[bool], str]]:
    return [
        (columns, cells, [i in numbers for i in range(len(columns))], title)
        for (title, columns, numbers), cells in zip(_PLAN, plan._cells(), strict=True)
    ]


def _last_line(plan: Plan) -> str:
    """Workspace and hazards."""
    return str(plan).rstrip("\n").rpartition("\n")[2]


def plan_html(plan: Plan) -> str:
    """Buckets and instructions of a plan as HTML, for notebooks."""
    tables = "".join(html_table(*parts) for parts in _plan_tables(plan))
    return f"{tables}<p>{html.escape(_last_line(plan))}</p>\n"


def plan_rich(plan: Plan) -> Group:
    """Buckets and instructions of a plan as tables of rich."""
    from rich.console import Group
    from rich.text import Text

    return Group(*(rich_table(*parts) for parts in _plan_tables(plan)), Text(_last_line(plan)))


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
