"""Estimated times, machines, comparisons and configurations of ``python -m oxidion plan``."""

from __future__ import annotations

import json
import logging
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion.__main__ import main
from oxidion._planning import compare, hardware, models
from oxidion._planning import simulate as simulation
from oxidion._planning.clock import step_time, training_time
from oxidion._planning.hardware import LAUNCH, LINK, MEMORY, PRODUCTS, Hardware, Link
from oxidion._planning.simulate import Settings, simulate

INNER, OUTER = Link(1e-6, 100e9), Link(1e-5, 10e9)
MACHINE = Hardware("made up", {"float32": 1e12, "bfloat16": 4e12}, 1e12, INNER, OUTER, node=4)


def test_collective_inside_of_a_node_takes_the_inner_link() -> None:
    assert MACHINE.collective("all_to_all", 8e9, 4, 1, "fs") == pytest.approx(2e-6 + 8e9 / (100e9 * LINK))
    assert MACHINE.collective("all_reduce", 8e9, 2, 2, "fs") == pytest.approx(2e-6 + 8e9 / (100e9 * LINK))


def test_collective_between_nodes_takes_the_outer_link() -> None:
    assert MACHINE.collective("all_gather", 8e9, 16, 4, "fs") == pytest.approx(4e-5 + 8e9 / (10e9 * LINK))


def test_axis_over_nodes_sends_some_bytes_inside() -> None:
    # Of 7 others 3 are in the node.
    time = 3e-5 + 7e9 * 3 / 7 / (100e9 * LINK) + 7e9 * 4 / 7 / (10e9 * LINK)
    assert MACHINE.collective("all_to_all", 7e9, 8, 1, "fs") == pytest.approx(time)
    # Sums of the four ranks of a node are sent once.
    time = 6e-5 + 8e9 * 3 / 4 / (100e9 * LINK) + 8e9 / 4 / (10e9 * LINK)
    assert MACHINE.collective("all_reduce", 8e9, 8, 1, "fs") == pytest.approx(time)


def test_link_of_an_axis_wins() -> None:
    machine = Hardware("x", {"float32": 1.0}, 1.0, INNER, OUTER, axes={"fs": Link(0.5, 2.0)})
    assert machine.collective("all_to_all", 16.0, 4, 1, "fs") == pytest.approx(2 * 0.5 + 16 / (2.0 * LINK))


class Schedule:
    """A plan of two instructions with a collective between them."""

    transfers = (
        {
            "kind": "all_to_all",
            "axis": "fs",
            "ranks": [0, 1],
            "coordinate": 0,
            "send": (0, 1000_000_000),
            "send_bytes": [500_000_000, 500_000_000],
            "when_due": False,
        },
    )
    schedule = ((0, 0), (1, 0), (0, 1), (2, 0))

    def costs(self) -> list[tuple[float, float, float]]:
        return [(2e9, 0.0, 0.0), (1e9, 3e9, 8e9)]

    def work(self) -> tuple[float, float, float, float]:
        return (3e9, 3e9, 6e9, 3e9)


class OnlyOwned:
    """A plan of one instruction on matrices; the busiest rank has twice the mean work."""

    transfers = ()
    schedule = ((0, 0),)

    def costs(self) -> list[tuple[float, float, float]]:
        return [(0.0, 3e9, 0.0)]

    def work(self) -> tuple[float, float, float, float]:
        return (0.0, 3e9, 6e9, 3e9)


def test_step_waits_for_what_no_computation_hides() -> None:
    time = step_time(Schedule(), MACHINE, "float32", {"fs": 1})
    first = 2e9 / (1e12 * PRODUCTS) + LAUNCH
    # The busiest rank has twice the work on whole matrices.
    second = (1e9 + 6e9) / (1e12 * PRODUCTS) + 8e9 / (1e12 * MEMORY) + LAUNCH
    sent = 1e-6 + 0.5e9 / (100e9 * LINK)
    assert time.compute == pytest.approx(first + second)
    assert time.mean_compute == pytest.approx(first + 4e9 / (1e12 * PRODUCTS) + 0.01 + LAUNCH)
    assert time.communication == time.axes["fs"] == pytest.approx(sent)
    assert time.exposed == pytest.approx(max(sent - second, 0.0))
    assert time.total == pytest.approx(first + max(second, sent))


MEASURED = Hardware(
    "measured",
    {"float32": 1e12},
    1e12,
    INNER,
    OUTER,
    collectives={"all_to_all": Link(2e-3, 50e9), "all_reduce": Link(5e-3, 20e9)},
    measured=True,
)


