"""Python that runs within a step replaces, resizes and frees what the step uses. The process lives."""

from __future__ import annotations

import copy
import gc
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import oxidion
from support import forks

from .python_in_a_step import Asking

SCRIPT = Path(__file__).with_name("python_in_a_step.py")
PLACES = {
    "function": ("Muon", "NorMuon", "Dion2"),
    "number": ("AdamW", "Dion"),
    "gradient": ("SOAP", "Muon"),
    "profile": ("AdamW", "Dion", "GaLoreAdamW"),
    "object": ("Lamb", "Muon"),
    "thread": ("AdamW", "Muon"),
    "log": ("Dion",),
    "hook": ("NorMuon",),
}


@pytest.mark.parametrize(
    ("place", "name"), [(place, name) for place, names in PLACES.items() for name in names]
)
def test_process_survives_what_python_does_in_a_step(place: str, name: str) -> None:
    [ended] = forks.common().run(SCRIPT, place, name, "24", "0")
    assert ended.returncode == 0, ended.stderr
    if place != "thread":
        reached = int(ended.stdout.rsplit("reached ", 1)[1].split()[0])
        assert reached >= 8, ended.stdout


def made(count: int = 2, **settings: Any) -> tuple[Any, list[Tensor]]:
    params: list[Tensor] = [nn.Parameter(torch.ones(16, 16)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(16, 16)
    return oxidion.Muon(params, lr=0.1, **settings), params


@pytest.mark.parametrize("size", [16, 300])
def test_weight_replaced_by_a_function_is_named_and_not_written(size: int) -> None:
    param = nn.Parameter(torch.ones(size, size))
    param.grad = torch.randn(size, size)
    kept: list[Tensor] = []

    def function(x: Tensor, epsilon: float = 1e-7) -> Tensor:
        kept.append(param.data)
        param.data = torch.full((size, size), 5.0)
        return x

    optimizer = oxidion.Muon([param], lr=0.1, newton_schulz_func=function)
    with pytest.raises(
        RuntimeError, match=r"parameter 0 of group 0: .* was given other memory, or was resized"
    ):
        optimizer.step()
    assert bool((kept[0] == 1).all())
    assert bool((param == 5).all())
    with pytest.raises(oxidion.PoisonedOptimizer):
        optimizer.step()


@pytest.mark.parametrize("which", ["param", "grad", "momentum"])
def test_memory_that_goes_between_two_instructions_is_noticed(which: str) -> None:
    optimizer, [param] = made(1)
    optimizer.step()
    own = optimizer._runner

    class Between:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def execute(self, *arguments: Any) -> None:
            states = optimizer.state[param]
            found = {"param": param, "grad": param.grad, "momentum": states["momentum"]}[which]
            found.data = found.data.clone()
            own.execute(*arguments)

    optimizer._runner = Between()
    with pytest.raises(RuntimeError, match="was given other memory"):
        optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon"])
@pytest.mark.parametrize("is_strided", [False, True])
def test_weight_replaced_after_the_last_instruction_is_noticed(name: str, is_strided: bool) -> None:
    value = torch.ones(16, 16).t() if is_strided else torch.ones(16, 16)
    param = nn.Parameter(torch.ones(16, 32)[:, :16] if is_strided else value)
    param.grad = torch.randn(16, 16)
    optimizer = getattr(oxidion, name)([param])
    own = optimizer._runner

    class After:
        def __getattr__(self, name: str) -> Any:
            return getattr(own, name)

        def execute(self, *arguments: Any) -> None:
            own.execute(*arguments)
            param.data = torch.full((16, 16), 5.0)

    optimizer._runner = After()
    with pytest.raises(RuntimeError, match="was given other memory"):
        optimizer.step()
    assert bool((param == 5).all())


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "Dion", "Lamb"])
@pytest.mark.parametrize("shape", [(40, 30), (32, 16), (4, 4), (8, 32)])
def test_weight_replaced_while_another_one_is_asked_is_noticed(name: str, shape: tuple[int, int]) -> None:
    params = [Asking(torch.ones(16, 32)) for _ in range(2)]
    for param in params:
        param.grad = torch.randn(16, 32)
    optimizer = getattr(oxidion, name)(params)
    optimizer.step()

    def ask() -> None:
        params[1].ask = None
        params[0].data = torch.full(shape, 5.0)
        nn.Parameter.grad.__set__(params[0], torch.ones(shape))  # type: ignore[attr-defined]

    params[1].ask = ask
    with pytest.raises((RuntimeError, ValueError), match="was given other memory"):
        optimizer.step()
    assert bool((params[0] == 5).all())


