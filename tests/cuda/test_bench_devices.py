"""The benchmark for devices, as far as it goes without one: contenders, reports, a trial on the CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from .driver import TESTS, needs_nvrtc, run

BENCHMARKS = TESTS.parent / "benchmarks"

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


class PeerOptimizer:
    """An optimizer of a peer that records its arguments."""

    def __init__(self, inner: Any, **settings: Any) -> None:
        self.inner, self.settings = inner, settings


@pytest.fixture
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``dion`` whose optimizers record their arguments."""
    package, graph = ModuleType("dion"), ModuleType("dion.cuda_graph")
    for name in ("Muon", "NorMuon", "Dion", "Dion2", "NorDion2"):
        setattr(package, name, type(name, (PeerOptimizer,), {}))
    graph.CudaGraphOptimizer = type("CudaGraphOptimizer", (PeerOptimizer,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dion", package)
    monkeypatch.setitem(sys.modules, "dion.cuda_graph", graph)


def tensors() -> Any:
    from workloads import gradient, make_tensors

    return make_tensors(([gradient((12, 8), 0)], [gradient((5,), 1)]))


@pytest.mark.usefixtures("_peers")
@pytest.mark.parametrize(
    ("family", "name", "own"),
    [
        ("muon", "Muon", {"nesterov": True}),
        ("normuon", "NorMuon", {}),
        ("dion2 1/4", "Dion2", {"fraction": 0.25}),
        ("nordion2 1/4", "NorDion2", {"fraction": 0.25}),
    ],
)
def test_peers_race_eagerly_compiled_by_triton_and_as_graphs(
    family: str, name: str, own: dict[str, Any]
) -> None:
    from contenders import LR, WD, contenders

    made = {entry.name: entry for entry in contenders(family, compiled=True, device="cuda")}
    plain = {"lr": LR, "weight_decay": WD, **own}
    triton = {**plain, "use_triton": True}
    for label, settings, compiled in (
        ("eager", plain, False),
        ("compiled", plain, True),
        ("triton eager", triton, False),
        ("triton compiled", triton, True),
    ):
        entry = made[f"dion.{name} {label}"]
        [optimizer] = entry.build(tensors())
        assert (type(optimizer).__name__, optimizer.settings, entry.compiled) == (name, settings, compiled)
        assert [len(group["params"]) for group in optimizer.inner] == [1, 1]
    for label, settings in (("graph", plain), ("triton graph", triton)):
        entry = made[f"dion.{name} {label}"]
        [wrapper] = entry.build(tensors())
        assert type(wrapper).__name__ == "CudaGraphOptimizer"
        assert (wrapper.settings, wrapper.inner.settings) == ({"warmup_steps": 1}, settings)
        assert not entry.compiled
    without = {entry.name for entry in contenders(family, compiled=False, device="cuda")}
    assert without == {label for label, entry in made.items() if not entry.compiled} < set(made)


def test_our_graphs_race_on_devices_only_and_our_default_leads() -> None:
    import oxidion
    from contenders import GRAPHS, contenders
    from workloads import lists

    assert set(lists()[0].families) == set(GRAPHS)
    for family in GRAPHS:
        here, there = (contenders(family, compiled=True, device=device) for device in ("cpu", "cuda"))
        assert not any("graph" in entry.name for entry in here)
        assert here[0].name == there[0].name
        assert here[0].source == "oxidion"
        [graph] = [entry for entry in there if entry.name == f"{here[0].name} graph"]
        [wrapper] = graph.build(tensors())
        assert isinstance(wrapper, oxidion.graph.CudaGraphOptimizer)
        [plain] = here[0].build(tensors())
        assert type(wrapper.optimizer) is type(plain)
        assert wrapper.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_every_list_has_families_that_contenders_are_there_for() -> None:
    from contenders import contenders
    from workloads import lists

    assert {"gpt160m", "llama-1b", "4096x4096", "4096x11008", "1b"} <= {work.name for work in lists()}
    for work in lists():
        assert work.families
        assert all(contenders(family, compiled=False, device="cuda") for family in work.families)


def result() -> dict[str, Any]:
    """A made-up result: what takes how long is round."""
    ours = {"source": "oxidion", "status": "ok", "device": [0.002] * 4, "host": [0.0005] * 4}
    quality = {"sigma_max": 1.125, "orthogonality": 0.25, "cosine": 0.984}
    peer = {"source": "microsoft/dion", "status": "ok", "device": [0.005] * 4, "host": [0.004] * 4}
    missing = {"source": "torch", "status": "not installed"}
    failed = {**peer, "quality": {"status": "failed: ValueError: x"}}
    rows = {"oxidion.Muon": {**ours, "quality": quality}, "dion.Muon eager": failed, "other": missing}
    cublas = {"source": "torch", "status": "ok", "seconds": [2e-3] * 4, "repeats": 1}
    kernel = {"source": "oxidion", "status": "ok", "seconds": [1.25e-3] * 4, "repeats": 1}
    products = {"torch (cuBLAS)": cublas, "oxidion symmetric_wgmma": kernel, "dion ns_line_1": missing}
    return {
        "device": "NVIDIA H200",
        "machine": {"date": "2026-11-23"},
        "versions": {"torch": "2.11"},
        "ceilings": {
            "bfloat16_tflops": 800.0,
            "float32_tflops": 50.0,
            "copy_gb_per_s": 4000.0,
            "launch_us": 3.0,
        },
        "races": [{"workload": "4096x4096", "family": "muon", "numel": 4 * 4096**2, "contenders": rows}],
        "products": [{"shape": [2, 1024, 4096], "flops": 1e12, "contenders": products}],
    }


@pytest.fixture
def cuda() -> Any:
    """The script: a folder of tests has its name too."""
    spec = importlib.util.spec_from_file_location("bench_cuda", BENCHMARKS / "cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tables_have_ratios_floors_quality_and_rates_of_a_result(cuda: Any) -> None:
    kept = cuda.summed_up(result())
    lines = "\n".join(cuda.tables(kept)).splitlines()
    # Four of 4096 x 4096: 20 * 4096^3 operations each at 800 TFLOP/s, and 24 bytes an element at 4 TB/s.
    floor = 4 * (20 * 4096**3 / 800e12 + 24 * 4096**2 / 4e12) / 0.002
    ours = next(line for line in lines if "| oxidion.Muon |" in line)
    assert ours == (
        "| 4096x4096 | muon | oxidion.Muon | 2.000 | 0.500 | 1.00 [1.00, 1.00] | 1.00 [1.00, 1.00] "
        f"| {100 * floor:.0f} % | 1.1250 | 0.2500 | 0.9840 |"
    )
    theirs = next(line for line in lines if "dion.Muon eager" in line)
    assert "| 5.000 | 4.000 | 2.50 [2.50, 2.50] | 8.00 [8.00, 8.00] |" in theirs
    assert theirs.endswith("| failed: ValueError: x |  |  |")
    assert any("| other | not installed |" in line for line in lines)
    assert any("| torch (cuBLAS) | 2000.0 | 500.0 | 1.00 [1.00, 1.00] |" in line for line in lines)
    assert any("symmetric_wgmma | 1250.0 | 800.0 | 1.60 [1.60, 1.60] |" in line for line in lines)
    assert {line.count("|") for line in lines if line.startswith(("| 4096x4096", "| list"))} == {12}
    row = kept["races"][0]["contenders"]["dion.Muon eager"]
    assert row["device"] == pytest.approx([2.5] * 3)
    assert "seconds" not in kept["products"][0]["contenders"]["torch (cuBLAS)"]


def test_files_are_named_by_the_device() -> None:
    from device_report import stem_of

    names = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "")
    assert [stem_of(name) for name in names] == ["h200", "a100-sxm4-80gb", ""]


def test_quality_of_known_matrices_is_what_it_is() -> None:
    from quality import cosine, orthonormality, polar

    torch.manual_seed(0)
    for shape in ((5, 9), (9, 5), (6, 6)):
        x = torch.randn(shape, dtype=torch.float64)
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        torch.testing.assert_close(polar(x), left @ right, rtol=0, atol=1e-9)
        sigma, off = orthonormality(2 * left @ right)
        assert (sigma, off) == (pytest.approx(2.0), pytest.approx(3.0))  # |4 I - I|_F / sqrt(m)
        assert cosine(left @ right, polar(x)) == pytest.approx(1.0)
        assert cosine(x, -x) == pytest.approx(-1.0)


def test_trial_on_the_cpu_judges_what_it_times(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "cuda.py"), "--device", "cpu", "--only", "trial"]
    done = subprocess.run(
        [*command, "--rounds", "2", "--out", str(tmp_path), "--name", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "x.json").read_text())
    assert [race["family"] for race in found["races"]] == [
        "dion r=1/4",
        "dion2 1/4",
        "nordion2 1/4",
        "normuon",
    ]
    by_family = {race["family"]: race["contenders"] for race in found["races"]}
    exact = by_family["dion r=1/4"]["oxidion.Dion"]["quality"]
    assert exact["orthogonality"] < 1e-3
    assert exact["cosine"] > 0.999
    # Polar Express takes singular values to 0.86 .. 1.14.
    selected = by_family["dion2 1/4"]["oxidion.Dion2"]["quality"]
    assert 1.0 < selected["sigma_max"] < 1.2
    assert selected["orthogonality"] < 0.4
    assert selected["cosine"] > 0.97
    assert by_family["normuon"]["oxidion.NorMuon"]["quality"]["cosine"] > 0.97
    [product] = found["products"]
    row = product["contenders"]["torch (cuBLAS)"]
    assert row["status"] == "ok"
    assert 0 < row["us"] < math.inf
    for name in ("symmetric_mma", "symmetric_wgmma"):
        assert product["contenders"][f"oxidion {name}"]["status"] == "needs a CUDA device"


@needs_nvrtc
def test_benchmark_launches_symmetric_products_as_the_core_does(
    environment: dict[str, str],
) -> None:
    run(
        environment,
        f"""
        import sys
        sys.path.insert(0, {str(BENCHMARKS)!r})
        from cuda_kernels import SymmetricKernels, is_product
        kernels = SymmetricKernels()
        assert kernels.names == ["symmetric_mma", "symmetric_wgmma"]
        for shape in ((2, 136, 200), (1, 304, 72), (3, 128, 64)):
            x = torch.randn(shape).bfloat16()
            for name in kernels.names:
                before = driver.emulator_launches_of(name.encode())
                out = torch.zeros(shape[0], shape[1], shape[1]).bfloat16()
                assert not is_product(x, out)
                kernels.multiply(name, x, out)
                assert is_product(x, out), (name, shape)
                assert driver.emulator_launches_of(name.encode()) == before + 1
        """,
    )
