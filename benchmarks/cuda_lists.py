"""Parameter lists that `cuda.py` and `device_parts.py` step over; all of them float32."""

from __future__ import annotations

from dataclasses import replace

from workloads import (
    ADAMW,
    DION2,
    DION_4,
    DION_16,
    GALORE,
    LION,
    MEMORY,
    MUON,
    NORDION2,
    NORMUON,
    Shape,
    Workload,
    gpt2,
    gpt_layers,
)

EVERY = (MUON, NORMUON, DION_4, DION_16, DION2, NORDION2, ADAMW, LION)


def llama(layers: int) -> tuple[Shape, ...]:
    """Matrices of Llama-1B layers: width 2048, 512 for keys and values, 8192 inside."""
    layer = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192))
    return layer * layers


def lists() -> tuple[Workload, ...]:
    """Every list; the last two are there to try the script."""
    matrices, gains = gpt_layers(768, 12)
    large = (MUON, NORMUON, DION_4, DION_16, DION2, NORDION2)
    return (
        Workload("gpt160m", "GPT-160M, 12 layers", matrices, gains, EVERY),
        Workload("llama-1b", "Llama-1B, 16 layers", llama(16), ((2048,),) * 33, EVERY),
        Workload("4096x4096", "four of 4096x4096", ((4096, 4096),) * 4, (), large),
        Workload("4096x11008", "three of 4096x11008", ((4096, 11008),) * 3, (), large),
        Workload("memory", "matrices of GPT-160M", matrices, (), (*MEMORY, GALORE)),
        Workload("1b", "1 billion elements in 100 tensors", (), ((10_000_000,),) * 100, (ADAMW, LION)),
        Workload("tiny", "to try the script", ((64, 32),) * 2, ((7,),), (MUON, ADAMW, LION)),
        Workload("trial", "to try the script", ((48, 64), (64, 32)), (), (DION_4, DION2, NORDION2, NORMUON)),
    )


def repeated(name: str, count: int, *shape: int) -> Workload:
    """One of the lists for a device that have a single shape: of matrices, or else of vectors."""
    shapes = (shape,) * count
    summary = f"{count} of {'x'.join(map(str, shape))}"
    return Workload(name, summary, shapes if len(shape) == 2 else (), shapes if len(shape) == 1 else (), ())


def device_lists() -> tuple[Workload, ...]:
    """The lists of `device_parts.py`."""
    llama: tuple[Shape, ...] = ((4096, 4096),) * 2 + ((1024, 4096),) * 2 + ((14336, 4096),) * 2
    layer: tuple[Shape, ...] = ((1536, 1536),) * 4 + ((6656, 1536),) * 2 + ((1536, 6656),)
    squares = (repeated(f"1x{side}x{side}", 1, side, side) for side in (2048, 4096, 8192, 16384))
    return (
        replace(
            gpt2(), name="gpt2-48", summary="48 matrices of GPT-2", matrices=gpt2().matrices[:48], others=()
        ),
        *(work for work in lists() if work.name in ("4096x4096", "4096x11008")),
        repeated("8x1024x4096", 8, 1024, 4096),
        repeated("32x1024x4096", 32, 1024, 4096),
        Workload("llama-8b-rank", "4 of 32 layers of Llama 8B", (*llama, (4096, 14336)) * 4, (), ()),
        Workload("published-1b", "24 layers: width 1536, 6656 inside, gated", layer * 24, (), ()),
        *squares,
        repeated("100m", 1, 100_000_000),
        repeated("250m", 1, 250_000_000),
        repeated("4000x768", 4000, 768),
        repeated("4000x3", 4000, 3),
    )
