"""8-bit states, random rounding and masters on the driver without a device: the bits of the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oxidion._core.masters import joined

from . import compile as compiler
from .driver import needs_nvrtc, run

STEPS = """
import sys, torch, oxidion
torch.manual_seed(0)
shapes = [(40, 300), (9, 513), (33, 128), (5000,), (16, 20, 30)]
dtype = torch.bfloat16 if {rounding!r} else torch.float32
params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
groups = [{{"params": params, "min_quant_numel": 0, **{rounding!r}, {keys}}}]
optimizer = oxidion.{name}(groups, state_bits=8)
for step in range(4):
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype) * 10.0 ** -step
    optimizer.step()
torch.save([[p.detach(), *optimizer.state[p].values()] for p in params], {file!r})
"""
RANDOM, MASTERS = {"stochastic_rounding": True}, {"master_weights": True}
CASES = [
    ("Lion", "'weight_decay': 0.1"),
    ("Lion", "'weight_decay': 0.1, 'cautious_wd': True, 'block_size': 64"),
    ("AdamW", "'lr': 1e-3"),
    ("AdamW", "'amsgrad': True, 'cautious_wd': True, 'block_size': 512"),
]


def both(
    environment: dict[str, str], folder: Path, steps: str, **settings: object
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Of each parameter what the steps leave of it and its state, on the CPU and on the device."""
    found = []
    for place in ("cpu", "cuda"):
        text = steps.format(file=str(folder / place), **settings)
        if place == "cuda":
            run(environment, text)
        else:
            subprocess.run([sys.executable, "-c", text], check=True, env=dict(os.environ))
        found.append(torch.load(folder / place))
    return list(zip(*found, strict=True))


NO_VECTORS = ("Dion2", "NorDion2", "NorMuon", "APOLLOAdamW")


@needs_nvrtc
@pytest.mark.parametrize("rounding", [{}, RANDOM, MASTERS], ids=["float32", "random", "masters"])
@pytest.mark.parametrize(("name", "keys"), CASES)
def test_states_and_parameters_have_the_bits_of_the_cpu(
    environment: dict[str, str], tmp_path: Path, name: str, keys: str, rounding: dict[str, bool]
) -> None:
    quantized, count = 0, 0
    for here, there in both(environment, tmp_path, STEPS, name=name, keys=keys, rounding=rounding):
        for one, two in zip(here, there, strict=True):
            assert one.dtype == two.dtype
            # Roots and quotients are exact on the emulator.
            assert torch.equal(one, two)
            quantized += one.dtype == torch.uint8
        count += 1
    # With amsgrad second moments are float32.
    assert quantized == count * (1 if name == "Lion" or "amsgrad" in keys else 2)


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("Lion", "bfloat16"), ("AdamW", "bfloat16"), ("AdamW", "float16"), ("AdEMAMix", "float16")],
)
@pytest.mark.parametrize("rounding", [{}, RANDOM], ids=["float32", "random"])
def test_moments_of_16_bits_have_the_bits_of_the_cpu(
    environment: dict[str, str], tmp_path: Path, name: str, dtype: str, rounding: dict[str, bool]
) -> None:
    text = STEPS.replace("state_bits=8", f"state_dtype=torch.{dtype}, lr=1e-3")
    for here, there in both(environment, tmp_path, text, name=name, keys="", rounding=rounding):
        moments = 0
        for one, two in zip(here, there, strict=True):
            assert one.dtype == two.dtype
            assert torch.equal(one, two)
            moments += one.dtype == getattr(torch, dtype) and one.ndim > 0
        assert moments >= (1 if name == "Lion" else 2 if name == "AdamW" else 3)


BY_MATRICES: list[tuple[str, str, dict[str, bool]]] = [
    ("Lamb", "'weight_decay': 0.1", RANDOM),
    ("Lamb", "'max_grad_norm': 0.5, 'block_size': 64", {}),
    ("CAME", "'weight_decay': 0.1", {}),
    ("CAME", "'block_size': 512", RANDOM),
    ("Dion2", "'orth_dtype': 'float32'", RANDOM),
    ("NorDion2", "'block_size': 64, 'orth_dtype': 'float32'", {}),
    ("Adafactor", "'relative_step': False, 'scale_parameter': False, 'beta1': 0.9", RANDOM),
    ("APOLLOAdamW", "'rank': 8, 'weight_decay': 0.1, 'cautious_wd': True", RANDOM),
    ("Lamb", "'weight_decay': 0.1", MASTERS),
    ("CAME", "'weight_decay': 0.1", MASTERS),
    ("NorDion2", "'orth_dtype': 'float32'", MASTERS),
    ("Adafactor", "'relative_step': False, 'beta1': 0.9", MASTERS),
    ("APOLLOAdamW", "'rank': 8, 'weight_decay': 0.1", MASTERS),
]


