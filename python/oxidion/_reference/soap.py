"""SOAP: Adam in the eigenbasis of Shampoo's factors."""

# m, n = rows and columns of a matrix; d = the length of a side, e = that of the other one.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oxidion._oxidion import fill_normal
from oxidion._reference.matrices import bases, counts_interleaved, matrices
from oxidion._reference.orthogonalize import epsilon_of
from oxidion._reference.update import Group, State, ascending, betas_of, take_step

BASIS_TAG = 4
NAMES = ("L", "R")


def merged_shape(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """Dimensions multiplied together from the left while the product stays within ``limit``."""
    merged: list[int] = []
    for size in shape:
        if merged and merged[-1] * size <= limit:
            merged[-1] *= size
        else:
            merged.append(size)
    return tuple(merged)


def sides_of(rows: int, cols: int, group: Group) -> tuple[int, ...]:
    """The sides with a basis: 0 is the rows, 1 the columns; of a parameter whose largest matrix is this."""
    kind = group.get("sides", "both")
    wanted = {"both": (0, 1), "short": (0,) if rows < cols else (1,)}
    if kind == "unsharded":
        turned = group.get("transposed")
        wanted[kind] = (0,) if (rows < cols if turned is None else turned) else (1,)
    limit = int(group.get("max_precondition_dim", 10000))
    if group.get("is_merged", False) and cols == 1:
        return (0,) if rows <= limit else ()
    return tuple(side for side in wanted[kind] if (rows, cols)[side] <= limit)


def blocks_of(x: Tensor, group: Group) -> list[Tensor]:
    """The matrices of a tensor of the parameter's shape; a vector is one column."""
    return [x.view(-1, 1)] if x.ndim < 2 else matrices(x, group)


def first_basis(factor: Tensor, other: int, side: int, block: int, group: Group) -> Tensor:
    """Eigenvectors by falling eigenvalue; those that rounding decides are drawn at random.

    Directions below ``16 max(d, e) u`` of the largest eigenvalue are normal numbers made orthogonal to the
    others and to each other.
    """
    d = factor.shape[0]
    values, vectors = torch.linalg.eigh(factor)
    values, vectors = values.flip(0), vectors.flip(1)
    is_wide = group.get("dtype", torch.float64) == torch.float64
    roundoff = torch.finfo(torch.float64 if is_wide else torch.float32).eps / 2
    found = int((values > 16 * max(d, other) * roundoff * values[0]).sum())
    numbers = torch.empty((block + 1) * d * d)
    stream, seed = int(group.get("stream", 0)), int(group.get("seed", 0))
    fill_normal(numbers, seed, stream, tag=BASIS_TAG + side, step=0)
    drawn = numbers[block * d * d :].view(d, d)[:, found:].double()
    kept = vectors[:, :found]
    for _ in range(2):
        drawn = drawn - kept @ (kept.mT @ drawn)
    return torch.cat([kept, torch.linalg.qr(drawn)[0]], dim=1)


def next_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """One power iteration, columns by falling estimate of the eigenvalue and put back to their places."""
    order = torch.argsort(-(basis.mT @ factor @ basis).diagonal(), stable=True)
    new = torch.empty_like(basis)
    new[:, order] = torch.linalg.qr(factor @ basis[:, order])[0]
    return new


def rotate(x: Tensor, turns: dict[int, Tensor], *, back: bool = False) -> Tensor:
    """``Q_L^T X Q_R``, or ``Q_L X Q_R^T``, with the bases that there are."""
    if 0 in turns:
        x = (turns[0] if back else turns[0].mT) @ x
    if 1 in turns:
        x = x @ (turns[1].mT if back else turns[1])
    return x


class Bases:
    """Factors and bases of a parameter's matrices, in its state.

    Attributes:
        sides: The sides that have one.
        since: Of each matrix the number of the gradient that made its first basis, 0 before.
    """

    def __init__(self, param: Tensor, state: State, group: Group) -> None:
        self.group = group
        blocks = blocks_of(param, group)
        rows, cols = (max(block.shape[i] for block in blocks) for i in (0, 1))
        self.shapes = [(int(b.shape[0]), int(b.shape[1])) for b in blocks]
        self.sides = () if param.ndim < 2 else sides_of(rows, cols, group)
        columns = max(param.ndim - 1, 1)
        lead = max(columns - (2 if counts_interleaved(param, group) else 1), 0)
        if group.get("flatten", False):
            lead, columns = 0, 1
        per_matrix = len(blocks) // max(math.prod(param.shape[:lead]), 1)
        shape = [*param.shape[:lead], *([per_matrix, 1, 1] if per_matrix > 1 else [])]
        self.since = param.new_ones(len(blocks))
        if self.sides:
            self.since = state.setdefault("basis_step", param.new_zeros(shape)).view(-1)
        self.factors: dict[int, list[Tensor]] = {}
        self.found: dict[int, list[Tensor]] = {}
        for side in self.sides:
            own_split = int(group.get("split_dim") or 0) == side
            length = (rows, cols)[side]
            dims = param.shape[lead:columns] if side == 0 else param.shape[columns:]
            count = [per_matrix] if per_matrix > 1 and not own_split else []
            for name, kept in ((NAMES[side], self.factors), (f"Q_{NAMES[side]}", self.found)):
                whole = state.setdefault(name, param.new_zeros([*param.shape[:lead], *count, *dims, length]))
                parts = bases(whole, group, self.shapes, side == 0)
                kept[side] = [part[:, : s[side]] for part, s in zip(parts, self.shapes, strict=True)]

    def of(self, block: int) -> dict[int, Tensor]:
        """The bases of a matrix by side."""
        return {side: self.found[side][block] for side in self.sides}

    def learn(self, block: int, grad: Tensor, beta: float, steps: int) -> None:
        """Adds a gradient to the factors, and recomputes the bases where that is scheduled."""
        is_first = bool(self.since[block] == 0)
        if grad.isfinite().all():
            for side in self.sides:
                square = grad @ grad.mT if side == 0 else grad.mT @ grad
                self.factors[side][block].mul_(beta).add_(square, alpha=1.0 - beta)
        if not is_first and steps % int(self.group.get("precondition_frequency", 10)):
            return
        if is_first and not all(self.factors[side][block].any() for side in self.sides):
            return
        if is_first:
            self.since[block] = steps + 1
        seen = steps + 2 - int(self.since[block])
        for side in self.sides:
            basis, factor = self.found[side][block], self.factors[side][block]
            own, other = self.shapes[block][side], self.shapes[block][1 - side]
            if is_first:
                basis.copy_(first_basis(factor, other, side, block, self.group))
            elif seen * other >= 2 * own:
                basis.copy_(next_basis(factor, basis))


def soap_merged_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """SOAP on one matrix of merged dimensions, or one column; factors keep a side's unmerged dimensions."""
    merged = merged_shape(param.shape, int(group.get("max_precondition_dim", 10000)))
    if len(merged) > 2:
        raise ValueError(f"{tuple(param.shape)} is merged to {merged}: two dimensions are the most")
    shape = merged if len(merged) == 2 else (*merged, 1)
    inner = {**group, "merge_dims": False, "is_merged": True}
    moments, factors = ("momentum", "variance"), ("L", "R", "Q_L", "Q_R")
    own: State = {}
    for key, value in state.items():
        if key in factors:  # of no elements too
            value = value.view(value.shape[:-1].numel(), value.shape[-1])
        own[key] = value.view(shape) if key in moments else value
    soap_step(param.view(shape), grad.view(shape), own, inner)
    for key, value in own.items():
        state.setdefault(key, value.view(param.shape) if key in moments else value)


def soap_step(param: Tensor, grad: Tensor, state: State, group: Group) -> None:
    """SOAP (arXiv:2409.11321) on each of the matrices of a parameter, one-sided where sides are left out.

    The first gradient G makes ``L = (1-b) G G^T``, ``R = (1-b) G^T G`` and their eigenvectors. Afterwards,
    with t gradients before this one: ``M <- b1 M + (1-b1) G``; ``V <- b2 V + (1-b2) (Q_L^T G Q_R)^2``;
    ``U = Q_L [(Q_L^T M Q_R) / (sqrt V + eps)] Q_R^T``; ``X <- X - lr sqrt(1-b2^t)/(1-b1^t) U``; decay; then L
    and R, and where t is a multiple of the frequency the bases. A matrix without a basis yet has no U.
    """
    if group.get("merge_dims", False) and param.ndim > 1:
        soap_merged_step(param, grad, state, group)
        return
    grad = ascending(grad, group)
    kept = Bases(param, state, group)
    momentum = state.setdefault("momentum", torch.zeros_like(param))
    variance = state.setdefault("variance", torch.zeros_like(param))
    step = state.setdefault("step", torch.zeros((), dtype=torch.float64))
    steps = int(step)
    step += 1
    beta1, beta2 = betas_of(group)
    shampoo = group.get("shampoo_beta")
    beta = beta2 if shampoo is None or shampoo == -1 else float(shampoo)
    lists = (blocks_of(x, group) for x in (grad, momentum, variance))
    update = torch.zeros_like(param, memory_format=torch.contiguous_format)
    for block, (g, m, v, u) in enumerate(zip(*lists, blocks_of(update, group), strict=True)):
        if steps and bool(kept.since[block] != 0):
            turns = kept.of(block)
            m.mul_(beta1).add_(g, alpha=1.0 - beta1)
            v.mul_(beta2).add_(rotate(g, turns).square(), alpha=1.0 - beta2)
            u.copy_(rotate(rotate(m, turns) / (v.sqrt() + epsilon_of(group)), turns, back=True))
            if group.get("normalize_grads", False):
                u /= 1e-30 + u.square().mean().sqrt()
            if group.get("correct_bias", True):
                u *= math.sqrt(1.0 - beta2**steps) / (1.0 - beta1**steps)
        kept.learn(block, g, beta, steps)
    if steps == 0:
        return
    views = (blocks_of(param, group), blocks_of(update, group))
    late = group.get("decay_order", "galore") == "galore"
    take_step(param, update, views, group, state, late=late)
