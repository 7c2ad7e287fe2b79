"""Owner-sharded states (ZeRO-1) on real processes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

import oxidion
from oxidion.compat import titan
from support.inputs import gaussian, gradients

from . import jobs

SHAPES = ((12, 8), (9, 14), (3, 6, 5))
KEYS = {"precondition_frequency": 2, "owned_states": True}
LOW_RANK = {"rank": 2, "update_proj_gap": 2, "state_bits": 32, "owned_states": True}
EIGHT_BITS = {"min_quant_numel": 0, "block_size": 8}
"""Keys of groups with states of 8 bits."""
OWN_KEYS: dict[str, dict[str, Any]] = {
    "SOAPMuon": {**KEYS, "orth_dtype": "float64"},
    "SOAP quantized": {**KEYS, "state_bits": 8},
    "SOAP sums": {"precondition_frequency": 2, "sides": "unsharded"},
    "GaLoreAdamW": {**LOW_RANK, "rotate_moments": True, "stagger": True},
    "APOLLOAdamW": LOW_RANK,
    "APOLLOMini": {"update_proj_gap": 2, "owned_states": True},
    "GaLoreAdamW quantized": {**LOW_RANK, "state_bits": 8},
    "Muon": {"owned_states": True},
    "NorMuon": {"owned_states": True, "nesterov": True},
    "Muon quantized": {"owned_states": True, "state_bits": 8},
}
"""Settings by name: a class, and a word that distinguishes its settings."""


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
    groups = [{"params": params, **group_keys(name)}]
    return getattr(oxidion, name.split()[0])(groups, 2.0**-6, **{**settings(name), **mesh, **keys})


def settings(name: str) -> dict[str, Any]:
    """Arguments of an optimizer with owner-sharded states."""
    return OWN_KEYS.get(name, KEYS)


def group_keys(name: str) -> dict[str, Any]:
    """Keys that are no arguments."""
    return EIGHT_BITS if name.endswith("quantized") else {}


def _alone(name: str, params: list[nn.Parameter], **keys: Any) -> Any:
    """The same on one process, which has everything."""
    return _optimizer(name, params, ("alone",), **keys)


def _steps(
    optimizer: Any,
    params: list[nn.Parameter],
    layout: Any,
    count: int,
    *,
    seed: int = 0,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
) -> None:
    for at, grads in enumerate(gradients(shapes, count, seed)):
        for number, (param, grad) in enumerate(zip(params, grads, strict=True)):
            own = grad.double()
            if layout is not None:
                mesh = jobs.mesh_of({"fs": dist.get_world_size()})
                own = jobs.placed(own, mesh, {"fs": layout}, ["fs"])
            # The second weight is left out of the second step.
            param.grad = None if (at, number) == (1, 1) else own
        optimizer.step()


def _differ(some: list[Tensor], others: list[Tensor]) -> float:
    pairs = [(jobs.whole(a).double(), jobs.whole(b).double()) for a, b in zip(some, others, strict=True)]
    return max(float((a - b).norm() / (b.norm() + 1e-300)) for a, b in pairs)


def _states(optimizer: Any) -> list[dict[str, Tensor]]:
    return [*optimizer.state_dict()["state"].values()]


def compare_with_one_process(name: str, layout: Any) -> dict[str, float]:
    """Distances from one process that has everything: of weights and of each state in a checkpoint."""
    owned, whole = _params(layout), _params(None)
    one, other = _optimizer(name, owned, layout), _alone(name, whole)
    _steps(one, owned, layout, 4)
    _steps(other, whole, None, 4)
    with pytest.raises(RuntimeError, match=r"owners of matrices.*synchronize_for_checkpoint"):
        one.state_dict()
    one.synchronize_for_checkpoint()
    found = {"weights": _differ([*owned], [*whole])}
    for param, mine, theirs in zip(owned, _states(one), _states(other), strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            found[key] = max(found.get(key, 0.0), _differ([value], [theirs[key]]))
            if layout is not None and not name.startswith(("GaLore", "APOLLO")) and key != "step":
                assert value.placements == (_placement(key, param),), key
    return found


def _placement(key: str, param: Any) -> Placement:
    """The placement that docs/optimizers/soap.md promises of a state in a checkpoint."""
    (cut,), rows = param.placements, param.ndim - 2
    if cut.dim < rows or key.startswith(("exp_avg", "momentum")):
        return cast("Placement", cut)
    own, other = ("L", "R") if cut.dim == rows else ("R", "L")
    dims = {own: rows, other: rows + 1}
    at = dims.get(key.removeprefix("Q_"))
    return Replicate() if at is None else Shard(at)


def goes_on(name: str, layout: Any) -> tuple[bool, bool]:
    """Whether steps are the same after a checkpoint was taken between them, and after it was loaded."""
    runs = []
    for what in ("straight", "synchronized", "loaded"):
        params = _params(layout)
        optimizer = _optimizer(name, params, layout)
        _steps(optimizer, params, layout, 3)
        if what != "straight":
            optimizer.synchronize_for_checkpoint()
        if what == "loaded":
            saved = optimizer.state_dict()
            optimizer = _optimizer(name, params, layout)
            optimizer.load_state_dict(saved)
        _steps(optimizer, params, layout, 3, seed=1)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    straight, *others = runs
    synchronized, loaded = (all(map(torch.equal, straight, other)) for other in others)
    return synchronized, loaded


def elements(name: str, layout: Any, owned: bool) -> tuple[int, int]:
    """Elements of the moments and of all other states that this rank has."""
    params = _params(layout)
    optimizer = _optimizer(name, params, layout, owned_states=owned)
    _steps(optimizer, params, layout, 2)
    held = [(key, v) for own in optimizer.state.values() for key, v in own.items() if key != "step"]
    of_moments = ("exp_avg", "momentum")
    counts = [(key.startswith(of_moments), getattr(v, "_local_tensor", v).numel()) for key, v in held]
    moments = sum(count for is_moment, count in counts if is_moment)
    return moments, sum(count for _, count in counts) - moments


def more_parameters() -> None:
    """Another group is refused while states are sharded by the previous plan, and taken after a gather."""
    layout = ("S", 0)
    # One matrix of each shape: the costlier ones of the second group change who owns those of the first.
    first = [_weights((shape,), layout) for shape in ((12, 8), (9, 14))]
    more = _weights(((16, 24),), layout)
    optimizer = _optimizer("SOAP", [param for (param,) in first], layout)
    for param in (*optimizer.param_groups[0]["params"], *more):
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.add_param_group({"params": more})
    with pytest.raises(Exception, match="synchronize_for_checkpoint"):
        optimizer.step()
    optimizer.synchronize_for_checkpoint()
    optimizer.step()


def refused(name: str) -> list[bool]:
    """Whether the way that a refused step names works: one of a weight that is unfrozen."""
    shapes = ((12, 8), (9, 14), (16, 16), (6, 5))
    params = _weights(shapes, None)
    optimizer = _optimizer(name, params, None)
    params[2].requires_grad_(False)
    for is_frozen in (True, False):
        params[2].requires_grad_(not is_frozen)
        for param in params:
            param.grad = None if is_frozen and param is params[2] else torch.ones_like(param)
        if is_frozen:
            optimizer.step()
            continue
        with pytest.raises((oxidion.LayoutError, oxidion.PlanMismatch)):
            optimizer.step()
    held = [key for key in optimizer.state[params[2]] if key != "step"]
    optimizer.synchronize_for_checkpoint()
    optimizer.step()
    return [not held, all(bool(param.isfinite().all()) for param in params)]


def frozen() -> list[float]:
    """Distances from one process, which has all states, after a weight is frozen and then unfrozen."""
    layout, pairs = ("S", 0), []
    for owned in (True, False):
        params = _params(layout if owned else None)
        optimizer = _optimizer("SOAP", params, layout) if owned else _alone("SOAP", params)
        _steps(optimizer, params, layout if owned else None, 3)
        for is_frozen in (True, False):
            params[1].requires_grad_(not is_frozen)
            params[1].grad = None  # one with a gradient takes part still
            optimizer.synchronize_for_checkpoint()
            for param in params:
                param.grad = None if param is params[1] and is_frozen else param.detach().clone() + 0.5
            optimizer.step()
        optimizer.synchronize_for_checkpoint()
        pairs.append((params, _states(optimizer)))
    (mine, own), (theirs, other) = pairs
    states = [_differ([*a.values()], [b[key] for key in a]) for a, b in zip(own, other, strict=True)]
    return [_differ([*mine], [*theirs]), *states]


def frozen_without_loading() -> None:
    """A weight that is frozen between two steps: the call that the error names resolves it."""
    params = _params(("S", 0))
    optimizer = _optimizer("SOAP", params, ("S", 0))
    _steps(optimizer, params, ("S", 0), 3)
    params[1].requires_grad_(False)  # the costliest: the owners of others change
    params[1].grad = None
    optimizer.synchronize_for_checkpoint()
    for own in _states(optimizer):
        assert all(value.shape == () or hasattr(value, "placements") for value in own.values())
    optimizer.step()
    params[1].requires_grad_(True)
    for param in params:
        param.grad = param.detach().clone()
    with pytest.raises(Exception, match="synchronize_for_checkpoint"):
        optimizer.step()
    optimizer.synchronize_for_checkpoint()
    optimizer.step()


def switched(name: str, layout: Any) -> list[float]:
    """Distances from a run without owners of one that sets ``owned_states`` off and on between steps."""
    weights = []
    for owned in (True, False):
        params = _params(layout)
        optimizer = _optimizer(name, params, layout, owned_states=owned)
        (group,) = optimizer.param_groups
        _steps(optimizer, params, layout, 3)
        if owned:
            group["owned_states"] = False
            with pytest.raises(Exception, match="synchronize_for_checkpoint"):
                optimizer.step()
            optimizer.synchronize_for_checkpoint()
        _steps(optimizer, params, layout, 3, seed=1)
        if owned:
            group["owned_states"] = True
        _steps(optimizer, params, layout, 3, seed=2)
        weights.append(params)
    return [_differ([a], [b]) for a, b in zip(*weights, strict=True)]


def of_other_bits(bits: int) -> bool:
    """Whether a run goes on alike from states of 8 or 32 bits where its group says the other."""
    runs = []
    for layout in (("S", 0), None):
        params = _params(layout)
        first = _optimizer("SOAP quantized", params, layout or ("alone",), state_bits=bits)
        _steps(first, params, layout, 3)
        first.synchronize_for_checkpoint()
        second = _optimizer("SOAP quantized", params, layout or ("alone",), state_bits=40 - bits)
        second.load_state_dict({**first.state_dict(), "param_groups": second.state_dict()["param_groups"]})
        _steps(second, params, layout, 3, seed=1)
        second.synchronize_for_checkpoint()
        runs.append((params, [own["exp_avg_sq"] for own in _states(second)]))
    (mine, quantized), (theirs, others) = runs
    for value in (*quantized, *others):
        assert (value.dtype == torch.uint8) == (bits == 8)
    return _differ([*mine], [*theirs]) <= 1e-9 and _differ(quantized, others) <= 1e-9


def gathered(name: str, how: str) -> bool:
    """Whether state dicts are whole without a call: by a hook, or since ``owned_states`` is off."""
    layout, runs = ("S", 0), []
    keys = {**settings(name), "owned_states": how == "hook"}
    for is_saved in (False, True):
        params = _params(layout)
        if how == "hook":  # that of torchtitan's optimizers
            made: Any = getattr(oxidion, name)
            optimizer: Any = titan._make(made, [{"params": params, "lr": 2.0**-6}], **keys)
        else:
            optimizer = _optimizer(name, params, layout, **keys, init_state=True)
        assert not any(value.any() for own in _states(optimizer) for value in own.values())
        _steps(optimizer, params, layout, 3)
        blocks = [v for own in optimizer.state.values() for v in own.values() if v.shape[:2] == (1, 1)]
        assert blocks
        if is_saved:
            saved = _states(optimizer)
            assert all(getattr(own["exp_avg_sq"], "_local_tensor", None) is not None for own in saved)
        _steps(optimizer, params, layout, 3, seed=1)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    return all(map(torch.equal, *runs))


def spoiled(name: str) -> list[float]:
    """Distances of bases and factors from one process's, which keeps its own, after a NaN on one rank."""
    runs: list[list[dict[str, Tensor]]] = []
    for layout in (("S", 0), None):
        params = _params(layout)
        optimizer = _optimizer(name, params, layout) if layout else _alone(name, params)
        _steps(optimizer, params, layout, 3)
        for param in params:
            param.grad = torch.zeros_like(param)
            # The last row is rank 1's: in the run of one process both are.
            if layout is None or dist.get_rank() == 1:
                getattr(param.grad, "_local_tensor", param.grad)[-1] = float("nan")
        optimizer.step()
        optimizer.synchronize_for_checkpoint()
        runs.append(_states(optimizer))
    of_bases = [
        (n, key) for n, own in enumerate(runs[0]) for key in own if key[0] in "LRQ" or key[:5] == "eigen"
    ]
    assert len(of_bases) >= 10
    return [_differ([runs[0][n][key]], [runs[1][n][key]]) for n, key in of_bases]