@needs_nvrtc
@pytest.mark.parametrize(("name", "keys", "rounding"), BY_MATRICES)
def test_passes_over_matrices_give_states_and_weights_of_the_cpu(
    environment: dict[str, str], tmp_path: Path, name: str, keys: str, rounding: dict[str, bool]
) -> None:
    text = STEPS.replace("state_bits=8", "lr=1e-3, state_bits=8")
    if name in NO_VECTORS:
        text = text.replace("(5000,), ", "")
    for here, there in both(environment, tmp_path, text, name=name, keys=keys, rounding=rounding):
        if rounding == MASTERS:
            # Of a weight the two halves alone mean nothing.
            for found in (here, there):
                low = next(at for at, one in enumerate(found) if one.dtype == torch.int16)
                found[0] = joined(found[0], found.pop(low))
        for one, two in zip(here, there, strict=True):
            assert (one.dtype, one.shape) == (two.dtype, two.shape)
            # Sums have another order, so what lies at a threshold goes to either side of it.
            distance = ~torch.isclose(one.double(), two.double(), rtol=1e-5, atol=1e-7)
            assert distance.double().mean() <= 2e-3, (one.dtype, one.shape)
        assert any(one.dtype == torch.uint8 for one in here)


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["NorMuon", "Dion2", "NorDion2"])
def test_passes_over_lines_round_moments_of_16_bits_as_the_cpu(
    environment: dict[str, str], tmp_path: Path, name: str, dtype: str
) -> None:
    text = STEPS.replace("state_bits=8", f"state_dtype=torch.{dtype}, lr=1e-3").replace("(5000,), ", "")
    keys = "'orth_dtype': 'float32'"
    for here, there in both(environment, tmp_path, text, name=name, keys=keys, rounding={}):
        moments = [pair for pair in zip(here, there, strict=True) if pair[0].dtype == getattr(torch, dtype)]
        assert moments
        for one, two in moments:
            # Sums have another order, so what lies at a threshold goes to either side of it.
            assert (one != two).double().mean() <= 5e-3, one.shape


@needs_nvrtc
def test_muon_quantizes_as_the_cpu_for_heads_of_columns(environment: dict[str, str]) -> None:
    run(
        environment,
        """
        (param,) = parameters((48, 96))
        grad = param.grad.clone()
        keys = {"params": [param], "num_heads": 3, "split_dim": 1, "block_size": 32, "min_quant_numel": 0}
        optimizer = oxidion.Muon([keys], state_bits=8, orth_dtype="float32", mu=0.5)
        optimizer.step()
        own = optimizer.state[param]
        expected = oxidion.functional.quantize_blockwise(grad, block_size=32)
        distance = (own["momentum"].int() - expected[0].int()).abs()
        assert int(distance.max()) == 1  # one of the two entries around a number
        assert torch.equal(own["momentum_absmax"], expected[1])
        """,
    )


@needs_nvrtc
def test_step_takes_few_launches_and_loads_what_it_needs(environment: dict[str, str]) -> None:
    said = run(
        environment,
        """
        for keys in ({}, {"state_bits": 8}):
            group = {"params": parameters(*[(3, 100)] * 200), "min_quant_numel": 0}
            optimizer = oxidion.AdamW([group], **keys)
            optimizer.step()
            before = driver.emulator_launches()
            optimizer.step()
            print(driver.emulator_launches() - before, driver.emulator_loads())
        """,
    )
    # Plain tables take 338 jobs. 8-bit tables take 96, and their kernels are loaded when they are needed.
    loads = len(compiler.ARCHITECTURES)
    assert said.splitlines() == [f"1 {loads - len(compiler.FORMED)}", f"3 {loads}"]


@needs_nvrtc
def test_replay_repeats_a_captured_step_on_weights_in_two_halves(
    environment: dict[str, str],
) -> None:
    run(
        environment,
        """
        def made():
            torch.manual_seed(1)
            return parameters((40, 300), (5000,), dtype=torch.bfloat16)
        expected, params = made(), made()
        reference, optimizer = [oxidion.Lion(p, lr=1e-3, master_weights=True) for p in (expected, params)]
        for _ in range(4):
            reference.step()
        optimizer.step()
        driver.emulator_begin_capture()
        optimizer.step()
        assert driver.emulator_end_capture() == 1
        for _ in range(3):
            assert driver.emulator_replay() == 0
        for one, two in zip(expected, params):
            assert torch.equal(one, two)
            for key, value in reference.state[one].items():
                assert torch.equal(value, optimizer.state[two][key])
        """,
    )


REFUSED = [
    ("Lion", {"stochastic_rounding": True}, "stochastic_rounding cannot be captured"),
    ("AdamW", {"state_bits": 8}, "states of 8 bits cannot be captured by torch.cuda.graph"),
    ("Lion", {"state_bits": 8}, "states of 8 bits cannot be captured by torch.cuda.graph"),
    ("AdamW", {"state_dtype": torch.float16}, "of 16 bits cannot be captured"),
    ("Lion", {"state_dtype": torch.bfloat16}, "Set state_dtype=torch.float32"),
    ("Lion", {"average": "ema", "average_dtype": torch.bfloat16}, "of 16 bits cannot be captured"),
    ("Muon", {"orth_method": "svd"}, "orth_method='svd' cannot be captured"),
]


@needs_nvrtc
@pytest.mark.parametrize(
    ("name", "keys", "message"), REFUSED, ids=[f"{row[0]}-{n}" for n, row in enumerate(REFUSED)]
)
def test_capture_of_what_no_replay_repeats_is_refused(
    environment: dict[str, str], name: str, keys: dict[str, object], message: str
) -> None:
    said = run(
        environment,
        textwrap.dedent(
            f"""
            params = parameters((80, 64), dtype=torch.bfloat16)
            optimizer = oxidion.{name}([{{"params": params, **{keys!r}}}], lr=1e-2)
            optimizer.step()
            before = params[0].clone()
            driver.emulator_begin_capture()
            try:
                optimizer.step()
            except ValueError as error:
                print(error)
            assert driver.emulator_end_capture() == 0
            assert torch.equal(params[0], before)
            optimizer.step()
            assert not torch.equal(params[0], before)
            """
        ),
    )
    assert message in said
    assert "CudaGraphOptimizer" in said or "Set another orth_method" in said
