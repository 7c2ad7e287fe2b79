"""Signatures and docstrings of the classes are complete: for ``help()``, editors and the site."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import typing
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import oxidion
from oxidion._core import averages, schema
from oxidion._core.constructor import completed

CLASSES: dict[str, Any] = {
    value.__name__: value
    for value in (getattr(oxidion, name) for name in oxidion.__all__)
    if inspect.isclass(value) and issubclass(value, Optimizer)
}
GROUP_KEYS = {"algorithm", "step", "beta1", "beta2", "oversample", "num_heads"}
GROUP_KEYS |= {"interleaved", "split_sizes", "split_dim", "fan_in_fan_out"}
GROUP_KEYS |= {"seed_by", *averages.SCHEMA}
GROUP_KEYS |= {"momentum_dtype", "Q_dtype", "variance_dtype", "block_size", "min_quant_numel"}
"""Keys of groups that not every constructor takes."""
OWN_DEFAULTS = {"lr", "weight_decay"}
"""Keys whose default is the class's, whatever the algorithm's schema says."""
OTHER_DEFAULTS = {
    "GaLoreAdamW": {"state_bits": 8},
    "APOLLOMini": {"rank": 1, "scale": 128.0, "scale_type": "tensor"},
    "MuonH": {"nesterov": True, "weight_norm": "hyperball"},
}
every_class = pytest.mark.parametrize("name", CLASSES)


def entries(cls: Any) -> list[str]:
    """Names that the section ``Args`` of a class's docstring describes."""
    section = inspect.getdoc(cls).partition("\nArgs:\n")[2].partition("\n\n")[0]
    return re.findall(r"^    (\w+): \S", section, re.MULTILINE)


def settings(cls: Any) -> dict[str, Any]:
    """Arguments that a constructor needs in addition to parameters."""
    return {"lr": 1e-3} if cls is oxidion.CAME else {}


def test_all_classes_are_looked_at() -> None:
    assert len(CLASSES) >= 13


@every_class
def test_every_schema_key_is_an_argument_or_a_key_of_groups(
    name: str,
) -> None:
    cls = CLASSES[name]
    parameters = inspect.signature(cls).parameters
    fields = {**schema.COMMON, **cls._SCHEMA}
    absent = fields.keys() - parameters.keys()
    assert absent <= GROUP_KEYS
    for key in absent:
        with pytest.raises(TypeError, match=f"no argument '{key}'"):
            cls([nn.Parameter(torch.zeros(4, 4))], **settings(cls), **{key: fields[key].default})
    for key in fields.keys() & parameters.keys() - OWN_DEFAULTS:
        wanted = OTHER_DEFAULTS.get(name, {}).get(key, fields[key].default)
        assert parameters[key].default == wanted, key


@every_class
def test_groups_get_the_defaults_of_the_signature(name: str) -> None:
    cls = CLASSES[name]
    group = cls([nn.Parameter(torch.zeros(4, 4))], **settings(cls)).param_groups[0]
    for key, parameter in inspect.signature(cls).parameters.items():
        if key in group and key not in {"params", *settings(cls)}:
            shown = key == "betas" and cls._momenta.get(cls._ALGORITHM)
            # The first beta of algorithms with a momentum factor shows that.
            wanted = (group[shown], parameter.default[1]) if shown else parameter.default
            assert group[key] == wanted, key


@every_class
def test_docstring_describes_arguments_once_in_signature_order(name: str) -> None:
    assert entries(CLASSES[name]) == list(inspect.signature(CLASSES[name]).parameters)
    assert "not named here" not in CLASSES[name].__doc__


@every_class
def test_docstring_says_which_errors_are_raised(name: str) -> None:
    section = inspect.getdoc(CLASSES[name]).partition("\nRaises:\n")[2]
    raised = set(re.findall(r"^    (\w+): ", section, re.MULTILINE))
    assert {"ValueError", "TypeError", "RuntimeError"} <= raised
    descriptions = re.findall(r"^    \w+: .*(?:\n     .*)*", section, re.MULTILINE)
    assert len(descriptions) == len(set(descriptions))


