"""What users and frameworks do to tensors, groups and states between steps."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn

import oxidion


def parameter(*shape: int) -> nn.Parameter:
    generator = torch.Generator().manual_seed(0)
    param = nn.Parameter(torch.randn(shape, generator=generator))
    param.grad = torch.randn(shape, generator=generator)
    return param


def test_gradient_with_a_lazy_negation_is_read_with_its_sign() -> None:
    weights = [nn.Parameter(torch.tensor(x)) for x in (1.0, 0.5)]
    (torch.complex(*weights).conj() * torch.tensor(1 + 2j)).real.backward()
    grad = weights[1].grad
    assert grad is not None
    assert grad.is_neg()
    assert grad.item() == 2.0
    oxidion.AdamW([weights[1]], lr=0.1, weight_decay=0.0).step()
    assert weights[1].item() == pytest.approx(0.4, abs=1e-6)


@pytest.mark.parametrize("which", ["parameter", "gradient", "zero tensor"])
def test_tensor_without_memory_is_refused_by_name(which: str) -> None:
    param = parameter(4)
    optimizer = oxidion.AdamW([("scale", param)])
    if which == "zero tensor":
        param.grad = torch._efficientzerotensor((4,))
    else:
        tensor = param if which == "parameter" else param.grad
        assert tensor is not None
        tensor.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="scale: a tensor without memory"):
        optimizer.step()


def test_expanded_parameter_is_refused_before_others_are_written() -> None:
    good, bad = parameter(3), nn.Parameter(torch.zeros(1).expand(10))
    bad.grad = torch.ones(10)
    before = good.detach().clone()
    with pytest.raises(ValueError, match=r"must not share memory, got strides .* expanded"):
        oxidion.AdamW([good, bad]).step()
    assert torch.equal(good, before)


OVERLAPPING = [((4, 4), (1, 1)), ((3, 5), (0, 1)), ((4, 4), (3, 1)), ((2, 3, 4), (4, 3, 1)), ((5, 5), (4, 2))]
INTERLEAVED = [
    ((4, 5), (1, 4)),
    ((3, 2), (2, 3)),
    ((2, 3, 4), (1, 2, 6)),
    ((5, 1), (1, 1)),
    ((4, 4), (10, 2)),
]


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Adafactor"])
@pytest.mark.parametrize(("shape", "strides"), OVERLAPPING, ids=str)
def test_parameter_that_overlaps_itself_is_refused_when_bound(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    memory = torch.ones(100)
    bad, good = nn.Parameter(memory.as_strided(shape, strides)), parameter(3)
    bad.grad = torch.ones(shape)
    settings = {"strict": False} if name == "Muon" else {}
    optimizer = getattr(oxidion, name)([("bad", bad), ("good", good)], **settings)
    with pytest.raises(ValueError, match="bad: elements of parameters and states must not share memory"):
        optimizer.step()
    assert bool((memory == 1).all())


@pytest.mark.parametrize(("shape", "strides"), INTERLEAVED, ids=str)
def test_parameter_whose_elements_are_interleaved_is_taken(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    params = [nn.Parameter(torch.ones(100).as_strided(shape, strides)), nn.Parameter(torch.ones(shape))]
    for param in params:
        param.grad = torch.arange(1.0, 1 + param.numel()).view(shape)
        oxidion.AdamW([param]).step()
    assert torch.equal(*params)


@pytest.mark.parametrize("name", ["AdamW", "Muon", "Lamb"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("when", ["bound", "later"])
@pytest.mark.parametrize("which", ["parameter", "gradient", "state"])
def test_storage_that_is_too_small_is_refused(name: str, strided: bool, when: str, which: str) -> None:
    def tensor(fill: float) -> Tensor:
        return torch.full((40, 60), fill).t() if strided else torch.full((60, 40), fill)

    param, other = nn.Parameter(tensor(1.0)), parameter(3)
    param.grad, other.grad = tensor(0.5), torch.ones(3)
    settings = {"strict": False} if name == "Muon" else {}
    optimizer = getattr(oxidion, name)([("weight", param), ("scale", other)], **settings)
    if when == "later" or which == "state":
        optimizer.step()
    before = other.detach().clone()
    states = [value for value in optimizer.state[param].values() if value.ndim] if which == "state" else []
    victim = {"parameter": param, "gradient": param.grad}.get(which, *states[:1])
    victim.untyped_storage().resize_(victim.untyped_storage().nbytes() // 2)
    with pytest.raises(ValueError, match=r"weight: the storage of a tensor .* was resized to \d+ bytes"):
        optimizer.step()
    assert torch.equal(other, before)


def test_scalar_parameter_takes_a_state_of_another_dtype() -> None:
    param = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
    param.grad = torch.tensor(1.0, dtype=torch.bfloat16)
    optimizer = oxidion.AdamW([param], state_dtype=torch.float32)
    optimizer.step()
    saved = optimizer.state_dict()
    other = oxidion.AdamW([param])
    other.load_state_dict(saved)
    other.step()
    assert other.state[param]["exp_avg"].dtype == torch.float32
    assert other.state[param]["step"].item() == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, None, torch.ones(2)], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Lion", "Muon", "Dion"])
def test_live_scalar_out_of_range_is_refused_without_writes(name: str, value: object) -> None:
    param = parameter(4, 3)
    optimizer = getattr(oxidion, name)([param])
    optimizer.step()
    before, steps = param.detach().clone(), optimizer.param_groups[0]["step"]
    optimizer.param_groups[0]["lr"] = value
    with pytest.raises(ValueError, match="lr must be a finite number >= 0"):
        optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.param_groups[0]["step"] == steps
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    assert not torch.equal(param, before)


def test_group_without_a_scalar_its_algorithm_needs_is_refused() -> None:
    optimizer = oxidion.AdamW([parameter(4, 3)])
    optimizer.param_groups[0]["algorithm"] = "muon"
    with pytest.raises(ValueError, match="no 'mu'"):
        optimizer.step()


def test_algorithm_changed_to_adamw_begins_with_its_own_moments() -> None:
    param = parameter(8, 8)
    optimizer = oxidion.Dion([param], lr=0.01, weight_decay=0.0)
    for _ in range(20):
        optimizer.step()
    before = param.detach().clone()
    optimizer.param_groups[0]["algorithm"] = "adamw"
    optimizer.step()
    # The first AdamW step moves every element by lr.
    torch.testing.assert_close((param.detach() - before).abs(), torch.full((8, 8), 0.01), rtol=1e-3, atol=0)
    assert optimizer.state[param]["step"].item() == 1


def test_infinite_gradient_shows_in_lion_state_and_moves_by_sign() -> None:
    param = parameter(3)
    assert param.grad is not None
    param.grad[1] = float("inf")
    start = param.detach().clone()
    optimizer = oxidion.Lion([param], lr=0.5, weight_decay=0.0)
    optimizer.step()
    assert (param.detach() - start)[1].item() == pytest.approx(-0.5, abs=1e-6)
    assert optimizer.state[param]["exp_avg"].isinf().tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_version_counters_of_states_advance(name: str) -> None:
    param = parameter(4, 4)
    optimizer = getattr(oxidion, name)([param])
    optimizer.step()
    moment = next(iter(v for v in optimizer.state[param].values() if v.shape == param.shape))
    factor = torch.ones(4, 4, requires_grad=True)
    loss = (factor * moment).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch 2.10 and newer allow it")
def test_gradient_of_another_dtype_is_taken_where_users_allow_it() -> None:
    param = parameter(6, 4)
    exact = param.grad
    assert exact is not None
    param.grad = None
    param.grad_dtype = torch.bfloat16
    param.grad = exact.bfloat16()
    twin = parameter(6, 4)
    twin.grad = exact.bfloat16().float()
    optimizer = oxidion.Muon([param])
    assert len(optimizer.verify()) == len(optimizer.metrics()) == 1
    optimizer.step()
    oxidion.Muon([twin]).step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize(
    "adjust_lr", ["spectral_norm", "rms_norm", "original", "match_rms_adamw", "spectral_unclamped", None]
)
def test_verify_knows_every_learning_rate_rule(adjust_lr: str | None) -> None:
    optimizer = oxidion.Muon([parameter(9, 5)], adjust_lr=adjust_lr, orth_dtype="float32")
    assert optimizer.verify()[0]["update_error"] < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_verify_in_half_precision_ignores_parameter_rounding(name: str, dtype: torch.dtype) -> None:
    param = nn.Parameter(parameter(64, 32).detach().to(dtype))
    param.grad = torch.randn(64, 32).to(dtype)
    assert getattr(oxidion, name)([param]).verify()[0]["update_error"] < 0.05


def test_init_state_covers_parameters_that_came_later() -> None:
    first, later = parameter(4, 4), parameter(3, 3)
    optimizer = oxidion.Muon([first])
    optimizer.init_state()
    kept = optimizer.state[first]["momentum"]
    optimizer.add_param_group({"params": [later]})
    optimizer.init_state()
    assert "momentum" in optimizer.state[later]
    assert optimizer.state[first]["momentum"] is kept


def test_step_within_a_step_is_refused_in_every_thread() -> None:
    refused: list[str] = []

    def attempt() -> None:
        try:
            optimizer.step()
        except RuntimeError as error:
            refused.append(str(error))

    def polar(x: Tensor, epsilon: float) -> Tensor:
        attempt()
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(timeout=60)
        return x

    param = parameter(8, 8)
    optimizer = oxidion.Muon([param], newton_schulz_func=polar)
    optimizer.step()
    assert len(refused) == 2
    assert all("another step of this optimizer is running" in text for text in refused)
    assert optimizer.param_groups[0]["step"] == 1


def test_step_between_the_parts_of_another_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    param = parameter(8, 8)
    optimizer = oxidion.Muon([param])
    execute = optimizer._runner.execute

    def between(*args: object) -> None:
        with pytest.raises(RuntimeError, match="another step of this optimizer is running"):
            optimizer.step()
        execute(*args)

    monkeypatch.setattr(optimizer._runner, "execute", between)
    optimizer.step()
    assert optimizer.param_groups[0]["step"] == 1


def test_second_thread_is_refused_instead_of_waiting_for_ever() -> None:
    params = [parameter(64, 64) for _ in range(20)]
    optimizer = oxidion.Muon(params)
    optimizer.step()
    taken: list[int] = []
    refused: list[str] = []

    def attempt() -> None:
        try:
            optimizer.step()
            taken.append(1)
        except RuntimeError as error:
            refused.append(str(error))

    def work() -> None:
        for _ in range(20):
            attempt()

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert taken
    assert len(taken) + len(refused) == 40
    assert all("another step of this optimizer is running" in text for text in refused)