def test_measured_rates_are_reached() -> None:
    assert MEASURED.product_rate("float32") == 1e12
    assert MEASURED.bandwidth == 1e12
    # One latency, whatever the number of ranks; a kind that was not measured goes by the links.
    assert MEASURED.collective("all_reduce", 4e9, 16, 1, "fs") == pytest.approx(5e-3 + 4e9 / 20e9)
    assert MEASURED.collective("all_gather", 8e9, 4, 1, "fs") == pytest.approx(2e-6 + 8e9 / 100e9)
    assert MEASURED.collective("all_to_all", 0.0, 1, 1, "fs") == 0.0


def test_collectives_that_the_device_carries_are_exposed() -> None:
    hidden = step_time(Schedule(), MEASURED, "float32", {"fs": 1})
    carried = step_time(Schedule(), replace(MEASURED, hides=False), "float32", {"fs": 1})
    sent, comparison = 2e-3 + 0.5e9 / 50e9, 5e-3 + 80 / 20e9
    assert hidden.exposed == pytest.approx(0.0)
    assert carried.exposed == pytest.approx(sent + comparison)
    assert carried.total == pytest.approx(carried.compute + carried.exposed)
    assert carried.compute == pytest.approx(hidden.compute)


@pytest.mark.parametrize(("share", "busy"), [(1.0, 6e9), (1.5, 4e9), (2.0, 3e9), (8.0, 3e9)])
def test_busiest_on_a_shared_processor_takes_turns_of_the_others(share: float, busy: float) -> None:
    time = step_time(OnlyOwned(), replace(MEASURED, share=share), "float32", {})
    assert time.compute == pytest.approx(busy / 1e12 + LAUNCH, rel=1e-2)


def test_training_takes_six_operations_an_element_and_token() -> None:
    assert training_time(MACHINE, 10**9, 1000, 4, "bfloat16") == pytest.approx(6e12 / 4 / (4e12 * 0.4))


@pytest.mark.parametrize("algorithm", ["muon", "dion", "adamw", "galore_adamw", "normuon", "dion2", "lamb"])
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"fs": 4}, {"dp": 2, "fs": 2, "tp": 2}], ids=str)
def test_costs_of_the_instructions_sum_to_the_work(algorithm: str, mesh: models.Mesh) -> None:
    simulated, plan = simulate("gpt-160m", mesh, Settings(algorithm, rank_fraction=0.25))
    costs = plan.costs()
    assert len(costs) == 1 + max(k for code, k in plan.schedule if code == 0)
    assert sum(cost[0] for cost in costs) == pytest.approx(simulated.local_flops, rel=1e-9)
    assert sum(cost[1] for cost in costs) == pytest.approx(simulated.whole_flops, rel=1e-9)
    # Parameters, gradients and states are read and written at least once.
    stored = sum(n for part, n in simulated.memory.items() if part != "workspace")
    assert sum(cost[2] for cost in costs) > stored


def test_plan_is_that_of_a_device_on_more_than_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[str] = []
    planned = simulation.Plan.of_shapes

    class Watched:
        @staticmethod
        def of_shapes(groups: list[dict[str, Any]], *others: Any) -> Any:
            devices.extend(group["device"] for group in groups)
            return planned(groups, *others)

    monkeypatch.setattr(simulation, "Plan", Watched)
    for mesh, device in (({"dp": 1}, None), ({"fs": 4}, None), ({"dp": 1}, "cuda"), ({"fs": 4}, "cpu")):
        simulate("gpt-160m", mesh, Settings("muon", device=device))
    assert devices == ["cpu"] * 2 + ["cuda"] * 4 + ["cpu"] * 2


def test_plan_of_a_device_has_its_sizes_of_buckets() -> None:
    def buckets(device: str) -> int:
        plan = simulate("gpt-160m", {"dp": 1}, Settings("muon", device=device))[1]
        return sum(code == 0 for code, _ in plan.schedule)

    assert buckets("cuda") < buckets("cpu")


def test_states_of_eight_bits_and_projections_are_smaller() -> None:
    def states(**settings: Any) -> int:
        return simulate("gpt-160m", {"fs": 2}, Settings(**settings))[0].memory["states"]

    assert states(algorithm="adamw", state_bits=8) < 0.6 * states(algorithm="adamw")
    plain, kept = (states(algorithm="muon", state_dtype="float32", master_weights=m) for m in (False, True))
    parameters = simulate("gpt-160m", {"fs": 2}, Settings("muon"))[0].memory["parameters"]
    assert kept - plain == parameters, "two bytes for each bfloat16 parameter"
    # A scale of four bytes for each block of two moments.
    small, large = (states(algorithm="adamw", state_bits=8, block_size=size) for size in (64, 256))
    assert 0.02 < small / large - 1 < 0.1
    # Copies share what one of them has: two replicas half each.
    with_copies = [
        simulate("gpt-160m", {"dp": 2}, Settings("soap", owned_states=owned))[0].memory["states"]
        for owned in (False, True)
    ]
    assert with_copies[1] < 0.75 * with_copies[0]
    # Bases of a side that ranks cut are there once.
    alone = simulate("gpt-160m", {"fs": 1}, Settings("soap"))[0].memory["states"]
    parts = [
        simulate("gpt-160m", {"fs": 2}, Settings("soap", rank=rank))[0].memory["states"] for rank in (0, 1)
    ]
    assert sum(parts) == pytest.approx(alone, rel=1e-3)
    assert states(algorithm="galore_adamw", projection_rank=64) < states(algorithm="galore_adamw")


