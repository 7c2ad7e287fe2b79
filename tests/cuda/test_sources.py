"""Sources of kernels are loaded by need on the emulated device; one that cannot be loaded is off alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from oxidion import _oxidion

from .compile import ARCHITECTURES
from .driver import needs_nvrtc, run
from .emulator.library import KERNELS

pytestmark = needs_nvrtc

STATES = """
import sys
from oxidion import _oxidion
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)

def states():
    return {name: (state, origin, reason) for name, state, origin, _, reason in _oxidion.source_states(0)}

def load(*names):
    return {name: state for name, state, *_ in _oxidion.load_sources(0, 0, names)}
"""


def without(environment: dict[str, str], source: str) -> dict[str, str]:
    """The environment of a driver that has no kernel of a source."""
    libraries = environment["OXIDION_EMULATED_KERNELS"].split(":")
    kept = [library for library in libraries if Path(library).parent.name != source]
    assert len(kept) == len(libraries) - 1
    return {**environment, "OXIDION_EMULATED_KERNELS": ":".join(kept)}


def test_only_what_is_asked_for_is_loaded(environment: dict[str, str]) -> None:
    run(
        environment,
        STATES,
        """
        assert set(states().values()) == {("not loaded", None, None)}
        assert driver.emulator_loads() == 0
        for _ in range(2):
            loaded = load("updates.cu", "select.cu")
            assert [name for name in loaded if loaded[name] == "loaded"] == ["updates.cu", "select.cu"]
            assert driver.emulator_loads() == 2
        assert states()["updates.cu"] == ("loaded", "kept", None)
        [(seconds)] = [row[3] for row in _oxidion.source_states(0) if row[0] == "updates.cu"]
        assert 0 < seconds < 10
        """,
    )


@pytest.mark.parametrize("source", sorted(ARCHITECTURES))
def test_source_that_cannot_be_loaded_is_off_and_no_other(environment: dict[str, str], source: str) -> None:
    said = run(
        without(environment, source),
        STATES,
        f"""
        for _ in range(2):
            loaded = load(*states())
            assert loaded.pop({source!r}) == "off"
            assert set(loaded.values()) == {{"loaded"}}
        state, origin, reason = states()[{source!r}]
        assert (state, origin) == ("off", None)
        assert "NOT_FOUND" in reason
        """,
    )
    assert said.count("\n") == 1, said  # it is said once
    assert said.startswith(f"WARNING:oxidion.cuda:{source} is off on device 0: ")


def test_step_says_why_a_source_that_it_asks_for_is_off(environment: dict[str, str]) -> None:
    run(
        without(environment, "gram.cu"),
        """
        import pytest
        for _ in range(2):
            params = parameters((4, 3))
            before = params[0].clone()
            with pytest.raises(RuntimeError, match="gram_product: CUDA_ERROR_NOT_FOUND"):
                oxidion.AdamW(params).step()
            assert torch.equal(params[0], before)
        """,
    )


def test_source_is_turned_off_for_the_process(environment: dict[str, str]) -> None:
    run(
        environment,
        STATES,
        """
        import pytest
        _oxidion.turn_source_off("sums.cu", "it gives wrong numbers")
        assert load("sums.cu", "updates.cu")["sums.cu"] == "off"
        _oxidion.turn_source_off("updates.cu", "it hangs")
        assert states()["sums.cu"] == ("off", None, "it gives wrong numbers")
        assert states()["updates.cu"] == ("off", None, "it hangs")
        assert driver.emulator_loads() == 1
        with pytest.raises(RuntimeError, match="updates.cu is off: it hangs"):
            oxidion.AdamW(parameters((4, 3))).step()
        with pytest.raises(ValueError, match="there is no source"):
            _oxidion.turn_source_off("update.cu", "")
        """,
    )


def test_capture_refuses_to_load_a_source_and_keeps_loaded_ones(
    environment: dict[str, str],
) -> None:
    run(
        environment,
        STATES,
        """
        import pytest
        load("updates.cu")
        driver.emulator_begin_capture()
        assert load("updates.cu")["updates.cu"] == "loaded"
        with pytest.raises(RuntimeError, match="take one step before the capture"):
            load("updates.cu", "sums.cu")
        driver.emulator_end_capture()
        assert states()["sums.cu"] == ("not loaded", None, None)
        """,
    )


@pytest.mark.parametrize(
    ("capability", "reason"),
    [("75", "no kernels for sm_75"), ("70", "no kernels for sm_70"), ("0", "compute capability")],
)
def test_device_without_kernels_has_every_source_off(
    environment: dict[str, str], capability: str, reason: str
) -> None:
    said = run(
        {**environment, "OXIDION_EMULATED_CAPABILITY": capability},
        STATES,
        f"""
        import pytest
        for name, (state, _, reason) in states().items():
            assert state == "off" and {reason!r} in reason, (name, state, reason)
        assert set(load(*states()).values()) == {{"off"}}
        with pytest.raises(RuntimeError, match={reason!r}):
            oxidion.AdamW(parameters((4, 3))).step()
        assert driver.emulator_loads() == 0
        """,
    )
    assert said.count(reason) == 1, said


def test_source_of_another_architecture_is_not_asked_for(environment: dict[str, str]) -> None:
    run(
        {**environment, "OXIDION_EMULATED_CAPABILITY": "80"},
        STATES,
        """
        assert states()["symmetric_wgmma.cu"] == ("off", None, "it is for sm_90a only")
        assert load("symmetric_wgmma.cu")["symmetric_wgmma.cu"] == "off"
        assert driver.emulator_loads() == 0
        """,
    )


def test_every_kernel_belongs_to_its_source() -> None:
    for source, kernels in KERNELS.items():
        for kernel in kernels:
            assert _oxidion.source_of_kernel(kernel) == source
    assert _oxidion.source_of_kernel("adamw") is None
