"""How the types in which devices multiply change updates, computed on the CPU with their rounding.

- `float16`: matrices that are orthonormalized in float16, as "auto" does on devices, in both forms of the
  polynomial. Libtorch's path, on memory of the host as a device's: operands and results of products are
  float16, sums float32. Matrices of 14 kinds of singular values, with norms from 1e-30 to 1e30, come in
  bfloat16. Of each kind and form: the largest singular value (bar: 1.3, and every number finite), and the
  distance from the polynomial in float64, relative to its norm (median, largest); and the same in bfloat16 in
  the standard form. Of a tenth of the matrices the largest singular value by every other polynomial.
- `tf32`: Dion with operands of products rounded to TF32, as "auto" has them on devices, and in float32, at
  ranks of 1/4 and 1/16: the distance of the weight from the float64 reference after some steps, relative to
  its norm; and the held-out loss of the GPT of `convergence.py` after 400 steps by seed (bar: means over the
  seeds differ by less than two standard errors of that difference).

Prints tables and writes them to `<out>/device_types.json` and to a page, `<out>/device_types.md`; ends with 1
where a bar is missed.

    python benchmarks/device_types.py [--only float16] [--count 10000]
"""

from __future__ import annotations

import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

os.environ["OXIDION_CUDA"] = "libtorch"

import torch
from torch import Tensor
from torch.nn import Parameter
from tqdm import tqdm

import harness
import oxidion
from convergence import RECIPES, Training, dion, load_corpus, parse
from oxidion import _oxidion, functional
from oxidion._cuda import device
from oxidion._reference.dion import dion_step
from oxidion._reference.orthogonalize import POLYNOMIALS as POLYNOMIAL_NAMES
from oxidion._reference.orthogonalize import orthogonalize

MOST = 1.3
"""The bar of a singular value. The polynomial leaves 1.142 at most."""
SIZES = {
    (64, 96): 0.34,
    (96, 640): 0.2,
    (128, 192): 0.2,
    (200, 300): 0.15,
    (256, 1024): 0.08,
    (512, 768): 0.022,
    (768, 3072): 0.005,
    (1024, 1536): 0.003,
    (2048, 4096): 0.0003,
    (4096, 6144): 0.0001,
}
"""Shapes, and the share of all matrices that have them; one at least of each."""
TOGETHER = 1 << 22
"""Elements of matrices that are made together."""
COMPARED = 1 << 18
"""Elements of a matrix up to which it is compared with the polynomial in float64."""
Row = dict[str, Any]


def orthonormal(count: int, rows: int, cols: int, gen: torch.Generator) -> Tensor:
    """Random matrices with orthonormal columns."""
    return torch.linalg.qr(torch.randn(count, rows, cols, generator=gen))[0]


def of(values: Tensor, n: int, gen: torch.Generator) -> Tensor:
    """Matrices ``[B, k, n]`` with singular values ``[B, k]``."""
    count, k = values.shape
    left, right = orthonormal(count, k, k, gen), orthonormal(count, n, k, gen)
    return (left * values[:, None, :].float()) @ right.mT


def spread(count: int, low: float, high: float) -> Tensor:
    """Numbers ``[B, 1]`` from ``10**low`` to ``10**high``."""
    return 10.0 ** torch.linspace(low, high, count)[:, None]


