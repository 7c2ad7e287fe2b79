"""Meshes, process groups and DTensors: with `collectives` all that touches ``torch.distributed``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from oxidion._oxidion import LayoutError, axes_of
from oxidion._torch.compat import dtensor, root_mesh

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Ranks = tuple[int, ...]
Groups = dict[Ranks, "ProcessGroup"]
RootAxes = dict[tuple[Ranks, int], tuple[Ranks, Callable[[], "ProcessGroup"]]]


@dataclass(frozen=True)
class Meshes:
    """The axes that a user passed to a constructor.

    Attributes:
        replicas: name, global ranks, this process's place and whether gradients are averaged, by axis.
        outer: ranks of ``outer_shard_mesh``.
        inner: ranks of ``inner_shard_mesh``.
        groups: the process group of each axis by its ranks.
        check: whether each step checks that gradients are averaged if and only if they should be.
        argument: the argument that named the replicas.
    """

    replicas: list[tuple[str, list[int], int, bool]] = field(default_factory=list)
    outer: list[int] | None = None
    inner: list[int] | None = None
    groups: Groups = field(default_factory=dict)
    check: bool = False
    argument: str = "replicate_mesh"

    def __deepcopy__(self, _memo: object) -> Meshes:
        """Returns these meshes: process groups cannot be copied."""
        return self

    def __reduce__(self) -> Any:
        """Refuses to be pickled."""
        raise TypeError("an optimizer with meshes or process groups cannot be pickled: save its state_dict()")

    @property
    def pending(self) -> Groups:
        """The groups over which the optimizer averages."""
        wanted = [tuple(ranks) for _, ranks, _, averaged in self.replicas if not averaged and len(ranks) > 1]
        return {ranks: self.groups[ranks] for ranks in wanted}


NO_MESHES = Meshes()


def _lines(name: str, mesh: Any) -> list[tuple[str, Ranks, int, ProcessGroup]]:
    """Name, ranks, this process's place and group of each axis of a mesh or process group.

    Raises:
        TypeError: for anything else.
    """
    if not torch.distributed.is_available():
        raise TypeError(f"{name} must be None where torch.distributed is not available, got {mesh!r}")
    try:
        axes = axes_of(mesh)
    except TypeError as error:
        raise TypeError(f"{name} {error}") from None
    groups = [mesh.get_group(i) for i in range(mesh.ndim)] if hasattr(mesh, "get_group") else [mesh]
    for group in groups:
        _note(group)
    if any(group.rank() != place for (_, _, place), group in zip(axes, groups, strict=True)):
        raise ValueError(
            f"{name} orders its ranks otherwise than its process group: build it with ranks ascending"
        )
    own = name.removesuffix("_mesh")
    return [(axis or own, tuple(r), at, g) for (axis, r, at), g in zip(axes, groups, strict=True)]


def read_meshes(
    replicate: tuple[str, Any, bool], outer: Any = None, inner: Any = None, *, check: bool = False
) -> Meshes:
    """The meshes of a constructor.

    Args:
        replicate: name of the argument, a mesh or process group whose ranks hold copies or None, and whether
            gradients are equal on those ranks.
        outer: 1-D mesh or None.
        inner: 1-D mesh or None.
        check: see ``Meshes``.

    Raises:
        TypeError: for anything but a ``DeviceMesh`` or ``ProcessGroup``.
        ValueError: for meshes that are the same or have more than one dimension.
    """
    if not check and replicate[1] is None and outer is None and inner is None:
        return NO_MESHES
    groups: Groups = {}
    replicas, shards = [], []
    name, mesh, averaged = replicate
    for axis, ranks, place, group in [] if mesh is None else _lines(name, mesh):
        replicas.append((axis, list(ranks), place, averaged))
        groups[ranks] = group
    for name, mesh in (("outer_shard_mesh", outer), ("inner_shard_mesh", inner)):
        lines = [] if mesh is None else _lines(name, mesh)
        if len(lines) > 1:
            raise ValueError(
                f"{name} must have one dimension, got {len(lines)}: pass the sub-mesh, mesh['name']"
            )
        for _, ranks, _, group in lines:
            if len(ranks) > 1 and ranks in groups:
                raise ValueError(f"{name} has the ranks {list(ranks)} of another mesh argument")
            groups[ranks] = group
        shards.append(list(lines[0][1]) if lines else None)
    return Meshes(replicas, shards[0], shards[1], groups, check, replicate[0])


def check_same(name: str, mesh: Any, other: str, wanted: Any) -> None:
    """Refuses two words for one mesh that have other ranks; None was not given.

    Raises:
        TypeError: for anything but a ``DeviceMesh`` or ``ProcessGroup``.
        ValueError: that names both words.
    """
    if mesh is None or wanted is None:
        return
    ranks, theirs = ([list(line[1]) for line in _lines(*of)] for of in ((name, mesh), (other, wanted)))
    if ranks != theirs:
        raise ValueError(
            f"{name} and {other} are two words for one mesh and must have the same ranks, got {ranks} and "
            f"{theirs}: leave one of them out"
        )


def groups_of(params: Iterable[Tensor], meshes: Meshes) -> Groups:
    """The process group of every axis of more than one rank that the parameters live on.

    Their order is that of `ordered`, which does not depend on the order of the parameters.

    Raises:
        LayoutError: for a mesh whose ranks are in another order than its process group's.
        RuntimeError: for a process group that was destroyed.
    """
    groups: Groups = {}
    seen: set[int] = set()
    for param in params:
        mesh = getattr(param, "device_mesh", None)
        if mesh is None or id(mesh) in seen:
            continue
        seen.add(id(mesh))
        for dim, (_, ranks, place) in enumerate(axes_of(mesh)):
            if len(ranks) > 1:
                group = _group_of(mesh, dim, tuple(ranks))
                if group.rank() != place:
                    raise LayoutError(
                        f"dimension {dim} of {mesh} orders its ranks otherwise than its process group: build "
                        "the mesh with ranks in ascending order"
                    )
                groups.setdefault(tuple(ranks), group)
    groups.update({ranks: group for ranks, group in meshes.groups.items() if len(ranks) > 1})
    check_alive(groups, meshes)
    return ordered(groups)


_known: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
"""Groups that torch knew when an optimizer read them. It never knows those that other packages make."""


def _is_registered(group: ProcessGroup) -> bool:
    """True for a group that torch knows; False once it was destroyed."""
    try:
        torch.distributed.get_backend(group)
    except (KeyError, TypeError, ValueError):  # a TypeError in torch 2.7
        return False
    return True


def _note(group: ProcessGroup) -> None:
    if _is_registered(group):
        _known.add(group)


def _group_of(mesh: Any, dim: int, ranks: Ranks) -> ProcessGroup:
    """The process group of a dimension of a mesh of a parameter, which torch finds by a name.

    Raises:
        RuntimeError: where no group has that name any more, or one of other ranks has.
    """
    try:
        group: ProcessGroup = mesh.get_group(dim)
    except RuntimeError as error:
        if "resolve the process group" not in str(error):
            raise
        raise RuntimeError(_destroyed(ranks, NO_MESHES)) from error
    _note(group)
    if group in _known and sorted(torch.distributed.get_process_group_ranks(group)) != sorted(ranks):
        raise RuntimeError(_destroyed(ranks, NO_MESHES))
    return group


def check_alive(groups: Groups, meshes: Meshes) -> None:
    """Refuses groups that were destroyed since they were read.

    Some backends go on with such a group, others fail with a text that names none of this.

    Raises:
        RuntimeError: that says how to go on.
    """
    for ranks, group in groups.items():
        if not _is_registered(group) and group in _known:
            raise RuntimeError(_destroyed(ranks, meshes))


def _destroyed(ranks: Ranks, meshes: Meshes) -> str:
    if ranks in meshes.groups:
        shards = tuple(meshes.outer or ()), tuple(meshes.inner or ())
        name = "outer_shard_mesh and inner_shard_mesh" if ranks in shards else meshes.argument
        way_on = f"Make a new optimizer whose {name} is a mesh made now, by init_device_mesh(...)"
    else:
        way_on = (
            "Shard the model on a mesh made now, by init_device_mesh(...), and make a new optimizer of it"
        )
    return (
        f"the optimizer needs the process group of the ranks {list(ranks)}, and destroy_process_group() has "
        f"destroyed it. {way_on}. Then call new.load_state_dict(old.state_dict()), or load a checkpoint"
    )


def ordered(groups: Groups) -> Groups:
    """Groups sorted by axis, the outermost first.

    All ranks of a mesh have its axes in the same order, and any lines that share ranks are in one order for
    all of them: ranks that take their lines in turn never wait in a circle.
    """
    return dict(sorted(groups.items(), key=lambda item: (item[0][0] - item[0][1], -len(item[0]), item[0])))


def root_axes(params: Iterable[Tensor]) -> RootAxes:
    """The axes of the meshes that those of the parameters were cut from.

    Returns:
        By shape of the whole mesh and dimension, which are the same on all ranks: the ranks of the line
        through this process, and what gives their group.
    """
    found: RootAxes = {}
    for root in {id(m): m for p in params if (m := _root(p)) is not None}.values():
        for dim, (_, ranks, _) in enumerate(axes_of(root)):
            if len(ranks) > 1:
                found[tuple(root.mesh.shape), dim] = tuple(ranks), partial(root.get_group, dim)
    return found


def _root(param: Tensor) -> Any:
    return root_mesh(getattr(param, "device_mesh", None))


def mesh_of(group: Any, device: str) -> Any:
    """A mesh of one dimension over the ranks of a process group."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device)


