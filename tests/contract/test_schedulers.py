"""Learning-rate schedulers and weight averaging (contract.md 4.5)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import oxidion

from .case import MOMENTUM_FACTORS
from .snapshot import assert_params_equal, assert_same, snapshot
from .table import CASES, Case, every_case, every_matrix_case, make_model, run_steps, set_grads

STEPS = 6


def _has_betas(optimizer: Optimizer) -> bool:
    return "betas" in optimizer.defaults


SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "StepLR": lambda opt: lr_scheduler.StepLR(opt, step_size=2, gamma=0.5),
    "CosineAnnealingLR": lambda opt: lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS),
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, max_lr=0.05, total_steps=STEPS + 1, cycle_momentum=_has_betas(opt)
    ),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, base_lr=0.01, max_lr=0.05, step_size_up=2, cycle_momentum=_has_betas(opt)
    ),
    "LambdaLR": lambda opt: lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "LinearLR then ExponentialLR": lambda opt: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.LinearLR(opt, 0.1, total_iters=3), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[3],
    ),
    "SWALR": lambda opt: SWALR(opt, swa_lr=0.5, anneal_epochs=3),
}
every_scheduler = pytest.mark.parametrize("make_scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())


@every_case
@every_scheduler
def test_scheduled_run_equals_one_with_manually_written_values(
    case: Case, make_scheduler: Callable[[Optimizer], Any]
) -> None:
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    scheduler = make_scheduler(optimizer)
    seen: list[float] = []
    for seed in range(STEPS):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        for group, other in zip(optimizer.param_groups, reference.param_groups, strict=True):
            assert float(group["lr"]) == pytest.approx(scheduler.get_last_lr()[0])
            other["lr"] = group["lr"]
            if "betas" in group:
                other["betas"] = tuple(group["betas"])
            if "beta2" in other:
                other["beta1"], other["beta2"] = other["betas"]
            factor = MOMENTUM_FACTORS.get(group["algorithm"])
            if factor is not None and "max_momentum" in group:
                other[factor] = group["betas"][0]
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(reference, same, range(seed, seed + 1))
        scheduler.step()
    assert len(set(seen)) >= 3, "the scheduler did not schedule"
    assert_params_equal(model.parameters(), same.parameters())
    assert not torch.equal(model.first.weight, make_model().first.weight)


@pytest.mark.parametrize("case", [case for case in CASES if case.has_betas], ids=str)
@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_default_cyclers_change_the_first_beta_and_it_acts(case: Case, name: str) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer, constant = case.build(model), case.build(same)
    scheduler = SCHEDULERS[name](optimizer)
    seen = set()
    for seed in range(STEPS):
        for group, other in zip(optimizer.param_groups, constant.param_groups, strict=True):
            other["lr"] = group["lr"]
            seen.add(group["betas"][0])
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(constant, same, range(seed, seed + 1))
        for group in optimizer.param_groups:
            if "beta1" in group:
                assert (group["beta1"], group["beta2"]) == tuple(group["betas"])
        scheduler.step()
    assert len(seen) >= 3
    # The momentum factor of a matrix algorithm follows the first beta.
    differs = {
        n: not torch.equal(p, q)
        for (n, p), q in zip(model.named_parameters(), same.parameters(), strict=True)
    }
    assert any(differs[name] for name, param in model.named_parameters() if param.ndim < 2)
    assert any(differs[name] for name, param in model.named_parameters() if param.ndim == 2)


CYCLERS: dict[str, Callable[[Optimizer], Any]] = {
    "OneCycleLR": lambda opt: lr_scheduler.OneCycleLR(
        opt, 0.02, total_steps=20, base_momentum=0.85, max_momentum=0.95
    ),
    # The first beta of the classes is 0.9: the scheduler begins with what is there.
    "CyclicLR from 0.9": lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.02, step_size_up=3),
    "CyclicLR": lambda opt: lr_scheduler.CyclicLR(
        opt, 0.01, 0.02, step_size_up=3, base_momentum=0.3, max_momentum=0.7
    ),
}


@every_matrix_case
@pytest.mark.parametrize("make", CYCLERS.values(), ids=CYCLERS.keys())
def test_cyclers_cycle_the_momentum_factor_as_that_of_torch_muon(
    case: Case, make: Callable[[Optimizer], Any]
) -> None:
    factor = MOMENTUM_FACTORS[case.algorithm]
    model, weight = make_model(), torch.nn.Parameter(torch.eye(3))
    optimizer, peer = case.build(model), torch.optim.Muon([weight], lr=0.01)
    schedulers = make(optimizer), make(peer)
    seen = []
    for seed in range(8):
        run_steps(optimizer, model, range(seed, seed + 1))
        weight.grad = torch.eye(3)
        peer.step()
        seen.append(peer.param_groups[0]["momentum"])
        for group in optimizer.param_groups:
            if group["algorithm"] == case.algorithm:
                assert group[factor] == seen[-1]
                assert group["betas"][0] == group["beta1"] == seen[-1]
        for scheduler in schedulers:
            scheduler.step()
    assert len(set(seen)) >= 3


@every_matrix_case
def test_first_beta_is_the_momentum_factor_where_only_it_changed(case: Case) -> None:
    factor = MOMENTUM_FACTORS[case.algorithm]
    model = make_model()
    optimizer = case.build(model, **{factor: 0.75})
    group = next(group for group in optimizer.param_groups if group["algorithm"] == case.algorithm)

    def after_a_step() -> float:
        run_steps(optimizer, model, range(1))
        return float(group[factor])

    assert after_a_step() == 0.75, "the constructor's betas say nothing of it"
    group["beta1"] = 0.5
    assert after_a_step() == 0.5
    assert group["betas"][0] == 0.5
    group["betas"], group[factor] = (0.25, 0.5), 0.625
    assert after_a_step() == 0.625
    optimizer.load_state_dict(optimizer.state_dict())
    group = next(group for group in optimizer.param_groups if group["algorithm"] == case.algorithm)
    assert after_a_step() == 0.625
    assert copy.deepcopy(optimizer).state_dict()["param_groups"][0][factor] == 0.625


def shown(optimizer: Optimizer, group: dict[str, Any]) -> float:
    """The momentum that Lightning's ``LearningRateMonitor(log_momentum=True)`` shows of a group."""
    use_betas = "betas" in optimizer.defaults
    return float(group["betas"][0] if use_betas else group.get("momentum", 0))


