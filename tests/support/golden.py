"""The recorded reference trajectories (see tests/golden/README.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import oxidion

from .cases import defaults_of

_HERE = Path(__file__).resolve().parent.parent
_CANDIDATES = (_HERE / "golden", _HERE.parent.parent / "shared" / "golden")


def directory() -> Path:
    """``$OXIDION_GOLDEN``, else tests/golden, else ../shared/golden next to the checkout."""
    override = os.environ.get("OXIDION_GOLDEN")
    candidates = (Path(override),) if override else _CANDIDATES
    for candidate in candidates:
        if (candidate / "cases.json").is_file():
            return candidate
    raise FileNotFoundError(f"no cases.json in any of {[str(c) for c in candidates]}")


@lru_cache(maxsize=4)
def _arrays(name: str) -> dict[str, NDArray[Any]]:
    with np.load(directory() / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


@dataclass(frozen=True)
class GoldenCase:
    """One recorded run.

    Attributes:
        name: Name of the case and of its file.
        cls: Name of the optimizer class.
        kwargs: Constructor arguments.
        groups: Parameter groups, with parameters by index.
        steps: Number of steps.
    """

    name: str
    cls: str
    kwargs: dict[str, Any]
    groups: list[dict[str, Any]]
    steps: int

    def __str__(self) -> str:
        return self.name

    @property
    def indices(self) -> list[int]:
        """Indices of all parameters, in the order of the groups."""
        return [index for group in self.groups for index in group["params"]]

    def tensor(self, key: str) -> Tensor | None:
        """A stored array as a float64 tensor, None if the file has no such key."""
        array = _arrays(self.name).get(key)
        return None if array is None else torch.from_numpy(array).double()

    def initial(self, index: int) -> Tensor:
        """Initial value of a parameter."""
        return self._required(f"param.{index}.init")

    def initial_q(self, index: int) -> Tensor | None:
        """Initial Q of a Dion matrix."""
        return self.tensor(f"state.{index}.Q.init")

    def grad(self, step: int, index: int) -> Tensor:
        """Gradient of a parameter at a step, counted from 0."""
        return self._required(f"grad.{step}.{index}")

    def update(self, index: int, steps: int) -> Tensor | None:
        """Parameter after ``steps`` steps minus its initial value, where it was recorded."""
        return self.tensor(f"update.{index}.step{steps}")

    def final_state(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the state after the last step."""
        prefix, suffix = f"state.{index}.", ".final"
        for key in _arrays(self.name):
            if key.startswith(prefix) and key.endswith(suffix):
                yield key.removeprefix(prefix).removesuffix(suffix), self._required(key)

    def reference_group(self, index: int) -> dict[str, Any]:
        """Hyper-parameters of a parameter."""
        cls = getattr(oxidion, self.cls)
        (group,) = (group for group in self.groups if index in group["params"])
        own = {key: value for key, value in group.items() if key != "params"}
        return {"algorithm": cls._ALGORITHM, **defaults_of(cls), **self.kwargs, **own}

    def build(self, dtype: torch.dtype, **overrides: object) -> tuple[Any, dict[int, nn.Parameter]]:
        """The optimizer with its state at the recorded start, and its parameters by index."""
        params = {index: nn.Parameter(self.initial(index).to(dtype)) for index in self.indices}
        keys = {"interleaved": 1} if "batched" in self.name else {}  # of four dimensions too
        groups = [
            {**keys, **group, "params": [params[index] for index in group["params"]]} for group in self.groups
        ]
        optimizer: Any = getattr(oxidion, self.cls)(groups, **{**self.kwargs, **overrides})
        optimizer.init_state()
        for index, param in params.items():
            q = self.initial_q(index)
            if q is not None:
                optimizer.state[param]["Q"].copy_(q)
        return optimizer, params

    def _required(self, key: str) -> Tensor:
        tensor = self.tensor(key)
        if tensor is None:
            raise KeyError(f"{self.name}.npz has no {key}")
        return tensor


def golden_cases(*classes: str) -> list[GoldenCase]:
    """All recorded runs of the named classes."""
    rows = json.loads((directory() / "cases.json").read_text())["cases"]
    fields = ("name", "cls", "kwargs", "groups", "steps")
    return [GoldenCase(**{field: row[field] for field in fields}) for row in rows if row["cls"] in classes]
