"""Signals and failures during a step: it is finished or not begun, and what is half done is never saved."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._core import interrupts
from support import forks

SIZE = 24
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lamb": {},
    "Adafactor": {"lr": 1e-2, "relative_step": False, "scale_parameter": False},
    "Muon": {},
    "Dion": {"rank_fraction": 0.5},
    "GaLoreAdamW": {"rank": 4},
}


class Alarm(Exception):
    """Raised by a handler of a signal."""


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    after = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before, "a step has left a handler of its own behind"


def make(name: str, **settings: Any) -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(SIZE, SIZE)) for _ in range(5)]
    for param in params:
        param.grad = torch.randn(SIZE, SIZE)
    return getattr(oxidion, name)(params, **{**SETTINGS[name], **settings}), [p.data for p in params]


def interrupting(optimizer: Any, action: Callable[[], None]) -> None:
    """Has the next steps do something between two instructions, in Python."""
    own = optimizer._runner

    class Interrupting:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def execute(self, session: Any, schedule: Any, comms: Any) -> None:
            half = len(schedule) // 2
            own.execute(session, schedule[:half], comms)
            action()
            own.execute(session, schedule[half:], comms)

    optimizer._runner = Interrupting()


@pytest.mark.parametrize("name", SETTINGS)
def test_interrupt_within_a_step_comes_when_it_is_done(name: str) -> None:
    optimizer, params = make(name)
    twin, wanted = make(name)
    interrupting(optimizer, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))
    assert optimizer.param_groups[0]["step"] == 1
    del optimizer._runner
    optimizer.step()
    twin.step()
    assert all(torch.equal(a, b) for a, b in zip(params, wanted, strict=True))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_handlers_of_other_signals_wait_and_run_once_for_each(number: int) -> None:
    optimizer, params = make("Muon")
    before, ran = params[0].clone(), []

    def handler(signum: int, frame: object) -> None:
        ran.append((signum, torch.equal(params[0], before)))
        raise Alarm

    before_handler = signal.getsignal(number)
    signal.signal(number, handler)
    interrupting(optimizer, lambda: os.kill(os.getpid(), number))
    try:
        with pytest.raises(Alarm):
            optimizer.step()
    finally:
        signal.signal(number, before_handler)
    assert ran == [(number, False)]
    optimizer.state_dict()


def test_interrupt_before_the_first_instruction_changes_nothing() -> None:
    optimizer, params = make("AdamW")
    before = params[0].clone()

    def raises(*_: object) -> None:
        raise KeyboardInterrupt

    optimizer.register_step_pre_hook(raises)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert torch.equal(params[0], before)
    assert optimizer.param_groups[0]["step"] == 0


def test_second_interrupt_ends_a_step_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = make("Muon")
    monkeypatch.setattr(interrupts, "IMPATIENCE", -1.0)
    seen: list[int] = []

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(1)
        os.kill(os.getpid(), signal.SIGINT)
        seen.append(2)

    interrupting(optimizer, twice)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert seen == [1]
    with pytest.raises(oxidion.PoisonedOptimizer, match=r"step 1 failed half way \(KeyboardInterrupt"):
        optimizer.step()


def test_step_in_another_thread_defers_nothing() -> None:
    optimizer, params = make("AdamW")
    before = params[0].clone()
    thread = threading.Thread(target=optimizer.step)
    thread.start()
    thread.join()
    assert not torch.equal(params[0], before)


def poisoned() -> tuple[Any, dict[str, Any]]:
    optimizer, _ = make("Muon")
    saved = optimizer.state_dict()

    def fails() -> None:
        raise MemoryError("no room")

    interrupting(optimizer, fails)
    with pytest.raises(MemoryError, match="no room") as caught:
        optimizer.step()
    notes = getattr(caught.value, "__notes__", ["Load a checkpoint of both"])
    assert "Load a checkpoint of both" in notes[0]
    del optimizer._runner
    return optimizer, saved


@pytest.mark.parametrize(
    "use",
    [
        lambda optimizer: optimizer.state_dict(),
        lambda optimizer: optimizer.step(),
        lambda optimizer: pickle.dumps(optimizer),
        lambda optimizer: copy.deepcopy(optimizer),
        lambda optimizer: optimizer.synchronize_for_checkpoint(),
    ],
    ids=["state_dict", "step", "pickle", "deepcopy", "synchronize"],
)
def test_half_a_step_is_neither_saved_nor_copied_nor_continued(use: Callable[[Any], object]) -> None:
    optimizer, _ = poisoned()
    with pytest.raises(oxidion.PoisonedOptimizer, match=r"step 1 failed .*half new.*Load a"):
        use(optimizer)


def test_loading_a_checkpoint_makes_a_poisoned_optimizer_whole() -> None:
    optimizer, saved = poisoned()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["step"] == 0
    optimizer.step()
    optimizer.state_dict()


IMPORTS = """
import os, signal, sys, threading, time
import torch
ran = []
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, lambda *_: ran.append("SIGTERM"))
# Python drops an interrupt that is raised in a callback of its own imports.
sys.unraisablehook = lambda dropped: ran.append({KeyboardInterrupt: "SIGINT"}[dropped.exc_type])
def send():
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
sender = threading.Thread(target=send)
sender.start()
try:
    import oxidion
    time.sleep(10)
except KeyboardInterrupt:
    ran.append("SIGINT")
sender.join()
time.sleep(0.01)
assert sorted(ran) == ["SIGINT", "SIGTERM"], ran
import oxidion
param = torch.nn.Parameter(torch.ones(8, 8))
param.grad = torch.ones(8, 8)
oxidion.Muon([param]).step()
assert not (param == 1).any()
"""


def test_signals_while_importing_run_handlers_and_allow_a_retry() -> None:
    fresh = forks.Forks("torch")
    try:
        for delay in ("0.002", "0.03", "0.08", "0.15"):
            [ended] = fresh.run(IMPORTS, delay)
            assert ended.returncode == 0, ended.stderr
    finally:
        fresh.stop()
