"""Steps on a device by libtorch alone: the tests of steps once more, with memory of the host as a device's.

Libtorch computes the same on every device, so no device is needed to know that the formulas are right.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from .driver import on_the_device

ENVIRONMENT = {**os.environ, "OXIDION_CUDA": "libtorch"}
OWN_SIGNS = "not galore-exact"
"""On devices singular vectors have signs by a rule, not LAPACK's, which the reference has."""
SAID_LATER = "not whose_squares_overflow"
"""What a device finds out is said one step later."""


@pytest.mark.parametrize(
    ("place", "chosen", "least"),
    [
        ("algorithm/test_cases.py", OWN_SIGNS, 900),
        ("algorithm/test_huge_gradients.py", "", 300),
        ("algorithm/test_stochastic_rounding.py", "", 50),
        ("algorithm/test_average_dtype.py", "", 37),
        ("algorithm/test_master_weights.py", "not run_equals or default or hyperball", 80),
        ("algorithm/test_weight_norm.py", "AdamW or adamw or AMSGrad or AdEMAMix or Lion", 50),
        ("algorithm/test_dion_degenerate.py", "", 100),
        ("algorithm/test_dion_orthonormal.py", "", 70),
        ("algorithm/test_edges.py", OWN_SIGNS, 50),
        ("algorithm/test_galore_guard.py", SAID_LATER, 5),
        ("test_golden.py", "", 50),
        ("distributed/test_eight_bit.py", "", 10),
        ("cuda/test_functions.py", "", 160),
        pytest.param(
            "distributed/test_sim_equivalence.py",
            f"float64 and (fsdp2-tp2 or hsdp-compressed) and {OWN_SIGNS}",
            50,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_steps_by_libtorch_follow_the_reference(place: str, chosen: str, least: int) -> None:
    passed, _ = on_the_device(ENVIRONMENT, chosen, place)
    assert passed >= least


CODE = """
import sys, torch, oxidion
from oxidion._core import masters
from oxidion._cuda import device
if {emulated}:
    device.prepare(emulated=True)
torch.set_num_threads(1)
results = dict()
for name, given, dtype in {cases}:
    keys = dict(given)
    params = [
        torch.nn.Parameter(torch.sin(torch.arange(m * n).double() * 0.7).reshape(m, n).to(dtype))
        for m, n in ((40, 24), (24, 40), (24, 24), (300, 4))
    ]
    group = {{"params": params, **{{key: keys.pop(key) for key in [*keys] if key.startswith("average")}}}}
    group |= {{"min_quant_numel": 0, "block_size": 16}} if "state_bits" in keys else {{}}
    optimizer = getattr(oxidion, name)([group], lr=0.01, weight_decay=0.1, **keys)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = torch.cos(torch.arange(p.numel()) * (1.1 + step + i)).reshape(p.shape).to(dtype)
        optimizer.step()
    states = [t for p in params for t in optimizer.state[p].values() if torch.is_tensor(t)]
    states = [t for t in states if t.dtype != torch.int16]
    weights = [masters.weight(p, optimizer.state[p]) for p in params]
    results[f"{{name}} {{given}} {{dtype}}"] = weights + states
torch.save(results, sys.argv[1])
"""
ELEMENTWISE = ("AdamW", "Lion", "AdEMAMix", "Lamb", "CAME")
CASES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    *((name, {"state_bits": 8}, torch.float32) for name in ELEMENTWISE),
    *((name, {"state_dtype": torch.bfloat16}, torch.float32) for name in (*ELEMENTWISE, "Muon", "SOAP")),
    # CAME has sums, whose rounding takes some numbers over a threshold of float16.
    *((name, {"state_dtype": torch.float16}, torch.bfloat16) for name in ELEMENTWISE if name != "CAME"),
    *((name, {"stochastic_rounding": True}, torch.bfloat16) for name in ELEMENTWISE),
    ("Muon", {"state_bits": 8}, torch.float32),
    ("NorDion2", {"stochastic_rounding": True}, torch.bfloat16),
    *((name, {"master_weights": True}, torch.bfloat16) for name in (*ELEMENTWISE, "Muon", "NorDion2")),
    ("Lion", {"master_weights": True, "state_bits": 8}, torch.bfloat16),
    *(
        ("Lion", {"average": rule, "average_dtype": "bfloat16"}, torch.bfloat16)
        for rule in ("ema", "schedule_free")
    ),
]

PRODUCTS = {"Muon": {"orth_dtype": "float32"}, "NorDion2": {"orth_dtype": "float32"}}
"""Which kernel multiplies bfloat16 matrices depends on the processor."""
CASES = [(name, {**keys, **PRODUCTS.get(name, {})}, dtype) for name, keys, dtype in CASES]


OF_LINES: list[tuple[str, dict[str, Any], torch.dtype]] = [
    (name, {"state_dtype": dtype, "orth_dtype": "float32"}, torch.float32)
    for name in ("NorMuon", "Dion2", "NorDion2")
    for dtype in (torch.bfloat16, torch.float16)
]
"""Classes whose passes are over rows and columns of a state."""


@pytest.mark.parametrize("cases", [CASES, OF_LINES], ids=["elements", "lines"])
def test_quantized_states_and_random_bits_equal_cpu_kernels(
    tmp_path: Any, cases: list[tuple[str, dict[str, Any], torch.dtype]]
) -> None:
    for emulated in (False, True):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                CODE.format(emulated=emulated, cases=cases),
                str(tmp_path / str(emulated)),
            ],
            env={**ENVIRONMENT, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    expected, found = (torch.load(tmp_path / str(emulated)) for emulated in (False, True))
    assert len(expected) == len(cases)
    for name, tensors in expected.items():
        kinds = {own.dtype for own in tensors}
        assert ("state_bits" in name) == (torch.uint8 in kinds), name
        for own, other in zip(tensors, found[name], strict=True):
            if own.dtype in (torch.uint8, torch.bfloat16, torch.float16):
                assert torch.equal(own, other), name
            else:
                torch.testing.assert_close(own, other, rtol=4 * 2.0**-22, atol=1e-6)


@pytest.mark.parametrize("word", ["atem", "aten", "1"])
def test_other_words_are_refused(word: str) -> None:
    code = "import torch, oxidion\nfrom oxidion._cuda import device\ndevice.prepare(emulated=True)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OXIDION_CUDA": word},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert f"OXIDION_CUDA must be auto, libtorch or kernels, got '{word}'" in done.stderr
