"""Tensors of a checkpoint from an untrusted source: a file of ``torch.save``, a folder of DCP.

Nothing that a checkpoint names is called. Files are loaded with ``weights_only=True``. The metadata of a
folder is a pickle: it is read into records without methods, by names of classes that are never looked up.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

DEEPEST = 32
"""Levels of dicts and lists that are looked at."""


class Entry(NamedTuple):
    """A value of a checkpoint.

    Attributes:
        shape: of a tensor; None of anything else.
        read: gives the value.
    """

    shape: tuple[int, ...] | None
    read: Callable[[], Any]


def entries(path: Path) -> dict[str, Entry]:
    """The values of a checkpoint by name: keys and positions on the way to it, with dots between them.

    Args:
        path: of a file of ``torch.save``, or of a folder of ``torch.distributed.checkpoint``.

    Raises:
        OSError: where it cannot be read.
        ValueError: for anything that is no such checkpoint, or holds more than tensors and plain values.
    """
    return _folder(path) if path.is_dir() else dict(_walk(_load(path, path), (), set()))


def _load(source: Path | io.BytesIO, path: Path) -> Any:
    """Content that ``torch.save`` wrote, on the CPU; no more of it than is looked at."""
    if isinstance(source, Path):
        with source.open("rb"):  # an error of the system says more than torch's
            pass
    try:
        mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
        return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped or None)
    except Exception as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        said = f"it names {named[1]}" if named else type(error).__name__
        raise ValueError(
            f"{path} is no file of torch.save that weights_only=True loads ({printable(said)}): save tensors "
            "and plain values, as state_dict() gives them"
        ) from error


def _walk(value: Any, way: tuple[str, ...], seen: set[int]) -> Iterator[tuple[str, Entry]]:
    """Values within dicts and lists; each of these once, for a file may have it hold itself."""
    if isinstance(value, Tensor):
        yield ".".join(way), Entry(tuple(value.shape), lambda: value)
        return
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, (list, tuple)) and any(isinstance(each, (Mapping, Tensor)) for each in value):
        inner = enumerate(value)
    else:
        yield ".".join(way), Entry(None, lambda: value)
    if id(value) not in seen and len(way) < DEEPEST:
        seen.add(id(value))
        for key, each in inner:
            yield from _walk(each, (*way, printable(str(key))), seen)


def printable(text: str) -> str:
    """A name without what a terminal would act on."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


class Unfit(ValueError):
    """Says why a tensor has no matrices of numbers."""


