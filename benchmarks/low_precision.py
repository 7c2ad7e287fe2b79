"""Compares steps of 8-bit and 16-bit states with those of float32 states, for gradients of uneven sizes.

Weights are set to 0 before each step and not decayed, so that a step is what the weight then holds. Gradients
are random: normal ones; ones of heavy tails; rows, or columns, of sizes from 1 to 1e-6; ones whose singular
values fall to 1e-8; normal ones with a single outlier of 3000 in a block; normal ones with a steady column of
10, where half of the columns fall to 1e-4; ones that fall from 1 to 0.03.

- `eight`: all classes with ``state_bits=8``. The largest quotient of the root mean square of a row's or
  column's steps over 100 steps and that with float32 states, of those whose steps with float32 states are at
  least a tenth of the largest (bar: 1.5); and for normal gradients that of all steps (bar: within 3 %).
- `sixteen`: bfloat16 and float16 parameters with the default states and with states of 16 bits: the bias of
  the steps' size over the last tenth of the steps.
- `momenta`: how far one step lies from that with float32 states where singular values of gradients fall to
  1e-2, 1e-3 and 1e-4, as a share of it, and with states in bfloat16. Momenta in 8 bits have an error that is
  the same in all directions.

Prints tables and writes `<out>/low_precision.json`; ends with 1 where a bar is missed.

    python benchmarks/low_precision.py [--only eight] [--steps 3000]
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

import harness
import oxidion

ROWS, COLS = 64, 256
WINDOW = 100
MOST, ORDINARY = 1.5, 0.03
"""The bars: of a row or column over `WINDOW` steps, and of all steps with normal gradients.

They are for classes that divide by second moments. Steps along an orthonormalized momentum depend on its
quantization error, which `momenta` shows."""
WITHOUT = {"Muon", "NorMuon", "Dion", "Dion2", "NorDion2"}
"""Classes without second moments of the elements."""

CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW amsgrad": {"amsgrad": True},
    "Muon, group of adamw": {"algorithm": "adamw", "lr": 1e-3},
    "AdEMAMix": {},
    "Lamb": {},
    "Adafactor beta1": {"lr": 1e-3, "relative_step": False, "scale_parameter": False, "beta1": 0.9},
    "CAME": {"lr": 1e-3},
    "GaLoreAdamW": {"rank": 32},
    "APOLLOAdamW": {"rank": 32},
    "APOLLOMini": {},
    "SOAP": {},
    "SOAPMuon": {},
    "Lion": {},
    "Muon": {},
    "NorMuon": {},
    "Dion": {"rank_fraction": 0.5},
    "Dion2": {},
    "NorDion2": {},
}
Row = dict[str, Any]
Gradients = Callable[[int, torch.Generator], Tensor]


def normal(_step: int, gen: torch.Generator) -> Tensor:
    """Independent N(0, 1)."""
    return torch.randn(ROWS, COLS, generator=gen)


def heavy(step: int, gen: torch.Generator) -> Tensor:
    """Student's t of two degrees of freedom, whose variance is infinite."""
    squares = normal(step, gen) ** 2 + normal(step, gen) ** 2
    return normal(step, gen) / (squares / 2).sqrt()


def rows(step: int, gen: torch.Generator) -> Tensor:
    """Rows of sizes from 1 to 1e-6."""
    return normal(step, gen) * torch.logspace(0, -6, ROWS)[:, None]


def columns(step: int, gen: torch.Generator) -> Tensor:
    """Columns of sizes from 1 to 1e-6."""
    return normal(step, gen) * torch.logspace(0, -6, COLS)


def outlier(step: int, gen: torch.Generator) -> Tensor:
    """One of 3000 in each row, in step 500 alone."""
    grad = normal(step, gen)
    if step == 500:
        grad[:, 0] = 3000.0
    return grad


def fading(step: int, gen: torch.Generator) -> Tensor:
    """Normal gradients with a steady column of 10; half of the columns fall to 1e-4 within 1000 steps."""
    grad = normal(step, gen)
    grad[:, 0] = 10.0
    grad[:, COLS // 2 :] *= 1e-4 ** min(step / 1000, 1.0)
    return grad


def spectrum(least: float) -> Gradients:
    """Gradients whose singular values fall to ``least``, in fixed directions."""
    gen = torch.Generator().manual_seed(7)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=gen))[0] for n in (ROWS, COLS))
    down = [torch.logspace(0, torch.tensor(least).log10().item() / 2, n) for n in (ROWS, COLS)]

    def grad(step: int, gen: torch.Generator) -> Tensor:
        return left @ (down[0][:, None] * normal(step, gen) * down[1]) @ right

    return grad


def falling(steps: int) -> Gradients:
    """N(0, 1) times what falls from 1 to 0.03."""
    return lambda step, gen: normal(step, gen) * 0.03 ** (step / steps)


CASES: dict[str, Gradients] = {
    "normal": normal,
    "heavy": heavy,
    "rows": rows,
    "columns": columns,
    "spectrum": spectrum(1e-8),
    "outlier": outlier,
    "fading": fading,
}


