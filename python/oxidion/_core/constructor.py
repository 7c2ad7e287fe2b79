"""Constructors of the classes: docstrings with all arguments, errors that name the nearest one.

The file imports nothing of the package: the documentation site reads it to complete what it parsed.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

_REFERENCE = "Arguments that are not named here are those of "
"""Start of a sentence for readers of the source, untrue of a completed docstring."""


class _LeftOut:
    """Default of an argument that may be left out and for which None is a value."""

    def __repr__(self) -> str:
        return "<left out>"


LEFT_OUT: Any = _LeftOut()
"""Default of arguments that are other words for an argument of another name."""

OPTIONS = "model_options"
"""Name of the arguments of a constructor that say how the parameters of a model are sorted."""

GATHERED = "common"
"""Name by which a constructor gathers the arguments of every class, and those of `OPTIONS`."""

EXTRA = "extra_keys"
"""Name of the argument for group keys of a user's own."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Kinds of parameters that can be given by name."""

SCALAR = "scalar_"
"""Prefix of the arguments for parameters that are no matrices."""


class Gathered(NamedTuple):
    """The arguments that a constructor gathers.

    Attributes:
        parameters: those of every class, with the defaults of this one.
        options: those of `OPTIONS`.
        hints: their types by name.
        docstring: their descriptions.
    """

    parameters: tuple[inspect.Parameter, ...]
    options: inspect.Parameter
    hints: Mapping[str, Any]
    docstring: str


Rename = Callable[[dict[str, Any]], None]
"""Function that gives arguments, by name and in place, the names that the constructor reads."""


