"""Drivers of several versions, each without the symbols that came after it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .driver import needs_nvrtc, run, with_driver
from .test_graph import EMULATED

pytestmark = needs_nvrtc

STEPS = """
        from oxidion import _oxidion
        ours, optimizer, expected, reference = pair(oxidion.AdamW, (40, 30), (5,), warmup=1)
        for step in range(4):
            gradients(ours, expected, step)
            reference.step()
            optimizer.step()
            assert all(torch.equal(a, b) for a, b in zip(ours, expected)), step
        assert optimizer.captured and driver.emulator_updates() > 0
        assert _oxidion.graphs_refusal() is None
        """
Made = Callable[..., dict[str, str]]


@pytest.fixture
def made(environment: dict[str, str], tmp_path: Path) -> Made:
    """The environment of a process that has a driver of a version."""

    def of(version: int, *macros: str) -> dict[str, str]:
        return with_driver(environment, tmp_path / "other", f"-DDRIVER_VERSION={version}", *macros)

    return of


@pytest.mark.parametrize("version", [12010, 12020, 12040, 13000])
def test_steps_and_replays_need_nothing_that_the_driver_lacks(made: Made, version: int) -> None:
    run(made(version), EMULATED, STEPS)


@pytest.mark.parametrize(("version", "said"), [(12000, "12.0"), (11080, "11.8"), (11020, "11.2")])
def test_driver_with_too_few_parameters_has_every_source_off(made: Made, version: int, said: str) -> None:
    run(
        made(version),
        f"""
        import pytest
        from oxidion import _oxidion
        states = _oxidion.load_sources(0, 0, ["updates.cu"])
        assert {{row[1] for row in states}} == {{"off"}}
        assert {{row[4] for row in states}} == {{"driver older than 12.1: it is of {said}"}}
        params = parameters((4, 3))
        before = params[0].clone()
        with pytest.raises(RuntimeError, match="driver older than 12.1"):
            oxidion.AdamW(params).step()
        assert torch.equal(params[0], before)
        assert driver.emulator_loads() == 0
        """,
    )


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        (11020, "the driver (11.2) has no cuStreamGetCaptureInfo (11.3)"),
        (11080, "the driver (11.8) has no cuGraphExecKernelNodeSetParams (12.0)"),
        (12000, None),
    ],
)
def test_driver_says_what_graphs_lack(made: Made, version: int, missing: str | None) -> None:
    said = run(made(version), "from oxidion import _oxidion\nprint(_oxidion.graphs_refusal())")
    assert said.strip() == str(missing)


def test_graphs_are_refused_before_a_capture_begins(made: Made) -> None:
    run(
        made(12010, "-DWITHOUT_PARAMETERS_OF_GRAPHS"),
        EMULATED,
        """
        import pytest
        ours, optimizer, expected, reference = pair(oxidion.Lion, (4, 3), warmup=1)
        gradients(ours, expected, 1)
        optimizer.step()
        reference.step()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"has no cuGraphExecKernelNodeSetParams"):
                optimizer.step()
            assert not optimizer.captured and torch.equal(ours[0], expected[0])
        optimizer.optimizer.step()
        reference.step()
        assert torch.equal(ours[0], expected[0])
        """,
    )


def test_library_that_is_no_driver_is_an_error_and_no_panic(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """One without a symbol that every driver has."""
    (tmp_path / "empty.c").write_text("int cuInit(unsigned flags) { return 0; }\n")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-o", str(library), str(tmp_path / "empty.c")], check=True)
    code = "from oxidion import _oxidion\n_oxidion.source_states(0)"
    clean = {**environment, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=clean
    )
    assert "RuntimeError: CUDA: " in done.stderr
    assert "cuDriverGetVersion" in done.stderr
    assert "panicked" not in done.stderr