@pytest.mark.parametrize("algorithm", ["galore_adamw", "apollo_adamw"])
@pytest.mark.parametrize("mesh", [{"dp": 4}, {"fs": 4}], ids=str)
def test_moments_with_owners_leave_less_to_each(algorithm: str, mesh: dict[str, int]) -> None:
    alone, owned = (
        simulate("gpt-160m", mesh, Settings(algorithm, projection_rank=256, owned_states=is_owned))[0]
        for is_owned in (False, True)
    )
    # Of embeddings and vectors each has its share, in float32.
    assert owned.memory["states"] < 0.83 * alone.memory["states"]


@pytest.mark.parametrize("algorithm", ["muon", "normuon"])
def test_momenta_with_owners_are_shared_among_copies(algorithm: str) -> None:
    """One momentum of 170 MB among four ranks: the rest are AdamW's states, which each has."""
    mesh: dict[str, int] = {"dp": 4}
    alone, owned = (
        simulate("gpt-160m", mesh, Settings(algorithm, owned_states=is_owned))[0]
        for is_owned in (False, True)
    )
    matrices = 12 * 12 * 768**2 * 4
    saved = alone.memory["states"] - owned.memory["states"]
    assert saved == pytest.approx(3 / 4 * matrices, rel=0.05)


def test_experts_lie_on_their_axis() -> None:
    simulated, plan = simulate("mixtral-8x7b", {"fs": 4, "ep": 8}, Settings("muon", device="cuda"))
    rows = {row["name"]: row for row in plan.rows()}
    assert rows["layers.0.experts.gate"]["view"] == "stack of 8"
    assert simulated.memory["parameters"] == pytest.approx(46.7e9 * 2 / 32, rel=0.01)
    assert simulated.matrices == 32 * 7


FLAT = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "LlamaConfig": {**FLAT, **ATTENTION},
    "MistralConfig": {**FLAT, **ATTENTION, "head_dim": 24},
    "Qwen2Config": {**FLAT, **ATTENTION},
    "Qwen3Config": {**FLAT, **ATTENTION, "head_dim": 16},
    "GemmaConfig": {**FLAT, **ATTENTION, "head_dim": 16},
    "Gemma2Config": {**FLAT, **ATTENTION, "head_dim": 32},
    "Phi3Config": {**FLAT, **ATTENTION, "pad_token_id": 0},
    "MixtralConfig": {**FLAT, **ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeConfig": {
        **FLAT,
        **ATTENTION,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    },
    "DeepseekV3Config": {
        **FLAT,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 12,
        "first_k_dense_replace": 1,
    },
    "GPT2Config": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configuration_of_transformers_has_its_models_matrices(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", exc_type=ImportError)
    logging.disable(logging.CRITICAL)
    try:
        config = getattr(transformers, name)(**CONFIGURATIONS[name])
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = transformers.AutoModelForCausalLM.from_config(config)
    finally:
        logging.disable(logging.NOTSET)
    wanted = sum(param.numel() for param in model.parameters() if param.ndim > 1)
    parameters = models.load(str(tmp_path / "config.json")).parameters()
    assert sum(p.numel for p in parameters if p.kind != "vector") == wanted
    main(["plan", "--model", str(tmp_path / "config.json"), "--mesh", "fs=2", "--algorithm", "muon"])


def test_unknown_kind_of_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(ValueError, match=r"model_type must be one of llama, .*got 'resnet'"):
        models.load(str(tmp_path / "config.json"))


def test_built_in_sizes() -> None:
    def elements(name: str) -> float:
        return sum(p.numel for p in models.load(name).parameters()) / 1e9

    assert elements("mixtral-8x7b") == pytest.approx(46.7, abs=0.05)
    assert elements("deepseek-v3") == pytest.approx(671, abs=1)
    assert models.load("deepseek-v3").active / 1e9 == pytest.approx(37, abs=1)
    assert models.load("mixtral-8x7b").active / 1e9 == pytest.approx(12.8, abs=0.2)


@pytest.mark.parametrize("name", hardware.DEVICES)
@pytest.mark.parametrize("links", hardware.LINKS)
def test_built_in_hardware_gives_times(name: str, links: str) -> None:
    settings = Settings("muon", hardware=name, links=links, tokens=4_000_000)
    simulated, _ = simulate("gpt-160m", {"fs": 16}, settings)
    time = simulated.time
    assert time is not None
    assert 0 < time.compute <= time.total < 1
    assert time.total == pytest.approx(time.compute + time.exposed)
    assert time.share is not None
    assert 0 < time.share < 1
    assert "share of a training step" in str(simulated)


GOOD = {"flops": {"float32": 1e12}, "memory": 1e12, "inner": [1e-6, 1e11], "outer": [1e-5, 1e10]}


def test_hardware_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**GOOD, "node": 2, "axes": {"fs": [0, 5e9]}}))
    machine = hardware.load(str(file))
    assert (machine.name, machine.node, machine.axes["fs"]) == ("mine", 2, Link(0.0, 5e9))
    assert (machine.hides, machine.share, machine.measured) == (True, 1.0, False)


