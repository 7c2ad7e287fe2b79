"""Sources of kernels that are off: libtorch computes in their place, and only there."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import oxidion
from oxidion import _oxidion, graph
from oxidion._cuda import device

from .driver import Environment, needs_nvrtc, run

pytestmark = needs_nvrtc
CLASSES: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Lion": {"state_bits": 8},
    "Lamb": {"state_bits": 8},
    "CAME": {},
    "Muon": {"orth_dtype": "float32"},
    "NorMuon": {"orth_dtype": "float32"},
    "Dion": {"rank_fraction": 0.5},
    "NorDion2": {"orth_dtype": "float32"},
    "GaLoreAdamW": {"rank": 4, "update_proj_gap": 2},
    "APOLLOAdamW": {"rank": 4, "update_proj_gap": 2},
}
STEPS = """
import json
import oxidion
from oxidion import _oxidion, graph
from oxidion._cuda import device
if SOURCE:
    _oxidion.turn_source_off(SOURCE, "planted")
found = dict()
for name, keys in CLASSES.items():
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((20, 12), (12, 20), (12, 12))]
    optimizer = getattr(oxidion, name)(params, lr=0.01, **keys)
    for step in range(3):
        for p in params:
            p.grad = torch.randn(p.shape)
        optimizer.step()
    found[name] = [p.detach().double().flatten().tolist() for p in params]
states = {name: state for name, state, *_ in _oxidion.source_states(0)}
print(json.dumps([found, states]))
"""
NAMES = [
    *("updates.cu", "symmetric_mma.cu", "quantized.cu", "quantized_sums.cu", "gram.cu", "cholesky.cu"),
    *("copies.cu", "messages.cu", "select.cu", "sums.cu", "totals.cu"),
    *("factors.cu", "rows.cu", "means.cu", "normals.cu"),
]


@pytest.fixture(scope="module")
def auto(environment: Environment) -> Any:
    """A process that takes kernels where they can be had."""
    made = Environment({**environment, "OXIDION_CUDA": "auto"})
    yield made
    made.forks.stop()


def steps(environment: Environment, source: str) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Parameters after some steps of each class, and the states of all sources."""
    said = run(environment, f"SOURCE, CLASSES = {source!r}, {CLASSES!r}\n", STEPS)
    found, states = json.loads(said.strip().splitlines()[-1])
    return found, states


@pytest.fixture(scope="module")
def whole(auto: Environment) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """With all sources."""
    return steps(auto, "")


def test_every_source_is_named(whole: tuple[Any, dict[str, str]]) -> None:
    assert {*NAMES, "symmetric_wgmma.cu"} == set(whole[1])
    assert "off" not in {state for name, state in whole[1].items() if name in NAMES}


@pytest.mark.parametrize("source", NAMES)
def test_every_class_steps_without_a_source(
    auto: Environment, whole: tuple[dict[str, list[list[float]]], dict[str, str]], source: str
) -> None:
    found, states = steps(auto, source)
    assert states[source] == "off"
    assert [name for name, state in states.items() if state == "off" and name in NAMES] == [source]
    for name, params in whole[0].items():
        for own, expected in zip(found[name], params, strict=True):
            assert own == pytest.approx(expected, rel=1e-4, abs=2e-5), name


def test_adamw_needs_one_source(auto: Environment) -> None:
    said = run(
        auto,
        """
        from oxidion import _oxidion
        oxidion.AdamW(parameters((8, 8)), lr=0.1).step()
        print([name for name, state, *_ in _oxidion.source_states(0) if state == "loaded"])
        """,
    )
    assert said.strip().splitlines()[-1] == "['updates.cu']"


@pytest.mark.parametrize("capability", ["70", "75"])
def test_devices_that_kernels_are_not_for_step_by_libtorch(environment: Environment, capability: str) -> None:
    made = Environment({**environment, "OXIDION_CUDA": "auto", "OXIDION_EMULATED_CAPABILITY": capability})
    said = run(
        dict(made),
        """
        import logging
        from oxidion import _oxidion
        logged = []
        class Collect(logging.Handler):
            def emit(self, record):
                logged.append(record.getMessage())
        logging.getLogger("oxidion.cuda").addHandler(Collect())
        params = parameters((8, 8), (16, 8))
        before = [p.detach().clone() for p in params]
        for optimizer in (oxidion.Muon(params, lr=0.1), oxidion.AdamW(params, lr=0.1)):
            for _ in range(3):
                optimizer.step()
        assert all(bool((p.detach() != b).all()) for p, b in zip(params, before))
        print(len(logged), {state for _, state, *_ in _oxidion.source_states(0)}, logged[0])
        """,
    )
    assert "'off'" in said
    assert f"sm_{capability}" in said


