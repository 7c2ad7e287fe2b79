"""Steps of every algorithm on a device: as on the CPU, without waiting, and as replays of a graph.

They need a CUDA device, or with ``OXIDION_TEST_DEVICE=emulated`` what `driver.build` makes: the tests of
``test_launch_cases.py`` run them there.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

import oxidion
from oxidion._cuda import replay as _replay
from oxidion.graph import CudaGraphOptimizer
from support.asserts import error_in_ulps, update_relative_error
from support.cases import BASIS_ALGORITHMS, EMULATED, LOW_RANK_ALGORITHMS, ONLY_OF_MATRICES, Case

from .device_steps import (
    ALGORITHMS,
    CASES,
    DEVICE,
    QUANTIZED,
    Outcome,
    gradients_of,
    label,
    optimizer_of,
    outcome,
    outcomes_on_the_cpu,
    parameters_of,
)
from .recording import Capture

pytestmark = [] if EMULATED else pytest.mark.cuda
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
Outcomes = Callable[[str], Mapping[str, Outcome]]

#: Optimizers whose moments take no root or quotient and no product of matrices: the bits of the CPU.
EXACT_QUANTIZED = ("adamw", "lion", "muon", "normuon", "lamb")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The outcomes of an algorithm's rows on the CPU, computed once."""
    kept: dict[str, Mapping[str, Outcome]] = {}

    def of(algorithm: str) -> Mapping[str, Outcome]:
        if algorithm not in kept:
            kept[algorithm] = outcomes_on_the_cpu(algorithm, tmp_path_factory.mktemp("outcomes"))
        return kept[algorithm]

    return of


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def limit(case: Case, shape: torch.Size, dtype: torch.dtype) -> float:
    """How far an update may be from that of the CPU, relative to its size."""
    by_products = case.algorithm in (*ONLY_OF_MATRICES, *BASIS_ALGORITHMS)
    if dtype == torch.float64:
        return 1e-10 if by_products else 1e-12
    # Polar Express has a slope of 160 at the largest singular value that its normalisation allows, that of a
    # single row: a float32 rounding of 6e-8 becomes 1e-5. SOAPMuon first divides by small second moments:
    # 4.4e-5 is the largest error that was found.
    if case.algorithm == "soap_muon":
        return 1e-4
    return 5e-5 if by_products and len(shape) == 2 and min(shape) == 1 else 1e-5


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_updates_equal_those_on_the_cpu(on_cpu: Outcomes, algorithm: str, dtype: torch.dtype) -> None:
    expected, off = on_cpu(algorithm), []
    for case in CASES[algorithm]:
        theirs, ours = expected[label(case, dtype)], outcome(case, dtype, DEVICE)
        for before, after, found in zip(theirs.before, theirs.after, ours.after, strict=True):
            assert found.dtype == after.dtype
            error = update_relative_error(found, before, after.double() - before.double())
            if not error <= limit(case, before.shape, dtype):
                off.append(f"{case.name} {tuple(before.shape)}: {error:.1e}")
    assert not off, "\n".join(off)


@every_algorithm
def test_bfloat16_parameters_match_the_cpu_but_for_few_roundings(on_cpu: Outcomes, algorithm: str) -> None:
    """Float32 arithmetic differs in its last bits: what lies next to the middle of two goes either way."""
    # Dion also rounds Q, from which everything else follows in the next step.
    most_ulps, most_differ = (4.0, 0.1) if algorithm == "dion" else (2.0, 0.01)
    dtype, expected = torch.bfloat16, on_cpu(algorithm)
    for case in CASES[algorithm]:
        theirs, ours = expected[label(case, dtype)], outcome(case, dtype, DEVICE)
        for before, after, found in zip(theirs.before, theirs.after, ours.after, strict=True):
            where = f"{case.name} {tuple(before.shape)}"
            assert found.dtype == dtype
            assert error_in_ulps(found, after.double(), before) <= most_ulps, where
            assert int((found != after).sum()) <= 1 + most_differ * found.numel(), where