def in_hand() -> bool:
    """Whether a state dict stays as it is when steps go on, and copies of optimizers are whole or refused."""
    params = _params(("S", 0))
    optimizer = _optimizer("SOAP", params, ("S", 0))
    _steps(optimizer, params, ("S", 0), 3)
    with pytest.raises(RuntimeError, match="synchronize_for_checkpoint"):
        copy.deepcopy(optimizer)
    with torch.inference_mode():
        optimizer.synchronize_for_checkpoint()
    saved = optimizer.state_dict()
    kinds = [{key: type(value) for key, value in own.items()} for own in saved["state"].values()]
    # The stack of the third weight is cut between its matrices: its states are where they were.
    before = [jobs.whole(saved["state"][at]["L"]).clone() for at in (0, 1)]
    twin = copy.deepcopy(optimizer)
    optimizer.step()
    assert kinds == [{key: type(value) for key, value in own.items()} for own in saved["state"].values()]
    assert all(map(torch.equal, before, [jobs.whole(saved["state"][at]["L"]) for at in (0, 1)]))
    twin.load_state_dict(twin.state_dict())
    mine = _params(("S", 0))
    for param, own in zip(twin.param_groups[0]["params"], mine, strict=True):
        param.grad = own.detach()
    twin.step()
    return True


