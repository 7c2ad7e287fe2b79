"""Steps of every class on parameters on several devices, against steps of an optimizer for each device.

``python tests/cuda/several_devices.py ALGORITHM...`` takes them on two emulated devices and on the host.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import oxidion
from oxidion import _oxidion
from oxidion._cuda import device
from support.cases import Case, cases_of
from support.inputs import gaussian

PLACES = (0, 1, None)
"""Two devices and the host."""
SHAPES = ((40, 24), (24, 40), (40, 24))
STEPS = 3

Named = list[tuple[str, Parameter]]


def made(dtype: torch.dtype = torch.float32) -> dict[int | None, Named]:
    """Parameters by place."""
    found: dict[int | None, Named] = {}
    for number, place in enumerate(PLACES):
        params = [Parameter(gaussian(shape, 1, number, at).to(dtype)) for at, shape in enumerate(SHAPES)]
        for param in params:
            _oxidion.count_as(param, place)
        found[place] = [(f"{place}.{at}", param) for at, param in enumerate(params)]
    return found


def mixed(by_place: dict[int | None, Named]) -> Named:
    """All of them, those of the devices by turns."""
    return [pair for pairs in zip(*by_place.values(), strict=True) for pair in pairs]


def give_gradients(params: Named, step: int) -> None:
    """To all but one, other ones in each step."""
    for name, param in params:
        param.grad = gaussian(param.shape, 2, step, *name.encode()).to(param.dtype)
    params[step % len(params)][1].grad = None


def states_of(optimizer: torch.optim.Optimizer, params: Named) -> list[torch.Tensor]:
    """Parameters and states, by the names of parameters and keys."""
    found = [param.detach() for _, param in params]
    for _, param in params:
        own = optimizer.state[param]
        found += [own[key] for key in sorted(own) if isinstance(own[key], torch.Tensor)]
    return found


def check(case: Case, **more: Any) -> None:
    """Steps of one optimizer leave the bits of those of one for each place."""
    dtype = torch.bfloat16 if more.get("stochastic_rounding") else torch.float32
    together, separate = made(dtype), made(dtype)
    everything = mixed(together)
    settings = {"lr": 0.01, **case.kwargs, **more}
    if case.algorithm == "lamb":
        settings["max_grad_norm"] = None
    optimizer = case.cls(everything, **settings)
    others = {place: case.cls(params, **settings) for place, params in separate.items()}
    for step in range(STEPS):
        give_gradients(everything, step)
        gradients = {name: param.grad for name, param in everything}
        for params in separate.values():
            for name, param in params:
                grad = gradients[name]
                param.grad = None if grad is None else grad.clone()
        optimizer.step()
        for other in others.values():
            other.step()
    assert len(optimizer.plan().arena_parts) == len(PLACES)
    for place, params in separate.items():
        found, expected = states_of(optimizer, together[place]), states_of(others[place], params)
        assert len(found) == len(expected) > len(params)
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), (case.algorithm, place, more)


def check_norm_of_group() -> None:
    """The norm of a group's gradients is that of all its devices: each step is that of all on the host."""
    together, separate = made(), made()
    everything, alone = mixed(together), mixed(separate)
    for _, param in alone:
        _oxidion.count_as(param, None)
    optimizers = [oxidion.Lamb(params, lr=0.01, max_grad_norm=0.1) for params in (everything, alone)]
    for step in range(STEPS):
        for params, optimizer in zip((everything, alone), optimizers, strict=True):
            give_gradients(params, step)
            optimizer.step()
    parts = [len(optimizer.plan().arena_parts) for optimizer in optimizers]
    assert parts == [len(PLACES), 1]
    for (_, ours), (_, theirs) in zip(everything, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def main(algorithms: list[str]) -> None:
    """Checks some classes: as their first case has them, with 8-bit states and rounded at random."""
    torch.set_num_threads(1)
    device.prepare(emulated=True)
    for algorithm in algorithms:
        case = cases_of(algorithm)[0]
        check(case)
        print(algorithm)
    if "lamb" in algorithms:
        check_norm_of_group()
    for algorithm in ("adamw", "muon"):
        if algorithm in algorithms:
            check(cases_of(algorithm)[0], state_bits=8)
            check(cases_of(algorithm)[0], stochastic_rounding=True)


if __name__ == "__main__":
    main(sys.argv[1:])
