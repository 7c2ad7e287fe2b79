"""States that lie with the owners of matrices, on real processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import oxidion
from support.inputs import gaussian, gradients

from . import jobs

SHAPES = ((12, 8), (9, 14), (3, 6, 5))
KEYS = {"lr": 2.0**-6, "precondition_frequency": 2}


def _params(layout: Any) -> list[nn.Parameter]:
    return _weights(SHAPES, layout)


def _weights(shapes: Sequence[tuple[int, ...]], layout: Any) -> list[nn.Parameter]:
    """Weights in float64, on a mesh of all ranks or, where the layout is None, on each."""
    full = [gaussian(shape, i).double() for i, shape in enumerate(shapes)]
    if layout is None:
        return [nn.Parameter(own) for own in full]
    mesh = jobs.mesh_of({"fs": dist.get_world_size()})
    return [nn.Parameter(jobs.placed(own, mesh, {"fs": layout}, ["fs"])) for own in full]


def _optimizer(name: str, params: list[nn.Parameter], layout: Any, **keys: Any) -> Any:
    mesh = {} if layout is not None else {"distributed_mesh": dist.group.WORLD}
    extra = {"orth_dtype": "float64"} if name == "SOAPMuon" else {}
    return getattr(oxidion, name)(params, **KEYS, **extra, **mesh, **keys)


def _steps(optimizer: Any, params: list[nn.Parameter], layout: Any, count: int, seed: int = 0) -> None:
    for at, grads in enumerate(gradients(SHAPES, count, seed)):
        for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
            own = grad.double()
            if layout is not None:
                mesh = jobs.mesh_of({"fs": dist.get_world_size()})
                own = jobs.placed(own, mesh, {"fs": layout}, ["fs"])
            # The second weight takes no part in the second step.
            param.grad = None if (at, number) == (1, 1) else own
        optimizer.step()


def _differ(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = [(jobs.whole(a).double(), jobs.whole(b).double()) for a, b in zip(some, others, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-300)) for a, b in pairs)


def _states(optimizer: Any) -> list[dict[str, Tensor]]:
    return [*optimizer.state_dict()["state"].values()]


def beside_sharded(name: str, layout: Any) -> dict[str, float]:
    """Distances from an optimizer whose states are sharded: of weights and of each state in a checkpoint."""
    owned, sharded = _params(layout), _params(layout)
    one = _optimizer(name, owned, layout, owned_states=True)
    other = _optimizer(name, sharded, layout)
    _steps(one, owned, layout, 4)
    _steps(other, sharded, layout, 4)
    with pytest.raises(RuntimeError, match=r"owned_states.*synchronize_for_checkpoint"):
        one.state_dict()
    one.synchronize_for_checkpoint()
    found = {"weights": _differ([*owned], [*sharded])}
    for mine, theirs in zip(_states(one), _states(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert type(value) is type(theirs[key])
            assert getattr(value, "placements", None) == getattr(theirs[key], "placements", None)
            found[key] = max(found.get(key, 0.0), _differ([value], [theirs[key]]))
    return found


def goes_on(name: str, layout: Any) -> tuple[bool, bool]:
    """Whether steps are the same after a checkpoint was taken between them, and after it was loaded."""
    runs = []
    for what in ("straight", "synchronized", "loaded"):
        params = _params(layout)
        optimizer = _optimizer(name, params, layout, owned_states=True)
        _steps(optimizer, params, layout, 3)
        if what != "straight":
            optimizer.synchronize_for_checkpoint()
        if what == "loaded":
            saved = optimizer.state_dict()
            optimizer = _optimizer(name, params, layout, owned_states=True)
            optimizer.load_state_dict(saved)
        _steps(optimizer, params, layout, 3, seed=1)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    straight, *others = runs
    synchronized, loaded = (all(map(torch.equal, straight, other)) for other in others)
    return synchronized, loaded


def elements(owned: bool) -> int:
    """Elements of all states that this rank has, of weights that all ranks have."""
    params = _params(None)
    optimizer = _optimizer("SOAP", params, None, owned_states=owned)
    _steps(optimizer, params, None, 2)
    held = (v for own in optimizer.state.values() for key, v in own.items() if key != "step")
    return sum(getattr(value, "_local_tensor", value).numel() for value in held)


def more_parameters() -> None:
    """Another group: refused while states are with the owners of the plan before, and a way out."""
    layout = ("S", 0)
    # One matrix of each shape: the costlier ones of the second group change who owns those of the first.
    first = [_weights((shape,), layout) for shape in ((12, 8), (9, 14))]
    more = _weights(((16, 24),), layout)
    optimizer = _optimizer("SOAP", [param for (param,) in first], layout, owned_states=True)
    for param in (*optimizer.param_groups[0]["params"], *more):
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.add_param_group({"params": more})
    with pytest.raises(Exception, match="synchronize_for_checkpoint"):
        optimizer.step()
    optimizer.synchronize_for_checkpoint()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


def verified(name: str, layout: Any) -> list[float]:
    """What `verify` says between steps, and whether it changed anything."""
    params = _params(layout)
    optimizer = _optimizer(name, params, layout, owned_states=True)
    _steps(optimizer, params, layout, 3)
    for param in params:
        param.grad = param.detach().clone() + 0.5
    errors = [row["update_error"] for row in optimizer.verify()]
    optimizer.synchronize_for_checkpoint()
    errors += [row["update_error"] for row in optimizer.verify()]
    optimizer.metrics()
    optimizer.step()
    return errors


def first_step_at_a_rate_of_zero() -> set[str]:
    """Names of the types of states that torch finds after it had them made for a checkpoint to fill."""
    params = _params(("S", 0))
    optimizer = _optimizer("SOAP", params, ("S", 0), owned_states=True)
    ready = [type(v).__name__ for own in _initialized(params) for v in own.values()]
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    made = [type(v).__name__ for own in _states(optimizer) for k, v in own.items() if k != "step"]
    return {*made, *(name for name in ready if name != "Tensor")}


def _initialized(params: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    optimizer = _optimizer("SOAP", params, ("S", 0), owned_states=True, init_state=True)
    return _states(optimizer)
