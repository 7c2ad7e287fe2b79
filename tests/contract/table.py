"""The table of all optimizer classes that the contract suite runs over; a new class is one more row.

A row says what the constructor looks like, which state each algorithm keeps, which values are refused and
which hyper-parameters must be read again at every step. The values are written by hand from the documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import oxidion

MATRIX_ALGORITHMS = frozenset({"dion", "muon"})
STEP_KEYS = frozenset({"step", "step_dev"})
NAN = math.nan
INF = math.inf

EXTRA = frozenset(
    {"maximize", "foreach", "capturable", "differentiable", "strict", "max_batch_bytes", "state_dtype"}
)

_NOT_A_NON_NEGATIVE_NUMBER = (-1.0, NAN, INF, -INF)
_BAD_LR_AND_DECAY = tuple(
    (key, value) for key in ("lr", "weight_decay") for value in _NOT_A_NON_NEGATIVE_NUMBER
)
_BAD_BETAS = tuple(("betas", value) for value in ((-0.1, 0.9), (0.9, -0.1), (NAN, 0.9), (0.9, INF), (0.9,)))
_BAD_MATRIX = tuple((key, value) for key in ("mu", "epsilon") for value in (-0.1, NAN, INF))
_BAD_ORTH = (("orth_method", "qr"), ("ns_steps", 0), ("ns_coefficients", "newton"))


@dataclass(frozen=True)
class Case:
    """One optimizer class.

    Attributes:
        cls: The class.
        algorithm: The algorithm of a group that names none.
        positional: Names and defaults of the constructor's positional arguments after ``params``.
        keyword_only: Names of its keyword-only arguments.
        state: State keys of a parameter, by the algorithm of its group.
        bad: Pairs of a hyper-parameter and a value that is refused, in the constructor and in a group.
        other: A second legal value of every hyper-parameter that a running optimizer reads at each step.
        kwargs: Arguments that make the tests exercise more than the defaults do.
    """

    cls: type[Optimizer]
    algorithm: str
    positional: tuple[tuple[str, object], ...]
    keyword_only: frozenset[str]
    state: Mapping[str, frozenset[str]]
    bad: tuple[tuple[str, object], ...]
    other: Mapping[str, object]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.cls.__name__

    @property
    def is_matrix(self) -> bool:
        """Whether the class's own algorithm takes matrices only."""
        return self.algorithm in MATRIX_ALGORITHMS

    @property
    def vector_algorithm(self) -> str:
        """Algorithm of the one-dimensional parameters in `groups`."""
        return "adamw" if self.is_matrix else self.algorithm

    def groups(self, model: nn.Module, *, named: bool = False, **overrides: object) -> list[dict[str, Any]]:
        """Split a model into a group of matrices and a group of vectors."""
        split: tuple[list[Any], list[Any]] = ([], [])
        for name, param in model.named_parameters():
            split[param.ndim < 2].append((name, param) if named else param)
        matrices, vectors = ({"params": params, **overrides} for params in split)
        if self.is_matrix:
            vectors["algorithm"] = self.vector_algorithm
        return [matrices, vectors]

    def build(self, model: nn.Module, *, named: bool = False, **kwargs: object) -> Any:
        """Build the optimizer over `groups` of the model."""
        return self.cls(self.groups(model, named=named), **{**self.kwargs, **kwargs})

    @property
    def float32_state(self) -> dict[str, Any]:
        """Arguments that keep every state tensor in float32."""
        if self.algorithm != "dion":
            return {"state_dtype": torch.float32}
        config = oxidion.DionMixedPrecisionConfig(
            momentum_dtype=torch.float32, Q_dtype=torch.float32, variance_dtype=torch.float32
        )
        return {"mixed_precision_config": config}

    def on(self, *params: Tensor, **kwargs: object) -> Any:
        """Build the optimizer over the given parameters in one group, not strict: vectors are legal."""
        return self.cls(list(params), **{**self.kwargs, "strict": False, **kwargs})

    def state_keys(self, param: Tensor) -> frozenset[str]:
        """State keys of a parameter of `build`."""
        return self.state[self.algorithm if param.ndim >= 2 else self.vector_algorithm]