def sharded(own: Tensor, mesh: Any, dim: int) -> Tensor:
    """Returns a DTensor of equal shards along a dimension; ``own`` is this process's shard."""
    from torch.distributed.tensor import DTensor, Shard

    whole: Tensor = DTensor.from_local(own, mesh, [Shard(dim)], run_check=False)
    return whole


def lines_of(param: Tensor) -> list[Ranks]:
    """The ranks of each axis of more than one that a parameter lives on; none of a plain tensor."""
    mesh = getattr(param, "device_mesh", None)
    lines = [] if mesh is None else [tuple(ranks) for _, ranks, _ in axes_of(mesh)]
    return [ranks for ranks in lines if len(ranks) > 1]


def shares_ranks(name: str, mesh: Any, params: Iterable[Tensor]) -> bool:
    """Returns True if an axis of ``mesh`` shares ranks with a different axis of a parameter's mesh.

    The ranks of such an axis cannot all hold copies of that parameter.

    Args:
        name: the name of the mesh in an error.
        mesh: a mesh or process group.
        params: parameters; only DTensors are considered.

    Raises:
        TypeError: for anything but a ``DeviceMesh`` or ``ProcessGroup``.
    """
    axes = [ranks for _, ranks, _, _ in _lines(name, mesh)]
    first_of_each = {id(getattr(param, "device_mesh", None)): param for param in params}
    for lines in map(lines_of, first_of_each.values()):
        for ranks in axes:
            if ranks not in lines and any(len({*ranks} & {*line}) > 1 for line in lines):
                return True
    return False


