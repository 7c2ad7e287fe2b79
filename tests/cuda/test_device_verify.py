"""Compares steps on a device with the naive reference on the CPU.

Like ``test_device_cases.py`` also run on the emulated device.
"""

from __future__ import annotations

import pytest
import torch

from support.cases import ALL_CASES, EMULATED, Case

from .device_steps import ALGORITHMS, CASES, DEVICE, gradients_of, optimizer_of, parameters_of

pytestmark = [] if EMULATED else pytest.mark.cuda

#: On the emulated device the reference does not know that it is one: its vectors have the signs of LAPACK.
OTHERS = ("galore-sketch", *(() if EMULATED else ("galore-exact",)))


@pytest.mark.parametrize(
    "case",
    [*(CASES[a][0] for a in ALGORITHMS), *(c for c in ALL_CASES if c.name in OTHERS)],
    ids=str,
)
def test_verify_finds_the_reference_on_a_device(case: Case) -> None:
    params = parameters_of(case, torch.float64, DEVICE)
    optimizer = optimizer_of(case, params)
    for grads in gradients_of(case, 3):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(DEVICE)
        errors = [row["update_error"] for row in optimizer.verify()]
        assert len(errors) == len(params)
        assert all(error is not None and error < 1e-10 for error in errors), errors
        optimizer.step()