def test_kernels_alone_are_an_error_where_one_is_off(environment: Environment) -> None:
    said = run(
        environment,
        """
        from oxidion import _oxidion
        _oxidion.turn_source_off("updates.cu", "planted")
        try:
            oxidion.AdamW(parameters((8, 8)), lr=0.1).step()
        except RuntimeError as error:
            print(error)
        """,
    )
    assert "updates.cu is off: planted" in said


AVERAGED = """
import oxidion
from oxidion import _oxidion
_oxidion.turn_source_off("updates.cu", "planted")
found = dict()
for rule in ("ema", "schedule_free"):
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(20, 12, dtype=dtype))
        group = {"params": [param], "average": rule}
        optimizer = oxidion.AdamW([group], lr=0.1, weight_decay=0.1)
        for _ in range(10):
            param.grad = torch.randn(20, 12, dtype=dtype)
            optimizer.step()
        both = (param.detach(), optimizer.state[param]["average"])
        found[f"{rule} {dtype}"] = [x.double().flatten().tolist() for x in both]
print(json.dumps(found))
"""


def test_operands_that_take_each_others_place_are_kept_separate(
    auto: Environment, environment: Environment
) -> None:
    """In their own type the formula's values are the operands themselves: one is written before the other."""
    here = json.loads(run(auto, "import json\n" + AVERAGED))
    kernels = AVERAGED.replace('_oxidion.turn_source_off("updates.cu", "planted")\n', "")
    there = json.loads(run(environment, "import json\n" + kernels))
    assert here.keys() == there.keys()
    for case, pair in here.items():
        bar = 1e-12 if "float64" in case else 1e-5
        for mine, its in zip(pair, there[case], strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=bar, atol=bar)


def test_names_are_those_of_the_core() -> None:
    assert {_oxidion.source_of_kernel(name) for name in ("adamw_few", "fill_normals")} <= {*NAMES}


def test_device_is_described_with_what_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device("cuda", 0)
    states = [("updates.cu", "loaded"), ("select.cu", "off"), ("symmetric_wgmma.cu", "off")]
    monkeypatch.setattr(device, "source_states", lambda _: states)
    assert device.described(where) == "cuda, by libtorch instead of select.cu"
    states[1] = ("select.cu", "not loaded")
    assert device.described(where) == "cuda"
    assert device.described(torch.device("cpu")) == "cpu"

    def refused(_: int) -> list[Any]:
        raise RuntimeError("no driver")

    monkeypatch.setattr(device, "source_states", refused)
    assert device.described(where) == "cuda, by libtorch"


def test_graphs_are_left_out_where_libtorch_computes(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = graph.CudaGraphOptimizer(oxidion.AdamW([param], lr=0.1), warmup_steps=1)
    monkeypatch.setattr(graph, "refusal_of_graphs", lambda _: "on cuda, by libtorch")
    before = param.detach().clone()
    for _ in range(3):
        param.grad = torch.ones(3)
        optimizer.step()
    assert not optimizer.captured
    assert not torch.equal(param.detach(), before)
    assert [str(w.message) for w in recwarn] == ["steps are taken without a graph: on cuda, by libtorch"]
    where = torch.device("cuda", 0)
    monkeypatch.setattr(device, "source_states", lambda _: [("updates.cu", "off")])
    assert "updates.cu" in device.refusal_of_graphs(where)
    monkeypatch.setattr(device, "source_states", lambda _: [("updates.cu", "loaded")])
    monkeypatch.delenv("OXIDION_CUDA", raising=False)
    assert device.refusal_of_graphs(where) == ""
    monkeypatch.setenv("OXIDION_CUDA", "libtorch")
    assert "by libtorch" in device.refusal_of_graphs(where)
