"""Time of an optimizer against its number of parameters: models with LoRA or experts have thousands."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.support.threads import computing_threads
from torch import Tensor, nn

import oxidion

COUNTS = (100, 5_000, 20_000)
MOST = 1.1
"""Exponent of the time from the least to the largest number of parameters."""
MOST_AT_THE_END = 1.4
"""The same from 5,000 on. What is done for each pair would show, and caches of the processor do."""
ROUNDS = 4
"""How often each size is measured at most. Other work on the machine only adds, so the least counts."""
CASES: dict[str, tuple[tuple[int, ...], bool]] = {
    "AdamW": ((256,), False),
    "Muon": ((16, 16), False),
    "Lion": ((512,), True),
}
"""Class, shape of a parameter, and whether each parameter is a group of its own: a quarter as many then.

From 2 MiB of parameters on, memory is asked for ahead, so all but the least size have more.
"""


@pytest.mark.parametrize("name", CASES)
def test_time_is_linear_in_the_number_of_parameters(name: str) -> None:
    shape, own_groups = CASES[name]
    counts = [count // 4 if own_groups else count for count in COUNTS]
    least: dict[int, dict[str, float]] = defaultdict(dict)
    with computing_threads(1):
        taken(name, shape, 2, own_groups)  # imports and first uses
        for _ in range(ROUNDS):
            for count in counts:
                for what, seconds in taken(name, shape, count, own_groups).items():
                    least[count][what] = min(seconds, least[count].get(what, math.inf))
            overall, at_the_end = (fitted(least, first, counts[-1]) for first in counts[:-1])
            if max(overall.values()) <= MOST and max(at_the_end.values()) <= MOST_AT_THE_END:
                break
    assert max(overall.values()) <= MOST, (overall, dict(least))
    assert max(at_the_end.values()) <= MOST_AT_THE_END, (at_the_end, dict(least))
    few = counts[1]
    for what, seconds in least[few].items():
        assert least[counts[0]][what] <= seconds, ("takes less with more parameters", what, dict(least))


def fitted(least: Mapping[int, Mapping[str, float]], few: int, many: int) -> dict[str, float]:
    return {
        what: math.log(seconds / least[few][what]) / math.log(many / few)
        for what, seconds in least[many].items()
    }


def taken(name: str, shape: tuple[int, ...], count: int, own_groups: bool) -> dict[str, float]:
    """CPU seconds of each operation on ``count`` parameters."""
    params = [nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones(shape)
    given = [{"params": [param]} for param in params] if own_groups else params
    made: list[Any] = []
    seconds = {"construction": clocked(lambda: made.append(getattr(oxidion, name)(given)))}
    optimizer, saved = made[0], []
    seconds["first step"] = clocked(optimizer.step)
    seconds["warm step"] = min(clocked(optimizer.step) for _ in range(3))
    seconds["state_dict()"] = clocked(lambda: saved.append(optimizer.state_dict()))
    seconds["load_state_dict()"] = clocked(lambda: optimizer.load_state_dict(saved[0]))
    more = nn.Parameter(torch.zeros(shape))
    more.grad = torch.ones(shape)
    seconds["group added"] = clocked(
        lambda: (optimizer.add_param_group({"params": [more]}), optimizer.step())
    )
    return seconds


def clocked(act: Callable[[], object]) -> float:
    """Seconds of this thread, without the one that has memory cleared, and without garbage collection."""
    gc.collect()
    gc.disable()
    try:
        start = time.thread_time()
        act()
        return time.thread_time() - start
    finally:
        gc.enable()


def test_construction_of_20_000_parameters_takes_a_second() -> None:
    params = [nn.Parameter(torch.zeros(256)) for _ in range(20_000)]
    oxidion.AdamW([nn.Parameter(torch.zeros(2))])
    assert min(clocked(lambda: oxidion.AdamW(params)) for _ in range(3)) < 1.0


def test_pinned_memory_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Tensor] = []
    own = Tensor.is_pinned
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: (looks.append(self), own(self))[1])
    params = [nn.Parameter(torch.zeros(1024)) for _ in range(1000)]
    oxidion.AdamW(params)
    assert 0 < len(looks) <= len(params)
