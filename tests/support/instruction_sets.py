"""Steps of many classes, saved: ``python instruction_sets.py FILE`` under ``OXIDION_MAX_CPU_ISA``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import oxidion
from oxidion._oxidion import cpu_features

SHAPES = ((37, 129), (300, 700), (128, 640), (640, 64), (1, 7), (513,), ())
MATRICES = tuple(shape for shape in SHAPES if len(shape) == 2 and min(shape) > 1)
ELEMENTWISE: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "AdamW": (oxidion.AdamW, {"amsgrad": True}),
    "AdamW-cautious": (oxidion.AdamW, {"cautious_wd": True, "state_dtype": torch.bfloat16}),
    "AdamW-8": (oxidion.AdamW, {"state_bits": 8}),
    "Lion": (oxidion.Lion, {"cautious_wd": True}),
    "Lion-8": (oxidion.Lion, {"state_bits": 8}),
    "Lamb": (oxidion.Lamb, {"weight_decay": 0.1}),
    "Lamb-8": (oxidion.Lamb, {"state_bits": 8}),
    "Adafactor": (oxidion.Adafactor, {"relative_step": False, "lr": 0.01, "beta1": 0.9}),
    "CAME": (oxidion.CAME, {"lr": 1e-3}),
    "CAME-8": (oxidion.CAME, {"lr": 1e-3, "state_bits": 8}),
}
"""Classes whose steps have the same bits whatever the instruction set."""
ORTHONORMAL: dict[str, tuple[type[Any], dict[str, Any]]] = {
    f"{name}-{dtype}": (cls, {**keys, "orth_dtype": dtype})
    for name, cls, keys in (
        ("Muon", oxidion.Muon, {}),
        ("Muon-fast", oxidion.Muon, {"orth_preset": "fast"}),
        ("NorMuon", oxidion.NorMuon, {}),
        ("Dion", oxidion.Dion, {"rank_fraction": 0.25}),
        ("Dion-full", oxidion.Dion, {}),
        ("Dion2", oxidion.Dion2, {}),
    )
    for dtype in ("float32", "bfloat16")
}
"""Those whose products are summed in another order by each of them."""


def tensors(dtype: torch.dtype, matrices: bool) -> list[nn.Parameter]:
    """The same parameters in every process."""
    generator = torch.Generator().manual_seed(5)
    shapes = MATRICES if matrices else SHAPES
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def trained(cls: type[Any], keys: dict[str, Any], dtype: torch.dtype, matrices: bool) -> list[Tensor]:
    """Parameters and their states after three steps, and the way of the parameters."""
    params = tensors(dtype, matrices)
    start = [param.detach().clone() for param in params]
    small = {"min_quant_numel": 4096} if "state_bits" in keys else {}
    optimizer = cls([{"params": params, **small}], **keys)
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.step()
    way = [param.detach() - old for param, old in zip(params, start, strict=True)]
    states = [value for param in params for value in optimizer.state[param].values()]
    return [*way, *(param.detach() for param in params), *states]


def main(path: str) -> None:
    """Saves everything."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {"features": cpu_features()}
    for name, (cls, keys) in ELEMENTWISE.items():
        found[name] = trained(cls, keys, torch.float32, matrices=False)
        rounded = {**keys, "stochastic_rounding": True}
        found[f"{name}-bfloat16"] = trained(cls, rounded, torch.bfloat16, matrices=False)
    for name, (cls, keys) in ORTHONORMAL.items():
        found[name] = trained(cls, keys, torch.float32, matrices=True)
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
