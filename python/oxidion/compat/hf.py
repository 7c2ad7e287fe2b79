"""The optimizers of this package as transformers' Trainer builds them; transformers is not needed for it."""

from __future__ import annotations

import ast
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from oxidion import optim
from oxidion._core.base import OxOptimizer
from oxidion._core.constructor import SCALAR, nearest
from oxidion.backward import BackwardOptimizer, in_backward
from oxidion.groups import algorithms, param_groups
from oxidion.groups.sorter import is_option

logger = logging.getLogger(__name__)


class OptimizerFactory:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=...)`` of an optimizer that is given the model.

    Given a class, the Trainer makes two groups without names, with and without decay, which do not tell a
    matrix from an embedding. Given a factory, it calls ``factory()(model, **kwargs)``. This one gives the
    model to the class, which sorts its parameters::

        kwargs = {"optimizer": "Dion", "lr": 0.01, "scalar_lr": 3e-4}
        made = (hf.OptimizerFactory, kwargs)
        trainer = Trainer(model, args, optimizer_cls_and_kwargs=made)

    The learning rate is that of ``kwargs``: the Trainer's own does not reach a factory. Its schedulers, which
    scale what the groups have, work as with any optimizer.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: str | type[OxOptimizer] = "Dion",
        *,
        groups: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> OxOptimizer:
        """The optimizer for a model.

        Args:
            model: its parameters that require gradients are sorted into groups.
            optimizer: class of this package, or its name in upper or lower case.
            groups: arguments of `param_groups`, as ``scalar_lr`` and ``scalar_patterns``, and keys of the
                groups of matrices, which win over those of the class.
            **arguments: of the class and of `param_groups`.

        Raises:
            ValueError: for a name that is none of the classes.
            TypeError: for a class that is none of them.
        """
        cls: Any = algorithms.wanted(optimizer, "optimizer")
        if not groups:
            made: OxOptimizer = cls(model, **arguments)
            return made
        other = {key: arguments.pop(key) for key in list(arguments) if is_option(key)}
        rate = {"lr": arguments["lr"]} if "lr" in arguments else {}
        options = {**other, **groups}
        if "extra_keys" in options:  # the class has to know them too
            arguments["extra_keys"] = options["extra_keys"] = tuple(options["extra_keys"])
        own: OxOptimizer = cls(param_groups(model, cls, **{**rate, **options}), **arguments)
        return own


Settings = dict[str, Any]
"""Arguments by name."""


def _is_target(targets: str | Sequence[str], name: str) -> bool:
    """True for a module that ``optim_target_modules`` names: by a part of its path or by a pattern."""
    if isinstance(targets, str):
        everything = targets.replace("_", "-") == "all-linear"
        return everything or re.fullmatch(targets, name) is not None
    return any(target in name or re.fullmatch(target, name) for target in targets)


class LowRankFactory:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=...)`` of GaLore and APOLLO: `from_name` returns it.

    Weights of the ``nn.Linear`` modules that ``targets`` names are projected, others are stepped by AdamW.
    Parameters of fewer than two dimensions do not decay. The decisions are logged to ``oxidion.compat.hf``.
    """

    def __call__(
        self,
        model: nn.Module,
        optimizer: str,
        targets: str | Sequence[str],
        projection: Mapping[str, Any],
        **arguments: Any,
    ) -> OxOptimizer:
        """The optimizer for a model.

        Args:
            model: its parameters that require gradients are sorted into groups.
            optimizer: name of the class.
            targets: "all-linear", a pattern that matches the whole path of a module, or a list of parts of
                paths and of such patterns.
            projection: keys of the group that is projected.
            **arguments: of the class.

        Raises:
            ValueError: where no module is a target.
        """
        projected: list[tuple[str, Tensor]] = []
        others: list[tuple[str, Tensor]] = []
        bare: list[tuple[str, Tensor]] = []
        weights = {
            id(module.weight)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and _is_target(targets, name)
        }
        for name, param in model.named_parameters():
            if param.requires_grad:
                rest = others if param.ndim > 1 else bare
                (projected if id(param) in weights else rest).append((name, param))
                logger.info("%s: %s", name, "projected" if id(param) in weights else "not projected")
        if not projected:
            raise ValueError(f"optim_target_modules={targets!r} names no nn.Linear that requires a gradient")
        groups = [
            {"params": params, **keys}
            for params, keys in (
                (projected, dict(projection)),
                (others, {"rank": None}),
                (bare, {"rank": None, "weight_decay": 0.0}),
            )
            if params
        ]
        made: OxOptimizer = getattr(optim, optimizer)(groups, **arguments)
        return made


class AveragedFactory:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=...)`` of AdamW with an average of the weights.

    `from_name` returns it for "schedule_free_adamw". The Trainer calls ``train()`` and ``eval()`` of the
    optimizer, so that it evaluates and saves the average. Parameters of fewer than two dimensions do not
    decay.
    """

    def __call__(self, model: nn.Module, average: Mapping[str, Any], **arguments: Any) -> OxOptimizer:
        """The optimizer for a model.

        Args:
            model: its parameters that require gradients are stepped.
            average: keys of all groups that name the average.
            **arguments: of `AdamW`.
        """
        named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": params, **average, **keys}
            for params, keys in (
                ([(name, param) for name, param in named if param.ndim > 1], {}),
                ([(name, param) for name, param in named if param.ndim < 2], {"weight_decay": 0.0}),
            )
            if params
        ]
        return optim.AdamW(groups, **arguments)


