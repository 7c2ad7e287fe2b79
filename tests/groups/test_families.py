"""Parameters of models of many families are sorted as in the handwritten tables."""

from __future__ import annotations

import fnmatch
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oxidion

from .families import FAMILIES, HEADS, Family

STEPPED = ("mixtral", "gpt-oss", "llama4", "dbrx", "deepseek-v3", "gpt2", "phi3", "mamba", "wav2vec2", "unet")
"""Small ones, of all views."""

VIEW_KEYS = ("flatten", "num_heads", "split_sizes", "split_dim", "fan_in_fan_out")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No model is looked for on a hub, and warnings of other packages are theirs."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.disable(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


def expected(
    family: Family, model: nn.Module, name: str, param: torch.Tensor, *, per_head: bool = False
) -> dict[str, Any] | None:
    """The group keys of a matrix, None for the rest; each parameter of two dimensions has to be named."""
    if param.ndim < 2:
        return None
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in family.rest):
        return None
    by_head = HEADS.get(family.name, {}) if per_head else {}
    views = {**by_head, **family.matrices, **by_head}  # those first
    keys = next(keys for pattern, keys in views.items() if fnmatch.fnmatchcase(name, pattern))
    if "depthwise" in keys:
        convolution = model.get_submodule(name.rpartition(".")[0])
        if convolution.groups > 1:
            return None
        keys = {"flatten": True}
    return keys


@pytest.mark.parametrize("family", FAMILIES, ids=str)
@pytest.mark.parametrize(
    ("algorithm", "per_head"),
    [
        pytest.param("muon", False, id="muon"),
        pytest.param("dion", False, id="dion"),
        pytest.param("muon", True, id="heads"),
    ],
)
def test_family_is_sorted_as_by_hand(family: Family, algorithm: str, per_head: bool) -> None:
    model = family.build()
    groups = oxidion.param_groups(model, algorithm, strict=True, summary=False, per_head=per_head)
    found: dict[str, dict[str, Any] | None] = {}
    for group in groups:
        keys = {key: group[key] for key in VIEW_KEYS if key in group}
        found |= {name: keys if group["algorithm"] == algorithm else None for name, _ in group["params"]}
    wanted = {
        name: expected(family, model, name, param, per_head=per_head)
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    assert found == wanted


@pytest.mark.parametrize("name", ["muon", "dion", "normuon", "dion2", "nordion2"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in STEPPED], ids=str)
def test_steps_of_the_groups_are_those_of_the_reference(family: Family, name: str) -> None:
    model = family.build().to_empty(device="cpu").double()
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    torch.manual_seed(0)
    for param in model.parameters():
        nn.init.normal_(param, std=0.02)
        param.grad = torch.randn_like(param)
    cls = next(cls for cls in vars(oxidion.optim).values() if getattr(cls, "_ALGORITHM", None) == name)
    optimizer = cls(oxidion.param_groups(model, name, lr=0.01, summary=False), orth_dtype="float64")
    for row in optimizer.verify():
        assert row["update_error"] < 1e-9, row
    for row in optimizer.explain():
        assert row["lr_factor"] is None or row["lr_factor"] == pytest.approx(factor_of(family, model, row)), (
            row
        )


def factor_of(family: Family, model: nn.Module, row: Any) -> float:
    """The root of outputs over inputs of a parameter's first matrix."""
    param = model.get_parameter(row["name"])
    keys = expected(family, model, row["name"], param)
    if keys is None:
        return 1.0
    shape = (param.shape[0], param[0].numel()) if "flatten" in keys else tuple(param.shape[-2:])
    size = list(shape)
    cut = keys["split_sizes"][0] if "split_sizes" in keys else size[0] // keys.get("num_heads", 1)
    size[keys.get("split_dim", 0)] = cut
    out, into = size[::-1] if "fan_in_fan_out" in keys else size
    return float((out / into) ** 0.5)


def test_enough_families_of_every_library() -> None:
    libraries = [family.library.partition(".")[0] for family in FAMILIES]
    assert len(FAMILIES) >= 40
    assert {libraries.count(name) >= 3 for name in set(libraries)} == {True}
