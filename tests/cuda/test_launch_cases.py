"""What ``test_device_cases.py`` asks of a device, asked of the driver without one."""

from __future__ import annotations

import pytest

from support.cases import DERIVED

from .device_steps import ALGORITHMS
from .driver import needs_nvrtc, on_the_device, run
from .test_streams import STREAMS

pytestmark = needs_nvrtc
PLACE = "cuda/test_device_cases.py"


@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("8_bit_states and (adamw or dion2 or came)", 6),
        ("bfloat16_parameters and (normuon or apollo)", 2),
        ("float32 and (lamb or galore)", 2),
        ("waits_for_nothing and True", 12),
        ("graph_of_torch and (dion or adafactor or muon)", 6),
        ("polar_factor", 2),
        ("averages_follow and (schedule_free or ema)", 4),
    ],
)
def test_device_cases_hold_there(environment: dict[str, str], chosen: str, least: int) -> None:
    """Some of them."""
    passed, skipped = on_the_device(environment, chosen, PLACE)
    assert passed >= least
    assert skipped == 0


def test_classes_without_rows_by_hand_hold_there(environment: dict[str, str]) -> None:
    chosen = " or ".join(cls._ALGORITHM for cls in DERIVED)
    kinds = "(float32 or float64 or 8_bit_states)"
    passed, skipped = on_the_device(environment, f"{kinds} and ({chosen})", PLACE)
    assert passed >= 3 * len(DERIVED) > 0
    assert skipped == 0


@pytest.mark.parametrize(
    ("place", "chosen", "least"),
    [
        ("algorithm/test_average_dtype.py", "", 37),
        ("algorithm/test_weight_norm.py", "AdamW or adamw or AMSGrad or AdEMAMix or Lion", 50),
        ("algorithm/test_cases.py", "adamw-hyperball or adamw-floor or adamw-row", 20),
    ],
)
def test_averages_and_weight_norms_are_those_of_the_cpu(
    environment: dict[str, str], place: str, chosen: str, least: int
) -> None:
    passed, skipped = on_the_device(environment, chosen, place)
    assert passed >= least
    assert skipped == 0


def test_new_bases_hold_there(environment: dict[str, str]) -> None:
    assert on_the_device(environment, "", "cuda/test_device_bases.py") == (22, 0)


def test_functions_hold_there(environment: dict[str, str]) -> None:
    passed, _ = on_the_device(environment, "", "cuda/test_functions.py")
    assert passed >= 160


def test_functions_launch_on_the_current_stream(environment: dict[str, str]) -> None:
    run(
        environment,
        STREAMS,
        """
        from oxidion import functional
        matrix = torch.randn(2, 150, 140).bfloat16()
        for work in (
            lambda: functional.newton_schulz(matrix),
            lambda: functional.quantize_blockwise(matrix),
            lambda: functional.dequantize_blockwise(*functional.quantize_blockwise(matrix)),
        ):
            side.wait_stream(streams.current[0])
            before, on_side = driver.emulator_launches(), side.launches()
            with torch.cuda.stream(side):
                work()
            assert driver.emulator_launches() - before == side.launches() - on_side > 0
            streams.current[0].wait_stream(side)
        assert driver.emulator_current_device() == -1
        """,
    )


def test_verify_finds_the_reference_there(environment: dict[str, str]) -> None:
    assert on_the_device(environment, "", "cuda/test_device_verify.py") == (len(ALGORITHMS) + 1, 0)


def test_gram_form_in_float16_is_accurate_there(environment: dict[str, str]) -> None:
    assert on_the_device(environment, "", "cuda/test_half_gram.py") == (4, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_device_cases_hold_there(environment: dict[str, str]) -> None:
    """All of them: five minutes."""
    passed, skipped = on_the_device(environment, "", PLACE)
    assert passed > 80
    assert skipped == 0
