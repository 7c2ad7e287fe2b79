"""Tables of an optimizer in notebooks and in rich, its groups in a line each, its metrics in a log."""

from __future__ import annotations

import io
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import oxidion
from contract.table import Case, every_case, make_model, run_steps, set_grads
from oxidion._core import schema

HOSTILE = "<img src=x onerror=alert(1)>[bold]&amp;[/bold]"
"""A name of a parameter that is markup to HTML and to rich."""


class Cells(HTMLParser):
    """Tags of a text in HTML, and what stands in the cells of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.inside = False
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag not in ("td", "th")


def rendered(item: Any, width: int = 400) -> str:
    """What rich prints of an object, on a wide terminal by default."""
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), width=width)
    console.print(item)
    return console.file.getvalue()


def named(name: str = HOSTILE) -> oxidion.AdamW:
    """An optimizer of one parameter."""
    param = nn.Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3)
    return oxidion.AdamW([(name, param)])


@pytest.mark.parametrize("method", ["explain", "metrics", "verify"])
def test_table_in_html_has_the_cells_of_the_text(method: str) -> None:
    model = make_model()
    optimizer = oxidion.Dion(oxidion.param_groups(model, algorithm="dion", lr=0.01))
    set_grads(model, 0)
    table = getattr(optimizer, method)()
    html = table._repr_html_()
    rows = Cells(html).rows
    assert rows[0] == table.columns
    assert len(rows) == 1 + len(table)
    for row, line in zip(rows, str(table).splitlines(), strict=True):
        assert line.split() == " ".join(row).split()
    assert '<td style="text-align: left">first.weight' in html
    assert '<th style="text-align: right">' in html


@pytest.mark.parametrize("method", ["explain", "metrics", "verify"])
def test_names_are_text_in_html_and_in_rich_whatever_they_hold(method: str) -> None:
    table = getattr(named(), method)()
    cells = Cells(table._repr_html_())
    assert cells.tags == {"table", "thead", "tbody", "tr", "th", "td"}
    assert cells.rows[1][0] == HOSTILE
    assert HOSTILE in rendered(table)


def test_settings_of_a_group_are_text_in_html_and_in_rich() -> None:
    optimizer = named()
    optimizer.param_groups[0]["note"] = HOSTILE
    cells = Cells(optimizer._repr_html_())
    assert "img" not in cells.tags
    assert cells.rows[1][-1] == f"note: {HOSTILE}"
    assert f"note: {HOSTILE}" in rendered(optimizer)


@every_case
def test_plan_in_html_and_rich_has_every_bucket_and_instruction(case: Case) -> None:
    plan = case.build(make_model()).plan()
    *lines, last = str(plan).rstrip("\n").splitlines()
    html = plan._repr_html_()
    cells = Cells(html)
    buckets = [row for row in cells.rows if len(row) == 5]
    instructions = [row for row in cells.rows if len(row) == 4]
    assert buckets.pop(0) == ["bucket", "algorithm", "parameters", "group", "communication"]
    assert instructions.pop(0) == ["step", "instruction", "work", "memory"]
    assert [
        f"bucket {number}  {algorithm}  {what} · group {group} · {how}"
        for number, algorithm, what, group, how in buckets
    ] == [line for line in lines if line.startswith("bucket ")]
    shown = [
        f"{number:>3}  {kind:<7}  {work}" + (f"  in {memory}" if memory else "")
        for number, kind, work, memory in instructions
    ]
    assert shown == [line for line in lines if not line.startswith("bucket ")]
    assert html.endswith(f"<p>{last}</p>\n")
    printed = rendered(plan)
    assert printed.rstrip().endswith(last)
    for row in buckets + instructions:
        assert row[2] in printed


@every_case
def test_tables_of_rich_have_the_cells_of_the_text(case: Case) -> None:
    optimizer = case.build(make_model(), named=True)
    table = optimizer.explain()
    printed = [" ".join(line.split()) for line in rendered(table).splitlines()]
    for line in str(table).splitlines():
        assert " ".join(line.split()) in printed


def test_constant_columns_of_a_narrow_table_become_a_line() -> None:
    optimizer = oxidion.AdamW(make_model().named_parameters())
    wide, narrow = (rendered(optimizer.explain(), width) for width in (400, 80))
    assert "all rows" not in wide
    head, _, line = narrow.partition("all rows: ")
    line = " ".join(line.split())
    assert "placements one device" in line
    assert "group 0" in line
    assert "placements" not in head
    for row in optimizer.explain():
        assert row["name"] in head
        assert "×".join(map(str, row["shape"])) in head


def test_groups_print_as_their_summary_in_text_html_and_rich() -> None:
    groups = oxidion.param_groups(make_model(), algorithm="muon", lr=0.01)
    assert repr(groups) == str(groups) == str(groups.summary)
    assert "tensor" not in repr(groups)
    assert Cells(groups._repr_html_()).rows[0] == groups.summary.columns
    assert [row["rule"] in rendered(groups) for row in groups.summary] == [True] * len(groups.summary)
    assert "tensor" in repr(list(groups))


def test_importing_oxidion_imports_neither_rich_nor_matplotlib() -> None:
    source = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import oxidion.__main__\n"
        "print({'rich', 'matplotlib'} & (set(sys.modules) - before))\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ------------------------------------------------------------------ groups in a line


def made(case: Case, params: list[Any]) -> Any:
    """An optimizer with an ``lr``, and else with what its class does by itself."""
    needed = {"relative_step": False} if "relative_step" in case.cls._SCHEMA else {}
    return case.cls(params, lr=0.25, **needed)


@every_case
def test_repr_of_an_optimizer_with_defaults_says_no_settings(case: Case) -> None:
    params = [nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5, 3))]
    optimizer = made(case, params)
    first, line, last = repr(optimizer).splitlines()
    assert (first, last) == (f"{case} (", ")")
    algorithm = optimizer.param_groups[0]["algorithm"]
    wanted = f"Parameter Group 0  {algorithm}  parameters: 2  elements: 27  lr: 0.25"
    assert line.removesuffix("  relative_step: False") == wanted


@every_case
def test_repr_says_every_setting_that_differs_and_is_read(case: Case) -> None:
    param = nn.Parameter(torch.zeros(4, 3))
    optimizer = made(case, [param])
    group = optimizer.param_groups[0]
    fields = {**schema.COMMON, **case.cls._SCHEMA}
    tried = 0
    for key in sorted(group.keys() & fields.keys() - {"lr", "algorithm", "relative_step"}):
        before = group[key]
        for value in (not before if isinstance(before, bool) else None, 0.125, "sentinel"):
            if value is not None and value != before:
                group[key] = value
                assert f"{key}: {value}" in repr(optimizer), key
                tried += 1
        group[key] = before
    assert tried > 20
    assert len(repr(optimizer).splitlines()) == 3


@every_case
def test_repr_of_another_algorithms_group_compares_its_defaults(case: Case) -> None:
    others = [
        {"params": [nn.Parameter(torch.zeros(3))], "algorithm": algorithm, "weight_decay": 0.5}
        for algorithm in ("adamw", "lion")
    ]
    groups = [{"params": [nn.Parameter(torch.zeros(4, 3))]}, *others]
    lines = repr(made(case, groups)).splitlines()[2:-1]
    assert [line.split("lr: 0.25")[1].strip() for line in lines] == ["weight_decay: 0.5"] * 2


def test_repr_counts_the_steps_and_shows_what_schedulers_add() -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.99))
    run_steps(optimizer, model, range(3))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    settings = optimizer._summary()[0]["settings"]
    assert settings == "betas: (0.8, 0.99), initial_lr: 0.5, step: 3"


def test_repr_takes_whatever_a_user_writes_into_a_group() -> None:
    optimizer = named()
    group = optimizer.param_groups[0]
    group |= {"betas": torch.zeros(2), "eps": [1, 2], "weight_decay": None, "note": "x" * 500, "y": "a\nb"}
    text = repr(optimizer)
    assert len(text.splitlines()) == 3
    assert len(text) < 400
    assert "weight_decay: None, y: a b" in text
    group |= {"algorithm": ["none"], 1: 2}
    assert "['none']  parameters: 1" in repr(optimizer)
    assert "1: 2, " in repr(optimizer)
    optimizer.param_groups[0]["lr"] = torch.tensor([0.5])
    assert "lr: tensor([0.5000])" in repr(optimizer)


@every_case
def test_all_settings_are_in_the_repr_of_torch(case: Case) -> None:
    optimizer = case.build(make_model())
    text = Optimizer.__repr__(optimizer)
    assert text.startswith(f"{case} (\nParameter Group 0\n")
    for key in optimizer.param_groups[0].keys() - {"params"}:
        assert f"\n    {key}: " in text


# ------------------------------------------------------------------ metrics in a log


class Writer:
    """Takes scalars as ``torch.utils.tensorboard.SummaryWriter`` does."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert type(tag) is str
        assert type(scalar_value) is float, tag
        assert type(global_step) is int
        assert tag not in self.taken
        self.taken[tag] = scalar_value


def log(writer: Any, optimizer: Any, step: int) -> None:
    """The loop that docs/look-inside.md shows."""
    for row in optimizer.metrics():
        for key, value in row.items():
            if isinstance(value, float):
                writer.add_scalar(f"{key}/{row['name']}", value, step)


@every_case
def test_metrics_go_to_a_writer_of_scalars_in_one_loop(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, named=True)
    run_steps(optimizer, model, range(1))
    set_grads(model, 1)
    writer = Writer()
    log(writer, optimizer, 1)
    table = optimizer.metrics()
    numbers = {key for row in table for key in row} - {"name", "algorithm"}
    wanted = {f"{key}/{row['name']}" for row in table for key in numbers if row[key] is not None}
    assert writer.taken.keys() == wanted
    assert len(wanted) >= 2 * len(table)