@every_algorithm
def test_8_bit_states_equal_those_of_the_cpu(on_cpu: Outcomes, algorithm: str) -> None:
    case, quantized = QUANTIZED[algorithm], 0
    theirs = on_cpu(algorithm)[label(case, torch.float32)]
    ours = outcome(case, torch.float32, DEVICE, state_bits=8)
    for expected, found in zip(theirs.states, ours.states, strict=True):
        assert expected.keys() == found.keys()
        for key, wanted in expected.items():
            if wanted.dtype != torch.uint8:
                continue
            quantized += 1
            scales, own = expected[f"{key}_absmax"], found[f"{key}_absmax"]
            if algorithm in EXACT_QUANTIZED:
                assert torch.equal(found[key], wanted), key
                assert torch.equal(own, scales), key
            else:
                distance = (found[key].int() - wanted.int()).abs()
                assert int(distance.max()) <= 1, key
                assert float((distance > 0).double().mean()) <= 2e-3, key
                torch.testing.assert_close(own, scales, rtol=1e-5, atol=0)
    assert quantized >= len(case.shapes)


@pytest.mark.parametrize("orth_dtype", ["bfloat16", "float16"])
def test_half_precision_products_stay_near_the_polar_factor(orth_dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    param = Parameter(torch.randn(384, 640, generator=generator).to(DEVICE))
    param.grad = torch.randn(384, 640, generator=generator).to(DEVICE)
    before = param.detach().clone()
    oxidion.Muon([param], lr=1.0, mu=0.0, weight_decay=0.0, orth_dtype=orth_dtype, adjust_lr=None).step()
    singular = torch.linalg.svdvals((before - param.detach()).double())
    assert singular.min() > 0.7
    assert singular.max() < 1.3


#: Decompositions that read on the host whether they converged.
CHECKED = (torch.ops.aten._linalg_eigh, torch.ops.aten._linalg_svd, torch.ops.aten._linalg_check_errors)
#: Tags of operations whose result, or its size, is known only once it is there.
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Reading(TorchDispatchMode):
    """Refuses what the host would wait for on a device."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if WAITS & set(func.tags) or func.overloadpacket in CHECKED:
            raise AssertionError(f"the host reads a value: {func}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Raises an error where the host waits for the device."""
    if EMULATED:
        with _Reading():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def give(params: list[Parameter], grads: list[Tensor]) -> None:
    """Sets gradients, in the memory of those that are there."""
    for param, grad in zip(params, grads, strict=True):
        if param.grad is None:
            param.grad = grad.to(DEVICE, param.dtype)
        else:
            param.grad.copy_(grad)


def usual(algorithm: str) -> tuple[Case, dict[str, Any]]:
    """The large row of an algorithm, with settings that have all steps alike after the first."""
    settings: dict[str, Any] = {"rank_fraction": 0.5} if algorithm == "dion" else {}
    if algorithm in LOW_RANK_ALGORITHMS:
        settings["update_proj_gap"] = 1000
    if algorithm in BASIS_ALGORITHMS:
        settings["precondition_frequency"] = 1000
    return CASES[algorithm][-1], settings


@every_algorithm
@pytest.mark.parametrize("rate_there", [False, True])
def test_step_waits_for_nothing(algorithm: str, rate_there: bool) -> None:
    case, settings = usual(algorithm)
    params = parameters_of(case, torch.float32, DEVICE)
    if rate_there:
        settings |= {"lr": torch.tensor(0.01, device=DEVICE), "capturable": True}
    optimizer = optimizer_of(case, params, **settings)
    first, second = gradients_of(case, 2)
    give(params, first)
    optimizer.step()
    give(params, second)
    before = [param.detach().clone() for param in params]
    with no_waiting():
        optimizer.step()
    assert not any(torch.equal(old, param) for old, param in zip(before, params, strict=True))


@every_algorithm
def test_replays_are_steps_with_their_own_settings_and_gradients(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if EMULATED:
        Capture.driver = ctypes.CDLL("libcuda.so.1")
        monkeypatch.setattr(_replay, "Capture", Capture)
    case, settings = usual(algorithm)
    # libtorch multiplies the gradients of these themselves.
    is_low_rank = algorithm in LOW_RANK_ALGORITHMS
    params, expected = (parameters_of(case, torch.float32, DEVICE) for _ in range(2))
    optimizer = CudaGraphOptimizer(optimizer_of(case, params, **settings), warmup_steps=2)
    reference = optimizer_of(case, expected, **settings)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 8) for o in (reference, optimizer)]
    for step, grads in enumerate(gradients_of(case, 7)):
        if not is_low_rank:
            optimizer.zero_grad(set_to_none=True)
        if step == 4:
            for own in (reference, optimizer):
                own.param_groups[0]["weight_decay"] = 0.5
        before = [param.detach().clone() for param in expected]
        for own in (params, expected):
            give(own, grads)
        reference.step()
        optimizer.step()
        for schedule in schedules:
            schedule.step()
        assert optimizer.captured == (step >= 2)
        for ours, theirs, old in zip(params, expected, before, strict=True):
            error = update_relative_error(ours.detach(), old, theirs.detach() - old)
            assert error <= limit(case, old.shape, torch.float32), (step, tuple(old.shape))
    optimizer.release()
    assert not optimizer.captured


