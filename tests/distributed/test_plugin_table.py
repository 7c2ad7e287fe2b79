"""Every cell of the table in docs/coming-from/colossalai.md, run on four processes and compared with one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import oxidion
from support.workers import Workers

from . import plugins

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming-from" / "colossalai.md").read_text()
PLUGINS = (
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "TorchDDPPlugin",
    "GeminiPlugin",
    "MoeHybridParallelPlugin",
)
CLASSES = {"Lamb": "Lamb", "Adafactor": "Adafactor", "CAME": "CAME", "GaLore": "GaLoreAdamW"}


def table() -> dict[tuple[str, str], str]:
    """The cells of the page's first table by plugin and optimizer."""
    lines = PAGE[PAGE.index("| plugin |") :].split("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    header, _, *body = rows
    cells = {}
    for plugin, *row in body:
        name = re.sub(r"^\[(\w+)\].*$", r"\1", plugin)
        cells.update({(name, column): cell for column, cell in zip(header[1:], row, strict=True)})
    return cells


def lines_of(plugin: str) -> str:
    """The code of a plugin's section."""
    section = re.split(r"\n##+ ", PAGE.split(f"\n### {plugin}\n")[1])[0]
    return "".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


CELLS = table()


def test_every_plugin_has_a_cell_for_every_optimizer() -> None:
    assert list(CELLS) == [(plugin, name) for plugin in PLUGINS for name in CLASSES]


@pytest.mark.parametrize(("plugin", "name"), CELLS, ids=[f"{plugin}-{name}" for plugin, name in CELLS])
def test_cell_steps_on_four_processes_as_one_process_does(four: Workers, plugin: str, name: str) -> None:
    code = re.fullmatch(r"`(.+)`", CELLS[plugin, name])
    assert code, "the cell has no line of code"
    assert hasattr(oxidion, CLASSES[name])
    for error, moved, cls in four.run(plugins.run, lines_of(plugin), code[1]):
        assert cls == CLASSES[name]
        assert moved
        assert error <= 1e-9
