"""Faults planted in the kernels of sums, factors and means: each must be found by what checks them."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import test_quantized_sums as quantized
from .compile import texts
from .emulator.library import Edit, Emulated, KernelFault
from .sum_checks import (
    Kernels,
    check_lamb_factors,
    check_means,
    check_momentum,
    check_norms,
    check_numbers,
    check_pieces,
    check_squares,
    check_stacks,
    check_update_factors,
)

#: Orders of warps: a barrier that is missing between two sums shows in some of them.
SEEDS = range(12)
#: Kernels of each source that are compiled for its checks.
KERNELS = {
    "sums.cu": ["sum_of_squares_few", "momentum_squares_few", "lamb_norms_only_few"],
    "totals.cu": ["add_pieces", "add_numbers", "add_strips_few", "add_tiles_few"],
    "factors.cu": ["lamb_factors", "update_factors"],
    "means.cu": ["means_few", "squares_few"],
    "quantized_sums.cu": ["lamb_norms_quantized_many", "lamb_norms_only_quantized_many"],
}

SQUARES = """struct SumOfSquares {
    static constexpr int OPERANDS = 1;
    static constexpr u32 READS = 0b1;
    static constexpr u32 WRITES = 0b0;
    static constexpr int SUMS = 1;
    double sum"""
STORED = next(line for line in texts()["each_sum.cuh"].splitlines() if "as_stored" in line)
FAULTS: dict[str, dict[str, Edit]] = {
    "sums.cu": {
        "a block leaves its sums where another job's first piece is": (
            "sums.cu",
            "leave_sums<WARPS>(op, what.partial, piece);",
            "leave_sums<WARPS>(op, what.partial, share.piece);",
        ),
        "several sums of a piece have the room of one": (
            "summed.cuh",
            "static_cast<long long>(piece) * Op::SUMS + k",
            "static_cast<long long>(piece) + k",
        ),
        "squares are summed in float32": (
            "each_sum.cuh",
            SQUARES,
            SQUARES.replace("double sum", "float sum"),
        ),
        "squares are taken in float32": (
            "each_sum.cuh",
            "sum[0] += static_cast<double>(x0) * static_cast<double>(x0);\n    }",
            "sum[0] += static_cast<double>(x0 * x0);\n    }",
        ),
        "squares are those of what is not yet rounded": (
            "each_sum.cuh",
            STORED,
            STORED.replace("as_stored(stored, ", "static_cast<double>("),
        ),
        "squares are rounded as the gradient is": (
            "each_sum.cuh",
            "stored = job.type[OPERANDS - 1];",
            "stored = job.type[0];",
        ),
        "warps are added before all have left their sum": (
            "block_sum.cuh",
            "warps[thread / 32] = x;\n    __syncthreads();",
            "warps[thread / 32] = x;",
        ),
        "the next sum begins while this one is added": (
            "block_sum.cuh",
            "__syncthreads();\n    return sum;",
            "return sum;",
        ),
        "half of the lanes are left out": ("block_sum.cuh", "int lane = 16;", "int lane = 8;"),
        "what fills no vector is left out where runs are not aligned": (
            "jobs.cuh",
            "for (int i = done + thread; i < piece.count;",
            "for (int i = done + thread; i < (piece.is_aligned ? piece.count : done);",
        ),
    },
    "totals.cu": {
        "a job begins with the pieces of those before it": (
            "totals.cu",
            "job ? what.end[job - 1] : 0",
            "0",
        ),
        "the last piece is left out": ("totals.cu", "piece < what.end[job];", "piece + 1 < what.end[job];"),
        "sums of a piece are taken for pieces": (
            "totals.cu",
            "static_cast<long long>(piece) * what.sums + k",
            "static_cast<long long>(piece) + k * what.sums",
        ),
        "the factor is not squared": ("totals.cu", "sum * what.factor * what.factor", "sum * what.factor"),
        "pieces are added in float32": (
            "totals.cu",
            "double own = 0;\n        for",
            "float own = 0;\n        for",
        ),
        "only as many numbers as there are threads": (
            "totals.cu",
            "i < what.part[p].count; i += THREADS",
            "i < min(what.part[p].count, 256LL); i += THREADS",
        ),
        "a total that is added to is overwritten": ("totals.cu", "*total + sum : sum", "sum : *total + sum"),
        "a matrix begins with the strips of the first": (
            "totals.cu",
            "at / length * tiles * length + at % length",
            "at / length * length + at % length",
        ),
        "the last tile of a strip is left out": (
            "totals.cu",
            "tile < tiles; ++tile",
            "tile + 1 < tiles; ++tile",
        ),
        "rows have the tiles of columns": (
            "totals.cu",
            "by_row ? tiling.across : tiling.down",
            "by_row ? tiling.down : tiling.across",
        ),
        "the total of a stack is that of its first matrix": ("totals.cu", "(of_matrix ? 1 : job.stack)", "1"),
        "a matrix begins with the tiles of another": (
            "totals.cu",
            "2 * tiles * static_cast<long long>(share.number)",
            "tiles * static_cast<long long>(share.number)",
        ),
    },
    "factors.cu": {
        "blocks begin with the first job": (
            "factors.cu",
            "const LambJob& job = what.job[number];",
            "const LambJob& job = what.job[number % THREADS];",
        ),
        "a thread too many has a job": (
            "factors.cu",
            "if (number >= what.count) return;\n    const LambJob",
            "if (number > what.count) return;\n    const LambJob",
        ),
        "the last job is left out": (
            "factors.cu",
            "if (number >= what.count) return;\n    const UpdateJob",
            "if (number + 1 >= what.count) return;\n    const UpdateJob",
        ),
        "factors of jobs overlap": ("factors.cu", "(what.out) + 4 * number", "(what.out) + 3 * number"),
        "the norm of the group is float32": (
            "factors.cu",
            "const double norm = sqrt(",
            "const float norm = sqrt(",
        ),
        "no update is taken for a good one": (
            "factors.cu",
            "what.adapts && !(x <= 0 || u <= 0) ?",
            "what.adapts && !(x <= 0) ?",
        ),
        "a size of NaN is clipped away": (
            "factors.cu",
            "(ratio < 1.0 ? 1.0 : ratio)",
            "fmax(1.0, ratio)",
        ),
        "sizes have the square of the floor": ("factors.cu", "size < what.floor ? what.floor : size", "size"),
    },
    "means.cu": {
        "means move in float32": (
            "means.cu",
            "Op<double> op(jobs.scalars, share.job);\n    each_element<double>",
            "Op<float> op(jobs.scalars, share.job);\n    each_element<float>",
        ),
        "every block has the first piece": (
            "means.cu",
            "Piece<2>(share.job, share.piece)",
            "Piece<2>(share.job, 0)",
        ),
        "epsilon is divided too": (
            "each_mean.cuh",
            "const C t29 = quotient(x1, k22);\n        const C t30 = t29 + k19;",
            "const C t29 = x1 + k19;\n        const C t30 = quotient(t29, k22);",
        ),
        "the factor is not squared": (
            "each_mean.cuh",
            "const C t30 = t29 * t29;",
            "const C t30 = t29 * x1;",
        ),
        "the host's share where the device counts": (
            "each_mean.cuh",
            "const double t7 = job.factor[1];\n        const bool t13 = job.steps != nullptr;",
            "const double t7 = job.factor[1];\n        const bool t13 = false;",
        ),
    },
    "quantized_sums.cu": {
        "a block of another size is summed": (
            "quantized_sums.cu",
            "leave_sums<QUANTIZED_WARPS>",
            "leave_sums<WARPS>",
        ),
        "half of the warps are summed": (
            "quantized_sums.cu",
            "leave_sums<QUANTIZED_WARPS>",
            "leave_sums<QUANTIZED_WARPS / 2>",
        ),
        "pieces overlap": (
            "quantized_sums.cu",
            "piece_of(what.jobs, number, piece) * job.share",
            "piece_of(what.jobs, number, piece) * (job.share - 1)",
        ),
        "a block leaves its sums where another job's first piece is": (
            "quantized_sums.cu",
            "(op, what.partial, piece);",
            "(op, what.partial, piece_of(what.jobs, number, piece));",
        ),
        "a warp ends with the first blocks that all of it has": (
            "quantized.cuh",
            "if (first + done >= job.blocks) break;",
            "if (first + done + together > job.blocks) break;",
        ),
        "rows of blocks follow each other without the short one": (
            "quantized.cuh",
            "start = row * job.width + col",
            "start = static_cast<long long>(row) * job.in_row * job.block + col",
        ),
    },
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Emulated]:
    """The sources as they are, with a pass whose sums are added up."""
    made = {
        source: Emulated(source, tmp_path_factory.mktemp(source), kernels=kernels)
        for source, kernels in KERNELS.items()
    }
    rows = tmp_path_factory.mktemp("rows")
    made["rows.cu"] = Emulated("rows.cu", rows, kernels=["gradient_and_parameter_squares_few"])
    return made


def checks(source: str, kernels: Emulated, sound: dict[str, Emulated]) -> None:
    """All checks of a source."""
    if source == "sums.cu":
        check_squares(Kernels(kernels, sound["totals.cu"]))
        check_momentum(Kernels(kernels, sound["totals.cu"]))
        for seed in SEEDS:
            check_norms(Kernels(kernels, sound["totals.cu"]), seed)
    elif source == "totals.cu":
        check_pieces(kernels)
        check_numbers(kernels)
        check_stacks(sound["rows.cu"], kernels)
    elif source == "factors.cu":
        check_lamb_factors(kernels)
        check_update_factors(kernels)
    elif source == "means.cu":
        check_means(kernels, "means")
        check_means(kernels, "squares")
    else:
        for kinds in ("ggmv", "xggg"):
            quantized.test_sums_equal_those_of_the_numbers(kernels, kinds, "many")
        quantized.test_sums_of_any_number_of_threads_to_a_block_are_close(kernels)


@pytest.mark.parametrize("source", KERNELS)
def test_sources_pass_their_checks(sound: dict[str, Emulated], source: str) -> None:
    checks(source, sound[source], sound)


@pytest.mark.parametrize(
    ("source", "fault"), [(source, fault) for source, faults in FAULTS.items() for fault in faults]
)
def test_planted_fault_is_caught(sound: dict[str, Emulated], source: str, fault: str, tmp_path: Path) -> None:
    kernels = Emulated(source, tmp_path / "faulty", [FAULTS[source][fault]], KERNELS[source])
    with pytest.raises((AssertionError, KernelFault)):
        checks(source, kernels, sound)
