"""Memory for states that is asked for before the first step."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable, Iterable
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


@pytest.fixture(autouse=True)
def _much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reserve, "_free_bytes", lambda: 1 << 34)


def wait_for(reserve: Reserve | None) -> Reserve:
    """Waits until all is asked for."""
    assert reserve is not None
    reserve.thread.join(60)
    assert not reserve.thread.is_alive()
    return reserve


def addresses(memory: Iterable[mmap.mmap]) -> set[int]:
    return {torch.frombuffer(own, dtype=torch.uint8).data_ptr() for own in memory}


@needs_populate
def test_states_are_in_memory_that_is_there_before_the_first_step() -> None:
    param = parameter(1 << 23)
    before = resident()
    optimizer = oxidion.AdamW([param])
    assert not optimizer.state
    reserve = wait_for(optimizer._reserve)
    assert resident() - before >= 1.9 * param.nbytes
    ahead = addresses(reserve._mappings[param.nbytes])
    filled = resident()
    optimizer.step()
    assert resident() - filled < param.nbytes // 2
    state = optimizer.state[param]
    assert {state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()} == ahead
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
    assert len(addresses([first, second])) == 2
    assert reserve.take(2 * LARGE) is None
    assert reserve.take(LARGE // 2) is None
    own = zeros([LARGE // 4], torch.float32, CPU, reserve)
    assert own.shape == (LARGE // 4,)
    assert own.dtype == torch.float32
    assert not own.any()
    assert reserve.take(LARGE) is None


def test_no_more_is_asked_for_than_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    held = Reserve.outstanding
    monkeypatch.setattr(_reserve, "_free_bytes", lambda: _reserve.SHARE * (4 * LARGE + held))
    reserve = Reserve([8 * LARGE, 2 * LARGE, 3 * LARGE, LARGE])
    assert Reserve.outstanding == held + 3 * LARGE
    assert Reserve([2 * LARGE]).take(2 * LARGE) is None
    assert reserve.take(2 * LARGE) is not None
    assert reserve.take(8 * LARGE) is None
    assert reserve.take(3 * LARGE) is None
    assert Reserve.outstanding == held + LARGE
    del reserve
    assert Reserve.outstanding == held


def test_limits_of_containers_and_other_ranks_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    free = _reserve._free_bytes()
    assert free > 0
    (tmp_path / "max").write_text(str(1 << 30))
    (tmp_path / "current").write_text(str(1 << 29))
    monkeypatch.setattr(_reserve, "CGROUPS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert _reserve._free_bytes() == 1 << 29
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _reserve._free_bytes() == 1 << 27
    (tmp_path / "max").write_text("max")
    assert _reserve._free_bytes() > 1 << 27


@needs_populate
def test_dropped_reserve_asks_for_nothing_more() -> None:
    size = 1 << 32
    before = resident()
    reserve = Reserve([size])
    memory, thread = reserve.take(size), reserve.thread
    del reserve
    thread.join(60)
    assert memory is not None
    assert resident() - before < size // 2


@needs_populate
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_takes_no_share_of_it() -> None:
    """Else the first step would copy what a worker of a data loader holds too."""
    reserve = wait_for(Reserve([1 << 25]))
    (ahead,) = reserve._mappings[1 << 25]
    assert resident_in(ahead) > 0
    assert holds_in_a_child(lambda: resident_in(ahead) == 0)
    memory = reserve.take(1 << 25)
    assert memory is ahead
    ahead[:5] = b"state"
    assert holds_in_a_child(lambda: ahead[:5] == b"state")


def holds_in_a_child(claim: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        status = 2
        try:
            status = 0 if claim() else 1
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def resident_in(memory: mmap.mmap) -> int:
    """Pages of a mapping that have memory."""
    start = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(start, len(memory), pages) == 0
    return sum(page & 1 for page in pages)
