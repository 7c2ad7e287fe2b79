"""Random numbers of a parameter with a name come from the name: where it stands makes no difference."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion._oxidion import fill_normal

SHAPES = {"0.weight": (44, 48), "0.bias": (44,), "1.weight": (44, 48), "2.weight": (80, 44)}
MATRICES = {"0.weight", "1.weight", "2.weight"}
ROUNDED: dict[str, Any] = {"stochastic_rounding": True, "dtype": torch.bfloat16}
#: Class, arguments, and the parameters that see random numbers.
CASES: tuple[tuple[Any, dict[str, Any], set[str]], ...] = (
    (oxidion.Dion, {"rank_fraction": 0.25, "strict": False}, MATRICES),
    (oxidion.Dion, {"rank_fraction": 0.25, "strict": False, **ROUNDED}, set(SHAPES)),
    (oxidion.GaLoreAdamW, {"rank": 2, "svd": "random", "update_proj_gap": 2}, MATRICES),
    (oxidion.GaLoreAdamW, {"rank": 2, "stagger": True, "update_proj_gap": 4}, {"0.weight", "2.weight"}),
    (oxidion.APOLLOAdamW, {"rank": 4, "update_proj_gap": 2}, MATRICES),
    (oxidion.APOLLOMini, {"update_proj_gap": 2}, MATRICES),
    (oxidion.AdamW, ROUNDED, set(SHAPES)),
    (oxidion.Muon, {"strict": False, **ROUNDED}, set(SHAPES)),
    (oxidion.Lamb, ROUNDED, set(SHAPES)),
    (oxidion.Adafactor, {"relative_step": False, **ROUNDED}, set(SHAPES)),
)
IDS = [f"{cls.__name__}-{'-'.join(map(str, keys))}" for cls, keys, _ in CASES]
every_case = pytest.mark.parametrize(("cls", "keys", "random"), CASES, ids=IDS)

Named = dict[str, nn.Parameter]


def parameters(dtype: torch.dtype) -> Named:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for name, shape in SHAPES.items()
    }


def gradients(params: Named, step: int) -> None:
    for place, param in enumerate(params.values()):
        generator = torch.Generator().manual_seed(100 * step + place)
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)


def build(cls: Any, given: Any, keys: dict[str, Any]) -> Any:
    return cls(given, lr=0.01, **{key: value for key, value in keys.items() if key != "dtype"})


def train(optimizers: list[Any], params: Named, steps: int = 6) -> list[Tensor]:
    for step in range(steps):
        gradients(params, step)
        for optimizer in optimizers:
            optimizer.step()
    return [param.detach() for param in params.values()]


def start(keys: dict[str, Any]) -> Named:
    return parameters(keys.get("dtype", torch.float32))


@every_case
def test_one_optimizer_per_named_parameter_equals_one_for_all(
    cls: Any, keys: dict[str, Any], random: set[str]
) -> None:
    together, alone, unnamed = (start(keys) for _ in range(3))
    wanted = train([build(cls, list(together.items()), keys)], together)
    got = train([build(cls, [item], keys) for item in alone.items()], alone)
    assert all(map(torch.equal, got, wanted))
    # Without names the position decides: the first parameter is alone what it is among others.
    other = train([build(cls, [param], keys) for param in unnamed.values()], unnamed)
    differ = {name for name, a, b in zip(SHAPES, other, wanted, strict=True) if not torch.equal(a, b)}
    assert differ
    assert differ <= random


@every_case
def test_order_of_named_parameters_changes_nothing(cls: Any, keys: dict[str, Any], random: set[str]) -> None:
    params, turned = start(keys), start(keys)
    wanted = train([build(cls, list(params.items()), keys)], params)
    got = train([build(cls, list(turned.items())[::-1], keys)], turned)
    assert all(map(torch.equal, got, wanted))


@every_case
def test_unnamed_parameters_have_the_streams_of_their_positions(
    cls: Any, keys: dict[str, Any], random: set[str]
) -> None:
    params = start(keys)
    optimizer = build(cls, list(params.values()), keys)
    assert optimizer.plan().streams == list(range(len(SHAPES)))
    named = build(cls, list(params.items()), keys)
    digests = [hashlib.sha256(name.encode()).digest()[:8] for name in SHAPES]
    assert named.plan().streams == [int.from_bytes(digest, "big") for digest in digests]


def test_first_basis_of_dion_is_the_stream_of_the_name() -> None:
    weight = nn.Parameter(torch.ones(24, 16))
    optimizer = oxidion.Dion([("w", weight)], rank_fraction=0.25, seed=3, init_state=True)
    wanted = torch.empty(16, 4)
    fill_normal(wanted, 3, int.from_bytes(hashlib.sha256(b"w").digest()[:8], "big"))
    assert torch.equal(optimizer.state[weight]["Q"], wanted)


WRAPPED = ("module.{}", "_orig_mod.{}", "module._orig_mod.{}", "_fsdp_wrapped_module.{}")


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_names_given_by_wrappers_have_the_streams_of_bare_ones(wrapped: str) -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    bare, other = (oxidion.Muon([(name, weight)]) for name in ("0.weight", wrapped.format("0.weight")))
    assert bare.plan().streams == other.plan().streams


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_and_bare_model_have_the_same_numbers() -> None:
    def q_of(wrap: Any) -> Tensor:
        model = wrap(nn.Sequential(nn.Linear(8, 8, bias=False)))
        groups = oxidion.param_groups(model, algorithm="dion")
        optimizer = oxidion.Dion(groups, rank_fraction=0.25, init_state=True)
        (state,) = optimizer.state.values()
        q: Tensor = state["Q"]
        return q

    assert torch.equal(q_of(torch.compile), q_of(lambda model: model))


@every_case
def test_resumed_run_with_names_goes_on_as_the_unbroken_one(
    cls: Any, keys: dict[str, Any], random: set[str]
) -> None:
    params = start(keys)
    optimizer = build(cls, list(params.items()), keys)
    train([optimizer], params, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    held = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    # The names come with the checkpoint: an optimizer without any goes on with them.
    resumed = build(cls, list(held.values()), keys)
    resumed.load_state_dict(saved)
    assert all(map(torch.equal, train([resumed], held, 4), train([optimizer], params, 4)))


@every_case
def test_checkpoint_without_names_goes_on_by_position_if_named(
    cls: Any, keys: dict[str, Any], random: set[str]
) -> None:
    params = start(keys)
    optimizer = build(cls, list(params.values()), keys)
    train([optimizer], params, 3)
    held = {name: nn.Parameter(param.detach().clone()) for name, param in params.items()}
    resumed = build(cls, list(held.items()), keys)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert resumed.param_groups[0]["param_names"] == list(SHAPES)
    assert resumed.state_dict()["param_groups"][0]["seed_by"] == "position"
    assert all(map(torch.equal, train([resumed], held, 4), train([optimizer], params, 4)))


def test_group_may_ask_for_the_streams_of_positions() -> None:
    weights = [(name, nn.Parameter(torch.ones(4, 4))) for name in "ab"]
    assert oxidion.Dion([{"params": weights, "seed_by": "position"}]).plan().streams == [0, 1]
    by_name = oxidion.Dion([{"params": weights, "seed_by": "name"}]).plan().streams
    assert by_name == oxidion.Dion(weights).plan().streams
    with pytest.raises(ValueError, match="seed_by must be one of 'name', 'position', got 'rank'"):
        oxidion.Dion([{"params": weights, "seed_by": "rank"}])


def test_streams_of_names_are_the_same_in_every_process() -> None:
    code = (
        "import torch, oxidion\n"
        "w = torch.nn.Parameter(torch.zeros(4, 4))\n"
        "print(oxidion.Muon([('blocks.0.w', w)]).plan().streams)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[{int.from_bytes(hashlib.sha256(b'blocks.0.w').digest()[:8], 'big')}]\n"


def test_verify_knows_the_streams_of_names() -> None:
    params = parameters(torch.float64)
    optimizer = oxidion.GaLoreAdamW(
        list(params.items()), lr=0.01, rank=2, svd="random", update_proj_gap=2, state_bits=32
    )
    train([optimizer], params, 2)
    gradients(params, 7)
    assert all(row["update_error"] < 1e-9 for row in optimizer.verify())