class Sorter(Protocol):
    """Sorting of a model's parameters into groups."""

    options: frozenset[str]
    """Arguments that say how a model is sorted, in addition to those that begin with `SCALAR`."""

    def prepare(
        self, cls: Any, given: dict[str, Any], options: dict[str, Any], usual: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns the arguments of a constructor with groups instead of a model."""

    def name_algorithm(self, cls: Any, group: dict[str, Any], lr: Any) -> None:
        """Replaces what a group has as its algorithm by the algorithm's name, in place."""

    def scalar_default(self, cls: Any) -> str:
        """The algorithm for parameters that are no matrices, for the class of those that are."""


_SYNONYMS = {
    "momentum": ("mu", "ef_decay", "beta1", "betas"),
    "adjust_lr_fn": ("adjust_lr",),
    "eps": ("epsilon",),
    "epsilon": ("eps",),
    "learning_rate": ("lr",),
    **dict.fromkeys(("wd", "decay", "l2", "lamda", "lambda", "lambda_", "lambd"), ("weight_decay",)),
    **dict.fromkeys(("mesh", "device_mesh", "process_group", "fsdp_mesh"), ("distributed_mesh",)),
    "replicate_mesh": ("distributed_mesh",),
    "outer_shard_mesh": ("distributed_mesh",),
    "inner_shard_mesh": ("distributed_mesh",),
    "backend_steps": ("ns_steps",),
    "use_muon": ("algorithm",),
    "adamw_lr": ("scalar_lr",),
    "adam_lr": ("scalar_lr",),
    "adamw_betas": ("scalar_betas",),
    "adamw_eps": ("scalar_eps",),
    "adamw_wd": ("scalar_weight_decay",),
    "muon_lr": ("lr",),
    "fused": ("foreach",),
    **dict.fromkeys(("nbits", "optim_bits"), ("state_bits",)),
    "mu": ("ef_decay", "beta1", "betas"),
    "ef_decay": ("mu", "beta1", "betas"),
}
"""Words of other packages: the first name that there is is the nearest."""

ADVICE = {
    **dict.fromkeys(
        ("world_mesh", "fsdp_mesh_dim", "distributed_mesh_name"),
        "leave it out: layouts are read from the DTensors, of experts too",
    ),
    "matrix_partitions": "give its parameters groups of their own with the key 'split_sizes'",
}
"""Words of forks of microsoft/dion that stand for no argument or key: what to do instead."""


def nearest(key: str, known: Iterable[str], further: Iterable[str] = ()) -> str | None:
    """The name that one of another package stands for, or a misspelled one is like; None if it is like none.

    Args:
        key: the unknown name.
        known: names that are looked at first.
        further: names that are looked at where those know nothing like it.
    """
    lists = sorted(known), sorted(further)

    def synonym(word: str) -> str | None:
        return next((name for names in lists for name in _SYNONYMS.get(word, ()) if name in names), None)

    def alike(names: Iterable[str], cutoff: float) -> str | None:
        return next(iter(difflib.get_close_matches(key, list(names), n=1, cutoff=cutoff)), None)

    def longer(names: Iterable[str]) -> str | None:
        return next((name for name in names if name.startswith(f"{key}_")), None)

    found = synonym(key) or alike(lists[0], 0.8) or synonym(alike(_SYNONYMS, 0.8) or "") or longer(lists[0])
    return found or alike(lists[1], 0.8) or alike(lists[0], 0.6) or alike(lists[1], 0.6)


@functools.cache
def _entries(docstring: str) -> tuple[str, dict[str, str], dict[str, str]]:
    """A docstring without its sections of arguments and errors, and their entries: by name, and by text."""
    text: list[str] = []
    entries: dict[str, list[list[str]]] = {"Args:": [], "Raises:": []}
    section = ""
    for line in inspect.cleandoc(docstring).splitlines():
        if line and line[0] != " ":
            section = line if line in entries else ""
        if not section:
            if not line.startswith(_REFERENCE):
                text.append(line)
        elif line.startswith("     "):
            entries[section][-1].append(line)
        elif line.startswith("    "):
            entries[section].append([line])
    described, errors = (
        {"\n".join(entry): entry[0].partition(":")[0].strip() for entry in entries[title]}
        for title in ("Args:", "Raises:")
    )
    body = "\n".join(text).rstrip("\n")
    while "\n\n\n" in body:
        body = body.replace("\n\n\n", "\n\n")
    return body, {name: entry for entry, name in described.items()}, errors


def completed(own: str, bases: Sequence[str], arguments: Iterable[str]) -> str:
    """Docstring of a class with an entry for each argument of its constructor and for each error.

    Args:
        own: docstring of the class.
        bases: docstrings of its bases, nearest first.
        arguments: names of the constructor's arguments, in order; entries of other names are left out.

    Returns:
        The docstring, cleaned as by ``inspect.cleandoc``, with ``Args`` and ``Raises`` as its last sections.
        An argument that several docstrings describe has the nearest description; errors of one type are
        described by all of them, nearest first.
    """
    described: dict[str, str] = {}
    errors: dict[str, str] = {}
    for source in (own, *bases):
        _, more, further = _entries(source)
        described = more | described
        errors = errors | further
    args = [described[name] for name in arguments if name in described]
    raises = [entry for kind in dict.fromkeys(errors.values()) for entry in errors if errors[entry] == kind]
    parts = [_entries(own)[0]]
    for title, entries in (("Args", args), ("Raises", raises)):
        if entries:
            parts.append("\n".join([f"{title}:", *entries]))
    return "\n\n".join(parts) + "\n"


def complete(
    cls: type,
    root: type,
    words: Iterable[str] = (),
    rename: Rename | None = None,
    keys: Iterable[str] = (),
    sorter: Callable[[], Sorter] | None = None,
    gathered: Gathered | None = None,
) -> None:
    """Completes a class's docstring and has its constructor name what an unknown argument is nearest to.

    A constructor that gathers the arguments of every class gets all of them, with their defaults;
    ``inspect.signature`` names each. Type checkers see the constructor as it is written.

    Args:
        cls: a class with an ``__init__`` of its own; its docstring and constructor are replaced. One that
            takes any keyword is left as it is, unless it gathers them as `GATHERED`.
        root: the base whose docstring is the last to be looked at, but that of the gathered arguments.
        words: arguments that are other words for an argument of another name.
        rename: gives them the names that the constructor reads; it raises where both were given.
        keys: of groups, for errors.
        sorter: what turns a model into groups, for constructors that gather arguments.
        gathered: the arguments that a constructor may gather.
    """
    init = cls.__dict__["__init__"]
    if not inspect.isfunction(init):
        return
    signature = inspect.signature(init)
    gathers = gathered is not None and GATHERED in signature.parameters
    if not gathers and any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values()):
        return
    made: Callable[..., None] = init
    hints = init.__annotations__
    described = [base.__doc__ for base in cls.__mro__[1 : cls.__mro__.index(root) + 1]]
    if gathers and gathered is not None:
        made, signature, hints = _filled(init, signature, gathered)
        described.append(gathered.docstring)
    arguments = list(signature.parameters)[1:]
    if "__doc__" in cls.__dict__ and cls.__doc__:
        cls.__doc__ = completed(cls.__doc__, list(filter(None, described)), arguments)
    names = [name for name in arguments if signature.parameters[name].kind in _NAMED]
    made = _renamed(made, names, frozenset(words), rename or (lambda _: None))
    if gathers and sorter is not None:
        usual = {name: signature.parameters[name].default for name in names if name != "params"}
        made = _prepared(made, names, usual, sorter)
    made = _checked(made, names, frozenset(keys), sorter if gathers else None)
    made.__annotations__, made.__signature__ = hints, signature  # type: ignore[attr-defined]
    setattr(cls, "__init__", made)  # noqa: B010


