"""Plans of parameters of any size and settings on meshes that are not there: built, or refused in words."""

from __future__ import annotations

import math
from typing import Any

import oxidion
from oxidion._oxidion import Plan, algorithms

from .draw import Draw

SIZES = [
    0,
    1,
    2,
    3,
    7,
    64,
    4096,
    2**20,
    2**31 - 1,
    2**31,
    2**32,
    2**40,
    2**47,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
SETTINGS: dict[str, list[Any]] = {
    "rank_fraction": [1.0, 0.5, 1e-9, 0.0, 2.0, math.nan, -1.0],
    "rank": [1, 4, 2**40, 2**63 - 1, 0, -1],
    "fraction": [0.25, 1.0, 1e-12, math.inf],
    "num_heads": [1, 2, 7, 2**40, 0],
    "interleaved": [1, 2, 7, 2**40, 0],
    "split_sizes": [(1, 1), (2**40, 2**40), (2**63, 2**63), (3,)],
    "split_dim": [0, 1, 2],
    "fan_in_fan_out": [True, False],
    "flatten": [True, False],
    "max_batch_bytes": [None, 1, 2**40, 2**63 - 1, 0, -5],
    "rank_multiple_of": [1, 4, 2**40],
    "rcqr_oversample": [1.25, 1e300, math.inf],
    "ns_steps": [0, 1, 5, 2**20],
    "power_iters": [1, 3],
    "right_factor": ["column", "orthonormal"],
    "merge_dims": [True, False],
    "owned_states": [True, False],
    "state_bits": [32, 8, 3],
    "state_dtype": ["float32", "float64", "bfloat16", "int8"],
    "block_size": [256, 1, 512, 3, 2**40],
    "min_quant_numel": [0, 1, 2**63 - 1],
    "proj_type": ["std", "left", "right", "full", "reverse_std", "none"],
}
REFUSALS = (ValueError, TypeError, oxidion.LayoutError, OverflowError)
MOST_BYTES = 2**62


def case(draw: Draw) -> None:
    """A plan of each rank of a line, whose bytes fit an integer and whose fingerprints are equal."""
    extreme = draw.often(0.5)

    def size() -> int:
        return draw.choice(SIZES) if extreme and draw.often(0.5) else draw.size()

    axes = {f"a{i}": draw.choice([1, 2, 3, 4, 16, 64]) for i in range(draw.randint(0, 3))}
    shapes = [
        tuple(size() for _ in range(draw.choice([0, 1, 2, 2, 2, 3, 4]))) for _ in range(draw.randint(1, 4))
    ]
    groups = [{"algorithm": draw.choice(algorithms()), **draw.some(SETTINGS, 0.12)} for _ in range(2)]
    places = [
        {name: (draw.choice("RSST"), draw.randrange(max(1, len(shape)))) for name in axes} for shape in shapes
    ]
    label = f"{groups} {shapes} on {axes} {places}"
    members = [(draw.choice(["float32", "bfloat16", "float64"]), draw.randrange(2)) for _ in shapes]
    prints, refused = set(), set()
    world = math.prod(axes.values())
    for rank in {0, draw.randrange(world), world - 1}:
        at, lines = rank, {}
        stride = world
        for name, count in axes.items():
            stride //= count
            place = at // stride % count
            first = rank - place * stride
            lines[name] = ([first + i * stride for i in range(count)], place)
        params = [
            (f"p{i}", shape, dtype, group, [(name, *lines[name], *places[i][name]) for name in axes])
            for i, (shape, (dtype, group)) in enumerate(zip(shapes, members, strict=True))
        ]
        try:
            plan = Plan.of_shapes(groups, params)
            rows = plan.rows()
            planned_bytes = [plan.arena_bytes, *(row["state_bytes"] for row in rows)]
        except REFUSALS as error:
            refused.add(f"{type(error).__name__}: {error}")
            continue
        assert all(0 <= number < MOST_BYTES for number in planned_bytes), f"{label}: bytes {planned_bytes}"
        assert len(str(plan)) > 0
        assert all(math.isfinite(number) and number >= 0 for number in plan.work()), f"{label}: {plan.work()}"
        prints.add(plan.fingerprint)
    assert len(prints) + bool(refused) == 1, f"{label}: {prints} and {refused}"
    assert all(len(words) > 30 for words in refused), f"{label}: {refused}"
