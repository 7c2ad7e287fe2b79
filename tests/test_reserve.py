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
from oxidion._core import reserve as _reserve
from oxidion._core.reserve import LARGE, POPULATE_WRITE, Reserve, zeros

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


def addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tensors}


def address(memory: mmap.mmap) -> int:
    """Where a mapping begins."""
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def bytes_of(*sizes: int) -> list[tuple[list[int], torch.dtype]]:
    """What is wanted of these sizes."""
    return [([size], torch.uint8) for size in sizes]


@needs_populate
@pytest.mark.parametrize("sizes", [[1 << 23], [1 << 16] * 128], ids=["one-large", "many-small"])
def test_states_are_in_memory_reserved_before_the_first_step(sizes: list[int]) -> None:
    params = [parameter(size) for size in sizes]
    total = sum(param.nbytes for param in params)
    before = resident()
    optimizer = oxidion.AdamW(params)
    assert not optimizer.state
    reserve = wait_for(optimizer._reserve)
    assert resident() - before >= 1.9 * total
    parts = reserve._parts[(sizes[0],), torch.float32]
    ahead = {address(memory) + start for memory, start in parts}
    filled = resident()
    optimizer.step()
    assert resident() - filled < total // 2
    states = [optimizer.state[param][key] for param in params for key in ("exp_avg", "exp_avg_sq")]
    assert addresses(states) == ahead
    assert optimizer._reserve is None
    # Each is a tensor of its own: saving one does not save all.
    assert all(state.untyped_storage().nbytes() == state.nbytes for state in states)
    assert all(state.data_ptr() % 64 == 0 for state in states)


def test_large_states_begin_at_different_lines_of_a_page() -> None:
    """Processors find lines by their place in a page: AdamW takes a fifth longer where four have the same."""
    params = [parameter(LARGE) for _ in range(4)]
    optimizer = oxidion.AdamW(params)
    optimizer.step()
    for param in params:
        places = [optimizer.state[param][key].data_ptr() % 4096 // 64 for key in ("exp_avg", "exp_avg_sq")]
        assert abs(places[0] - places[1]) >= 7
        assert min(places) >= 7, "torch's own begin at 0 or 1"
    own = [zeros([LARGE], torch.uint8, CPU).data_ptr() % 4096 // 64 for _ in range(2)]
    assert abs(own[0] - own[1]) >= 7


@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "Dion", "Lamb", "CAME", "GaLoreAdamW"])
@pytest.mark.parametrize("settings", [{}, {"state_dtype": torch.bfloat16}, {"state_bits": 8}])
def test_steps_are_those_without_a_reserve(name: str, settings: dict[str, object]) -> None:
    def trained(*, reserve: bool) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((1024, 2048), (64, 96), (96, 64))]
        optimizer = getattr(oxidion, name)(params, lr=0.01, **settings)
        assert optimizer._reserve is not None
        if not reserve:
            optimizer._reserve = None
        for _ in range(2):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        return [(param.detach(), optimizer.state[param]) for param in params]

    for (ours, state), (theirs, expected) in zip(trained(reserve=True), trained(reserve=False), strict=True):
        assert torch.equal(ours, theirs)
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(state[key], value), key


def test_few_small_parameters_and_loaded_states_need_none() -> None:
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


def test_tensors_are_handed_out_once_and_in_order() -> None:
    gc.collect()
    held = Reserve.outstanding
    wanted = [([2, LARGE // 4], torch.float32)] * 2 + [([LARGE], torch.uint8), ([7], torch.float64)]
    reserve = Reserve(wanted)
    first, second = (zeros([2, LARGE // 4], torch.float32, CPU, reserve) for _ in range(2))
    assert len(addresses([first, second])) == 2
    assert reserve.take([2, LARGE // 4], torch.float32) is None
    assert reserve.take([LARGE // 2, 1], torch.float32) is None
    assert reserve.take([7], torch.float64) is None, "small ones that are few together are not mapped"
    own = zeros([LARGE], torch.uint8, CPU, reserve)
    assert own.shape == (LARGE,)
    assert own.dtype == torch.uint8
    assert not own.any()
    assert reserve.take([LARGE], torch.uint8) is None
    assert Reserve.outstanding == held


def test_small_tensors_share_a_mapping_without_overlap() -> None:
    gc.collect()
    held = Reserve.outstanding
    shapes = [[n] for n in range(1, 3000, 7)] * 8
    reserve = Reserve([(shape, torch.float32) for shape in shapes])
    taken = [reserve.take(shape, torch.float32) for shape in shapes]
    for number, tensor in enumerate(taken):
        assert tensor is not None
        assert not tensor.any()
        tensor.fill_(number + 1)
    assert all(tensor is not None and tensor.eq(number + 1).all() for number, tensor in enumerate(taken))
    assert Reserve.outstanding == held


def test_no_more_is_asked_for_than_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    held = Reserve.outstanding
    monkeypatch.setattr(_reserve, "_free_bytes", lambda: _reserve.SHARE * (4 * LARGE + held))
    reserve = Reserve(bytes_of(8 * LARGE, 2 * LARGE, 3 * LARGE, LARGE))
    assert Reserve.outstanding == held + 3 * LARGE
    assert Reserve(bytes_of(2 * LARGE)).take([2 * LARGE], torch.uint8) is None
    assert reserve.take([2 * LARGE], torch.uint8) is not None
    assert reserve.take([8 * LARGE], torch.uint8) is None
    assert reserve.take([3 * LARGE], torch.uint8) is None
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
    reserve = Reserve(bytes_of(size))
    memory, thread = reserve.take([size], torch.uint8), reserve.thread
    del reserve
    thread.join(60)
    assert memory is not None
    assert resident() - before < size // 2


@needs_populate
def test_process_end_stops_the_threads_of_what_is_still_held() -> None:
    """A thread that came back to an interpreter in ruins would end the process with SIGABRT."""
    size = 1 << 32
    before = resident()
    reserve = Reserve(bytes_of(size))
    assert reserve.thread.is_alive()
    _reserve.stop()
    assert not reserve.thread.is_alive()
    assert resident() - before < size // 2
    assert reserve.take([size], torch.uint8) is not None


@needs_populate
@pytest.mark.parametrize("sizes", [[1 << 25], [1 << 18] * 128], ids=["one-large", "many-small"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_process_has_no_share_of_it(sizes: list[int]) -> None:
    """Else the first step would copy what a worker of a data loader holds too."""
    reserve = wait_for(Reserve(bytes_of(*sizes)))
    ((mapping, start), *_) = reserve._parts[(sizes[0],), torch.uint8]
    assert resident_in(mapping) > 0
    assert holds_in_a_child(lambda: resident_in(mapping) == 0)
    memory = reserve.take([sizes[0]], torch.uint8)
    assert memory is not None
    assert memory.data_ptr() == address(mapping) + start
    memory[:5] = 7
    assert holds_in_a_child(lambda: memory[:5].tolist() == [7] * 5)


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
    start = address(memory)
    pages = (ctypes.c_ubyte * (len(memory) // mmap.PAGESIZE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(start, len(memory), pages) == 0
    return sum(page & 1 for page in pages)
