"""Orthonormalization and 8-bit quantization as functions, on torch tensors and NumPy arrays; a step of Muon.

Every function of matrices takes one matrix ``[m, n]`` or a stack ``[..., m, n]``. All but `muon` leave their
arguments unchanged and return what they were given: a tensor for a tensor, an array for an array; matrices of
the same dtype and shape. `muon` writes parameters and momenta in place, as torch's function of that name.

Tensors may be on the CPU or on a CUDA device, where a function computes on torch's current stream, as a step
does; results are there too. Arrays are of the CPU. On a device `cholesky_qr` goes through
``torch.linalg.qr``, whose columns may have other signs. It and `polar` are not known to work in a capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from torch import Tensor

from oxidion import _oxidion
from oxidion._core import validate
from oxidion._cuda.device import stream_of
from oxidion._torch.compat import disable_dynamo
from oxidion.optim._settings import ORTH_SCHEMA
from oxidion.optim.muon import Muon

Matrix = TypeVar("Matrix", Tensor, "np.ndarray[Any, Any]")

MOST_DIMENSIONS = 32
"""Of an array, as up to NumPy 1."""


Coefficients = (
    Literal["polar_express", "newton_schulz", "keller_jordan", "cans", "aol", "polar_express_gram"]
    | Sequence[float]
    | Sequence[Sequence[float]]
)
Method = Literal["auto", "standard", "gram"]

_USUAL = {"newton_schulz_func": None, **{key: field.default for key, field in ORTH_SCHEMA.items()}}
"""Settings of a group for which nothing was said."""


def _given(x: Matrix) -> Matrix:
    """An argument as the core reads it: an array whose elements lie at multiples of their size."""
    if not isinstance(x, np.ndarray):
        return x
    if x.ndim > MOST_DIMENSIONS:
        raise ValueError(f"expected an array of at most {MOST_DIMENSIONS} dimensions, got {x.ndim}")
    return np.require(x, requirements=["ALIGNED", "C_CONTIGUOUS"])


def _iterate(
    x: Matrix, coefficients: Coefficients | None, steps: int | None, epsilon: float, method: Method
) -> Matrix:
    if method not in ("auto", "standard", "gram"):
        raise ValueError(f"method must be one of 'auto', 'standard', 'gram', got {method!r}")
    preset = "fast" if coefficients is None else "exact"
    settings = {
        **_USUAL,
        "ns_coefficients": coefficients,
        "ns_steps": steps,
        "orth_method": method,
        "orth_preset": preset,
    }
    return _oxidion.orthonormalize(_given(x), settings, epsilon, stream_of(x))


def newton_schulz(
    x: Matrix,
    *,
    coefficients: Coefficients = "newton_schulz",
    steps: int | None = None,
    epsilon: float = 1e-8,
    method: Literal["auto", "standard", "gram"] = "standard",
) -> Matrix:
    """Approximate polar factor by quintic steps: with the default ones singular values within 0.04 of 1.

    ``X <- X / (s ||X||_F + epsilon)``, then for each row ``(a, b, c)`` of the coefficients
    ``A = X Xᵀ; X <- a X + (b A + c A A) X``, on the short side of X, in the dtype of ``x``. Zero gives zero.

    Args:
        x: matrices ``[..., m, n]``.
        coefficients: "newton_schulz", "polar_express" (arXiv:2505.16932), "keller_jordan", "cans"
            (arXiv:2506.10935), "aol" (rows of the short side are balanced first, arXiv:2208.03160),
            "polar_express_gram" (safety factor 1.05), up to 32 triples, or one for every step.
        steps: how many rows; the last one is repeated. None: all, and five of one triple.
        epsilon: added to the norm; 0 makes the result independent of the scale of ``x``.
        method: "standard", "gram" (by the Gram matrix, fewer operations for long matrices), or "auto".

    Returns:
        Matrices of the shape and dtype of ``x``.

    Raises:
        ValueError: for fewer than two dimensions, unknown names, and values out of range.
        TypeError: for anything but real floating-point matrices.
    """
    return _iterate(x, coefficients, steps, epsilon, method)


def polar_express(
    x: Matrix,
    *,
    steps: int | None = None,
    epsilon: float = 1e-8,
    method: Literal["auto", "standard", "gram"] = "standard",
    preset: Literal["exact", "fast"] = "exact",
) -> Matrix:
    """Approximate polar factor by five Polar Express steps (arXiv:2505.16932).

    ``x`` is divided by ``1.02·‖x‖_F + epsilon`` first. With ``preset="fast"`` it is divided by 1.02 times its
    Schatten-8 norm ``‖(x·xᵀ)²‖_F^(1/4)``, and four steps follow that are made for it. Zero gives zero.

    Args:
        x: matrices ``[..., m, n]``.
        steps: how many rows of coefficients; the last one is repeated. None: all.
        epsilon: added to the norm; 0 makes the result independent of the scale of ``x``.
        method: "standard", "gram" (by the Gram matrix, fewer operations for long matrices), or "auto".
        preset: "exact" or "fast".

    Returns:
        Matrices of the shape and dtype of ``x``.

    Raises:
        ValueError: for fewer than two dimensions, unknown names, and values out of range.
        TypeError: for anything but real floating-point matrices.
    """
    if preset not in ("exact", "fast"):
        raise ValueError(f"preset must be 'exact' or 'fast', got {preset!r}")
    return _iterate(x, "polar_express" if preset == "exact" else None, steps, epsilon, method)


def gram_newton_schulz(
    x: Matrix,
    *,
    coefficients: Coefficients = "polar_express_gram",
    steps: int | None = None,
    epsilon: float = 1e-8,
) -> Matrix:
    """The polynomial of `newton_schulz` by the Gram matrix of the short side, with restarts.

    ``R = X Xᵀ``, ``P = a I + b R + c R²``, ``R <- P R P``; the product of the factors P is applied to X
    at the end and at restarts, which are found from the coefficients and the dtype. Every ``a`` must be
    positive.

    Args:
        x: matrices ``[..., m, n]``.
        coefficients: as of `newton_schulz`.
        steps: how many rows; the last one is repeated. None: all.
        epsilon: added to the norm; 0 makes the result independent of the scale of ``x``.

    Returns:
        Matrices of the shape and dtype of ``x``.

    Raises:
        ValueError: for fewer than two dimensions, unknown names, values out of range, and an ``a`` that is
            not positive.
        TypeError: for anything but real floating-point matrices.
    """
    return _iterate(x, coefficients, steps, epsilon, "gram")


def polar(x: Matrix) -> Matrix:
    """Exact polar factor ``U Vᵀ`` of ``X = U S Vᵀ`` by a singular value decomposition.

    Directions with a singular value at rounding level are left out: rank r gives a partial isometry of rank
    r, and zero gives zero. 16-bit matrices are decomposed in float32.

    Args:
        x: matrices ``[..., m, n]``.

    Returns:
        Matrices of the shape and dtype of ``x``.

    Raises:
        ValueError: for fewer than two dimensions.
        TypeError: for anything but real floating-point matrices.
    """
    return _oxidion.orthonormalize(_given(x), {**_USUAL, "orth_method": "svd"}, 0.0, stream_of(x))


def cholesky_qr(x: Matrix, *, method: Literal["cqr", "cqr2", "rcqr", "qr"] = "cqr") -> Matrix:
    """Orthonormal columns that span those of ``x`` (``m >= n``).

    Args:
        x: matrices ``[..., m, n]``.
        method: "cqr" (Cholesky QR, repeated where one pass is not enough), "cqr2" (always two passes), "rcqr"
            (ill-conditioned ones after the QR of a sketch with fixed random numbers) or "qr" (Householder).
            Every result is checked; what "cqr" cannot do, a shifted one and then Householder QR does.

    Returns:
        Matrices of the shape and dtype of ``x``.

    Raises:
        ValueError: for fewer than two dimensions, more columns than rows, or an unknown method.
        TypeError: for anything but real floating-point matrices.
    """
    return _oxidion.orthonormal_columns(_given(x), method, stream_of(x))


def power_iteration(m: Matrix, q: Matrix) -> tuple[Matrix, Matrix]:
    """One power iteration: ``p = orth(m·q)`` and ``r = mᵀ·p``.

    ``p·rᵀ`` is the best approximation of ``m`` with columns in the span of ``p``.

    Args:
        m: the matrix ``[m, n]``.
        q: the right factor ``[n, r]`` with ``r <= m``.

    Returns:
        ``p`` ``[m, r]`` with orthonormal columns, and ``r`` ``[n, r]``.

    Raises:
        ValueError: for shapes that do not fit.
        TypeError: for anything but real floating-point matrices.
    """
    if m.shape[-1] != q.shape[-2] or q.shape[-1] > m.shape[-2]:
        raise ValueError(
            f"q must be [n, r] with r <= m for m of shape {tuple(m.shape)}, got {tuple(q.shape)}"
        )
    p = cholesky_qr(m @ q)
    transposed: Matrix = m.mT if isinstance(m, Tensor) else np.swapaxes(m, -1, -2)
    return p, transposed @ p


def quantize_blockwise(x: Matrix, block_size: int = 256, signed: bool = True) -> tuple[Matrix, Matrix]:
    """Quantizes to one byte per element with scales of blocks along the last dimension, as in 8-bit states.

    Every row of the last dimension is cut into blocks of ``block_size`` elements; the last block may be
    shorter. ``absmax`` is the largest absolute value of a block. Elements are rounded to the nearest product
    of ``absmax`` and a floating-point number of few bits; steps of optimizers round them stochastically.

    These numbers are 0, 1 and ``(1 + j/k) 2^-e`` with j in 0..k-1. With a sign k is 32 for e = 1..2, 16 for
    e = 3, 8 for e = 4 and 2 for e = 5..23. Without one k is 32 for e = 1..2, 8 for e = 3..16 and 4 for
    e = 17..36. Blocks with NaN or infinity become NaN.

    Args:
        x: real floating-point, ``[..., n]``; 16-bit and float64 numbers are rounded to float32.
        block_size: a power of two of at most 512.
        signed: whether the code book has negative entries; without them negative numbers become 0.

    Returns:
        ``quantized``, uint8 and shaped like ``x``, and ``absmax``, float32 ``[..., ceil(n / block_size)]``.

    Raises:
        ValueError: for no dimension and block sizes out of range.
        TypeError: for anything but real floating-point numbers.
    """
    return _oxidion.quantize_blockwise(_given(x), block_size, signed, stream_of(x))


def dequantize_blockwise(
    quantized: Matrix, absmax: Matrix, block_size: int = 256, signed: bool = True
) -> Matrix:
    """Returns the numbers that `quantize_blockwise` rounded to: entries of the code book times block scales.

    Args:
        quantized: uint8, ``[..., n]``.
        absmax: float32, ``[..., ceil(n / block_size)]``.
        block_size: as it was given to `quantize_blockwise`.
        signed: as it was given to `quantize_blockwise`.

    Returns:
        float32, shaped like ``quantized``.

    Raises:
        ValueError: where ``absmax`` is not what ``quantized`` of this shape and ``block_size`` need.
        TypeError: for quantized values that are not uint8.
    """
    return _oxidion.dequantize_blockwise(
        _given(quantized), _given(absmax), block_size, signed, stream_of(quantized)
    )


_MOMENTUM = validate.beta(None)


@disable_dynamo
def muon(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    muon_momentum_bufs: Sequence[Tensor],
    *,
    foreach: bool | None = None,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: Coefficients,
    ns_steps: int,
    eps: float,
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None,
    has_complex: bool = False,
) -> None:
    """One step of Muon with the arguments and the momenta of ``torch.optim._muon.muon``.

    From torch 2.15 on ``torch.optim.functional.muon`` is the same function.

    For each parameter X with gradient G and momentum M, μ for ``momentum`` and λ for ``weight_decay``:
    ``M <- μ M + (1 - μ) G``; ``U = orth(μ M + (1 - μ) G)`` with ``nesterov``, else ``orth(M)``;
    ``X <- (1 - lr λ) X - lr s U``. ``orth`` divides by ``‖·‖_F + eps`` and applies ``ns_steps`` times
    ``A = Y Yᵀ; Y <- a Y + (b A + c A²) Y``, in the dtypes that `Muon` iterates in. torch divides by
    ``max(‖·‖_F, eps)`` and iterates in bfloat16.

    ``params`` and ``muon_momentum_bufs`` are written in place; gradients are read, and ``.grad`` is neither
    read nor written. Hooks of optimizers are not called. The plan of the step is rebuilt at each call: an
    optimizer keeps it.

    Args:
        params: matrices ``[m, n]`` or stacks ``[..., m, n]`` that do not share memory.
        grads: their gradients, of the same shapes and dtypes.
        muon_momentum_bufs: their momenta, of the same shapes: averages of gradients, zeros at the start.
        foreach: accepted for compatibility; there is one implementation.
        lr: step size; a one-element tensor is allowed.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``, without ``s``.
        momentum: decay rate μ of the average, below 1.
        nesterov: look one step ahead.
        ns_coefficients: one triple ``(a, b, c)`` for every step, or what `Muon` takes.
        ns_steps: number of steps, 1 to 32.
        eps: added to the norm.
        adjust_lr_fn: the rule for ``s`` of a matrix of ``m`` rows and ``n`` columns: "original" or None
            ``√max(1, m/n)``, "match_rms_adamw" ``0.2·√max(m, n)``, "spectral_unclamped" ``√(m/n)``.
        has_complex: must be False: complex parameters have no polar factor here.

    Raises:
        ValueError: for lists of different lengths, shapes that do not fit, and values out of range.
        TypeError: for parameters that are not real floating-point tensors and gradients of another dtype.
        LayoutError: for parameters or momenta that share memory.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the rules of
    arXiv:2502.16982.
    """
    del foreach
    if has_complex:
        raise ValueError("has_complex must be False: complex parameters are not supported")
    lists = {"params": params, "grads": grads, "muon_momentum_bufs": muon_momentum_bufs}
    lengths = {name: len(tensors) for name, tensors in lists.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} of {length}" for name, length in lengths.items())
        raise ValueError(f"params, grads and muon_momentum_bufs must have equal lengths, got {shown}")
    if momentum is None or not _MOMENTUM.check(momentum):
        raise ValueError(f"momentum must be {_MOMENTUM.wanted}: an average, got {momentum!r}")
    if not params:
        return
    held, states = [], []
    for index, (param, grad, average) in enumerate(zip(params, grads, muon_momentum_bufs, strict=True)):
        for name, tensor in (("grads", grad), ("muon_momentum_bufs", average)):
            if tensor.shape != param.shape:
                raise ValueError(
                    f"{name}[{index}] must have the shape {tuple(param.shape)} of params[{index}], "
                    f"got {tuple(tensor.shape)}"
                )
        if grad.dtype != param.dtype:
            raise TypeError(f"grads[{index}] must be {param.dtype} as params[{index}], got {grad.dtype}")
        own = param.detach()  # of the same memory, with a .grad of its own
        own.grad = grad.detach()
        held.append((f"params[{index}]", own))
        states.append((own, {"momentum": average.detach()}))
    optimizer = Muon(
        held,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_coefficients=ns_coefficients,
        ns_steps=ns_steps,
        eps=eps,
        adjust_lr_fn=adjust_lr_fn,
    )
    optimizer.state.update(states)
    # A sum of gradients times 1 - momentum is the average.
    optimizer._take_step(1.0 - float(momentum))
