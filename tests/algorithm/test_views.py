"""Parameters read as blocks, stacks and flattened matrices, and in other memory formats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cases import BASE, CLASSES
from support.inputs import gaussian, well_conditioned

SETTINGS: dict[str, dict[str, Any]] = {
    "dion": {"rank_fraction": 0.5},
    "dion2": {"fraction": 0.4},
    "muon": {"nesterov": True},
    "nordion2": {"fraction": 0.4, "muon_beta2": 0.5},
    "normuon": {"muon_beta2": 0.5},
}
every_algorithm = pytest.mark.parametrize("name", SETTINGS)
STEPS = 3
State = dict[str, Tensor]


def run(
    name: str,
    starts: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
    keys: dict[str, Any] | None = None,
    prepare: Callable[[int, State], None] | None = None,
    **kwargs: Any,
) -> tuple[list[Tensor], list[State]]:
    """Parameters and states after all gradients; the parameters are copies with the strides of ``starts``."""
    params = [nn.Parameter(start.clone()) for start in starts]
    own = {**BASE, **SETTINGS[name], "orth_dtype": "float64", **kwargs}
    optimizer: Any = CLASSES[name]([{"params": params, **(keys or {})}], **own)
    optimizer.init_state()
    for index, param in enumerate(params):
        if prepare:
            prepare(index, optimizer.state[param])
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad
        optimizer.step()
    return [p.detach() for p in params], [optimizer.state[p] for p in params]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


def drawn(shape: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its gradients."""
    return gaussian(shape, 1), [
        0.5**i * (well_conditioned(shape, 2) + 0.1 * gaussian(shape, 3, i)) for i in range(STEPS)
    ]


