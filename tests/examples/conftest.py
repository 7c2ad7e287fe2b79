"""What the tests of the examples share: their modules by plain names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The modules of ``train_gpt.py``, imported as the script imports them."""
    names = ("corpus", "gpt", "recipes", "training", "report", "options", "train_gpt")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back that ``--threads`` changes."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