def is_distributed(value: object) -> bool:
    """True for a DTensor."""
    return hasattr(value, "_local_tensor")


def is_mesh(value: object) -> bool:
    """True for a device mesh and a process group."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, (DeviceMesh, torch.distributed.ProcessGroup))


def _has_ranks() -> bool:
    """True where torch's default process group is there."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """The number of ranks; 1 where there are none."""
    return torch.distributed.get_world_size() if _has_ranks() else 1


def is_first_rank() -> bool:
    """True on rank 0, and where there are no ranks."""
    return not _has_ranks() or torch.distributed.get_rank() == 0


def local(tensor: Tensor) -> Tensor:
    """The local part of a tensor or DTensor: all that this process holds."""
    own: Tensor = getattr(tensor, "_local_tensor", tensor)
    return own


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor or DTensor, on every rank."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def gradient_like(param: Any) -> Tensor:
    """The local part of a gradient as its parameter is laid out: a collective of the ranks of its mesh."""
    return local(param.grad.redistribute(param.device_mesh, param.placements))


def with_local(tensor: Tensor, own: Tensor) -> Tensor:
    """Returns a tensor like ``tensor`` with the local part ``own``."""
    like: Any = tensor
    return _assembled(own, like, like.placements, like.shape, like.stride()) if is_distributed(like) else own