def whole(value: object, name: str) -> Tensor:
    """A tensor of a checkpoint, if it is one that is all there.

    Raises:
        Unfit: for sparse and quantized ones, and those without memory.
        ValueError: for anything else: shards, those with more elements than memory.
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(value).__name__}")  # noqa: TRY004
    if hasattr(value, "placements"):
        raise ValueError(f"{name} is a DTensor, and a file holds one rank's part of it: take a folder of DCP")
    if value.layout != torch.strided or value.is_meta or value.is_quantized:
        kind = "quantized" if value.is_quantized else value.layout
        raise Unfit(f"no dense tensor: {kind} on {value.device}")
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise ValueError(f"{name} has {value.numel()} elements and memory for fewer")
    return value.detach()


# ------------------------------------------------------------------ folders of DCP


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


MOST_FIELDS = 64
"""Dimensions of a size, and attributes of an object, that metadata may have, so that copies are small."""


class _Record:
    """Stands for an object of the metadata: its attributes, nothing that runs."""

    def __init__(self, *_fields: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(_few(state))


class _Size(tuple[Any, ...]):
    """Stands for ``torch.Size``."""

    __slots__ = ()

    def __new__(cls, values: Any = ()) -> _Size:
        return super().__new__(cls, _few(values))

    def __setstate__(self, _state: Any) -> None:
        """Refuses what would change the class."""
        raise pickle.UnpicklingError("a size has attributes")


class _Table(dict[Any, Any]):
    """Stands for ``collections.OrderedDict``, whose entries come one after the other."""

    def __init__(self) -> None:
        super().__init__()

    def __setstate__(self, _state: Any) -> None:
        """Leaves out attributes: one could hide a method."""


def _few(values: Any) -> Any:
    """The same; refuses more than `MOST_FIELDS` of them."""
    if len(values) > MOST_FIELDS:
        raise pickle.UnpicklingError(f"an object has {len(values)} fields, more than {MOST_FIELDS}")
    return values


_PythonUnpickler: Any = pickle._Unpickler
"""The implementation of `pickle` in Python: in the other one no key can be looked at before it is hashed."""


def _refuse(_unpickler: Any) -> None:
    raise pickle.UnpicklingError("it has a set, a bytearray or an extension, as no metadata does")


_UNUSED = (
    *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8),
    *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4),
)
"""Opcodes of what metadata does not have."""


class _Inert(_PythonUnpickler):  # type: ignore[misc]
    """Reads metadata: sizes are tuples, whatever else has a class is a record.

    Keys of dicts are names, numbers and records. The hash of a tuple within tuples takes a time that doubles
    with each level, and ends the process where there are too many levels.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        **_PythonUnpickler.dispatch,
        **{code[0]: _refuse for code in _UNUSED},
    }
    """Functions by opcode."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch", "Size"):
            return _Size
        if (module, name) == ("collections", "OrderedDict"):
            return _Table
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if module.startswith(("torch.distributed.checkpoint.", "torch.serialization", "pathlib")):
            return _Record
        raise pickle.UnpicklingError(f"it names {printable(module)}.{printable(name)}")

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self.stack.append(_filled({}, items))

    def _load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _filled(self.stack[-1], [key, value])

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        _filled(self.stack[-1], items)

    dispatch[pickle.DICT[0]] = _load_dict
    dispatch[pickle.SETITEM[0]] = _load_setitem
    dispatch[pickle.SETITEMS[0]] = _load_setitems


def _filled(made: Any, items: Sequence[Any]) -> Any:
    """A dict with more entries, keys and values by turns."""
    if not isinstance(made, dict):
        raise pickle.UnpicklingError(f"a {type(made).__name__} has keys")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if not isinstance(key, (str, int, _Record)):
            raise pickle.UnpicklingError(f"a key of a dict is a {type(key).__name__}")
        made[key] = value
    return made


def _folder(folder: Path) -> dict[str, Entry]:
    file = folder / ".metadata"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no file .metadata: name the folder of one torch.distributed.checkpoint"
        )
    try:
        found = _Inert(io.BytesIO(file.read_bytes())).load()
        stored = {
            (_name(index.fqn), _offset(getattr(index, "offset", None))): info
            for index, info in found.storage_data.items()
        }
        made = {}
        for name, about in found.state_dict_metadata.items():
            size = getattr(about, "size", None)
            if size is None:
                entry = Entry(None, _reader(folder, _name(name), stored, None, ()))
            else:
                chunks = [(_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in about.chunks]
                entry = Entry(_sizes(size), _reader(folder, _name(name), stored, _sizes(size), chunks))
            made[printable(name)] = entry
    except OSError:
        raise
    except Exception as error:  # a pickle can make anything of anything
        raise ValueError(f"{file} is no metadata of torch.distributed.checkpoint: {error}") from error
    return made


def _name(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"names must be strings, got {type(value).__name__}")  # noqa: TRY004
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(f"sizes must be integers >= 0, got {type(value).__name__}")
    return tuple(value)


def _offset(value: Any) -> tuple[int, ...] | None:
    return None if value is None else _sizes(value)


Chunk = tuple[tuple[int, ...], tuple[int, ...]]


def _reader(
    folder: Path,
    name: str,
    stored: Mapping[tuple[str, tuple[int, ...] | None], Any],
    size: tuple[int, ...] | None,
    chunks: Sequence[Chunk],
) -> Callable[[], Any]:
    def read() -> Any:
        if size is None:
            return _piece(folder, name, stored.get((name, None)))
        if sum(math.prod(extent) for _, extent in chunks) != math.prod(size):
            raise ValueError(f"{folder}: the parts of {name} are not all of its {math.prod(size)} elements")
        parts: list[Tensor] = []
        for offset, extent in chunks:
            part = whole(_piece(folder, name, stored.get((name, offset))), name)
            fits = len(offset) == len(extent) == len(size) and all(
                start + length <= end for start, length, end in zip(offset, extent, size, strict=True)
            )
            if tuple(part.shape) != extent or not fits or (parts and part.dtype != parts[0].dtype):
                raise ValueError(
                    f"{folder}: a part of {name} must be {extent} at {offset} of {size}, got "
                    f"{part.dtype} {tuple(part.shape)}"
                )
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        made = torch.zeros(size, dtype=parts[0].dtype)
        for (offset, extent), part in zip(chunks, parts, strict=True):
            at = tuple(slice(start, start + length) for start, length in zip(offset, extent, strict=True))
            made[at] = part
        return made

    return read


def _piece(folder: Path, name: str, info: Any) -> Any:
    """A value as a rank wrote it."""
    file, offset, length = (getattr(info, key, None) for key in ("relative_path", "offset", "length"))
    if not isinstance(file, str) or type(offset) is not int or type(length) is not int:
        raise ValueError(f"{folder}: the metadata does not say where {name} is")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{folder}: {name} was transformed as it was written, for example compressed")
    if file in ("", "..") or Path(file).name != file or min(offset, length) < 0:
        raise ValueError(f"{folder}: {name} must lie in a file of the folder, the metadata names {file!r}")
    path = folder / file
    with path.open("rb") as handle:
        handle.seek(offset)
        data = handle.read(min(length, path.stat().st_size))
    return _load(io.BytesIO(data), path)