CASES = (
    Case(
        cls=oxidion.Dion,
        algorithm="dion",
        positional=(
            ("replicate_mesh", None),
            ("outer_shard_mesh", None),
            ("inner_shard_mesh", None),
            ("replicate_mesh_grad_sync", True),
            ("rank_fraction", 1.0),
            ("rank_multiple_of", 1),
            ("lr", 0.01),
            ("mu", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("epsilon", 1e-8),
            ("power_iters", 1),
            ("qr_method", "rcqr"),
            ("cqr_warmup_steps", 150),
            ("rcqr_oversample", 1.25),
            ("mixed_precision_config", None),
        ),
        keyword_only=EXTRA | {"orth_dtype", "check_grad_sync", "seed", "cautious_wd"},
        state={
            "dion": frozenset({"momentum", "Q"}),
            "adamw": frozenset({"momentum", "variance", "step"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(
            *_BAD_LR_AND_DECAY,
            *_BAD_BETAS,
            *_BAD_MATRIX,
            *(("rank_fraction", value) for value in (0.0, -0.5, 1.5, NAN)),
            *(("rank_multiple_of", value) for value in (0, -1)),
        ),
        other={"lr": 0.03, "mu": 0.5, "betas": (0.5, 0.6), "weight_decay": 0.3, "epsilon": 0.1},
        kwargs={"rank_fraction": 0.5},
    ),
    Case(
        cls=oxidion.Muon,
        algorithm="muon",
        positional=(
            ("distributed_mesh", None),
            ("lr", 0.01),
            ("mu", 0.95),
            ("betas", (0.9, 0.95)),
            ("weight_decay", 0.01),
            ("cautious_wd", False),
            ("epsilon", 1e-8),
            ("nesterov", False),
            ("adjust_lr", "spectral_norm"),
            ("flatten", False),
            ("use_gram_newton_schulz", False),
            ("use_triton", False),
            ("use_polar_express", True),
            ("newton_schulz_func", None),
        ),
        keyword_only=EXTRA | {"orth_dtype", "orth_method", "ns_coefficients", "ns_steps", "check_grad_sync"},
        state={
            "muon": frozenset({"momentum"}),
            "adamw": frozenset({"momentum", "variance", "step_dev"}),
            "lion": frozenset({"momentum"}),
        },
        bad=(*_BAD_LR_AND_DECAY, *_BAD_BETAS, *_BAD_MATRIX, *_BAD_ORTH, ("adjust_lr", "arbitrary")),
        other={
            "lr": 0.03,
            "mu": 0.5,
            "betas": (0.5, 0.6),
            "weight_decay": 0.3,
            "epsilon": 0.1,
            "nesterov": True,
            "adjust_lr": "rms_norm",
            "orth_method": "svd",
            "ns_coefficients": [(1.5, -0.5, 0.0), (1.875, -1.25, 0.375)],
            "ns_steps": 3,
        },
    ),
    Case(
        cls=oxidion.AdamW,
        algorithm="adamw",
        positional=(
            ("lr", 1e-3),
            ("betas", (0.9, 0.999)),
            ("eps", 1e-8),
            ("weight_decay", 1e-2),
            ("amsgrad", False),
        ),
        keyword_only=EXTRA | {"fused", "cautious_wd"},
        state={"adamw": frozenset({"step", "exp_avg", "exp_avg_sq"})},
        bad=(
            *_BAD_LR_AND_DECAY,
            *_BAD_BETAS,
            ("betas", (1.0, 0.9)),
            ("betas", (0.9, 1.0)),
            *(("eps", value) for value in (-0.1, NAN, INF)),
        ),
        other={"lr": 0.03, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 0.1},
    ),
    Case(
        cls=oxidion.Lion,
        algorithm="lion",
        positional=(("lr", 1e-4), ("betas", (0.9, 0.99)), ("weight_decay", 0.0)),
        keyword_only=EXTRA | {"cautious_wd"},
        state={"lion": frozenset({"exp_avg"})},
        bad=(*_BAD_LR_AND_DECAY, *_BAD_BETAS),
        other={"lr": 0.03, "betas": (0.1, 0.6), "weight_decay": 0.3},
    ),
)

MATRIX_CASES = tuple(case for case in CASES if case.is_matrix)
ELEMENTWISE_CASES = tuple(case for case in CASES if not case.is_matrix)

every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_matrix_case = pytest.mark.parametrize("case", MATRIX_CASES, ids=str)


def case_of(name: str) -> Case:
    """The row of a class, by the name of the class."""
    (case,) = (case for case in CASES if case.cls.__name__ == name)
    return case


def pairs_of(attribute: Callable[[Case], Any]) -> pytest.MarkDecorator:
    """Parametrize a test by every (case, entry) of one attribute of the table."""
    pairs = [(case, *_as_tuple(entry)) for case in CASES for entry in attribute(case)]
    names = ("case", "key", "value")[: len(pairs[0])]
    return pytest.mark.parametrize(names, pairs, ids=["-".join(map(_label, pair)) for pair in pairs])


def optimizer_classes(module: Any) -> Iterator[type[Optimizer]]:
    """Every optimizer class that a module exports."""
    for name in module.__all__:
        exported = getattr(module, name)
        if isinstance(exported, type) and issubclass(exported, Optimizer) and "step" in dir(exported):
            yield exported


def _as_tuple(entry: object) -> tuple[object, ...]:
    return entry if isinstance(entry, tuple) else (entry,)


def _label(item: object) -> str:
    return str(item).replace(" ", "")


class Net(nn.Module):
    """A small model: wide, square (twice the same shape) and tall matrices, biases and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.square = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, 6] to [batch, 3]."""
        return self.last(self.norm(torch.tanh(self.again(torch.tanh(self.square(self.first(x)))))))


def make_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> Net:
    """A `Net` with reproducible random values in every parameter, also in those that start constant."""
    generator = torch.Generator().manual_seed(seed)
    model = Net().to(dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
    return model


def set_grads(model_or_params: nn.Module | list[Tensor], seed: int, scale: float = 1.0) -> None:
    """Give every parameter a reproducible gradient (the same for equal shapes, seeds and order)."""
    params = model_or_params.parameters() if isinstance(model_or_params, nn.Module) else model_or_params
    generator = torch.Generator().manual_seed(1000 + seed)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale).to(
            param.dtype
        )


def run_steps(optimizer: Optimizer, model: nn.Module, seeds: range) -> None:
    """Take one step for every seed, each with the gradients of `set_grads`."""
    for seed in seeds:
        set_grads(model, seed)
        optimizer.step()
