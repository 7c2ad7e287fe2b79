"""Group keys and constructor arguments of the classes that orthonormalize momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oxidion._core import validate
from oxidion._core.validate import Field, Word
from oxidion._reference.orthogonalize import POLYNOMIALS

MOST_STEPS = 32

ORTH_DTYPE = validate.word("auto", "auto", "bfloat16", "float16", "float32", "float64")


def _is_number(value: object) -> bool:
    return validate.is_number(value) and validate.is_finite(value)


def _is_triple(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_number, value))


def _are_coefficients(value: object) -> bool:
    if value is None or isinstance(value, str):
        return value is None or value in POLYNOMIALS
    if _is_triple(value):
        return True
    return isinstance(value, (list, tuple)) and 1 <= len(value) <= MOST_STEPS and all(map(_is_triple, value))


def _is_count_of_steps(value: object) -> bool:
    return value is None or (
        isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_STEPS
    )


ORTH_SCHEMA: dict[str, Field] = {
    "use_polar_express": validate.flag(True),
    "orth_dtype": ORTH_DTYPE,
    "orth_method": validate.word("auto", "auto", "standard", "gram", "svd"),
    "orth_preset": validate.word("exact", "exact", "fast"),
    "ns_coefficients": Field(
        None,
        f"one of {', '.join(map(repr, POLYNOMIALS))}, a triple (a, b, c) or 1 to {MOST_STEPS} triples "
        "of finite numbers, or None",
        _are_coefficients,
        tuple(POLYNOMIALS),
    ),
    "ns_steps": Field(None, f"an integer >= 1 and <= {MOST_STEPS}, or None", _is_count_of_steps),
}
"""Group keys of the method."""


def functions(newton_schulz_func: Callable[..., Any] | None) -> dict[str, Callable[..., Any]]:
    """Entries of ``OxOptimizer._functions``: a user's functions are no values for groups and checkpoints.

    Raises:
        TypeError: for anything that cannot be called.
    """
    if newton_schulz_func is None:
        return {}
    if not callable(newton_schulz_func):
        raise TypeError(
            "newton_schulz_func must be a function of (X, epsilon=...) or None, "
            f"got {type(newton_schulz_func).__name__}"
        )
    return {"newton_schulz_func": newton_schulz_func}


def gram_settings(use_gram_newton_schulz: bool, orth_method: str, ns_coefficients: Any) -> tuple[str, Any]:
    """``orth_method`` and ``ns_coefficients`` under ``use_gram_newton_schulz``.

    Raises:
        ValueError: where another method or other coefficients are asked for at the same time.
    """
    if not validate.flag(False).check(use_gram_newton_schulz):
        raise ValueError(f"use_gram_newton_schulz must be True or False, got {use_gram_newton_schulz!r}")
    if not use_gram_newton_schulz:
        return orth_method, ns_coefficients
    if orth_method not in ("auto", "gram") or ns_coefficients is not None:
        raise ValueError(
            "use_gram_newton_schulz=True means orth_method='gram' with ns_coefficients='polar_express_gram': "
            f"leave both out, got {orth_method!r} and {ns_coefficients!r}"
        )
    return "gram", "polar_express_gram"


TORCH_RULES = ("original", "match_rms_adamw", "spectral_unclamped")
"""torch's words for rules of the learning rate."""
ADJUST_LR = validate.word("spectral_norm", "spectral_norm", "rms_norm", *TORCH_RULES, None)

VIEW_SCHEMA: dict[str, Field] = {
    "adjust_lr": ADJUST_LR,
    "flatten": validate.flag(False),
    "interleaved": validate.count(None, optional=True),
    "num_heads": validate.count(None, optional=True),
    "split_sizes": validate.counts(None),
    "split_dim": Field(0, "0 (rows) or 1 (columns)", lambda v: type(v) is int and v in (0, 1)),
    "fan_in_fan_out": validate.flag(False),
}
"""Group keys that say how a parameter is read as matrices, and the factor of ``lr`` that follows."""

FAMILY_SCHEMA: dict[str, Field] = {
    "betas": validate.betas((0.9, 0.95)),
    "beta1": validate.beta(None),
    "beta2": validate.beta(None),
    "epsilon": validate.number(1e-8),
    **VIEW_SCHEMA,
    **ORTH_SCHEMA,
}
"""Group keys of every class of the family."""

TORCH_WORDS: dict[str, Word] = {
    "momentum": Word("mu", validate.number(0.95)),
    "adjust_lr_fn": Word("adjust_lr", validate.word(None, None, *TORCH_RULES), {None: "original"}),
    "eps": Word("epsilon", validate.number(1e-7)),
}
"""torch.optim.Muon's words for arguments and group keys, for the classes in which they mean the same."""

NEURON_SCHEMA: dict[str, Field] = {
    "muon_beta2": validate.beta(0.95),
    "norm_scope": validate.word("global", "global", "shard"),
}
"""Group keys of the classes that normalize neurons."""

SELECTION_SCHEMA: dict[str, Field] = {
    "fraction": validate.number(0.25, high=1.0, open_low=True),
    "selection_scope": validate.word("local", "local", "global"),
}
"""Group keys of the classes that select rows or columns."""