@every_matrix_case
@pytest.mark.parametrize("make", [None, *CYCLERS.values()], ids=["constant", *CYCLERS])
def test_momentum_shown_by_lightning_is_that_of_the_next_step(
    case: Case, make: Callable[[Optimizer], Any] | None
) -> None:
    factor = MOMENTUM_FACTORS[case.algorithm]
    model = make_model()
    optimizer = case.build(model, **{factor: 0.75})
    scheduler = make(optimizer) if make else None
    group = next(group for group in optimizer.param_groups if group["algorithm"] == case.algorithm)
    seen = []
    for seed in range(6):
        value = shown(optimizer, group)
        run_steps(optimizer, model, range(seed, seed + 1))
        assert value == group[factor] == shown(optimizer, group)
        seen.append(value)
        if scheduler:
            scheduler.step()
    assert len(set(seen)) == 1 if make is None else len(set(seen)) >= 3
    assert make is not None or seen[0] == 0.75


@every_matrix_case
def test_factor_once_written_is_shown_and_kept_by_a_checkpoint(case: Case) -> None:
    factor = MOMENTUM_FACTORS[case.algorithm]
    model = make_model()
    optimizer = case.build(model)
    group = next(group for group in optimizer.param_groups if group["algorithm"] == case.algorithm)
    group[factor] = 0.5
    run_steps(optimizer, model, range(1))
    assert shown(optimizer, group) == 0.5
    optimizer.load_state_dict(optimizer.state_dict())
    group = next(group for group in optimizer.param_groups if group["algorithm"] == case.algorithm)
    assert (shown(optimizer, group), group[factor], group["beta1"]) == (0.5, 0.5, 0.5)
    group[factor] = 1.0  # no beta: it is not shown, and a checkpoint of it loads
    run_steps(optimizer, model, range(1))
    assert group[factor] == 1.0
    optimizer.load_state_dict(optimizer.state_dict())