def _assembled(own: Tensor, param: Any, placements: Any, shape: Any, stride: Any = None) -> Tensor:
    """Returns a DTensor on the mesh of ``param`` with the local part ``own``; contiguous without a stride.

    The local part keeps its device, which for an offloaded shard is not that of the mesh.
    """
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return dtensor(own, param.device_mesh, placements, torch.Size(shape), stride)


def along_rows(values: Tensor, param: Any) -> Tensor:
    """Elements for the rows that this process stores, of a vector with one for each row of ``param``."""
    if not is_distributed(param):
        return values
    whole: Any = _assembled(values, param, _placements(param, [None] * param.device_mesh.ndim), values.shape)
    shards = [0 if getattr(placement, "dim", None) == 0 else None for placement in param.placements]
    return cast("Tensor", whole.redistribute(placements=_placements(param, shards)).to_local())


def _placements(param: Any, shards: Sequence[int | None]) -> list[Any]:
    """Placements of a state: for each axis of the parameter's mesh the dimension that is sharded, or None."""
    from torch.distributed.tensor import Replicate, Shard

    placements: list[Any] = []
    for own, dim in zip(param.placements, shards, strict=False):
        if dim is None:
            placements.append(Replicate())
        elif own.dim == dim:
            placements.append(own)
        elif type(own) is Shard:
            placements.append(Shard(dim))
        else:
            placements.append(type(own)(dim, split_factor=own.split_factor))
    return placements


def as_state(own: Tensor, param: Tensor, spec: Mapping[str, Any]) -> Tensor:
    """Returns a state as the kind of tensor that its parameter is, with the local part ``own``."""
    if not is_distributed(param):
        return own
    return _assembled(own, param, _placements(param, spec["shards"]), spec["shape"])


def in_bytes(value: Tensor) -> Tensor:
    """Numbers of 16 bits as pairs of bytes along one more dimension, in the same memory where it can be.

    No backend sends int16: neither gloo nor NCCL knows it.
    """
    own = local(value).detach().contiguous().unsqueeze(-1).view(torch.uint8)
    like: Any = value
    return _assembled(own, like, like.placements, (*like.shape, 2)) if is_distributed(like) else own


def from_bytes(value: Tensor) -> Tensor:
    """Returns the int16 numbers that `in_bytes` split into bytes, in the same memory where it can be."""
    own = local(value).detach().contiguous()
    own = own.clone() if own.storage_offset() % 2 else own
    own, like = own.view(torch.int16).squeeze(-1), cast("Any", value)
    return _assembled(own, like, like.placements, like.shape[:-1]) if is_distributed(like) else own


def moved_state(value: Tensor, param: Tensor, spec: Mapping[str, Any]) -> Tensor:
    """A state that was loaded, in the layout that its parameter asks for; the same object if it has that.

    DTensors of other placements are redistributed: every rank has to call this.
    """
    shape = torch.Size(spec["shape"])
    if value.shape != shape:
        return value
    if value.dtype == torch.int16 and is_distributed(value) and not lies_right(value, param, spec):
        pairs = {**spec, "shape": (*shape, 2), "spans": [*spec["spans"], (0, 2)]}
        return from_bytes(moved_state(in_bytes(value), param, pairs))
    if not is_distributed(param):
        return full(value)
    if not is_distributed(value):
        own = value
        for dim, (start, length) in enumerate(spec["spans"]):
            own = own.narrow(dim, start, length)
        return as_state(own.clone(memory_format=torch.contiguous_format), param, spec)
    if lies_right(value, param, spec):
        # The process groups of an equal mesh may be those of an earlier init_process_group().
        is_same = cast("Any", value).device_mesh is cast("Any", param).device_mesh
        return value if is_same else as_state(local(value), param, spec)
    mesh = cast("Any", param).device_mesh
    moved: Tensor = cast("Any", value).redistribute(mesh, _placements(param, spec["shards"]))
    return moved


def lies_right(value: Any, param: Any, spec: Mapping[str, Any]) -> bool:
    """True for a state in the layout that its parameter asks for."""
    if is_distributed(value) != is_distributed(param):
        return False
    if not is_distributed(param) or value.shape != torch.Size(spec["shape"]):
        return True
    wanted = _placements(param, spec["shards"])
    return list(value.placements) == wanted and bool(value.device_mesh == param.device_mesh)