def made(name: str, param: nn.Parameter, **keys: Any) -> Any:
    """The optimizer of a row of `CLASSES` for one parameter, whose moments are large enough for 8 bits."""
    cls = getattr(oxidion, name.replace(",", "").split()[0])
    own = {"weight_decay": 0.0, **CLASSES[name], **keys}
    group = {"params": [param], "min_quant_numel": 0}
    if "algorithm" in own:
        group |= {key: own.pop(key) for key in ("algorithm", "lr")}
    return cls([group], **own)


def steps_of(
    name: str, gradients: Gradients, steps: int, dtype: torch.dtype = torch.float32, **keys: Any
) -> Iterator[Tensor]:
    """The steps of an optimizer, one after the other."""
    gen = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.zeros(ROWS, COLS, dtype=dtype))
    optimizer = made(name, param, **keys)
    for step in range(steps):
        with torch.no_grad():
            param.zero_()
        param.grad = gradients(step, gen).to(dtype)
        optimizer.step()
        yield param.detach().double()


def sizes(steps: Iterator[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Mean squares of rows and columns over windows of `WINDOW` steps; the first window is left out."""
    found, total = [], torch.zeros(ROWS, COLS, dtype=torch.float64)
    for number, step in enumerate(steps, 1):
        total += step**2
        if number % WINDOW == 0:
            found.append((total.mean(1), total.mean(0)))
            total = torch.zeros_like(total)
    return found[1:]


def eight(steps: int, name: str) -> Iterator[Row]:
    """A row for each case."""
    for case, gradients in CASES.items():
        quantized, plain = (sizes(steps_of(name, gradients, steps, state_bits=bits)) for bits in (8, 32))
        lines = [
            (mine[skip:], other[skip:])
            for one, two in zip(quantized, plain, strict=True)
            for skip, mine, other in zip((0, int(case == "outlier")), one, two, strict=True)
        ]
        quotients = torch.cat([(mine / other)[other >= 0.01 * other.max()].sqrt() for mine, other in lines])
        whole = (quantized[-1][0].mean() / plain[-1][0].mean()).sqrt().item()
        least, most = quotients.min().item(), quotients.max().item()
        near = case != "normal" or abs(whole - 1) <= ORDINARY
        row = {"class": name, "case": case, "largest": most, "smallest": least, "all": whole}
        yield {**row, "met": name in WITHOUT or (most <= MOST and near)}


def size_at_end(name: str, steps: int, dtype: torch.dtype, rounded: torch.dtype, **keys: Any) -> float:
    """Size of the steps over the last tenth, for gradients that fall and are rounded to a dtype."""
    found = steps_of(name, lambda s, g: falling(steps)(s, g).to(rounded).float(), steps, dtype, **keys)
    last = [step.square().mean() for number, step in enumerate(found) if number >= steps * 9 // 10]
    return torch.stack(last).mean().sqrt().item()


def sixteen(steps: int, name: str) -> Iterator[Row]:
    """A row for each parameter's dtype and dtype of the states."""
    for dtype in (torch.bfloat16, torch.float16):
        exact = size_at_end(name, steps, torch.float32, dtype, state_bits=32)
        for states in (None, dtype):
            found = size_at_end(name, steps, dtype, dtype, state_dtype=states, state_bits=32)
            bias = found / exact - 1
            own = "default" if states is None else str(states).removeprefix("torch.")
            row = {"class": name, "dtype": str(dtype).removeprefix("torch."), "states": own, "bias": bias}
            yield {**row, "met": abs(bias) <= (0.01 if states is None else 0.05)}


def share_that_differs(name: str, least: float, steps: int, **keys: Any) -> float:
    """How far steps lie from those with float32 states, as a share of these, over the second half."""
    quantized, plain = (
        torch.stack([*steps_of(name, spectrum(least), steps, **own)][steps // 2 :])
        for own in (keys, {"state_bits": 32})
    )
    return ((quantized - plain).norm() / plain.norm()).item()


def momenta(steps: int, name: str) -> Iterator[Row]:
    """One row of shares by the least singular value; there is no bar."""
    steps = min(steps, 300)
    shares = {
        f"{least:g}": share_that_differs(name, least, steps, state_bits=8) for least in (1e-2, 1e-3, 1e-4)
    }
    half = share_that_differs(name, 1e-3, steps, state_bits=32, state_dtype=torch.bfloat16)
    yield {"class": name, "met": True, **shares, "bfloat16 0.001": half}


PARTS: dict[str, Callable[[int, str], Iterator[Row]]] = {
    "eight": eight,
    "sixteen": sixteen,
    "momenta": momenta,
}


def table(rows: Sequence[Row]) -> str:
    """Rows as a Markdown table, figures with three digits."""
    keys = [key for key in rows[0] if key != "met"]
    cells = [[f"{row[key]:.3g}" if isinstance(row[key], float) else row[key] for key in keys] for row in rows]
    return harness.table(keys, cells)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for; 1 where a bar is missed."""
    parser = harness.command(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--classes", nargs="+", choices=CLASSES, default=list(CLASSES))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    parts: dict[str, list[Row]] = {part: [] for part in options.only or PARTS}
    for part, rows in parts.items():
        for name in tqdm(options.classes, part):
            rows += PARTS[part](options.steps, name)
    harness.write({**harness.facts(), "steps": options.steps, **parts}, options.out, "low_precision")
    print("\n\n".join(map(table, parts.values())))
    return int(not all(row["met"] for rows in parts.values() for row in rows))


if __name__ == "__main__":
    sys.exit(main())