def test_first_beta_stays_adamws_where_group_vectors_go_to_it() -> None:
    weights = [torch.nn.Parameter(torch.eye(3)), torch.nn.Parameter(torch.ones(3))]
    for strict, given, wanted in (
        (False, weights, 0.9),
        (False, weights[:1], 0.95),
        (True, weights[:1], 0.95),
    ):
        optimizer = oxidion.Muon(given, strict=strict)
        assert optimizer.param_groups[0]["betas"] == (wanted, 0.95)
        assert optimizer.defaults["betas"] == (0.9, 0.95)


class FastaiLike:
    """Mimics fastai's ``OptimWrapper``: tuples of hyper-parameters are split, ``betas[0]`` is ``mom``."""

    NAMES = MappingProxyType({"momentum": "mom", "betas__0": "mom", "weight_decay": "wd"})

    def __init__(self, optimizer: Optimizer) -> None:
        self.opt = optimizer

    @staticmethod
    def split_group(group: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in group.items():
            parts = value if isinstance(value, (list, tuple)) else None
            found |= {key: value} if parts is None else {f"{key}__{i}": v for i, v in enumerate(parts)}
        return found

    @property
    def hypers(self) -> list[dict[str, Any]]:
        """The hyper-parameters under fastai's names."""
        groups = ({k: v for k, v in group.items() if k != "params"} for group in self.opt.param_groups)
        return [{self.NAMES.get(k, k): v for k, v in self.split_group(group).items()} for group in groups]

    def set_hyper(self, name: str, value: float) -> None:
        """Write a hyper-parameter into all groups, under the key that it has in the first."""
        keys = self.split_group(self.opt.param_groups[0])
        key = {self.NAMES.get(own, own): own for own in keys}[name]
        for group in self.opt.param_groups:
            if "__" not in key:
                group[key] = value
                continue
            whole, at = key.split("__")
            group[whole] = tuple(value if i == int(at) else v for i, v in enumerate(group[whole]))


@every_matrix_case
def test_momentum_that_fastai_sets_is_the_factor(case: Case) -> None:
    factor = MOMENTUM_FACTORS[case.algorithm]
    model, same = make_model(), make_model()
    optimizer, reference = case.build(model), case.build(same)
    wrapper = FastaiLike(optimizer)
    # 0.9 is the first beta of the classes: that it was set is seen all the same.
    for seed, mom in enumerate((0.9, 0.85, 0.875, 0.95, 0.95)):
        wrapper.set_hyper("mom", mom)
        wrapper.set_hyper("lr", 0.02)
        for group in reference.param_groups:
            group["betas"], group["lr"] = (mom, group["betas"][1]), 0.02
            group["beta1"] = mom
            if group["algorithm"] == case.algorithm:
                group[factor] = mom
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(reference, same, range(seed, seed + 1))
        own = [g for g in optimizer.param_groups if g["algorithm"] == case.algorithm]
        assert all(group[factor] == mom for group in own)
        assert all(hyper["mom"] == mom for hyper in wrapper.hypers)
    assert_params_equal(model.parameters(), same.parameters())


def test_cycler_refuses_an_optimizer_without_betas_aloud() -> None:
    """Adafactor's beta1 is None unless the user sets it: there is nothing to cycle."""
    optimizer = oxidion.Adafactor([torch.nn.Parameter(torch.eye(3))], lr=0.01, relative_step=False)
    with pytest.raises(ValueError, match="must support momentum or beta1 with `cycle_momentum`"):
        lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=20)


@every_case
def test_reduce_on_plateau_lowers_the_lr_that_the_step_uses(case: Case) -> None:
    model = make_model(torch.float64)
    optimizer = case.build(model, lr=0.5, weight_decay=0.0)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.25, patience=0)
    for loss in (1.0, 1.0):
        scheduler.step(loss)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    same = make_model(torch.float64)
    reference = case.build(same, lr=0.125, weight_decay=0.0)
    run_steps(optimizer, model, range(1))
    run_steps(reference, same, range(1))
    assert_params_equal(model.parameters(), same.parameters())