@pytest.mark.parametrize("group", [{}, {"average": "ema"}])
def test_counter_freed_while_a_weight_is_asked_is_noticed(group: dict[str, str]) -> None:
    first, second = nn.Parameter(torch.ones(16, 16)), Asking(torch.ones(16, 16))
    first.grad = torch.randn(16, 16)
    optimizer = (
        oxidion.SOAP([first, second]) if not group else oxidion.AdamW([{"params": [first, second], **group}])
    )
    optimizer.step()

    def ask() -> None:
        for state in optimizer.state[first].values():
            state.untyped_storage().resize_(0)

    second.ask = ask
    with pytest.raises((RuntimeError, ValueError), match="was given other memory"):
        optimizer.step()


class Liar(list[Any]):
    """Reports a length that it does not have."""

    def __len__(self) -> int:
        return 2**40


def test_sequence_that_lies_about_its_length_is_refused() -> None:
    x, rows = torch.randn(4, 4), [(3.0, -4.0, 1.5)] * 3
    for lying in (Liar(rows), [Liar(row) for row in rows]):
        with pytest.raises(ValueError, match="ns_coefficients has a value of no known kind"):
            oxidion.functional.newton_schulz(x, coefficients=lying)


def test_state_without_memory_is_refused_by_load_state_dict() -> None:
    optimizer, params = made()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())  # it has the optimizer's own dicts
    saved["state"][0]["momentum"].untyped_storage().resize_(0)
    before = {key: value.clone() for key, value in optimizer.state[params[0]].items()}
    with pytest.raises(ValueError, match="has no memory"):
        optimizer.load_state_dict(saved)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[params[0]].items())


def test_arrays_with_unaligned_strides_are_read_as_numpy_does() -> None:
    packed = np.zeros((4, 6), dtype=np.dtype([("a", "u1"), ("b", "<f4")]))
    packed["b"] = np.random.default_rng(0).normal(size=(4, 6))
    x = packed["b"]
    assert np.array_equal(oxidion.functional.polar(x), oxidion.functional.polar(np.ascontiguousarray(x)))
    with pytest.raises(ValueError, match="at most 32 dimensions"):
        oxidion.functional.polar(np.zeros((1,) * 42, dtype=np.float32))


def test_power_iterations_have_an_upper_bound() -> None:
    with pytest.raises(ValueError, match="power_iters must be an integer >= 1 and <= 1000"):
        oxidion.Dion([nn.Parameter(torch.ones(8, 8))], power_iters=2**31)


def test_gradient_in_a_weight_may_go_while_a_function_runs() -> None:
    def function(x: Tensor, epsilon: float = 1e-7) -> Tensor:
        param.grad = None
        gc.collect()
        return x

    optimizer, [param] = made(1, newton_schulz_func=function)
    param.grad = param.data
    optimizer.step()
    assert not bool((param == 1).all())


@pytest.mark.parametrize("average", ["ema", "schedule_free"])
def test_averages_of_a_step_that_has_ended_are_not_written(average: str) -> None:
    param = nn.Parameter(torch.ones(16, 16))
    param.grad = torch.randn(16, 16)
    optimizer = oxidion.AdamW([{"params": [param], "average": average}])
    optimizer.step()
    session = optimizer._session
    assert session is not None
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    kept, param.data = param.data, torch.ones(16, 16)
    for is_late in (False, True):
        session.average(is_late)
    assert all(torch.equal(before[key], value) for key, value in optimizer.state[param].items())
    del kept


def test_function_may_change_elements_and_step_another_optimizer() -> None:
    other, others = made()

    def function(x: Tensor, epsilon: float = 1e-7) -> Tensor:
        param.data.mul_(1.0)
        other.step()
        return x

    optimizer, [param] = made(1, newton_schulz_func=function)
    optimizer.step()
    assert not bool((param == 1).any())
    assert not bool((others[0] == 1).any())


def test_result_of_a_function_without_memory_is_refused() -> None:
    def function(x: Tensor, epsilon: float = 1e-7) -> Tensor:
        result = x.clone()
        result.untyped_storage().resize_(0)
        return result

    optimizer, _ = made(newton_schulz_func=function)
    with pytest.raises(ValueError, match="storage was freed"):
        optimizer.step()


def test_rate_that_replaces_a_weight_when_read_steps_the_new_one() -> None:
    class Rate:
        def __float__(self) -> float:
            params[0].data = torch.full((16, 16), 5.0)
            return 0.1

    params = [nn.Parameter(torch.ones(16, 16)) for _ in range(2)]
    for param in params:
        param.grad = torch.ones(16, 16)
    optimizer = oxidion.Lion([{"params": [param]} for param in params], lr=0.1, weight_decay=0.0)
    optimizer.step()
    old = params[0].data
    before = old.clone()
    optimizer.param_groups[1]["lr"] = Rate()
    optimizer._check_written = lambda: None
    optimizer.step()
    assert torch.equal(old, before)
    assert bool((params[0] == 4.9).all())


NAMES = ("AdamW", "Muon", "Dion", "SOAP", "GaLoreAdamW", "APOLLOAdamW", "Adafactor", "Lamb")