def all_states_at_once() -> None:
    """A group more of an optimizer that makes states when it is made."""
    params = _params(("S", 0))
    optimizer = _optimizer("SOAP", params[:1], ("S", 0), init_state=True)
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.synchronize_for_checkpoint()
    optimizer.add_param_group({"params": params[1:]})
    assert all(optimizer.state[param] for param in params)
    optimizer.step()


def sums_of_one_process(layout: Any) -> dict[str, float]:
    """Distances of a factor that is a sum over ranks from what one process has; and those of weights."""
    shapes = ((12, 8), (14, 9), (3, 6, 5))  # the side that is not cut is the shorter one
    params, whole = _weights(shapes, layout), _weights(shapes, None)
    optimizer = _optimizer("SOAP sums", params, layout)
    _steps(optimizer, params, layout, 4, shapes=shapes)
    with pytest.raises(RuntimeError, match=r"sum to which ranks add.*synchronize_for_checkpoint"):
        optimizer.state_dict()
    for param in params:
        param.grad = param.detach().clone() + 0.5
    rows = optimizer.verify()
    optimizer.synchronize_for_checkpoint()
    states = _states(optimizer)
    alone = oxidion.SOAP(whole, 2.0**-6, precondition_frequency=2, sides="short")
    _steps(alone, whole, None, 4, shapes=shapes)
    found = {"weights": _differ([*params], [*whole]), "verify": max(row["update_error"] for row in rows)}
    for mine, theirs in zip(states, _states(alone), strict=True):
        assert mine.keys() == theirs.keys()
        found |= {key: max(found.get(key, 0.0), _differ([mine[key]], [theirs[key]])) for key in mine}
    return found


