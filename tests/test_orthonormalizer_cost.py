"""The work by which a form is chosen, and the choice itself, against the time that the forms take."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import oxidion
from support.threads import computing_threads

SHORT = 768
STEPS = 5
ROUNDS = 7


def share(long: int, starts: int) -> float:
    """Work of the Gram form by that of the standard form, as ``orthonormalizer.rs`` counts it."""
    whole, square = 1.5 * SHORT * SHORT * long, 0.5 * SHORT**3
    gram = starts * whole + (STEPS + 3 * (STEPS - starts)) * square
    return gram / (STEPS * (whole + square))


def seconds(optimizer: torch.optim.Optimizer) -> float:
    start = time.thread_time()
    optimizer.step()
    return time.thread_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("long", [SHORT, 3 * SHORT // 2, 2 * SHORT, 4 * SHORT])
def test_share_of_work_is_the_share_of_time(long: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        optimizers = []
        for method in ("gram", "standard"):
            param = torch.nn.Parameter(torch.zeros(SHORT, long))
            param.grad = torch.randn(SHORT, long, generator=torch.Generator().manual_seed(0))
            optimizers.append(oxidion.Muon([param], orth_method=method, orth_dtype="float32"))
            optimizers[-1].step()
        ratios = [seconds(optimizers[0]) / seconds(optimizers[1]) for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(before)
    # Measured: at most 0.05 above the share of work, which counts no passes over memory.
    assert abs(statistics.median(ratios) - share(long, starts=2)) < 0.12


SLOWER = 1.15
"""What the form that "auto" takes may cost of the time of the faster one."""
SAMPLE = 0.01
"""Seconds; shorter steps are repeated."""
ATTEMPTS = 3
CHOICES = [((128, 128), False), ((128, 512), True), ((256, 512), False), ((512, 512), False)]
CHOICES += [((512, 768), False), ((512, 2048), True), ((1024, 256), True)]
CHOICES += [((64, 64), False), ((64, 256), False), ((64, 1024), True), ((96, 768), True)]
"""Shapes, and whether one form is so much faster that the other would be a wrong choice."""


def stepped(shape: tuple[int, int], method: str) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """An optimizer that has taken its first step, and the update."""
    param = torch.nn.Parameter(torch.zeros(shape))
    param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    optimizer = oxidion.Muon([param], orth_method=method, orth_dtype="float32", weight_decay=0.0)
    optimizer.step()
    return optimizer, param.detach().clone()


def cpu_seconds(optimizer: torch.optim.Optimizer, repeat: int) -> float:
    start = time.process_time()
    for _ in range(repeat):
        optimizer.step()
    return (time.process_time() - start) / repeat


def gram_by_standard(shape: tuple[int, int]) -> float:
    """Median over interleaved samples of the time of the Gram form by that of the standard form."""
    gram, standard = (stepped(shape, method)[0] for method in ("gram", "standard"))
    repeat = max(1, round(SAMPLE / max(cpu_seconds(standard, 1), 1e-6)))
    ratios = []
    for turn in range(ROUNDS + 2):
        order = (gram, standard) if turn % 2 else (standard, gram)
        taken = {id(optimizer): cpu_seconds(optimizer, repeat) for optimizer in order}
        ratios.append(taken[id(gram)] / taken[id(standard)])
    return statistics.median(ratios)


@pytest.mark.parametrize(("shape", "decisive"), CHOICES, ids=[str(shape) for shape, _ in CHOICES])
def test_auto_takes_a_form_that_is_hardly_slower_than_the_other(
    shape: tuple[int, int], decisive: bool
) -> None:
    with computing_threads(1):
        updates = {method: stepped(shape, method)[1] for method in ("auto", "gram", "standard")}
        taken = [form for form in ("gram", "standard") if torch.equal(updates["auto"], updates[form])]
        assert len(taken) == 1, "the update of one form, and the forms differ"
        for attempt in range(1, ATTEMPTS + 1):
            ratio = gram_by_standard(shape)
            cost = ratio if taken == ["gram"] else 1 / ratio
            # Where a form is much faster, the measurement has to show that it can tell.
            if cost <= SLOWER and (not decisive or cost <= 1 / SLOWER):
                break
            assert attempt < ATTEMPTS, f"{taken[0]} takes {cost:.2f} times as long as the other form"