@every_class
def test_every_argument_has_a_type(name: str) -> None:
    for parameter in inspect.signature(CLASSES[name]).parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        is_open = parameter.kind in {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        assert is_open == (parameter.name == "model_options"), parameter


def words_of(annotation: Any) -> set[Any]:
    """Values that a type names one by one; those of a union's members and None among them."""
    if annotation is type(None):
        return {None}
    if typing.get_origin(annotation) is Literal:
        return set(typing.get_args(annotation))
    return set().union(*map(words_of, typing.get_args(annotation)))


@every_class
def test_types_of_arguments_name_the_words_that_the_schema_takes(name: str) -> None:
    cls = CLASSES[name]
    fields = {**schema.COMMON, **cls._SCHEMA, **{key: word.field for key, word in cls._WORDS.items()}}
    hints = typing.get_type_hints(cls.__init__)
    worded = {key for key in hints.keys() & fields.keys() if fields[key].words}
    spelled = {key for key, hint in hints.items() if any(isinstance(word, str) for word in words_of(hint))}
    assert spelled == worded >= {"state_dtype"}
    for key in worded | (hints.keys() & {"state_bits", "block_size"}):
        allowed, field = words_of(hints[key]), fields[key]
        assert allowed - {None} == set(field.words) or not field.words, key
        assert all(map(field.check, allowed)), key
        assert (None in allowed) == field.check(None), key
    assert words_of(hints["state_bits"]) == {8, 32}


@every_class
def test_no_argument_that_takes_words_is_a_plain_string(name: str) -> None:
    hints = typing.get_type_hints(CLASSES[name].__init__)
    plain = [key for key, hint in hints.items() if hint is str or str in typing.get_args(hint)]
    assert plain == []


def test_words_of_a_type_are_found_within_unions() -> None:
    assert words_of(Literal["a", "b"] | torch.dtype | None) == {"a", "b", None}
    assert words_of(str | None) == {None}


@every_class
def test_help_describes_every_public_method_and_property(name: str) -> None:
    cls = CLASSES[name]
    members = {
        key: member
        for key, member in inspect.getmembers(cls)
        if not key.startswith("_") and (callable(member) or isinstance(member, property))
    }
    own = {key for key, member in members.items() if getattr(member, "__module__", "").startswith("oxidion")}
    assert own >= {"step", "explain", "plan", "metrics", "verify", "init_state", "state_dict"}
    assert [key for key in own if not (inspect.getdoc(members[key]) or "").strip()] == []
    shown = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    for key in own:
        first = inspect.getdoc(members[key]).splitlines()[0]
        assert first in shown, key


@every_class
@pytest.mark.parametrize(("wrong", "near"), [("wieght_decay", "weight_decay"), ("learning_rate", "lr")])
def test_wrong_keyword_is_a_type_error_that_names_the_nearest(name: str, wrong: str, near: str) -> None:
    with pytest.raises(TypeError, match=f"{name}.* no argument '{wrong}', got 0.5; .* argument is '{near}'"):
        CLASSES[name]([nn.Parameter(torch.zeros(4, 4))], **{wrong: 0.5})


def test_words_of_torch_are_translated_to_those_of_the_class() -> None:
    for cls, word in ((oxidion.Dion, "mu"), (oxidion.Dion2, "ef_decay"), (oxidion.Lion, "betas")):
        with pytest.raises(TypeError, match=f"argument is '{word}'"):
            cls([nn.Parameter(torch.zeros(4, 4))], momentum=0.9)  # type: ignore[call-arg]


NEAR: dict[str, dict[str, str]] = {
    "momentun": {
        "Muon": "momentum",
        "Dion": "mu",
        "Dion2": "ef_decay",
        "AdamW": "betas",
        "Adafactor": "beta1",
    },
    "momentum": {"Dion": "mu", "Dion2": "ef_decay", "NorDion2": "mu", "Lion": "betas"},
    "eps": {"Dion": "epsilon", "Dion2": "epsilon", "NorDion2": "epsilon"},
    "epsilon": {"AdamW": "eps", "Lamb": "eps", "CAME": "eps", "GaLoreAdamW": "eps"},
    "adjust_lr_fn": {"Dion": "adjust_lr", "Dion2": "adjust_lr"},
    "weight_decays": dict.fromkeys(CLASSES, "weight_decay"),
    "wd": dict.fromkeys(CLASSES, "weight_decay"),
    "lamda": dict.fromkeys(CLASSES, "weight_decay"),
    "beta": {name: "beta1" if name == "Adafactor" else "betas" for name in CLASSES},
    "device_mesh": dict.fromkeys(CLASSES, "distributed_mesh"),
    "mesh": dict.fromkeys(CLASSES, "distributed_mesh"),
    "process_group": dict.fromkeys(CLASSES, "distributed_mesh"),
    "replicate_mesh": dict.fromkeys(CLASSES.keys() - {"Dion"}, "distributed_mesh"),
    "outer_shard_mesh": dict.fromkeys(CLASSES.keys() - {"Dion"}, "distributed_mesh"),
    "backend_steps": {"Muon": "ns_steps", "NorMuon": "ns_steps"},
    "rank_frac": {"Dion": "rank_fraction"},
}
"""By wrong argument: the nearest one that each class suggests."""


@pytest.mark.parametrize("wrong", NEAR)
def test_foreign_or_misspelled_words_name_the_right_argument(wrong: str) -> None:
    for name, near in NEAR[wrong].items():
        with pytest.raises(
            TypeError, match=rf"{name}\(\) has no argument '{wrong}', .* argument is '{near}'$"
        ):
            CLASSES[name]([nn.Parameter(torch.zeros(4, 4))], **settings(CLASSES[name]), **{wrong: 0.5})


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("weight_decays", {}),
        ("wd", {}),
        ("lamda", {}),
        ("learning_rate", dict.fromkeys(CLASSES, "lr")),
        ("use_muon", dict.fromkeys(CLASSES, "algorithm")),
        ("beta", {"Adafactor": "beta1"}),
        ("momentun", {"Muon": "momentum", "NorMuon": "momentum", "Dion": "mu", "Dion2": "ef_decay"}),
        ("adjust_lr_fn", {"Dion": "adjust_lr", "Dion2": "adjust_lr"}),
        ("rank_frac", {"Dion": "rank_fraction", "AdamW": "rank_fraction"}),
    ],
)
def test_error_for_a_wrong_key_of_a_group_names_the_right_one(wrong: str, near: dict[str, str]) -> None:
    wanted = near or dict.fromkeys(CLASSES, "weight_decay")
    for name, key in wanted.items():
        group = {"params": [nn.Parameter(torch.zeros(4, 4))], wrong: 0.5}
        with pytest.raises(ValueError, match=rf"unknown group key '{wrong}' .* known key is '{key}'$"):
            CLASSES[name]([group], **settings(CLASSES[name]))


