"""Parameter lists that the benchmarks step over, and the gradients that they step with.

Gradients are a low-rank signal with a decaying spectrum plus noise, from fixed seeds: the quality of an
orthonormal update depends on the spectrum, so plain Gaussian gradients would flatter every method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]

#: Families of contenders that are compared with each other. The fraction is Dion's ``rank_fraction``.
MUON, DION_4, DION_16, ADAMW, LION = "muon", "dion r=1/4", "dion r=1/16", "adamw", "lion"
ORTHONORMAL = (MUON, DION_4, DION_16)
NORMUON, DION2, NORDION2 = "normuon", "dion2 1/4", "nordion2 1/4"
RELATIVES = (NORMUON, DION2, NORDION2)
ELEMENTWISE = (ADAMW, LION)
LAMB, ADAFACTOR, CAME, ADAMW8 = "lamb", "adafactor", "came", "adamw 8-bit"
GALORE, GALORE_REFRESH = "galore r=128", "galore r=128 refresh"
MEMORY = (LAMB, ADAFACTOR, CAME, ADAMW8)

SIGNAL_RANK = 32
NOISE = 0.5


@dataclass(frozen=True)
class Workload:
    """One list of float32 parameters.

    Attributes:
        name: Identifier in tables and in ``--only``.
        matrices: Shapes that an orthonormal optimizer takes.
        others: Shapes that its AdamW group takes (norm gains, biases).
        families: Families that run on this list.
        quick: Families that ``--quick`` keeps.
        one_thread: Whether it is run at one thread too, or at all threads only.
    """

    name: str
    matrices: tuple[Shape, ...]
    others: tuple[Shape, ...] = ()
    families: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    one_thread: bool = True

    @property
    def numel(self) -> int:
        """Number of parameters in the list."""
        return sum(torch.Size(shape).numel() for shape in (*self.matrices, *self.others))


@dataclass(frozen=True)
class Tensors:
    """The parameters of a workload with their gradients set."""

    matrices: list[Tensor]
    others: list[Tensor]

    @property
    def everything(self) -> list[Tensor]:
        """Matrices first, then the rest."""
        return [*self.matrices, *self.others]


def gpt_layers(width: int, layers: int) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Hidden matrices and norm gains of a GPT: per layer four (d, d), one (4d, d), one (d, 4d), two gains."""
    matrices: list[Shape] = []
    for _ in range(layers):
        matrices += [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    return tuple(matrices), ((width,),) * (2 * layers + 1)


MIXED: tuple[Shape, ...] = (
    *((768, 768),) * 2, (512, 2048), (2048, 512), (384, 1000), (1000, 384), (257, 129), (640, 320), (96, 960),
    (1, 513), (513, 1), (33, 65), *((64, 64),) * 8, *((128, 32),) * 4,
)  # fmt: skip


def gpt(layers: int, families: tuple[str, ...], *, one_thread: bool = True) -> Workload:
    """Matrices and gains of a GPT of 160 million parameters, some of its 12 layers, without embeddings."""
    return Workload(f"gpt160m-l{layers}", *gpt_layers(768, layers), families, (), one_thread)


def repeated(count: int, *shape: int, name: str = "", **keys: Any) -> Workload:
    """Equal matrices, or else equal vectors."""
    name = name or "x".join(map(str, (count, *shape) if count > 1 else shape))
    matrices, others = ((shape,) * count, ()) if len(shape) == 2 else ((), (shape,) * count)
    return Workload(name, matrices, others, **keys)


#: The 74 tensors of GPT-2: per layer four matrices and two gains; two embeddings.
GPT2 = Workload(
    "gpt2-74",
    (*((2304, 768), (768, 768), (3072, 768), (768, 3072)) * 12, (50257, 768), (1024, 768)),
    ((768,),) * 24,
    ELEMENTWISE,
)


def catalogue() -> tuple[Workload, ...]:
    """Every workload for CPUs."""
    small = ((1000,), (384,), (7,)) * 4
    matrices, gains = gpt_layers(768, 10)
    embeddings = ((32_000, 768), (6_400, 768))
    of_memory = (*MEMORY, GALORE, GALORE_REFRESH)
    return (
        gpt(1, (*ORTHONORMAL, *RELATIVES, *ELEMENTWISE)),
        gpt(2, (MUON, DION_4), one_thread=False),
        gpt(4, (MUON, DION_4), one_thread=False),
        gpt(12, (MUON, DION_4, DION_16)),
        GPT2,
        Workload("mixed", MIXED, small, (*ORTHONORMAL, *ELEMENTWISE), (DION_16, LION)),
        repeated(1, 1024, 4096, families=(MUON, DION_4, DION_16, *RELATIVES), quick=(DION_4,)),
        repeated(1, 1024, 2752, families=(MUON,)),
        repeated(1, 1024, 1024, families=(MUON,), quick=(MUON,)),
        repeated(1, 2048, 2048, families=(MUON,)),
        repeated(600, 64, 64, families=(MUON, DION_4), quick=(MUON,)),
        repeated(200, 256, 256, families=(MUON,)),
        Workload("1000x64x64+4000x768", ((64, 64),) * 1000, ((768,),) * 4000, (MUON,)),
        repeated(4000, 768, families=ELEMENTWISE, quick=(ADAMW,)),
        repeated(1, 1024, 4096, name="memory-1024x4096", families=of_memory, quick=(LAMB, ADAFACTOR, CAME)),
        # 100 million elements in 83 tensors.
        Workload("memory-100m", (*matrices, *embeddings), gains, (*MEMORY, GALORE_REFRESH), one_thread=False),
        repeated(1, 100_000_000, name="flat-100m", families=ELEMENTWISE),
    )


def lists() -> tuple[Workload, ...]:
    """The lists of `cuda.py`; the last two are there to try the script."""
    matrices, gains = gpt_layers(768, 12)
    large = (MUON, NORMUON, DION_4, DION_16, DION2, NORDION2)
    every = (*large, *ELEMENTWISE)
    # Width 2048, 512 for keys and values, 8192 inside.
    llama = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192))
    return (
        Workload("gpt160m", matrices, gains, every),
        Workload("llama-1b", llama * 16, ((2048,),) * 33, every),
        repeated(4, 4096, 4096, name="4096x4096", families=large),
        repeated(3, 4096, 11008, name="4096x11008", families=large),
        Workload("memory", matrices, families=(*MEMORY, GALORE)),
        repeated(100, 10_000_000, name="1b", families=ELEMENTWISE),
        Workload("tiny", ((64, 32),) * 2, ((7,),), (MUON, *ELEMENTWISE)),
        Workload("trial", ((48, 64), (64, 32)), families=(DION_4, DION2, NORDION2, NORMUON)),
    )