def _filled(
    init: Callable[..., None], signature: inspect.Signature, gathered: Gathered
) -> tuple[Callable[..., None], inspect.Signature, dict[str, Any]]:
    """A constructor that gets every gathered argument, with the signature and the types that name each."""
    written = [each for name, each in signature.parameters.items() if name != GATHERED]
    added = [each for each in gathered.parameters if each.name not in signature.parameters]
    usual = {each.name: each.default for each in added}

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **{**usual, **kwargs})

    signature = signature.replace(parameters=[*written, *added, gathered.options])
    hints = {name: hint for name, hint in init.__annotations__.items() if name != GATHERED}
    return __init__, signature, hints | {name: gathered.hints[name] for name in (*usual, OPTIONS)}


def unknown(
    cls: type,
    key: str,
    value: object,
    known: frozenset[str],
    keys: frozenset[str],
    options: frozenset[str] = frozenset(),
) -> TypeError:
    """The error for an argument that a class does not have.

    Args:
        cls: the class.
        key: the argument.
        value: what was given for it.
        known: its arguments.
        keys: of its groups.
        options: arguments that are allowed only with a model.
    """
    what = f"{cls.__name__}() has no argument {key!r}, got {value!r}"
    return TypeError(f"{what}; {_advice(key, known, keys, options)}")


def names_of_keys(given: Any) -> frozenset[str]:
    """Names of group keys of a user's own, which an optimizer keeps and does not read.

    Raises:
        TypeError: for anything but a list of names.
    """
    found = frozenset(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
    if found is None or not all(isinstance(key, str) for key in found):
        raise TypeError(f"{EXTRA} must be a list of names of group keys, got {given!r}")
    return found


def _advice(key: str, known: frozenset[str], keys: frozenset[str], options: frozenset[str]) -> str:
    """Says of an unknown argument what it stands for, is like, or could have been."""
    if key in ADVICE:
        return ADVICE[key]
    if key in keys:
        return f"{key!r} is a key of groups: dict(params=..., {key}=...)"
    near = nearest(key, known | options, keys - known)
    if near in known | options:
        return f"the nearest known argument is {near!r}"
    if near is not None:
        return f"the nearest is the key {near!r} of groups: dict(params=..., {near}=...)"
    return f"its arguments are {', '.join(sorted(known))}"


def _checked(
    init: Callable[..., None],
    names: Sequence[str],
    keys: frozenset[str],
    sorter: Callable[[], Sorter] | None,
) -> Callable[..., None]:
    """Returns a constructor whose error for an unknown argument names the nearest known one.

    Group keys are left to the sorter: as arguments they are allowed only with a model.
    """
    own = frozenset(names)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for key in kwargs.keys() - own:
            options = frozenset() if sorter is None else sorter().options
            is_for_model = sorter is not None and (key in options | keys or key.startswith(SCALAR))
            if not is_for_model:
                raise unknown(type(self), key, kwargs[key], own, keys, options)
        init(self, *args, **kwargs)

    return __init__


def _renamed(
    init: Callable[..., None], names: Sequence[str], words: frozenset[str], rename: Rename
) -> Callable[..., None]:
    """A constructor that takes other words for its arguments."""

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if not words.isdisjoint(kwargs):
            kwargs = {key: value for key, value in kwargs.items() if value is not LEFT_OUT}
            by_place = dict(zip(names, args, strict=False))
            given = {**by_place, **kwargs}
            rename(given)
            kwargs = {key: value for key, value in given.items() if key not in by_place}
        init(self, *args, **kwargs)

    return __init__


def _prepared(
    init: Callable[..., None],
    names: Sequence[str],
    usual: dict[str, Any],
    sorter: Callable[[], Sorter],
) -> Callable[..., None]:
    """Returns a constructor that accepts a model instead of parameters, and a user's own group keys."""
    own = frozenset(names)

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in kwargs.keys() - own}
        if EXTRA in options:
            self._extra_keys = options[EXTRA] = names_of_keys(options[EXTRA])
        placed = names[: len(args)]
        twice = {key: kwargs.pop(key) for key in placed if key in kwargs}  # Python refuses these
        by_place = dict(zip(names, args, strict=False))
        given = sorter().prepare(type(self), {**by_place, **kwargs}, options, usual)
        args = (*(given.pop(name) for name in placed), *args[len(names) :])
        init(self, *args, **given, **twice)

    return __init__