class LayerwiseFactory:
    """Factory for ``Trainer(optimizer_cls_and_kwargs=...)`` of steps in the backward pass, by `in_backward`.

    `from_name` returns it for the names that end in "_layerwise".
    """

    def __call__(
        self, model: nn.Module, factory: Callable[[], Callable[..., OxOptimizer]], **arguments: Any
    ) -> BackwardOptimizer:
        """The optimizer for a model.

        Args:
            model: its modules are stepped as soon as their gradients are there.
            factory: one of this module, called as the Trainer would.
            **arguments: its keyword arguments.

        Raises:
            ValueError: as `in_backward`, and as the factory.
            TypeError: as `in_backward`: for DDP, in the first forward pass.
            LayoutError: where a step communicates on the layout of a parameter.
        """
        return in_backward(model, lambda _: factory()(model, **arguments))


def _value(text: str) -> Any:
    """A number, a flag or None that a text spells, flags in any case; else the text."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def read_optim_args(given: str | Mapping[str, Any] | None) -> Settings:
    """Arguments of ``optim_args``: ``key=value`` with commas between, or a mapping.

    Raises:
        ValueError: for a part without a value.
    """
    if isinstance(given, str):
        parts = [part.partition("=") for part in given.replace(" ", "").split(",") if part]
        if wrong := [key for key, sign, _ in parts if not sign]:
            raise ValueError(
                f"optim_args must be 'key=value,key=value', got {given!r}: {wrong[0]!r} has no value"
            )
        return {key: _value(value) for key, _, value in parts}
    return {key: _value(value) if isinstance(value, str) else value for key, value in (given or {}).items()}


Made = tuple[type[Any], Settings]
Maker = Callable[[Any, Settings], Made]


def _common(args: Any) -> Settings:
    return {"lr": args.learning_rate, "weight_decay": args.weight_decay}


def _adamw(args: Any, options: Settings, **own: Any) -> Made:
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return optim.AdamW, {**_common(args), **adam, **own, **options}


def _adamw_8bit(args: Any, options: Settings) -> Made:
    if "bf16_stochastic_round" in options:
        options["stochastic_rounding"] = options.pop("bf16_stochastic_round")
    return _adamw(args, options, state_bits=8)


def _schedule_free(args: Any, options: Settings) -> Made:
    given = getattr(args, "lr_scheduler_type", "constant")
    schedule = str(getattr(given, "value", given))
    if schedule not in ("constant", "constant_with_warmup"):
        raise ValueError(
            f"schedule_free_adamw replaces a schedule, got lr_scheduler_type={schedule!r}: take 'constant', "
            "or 'constant_with_warmup' with warmup_steps"
        )
    warmup = [getattr(args, key, None) or 0 for key in ("warmup_steps", "warmup_ratio")]
    if schedule == "constant" and any(warmup):
        raise ValueError(
            f"schedule_free_adamw warms up by the schedule, got warmup_steps={warmup[0]!r} and "
            "lr_scheduler_type='constant': take 'constant_with_warmup'"
        )
    if not args.adam_beta1:
        raise ValueError(
            f"schedule_free_adamw needs adam_beta1 above 0, got {args.adam_beta1!r}: it is the share of the "
            "average in the weights at which gradients are taken. Take 0.9, or 'adamw_torch', which has none"
        )
    words = {"weight_lr_power": "average_lr_power", "r": "average_step_power"}
    average = {"average": "schedule_free", "average_beta": args.adam_beta1}
    average |= {key: options.pop(word) for word, key in words.items() if word in options}
    # What lies between a parameter and its average stands for a first moment.
    _, settings = _adamw(args, options, betas=(0.0, args.adam_beta2))
    return AveragedFactory, {"average": average, **settings}


def _lion(args: Any, options: Settings, **own: Any) -> Made:
    betas = (args.adam_beta1, args.adam_beta2)
    return optim.Lion, {**_common(args), "betas": betas, **own, **options}


def _ademamix(args: Any, options: Settings, **own: Any) -> Made:
    defaults = {"beta1": args.adam_beta1, "beta2": args.adam_beta2, "beta3": 0.9999}
    betas = tuple(float(options.pop(key, value)) for key, value in defaults.items())
    ramps = [options.pop(key, None) for key in ("t_alpha", "t_beta3")]
    if ramps[0] != ramps[1]:
        raise ValueError(
            f"t_alpha and t_beta3 of AdEMAMix must be equal here, got {ramps[0]} and {ramps[1]}: the slow "
            "average and its share grow together"
        )
    settings = {
        **_common(args),
        "betas": betas,
        "eps": args.adam_epsilon,
        "t_alpha_beta3": ramps[0],
    }
    return optim.AdEMAMix, {**settings, **own, **options}


def _adafactor(args: Any, options: Settings) -> Made:
    manual = {"scale_parameter": False, "relative_step": False}
    return optim.Adafactor, {**_common(args), **manual, **options}


def _low_rank(optimizer: str, keys: Settings, args: Any, options: Settings, **own: Any) -> Made:
    targets = args.optim_target_modules
    if targets is None:
        raise ValueError(
            f"{optimizer} needs optim_target_modules, the modules whose weights are projected: 'all-linear', "
            "or a list as ['attn', 'mlp']"
        )
    projection = {key: options.pop(key, value) for key, value in keys.items()}
    _, settings = _adamw(args, options, **own)
    named = {"optimizer": optimizer, "targets": targets, "projection": projection}
    return LowRankFactory, {**named, **settings}


_GALORE = {"rank": 128, "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}
_APOLLO = {"rank": 128, "update_proj_gap": 200, "scale": 1.0, "proj_type": "std", "scale_type": "channel"}


def _galore(args: Any, options: Settings, state_bits: int = 32) -> Made:
    own = {"svd": "exact", "decay_order": "galore", "state_bits": state_bits}
    return _low_rank("GaLoreAdamW", _GALORE, args, options, **own)


def _apollo(args: Any, options: Settings) -> Made:
    if options.pop("proj", "random") != "random":
        raise ValueError(
            "proj must be 'random': APOLLO projects by random matrices here, never by a decomposition"
        )
    return _low_rank("APOLLOAdamW", _APOLLO, args, options)


_STEPS_OF_THE_TRAINER = {
    "max_grad_norm": (0, "the norm of all gradients is not known before the last of them"),
    "gradient_accumulation_steps": (1, "a step in the backward pass cannot wait for more gradients"),
    "fp16": (False, "its GradScaler looks for infinities after the backward pass; use bf16"),
}
"""Arguments of a training that change gradients later: the value that does not, and what is in the way."""


def _layerwise(name: str, args: Any, options: Settings) -> Made:
    for key, (neutral, reason) in _STEPS_OF_THE_TRAINER.items():
        given = getattr(args, key, neutral)
        if given is not None and given != neutral:
            raise ValueError(f"{name} needs {key}={neutral!r}, got {given!r}: {reason}")
    factory, settings = _NAMES[name.removesuffix("_layerwise")](args, options)
    return LayerwiseFactory, {"factory": factory, **settings}


_NAMES: dict[str, Maker] = {
    "adamw": _adamw,
    "lion": _lion,
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw,
    "adamw_torch_8bit": _adamw_8bit,
    "adamw_8bit": _adamw_8bit,
    "adamw_bnb_8bit": _adamw_8bit,
    "schedule_free_adamw": _schedule_free,
    "adafactor": _adafactor,
    "ademamix": _ademamix,
    "ademamix_8bit": lambda args, options: _ademamix(args, options, state_bits=8),
    "lion_32bit": _lion,
    "lion_8bit": lambda args, options: _lion(args, options, state_bits=8),
    "galore_adamw": _galore,
    "galore_adamw_8bit": lambda args, options: _galore(args, options, state_bits=8),
    "apollo_adamw": _apollo,
}
_NAMES |= {
    name: partial(_layerwise, name)
    for name in ("galore_adamw_layerwise", "galore_adamw_8bit_layerwise", "apollo_adamw_layerwise")
}
"""Values of ``TrainingArguments.optim`` that a class of this package stands for."""

_LACKS = {
    r"galore_adafactor.*": "GaLore with Adafactor's moments; 'galore_adamw_8bit'",
    r"schedule_free_.*": "that algorithm; 'schedule_free_adamw', or transformers' own",
    r"paged_.*": "states paged between host and device; 'adamw_8bit', 'ademamix_8bit' or 'lion_8bit'",
    r"adamw_torch_4bit": "states of 4 bits; 'adamw_torch_8bit'",
    r"adamw_torch_xla|adamw_torch_npu_fused": "devices other than CPUs and CUDA's; transformers' own",
    r"adamw_anyprecision": "Kahan summation; 'adamw_torch_8bit' or oxidion.AdamW(state_dtype=...)",
    r"sgd|adagrad|rmsprop.*|lomo|adalomo|grokadamw|stable_adamw": "that algorithm; transformers' own",
}
"""Patterns of values of ``TrainingArguments.optim`` that have no counterpart: what is missing; what to do."""


def _by_class(args: Any, options: Settings, *, optimizer: str) -> Made:
    """Returns a factory of a class; Adam's settings go to the class, or to AdamW for the rest."""
    cls: type[OxOptimizer] = getattr(optim, optimizer)
    projects = "rank" in cls._SCHEMA
    adam = _adam_keys(cls, args) if projects or not cls._MATRIX else {}
    scalar = options.get("scalar_algorithm")
    other = algorithms.wanted(
        algorithms.scalar_default(cls) if scalar is None else scalar, "scalar_algorithm"
    )
    if other is not cls:
        adam |= {f"{SCALAR}{key}": value for key, value in _adam_keys(other, args).items()}
    usual = inspect.signature(cls).parameters
    rank = {"rank": 128} if projects and usual["rank"].default is None else {}
    return OptimizerFactory, {"optimizer": optimizer, **_common(args), **rank, **adam, **options}