def device_lists() -> tuple[Workload, ...]:
    """The lists of `device_parts.py`."""
    llama: tuple[Shape, ...] = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14336, 4096),) * 2
    layer: tuple[Shape, ...] = ((1536, 1536),) * 4 + ((6656, 1536),) * 2 + ((1536, 6656),)
    return (
        Workload("gpt2-48", GPT2.matrices[:48]),
        *(work for work in lists() if work.name in ("4096x4096", "4096x11008")),
        repeated(8, 1024, 4096),
        repeated(32, 1024, 4096),
        Workload("llama-8b-rank", (*llama, (4096, 14336)) * 4),
        Workload("published-1b", layer * 24),
        *(repeated(1, side, side, name=f"1x{side}x{side}") for side in (2048, 4096, 8192, 16384)),
        repeated(1, 100_000_000, name="100m"),
        repeated(1, 250_000_000, name="250m"),
        repeated(4000, 768),
        repeated(4000, 3),
    )


def named(name: str) -> Workload:
    """The workload of this name."""
    return next(workload for workload in catalogue() if workload.name == name)


def gradient(shape: Shape, seed: int, device: torch.device | str = "cpu") -> Tensor:
    """Gradient of one parameter: ``sum_k a_k b_k^T / k`` plus Gaussian noise; vectors get the noise alone.

    It is made on its device: on the host that takes 1.1 s for a 4096 x 4096 matrix.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    noise = random(*shape).mul_(NOISE)
    if len(shape) != 2:
        return noise
    rank = min(SIGNAL_RANK, *shape)
    left = random(shape[0], rank) / torch.arange(1, rank + 1, device=device)
    return noise.addmm_(left, random(rank, shape[1]))


def gradients(
    workload: Workload, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the matrices and of the other parameters; every contender steps with these tensors."""
    shapes = (*workload.matrices, *workload.others)
    grads = [gradient(shape, seed, device).to(dtype) for seed, shape in enumerate(shapes)]
    return grads[: len(workload.matrices)], grads[len(workload.matrices) :]


def make_tensors(grads: tuple[list[Tensor], list[Tensor]]) -> Tensors:
    """Fresh parameters, all 0.02 in size, that share the given gradients, their device and their dtype."""
    device = next((grad.device for group in grads for grad in group), torch.device("cpu"))
    generator = torch.Generator(device).manual_seed(12345)
    made: list[list[Tensor]] = []
    for group in grads:
        made.append([])
        for grad in group:
            values = torch.randn(grad.shape, generator=generator, device=device).mul_(0.02)
            param = torch.nn.Parameter(values.to(grad.dtype))
            param.grad = grad
            made[-1].append(param)
    return Tensors(*made)
