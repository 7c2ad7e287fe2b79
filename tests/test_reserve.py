"""Memory for states that is asked for before the first step."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from pathlib import Path

import pytest
import torch

import oxidion
from oxidion import _reserve
from oxidion._reserve import LARGE, POPULATE_WRITE, Reserve, zeros

CPU = torch.device("cpu")


def populates() -> bool:
    """Whether the system fills mappings when it is asked to."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return False
    memory = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return madvise(memory.data_ptr(), mmap.PAGESIZE, POPULATE_WRITE) == 0


needs_populate = pytest.mark.skipif(not populates(), reason="Linux before 5.14")


def resident() -> int:
    """Bytes of memory that the process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def parameter(numel: int) -> torch.nn.Parameter:
    param = torch.nn.Parameter(torch.linspace(-1, 1, numel))
    param.grad = torch.full_like(param, 0.5)
    return param


def wait_for(threads: int) -> None:
    deadline = time.monotonic() + 60
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= threads


@needs_populate
def test_states_have_their_memory_before_the_first_step() -> None:
    param, threads = parameter(1 << 23), threading.active_count()
    before = resident()
    optimizer = oxidion.AdamW([param])
    assert not optimizer.state
    wait_for(threads)
    assert resident() - before >= 2 * param.nbytes
    filled = resident()
    optimizer.step()
    assert resident() - filled < param.nbytes // 2
    assert optimizer._reserve is None


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "Dion", "Lamb", "CAME", "GaLoreAdamW"])
@pytest.mark.parametrize("settings", [{}, {"state_dtype": torch.bfloat16}, {"state_bits": 8}])
def test_steps_are_those_without_a_reserve(name: str, settings: dict[str, object]) -> None:
    def trained(*, reserve: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(1024, 2048))
        optimizer = getattr(oxidion, name)([param], lr=0.01, **settings)
        assert optimizer._reserve is not None
        if not reserve:
            optimizer._reserve = None
        for _ in range(2):
            param.grad = torch.randn_like(param)
            optimizer.step()
        return param.detach(), optimizer.state[param]

    ours, state = trained(reserve=True)
    theirs, expected = trained(reserve=False)
    assert torch.equal(ours, theirs)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_small_parameters_and_loaded_states_need_none() -> None:
    assert oxidion.AdamW([parameter(1000)])._reserve is None
    saved = oxidion.AdamW([parameter(1 << 20)])
    saved.step()
    optimizer = oxidion.AdamW([parameter(1 << 20)])
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer._reserve is None


def test_what_a_plan_refuses_is_said_by_the_first_step() -> None:
    param = torch.nn.Parameter(torch.randn(1024, 1024))
    param.grad = torch.randn_like(param)
    optimizer = oxidion.Dion([{"params": [param], "split_sizes": [1000, 1000]}])
    assert optimizer._reserve is None
    with pytest.raises(ValueError, match="split_sizes"):
        optimizer.step()


def test_mappings_are_handed_out_once_and_in_order() -> None:
    reserve = Reserve([2 * LARGE, LARGE, 2 * LARGE, LARGE // 2])
    first, second = reserve.take(2 * LARGE), reserve.take(2 * LARGE)
    assert first is not None
    assert second is not None
    assert first.data_ptr() != second.data_ptr()
    assert reserve.take(2 * LARGE) is None
    assert reserve.take(LARGE // 2) is None
    own = zeros([LARGE // 4], torch.float32, CPU, reserve)
    assert own.shape == (LARGE // 4,)
    assert own.dtype == torch.float32
    assert not own.any()
    assert reserve.take(LARGE) is None


def test_no_more_is_asked_for_than_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reserve, "_free_bytes", lambda: _reserve.SHARE * 3 * LARGE)
    reserve = Reserve([2 * LARGE, 2 * LARGE, LARGE])
    assert reserve.take(2 * LARGE) is not None
    assert reserve.take(2 * LARGE) is None


@needs_populate
def test_dropped_reserve_asks_for_nothing_more() -> None:
    size, before, threads = 1 << 30, resident(), threading.active_count()
    reserve = Reserve([size])
    del reserve
    wait_for(threads)
    assert resident() - before < size // 2
