"""Parameter lists that `cuda.py` steps over; all of them float32."""

from __future__ import annotations

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
