"""Naive orthogonalization in float64: polynomials of singular values and the exact polar factor.

Nothing here calls the compiled core: ``verify()`` and the tests compare the core with these functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rows = Sequence[Sequence[float]]

POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_PAPER = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
NEWTON_SCHULZ = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
CANS = (
    (8.298703491437525, -24.43049814821767, 18.090304193078694),
    (3.8840833304146987, -2.8428918145768316, 0.5336391623831989),
    (3.176397780305391, -2.3423767066921477, 0.4797378963547419),
    (2.2100130967752833, -1.5725413814201548, 0.40071150377358555),
    (1.8846580528933707, -1.2590081044031754, 0.37442513545379413),
)
AOL = (
    (4.6051, -9.6552, 5.6769),
    (4.7505, -6.0861, 2.1790),
    (2.7763, -2.3190, 0.5523),
    (2.4231, -2.2861, 0.8193),
)

POLAR_EXPRESS_FAST = (
    (8.177432027476442, -23.178649114408902, 16.505155057584513),
    (3.899994532782065, -2.7943948859580185, 0.5110785364551547),
    (3.262233864007705, -2.351317363641778, 0.4626594052544013),
    (2.308564577776151, -1.675994456278578, 0.41957392878072974),
)
"""Four steps for a matrix that was divided by its Schatten-8 norm: ``orth_preset`` "fast"."""

POLYNOMIALS: dict[str, tuple[Rows, float]] = {
    "polar_express": (POLAR_EXPRESS, 1.02),
    "newton_schulz": (NEWTON_SCHULZ, 1.0),
    "keller_jordan": (((3.4445, -4.7750, 2.0315),) * 5, 1.0),
    "cans": (CANS, 1.01),
    "aol": (AOL, 1.0),
    "polar_express_gram": (
        tuple((a / 1.05, b / 1.05**3, c / 1.05**5) for a, b, c in POLAR_EXPRESS_PAPER),
        1.0,
    ),
}
"""Rows ``(a, b, c)`` and norm factor of every named polynomial."""


def epsilon_of(group: Mapping[str, Any]) -> float:
    """``epsilon`` of a group, which some classes call ``eps``; a pair of that name is another's."""
    eps = group.get("eps")
    return float(group.get("epsilon", 1e-8) if eps is None or isinstance(eps, (tuple, list)) else eps)


def polynomial_of(group: Mapping[str, Any]) -> tuple[str, Rows, float]:
    """Name, rows and norm factor of the polynomial that a group asks for."""
    wanted = group.get("ns_coefficients")
    rows: Rows
    if group.get("use_gram_newton_schulz", False):
        wanted = "polar_express_gram"
    elif wanted is None:
        wanted = "polar_express" if group.get("use_polar_express", True) else "newton_schulz"
    if group.get("orth_preset") == "fast":
        name, rows, factor = "fast", POLAR_EXPRESS_FAST, 1.02
    elif isinstance(wanted, str):
        name = wanted
        rows, factor = POLYNOMIALS[name]
    else:
        # torch has one triple for five steps.
        rows = [wanted] * 5 if isinstance(wanted[0], (int, float)) else wanted
        name, factor = "custom", 1.0
    steps = group.get("ns_steps") or len(rows)
    return name, [*rows[:steps], *[rows[-1]] * (steps - len(rows))], factor


def polar_factor(x: Tensor) -> Tensor:
    """``U V^T`` of ``X = U S V^T``, without directions whose singular value is at rounding level."""
    u, sigma, vh = torch.linalg.svd(x, full_matrices=False)
    bound = sigma.amax(dim=-1, keepdim=True) * max(x.shape[-2:]) * torch.finfo(x.dtype).eps
    factor: Tensor = (u * (sigma > bound).to(x.dtype).unsqueeze(-2)) @ vh
    return factor


def orthogonalize(x: Tensor, group: Mapping[str, Any]) -> Tensor:
    """``x`` with singular values driven towards 1, by the method that a group asks for.

    The polynomials: ``X <- X / (s ||X||_F + epsilon)``, then for each row ``(a, b, c)``
    ``A = X X^T; X <- a X + (b A + c A A) X``; "aol" first divides row i of the short side by
    ``sqrt(sum_j |A_ij|)``. With ``orth_preset`` "fast" the divisor is ``||X||_F + epsilon``, and then ``s``
    times the Schatten-8 norm ``||(X X^T)^2||_F^(1/4)`` of what that leaves; four rows of their own follow.
    With ``orth_norm`` "schatten4" ``||X X^T||_F^(1/2)`` stands for the norm.

    Args:
        x: One matrix or a batch ``[..., m, n]``, float64.
        group: Read for ``newton_schulz_func``, ``orth_method``, ``orth_preset``, ``ns_coefficients``,
            ``ns_steps``, ``use_polar_express``, ``use_gram_newton_schulz`` and ``epsilon`` or ``eps``.

    Returns:
        A new tensor of the shape of ``x``.
    """
    epsilon = epsilon_of(group)
    function = group.get("newton_schulz_func")
    if function is not None:
        batch = x.reshape(-1, *x.shape[-2:]).clone()
        result: Tensor = function(batch, epsilon=epsilon)
        return result.to(x.dtype).reshape(x.shape)
    if group.get("orth_method") == "svd":
        return polar_factor(x)
    name, rows, factor = polynomial_of(group)
    transposed = x.shape[-2] > x.shape[-1]
    x = x.mT if transposed else x
    norm = x.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    if group.get("orth_norm") == "schatten4":
        norm = (x @ x.mT).square().sum(dim=(-2, -1), keepdim=True) ** 0.25
    fast = name == "fast"
    x = x / ((1.0 if fast else factor) * norm + epsilon)
    if fast:
        gram = x @ x.mT
        schatten = (gram @ gram).square().sum(dim=(-2, -1), keepdim=True) ** 0.125
        x = torch.where(schatten == 0, 0.0, x / (factor * schatten))
    if name == "aol":
        sums = (x @ x.mT).abs().sum(dim=-1, keepdim=True)
        x = torch.where(sums == 0, 0.0, x / sums.sqrt())
    for a, b, c in rows:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if transposed else x


def lr_factor(adjust_lr: str | None, d_out: int, d_in: int) -> float:
    """Learning-rate factor of one ``d_out x d_in`` matrix under ``adjust_lr``."""
    if min(d_out, d_in) == 0 or adjust_lr is None:
        return 1.0
    if adjust_lr in ("spectral_norm", "spectral_unclamped"):
        return math.sqrt(d_out / d_in)
    if adjust_lr == "original":
        return math.sqrt(max(1.0, d_out / d_in))
    if adjust_lr in ("rms_norm", "match_rms_adamw"):
        return 0.2 * math.sqrt(max(d_out, d_in))
    raise ValueError(f"unknown adjust_lr {adjust_lr!r}")


def strongest(m: Tensor, dim: int, fraction: float) -> Tensor:
    """The ``ceil(fraction * size)`` rows (``dim`` 0) or columns with the largest sums of absolute values.

    Sums are compared in float32, ties go to the lowest index. Ascending.
    """
    scores = m.abs().sum(dim=1 - dim).float()
    count = max(1, math.ceil(fraction * scores.numel()))
    return scores.sort(descending=True, stable=True).indices[:count].sort().values
