"""Steps on copies, for ``metrics()`` and ``verify()``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from oxidion._core import masters
from oxidion._core.owned import OwnerSharded
from oxidion._core.state import SCALES, entries_of, is_own, key_of, parameters, whole
from oxidion._core.stepper import Stepper
from oxidion._core.table import Table
from oxidion._dist.collectives import all_gather_object, average
from oxidion._dist.comm import full, is_distributed, local, with_local

EXPECTED = "expected"
"""Column of the error that types and ranks explain."""

ROUNDINGS = 4
"""The number of roundings of the operands in a step, as far as that counts in ``expected``."""


def _copy(tensor: Tensor) -> Tensor:
    return with_local(tensor, local(tensor).detach().clone())


def _twin(optimizer: Stepper, *, wide: bool = False) -> Stepper:
    """An optimizer of the same settings over copies of parameters, gradients and states.

    Args:
        optimizer: that is copied.
        wide: whether parameters of 16 bits are float64 there, where no update is lost.
    """
    owned, optimizer._owned = optimizer._owned, OwnerSharded()  # what is in blocks is copied below
    try:
        twin = copy.copy(optimizer)
    finally:
        optimizer._owned = owned
    twin._meshes, twin._has_logged = optimizer._meshes, True
    twins = {}
    for param in parameters(optimizer.param_groups):
        is_wide = wide and param.dtype in masters.NARROW
        held = masters.whole_weight(param, optimizer.state.get(param, {})).double() if is_wide else param
        clone = _copy(held).requires_grad_(param.requires_grad)
        if hasattr(param, "grad_dtype"):
            clone.grad_dtype = param.grad_dtype if clone.dtype == param.dtype else None
        clone.grad = None if param.grad is None else _copy(param.grad)
        twins[param] = clone
    twin.param_groups = [
        {
            **group,
            "average": None,
            "params": [twins[param] for param in group["params"]],
            **({masters.SETTING: False, "stochastic_rounding": False} if wide else {}),
        }
        for group in optimizer.param_groups
    ]
    twin.state = type(optimizer.state)(dict)
    for _, param, entries in entries_of(optimizer.state, optimizer.param_groups):
        twin.state[twins[param]] = {
            key: _copy(value) if isinstance(value, Tensor) else copy.deepcopy(value)
            for key, value in entries.items()
            if is_own(key) and not (wide and key == masters.KEY)
        }
    twin._owned = optimizer._owned.clone_for(twins)
    masters.drop_others(twin.param_groups, twin.state)
    return twin


def merged(found: dict[str, list[Any]], groups: Iterable[Any]) -> dict[str, list[Any]]:
    """Lists by name of all ranks of the groups, each entry once."""
    for group in groups:
        gathered = all_gather_object(found, group)
        found = {
            key: sorted({entry for one in gathered for entry in one.get(key, ())})
            for one in gathered
            for key in one
        }
    return found


def _rms(tensor: Tensor) -> float:
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0


def metrics(optimizer: Stepper) -> Table:
    """The table of ``OxOptimizer.metrics``."""
    twin = _twin(optimizer)
    session = twin._bind(together=True)
    params = parameters(twin.param_groups)
    before = [_weight(twin, param) for param in params]
    session.measure(True)
    twin._execute()
    idle = session.idle()
    measured, milliseconds = session.measurements()
    # A matrix that has an owner is measured by its owner.
    measured = merged(measured, (twin._groups or {}).values())
    plan = twin._make_plan()
    lost = _lost_updates(
        optimizer, [_weight(twin, param) - old for param, old in zip(params, before, strict=True)]
    )
    rows = []
    for index, (row, param, old) in enumerate(zip(plan.rows(), params, before, strict=True)):
        entry: dict[str, Any] = {"name": row["name"], "algorithm": row["algorithm"]}
        entry["update_rms"] = _rms(_weight(twin, param) - old)
        entry["param_rms"] = _rms(old)
        if lost:
            entry["lost_updates"] = lost[index]
        for key in sorted(measured, key=lambda name: (name == EXPECTED, name)):
            own = [value for at, value in measured[key] if at == index]
            entry[key] = max(own) if own else None
        rows.append(entry)
    return Table(
        rows,
        stages=dict(enumerate(milliseconds)),
        bytes_sent=sum(t["send"][1] for k, t in enumerate(plan.transfers) if k not in idle),
    )


def _weight(optimizer: Stepper, param: Tensor) -> Tensor:
    """A copy of the whole weight on every rank, with the low half where there is one."""
    return full(masters.whole_weight(param, optimizer.state.get(param, {}))).detach().clone()


def _lost_updates(optimizer: Stepper, updates: list[Tensor]) -> list[float | None]:
    """By parameter of 16 bits with a gradient the share of its elements whose update rounding has taken away.

    Args:
        optimizer: before the step.
        updates: of all parameters in the step.

    Returns:
        Shares, None for other parameters; nothing where there are none of 16 bits.
    """
    params = parameters(optimizer.param_groups)
    if not any(param.dtype in masters.NARROW for param in params):
        return []
    held = [bool(group.get(masters.SETTING)) for group in optimizer.param_groups for _ in group["params"]]
    narrow = [param.dtype in masters.NARROW and param.grad is not None for param in params]
    if all(own for own, is_narrow in zip(held, narrow, strict=True) if is_narrow):
        return [0.0 if is_narrow else None for is_narrow in narrow]
    twin = _twin(optimizer, wide=True)
    twin._bind(together=True)
    wide = parameters(twin.param_groups)
    before = [_weight(twin, param) for param in wide]
    twin._execute()
    shares: list[float | None] = []
    for param, old, update, is_narrow in zip(wide, before, updates, narrow, strict=True):
        lost = (_weight(twin, param) != old) & (update == 0)
        shares.append(float(lost.double().mean()) if is_narrow and lost.numel() else None)
    return shares


def _has_reference(settings: Mapping[str, Any], group: dict[str, Any], param: Any) -> bool:
    """True where one process would take the same step: no setting makes it depend on shards."""
    if not is_distributed(param) or all(group[key] != value for key, value in settings.items()):
        return True
    sizes = zip(param.device_mesh.shape, param.placements, strict=True)
    return all(size == 1 or placement.is_replicate() for size, placement in sizes)


def _reference_step(
    row: dict[str, Any], target: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """A naive step in float64 on ``target`` and ``state``."""
    from oxidion._reference.registry import REFERENCE

    step: Callable[[Tensor, Tensor, dict[str, Any], dict[str, Any]], None] | None = REFERENCE.get(
        row["algorithm"]
    )
    if step is None:
        raise NotImplementedError(f"{row['algorithm']} has no naive reference to verify against")
    step(target, grad, state, group)


def _with_norms(twin: Stepper) -> list[dict[str, Any]]:
    """The groups, with the norm of all gradients where a group limits it."""
    from oxidion._reference.update import grad_norm

    groups = []
    for group in twin.param_groups:
        if group.get("max_grad_norm") is not None:
            grads = [_mean(twin, param.grad) for param in group["params"] if param.grad is not None]
            group = {**group, "grad_norm": grad_norm(grads)}
        groups.append(group)
    return groups


def verify(optimizer: Stepper) -> Table:
    """The table of ``OxOptimizer.verify``."""
    twin = _twin(optimizer)
    for group in twin.param_groups:
        # Compared with the rounded reference: the step is what is looked at, not where chance rounds it to.
        group["stochastic_rounding"] = False
    twin._bind(together=True)
    plan = twin._make_plan()
    params = parameters(twin.param_groups)
    groups = [group for group in _with_norms(twin) for _ in group["params"]]
    rows, lines = [], twin._read_groups()
    rows_of = zip(plan.rows(), plan.state_specs(), plan.streams, params, groups, strict=True)
    for row, specs, stream, param, group in rows_of:
        entry: dict[str, Any] = {
            "name": row["name"],
            "algorithm": row["algorithm"],
            "update_error": None,
            EXPECTED: None,
        }
        sharding = twin._class_of(row["algorithm"])._LAYOUT_SETTINGS
        if param.grad is not None and _has_reference(sharding, group, param):
            public = twin._STATE_NAMES.get(row["algorithm"], {})
            own = twin.state[param]
            by_role = {spec["role"]: spec for spec in specs}
            state = {
                role: _mean(twin, whole(own, key_of(role, public), by_role, role, lines))
                for role in by_role
                if not role.endswith(SCALES) and role != masters.KEY
            }
            grad = _mean(twin, param.grad)
            gathered = {"transposed": row["transposed"], "stream": stream, "on_device": param.is_cuda}
            gathered["dtype"] = masters.weight(param, own).dtype
            gathered["state_types"] = {role: own[key_of(role, public)].dtype for role in state}
            settings = {**group, **twin._functions, **gathered}
            entry["start"], entry["reference"], entry["rounded"] = (
                _weight(twin, param).double().cpu() for _ in range(3)
            )
            products = row["roundoff"] or _roundoff("float64" if param.dtype == torch.float64 else "float32")
            rounded = {key: _disturbed(value, products) for key, value in state.items()}
            _reference_step(row, entry["rounded"], _disturbed(grad, products), rounded, settings)
            _reference_step(row, entry["reference"], grad, state, settings)
        rows.append(entry)
    twin._execute()
    for entry, param in zip(rows, params, strict=True):
        if "reference" in entry:
            start, reference, rounded = (entry.pop(key) for key in ("start", "reference", "rounded"))
            # The weight can hold no more than the rounded reference: rounding it is no error of the step.
            got = _weight(twin, param)
            dtype, got = got.dtype, got.double().cpu()
            wanted = reference.to(dtype).double()
            size = float((reference - start).norm())
            entry["update_error"] = float((got - wanted).norm()) / (size or 1.0)
            own = _roundoff(str(dtype).removeprefix("torch.")) * float(reference.norm())
            entry[EXPECTED] = (ROUNDINGS * float((rounded - reference).norm()) + own) / (size or 1.0)
    return Table(rows)


def _roundoff(dtype: str) -> float:
    """Largest relative error of rounding to a dtype."""
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


def _disturbed(tensor: Tensor, roundoff: float) -> Tensor:
    """A copy whose elements are changed by up to the roundoff, by numbers that are the same each time."""
    if not tensor.is_floating_point():
        return tensor.clone()
    chance = torch.Generator().manual_seed(0)
    noise = torch.rand(tensor.shape, dtype=torch.float64, generator=chance) * 2 - 1
    return tensor * (1 + roundoff * noise)


def _mean(optimizer: Stepper, tensor: Tensor) -> Tensor:
    """A float64 copy of the whole tensor on the CPU, the mean where the optimizer averages over replicas."""
    whole = full(tensor).detach().double().clone()
    average([whole], optimizer._meshes.pending.values())
    return whole.cpu()