@every_case
@pytest.mark.parametrize("name", ["StepLR", "OneCycleLR", "LambdaLR"])
def test_tensor_lr_written_in_place_by_the_scheduler_is_followed(case: Case, name: str) -> None:
    model, same = make_model(torch.float64), make_model(torch.float64)
    optimizer = case.build(model, lr=torch.tensor(0.25, dtype=torch.float64))
    reference = case.build(same, lr=0.25)
    schedulers = [SCHEDULERS[name](opt) for opt in (optimizer, reference)]
    held = [group["lr"] for group in optimizer.param_groups]
    assert all(isinstance(lr, Tensor) for lr in held)
    for seed in range(STEPS):
        run_steps(optimizer, model, range(seed, seed + 1))
        run_steps(reference, same, range(seed, seed + 1))
        for scheduler in schedulers:
            scheduler.step()
    assert all(group["lr"] is lr for group, lr in zip(optimizer.param_groups, held, strict=True))
    assert float(held[0]) != 0.25
    # float64: the schedule itself is computed once with tensors and once with floats.
    for left, right in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12)


@every_case
@every_scheduler
def test_checkpoint_of_a_scheduled_run_resumes(
    case: Case, make_scheduler: Callable[[Optimizer], Any]
) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = case.build(model), case.build(other)
    scheduler, second = make_scheduler(optimizer), make_scheduler(resumed)
    for seed in range(3):
        run_steps(optimizer, model, range(seed, seed + 1))
        scheduler.step()
    assert all("initial_lr" in group for group in optimizer.param_groups)
    second.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, STEPS):
        for opt, net, sched in ((optimizer, model, scheduler), (resumed, other, second)):
            run_steps(opt, net, range(seed, seed + 1))
            sched.step()
    assert_same(snapshot(resumed), snapshot(optimizer))


@every_case
def test_scheduled_optimizer_can_be_copied_and_takes_new_groups(case: Case) -> None:
    model = make_model()
    optimizer = case.build(model)
    scheduler = SCHEDULERS["OneCycleLR"](optimizer)
    run_steps(optimizer, model, range(1))
    scheduler.step()
    twin_model, twin = copy.deepcopy((model, optimizer))
    run_steps(optimizer, model, range(1, 2))
    run_steps(twin, twin_model, range(1, 2))
    assert_same(snapshot(twin), snapshot(optimizer))
    template = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    late = torch.nn.Parameter(torch.randn(4, 4))
    optimizer.add_param_group({**template, "params": [late]})
    set_grads([late], 0)
    start = late.detach().clone()
    case.step(optimizer)
    assert not torch.equal(late, start)


@every_case
def test_scheduler_stepped_after_the_optimizer_warns_nothing(
    case: Case, recwarn: pytest.WarningsRecorder
) -> None:
    model = make_model()
    optimizer = case.build(model)
    scheduler = SCHEDULERS["StepLR"](optimizer)
    run_steps(optimizer, model, range(1))
    scheduler.step()
    assert not [w for w in recwarn if "lr_scheduler.step" in str(w.message)]


@every_case
@pytest.mark.parametrize("kind", ["swa", "ema"])
def test_averaged_model_follows_the_optimizer(case: Case, kind: str) -> None:
    model = make_model(torch.float64)
    optimizer = case.build(model)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75) if kind == "ema" else None)
    history: list[Tensor] = []
    for seed in range(3):
        run_steps(optimizer, model, range(seed, seed + 1))
        averaged.update_parameters(model)
        history.append(model.first.weight.detach().clone())
    expected = history[0]
    for weight in history[1:]:
        expected = 0.75 * expected + 0.25 * weight
    if kind == "swa":
        expected = torch.stack(history).mean(dim=0)
    assert not torch.equal(history[0], history[2])
    torch.testing.assert_close(averaged.module.first.weight.detach(), expected, rtol=1e-12, atol=1e-12)