def test_error_for_a_wrong_algorithm_names_the_nearest() -> None:
    for wrong, near in (
        ("doin", "dion"),
        ("adam", "adamw"),
        ("muom", "muon"),
        ("galore_adam", "galore_adamw"),
    ):
        group = {"params": [nn.Parameter(torch.zeros(4, 4))], "algorithm": wrong}
        with pytest.raises(
            ValueError, match=rf"algorithm must be one of .*got '{wrong}'.*nearest is '{near}'$"
        ):
            oxidion.Muon([group])


def test_group_key_given_as_an_argument_raises_with_its_place() -> None:
    cls: Any = oxidion.Muon
    for key, value in (("num_heads", 4), ("split_sizes", (2, 2)), ("algorithm", "dion")):
        with pytest.raises(
            TypeError, match=rf"'{key}' is a key of groups: dict\(params=\.\.\., {key}=\.\.\.\)$"
        ):
            cls([nn.Parameter(torch.zeros(4, 4))], **{key: value})
    with pytest.raises(
        TypeError, match=r"the nearest is the key 'algorithm' of groups: dict\(params=\.\.\.,"
    ):
        cls([nn.Parameter(torch.zeros(4, 4))], use_muon=True)


def test_error_for_a_word_like_no_other_lists_all() -> None:
    cls: Any = oxidion.Lion
    weight = nn.Parameter(torch.zeros(4, 4))
    with pytest.raises(TypeError, match=r"'xyzzy', got 1; its arguments are betas, .*, workspace_limit$"):
        cls([weight], xyzzy=1)
    with pytest.raises(
        ValueError, match=r"'xyzzy' \(group 0\); known keys are betas, lr, .*stochastic_rounding"
    ):
        cls([{"params": [weight], "xyzzy": 1}])


def test_classes_of_users_keep_their_text_and_their_arguments() -> None:
    class Open(oxidion.AdamW):
        """Takes anything."""

        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **settings)

    class Closed(oxidion.AdamW):
        """AdamW with a factor.

        Args:
            params: of the model.
            factor: of lr.
        """

        def __init__(self, params: Any, factor: float = 1.0) -> None:
            super().__init__(params, lr=factor * 1e-3)

    weight = nn.Parameter(torch.zeros(4, 4))
    assert Open.__doc__ == "Takes anything."
    with pytest.raises(TypeError, match="nearest known argument is 'eps'"):
        Open([weight], epsilon=1.0)
    assert entries(Closed) == ["params", "factor"]
    assert Closed([weight], 2.0).param_groups[0]["lr"] == 2e-3
    with pytest.raises(TypeError, match="nearest known argument is 'factor'"):
        Closed([weight], factr=2.0)  # type: ignore[call-arg]


def test_optimizers_are_pickled_as_before() -> None:
    optimizer = oxidion.Lion([nn.Parameter(torch.zeros(4, 4))], lr=0.5)
    assert pickle.loads(pickle.dumps(optimizer)).param_groups[0]["lr"] == 0.5


def test_completed_docstring_takes_only_the_nearest_entry() -> None:
    own = """A.

    Args:
        b: own,
            in two lines.

    Arguments that are not named here are those of ``Base``.
    """
    base = """Base.

    Args:
        a: of the base.
        b: of the base.
        c: not an argument.

    Raises:
        ValueError: always.
    """
    args = "Args:\n    a: of the base.\n    b: own,\n        in two lines.\n"
    wanted = f"A.\n\n{args}\nRaises:\n    ValueError: always.\n"
    assert completed(own, [base], ["a", "b"]) == wanted
