"""``python -m oxidion plan``: manual figures, sums over ranks, size and time of a big plan, messages."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from oxidion.__main__ import main
from oxidion._planning import models
from oxidion._planning.models import Config
from oxidion._planning.simulate import Settings, Simulation, human, simulate
from support import forks

TINY = {"layers": 4, "dim": 8, "heads": 2, "kv_heads": 1, "hidden": 16, "vocab": 32, "gated": True}
UNEVEN = {"layers": 3, "dim": 24, "heads": 3, "kv_heads": 1, "hidden": 41, "vocab": 50, "gated": False}
PUBLISHED = {
    "gpt-160m": 160e6,  # with embedding and head, each 50304 × 768; without position embeddings
    "llama-1b": 1.236e9,  # Llama 3.2 1B, whose head is its embedding
    "llama-8b": 8.03e9,
    "llama-70b": 70.6e9,
    "llama-405b": 405.8e9,
    "mixtral-8x7b": 46.7e9,
    "deepseek-v3": 671e9,
}
FLOAT = 4

Write = Callable[[dict], str]


@pytest.fixture
def model(tmp_path: Path) -> Write:
    """Writes a configuration to a file; gives its path."""

    def write(values: dict) -> str:
        path = tmp_path / "model.json"
        path.write_text(json.dumps(values))
        return str(path)

    return write


def every_rank(model: str, mesh: str, algorithm: str, compressed: bool = False) -> list:
    """The simulation and the transfers of each rank, in pairs."""
    sizes = models.parse_mesh(mesh)
    settings = Settings(algorithm, 0.5, "float32", compressed=compressed)
    found = [
        simulate(model, sizes, replace(settings, rank=rank)) for rank in range(math.prod(sizes.values()))
    ]
    return [(simulation, plan.transfers) for simulation, plan in found]


@pytest.mark.parametrize("name", PUBLISHED)
def test_built_in_model_has_the_published_number_of_parameters(name: str) -> None:
    parameters = models.load(name).parameters()
    assert sum(p.numel for p in parameters) == pytest.approx(PUBLISHED[name], rel=0.03)
    assert len({p.name for p in parameters}) == len(parameters)
    assert PUBLISHED.keys() == models.BUILT_IN.keys()


def test_layer_has_the_shapes_and_kinds_of_its_configuration() -> None:
    kinds = {
        p.name.removeprefix("layers.0."): (p.kind, p.shape)
        for p in Config(1, 8, 4, 2, 20, 32, gated=True).parameters()
    }
    assert kinds == {
        "embedding.weight": ("embedding", (32, 8)),
        "attention_norm.weight": ("vector", (8,)),
        "attention.q.weight": ("column", (8, 8)),
        "attention.k.weight": ("column", (4, 8)),
        "attention.v.weight": ("column", (4, 8)),
        "attention.o.weight": ("row", (8, 8)),
        "mlp_norm.weight": ("vector", (8,)),
        "mlp.gate.weight": ("column", (20, 8)),
        "mlp.up.weight": ("column", (20, 8)),
        "mlp.down.weight": ("row", (8, 20)),
        "norm.weight": ("vector", (8,)),
        "head.weight": ("head", (32, 8)),
    }


def test_ranks_are_numbered_in_row_major_order() -> None:
    mesh = models.parse_mesh("tp=2, dp=2,fs=3")
    assert list(mesh) == ["dp", "fs", "tp"]
    assert models.lines(mesh, 9) == {"dp": ([3, 9], 1), "fs": ([7, 9, 11], 1), "tp": ([8, 9], 1)}


def test_memory_of_a_small_model_is_what_it_is_by_hand(model: Write) -> None:
    simulation, _ = simulate(model(TINY), {"fs": 2, "tp": 2}, Settings("dion", 0.5, "float32"))
    layers = TINY["layers"]
    matrices = layers * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 16 * 8)
    vectors = (2 * layers + 1) * 8
    tables = 2 * 32 * 8
    # Matrices and tables are cut by both axes; vectors by fs alone.
    stored = matrices // 4 + tables // 4 + vectors // 2
    # Q: short side × rank (half of it), its rows by the axis of the short side, its columns by the other.
    q = layers * (2 * 8 * 4 + 2 * 4 * 2 + 3 * 8 * 4) // 4
    steps = 2 * layers + 1 + 2
    states = matrices // 4 + q + 2 * (tables // 4 + vectors // 2) + steps
    assert simulation.parameters == matrices + tables + vectors
    assert (simulation.matrices, simulation.others) == (7 * layers, 2 * layers + 3)
    assert simulation.memory["parameters"] == simulation.memory["gradients"] == stored * FLOAT
    assert simulation.memory["states"] == states * FLOAT
    assert simulation.memory["workspace"] > 0


def test_narrow_dtypes_scale_memory(model: Write) -> None:
    wide, _ = simulate(model(TINY), {"fs": 2}, Settings("lion", dtype="float32"))
    narrow, _ = simulate(model(TINY), {"fs": 2}, Settings("lion", dtype="bfloat16", state_dtype="float32"))
    assert narrow.memory["parameters"] * 2 == wide.memory["parameters"]
    assert narrow.memory["states"] == wide.memory["states"]


def test_muon_moves_its_matrices_twice_by_all_to_all(model: Write) -> None:
    simulation, _ = simulate(model(TINY), {"fs": 4}, Settings("muon", dtype="float64"))  # never bfloat16
    (wire,) = simulation.wire
    local, shapes = 4 * (2 * 8 * 8 + 2 * 4 * 8 + 3 * 16 * 8) // 4, 4  # [8, 8], [4, 8], [16, 8], [8, 16]
    assert wire.kinds == {"all_to_all": wire.collectives} == {"all_to_all": 2 * shapes}
    assert wire.bytes == 2 * local * 2 * FLOAT


def test_dion_moves_only_matrices_of_its_rank(model: Write) -> None:
    ranks = 4
    simulation, _ = simulate(model(TINY), {"fs": ranks}, Settings("dion", 0.5, "float32", route="keep"))
    expected, kinds = 0, Counter[str]()
    for count, rows, cols in ((8, 8, 8), (8, 4, 8), (8, 16, 8), (4, 8, 16)):
        rank = min(rows, cols) // 2
        if rows >= cols:  # rows, the long side, are cut: Q is gathered, P changes hands twice, R is summed
            expected += count * (cols * rank // ranks + 2 * rows // ranks * rank + cols * rank)
            kinds.update(["all_gather", "all_to_all", "all_to_all", "all_reduce"])
        else:  # the short side is cut: P is summed where it goes and handed back, the norms of R are summed
            expected += count * (cols * rank + cols * rank // ranks + rank)
            kinds.update(["reduce_scatter", "all_gather", "all_reduce"])
    (wire,) = simulation.wire
    assert wire.kinds == kinds
    assert wire.bytes == expected * FLOAT


def test_compressed_replicas_send_less_than_the_gradients(model: Write) -> None:
    big = dict(TINY, dim=64, hidden=128)
    mesh = {"dp": 2, "fs": 2}
    plain, _ = simulate(model(big), mesh, Settings("dion", 0.125, "float32"))
    compressed, _ = simulate(model(big), mesh, Settings("dion", 0.125, "float32", compressed=True))
    assert plain.gradient_sync == plain.memory["gradients"]  # a ring of two sends as much as it sums
    assert compressed.gradient_sync == 0
    before, after = (next(t.sent for t in s.wire if t.axis == "dp") for s in (plain, compressed))
    assert before < after < before + plain.gradient_sync


@pytest.mark.parametrize("mesh", ["dp=2,fs=2,tp=2", "fs=3", "dp=3", "tp=4", "fs=5,tp=2"])
@pytest.mark.parametrize("values", [TINY, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("algorithm", ["dion", "dion2", "muon"])
def test_all_ranks_hold_the_model_and_its_replicas(
    model: Write, mesh: str, values: dict, algorithm: str
) -> None:
    path = model(values)
    ranks = every_rank(path, mesh, algorithm)
    ((alone, _),) = every_rank(path, "dp=1", algorithm)
    sizes = {"dp": 1, "tp": 1, **models.parse_mesh(mesh)}
    parameters = models.load(path).parameters()
    others = [p for p in parameters if p.kind not in ("column", "row")]
    vectors = sum(p.numel for p in others if p.kind == "vector")
    copies = sizes["dp"] * (sizes["tp"] - 1)  # of what tp replicates, beyond one for each replica
    assert sum(s.memory["parameters"] for s, _ in ranks) == FLOAT * (
        alone.parameters * sizes["dp"] + vectors * copies
    )
    counters = FLOAT * len(others)  # every rank counts the steps of each AdamW parameter
    assert sum(s.memory["states"] - counters for s, _ in ranks) == (
        (alone.memory["states"] - counters) * sizes["dp"] + 2 * FLOAT * vectors * copies
    )


@pytest.mark.parametrize("mesh", ["dp=2,fs=2,tp=2", "fs=4", "fs=4,tp=2", "dp=4"])
@pytest.mark.parametrize("algorithm", ["dion", "dion2", "muon", "nordion2", "normuon"])
@pytest.mark.parametrize("compressed", [False, True])
def test_ranks_agree_on_collectives_and_work(
    model: Write, mesh: str, algorithm: str, compressed: bool
) -> None:
    ranks = every_rank(model(TINY), mesh, algorithm, compressed)
    simulations = [s for s, _ in ranks]
    work = [s.local_flops + s.whole_flops for s in simulations]
    for s in simulations:
        assert s.mean_flops == pytest.approx(sum(work) / len(work))
        assert s.busiest_flops >= max(work) * (1 - 1e-12)
        assert 0 < s.balance <= 1
        assert [t.kinds for t in s.wire] == [t.kinds for t in simulations[0].wire]
    exchanges = [t for _, transfers in ranks for t in transfers if t["kind"] == "all_to_all"]
    assert sum(t["send"][1] for t in exchanges) == sum(t["recv"][1] for t in exchanges)


@pytest.mark.parametrize(
    ("mesh", "ranks", "algorithm"),
    [
        ("dp=8,fs=64,tp=8", 4096, "dion"),
        ("dp=32,fs=64,tp=8", 16384, "dion"),
        ("dp=32,fs=64,tp=8", 16384, "muon"),
    ],
)
def test_405b_is_planned_in_seconds_within_a_gigabyte(mesh: str, ranks: int, algorithm: str) -> None:
    options = ["--mesh", mesh, "--rank", str(ranks - 1), "--algorithm", algorithm, "--rank-fraction", "0.25"]
    source = (
        "import re, resource, sys\n"
        "from oxidion.__main__ import main\n"
        f"code = main(['plan', '--model', 'llama-405b', *{options}])\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        # ru_maxrss would be that of the parent where it is larger.
        "peak = re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read()).group(1)\n"
        "print(usage.ru_utime + usage.ru_stime, peak, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )
    (done,) = forks.common().run(source, limit=120)
    assert done.returncode == 0, done.stderr
    assert f"rank {ranks - 1} of {ranks}" in done.stdout
    seconds, peak = done.stderr.split()
    assert float(seconds) < 10
    assert int(peak) < 1_000_000


def test_json_file_holds_the_simulation(model: Write, tmp_path: Path) -> None:
    path, file = model(TINY), tmp_path / "out.json"
    options = ["--algorithm", "muon", "--state-dtype", "float32", "--json", str(file)]
    assert main(["plan", "--model", path, "--mesh", "dp=2,fs=2", "tp=2", "--rank", "1", *options]) == 0
    read = [Simulation.from_dict(values) for values in json.loads(file.read_text())]
    settings = Settings("muon", state_dtype="float32", rank=1)
    assert read == [simulate(path, mesh, settings)[0] for mesh in ({"dp": 2, "fs": 2}, {"tp": 2})]


def test_plot_is_a_png(model: Write, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "out.png"
    assert main(["plan", "--model", model(TINY), "--mesh", "fs=2", "fs=2,tp=2", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_output_has_three_tables_and_the_schedule(model: Write, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", model(TINY), "--mesh", "dp=2,fs=2,tp=2", "--schedule"]) == 0
    text = capsys.readouterr().out
    assert all(re.search(rf"^{word} ", text, re.MULTILINE) for word in ("memory", "axis", "work"))
    assert re.search(r"^arena .*hazards 0$", text, re.MULTILINE)


def test_numbers_have_decimal_prefixes() -> None:
    said = [human(n, "B") for n in (0, 999, 1000, 1.5e9, 2e18)]
    assert said == ["0 B", "999 B", "1 kB", "1.5 GB", "2000 PB"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "fs"], "expected name=size"),
        (["--mesh", ""], "expected name=size"),
        (["--mesh", "pp=2"], "dp, fs, ep, tp"),
        (["--mesh", "fs=2,fs=2"], "there twice"),
        (["--mesh", "fs=0"], "must be an integer >= 1"),
        (["--mesh", "fs=two"], "must be an integer >= 1"),
        (["--mesh", "fs=2", "--rank", "2"], "rank must be from 0 to 1"),
        (["--rank-fraction", "2"], r"argument --rank-fraction: must be in \(0, 1\]"),
        (["--fraction", "0"], r"argument --fraction: must be in \(0, 1\]"),
        (["--model", "gpt-9"], "unknown model 'gpt-9'.*llama-405b"),
        (["--algorithm", "sgd"], "invalid choice: 'sgd'"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_is_wrong(
    model: Write, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", model(TINY), *options])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**TINY, "export": 8}, "unknown key 'export'"),
        ({**TINY, "experts": 8}, "experts_per_token must be from 1 to 8, got 0"),
        ({k: v for k, v in TINY.items() if k != "vocab"}, "missing key 'vocab'"),
        ({**TINY, "layers": 0}, "layers must be an integer >= 1"),
        ({**TINY, "layers": 10_001}, "layers must be an integer >= 1 and <= 10000, got 10001"),
        ({**TINY, "layers": 2**40}, "layers must be an integer >= 1 and <= 10000"),
        ({**TINY, "gated": 1}, "gated must be true or false"),
        ({**TINY, "heads": 3}, "dim must be a multiple of heads"),
        ([1], "expected an object"),
    ],
)
def test_wrong_model_file_is_refused(model: Write, values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        models.load(model(values))


def test_plot_without_matplotlib_says_what_to_install(
    model: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--model", model(TINY), "--plot", str(tmp_path / "out.png")])
    assert caught.value.code == 2
    assert "pip install matplotlib" in capsys.readouterr().err
