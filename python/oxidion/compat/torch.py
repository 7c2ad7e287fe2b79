"""``torch.optim``'s signatures and defaults, for scripts that change only the import."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from typing_extensions import override

from oxidion import checkpoint, optim
from oxidion._core.signature import Params

__all__ = ["Muon"]

_RULES = {"spectral_norm": "spectral_unclamped", "rms_norm": "match_rms_adamw"}
"""Rules for the factor of the learning rate that have another word in torch."""


class Muon(optim.Muon):
    r"""Muon as ``torch.optim.Muon`` has it: its arguments in their order, its defaults, its group keys.

    .. math::
        M \leftarrow \mu M + G, \qquad U = \operatorname{orth}(\mu M + G) \text{ or } \operatorname{orth}(M),
        \qquad X \leftarrow (1 - \mathrm{lr}\,\lambda) X - \mathrm{lr}\, s\, U

    Groups show ``momentum``, ``eps`` and ``adjust_lr_fn`` next to ``mu``, ``epsilon`` and ``adjust_lr``
    of ``oxidion.Muon``: the one that is written counts from the next step on. The state is that of
    ``oxidion.Muon``, a sum of gradients where torch keeps an average; ``load_state_dict`` takes both.
    Products are in float32 where the processor does not multiply bfloat16 faster, torch's always in bfloat16.

    Args:
        params: matrices, groups of them, or a model.
        lr: learning rate.
        weight_decay: decoupled decay: a step multiplies by ``1 - lr * weight_decay``.
        momentum: momentum factor μ.
        nesterov: look one step ahead.
        ns_coefficients: of the polynomial ``a x + b x³ + c x⁵`` of a Newton–Schulz step.
        eps: added to the norm of a matrix before it is divided by it.
        ns_steps: number of Newton–Schulz steps.
        adjust_lr_fn: the rule for ``s`` of a weight of ``d_out`` rows and ``d_in`` columns: None, "original"
            ``√max(1, d_out/d_in)``, "match_rms_adamw" ``0.2·√max(d_out, d_in)``, "spectral_unclamped"
            ``√(d_out/d_in)``. Groups show None for "original".
        options: further arguments of ``oxidion.Muon`` by keyword.

    Raises:
        ValueError: for values out of range, and for parameters of fewer than two dimensions.
    """

    _shown: dict[int, dict[str, Any]] | None = None
    """By group, torch's words with their values as the group shows them."""

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = None,
        **options: Any,
    ) -> None:
        words: dict[str, Any] = {"momentum": momentum, "eps": eps, "adjust_lr_fn": adjust_lr_fn}
        parameters = inspect.signature(Muon.__init__).parameters
        for name, word in self._WORDS.items():
            if word.key in options and words[name] == parameters[name].default:
                del words[name]  # it was not given, and the key of `oxidion.Muon` was
        super().__init__(
            params,
            lr=lr,
            weight_decay=weight_decay,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            **words,
            **options,
        )
        self._show()

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._given_so_far is None:  # the constructor is done
            self._show()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict.get("param_groups", ()) if isinstance(state_dict, Mapping) else ()
        if groups and all(isinstance(group, Mapping) and "algorithm" not in group for group in groups):
            state_dict = checkpoint.import_state_dict(state_dict, "torch-muon", self)
        super().load_state_dict(state_dict)
        self._show()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show()

    @override
    def _normalize_keys(self) -> None:
        for group in self.param_groups:
            for name, value in (self._shown or {}).get(id(group), {}).items():
                if name in group and group[name] is value:
                    del group[name]  # it was not written: the key counts
        super()._normalize_keys()
        self._show()

    def _show(self) -> None:
        """Has groups show torch's words for their settings."""
        self._shown = {id(group): self._words_of(group) for group in self.param_groups}
        for group in self.param_groups:
            group.update(self._shown[id(group)])

    def _words_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Torch's words for the settings of a group; a rule that torch does not have stands as it is here."""
        words = {name: group[word.key] for name, word in self._words(group).items()}
        if "adjust_lr_fn" in words:
            rule = words["adjust_lr_fn"]
            words["adjust_lr_fn"] = None if rule == "original" else _RULES.get(rule, rule)
        return words