def _adam_keys(cls: type[OxOptimizer], args: Any) -> Settings:
    """The betas and epsilon of Adam, as far as a class reads such keys."""
    own, keys = cls._SCHEMA, {}
    if "betas" in own:
        keys["betas"] = (args.adam_beta1, args.adam_beta2, *own["betas"].default[2:])
    if "eps" in own and not isinstance(own["eps"].default, tuple):
        keys["eps"] = args.adam_epsilon
    return keys


def _makers() -> dict[str, Maker]:
    """Every name that `from_name` takes: transformers', and those of the classes in lower case."""
    classes = [name for name in optim.__all__ if hasattr(getattr(optim, name), "_ALGORITHM")]
    return {name.lower(): partial(_by_class, optimizer=name) for name in classes} | _NAMES


def from_name(name: str, args: Any, **more: Any) -> tuple[type[Any], dict[str, Any]]:
    """Class and arguments for a value of ``TrainingArguments.optim``, computed by this package.

    ::

        names = ["attn", "mlp"]
        args = TrainingArguments(
            ..., optim_target_modules=names, optim_args="rank=64"
        )
        made = hf.from_name("galore_adamw", args)
        trainer = Trainer(model, args, optimizer_cls_and_kwargs=made)

    Arguments of the training count as they do there: ``learning_rate``, ``weight_decay``, betas and epsilon
    of Adam, ``optim_args`` and ``optim_target_modules``. Unlike there, decay, betas and epsilon count in all
    groups of GaLore and APOLLO too. Keys of ``optim_args`` that transformers does not know are arguments of
    the class. Names that end in "_layerwise" [step in the backward pass](../in-backward.md): they need
    ``max_grad_norm=0``, as nothing could clip what is gone.

    Args:
        name: as "adamw_torch", "adafactor", "galore_adamw", "lion_8bit"; or a class in lower case. With one
            for matrices, as "muon", AdamW steps all other parameters, with the betas and epsilon of Adam.
        args: ``TrainingArguments``, or any object with those attributes.
        **more: arguments that win over those of ``args``.

    Returns:
        A class or a factory, and its keyword arguments.

    Raises:
        ValueError: for names and settings that this package has no counterpart for, with what to use instead.
    """
    word = str(getattr(name, "value", name))
    makers = _makers()
    if word not in makers:
        for pattern, text in _LACKS.items():
            if re.fullmatch(pattern, word):
                lacks, _, instead = text.partition("; ")
                raise ValueError(f"optim={word!r}: oxidion does not have {lacks}. Use {instead}")
        near = nearest(word, makers)
        advice = f"it has {', '.join(sorted(makers))}" if near is None else f"the nearest is {near!r}"
        raise ValueError(f"optim must be a name that oxidion has, got {word!r}; {advice}")
    options = read_optim_args(args.optim_args) | {key: more[key] for key in more if is_option(key)}
    cls, settings = makers[word](args, options)
    sorting = next(filter(is_option, settings), None)
    if sorting is not None and issubclass(cls, OxOptimizer):
        cls, settings = OptimizerFactory, {"optimizer": cls, **settings}
    elif sorting is not None and cls is not OptimizerFactory:
        raise ValueError(
            f"optim={word!r} sorts parameters as transformers does and does not read {sorting!r}: leave it "
            "out, or use a class by its name in lower case, as 'galoreadamw' or 'adamw'"
        )
    return cls, {**settings, **more}
