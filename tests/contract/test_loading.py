"""State dicts that no step could use: refused with the key and the value, before anything has changed."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion

from .snapshot import assert_params_equal, assert_same, snapshot
from .table import Case, every_case, every_matrix_case, make_model, run_steps

HUGE = 1e308
BAD_GROUPS: tuple[tuple[str, Any], ...] = (
    ("step", -1),
    ("step", math.nan),
    ("step", 1.5),
    ("step", "7"),
    ("step", None),
    ("step", 2**63),
    ("state_bits", 3),
    ("state_bits", 8.0),
    ("state_dtype", "int8"),
    ("block_size", 100),
    ("lr", -0.5),
    ("lr", math.nan),
    ("lr", HUGE),
    ("lr", 10**400),
    ("lr", "0.1"),
    ("lr", torch.tensor([0.1, 0.2])),
    ("lr", torch.tensor(0.1, device="meta")),
    ("weight_decay", torch.tensor(0.1).to_sparse()),
    ("weight_decay", HUGE),
    ("weight_decay", [0.1]),
    ("maximize", 1),
    ("algorithm", "sgdm"),
    ("algorithm", ["adamw"]),
    ("max_batch_bytes", -5),
    ("fused", torch.ones(2, dtype=torch.bool)),
    ("fused", "yes"),
)
BAD_BETAS = ((0.9,), (0.9, 0.95, 0.99, 0.999), 0.9, (0.9, "0.95"), (0.9, 1.0), (-0.1, 0.9, 0.9))


def refused(optimizer: Any, saved: dict[str, Any], match: str) -> None:
    """Asserts that loading raises this and changes nothing."""
    before, groups, state = snapshot(optimizer), optimizer.param_groups, optimizer.state
    session = optimizer._session
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups is groups
    assert optimizer.state is state
    assert optimizer._session is session
    assert_same(snapshot(optimizer), before)


def stepped(case: Case, **kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    model = make_model()
    optimizer = case.build(model, named=True, **kwargs)
    run_steps(optimizer, model, range(2))
    return model, optimizer, copy.deepcopy(optimizer.state_dict())


@every_case
@pytest.mark.parametrize(("key", "value"), BAD_GROUPS, ids=str)
def test_group_value_out_of_range_is_refused(case: Case, key: str, value: Any) -> None:
    _, optimizer, saved = stepped(case)
    saved["param_groups"][1][key] = value
    refused(optimizer, saved, rf"(?s){key}.* must be .*(group 1 of the state dict|1-element)")


@every_case
@pytest.mark.parametrize("betas", BAD_BETAS, ids=str)
def test_betas_of_the_wrong_kind_are_refused(case: Case, betas: Any) -> None:
    if not case.has_betas:
        pytest.skip("the class has none")
    _, optimizer, saved = stepped(case)
    saved["param_groups"][0]["betas"] = betas
    refused(optimizer, saved, r"betas must be .*group 0 of the state dict")


@every_matrix_case
@pytest.mark.parametrize("value", [HUGE, -0.1, math.inf, "0.9", None, torch.ones(2)], ids=str)
def test_momentum_factor_out_of_range_is_refused(case: Case, value: Any) -> None:
    _, optimizer, saved = stepped(case)
    key = "ef_decay" if case.algorithm == "dion2" else "mu"
    saved["param_groups"][0][key] = value
    refused(optimizer, saved, rf"{key} must be a finite number >= 0, got .*group 0 of the state dict")


@every_matrix_case
@pytest.mark.parametrize("value", [torch.ones(2), torch.tensor(1), 1.0, True, 2], ids=str)
def test_split_dim_is_one_of_two_integers(case: Case, value: Any) -> None:
    _, optimizer, saved = stepped(case)
    changed = copy.deepcopy(saved)
    changed["param_groups"][0]["split_dim"] = value
    refused(optimizer, changed, r"^split_dim must be 0 \(rows\) or 1 \(columns\), got ")


@every_case
def test_numbers_whose_product_overflows_are_refused(case: Case) -> None:
    _, optimizer, saved = stepped(case)
    saved["param_groups"][0] |= {"lr": 1e30, "weight_decay": 1e30}
    refused(optimizer, saved, r"lr \* weight_decay must be finite in float32, got lr=1e\+30 and")


@every_case
def test_numbers_that_float32_cannot_hold_are_refused_everywhere(case: Case) -> None:
    model = make_model()
    says = (
        "lr must be a finite number >= 0(, or None)?, got 1e.308 .*float32, whose largest number is 3.4e.38"
    )
    with pytest.raises(ValueError, match=says):
        case.build(model, lr=HUGE)
    optimizer = case.build(model)
    run_steps(optimizer, model, range(1))
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.param_groups[0]["lr"] = HUGE
    with pytest.raises(ValueError, match=r"lr must be a finite number >= 0, got 1e.308"):
        optimizer.step()
    assert_params_equal(model.parameters(), before)


def state_entries(optimizer: Any, saved: dict[str, Any]) -> list[tuple[int, str, Tensor, str]]:
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    return [(at, key, value, names[at]) for at, own in saved["state"].items() for key, value in own.items()]


@every_case
def test_counter_that_is_no_count_is_refused(case: Case) -> None:
    _, optimizer, saved = stepped(case)
    counters = [e for e in state_entries(optimizer, saved) if e[1].startswith("step")]
    values = (
        -1.0,
        math.nan,
        math.inf,
        torch.tensor(-3.0),
        torch.tensor(math.nan),
        torch.ones(2),
        "4",
        True,
        [1],
        1e39,
        10**400,
        torch.tensor(1e39, dtype=torch.float64),
        torch.tensor(2.0).to_sparse(),
        torch.tensor(1j),
    )
    for at, key, _, name in counters[:1]:
        for value in values:
            changed = copy.deepcopy(saved)
            changed["state"][at][key] = value
            refused(optimizer, changed, rf"(?s){name}: state '{key}' must be a finite number >= 0, got ")


@every_case
def test_state_of_another_shape_dtype_or_kind_is_refused_by_key(case: Case) -> None:
    _, optimizer, saved = stepped(case)
    entries = [e for e in state_entries(optimizer, saved) if not e[1].startswith("step")]
    assert entries
    wrong: tuple[tuple[Any, str], ...] = (
        (lambda v: torch.zeros(*v.shape, 2), "must have shape"),
        (lambda v: torch.zeros((3, *v.shape[1:]) if v.ndim and v.shape[0] != 3 else (5,)), "must have shape"),
        (lambda v: v.to(torch.int64), "must be of dtype float16, bfloat16, float32, float64"),
        (lambda v: v.to(torch.bool), "must be of dtype float16"),
        (lambda v: v.to(torch.complex64), "must be of dtype float16"),
        (lambda v: v.to(torch.float8_e4m3fn), "must be of dtype float16"),
        (lambda v: v.to_sparse() if v.ndim else 1.0, "must be a dense tensor"),
        (lambda v: 1.0, "must be a dense tensor"),
        (lambda v: v.tolist(), "must be a dense tensor"),
        (lambda v: v.to("meta"), "is on meta"),
        (lambda v: v.to(torch.uint8), "(is uint8 without|must be of dtype)"),
    )
    for at, key, value, name in {entry[1]: entry for entry in entries}.values():
        for change, says in wrong:
            changed = copy.deepcopy(saved)
            changed["state"][at][key] = change(value)
            refused(optimizer, changed, rf"^{name}: state '{key}' {says}")


@every_case
def test_state_of_other_floating_dtypes_is_taken_as_it_is(case: Case) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        model, optimizer, saved = stepped(case)
        for at, key, value, _ in state_entries(optimizer, saved):
            if not key.startswith("step"):
                saved["state"][at][key] = value.to(dtype)
        optimizer.load_state_dict(saved)
        run_steps(optimizer, model, range(2, 3))
        for _, key, value, _ in state_entries(optimizer, optimizer.state_dict()):
            if not key.startswith("step"):
                assert value.dtype == dtype, key


def with_quantized_states(case: Case) -> tuple[Any, dict[str, Any], list[Any]]:
    """An optimizer with states of 8 bits after a step, its state dict, and the entries of scales in that."""
    model = make_model()
    optimizer = case.build(model, named=True, state_bits=8)
    for group in optimizer.param_groups:
        group["min_quant_numel"] = 0
    run_steps(optimizer, model, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    quantized = [e for e in state_entries(optimizer, saved) if e[1].endswith("_absmax")]
    if not quantized:
        pytest.skip("no state of the model is large enough")
    return optimizer, saved, quantized


@every_case
def test_quantized_values_or_scales_alone_are_refused(case: Case) -> None:
    optimizer, saved, quantized = with_quantized_states(case)
    at, scales, value, name = quantized[0]
    key = scales.removesuffix("_absmax")
    for change, says in (
        (lambda own: own.pop(scales), f"state '{key}' is uint8 without '{scales}'"),
        (lambda own: own.pop(key), f"state '{scales}' is there without '{key}'"),
        (lambda own: own.update({scales: value[:0]}), f"state '{scales}' must have shape"),
        (lambda own: own.update({scales: value.double()}), f"state '{scales}' must be of dtype float32, got"),
        (lambda own: own.update({scales: 1.0}), f"state '{key}' is uint8 without"),
        (lambda own: own.update({key: own[key].view(torch.int8)}), f"state '{key}' must be of dtype"),
    ):
        changed = copy.deepcopy(saved)
        change(changed["state"][at])
        refused(optimizer, changed, rf"^{name}: {says}")
    optimizer.load_state_dict(saved)
    plain = case.build(make_model(), named=True)
    plain.load_state_dict(saved)  # another state_bits: states are taken as they are
    plain.load_state_dict(stepped(case)[2])


@every_case
def test_quantized_values_copied_as_numbers_are_refused(case: Case) -> None:
    """As torch.distributed.checkpoint does where the optimizer that it fills has states of 32 bits."""
    _, saved, quantized = with_quantized_states(case)
    for at, scales, _, name in quantized:
        changed, key = copy.deepcopy(saved), scales.removesuffix("_absmax")
        own = changed["state"][at]
        del own[scales]
        own[key] = own[key].float()
        if own[key].max() > 1:
            refused(
                case.build(make_model(), named=True), changed, rf"^{name}: state '{key}' has whole numbers"
            )
        own[key] += 0.5
        case.build(make_model(), named=True).load_state_dict(changed)


@every_case
def test_state_that_is_no_dict_is_refused(case: Case) -> None:
    _, optimizer, saved = stepped(case)
    name = optimizer.param_groups[0]["param_names"][0]
    for value in (True, [1], torch.ones(2), None, 1j, "exp_avg", torch.ones(2, device="meta")):
        refused(
            optimizer, {**saved, "state": {**saved["state"], 0: value}}, f"^{name}: its state must be a dict"
        )


BAD_FORMS: tuple[tuple[str, Any, str], ...] = (
    *(
        ("state", value, "'state' of the state dict must be a dict, got ")
        for value in (None, 1j, [], "adamw")
    ),
    *(
        ("param_groups", value, "'param_groups' of the state dict must be a list of dicts, got ")
        for value in (None, 7, {}, torch.ones(2))
    ),
    *(
        ("param_groups", [{}, value], "group 1 of the state dict must be a dict, got ")
        for value in (None, [], 0.5)
    ),
    *(
        ("param_groups", [{"params": [0, 1]}, group], "'params' of group 1 of the state dict must be ")
        for group in (
            {},
            {"params": None},
            {"params": 2},
            {"params": "ab"},
            {"params": [[]]},
            {"params": [(1, [])]},
            {"params": [torch.ones(2)]},
            {"params": [1]},
            {"params": [2, 2]},
        )
    ),
)


@pytest.mark.parametrize(("key", "value", "says"), BAD_FORMS, ids=str)
def test_state_dict_of_the_wrong_form_is_refused_by_the_place(key: str, value: Any, says: str) -> None:
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = oxidion.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    optimizer.init_state()
    saved = optimizer.state_dict()
    if key == "param_groups" and isinstance(value, list) and value[0] == {}:
        value = [saved["param_groups"][0], value[1]]
    refused(optimizer, {**saved, key: value}, f"^{says}")
    left = {name: part for name, part in saved.items() if name != key}
    refused(optimizer, left, f"^the state dict must be a dict with '{key}', got ")


def test_group_key_none_leaves_the_defaults_of_others() -> None:
    optimizer = oxidion.Muon([nn.Parameter(torch.ones(2, 2))])
    saved = copy.deepcopy(optimizer.state_dict())
    [group] = saved["param_groups"]
    group[None] = 1
    del group["average"], group["maximize"]
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["average"], optimizer.param_groups[0]["maximize"]) == (None, False)


def test_value_that_cannot_be_printed_is_refused_by_its_key() -> None:
    optimizer = oxidion.Muon([nn.Parameter(torch.ones(2, 2))])
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value, kind in ((deep, "list"), (10**5000, "int")):
        saved = optimizer.state_dict()
        saved["param_groups"][0]["mu"] = value
        refused(optimizer, saved, f"^mu must be .*, got a {kind} that cannot be printed")


@pytest.mark.parametrize("value", [None, [], 3, "x", torch.ones(2)], ids=str)
def test_state_that_is_not_a_dict_is_refused(value: Any) -> None:
    optimizer = oxidion.AdamW([nn.Parameter(torch.ones(2))])
    refused(optimizer, value, "^the state dict must be a dict, got ")


def test_hook_may_make_a_state_dict_of_anything_with_a_copy() -> None:
    param = nn.Parameter(torch.ones(2))
    optimizer = oxidion.AdamW([param])
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(lambda _self, wrapped: wrapped["optimizer"])
    optimizer.load_state_dict({"optimizer": saved, "epoch": 3})


@every_case
def test_parameters_in_another_order_are_refused_at_loading(case: Case) -> None:
    model, optimizer, saved = stepped(case)
    turned = copy.deepcopy(saved)
    group = turned["param_groups"][0]
    count = len(group["params"])
    order = list(range(count))[::-1]
    group["param_names"] = [group["param_names"][at] for at in order]
    turned["state"] = {**turned["state"], **{at: saved["state"][old] for at, old in enumerate(order)}}
    refused(optimizer, turned, r"the parameters in another order: '.*' where the optimizer has '.*'")
    for named in (True, False):
        for side in turned["param_groups"]:
            del side["param_names"]
        target = case.build(make_model(), named=named)
        with pytest.raises(ValueError, match=r"state '\w+' must have shape \(.*\), got \(") as caught:
            target.load_state_dict(turned)
        assert ("parameter 0 of group 0" in str(caught.value)) != named
        assert not target.state
        turned = copy.deepcopy(turned | {"param_groups": saved["param_groups"]})
        turned["param_groups"] = copy.deepcopy(saved["param_groups"])
    renamed = copy.deepcopy(saved)
    for side in renamed["param_groups"]:
        side["param_names"] = [f"module.{name}" for name in side["param_names"]]
    optimizer.load_state_dict(renamed)
    run_steps(optimizer, model, range(2, 3))


@pytest.mark.parametrize("names", ["weight", [1, 2], ["only one"], 5], ids=str)
def test_names_of_the_wrong_kind_are_refused(names: Any) -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["param_names"] = names
    refused(optimizer, saved, r"param_names must be 9 strings, got .* \(group 0 of the state dict\)")


def test_shape_that_does_not_fit_is_said_with_both_names() -> None:
    weights = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(5, 2))
    source = oxidion.AdamW([("old.weight", weights[0])])
    weights[0].grad = torch.ones(4, 3)
    source.step()
    target = oxidion.AdamW([("new.weight", weights[1])])
    says = (
        r"new\.weight: state 'exp_avg' must have shape \(5, 2\), got \(4, 3\) for 'old\.weight' of the state"
    )
    refused(target, source.state_dict(), says)


def test_failure_after_the_groups_were_taken_undoes_the_load() -> None:
    model = make_model()
    optimizer = oxidion.AdamW(model.parameters())
    run_steps(optimizer, model, range(1))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.75

    def fail(_optimizer: object) -> None:
        raise ValueError("a hook of the user")

    handle = optimizer.register_load_state_dict_post_hook(fail)
    refused(optimizer, saved, "a hook of the user")
    handle.remove()
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.75


@pytest.mark.parametrize("how", ["constructor", "group", "added", "loaded", "written"])
@pytest.mark.parametrize("cls", [oxidion.Adafactor, oxidion.AdamW])
def test_adafactor_without_a_step_size_is_refused(how: str, cls: Any) -> None:
    weight, other = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3))
    keys = {"algorithm": "adafactor", "relative_step": False}
    wanted = r"lr must be a finite number >= 0.*, got None"
    if how == "constructor":
        with pytest.raises(ValueError, match=r"lr must be a finite number|lr must be None"):
            cls([{"params": [weight], **keys}], lr=None)
        return
    if how == "group":
        with pytest.raises(ValueError, match=wanted):
            cls([{"params": [weight], **keys, "lr": None}], lr=0.1, **_fixed(cls))
        return
    optimizer = cls([{"params": [weight], **keys, "lr": 0.01}], lr=0.01, **_fixed(cls))
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    before = weight.detach().clone()
    if how == "added":
        with pytest.raises(ValueError, match=wanted):
            optimizer.add_param_group({"params": [other], **keys, "lr": None})
        assert len(optimizer.param_groups) == 1
    elif how == "loaded":
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = None
        refused(optimizer, saved, wanted + r" \(group 0 of the state dict\)")
    else:
        optimizer.param_groups[0]["lr"] = None
        state = copy.deepcopy(dict(optimizer.state[weight]))
        with pytest.raises(ValueError, match=wanted):
            optimizer.step()
        assert_same(dict(optimizer.state[weight]), state)
        optimizer.param_groups[0]["lr"] = 0.01
    assert torch.equal(weight, before)
    optimizer.step()
    assert bool(weight.isfinite().all())


def _fixed(cls: Any) -> dict[str, Any]:
    return {"relative_step": False} if cls is oxidion.Adafactor else {}


def test_relative_step_is_turned_off_only_with_a_step_size() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    optimizer = oxidion.Adafactor([weight])
    optimizer.step()
    before = weight.detach().clone()
    optimizer.param_groups[0]["relative_step"] = False
    with pytest.raises(
        ValueError, match="lr must be a finite number >= 0 with relative_step=False, got None"
    ):
        optimizer.step()
    assert torch.equal(weight, before)


@every_case
@pytest.mark.parametrize("use", ["step", "init_state", "plan", "metrics", "load_state_dict"])
def test_parameters_on_meta_are_refused_by_name_with_advice(case: Case, use: str) -> None:
    saved = stepped(case)[2]
    model = make_model().to("meta")
    late = case.build(model, named=True)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    name = late.param_groups[0]["param_names"][0]
    arguments = (saved,) if use == "load_state_dict" else ()
    says = rf"^{name}: tensors must be on the CPU or on a CUDA device, got meta\. .*to_empty\(\)"
    with pytest.raises(ValueError, match=says):
        getattr(late, use)(*arguments)
    assert not late.state
    saved["state"] = {}
    late.load_state_dict(saved)  # groups alone
    assert late.param_groups[0]["step"] == 2


def test_gradient_and_arguments_on_meta_are_named() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    with pytest.raises(ValueError, match=r"tensor.*got meta"):
        oxidion.functional.newton_schulz(weight.detach().to("meta"))
    with pytest.raises(ValueError, match=r"weight: tensors must be on .*, got meta"):
        oxidion.AdamW([("weight", nn.Parameter(weight.to("meta")))], init_state=True)


@every_case
def test_init_state_makes_states_at_once_and_for_later_groups(case: Case) -> None:
    model, same = make_model(), make_model()
    optimizer, plain = case.build(model, init_state=True), case.build(same)
    first = {
        key: value.clone() for param in model.parameters() for key, value in optimizer.state[param].items()
    }
    assert set(optimizer.state) == set(model.parameters())
    assert first
    count = len(list(model.parameters()))
    assert set(optimizer.state_dict()["state"]) == set(range(count))
    for param in model.parameters():
        assert set(optimizer.state[param]) == case.state_keys(param)
    extra, twin = (nn.Parameter(torch.full((4, 3), 0.5)) for _ in range(2))
    optimizer.add_param_group({"params": [extra], **case.required})
    plain.add_param_group({"params": [twin], **case.required})
    assert set(optimizer.state[extra]) == case.state_keys(extra)
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "lr": -1.0})
    for _ in range(2):
        for opt, net, last in ((optimizer, model, extra), (plain, same, twin)):
            run_steps(opt, net, range(1))
            last.grad = torch.ones(4, 3)
            opt.step()
    assert_params_equal([*model.parameters(), extra], [*same.parameters(), twin])


@every_case
def test_init_state_holds_after_loading_and_copying(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model, init_state=True)
    optimizer.load_state_dict(case.build(make_model()).state_dict())
    assert set(optimizer.state) == set(model.parameters())
    twin = copy.deepcopy(optimizer)
    extra = nn.Parameter(torch.ones(4, 3))
    twin.add_param_group({"params": [extra], **case.required})
    assert set(twin.state[extra]) == case.state_keys(extra)


@pytest.mark.parametrize("value", [1, None, "yes"], ids=str)
def test_init_state_that_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"init_state must be True or False, got {value!r}"):
        oxidion.Muon([nn.Parameter(torch.ones(2, 2))], init_state=value)


def test_group_whose_states_cannot_be_made_is_not_added() -> None:
    weight, late = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3, device="meta"))
    optimizer = oxidion.Muon([weight], init_state=True)
    with pytest.raises(ValueError, match="got meta"):
        optimizer.add_param_group({"params": [late]})
    assert len(optimizer.param_groups) == 1
    assert set(optimizer.state) == {weight}
    weight.grad = torch.ones(4, 3)
    optimizer.step()


@every_case
def test_parameter_without_states_is_refused_by_name(case: Case) -> None:
    """It would restart while others of its group resume; a frozen one may."""
    model = make_model()
    optimizer = case.cls(case.groups(model), **case.required)
    run_steps(optimizer, model, range(2))
    saved = optimizer.state_dict()
    lost = next(iter(saved["state"]))
    del saved["state"][lost]
    refused(optimizer, saved, "the state dict has no states of it, and has some of other parameters")
    frozen = optimizer.param_groups[0]["params"][lost].requires_grad_(False)
    frozen.grad = None
    optimizer.load_state_dict(saved)


@every_case
def test_steps_without_states_are_reported_once(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """The state dict of an optimizer that had not stepped takes groups of a checkpoint and no states."""
    model = make_model()
    optimizer = case.cls(case.groups(model), **case.required)
    run_steps(optimizer, model, range(2))
    saved = {**optimizer.state_dict(), "state": {}}
    other = make_model()
    cold = case.cls(case.groups(other), **case.required)
    cold.load_state_dict(saved)
    with caplog.at_level(logging.WARNING, "oxidion"):
        run_steps(cold, other, range(2))
    warnings = [
        record for record in caplog.records if "its checkpoint has 2 steps and no states" in record.message
    ]
    assert len(warnings) == len(cold.param_groups)
    assert "init_state() before its state_dict()" in warnings[0].message
    caplog.clear()
    with caplog.at_level(logging.WARNING, "oxidion"):
        optimizer.load_state_dict(optimizer.state_dict())
        run_steps(optimizer, model, range(1))
    assert "its checkpoint has" not in caplog.text
