"""pytest plugin: kozistr/pytorch_optimizer's tests over the classes of this package.

Its wrappers, schedulers, models and thresholds are kept; its registry of optimizers and tables of arguments
hold the classes of this package instead. The two call the same errors by other names.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

from torch.optim import Optimizer

import oxidion
from conformance.arguments import LEAST, OWN

# By the class: a learning rate and a number of steps of its tests for the same or the nearest algorithm.
LENGTHS: dict[str, tuple[float, int]] = {
    "Adafactor": (1.0, 40),
    "AdEMAMix": (1.0, 3),
    "CAME": (0.75, 70),
}
OTHER_LENGTH = (0.5, 5)
FLAGS = ("use_muon", "pre_norm")
"""Arguments that helpers of its tests hand to its own classes, by their names."""
BIASES = {"strict": False}
SAM_KEYS = ("rho", "adaptive", "sigma", "lmbda")
"""Group keys that its SAM and FriendlySAM hand to the optimizer that they wrap."""


def _without_flags(params: Any) -> Any:
    """Groups without `FLAGS`: the shape assigns parameters other than matrices to AdamW."""
    groups = list(params) if params is not None else None
    if not groups or not isinstance(groups[0], dict):
        return groups
    return [{key: value for key, value in group.items() if key not in FLAGS} for group in groups]


def _without(argument: str, classes: dict[str, Any]) -> frozenset[str]:
    """Names of the classes that do not have an argument."""
    return frozenset(
        name for name, cls in classes.items() if argument not in inspect.signature(cls).parameters
    )


def _lenient(cls: Any) -> type[Optimizer]:
    """A class like another one, with the arguments that every parameter of a model needs."""
    name = cls.__name__
    least = LEAST.get(name, BIASES)

    @functools.wraps(cls.__init__)
    def __init__(self: Any, params: Any, **kwargs: Any) -> None:
        given = {key: value for key, value in kwargs.items() if key not in FLAGS}
        cls.__init__(self, _without_flags(params), **{"extra_keys": SAM_KEYS, **least, **given})

    return type(name, (cls,), {"__init__": __init__})


def install() -> None:
    """Puts the classes into the tables, before a module of tests reads them."""
    errors: Any = importlib.import_module("pytorch_optimizer.base.exception")
    package: Any = importlib.import_module("pytorch_optimizer.optimizer")
    constants: Any = importlib.import_module("tests.constants")
    classes = [_lenient(getattr(oxidion, name)) for name in OWN]
    errors.NegativeLRError = (errors.NegativeLRError, ValueError)
    errors.NoComplexParameterError = errors.NoSparseGradientError = TypeError
    names = {cls.__name__.lower(): cls for cls in classes}
    package.OPTIMIZERS.update(names)
    package.AdamW = names["adamw"]
    constants.OPTIMIZERS[:] = [
        (cls, {"lr": lr, "weight_decay": 1e-3}, steps)
        for cls in classes
        for lr, steps in [LENGTHS.get(cls.__name__, OTHER_LENGTH)]
    ]
    constants.VALID_OPTIMIZER_NAMES[:] = list(names)
    for key in vars(constants):
        if key.startswith("SKIP_") or key in ("SPARSE_OPTIMIZERS", "COMPLEX_OPTIMIZERS"):
            setattr(constants, key, frozenset())
    constants.FOREACH_OPTIMIZERS = frozenset(names)
    constants.BETA_OPTIMIZER_NAMES = frozenset(names) - _without("betas", names)
    constants.SKIP_EPSILON = _without("eps", names)


def pytest_configure() -> None:
    """Before anything is collected."""
    install()
