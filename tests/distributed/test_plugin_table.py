"""Every class and plugin of docs/coming-from/colossalai.md, run on four processes and compared with one."""

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


def table() -> dict[str, str]:
    """The line of each class in the page's table."""
    section = PAGE[PAGE.index("| class | line |") :].split("\n\n")[0]
    return dict(re.findall(r"^\| (\w+) \| `(.+)` \|$", section, re.MULTILINE))


def lines_of(plugin: str) -> str:
    """The code of a plugin's section."""
    section = re.split(r"\n##+ ", PAGE.split(f"\n### {plugin}\n")[1])[0]
    return "".join(re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE))


LINES = table()


def test_page_has_every_class_and_every_plugin() -> None:
    assert list(LINES) == list(CLASSES)
    assert re.findall(r"^### (\w+Plugin)$", PAGE, re.MULTILINE) == list(PLUGINS)


@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("name", CLASSES)
def test_class_steps_under_a_plugin_as_one_process_does(four: Workers, plugin: str, name: str) -> None:
    assert hasattr(oxidion, CLASSES[name])
    for error, moved, cls in four.run(plugins.run, lines_of(plugin), LINES[name]):
        assert cls == CLASSES[name]
        assert moved
        assert error <= 1e-9