@every_algorithm
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (40, 2, 3, 3)], ids=str)
def test_channels_last_kernels_equal_contiguous_ones(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    start, grads = drawn(shape)
    start, grads = start.to(dtype), [grad.to(dtype) for grad in grads]
    last = torch.channels_last
    wanted, states = run(name, [start], [[g] for g in grads], flatten=True)
    for of_grad in (torch.contiguous_format, last):
        swapped = [[g.contiguous(memory_format=of_grad)] for g in grads]
        got, found = run(name, [start.contiguous(memory_format=last)], swapped, flatten=True)
        assert got[0].is_contiguous(memory_format=last)
        assert not got[0].is_contiguous()
        assert torch.equal(got[0], wanted[0])
        assert found[0].keys() == states[0].keys()
        assert all(torch.equal(found[0][key], value) for key, value in states[0].items())


@every_algorithm
def test_heads_equal_a_stack_of_matrices(name: str) -> None:
    start, grads = drawn((4, 3, 10))
    q = gaussian((4, 3, 2), 9)

    def prepare(_: int, state: State) -> None:
        if "Q" in state:
            state["Q"].copy_(q.reshape(state["Q"].shape))

    wanted, states = run(name, [start], [[g] for g in grads], prepare=prepare)
    flat = [[g.reshape(12, 10)] for g in grads]
    got, found = run(name, [start.reshape(12, 10)], flat, {"num_heads": 4}, prepare)
    close(got[0].reshape(4, 3, 10), wanted[0])
    for key, value in states[0].items():
        close(found[0][key].reshape(value.shape), value)


@every_algorithm
@pytest.mark.parametrize("shape", [(4, 6), (6, 4)], ids=str)
@pytest.mark.parametrize("keys", [{"split_dim": 1}, {"split_dim": 1, "num_heads": 1}], ids=str)
def test_a_side_without_a_cut_changes_nothing(
    name: str, shape: tuple[int, ...], keys: dict[str, Any]
) -> None:
    start, grads = drawn(shape)
    steps = [[grad] for grad in grads]
    (wanted,), _ = run(name, [start], steps)
    (got,), _ = run(name, [start], steps, keys)
    assert torch.equal(got, wanted)


SPLITS = ((5, 3, 4), (4, 4, 4), (1, 10, 1))


def block(size: int, other: int, split_dim: int) -> tuple[int, int]:
    """The shape of a block."""
    return (size, other) if split_dim == 0 else (other, size)


def alike(sizes: tuple[int, ...], other: int, split_dim: int) -> bool:
    """Whether all blocks would have Q on the same side as the largest, which decides for them together."""
    shapes = [block(n, other, split_dim) for n in sorted(sizes)]
    return all((rows < cols) == (shapes[-1][0] < shapes[-1][1]) for rows, cols in shapes)


BLOCKS = [
    (name, sizes, split_dim, other)
    for name in SETTINGS
    for sizes in SPLITS
    for split_dim in (0, 1)
    for other in (9, 14, 3)
    if name != "dion" or alike(sizes, other, split_dim)
]


@pytest.mark.parametrize(("name", "sizes", "split_dim", "other"), BLOCKS)
def test_blocks_equal_separate_parameters(
    name: str, sizes: tuple[int, ...], split_dim: int, other: int
) -> None:
    start, grads = drawn(block(12, other, split_dim))
    keys = {"split_sizes": sizes, "split_dim": split_dim}
    fresh = initial_q(start, keys) if name == "dion" else torch.empty(0)

    def same_basis(index: int, state: State) -> None:
        if "Q" in state:
            state["Q"].copy_(part_of_q(fresh, sizes, index, state["Q"].shape[1]))

    got, (found,) = run(name, [start], [[g] for g in grads], keys)
    parts = [list(g.split(sizes, dim=split_dim)) for g in grads]
    wanted, states = run(name, list(start.split(sizes, dim=split_dim)), parts, prepare=same_basis)
    close(got[0], torch.cat(wanted, dim=split_dim))
    for key in states[0].keys() - {"Q"}:
        close(found[key], torch.cat([state[key] for state in states], dim=split_dim))
    for index, state in enumerate(states):
        if "Q" in state:
            # The sign of a column follows the sketch, whose numbers differ.
            mine = part_of_q(found["Q"], sizes, index, state["Q"].shape[1])
            close(mine.abs(), state["Q"].abs())


def initial_q(start: Tensor, keys: dict[str, Any]) -> Tensor:
    """Q before the first step."""
    _, states = run("dion", [start], [], keys)
    return states[0]["Q"].clone()


def part_of_q(q: Tensor, sizes: Sequence[int], index: int, rank: int) -> Tensor:
    """The rows and columns of Q that belong to a block."""
    own = q[index] if q.ndim == 3 else q.split(list(sizes), dim=0)[index]
    return own[:, :rank]


@pytest.mark.parametrize("name", ["muon", "dion"])
@pytest.mark.parametrize("key", [{"num_heads": 3}, {"split_sizes": (6, 4, 2)}], ids=str)
def test_blocks_of_columns_are_the_transposed_problem(name: str, key: dict[str, Any]) -> None:
    # Both are the same problem for the transposed matrix; with this rule so is the factor.
    start, grads = drawn((12, 14))
    q = initial_q(start, {**key, "split_dim": 0})

    def same_basis(_: int, state: State) -> None:
        if "Q" in state:
            state["Q"].copy_(q)

    rule = {"adjust_lr": "rms_norm"}
    wanted, states = run(name, [start], [[g] for g in grads], {**key, "split_dim": 0}, same_basis, **rule)
    turned = [[g.mT] for g in grads]
    got, found = run(name, [start.mT], turned, {**key, "split_dim": 1}, same_basis, **rule)
    close(got[0], wanted[0].mT)
    close(found[0]["momentum"], states[0]["momentum"].mT)


@every_algorithm
def test_batch_bytes_change_nothing(name: str) -> None:
    shapes = ((8, 6),) * 5 + ((6, 8),) * 3
    pairs = [drawn(shape) for shape in shapes]
    starts, grads = [p for p, _ in pairs], [[g[i] for _, g in pairs] for i in range(STEPS)]
    wanted, states = run(name, starts, grads)
    for size in (1, 2000):
        got, found = run(name, starts, grads, max_batch_bytes=size)
        for mine, other, state, twin in zip(got, wanted, found, states, strict=True):
            close(mine, other)
            assert all(torch.allclose(state[k], twin[k], rtol=0, atol=1e-10) for k in twin)


@every_algorithm
@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16], ids=str)
def test_every_mixture_of_types_follows_float64(
    name: str, param: torch.dtype, state: torch.dtype | None
) -> None:
    start, grads = drawn((12, 20))
    start, grads = start.to(param), [g.to(param) for g in grads]
    own: dict[str, Any] = {"orth_dtype": "float32", "lr": 0.5, "fraction": 1.0}
    own = {k: v for k, v in own.items() if k != "fraction" or name in ("dion2", "nordion2")}
    (got,), (found,) = run(name, [start], [[g] for g in grads], state_dtype=state, **own)
    q = initial_q(start.double(), {}) if name == "dion" else None

    def same_basis(_: int, state: State) -> None:
        if q is not None:
            state["Q"].copy_(q)

    wide = [[g.double()] for g in grads]
    (wanted,), _ = run(name, [start.double()], wide, None, same_basis, **{**own, "orth_dtype": "float64"})
    assert got.dtype == param
    for key, value in found.items():
        assert value.dtype == (torch.float32 if key == "variance_neuron" else state or torch.float32), key
    update = wanted - start.double()
    error = float((got.double() - wanted).norm() / update.norm())
    coarsest = max(torch.finfo(param).eps, torch.finfo(state or param).eps)
    assert error < 30 * coarsest, error