@pytest.mark.parametrize("rule", ["ema", "schedule_free"])
@pytest.mark.parametrize("by_graph", [False, True])
def test_averages_follow_what_the_class_steps(
    rule: str, by_graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if EMULATED:
        Capture.driver = ctypes.CDLL("libcuda.so.1")
        monkeypatch.setattr(_replay, "Capture", Capture)
    case, settings = usual("adamw")
    settings["weight_decay"] = 0.0
    params, inner = (parameters_of(case, torch.float32, DEVICE) for _ in range(2))
    optimizer, alone = (optimizer_of(case, own, **settings) for own in (params, inner))
    optimizer.param_groups[0]["average"] = rule
    if rule == "ema":
        optimizer.param_groups[0]["average_decay"] = 0.5
    means = [param.detach().double() for param in params]
    step = CudaGraphOptimizer(optimizer, warmup_steps=2).step if by_graph else optimizer.step
    for number, grads in enumerate(gradients_of(case, 5), start=1):
        for own in (params, inner):
            give(own, grads)
        step()
        alone.step()
        share = 0.5 if rule == "ema" else 1 / number
        means = [(1 - share) * mean + share * z.double() for mean, z in zip(means, inner, strict=True)]
    beta = 0.9 if rule == "schedule_free" else 0.0
    for param, z, mean in zip(params, inner, means, strict=True):
        kept = optimizer.state[param]["average"]
        assert kept.device == param.device
        assert torch.allclose(kept.double(), z.double() if beta else mean, rtol=1e-5, atol=1e-6)
        assert torch.allclose(param.double(), (1 - beta) * z.double() + beta * mean, rtol=1e-5, atol=1e-6)


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Captures what `work` launches; a call of what is returned does it."""
    if EMULATED:
        Capture.driver = ctypes.CDLL("libcuda.so.1")
        recorded = Capture(torch.device("cpu"), "")
        recorded.record(lambda: (work(), None)[1])
        return recorded.replay
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return lambda: (graph.replay(), torch.cuda.synchronize())[1]


@pytest.mark.parametrize(
    "algorithm", [name for name in ALGORITHMS if name not in (*LOW_RANK_ALGORITHMS, "soap")]
)
def test_step_in_a_graph_of_torch_counts_its_replays(algorithm: str) -> None:
    """Steps of equal gradients, three of them in a graph: corrections are those of each step."""
    case, settings = usual(algorithm)
    expected, params = (parameters_of(case, torch.float32, DEVICE) for _ in range(2))
    optimizers = [optimizer_of(case, own, **settings, capturable=True) for own in (expected, params)]
    [grads] = gradients_of(case, 1)
    for own in (expected, params):
        give(own, grads)
    reference, optimizer = optimizers
    for _ in range(4):
        reference.step()
    optimizer.step()
    replay = captured(optimizer.step)
    for _ in range(3):
        replay()
    start = parameters_of(case, torch.float32, DEVICE)
    for ours, theirs, old in zip(params, expected, start, strict=True):
        error = update_relative_error(ours.detach(), old, theirs.detach() - old.detach())
        assert error <= limit(case, old.shape, torch.float32), tuple(old.shape)