@pytest.mark.parametrize("name", NAMES)
def test_step_under_a_mode_without_memory_is_refused_by_name(name: str) -> None:
    extra: dict[str, Any] = {"rank": 4} if name in ("GaLoreAdamW", "APOLLOAdamW") else {}
    param = nn.Parameter(torch.ones(16, 16))
    param.grad = torch.randn(16, 16)
    optimizer = getattr(oxidion, name)([param], **extra)
    for state_is_there in (False, True):
        before, count = param.detach().clone(), optimizer.param_groups[0]["step"]
        with FakeTensorMode(allow_non_fake_inputs=True):
            with pytest.raises(TypeError, match="within FakeTensorMode"):
                optimizer.step()
            with pytest.raises(TypeError, match="within FakeTensorMode"):
                optimizer.init_state()
        assert torch.equal(param, before)
        assert (optimizer.param_groups[0]["step"], bool(optimizer.state)) == (count, state_is_there)
        optimizer.step()


class Loud(TorchDispatchMode):
    """Notes the operations that enter Python."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["Dion", "SOAP", "Muon"])
def test_modes_of_torch_do_not_see_operations_of_the_core(name: str) -> None:
    param = nn.Parameter(torch.ones(16, 16))
    param.grad = torch.randn(16, 16)
    optimizer = getattr(oxidion, name)([param])
    optimizer.step()
    with Loud() as mode:
        optimizer.step()
        torch.ones(1)
        oxidion.functional.polar(torch.randn(8, 8))
    assert not [name for name in mode.seen if any(word in name for word in ("mm", "qr", "copy", "eigh"))]
    assert "aten.ones.default" in mode.seen


def test_function_of_the_user_runs_under_the_modes_of_its_caller() -> None:
    def function(x: Tensor, epsilon: float = 1e-7) -> Tensor:
        return x @ x

    optimizer, _ = made(newton_schulz_func=function)
    with Loud() as mode:
        optimizer.step()
    assert "aten.mm.default" in mode.seen or "aten.bmm.default" in mode.seen


class Pretends:
    """Says that it is a tensor."""

    @property
    def __class__(self) -> type:
        return Tensor

    @__class__.setter
    def __class__(self, _: type) -> None:
        raise TypeError


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(8, 8)


def fake_of_another_class() -> Any:
    found: Any = fake()
    found.__class__ = Tensor
    return found


def freed() -> Tensor:
    found = torch.ones(8, 8)
    found.untyped_storage().resize_(0)
    return found


def freed_columns() -> Tensor:
    found = torch.ones(8, 16)[:, ::2]
    found.untyped_storage().resize_(0)
    return found


def shrunk() -> Tensor:
    found = torch.ones(8, 8)
    found.untyped_storage().resize_(64)
    return found


IMPOSTORS: list[Callable[[], Any]] = [
    Pretends, fake, fake_of_another_class, freed, shrunk, lambda: torch.ones(8, 8, device="meta"),
    freed_columns, lambda: torch.eye(8).to_sparse(), lambda: torch.ones(8, 8).to_mkldnn(), object,
]  # fmt: skip
FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "polar": oxidion.functional.polar,
    "newton_schulz": oxidion.functional.newton_schulz,
    "cholesky_qr": oxidion.functional.cholesky_qr,
    "quantize_blockwise": oxidion.functional.quantize_blockwise,
    "quantized": lambda x: oxidion.functional.dequantize_blockwise(x, torch.ones(8, 1)),
    "absmax": lambda x: oxidion.functional.dequantize_blockwise(torch.ones(8, 8, dtype=torch.uint8), x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("number", range(len(IMPOSTORS)))
def test_function_refuses_what_has_no_memory(name: str, number: int) -> None:
    x = IMPOSTORS[number]()
    if name == "quantized" and number in (3, 4):
        x = torch.ones(8, 8, dtype=torch.uint8)
        x.untyped_storage().resize_(0 if number == 3 else 16)
    # Of a tensor whose class was changed torch refuses to tell the device.
    with pytest.raises((TypeError, ValueError, RuntimeError) if number == 2 else (TypeError, ValueError)):
        FUNCTIONS[name](x)


def test_handlers_of_all_signals_run_even_after_one_has_raised() -> None:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGQUIT, signal.SIGXCPU)
    before = {number: signal.getsignal(number) for number in (*numbers, signal.SIGINT)}
    got: list[int] = []
    optimizer, _ = made(newton_schulz_func=lambda x, epsilon=1e-7: (send(), x)[1])

    def send() -> None:
        for number in (signal.SIGINT, *numbers, signal.SIGUSR1):
            signal.raise_signal(number)
            time.sleep(0)

    try:
        for number in numbers:
            signal.signal(number, lambda number, _: got.append(number))
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert got == [*numbers, signal.SIGUSR1]
    assert optimizer.param_groups[0]["step"] == 1
