"""A learning rate that the device reads when a step runs, on a driver without a device."""

from __future__ import annotations

import pytest

from .driver import TESTS, needs_nvrtc, run

pytestmark = needs_nvrtc

#: Optimizers without a product of libtorch, which are captured as a whole.
ELEMENTWISE = [
    "oxidion.AdamW(p, lr=lr, capturable=True, weight_decay=0.1)",
    "oxidion.AdamW(p, lr=lr, capturable=True, weight_decay=0.1, amsgrad=True, cautious_wd=True)",
    "oxidion.Lion(p, lr=lr, capturable=True, weight_decay=0.1)",
    "oxidion.Lamb(p, lr=lr, capturable=True, weight_decay=0.1)",
    "oxidion.Lamb(p, lr=lr, capturable=True, debias='step', max_grad_norm=1.0)",
    "oxidion.Adafactor(p, lr=lr, capturable=True, relative_step=False, weight_decay=0.1)",
    "oxidion.CAME(p, lr=lr, capturable=True, weight_decay=0.1)",
]
# Moments in 8 bits are rounded at random, which no capture repeats.
ROUNDED = ["oxidion.Lion([{'params': p, 'min_quant_numel': 0}], lr=lr, capturable=True, state_bits=8)"]
WITH_PRODUCTS = [
    "oxidion.Muon(p, lr=lr, capturable=True, weight_decay=0.1, strict=False)",
    "oxidion.NorMuon(p, lr=lr, capturable=True, weight_decay=0.1, strict=False)",
    "oxidion.Dion(p, lr=lr, capturable=True, weight_decay=0.1, rank_fraction=0.5, strict=False)",
    "oxidion.Dion(p, lr=lr, capturable=True, weight_decay=1.0, strict=False)",
    "oxidion.Dion(p, lr=lr, capturable=True, weight_decay=0.1, cautious_wd=True, strict=False)",
    "oxidion.Dion2(p, lr=lr, capturable=True, weight_decay=0.1, strict=False)",
    "oxidion.NorDion2(p, lr=lr, capturable=True, weight_decay=0.1, strict=False)",
    "oxidion.GaLoreAdamW([{'params': p, 'rank': 4}], lr=lr, capturable=True, weight_decay=0.1)",
    "oxidion.GaLoreAdamW([{'params': p, 'rank': 4}], lr, decay_order='galore', weight_decay=1, **CAPTURABLE)",
    "oxidion.GaLoreAdamW([{'params': p, 'rank': 4}], lr=lr, capturable=True, cautious_wd=True)",
    "oxidion.APOLLOAdamW([{'params': p, 'rank': 4}], lr, weight_decay=0.1, **CAPTURABLE)",
]

PAIR = """
CAPTURABLE = {"capturable": True}

def pair(make, rates, dtype):
    torch.manual_seed(1)
    ours = parameters((40, 30), (24, 40), (5,))
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    for one, other in zip(ours, theirs):
        other.grad = one.grad.clone()
    lr = torch.tensor(rates[0], dtype=dtype)
    optimizer, reference = make(ours, lr), make(theirs, rates[0])
    host = torch.Tensor.__float__
    def refuse(tensor):
        assert tensor is not lr, "the host reads the learning rate"
        return host(tensor)
    torch.Tensor.__float__ = refuse
    return ours, optimizer, lr, theirs, reference

def set_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate
"""

#: Numbers that all types hold exactly.
RATES = [0.0625, 0.015625, 0.0, 0.03125]


@pytest.mark.parametrize("make", [*ELEMENTWISE, *ROUNDED, *WITH_PRODUCTS])
def test_step_reads_the_rate_on_the_device(environment: dict[str, str], make: str) -> None:
    dtype = ("float16", "bfloat16", "float32", "float64")[len(make) % 4]
    run(
        environment,
        PAIR,
        f"""
        rates = {RATES}
        ours, optimizer, lr, theirs, reference = pair(lambda p, lr: {make}, rates, torch.{dtype})
        for rate in rates:
            lr.fill_(rate)
            set_rate(reference, rate)
            before = [p.detach().clone() for p in ours]
            optimizer.step()
            reference.step()
            for one, other, old in zip(ours, theirs, before):
                torch.testing.assert_close(one - old, other - old, rtol=1e-5, atol=1e-7)
                assert torch.equal(one, old) == (rate == 0)
        """,
    )


@pytest.mark.parametrize("make", ELEMENTWISE)
def test_replays_follow_the_rate_on_the_device(environment: dict[str, str], make: str) -> None:
    run(
        environment,
        PAIR,
        f"""
        rates = {RATES}
        ours, optimizer, lr, theirs, reference = pair(lambda p, lr: {make}, rates, torch.float32)
        optimizer.step()
        reference.step()
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() > 0
        for rate in [*rates, *reversed(rates)]:
            lr.fill_(rate)
            set_rate(reference, rate)
            assert driver.emulator_replay() == 0
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), rate
        """,
    )


@pytest.mark.parametrize("name", ["AdamW", "Dion2", "CAME"])
def test_rounded_parameters_follow_the_rate(environment: dict[str, str], name: str) -> None:
    run(
        environment,
        PAIR.replace("(5,))", "(5,), dtype=torch.bfloat16)"),
        f"""
        rates = {RATES}
        keys = dict(capturable=True, weight_decay=0.1, stochastic_rounding=True, strict=False)
        make = lambda p, lr: oxidion.{name}(p, lr=lr, **keys)
        ours, optimizer, lr, theirs, reference = pair(make, rates, torch.float32)
        for rate in rates:
            lr.fill_(rate)
            set_rate(reference, rate)
            optimizer.step()
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), rate
        """,
    )


def test_rate_of_an_uncaptured_group_is_read_by_the_host(environment: dict[str, str]) -> None:
    said = run(
        environment,
        PAIR,
        """
        make = lambda p, lr: oxidion.Lion(p, lr=lr)
        ours, optimizer, lr, theirs, reference = pair(make, [0.5], torch.float32)
        try:
            optimizer.step()
        except Exception as error:
            print("refused", error)
        """,
    )
    assert said.startswith("refused")


def test_device_decay_is_read_by_the_host_and_cannot_be_captured(environment: dict[str, str]) -> None:
    said = run(
        environment,
        PAIR,
        f"""
        import sys
        sys.path.insert(0, {str(TESTS)!r})
        from cuda.recording import Recording
        decay = torch.tensor(0.5)
        make = lambda p, lr: oxidion.AdamW(p, lr=lr, capturable=True, weight_decay=decay.clone())
        ours, optimizer, lr, theirs, reference = pair(make, [0.5], torch.float32)
        optimizer.param_groups[0]["weight_decay"] = decay
        for number in (0.5, 0.25):
            decay.fill_(number)
            reference.param_groups[0]["weight_decay"] = number
            optimizer.step()
            reference.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs)), number
        before = [p.detach().clone() for p in ours]
        recording = Recording(driver)
        recording.begin()
        try:
            optimizer.step()
        except Exception as error:
            print("refused", error)
        finally:
            recording.end()
        assert all(torch.equal(a, b) for a, b in zip(ours, before))
        optimizer.step()
        assert optimizer.param_groups[0]["step"] == 3
        """,
    )
    assert said.startswith("refused")
    assert "weight_decay" in said