def test_measured_hardware_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    measured = {"collectives": {"all_gather": [1e-3, 1e9]}, "hides": False, "share": 4, "measured": True}
    file.write_text(json.dumps({**GOOD, **measured}))
    machine = hardware.load(str(file))
    assert (machine.hides, machine.share, machine.measured) == (False, 4.0, True)
    assert machine.collectives == {"all_gather": Link(1e-3, 1e9)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory": -1}, "memory must be a positive number"),
        ({"memory": math.inf}, "memory must be a positive number"),
        ({"inner": 3}, "inner must be a latency"),
        ({"outer": [-1, 2]}, "latency must be a number >= 0"),
        ({"node": 0}, "node must be an integer"),
        ({"flops": {"bfloat16": 1.0}}, "flops must have float32"),
        ({"speed": 1}, "unknown keys speed"),
        ({"collectives": {"send": [0, 1]}}, "collectives must be of all_to_all, .*got 'send'"),
        ({"collectives": {"all_reduce": 1}}, "collectives.all_reduce must be a latency"),
        ({"hides": 1}, "hides must be true or false"),
        ({"measured": "yes"}, "measured must be true or false"),
        ({"share": 0.5}, "share must be a number >= 1"),
    ],
)
def test_wrong_hardware_files_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ValueError, match=words):
        hardware.load(str(file))


@pytest.mark.parametrize(("name", "links"), [("abacus", "nvlink+ib400"), ("h200", "string")])
def test_unknown_hardware_and_links_are_refused(name: str, links: str) -> None:
    with pytest.raises(ValueError, match=r"unknown hardware|links must be one of"):
        hardware.load(name, links)


def test_sweep_doubles_an_axis() -> None:
    assert compare.swept({"dp": 2, "fs": 3}, "fs=8..33") == [{"dp": 2, "fs": n} for n in (8, 16, 32)]
    assert compare.swept({"dp": 2}, "tp=1..2") == [{"dp": 2, "tp": 1}, {"dp": 2, "tp": 2}]


@pytest.mark.parametrize(
    "sweep", ["fs", "fs=8", "fs=8..4", "xs=1..2", "fs=0..2", "fs=a..b", f"fs=1..{2**60}"]
)
def test_wrong_sweeps_are_refused(sweep: str) -> None:
    with pytest.raises(ValueError, match="--sweep must"):
        compare.swept({"dp": 1}, sweep)


def test_comparison_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", "gpt-160m", "--mesh", "fs=8", "--compare", "--hardware", "h100-sxm"]
    drawing, figures = tmp_path / "lines.svg", tmp_path / "figures.json"
    sweep = ["--sweep", "fs=2..4", "--plot", str(drawing), "--json", str(figures)]
    assert main([*arguments, "--tokens-per-step", "1000000", *sweep]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * len(compare.CHOICES)
    assert {"mesh", "sent", "workspace", "step", "exposed"} <= set(lines[0].split())
    assert len(json.loads(figures.read_text())) == 2 * len(compare.CHOICES)
    assert "Estimated time of a step" in drawing.read_text()


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("llama-70b", {"fs": 64}),
        ("llama-405b", {"dp": 2, "fs": 8, "tp": 8}),
        ("llama-8b", {"fs": 8}),
        ("llama-8b", {"dp": 2, "fs": 16}),
        ("llama-405b", {"dp": 2, "fs": 16, "tp": 4}),
    ],
    ids=str,
)
def test_owners_are_balanced_where_each_has_several_matrices(model: str, mesh: models.Mesh) -> None:
    simulated, _ = simulate(model, mesh, Settings("muon"))
    assert simulated.matrices >= 4 * math.prod(mesh.values())
    assert simulated.balance >= 0.9
