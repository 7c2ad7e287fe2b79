"""Messages between ranks, packed and unpacked by kernels on the host emulator."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .compile import ARCHITECTURES
from .driver import needs_nvrtc
from .emulator.library import KERNELS, Emulated, KernelFault
from .exchanges import MOST, PIECE, THREADS, Copy, messages, table
from .kept import compiled

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NUMBERS = {F16: torch.int16, BF16: torch.int16, F32: torch.int32, F64: torch.int64}


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("copies.cu", tmp_path_factory.mktemp("copies"))


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    return Emulated("messages.cu", tmp_path_factory.mktemp("messages"))


def numbered(dtype: torch.dtype, count: int) -> Tensor:
    return torch.arange(count).to(NUMBERS[dtype])


def made(dtype: torch.dtype) -> list[Copy]:
    """Rectangles of all alignments into one target, one behind the other with room between them."""
    shapes = [
        # rows, cols, start, stride of the source, distance of rows in the target
        (1, 5 * PIECE + 3, 0, 0, 0),  # a run of several blocks
        (70, 128, 8, 256, 128),  # aligned everywhere
        (33, 40, 0, 40, 56),
        (9, 1000, 3, 1003, 1000),  # as wide as an element
        (300, 3, 1, 5, 4),  # rows shorter than a block of threads
        (2000, 1, 0, 3, 1),
        (5, 20, 8, 48, 32),  # whole chunks and a rest in each row
        (1, 1, 7, 0, 0),
        (7, 300, 4, 308, 304),
    ]
    all_of_them, at = [], 5
    source = numbered(dtype, 200_000)
    ends = []
    for rows, cols, start, stride, to_stride in shapes:
        to = -(-at // 8) * 8 + (start % 8 if start % 2 else 0)
        all_of_them.append((rows, cols, start, to, stride, to_stride))
        at = to + (rows - 1) * (to_stride or cols) + cols + 9
        ends.append(at)
    target = torch.full((at,), -1, dtype=NUMBERS[dtype])
    return [Copy(source, target, r, c, start, to, s, t) for r, c, start, to, s, t in all_of_them]


def check(kernels: Emulated, name: str, some: list[Copy]) -> None:
    target = some[0].target
    expected = target.clone()
    for copy in some:
        source, to = copy.areas()
        expected.as_strided(to.shape, to.stride(), to.storage_offset()).copy_(source)
    what, blocks = table(MOST[name.rpartition("_")[2]], some)
    kernels.launch(name, what, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    assert torch.equal(target, expected), f"{name}: {int((target != expected).sum())} elements differ"


@pytest.mark.parametrize("name", KERNELS["copies.cu"])
@pytest.mark.parametrize("dtype", [BF16, F32, F64], ids=str)
def test_rectangles_arrive_and_nothing_else_is_written(
    copies: Emulated, name: str, dtype: torch.dtype
) -> None:
    check(copies, name, made(dtype))


def test_full_table_of_rectangles_fits_into_kernel_parameters(copies: Emulated) -> None:
    source, target = numbered(F32, 4 * MOST["many"]), torch.zeros(4 * MOST["many"], dtype=torch.int32)
    some = [Copy(source, target, 1, 4, 4 * i, 4 * (MOST["many"] - 1 - i)) for i in range(MOST["many"])]
    what, blocks = table(MOST["many"], some)
    assert ctypes.sizeof(what) <= 32764
    copies.launch("copy_many", what, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    assert torch.equal(target.view(-1, 4).flip(0).reshape(-1), source)


def check_sum(kernels: Emulated, dtype: torch.dtype, count: int, length: int, pitch: int, shift: int) -> None:
    torch.manual_seed(length)
    room = torch.randn(shift + count * pitch, dtype=F64).to(dtype)[shift:]
    whole = torch.full((length + 32 + shift,), float("nan"), dtype=dtype)
    to = whole[16 + shift : 16 + shift + length]
    what, blocks = messages(room, pitch, count, 1 / 3, to)
    kernels.launch("sum_messages", what, blocks=blocks, threads=THREADS, shared_bytes=0, readable=[])
    total = torch.zeros(length, dtype=F64)
    for rank in range(count):
        total += room[rank * pitch : rank * pitch + length].double()
    total *= 1 / 3
    expected = total if dtype == F64 else total.float().to(dtype)
    # The bits of the CPU's kernel, which adds in the same order and rounds once to float32, then to the type.
    assert torch.equal(to, expected), "the sum differs"
    assert int(whole.isnan().sum()) == len(whole) - length


@pytest.mark.parametrize("dtype", [F16, BF16, F32, F64], ids=str)
@pytest.mark.parametrize(
    ("length", "pitch", "shift"), [(1, 1, 0), (3 * PIECE + 5, 3 * PIECE + 8, 0), (998, 999, 1)]
)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_messages_are_added_in_the_order_of_the_ranks(
    sums: Emulated, dtype: torch.dtype, length: int, pitch: int, shift: int, count: int
) -> None:
    check_sum(sums, dtype, count, length, pitch, shift)


COPY_FAULTS = {
    "rows lie as in the target": (
        "walk.row * rectangle.from_step + col",
        "walk.row * rectangle.to_step + col",
    ),
    "the next unit is in the same row": ("            ++row;\n", ""),
    "a piece begins a unit late": (
        "static_cast<u64>(piece) * PIECE;",
        "static_cast<u64>(piece) * PIECE + 1;",
    ),
    "a thread moves on too little": ("cols_on = THREADS % units;", "cols_on = 0;"),
    "the last units of a piece are left out": (
        "if (i + a * THREADS < count) put_unit",
        "if (i + (a + 1) * THREADS < count) put_unit",
    ),
    "chunks of 8 bytes are taken for 4": ("copy_piece<u64>(", "copy_piece<u32>("),
}
SUM_FAULTS = {
    "the first message is left out": (
        "int rank = 0; rank < what.count; ++rank) {\n            double",
        "int rank = 1; rank < what.count; ++rank) {\n            double",
    ),
    "messages lie without room between them": (
        "= what.pitch * element_bytes(type);",
        "= what.length * element_bytes(type);",
    ),
    "the rest is added in float32": ("sum += load<double>(", "sum += load<float>("),
    "the sum is no mean": ("sum[j] *= what.factor;", ""),
    "takes odd messages for aligned": (" && what.pitch % VECTOR == 0", ""),
    "parts have gaps": (
        "static_cast<long long>(blockIdx.x) * PART",
        "static_cast<long long>(blockIdx.x) * (PART + 1)",
    ),
}


@pytest.mark.parametrize("fault", COPY_FAULTS)
def test_planted_fault_of_copies_is_caught(fault: str, tmp_path: Path) -> None:
    edit = ("copies.cu", *COPY_FAULTS[fault])
    kernels = Emulated("copies.cu", tmp_path / "faulty", [edit], ["copy_few"])

    def work() -> None:
        for dtype in (BF16, F32, F64):
            check(kernels, "copy_few", made(dtype))

    with pytest.raises((AssertionError, KernelFault), match="copy_few"):
        work()


@pytest.mark.parametrize("fault", SUM_FAULTS)
def test_planted_fault_of_sums_is_caught(fault: str, tmp_path: Path) -> None:
    kernels = Emulated("messages.cu", tmp_path / "faulty", [("messages.cu", *SUM_FAULTS[fault])])

    def work() -> None:
        check_sum(kernels, F32, 3, 3 * PIECE + 5, 3 * PIECE + 8, 0)
        check_sum(kernels, F64, 3, 998, 999, 0)
        check_sum(kernels, F32, 3, 998, 999, 0)

    with pytest.raises((AssertionError, KernelFault), match="sum"):
        work()


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES["copies.cu"])
def test_copies_move_chunks_of_16_bytes(architecture: str) -> None:
    for kernel in compiled("copies.cu", architecture).kernels.values():
        assert kernel.count("LDG.E.128") == kernel.count("STG.E.128") == 4