def geometric(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Condition numbers from 1 to 1e12."""
    return of(spread(count, -12, 0) ** torch.linspace(0, 1, k), n, gen)


def power_law(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Exponents from 0.2 to 4."""
    return of(torch.arange(1, k + 1) ** -torch.linspace(0.2, 4, count)[:, None], n, gen)


def one_huge(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """One value of 1, the others from 1e-8 to 1."""
    values = spread(count, -8, 0).repeat(1, k)
    values[:, 0] = 1.0
    return of(values, n, gen)


def two_levels(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """A half to a hundredth of the values 1, the others from 1e-4 to 1."""
    large = torch.rand(count, 1, generator=gen) ** 2 * 0.5 + 0.01
    return of(torch.where(torch.arange(k) < large * k, 1.0, spread(count, -4, 0)), n, gen)


def repeated(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """One to six distinct values, successive powers of ten, each repeated many times."""
    kinds = 1 + torch.arange(count)[:, None] % 6
    return of(10.0 ** -(torch.arange(k) % kinds), n, gen)


def rank_one(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """An outer product of random vectors."""
    return torch.randn(count, k, 1, generator=gen) @ torch.randn(count, 1, n, generator=gen)


def rank_one_and_noise(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Noise of 1e-5 to 0.3 of the entries."""
    return rank_one(count, k, n, gen) + spread(count, -5, -0.5)[:, None] * gaussian(count, k, n, gen)


def low_rank_and_noise(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """As momentum early in training, with a quarter of the rows zero."""
    few = torch.randn(count, k, 3, generator=gen) @ torch.randn(count, 3, n, generator=gen)
    made = few + spread(count, -5, -1.5)[:, None] * gaussian(count, k, n, gen)
    made[:, : k // 4] = 0.0
    return made


def zero_rows(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Every third row zero."""
    made = gaussian(count, k, n, gen)
    made[:, ::3] = 0.0
    return made


def gaussian(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Entries N(0, 1)."""
    return torch.randn(count, k, n, generator=gen)


def scaled_rows(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Rows from 1 to 1e-6."""
    return gaussian(count, k, n, gen) * 10.0 ** -torch.linspace(0, 6, k)[:, None]


def scaled_columns(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Columns from 1 to 1e-6."""
    return gaussian(count, k, n, gen) * 10.0 ** -torch.linspace(0, 6, n)


def heavy_tails(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """Fifth powers of normal numbers."""
    return gaussian(count, k, n, gen) ** 5


def one_entry(count: int, k: int, n: int, gen: torch.Generator) -> Tensor:
    """A single entry of 1e2 to 1e5 among normal ones."""
    made = gaussian(count, k, n, gen)
    made[:, 0, 0] = spread(count, 2, 5)[:, 0]
    return made


KINDS: list[Callable[[int, int, int, torch.Generator], Tensor]] = [
    geometric, power_law, one_huge, two_levels, repeated, rank_one, rank_one_and_noise, low_rank_and_noise,
    zero_rows, gaussian, scaled_rows, scaled_columns, heavy_tails, one_entry,
]  # fmt: skip


def batches(total: int, side: int) -> Iterator[tuple[str, Tensor]]:
    """Matrices in bfloat16 with the name of their kind: about ``total``, of short sides up to ``side``."""
    gen = torch.Generator().manual_seed(0)
    turn = 0
    for (k, n), share in tqdm([item for item in SIZES.items() if item[0][0] <= side]):
        wanted = max(1, round(total * share / len(KINDS)))
        # Of large matrices that are few, the kinds take turns.
        few = max(1, round(total * share))
        kinds = KINDS if few >= len(KINDS) else [KINDS[(turn + i) % len(KINDS)] for i in range(few)]
        turn += few
        for kind in kinds:
            made = kind(wanted, k, n, gen).double()
            made /= torch.linalg.matrix_norm(made, keepdim=True)
            norms = 10.0 ** torch.empty(wanted, dtype=torch.float64).uniform_(-30, 30, generator=gen)
            made = (made * norms[:, None, None]).bfloat16()
            for part in made.split(max(1, TOGETHER // (k * n))):
                yield kind.__name__, part


def largest(x: Tensor) -> Tensor:
    """The largest singular value of each, in float64; infinite where a number is not finite."""
    finite = x.isfinite().all(dim=(-2, -1))
    x = x.double().nan_to_num(0.0, 0.0, 0.0)
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    return torch.where(finite, torch.linalg.eigvalsh(gram)[:, -1].clamp_min(0).sqrt(), torch.inf)


def error(found: Tensor, exact: Tensor) -> Tensor:
    """The distance of each, relative to the norm."""
    return (found.double() - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1)).clamp_min(1e-30)


def polar(x: Tensor, form: str, dtype: str, **keys: str) -> Tensor:
    """As `functional.polar_express`, multiplied in this type, with nothing added to the norm."""
    settings = {**functional._USUAL, "orth_method": form, "orth_dtype": dtype, **keys}
    return _oxidion.orthonormalize(x, settings, 0.0, device.stream_of(x))


WAYS = [("float16", "gram"), ("float16", "standard"), ("bfloat16", "standard")]


def float16(total: int, side: int) -> list[Row]:
    """A row for each kind of matrices: the largest singular value and error by each way."""
    device.prepare(emulated=True)
    tops: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    errors: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for i, (kind, x) in enumerate(batches(total, side)):
        x = x.mT.contiguous() if i % 2 else x
        exact = orthogonalize(x.double(), {"epsilon": 0.0}) if x[0].numel() <= COMPARED else None
        for dtype, form in WAYS if exact is not None else WAYS[:2]:
            result = polar(x, form, dtype)
            tops[kind, f"{dtype} {form}"].append(largest(result))
            if exact is not None:
                errors[kind, f"{dtype} {form}"].append(error(result, exact))
    rows = []
    for kind in dict.fromkeys(kind for kind, _ in tops):
        row: Row = {"kind": kind.replace("_", " "), "matrices": len(torch.cat(tops[kind, "float16 gram"]))}
        for way in (f"{dtype} {form}" for dtype, form in WAYS):
            row[f"{way}: largest"] = round(float(torch.cat(tops[kind, way]).max()), 3)
            found = torch.cat(errors[kind, way])
            row[f"{way}: error"] = f"{float(found.median()):.2g}, {float(found.max()):.2g}"
        row["met"] = all(row[f"float16 {form}: largest"] <= MOST for form in ("gram", "standard"))
        rows.append(row)
    return rows


# Sums of rows in "aol" are below the range of float16: it is refused there.
POLYNOMIALS = [
    {"orth_preset": "fast"},
    *({"ns_coefficients": name} for name in POLYNOMIAL_NAMES if name != "aol"),
]


def polynomials(total: int, side: int) -> list[Row]:
    """The largest singular value that each polynomial leaves in float16, of all kinds of matrices."""
    device.prepare(emulated=True)
    tops: dict[tuple[str, str], float] = defaultdict(float)
    for i, (_, x) in enumerate(batches(total, side)):
        x = x.mT.contiguous() if i % 2 else x
        for keys in POLYNOMIALS:
            for form in ("gram", "standard"):
                [name] = keys.values()
                top = float(largest(polar(x, form, "float16", **keys)).max())
                tops[name, form] = max(tops[name, form], top)
    return [
        {
            "polynomial": name,
            "gram: largest": round(tops[name, "gram"], 3),
            "standard: largest": round(tops[name, "standard"], 3),
            "met": max(tops[name, form] for form in ("gram", "standard")) <= MOST,
        }
        for name in dict.fromkeys(name for name, _ in tops)
    ]


RANKS = {"1/4": 0.25, "1/16": 1 / 16}
TYPES = ("tf32", "float32")
STEPS, SHAPE, SEEDS = 20, (192, 320), 3


def far(kind: Callable[[int, int, int, torch.Generator], Tensor], share: float, dtype: str) -> float:
    """The distance of Dion's weight from the float64 reference after `STEPS` steps, relative to its norm."""
    gen = torch.Generator().manual_seed(1)
    steady = kind(1, *SHAPE, gen)[0]
    param = Parameter(torch.zeros(SHAPE))
    made = oxidion.Dion([param], lr=0.01, weight_decay=0.0, rank_fraction=share, orth_dtype=dtype)
    exact = torch.zeros(SHAPE, dtype=torch.float64)
    made.init_state()
    state = {key: value.double() for key, value in made.state[param].items()}
    settings = {**made.param_groups[0], "orth_dtype": "float64"}
    for _ in range(STEPS):
        param.grad = steady + 0.3 * kind(1, *SHAPE, gen)[0]
        dion_step(exact, param.grad.double(), state, settings)
        made.step()
    return float((param.detach() - exact).norm() / exact.norm())


def losses(rank: str, dtype: str, steps: int) -> list[float]:
    """Held-out loss of the small GPT after training, by seed."""
    name = f"dion {rank} {dtype}"
    RECIPES[name] = dion(rank_fraction=RANKS[rank], orth_dtype=dtype)
    seeds = ",".join(map(str, range(SEEDS)))
    asked = ["--optimizers", name, "--lrs", f"{name}=0.02", "--seeds", seeds, "--steps", str(steps)]
    _, jobs = parse(asked)
    corpus = load_corpus(round(jobs[0].corpus_mb * 1e6))
    runs = [Training(job, corpus, torch.device("cpu")) for job in jobs]
    for run in runs:
        run.run(steps, None, 0, quiet=True)
    return [run.record.held_out_loss[-1] for run in runs]


def tf32(steps: int) -> dict[str, list[Row]]:
    """Errors of updates by kind of gradients, and losses of training, in TF32 and in float32."""
    device.prepare(emulated=True)
    ways = list(itertools.product(RANKS.items(), TYPES))
    updates = [
        {"kind": kind.__name__.replace("_", " ")}
        | {f"{rank} {dtype}": f"{far(kind, share, dtype):.2g}" for (rank, share), dtype in ways}
        for kind in tqdm(KINDS)
    ]
    trained: list[Row] = []
    for rank in tqdm(RANKS):
        found = {dtype: torch.tensor(losses(rank, dtype, steps), dtype=torch.float64) for dtype in TYPES}
        difference = float(found["tf32"].mean() - found["float32"].mean())
        noise = float((found["tf32"].var() / SEEDS + found["float32"].var() / SEEDS).sqrt())
        by_seed = {dtype: ", ".join(f"{x:.4f}" for x in values) for dtype, values in found.items()}
        is_met = abs(difference) < 2 * noise
        trained.append({"rank": rank, **by_seed, "difference": difference, "error": noise, "met": is_met})
    return {"updates": updates, "losses": trained}


def shown(rows: Sequence[Row]) -> str:
    """A table of rows that have the same columns."""
    texts = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return harness.table(list(rows[0]), texts)


TITLES = {
    "float16": (
        "Float16: what becomes of matrices",
        "Matrices by kind of their singular values, orthonormalized by Polar Express. `largest` is the\n"
        "largest singular value of all results (bar: 1.3). `error` is the distance from the polynomial\n"
        "in float64, relative to its norm: the median and the largest.",
    ),
    "polynomials": (
        "Float16: other polynomials",
        "The largest singular value of all results, of a tenth of the matrices (bar: 1.3).",
    ),
    "updates": (
        "TF32: steps of Dion",
        "Distance of the weight from the float64 reference after some steps, relative to its norm, at\n"
        "ranks of 1/4 and 1/16. Products have operands in TF32 or in float32.",
    ),
    "losses": (
        "TF32: losses of Dion",
        "Held-out loss of a small GPT after 400 steps, for three seeds. The means differ by `difference`,\n"
        "whose standard error is `error` (bar: twice that).",
    ),
}
"""Title and text of each table on the page."""


def page(tables: Mapping[str, Sequence[Row]]) -> str:
    """The page with these tables."""
    parts = [
        "# Types in which devices multiply",
        "Computed on a CPU with the rounding of a device by [device_types.py](../device_types.py), which\n"
        "writes this page too.",
    ]
    for name, rows in tables.items():
        title, text = TITLES[name]
        without = [{key: value for key, value in row.items() if key != "met"} for row in rows]
        parts += [f"## {title}", text, shown(without)]
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Computes the tables; 1 where a bar is missed."""
    parser = harness.command(__doc__)
    parser.add_argument("--only", choices=("float16", "tf32"), action="append")
    parser.add_argument("--count", type=int, default=10000, help="matrices (default: 10000)")
    parser.add_argument("--largest", type=int, default=4096, help="short side (default: 4096)")
    parser.add_argument("--steps", type=int, default=400, help="of training (default: 400)")
    options = parser.parse_args(arguments)
    tables: dict[str, list[Row]] = {}
    parts = options.only or ["float16", "tf32"]
    if "float16" in parts:
        tables["float16"] = float16(options.count, options.largest)
        tables["polynomials"] = polynomials(options.count // 10, options.largest)
    if "tf32" in parts:
        tables |= tf32(options.steps)
    harness.write({**harness.facts(), **tables}, options.out, "device_types")
    (options.out / "device_types.md").write_text(page(tables), encoding="utf-8")
    print("\n\n".join(map(shown, tables.values())))
    return int(not all(row.get("met", True) for rows in tables.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
