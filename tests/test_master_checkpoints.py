"""Checkpoints, tables and wrappers of optimizers that keep float32 weights of bfloat16 parameters."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import oxidion
from oxidion._core import masters
from oxidion.checkpoint import import_state_dict
from support.inputs import gaussian

SHAPES = ((24, 16), (9,))
EXACT: dict[str, Any] = {"state_dtype": torch.float32}
KEY = "master_remainder"


def weight(param: Tensor, optimizer: Any) -> Tensor:
    """The float32 weight of a parameter."""
    return masters.joined(param.detach(), optimizer.state[param][KEY])


def start(seed: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(gaussian(s, seed, at, scale=0.1).bfloat16()) for at, s in enumerate(SHAPES)]


def steps(optimizer: Any, params: Sequence[Tensor], numbers: range) -> None:
    for number in numbers:
        for at, param in enumerate(params):
            param.grad = gaussian(tuple(param.shape), 7, number, at).bfloat16().to(param.dtype)
        optimizer.step()


def made(params: Sequence[Tensor], **keys: Any) -> Any:
    return oxidion.AdamW(list(params), **{"lr": 1e-3, "master_weights": True, **EXACT, **keys})


def copied(params: Sequence[Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def assert_same(one: Sequence[Tensor], first: Any, other: Sequence[Tensor], second: Any) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(weight(mine, first), weight(theirs, second))


@pytest.mark.parametrize("how", ["state_dict", "saved", "pickled", "copied"])
def test_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(how: str) -> None:
    params = start()
    optimizer = made(params)
    steps(optimizer, params, range(5))
    if how in ("pickled", "copied"):
        held = (params, optimizer)
        others, resumed = pickle.loads(pickle.dumps(held)) if how == "pickled" else copy.deepcopy(held)
    else:
        others = copied(params)
        resumed, saved = made(others), optimizer.state_dict()
        if how == "saved":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file)
        resumed.load_state_dict(saved)
    steps(optimizer, params, range(5, 9))
    steps(resumed, others, range(5, 9))
    assert_same(params, optimizer, others, resumed)


def test_checkpoint_without_remainders_begins_at_the_parameters() -> None:
    params = start()
    plain = made(params, master_weights=False)
    steps(plain, params, range(3))
    others = copied(params)
    resumed = made(others)
    resumed.load_state_dict(plain.state_dict())
    assert resumed.param_groups[0]["master_weights"] is True, "how weights are stored, the optimizer says"
    full = [nn.Parameter(param.detach().float()) for param in params]
    exact = oxidion.AdamW(full, lr=1e-3, **EXACT)
    exact.load_state_dict({**plain.state_dict(), "param_groups": exact.state_dict()["param_groups"]})
    exact.param_groups[0]["step"] = plain.param_groups[0]["step"]
    steps(resumed, others, range(3, 6))
    steps(exact, full, range(3, 6))
    for param, own in zip(others, full, strict=True):
        assert torch.equal(weight(param, resumed), own)


def test_optimizer_without_masters_drops_remainders_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    params = start()
    optimizer = made(params)
    steps(optimizer, params, range(3))
    for others in (copied(params), [nn.Parameter(param.detach().float()) for param in params]):
        plain = made(others, master_weights=False)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="oxidion"):
            plain.load_state_dict(optimizer.state_dict())
            steps(plain, others, range(3, 4))
        assert [r.getMessage() for r in caplog.records if "low halves" in r.getMessage()] == [
            "the low halves of the float32 weights of 2 parameters are dropped: their groups have "
            "master_weights=False"
        ]
        assert plain.param_groups[0]["master_weights"] is False
        assert all(KEY not in plain.state[param] for param in others)
        assert not any(KEY in own for own in plain.state_dict()["state"].values())


@pytest.mark.parametrize("has_masters", [False, True])
def test_random_rounding_and_master_checkpoints_are_exchangeable(has_masters: bool) -> None:
    """A group says how weights are stored; the two ways do not go together."""
    kinds: dict[bool, dict[str, Any]] = {
        True: {"master_weights": True},
        False: {"master_weights": False, "stochastic_rounding": True},
    }
    params = start()
    optimizer = made(params, **kinds[has_masters])
    steps(optimizer, params, range(2))
    others = copied(params)
    resumed = made(others, **kinds[not has_masters])
    resumed.load_state_dict(optimizer.state_dict())
    group = resumed.param_groups[0]
    assert (group["master_weights"], group["stochastic_rounding"]) == (not has_masters, has_masters)
    steps(resumed, others, range(2, 4))
    assert all((KEY in resumed.state[param]) != has_masters for param in others)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_distributed_load_without_remainders_uses_the_parameters(tmp_path: Path) -> None:
    """Its planner refuses keys that a checkpoint lacks, unless an option leaves them as they are."""
    layer = nn.Linear(16, 8).bfloat16()
    params = list(layer.parameters())
    plain = oxidion.AdamW(params, lr=1e-3)
    steps(plain, params, range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(layer, plain)}, checkpoint_id=tmp_path, no_dist=True)
    plain.zero_grad()  # else torch makes no states to load into
    resumed = oxidion.AdamW(params, lr=1e-3, master_weights=True)
    held = {"optimizer": get_optimizer_state_dict(layer, resumed)}
    with pytest.raises(dcp.api.CheckpointException, match="master_remainder"):
        dcp.load(held, checkpoint_id=tmp_path, no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(held, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    set_optimizer_state_dict(layer, resumed, held["optimizer"])
    for param in params:
        assert torch.equal(resumed.state[param]["exp_avg"], plain.state[param]["exp_avg"])
        assert not resumed.state[param][KEY].any()
    assert resumed.param_groups[0]["step"] == 3
    steps(resumed, params, range(3, 5))
    assert any(bool(resumed.state[param][KEY].any()) for param in params)


def test_state_dicts_have_bytes_that_collectives_send() -> None:
    """Gloo and NCCL send no int16, which a gathered state dict of FSDP2 would need."""
    params = start()
    optimizer = made(params)
    steps(optimizer, params, range(2))
    for at, own in optimizer.state_dict()["state"].items():
        remainder = optimizer.state[params[at]][KEY]
        assert remainder.dtype == torch.int16
        assert (own[KEY].dtype, own[KEY].shape) == (torch.uint8, (*SHAPES[at], 2))
        assert own[KEY].data_ptr() == remainder.data_ptr(), "torch.distributed.checkpoint fills it in place"
        assert torch.equal(own[KEY].view(torch.int16).squeeze(-1), remainder)


def test_key_may_be_set_and_unset_between_steps() -> None:
    params = start()
    optimizer = made(params, master_weights=False)
    steps(optimizer, params, range(2))
    optimizer.param_groups[0]["master_weights"] = True
    steps(optimizer, params, range(2, 4))
    assert all(bool(optimizer.state[param][KEY].any()) for param in params)
    optimizer.param_groups[0]["master_weights"] = False
    steps(optimizer, params, range(4, 5))
    assert all(KEY not in optimizer.state[param] for param in params)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (torch.zeros(SHAPES[0]), "must be of dtype int16, got float32"),
        (torch.zeros(SHAPES[0], dtype=torch.uint8), "must be of dtype int16, got uint8"),
        (torch.zeros(3, 2, dtype=torch.uint8), r"must have shape \(24, 16\), got \(3,\)"),
        (torch.zeros(3, dtype=torch.int16), r"must have shape \(24, 16\), got \(3,\)"),
        (0, "must be a dense tensor of shape"),
    ],
)
def test_remainders_of_another_kind_are_refused(value: object, said: str) -> None:
    params = start()
    optimizer = made(params)
    steps(optimizer, params, range(1))
    saved = optimizer.state_dict()
    saved["state"][0][KEY] = value
    with pytest.raises(ValueError, match=f"state '{KEY}' {said}"):
        made(copied(params)).load_state_dict(saved)


# --------------------------------------------------------------------- imports


def fused_adam(full: Sequence[Tensor], name: str) -> dict[str, Any]:
    """What ``FusedAdam`` of apex and of Transformer Engine save, with masters under some name."""
    state = {
        at: {"exp_avg": 0.1 * torch.ones_like(w), "exp_avg_sq": torch.full_like(w, 0.02), name: w.clone()}
        for at, w in enumerate(full)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "bias_correction": True}
    return {"state": state, "param_groups": [{**group, "step": 4, "params": [0, 1]}]}


@pytest.mark.parametrize("name", ["master", "master_weight", "master_param"])
def test_float32_masters_of_others_are_taken_over(name: str) -> None:
    full = [nn.Parameter(gaussian(shape, 5, at).float()) for at, shape in enumerate(SHAPES)]
    params = [nn.Parameter(weight.detach().bfloat16()) for weight in full]
    optimizer = made(params)
    optimizer.load_state_dict(import_state_dict(fused_adam(full, name), "fused-adam", optimizer))
    exact = oxidion.AdamW(full, lr=1e-3, **EXACT)
    theirs = fused_adam(full, name)
    for own in theirs["state"].values():
        own["step"] = torch.tensor(4.0)
        del own[name]
    exact.load_state_dict({"state": theirs["state"], "param_groups": exact.state_dict()["param_groups"]})
    exact.param_groups[0]["step"] = 4
    for at, param in enumerate(params):
        assert torch.equal(weight(param, optimizer), full[at])
    steps(optimizer, params, range(3))
    steps(exact, full, range(3))
    for at, param in enumerate(params):
        assert torch.equal(weight(param, optimizer), full[at])


def test_ties_of_others_are_off_by_one_unit_of_float32() -> None:
    """They round to even: half of all ties are below what rounds to the parameter here."""
    weights = (torch.arange(0x3F80, 0x3F90, dtype=torch.int32) << 16 | 0x8000).view(torch.float32)
    params = [nn.Parameter(weights.bfloat16())]
    optimizer = made(params)
    saved = fused_adam([weights], "master")
    saved["param_groups"][0]["params"] = [0]
    optimizer.load_state_dict(import_state_dict(saved, "fused-adam", optimizer))
    found = weight(params[0], optimizer)
    off = found.view(torch.int32) - weights.view(torch.int32)
    assert off.tolist() == [-1, 0] * 8


def test_masters_of_other_parameters_are_refused() -> None:
    params = start()
    saved = fused_adam([param.detach().float() + 1 for param in params], "master")
    with pytest.raises(
        ValueError, match="a float32 weight that does not round to this bfloat16 parameter: load"
    ):
        import_state_dict(saved, "fused-adam", made(params))
    saved["state"][0]["master"] = torch.zeros(SHAPES[0], dtype=torch.float64)
    with pytest.raises(ValueError, match="master must be a dense float32 tensor"):
        import_state_dict(saved, "fused-adam")


def test_int16_remainders_of_others_are_taken_as_they_are() -> None:
    params = start()
    saved = fused_adam([param.detach().float() for param in params], "master_param")
    for own in saved["state"].values():
        own["master_param"] = torch.arange(own["exp_avg"].numel()).reshape(own["exp_avg"].shape).short()
    optimizer = made(params)
    optimizer.load_state_dict(import_state_dict(saved, "fused-adam", optimizer))
    for at, param in enumerate(params):
        assert torch.equal(optimizer.state[param][KEY], saved["state"][at]["master_param"])


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize(
    "cls", [oxidion.AdamW, oxidion.Muon, oxidion.Dion, oxidion.GaLoreAdamW, oxidion.SOAP, oxidion.Lamb]
)
def test_verify_compares_the_float32_weight(cls: Any) -> None:
    param = nn.Parameter(gaussian((24, 16), 1, scale=0.1).bfloat16())
    more = {"rank": 4, "state_bits": 32} if cls is oxidion.GaLoreAdamW else {}
    if cls is oxidion.Muon:
        more = {"orth_dtype": "float32"}
    optimizer = cls([param], lr=1e-3, master_weights=True, **EXACT, **more)
    steps(optimizer, [param], range(3))
    param.grad = gaussian((24, 16), 9).bfloat16()
    held = optimizer.state[param][KEY].clone(), param.detach().clone()
    row = optimizer.verify()[0]
    # A bfloat16 parameter of 0.1 is rounded by 2e-4, a fifth of its update.
    assert row["update_error"] < 1e-3
    assert row["update_error"] <= max(row["expected"], 1e-5) * 3
    assert torch.equal(optimizer.state[param][KEY], held[0])
    assert torch.equal(param, held[1])


def test_metrics_give_the_share_of_updates_lost_to_rounding() -> None:
    shares = {}
    for name, keys in {"nearest": {}, "master": {"master_weights": True}}.items():
        params = [nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(4))]
        groups = [{"params": params[:1], **keys}, {"params": params[1:]}]
        optimizer = oxidion.Lion(groups, lr=1e-3, weight_decay=0.0)
        params[0].grad, params[1].grad = torch.ones(8, 8).bfloat16(), torch.ones(4)
        params[0].grad[:2] = 0.0  # no update
        with torch.no_grad():
            params[0][2:4] = 0.01  # whose update is not lost
        found = optimizer.metrics()
        shares[name] = found.to_dict()["lost_updates"]
        assert not optimizer.state, "it was measured on copies"
    assert shares == {"nearest": [0.5, None], "master": [0.0, None]}
    floats = oxidion.Lion([nn.Parameter(torch.ones(4))])
    assert "lost_updates" not in floats.metrics().columns


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lr", [1e-5, 1e-12])
def test_updates_below_the_roundoff_of_float32_are_lost_too(dtype: torch.dtype, lr: float) -> None:
    param = nn.Parameter(torch.ones(8, 8, dtype=dtype))
    optimizer = oxidion.AdamW([param], lr=lr, weight_decay=0.0)
    param.grad = torch.ones_like(param)
    assert optimizer.metrics().to_dict()["lost_updates"] == [1.0]


def test_tables_say_nothing_of_remainders_that_their_copies_drop(caplog: pytest.LogCaptureFixture) -> None:
    params = start()
    optimizer = made(params)
    steps(optimizer, params, range(2))
    with caplog.at_level(logging.INFO, logger="oxidion"):
        optimizer.metrics()
        optimizer.verify()
        optimizer.explain()
    assert caplog.records == []
    assert all(KEY in optimizer.state[param] for param in params)


def test_update_rms_is_that_of_the_float32_weight() -> None:
    param = nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    optimizer = oxidion.Lion([param], lr=1e-3, weight_decay=0.0, master_weights=True)
    param.grad = torch.ones_like(param)
    assert optimizer.metrics()[0]["update_rms"] == pytest.approx(1e-3, rel=1e-4)


def test_explain_says_how_parameters_are_rounded() -> None:
    narrow = [nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(3)]
    others = [
        nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in (torch.float16, torch.float32, torch.float64)
    ]
    groups = [
        {"params": narrow[:1]},
        {"params": narrow[1:2], "master_weights": True},
        {"params": narrow[2:], "stochastic_rounding": True},
        {"params": others},
    ]
    found = oxidion.AdamW(groups).explain().to_dict()["rounding"]
    assert found == ["nearest", "master", "stochastic", "nearest", "exact", "exact"]


def test_first_step_with_nearest_rounding_names_the_ways_out(caplog: pytest.LogCaptureFixture) -> None:
    def said(**keys: Any) -> list[str]:
        params = start()
        optimizer = oxidion.AdamW(params, **keys)
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="oxidion"):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.metrics()
            steps(optimizer, params, range(3))
        return [r.getMessage() for r in caplog.records if "nearest" in r.getMessage()]

    params = start()
    optimizer = oxidion.AdamW(params)
    with caplog.at_level(logging.INFO, logger="oxidion"):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    texts = [r.getMessage() for r in caplog.records]
    assert [line.split(" are ")[0] for line in texts] == ["1 bfloat16 parameters"], "of those with a gradient"
    lines = said()
    assert len(lines) == 1
    assert lines[0].startswith("2 bfloat16 parameters are rounded to the nearest")
    assert "master_weights=True" in lines[0]
    assert "stochastic_rounding=True" in lines[0]
    assert said(master_weights=True) == said(stochastic_rounding=True) == []


# -------------------------------------------------------------------- averages


def test_averaged_brings_weights_and_remainders_back() -> None:
    params = start()
    optimizer = oxidion.AdamW(
        [{"params": params, "average": "ema", "average_decay": 0.9}], lr=1e-2, master_weights=True, **EXACT
    )
    steps(optimizer, params, range(5))
    held = [weight(param, optimizer) for param in params]
    with optimizer.averaged():
        for param in params:
            assert torch.equal(weight(param, optimizer), optimizer.state[param]["average"])
    for param, before in zip(params, held, strict=True):
        assert torch.equal(weight(param, optimizer), before)


def test_schedule_free_eval_and_train_equal_those_of_float32() -> None:
    params = start()
    full = [nn.Parameter(param.detach().float()) for param in params]
    pairs = [
        (oxidion.AdamW([{"params": own, "average": "schedule_free"}], lr=1e-2, **EXACT, **more), own)
        for own, more in ((params, {"master_weights": True}), (full, {}))
    ]
    for number in range(6):
        for optimizer, own in pairs:
            steps(optimizer, own, range(number, number + 1))
            optimizer.eval()
        for param, other in zip(params, full, strict=True):
            assert torch.equal(weight(param, pairs[0][0]), other)
        for optimizer, _ in pairs:
            optimizer.train()
    for param, other in zip(params, full, strict=True):
        assert torch.equal(weight(param, pairs[0][0]), other)


def test_strided_parameters_take_the_steps_of_others() -> None:
    base = gaussian((16, 24), 1, scale=0.1).bfloat16()
    turned, plain = nn.Parameter(base.t()), nn.Parameter(base.t().contiguous())
    assert not turned.is_contiguous()
    optimizers = [made([turned]), made([plain])]
    for optimizer, param in zip(optimizers, (turned, plain), strict=True):
        steps(optimizer, [param], range(4))
    assert torch.equal(weight(turned, optimizers[0]), weight(plain, optimizers[1]))


def test_fused_adam_without_bias_correction_is_refused() -> None:
    saved = fused_adam([param.detach().float() for param in start()], "master")
    saved["param_groups"][0]["bias_correction"] = False
    with pytest.raises(ValueError, match="bias_correction=False has no counterpart"):
        import_state_dict(saved, "fused-adam")