def sums_go_on(layout: Any) -> tuple[bool, float]:
    """Whether steps after a checkpoint are those after loading it; and how far from a run without one."""
    runs = []
    for what in ("straight", "synchronized", "loaded"):
        params = _params(layout)
        optimizer = _optimizer("SOAP sums", params, layout)
        _steps(optimizer, params, layout, 3)
        if what != "straight":
            optimizer.synchronize_for_checkpoint()
            optimizer.synchronize_for_checkpoint()  # a sum of sums would be another
        if what == "loaded":
            saved = optimizer.state_dict()
            optimizer = _optimizer("SOAP sums", params, layout)
            optimizer.load_state_dict(saved)
        _steps(optimizer, params, layout, 5, seed=1)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    straight, synchronized, loaded = runs
    return all(map(torch.equal, synchronized, loaded)), _differ(synchronized, straight)


def verified(name: str, layout: Any) -> list[float]:
    """What `verify` says between steps, and whether it changed anything."""
    params = _params(layout)
    optimizer = _optimizer(name, params, layout)
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
    optimizer = _optimizer("SOAP", params, ("S", 0))
    ready = [type(v).__name__ for own in _initialized(params) for v in own.values()]
    optimizer.param_groups[0]["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    made = [type(v).__name__ for own in _states(optimizer) for k, v in own.items() if k != "step"]
    return {*made, *(name for name in ready if name != "Tensor")}


def _initialized(params: list[nn.Parameter]) -> list[dict[str, Tensor]]:
    optimizer = _optimizer("SOAP", params, ("S", 0), init_state=True)
    return _states(optimizer)


def late(name: str, layout: Any) -> list[float]:
    """Distances from one process where weights have no gradient before the second step."""
    runs = []
    for owned in (True, False):
        params = _params(layout if owned else None)
        optimizer = _optimizer(name, params, layout) if owned else _alone(name, params)
        for step in range(4):
            for number, param in enumerate(params):
                param.grad = None if step == 0 and number != 1 else param.detach().clone() + 0.5 * (step + 1)
            optimizer.step()
        runs.append(params)
    return [_differ([a], [b]) for a, b in zip(*runs, strict=True)]


def with_a_rate_of_none() -> bool:
    """Whether SOAP's sums work together with a group without a learning rate."""
    params = _params(("S", 0))
    groups = [{"params": params[:1], "sides": "unsharded"}, {"params": params[1:2], "algorithm": "adafactor"}]
    groups[1] |= {"lr": None, "relative_step": True}
    optimizer = oxidion.SOAP(groups)
    for param in params[:2]:
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.synchronize_for_checkpoint()
    return bool(optimizer.state_dict()["state"])


def replaced(name: str, layout: Any) -> list[bool]:
    """Whether replacing states, in blocks or whole, leaves the steps as they are without replacing."""
    runs, shapes = [], list[list[torch.Size]]()
    for what in ("straight", "in blocks", "whole", "both", "through load_state_dict"):
        params = _params(layout)
        optimizer = _optimizer(name, params, layout)

        def replace(optimizer: Any = optimizer) -> None:
            for states in optimizer.state.values():
                states.update({key: value.detach().clone() for key, value in states.items()})

        _steps(optimizer, params, layout, 3)
        if what in ("in blocks", "both"):
            replace()
        optimizer.synchronize_for_checkpoint()
        if what in ("whole", "both"):
            replace()
        found = [[value.shape for value in states.values()] for states in _states(optimizer)]
        shapes = shapes or found
        assert found == shapes
        if what == "through load_state_dict":
            optimizer.load_state_dict(optimizer.state_dict())
        _steps(optimizer, params, layout, 2, seed=1)
        if what in ("in blocks", "both"):
            replace()
        _steps(optimizer, params, layout, 2, seed=2)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    straight, *others = runs
    return [all(map(torch.equal, straight, other)) for other in others]


def one_rank_asks_first(layout: Any) -> bool:
    """Whether a state dict that one rank alone takes before the first step changes nothing."""
    runs = []
    for is_asked in (False, True):
        params = _params(layout)
        optimizer = _optimizer("SOAP", params, layout, init_state=True)
        if is_asked and dist.get_rank() == 0:
            optimizer.state_dict()
        _steps(optimizer, params, layout, 3)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    return all(map(torch.equal, *runs))


def damaged(layout: Any) -> bool:
    """A state replaced by one of another shape or dtype is refused by name, and nothing is lost."""
    params = _params(layout)
    optimizer = _optimizer("SOAP", params, layout)
    _steps(optimizer, params, layout, 3)
    optimizer.synchronize_for_checkpoint()
    before = [{key: jobs.whole(value).clone() for key, value in own.items()} for own in _states(optimizer)]
    right = optimizer.state[params[0]]["exp_avg"]
    for wrong in (torch.zeros(3, dtype=torch.float64), torch.zeros(12, 8, dtype=torch.int64)):
        optimizer.state[params[0]]["exp_avg"] = wrong
        with pytest.raises(ValueError, match="parameter 0 of group 0: state 'exp_avg'"):
            optimizer.step()
    optimizer.state[params[0]]["exp_avg"] = right
    after = [{key: jobs.whole(value).clone() for key, value in own.items()} for own in _states(optimizer)]
    return all(torch.equal(a[key], b[key]) for a, b in zip(before, after, strict=True) for key in a)


def filled_by_data() -> bool:
    """States that are filled before the first step, whatever way, are those that steps go on from."""
    runs = []
    for is_loaded in (False, True):
        params = _params(("S", 0))
        optimizer = _optimizer("SOAP", params, ("S", 0))
        _steps(optimizer, params, ("S", 0), 3)
        optimizer.synchronize_for_checkpoint()
        if is_loaded:
            saved = optimizer.state_dict()
            optimizer = _optimizer("SOAP", params, ("S", 0), init_state=True)
            empty = optimizer.state_dict()
            for number, own in saved["state"].items():
                for key, value in own.items():
                    target = empty["state"][number][key]
                    getattr(target, "_local_tensor", target).data.copy_(
                        getattr(value, "_local_tensor", value)
                    )
            optimizer.load_state_dict({**empty, "param_groups": saved["param_groups"]})
        _steps(optimizer, params, ("S", 0), 3, seed=1)
        runs.append([jobs.whole(p).detach().clone() for p in params])
    return all(map(torch.equal, *runs))
