"""Folders of torch.distributed.checkpoint (DCP): what one holds, reads into tensors, writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from oxidion._dist.comm import full, is_distributed, local

Path = tuple[str | int, ...]
"""Keys and indices that lead from the top of a state dict to a value."""


class Entry(NamedTuple):
    """A value of a checkpoint.

    Attributes:
        key: the name under which DCP stores it.
        shape: of a tensor; None of any other value.
        dtype: of a tensor.
    """

    key: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def entries(folder: str | os.PathLike[str]) -> dict[Path, Entry]:
    """The values of a checkpoint, by their paths.

    Raises:
        ValueError: for a folder that DCP has not written, or without paths.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    advice = "Give the folder that dcp.save() wrote, with its file .metadata"
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise ValueError(
            f"{os.fspath(folder)!r} must be a folder of torch.distributed.checkpoint, and its metadata "
            f"cannot be read ({type(error).__name__}: {error}). {advice}"
        ) from error
    paths = metadata.planner_data
    if not isinstance(paths, Mapping):
        raise ValueError(  # noqa: TRY004
            f"the checkpoint in {os.fspath(folder)!r} has no paths of its values: a planner wrote it that "
            "does not flatten state dicts. Write it with dcp.save() and the planner that this has by default"
        )
    found: dict[Path, Entry] = {}
    for key, stored in metadata.state_dict_metadata.items():
        is_tensor = isinstance(stored, TensorStorageMetadata)
        shape = tuple(stored.size) if isinstance(stored, TensorStorageMetadata) else None
        dtype = stored.properties.dtype if isinstance(stored, TensorStorageMetadata) else None
        if is_tensor or key in paths:
            found[tuple(paths.get(key, (key,)))] = Entry(key, shape, dtype)
    return found


@contextmanager
def _in_one_process() -> Iterator[None]:
    """A context in which DCP does not warn that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def read(folder: str | os.PathLike[str], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Reads values of a checkpoint: tensors in place, each rank its part; all ranks call it together.

    Args:
        folder: of the checkpoint.
        wanted: by the key of an `Entry`, a tensor to be filled, or anything for another value.

    Returns:
        The same tensors, and the other values.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    values = dict(wanted)
    if values:
        with _in_one_process():
            load(values, checkpoint_id=folder)
    return values


def write(folder: str | os.PathLike[str], state: dict[str, Any]) -> None:
    """Writes a checkpoint; all ranks call it together."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with _in_one_process():
        save(state, checkpoint_id=folder)


def names_of(model: torch.nn.Module, params: Sequence[Tensor]) -> list[str]:
    """The names of parameters in checkpoints, without what wrappers put into them."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    # An optimizer with states, which torch does not have step.
    named = torch.optim.SGD(list(params), lr=0.0)
    for param in params:
        named.state[param]["is_named"] = True
    found: Any = get_optimizer_state_dict(model, named)
    return list(found["param_groups"][0]["params"])


def model_states(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters and buffers of a model by their names in checkpoints, in the model's own memory."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return get_model_state_dict(model)


def load_model(model: torch.nn.Module, states: dict[str, Any]) -> None:
    """Loads what `model_states` returned, after it was filled."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    set_model_state_dict(model, states)


def optimizer_states(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer that has states, with names of parameters instead of numbers."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return cast("dict[str, Any]", get_optimizer_state_dict(model, optimizer))


def to_fill(shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """A tensor for a state whose dimensions are sharded as those of ``like``."""
    if tuple(like.shape) == shape:
        return torch.zeros_like(like, dtype=dtype, requires_grad=False)
    own: Any = like
    if not shape or not is_distributed(own):
        return torch.zeros(shape, dtype=dtype, device=local(own).device)
    import torch.distributed.tensor as dtensor

    dims = [getattr(placement, "dim", None) for placement in own.placements]
    placements = [dtensor.Replicate() if dim is None else dtensor.Shard(dim) for dim in dims]
    made: Tensor = dtensor.zeros(*shape, dtype=dtype, device_mesh=own.device_mesh, placements=placements)
    return made


def product(matrix: Tensor, factor: Tensor) -> Tensor:
    """A matrix times a narrow one, with columns of norm 1; every rank has all of the narrow one meanwhile."""
    wide = torch.promote_types(factor.dtype, torch.float32)
    own: Any = factor
    whole = full(factor).to(wide)
    if is_distributed(own):
        import torch.distributed.tensor as dtensor

        everywhere = [dtensor.Replicate()] * own.device_mesh.ndim
        whole = dtensor.DTensor.from_local(whole, own.device_mesh, everywhere, run_check=False)
    made: Any = matrix.to(wide) @ whole
    made = made / made.square().sum(dim=0).sqrt()
    if is_distributed(made):
        made = made.redistribute(placements=everywhere)
    result: Tensor = made.to(factor.dtype)
    return result
