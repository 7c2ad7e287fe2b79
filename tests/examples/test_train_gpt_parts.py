"""What ``examples/train_gpt.py`` is made of: the model, its parameter groups, the schedule, the text."""

from __future__ import annotations

import dataclasses
import math
import shlex
from types import ModuleType
from typing import Any

import pytest
import torch


def tiny_model(modules: dict[str, ModuleType], tied: bool = False) -> Any:
    torch.manual_seed(0)
    return modules["gpt"].GPT(modules["gpt"].GPTShape(256, 16, 2, 32, 2, tied)).double()


def settings_of(modules: dict[str, ModuleType], *arguments: str) -> Any:
    parser = modules["options"].build_parser(None)
    (settings,) = modules["options"].planned_settings(parser, parser.parse_args(arguments))
    return settings


def test_gpt_output_depends_on_the_past_only(modules: dict[str, ModuleType]) -> None:
    model = tiny_model(modules)
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 9] = (changed[0, 9] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:9].max() == 0
    assert difference[9:].min() > 1e-9


def test_gpt_attention_scores_depend_on_distance_only(modules: dict[str, ModuleType]) -> None:
    rotary = modules["gpt"].RotaryPositions(16, 8)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 1, 1, 8, generator=generator).expand(1, 1, 16, 8) for _ in range(2))
    scores = (rotary(query) @ rotary(key).transpose(-1, -2))[0, 0]
    for offset in (-5, 0, 3):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(
            diagonal, diagonal[:1].expand_as(diagonal)
        )  # float32 tables: default tolerance
    assert scores.diagonal(3)[0] != pytest.approx(scores.diagonal(0)[0].item(), abs=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_parameter_count_is_that_of_its_sizes(modules: dict[str, ModuleType], tied: bool) -> None:
    model = tiny_model(modules, tied)
    block = 4 * 32 * 32 + 2 * 32 * 128 + 2 * 32
    assert sum(p.numel() for p in model.parameters()) == (1 if tied else 2) * 256 * 32 + 2 * block + 32


@pytest.mark.parametrize("tied", [False, True])
def test_build_optimizer_gives_only_block_matrices_to_dion(
    modules: dict[str, ModuleType], tied: bool
) -> None:
    recipes = modules["recipes"]
    settings = settings_of(modules, "--optimizer", "dion", "--lr", "0.5")
    model = tiny_model(modules, tied)
    optimizer = recipes.build_optimizer(model, settings)
    algorithm = {id(p): (g["algorithm"], g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    scalar = ("adamw", recipes.RECIPES["dion"].scalar_lr)
    for name, parameter in model.named_parameters():
        is_block_matrix = name.startswith("blocks.") and parameter.ndim == 2
        assert algorithm[id(parameter)] == (("dion", 0.5) if is_block_matrix else scalar), name
    assert len(algorithm) == len(list(model.parameters()))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # 20 steps, warm-up of 4: (step + 1) / 5, then 16 steps to zero.
        ("cosine", {0: 0.2, 3: 0.8, 4: 1.0, 8: 0.5 + math.sqrt(0.5) / 2, 12: 0.5, 20: 0.0}),
        ("warmdown", {0: 0.2, 3: 0.8, 4: 1.0, 13: 1.0, 16: 0.625, 20: 0.0}),
        ("constant", {0: 0.2, 3: 0.8, 4: 1.0, 13: 1.0, 20: 1.0}),
    ],
)
def test_build_scheduler_follows_the_named_curve(
    modules: dict[str, ModuleType], schedule: str, expected: dict[int, float]
) -> None:
    settings = settings_of(
        modules, "--optimizer", "adamw", "--steps", "20", "--warmup", "0.2", "--schedule", schedule
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3.0)
    scheduler = modules["recipes"].build_scheduler(optimizer, settings)
    seen = {}
    for step in range(21):
        seen[step] = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
    for step, factor in expected.items():
        assert seen[step] == pytest.approx(3.0 * factor, abs=1e-12)


def test_initial_scale_is_a_factor_on_the_matrices_of_the_blocks(modules: dict[str, ModuleType]) -> None:
    sizes = shlex.split("--optimizer adamw --layers 1 --dim 32 --heads 2 --seq-len 16 --dtype float64")
    corpus = modules["corpus"].load_corpus(300_000)
    plain, scaled = (
        modules["training"].Training(
            settings_of(modules, *sizes, "--initial-scale", scale), corpus, torch.device("cpu")
        )
        for scale in ("1", "4")
    )
    other = dict(scaled.model.named_parameters())
    for name, parameter in plain.model.named_parameters():
        factor = 4.0 if name.startswith("blocks.") and parameter.ndim == 2 else 1.0
        assert torch.equal(other[name], factor * parameter), name


def test_losses_of_an_average_accompany_those_of_last_weights(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipes, training = modules["recipes"], modules["training"]
    mean = recipes.Recipe(
        "Muon",
        0.02,
        scalar_lr=0.002,
        average=lambda s: {"average": "ema", "average_start": s.steps - 1, "average_decay": 0.5},
    )
    monkeypatch.setitem(recipes.RECIPES, "mean", mean)
    sizes = shlex.split(
        "--layers 1 --dim 32 --heads 2 --seq-len 16 --steps 4 --eval-every 1 --eval-windows 4"
    )
    corpus = modules["corpus"].load_corpus(300_000)
    settings = settings_of(modules, *sizes, "--optimizer", "muon", "--dtype", "float64")
    runs = {
        name: training.Training(dataclasses.replace(settings, optimizer=name), corpus, torch.device("cpu"))
        for name in ("muon", "mean")
    }
    kept = []
    for stop in range(1, 5):
        for run in runs.values():
            run.run(stop, None, 0, quiet=True)
        kept.append([parameter.detach().clone() for parameter in runs["muon"].model.parameters()])
    plain, averaged = runs["muon"].record, runs["mean"].record
    assert plain.last_weights_loss == []
    assert averaged.last_weights_loss == plain.held_out_loss, "the average changed the training"
    assert averaged.held_out_loss[:4] == pytest.approx(plain.held_out_loss[:4], abs=1e-12)
    with torch.no_grad():
        for parameter, third, fourth in zip(runs["muon"].model.parameters(), *kept[2:], strict=True):
            parameter.copy_((third + fourth) / 2)
    assert averaged.held_out_loss[4] == pytest.approx(runs["muon"].evaluate(), abs=1e-12)
    assert averaged.held_out_loss[4] != pytest.approx(plain.held_out_loss[4], abs=1e-6)


def test_load_corpus_splits_by_file_under_the_cap(
    modules: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus_module = modules["corpus"]
    corpus = corpus_module.load_corpus(2_000_000)
    assert set(corpus.train_names).isdisjoint(corpus.held_out_names)
    assert 1_500_000 < corpus.train.numel() + corpus.held_out.numel() <= 2_000_000
    assert 0.02 < corpus.held_out.numel() / corpus.train.numel() < 0.1
    assert any(name.startswith("pydoc_data/") for name in corpus.train_names)
    documents = dict(corpus_module.standard_library_documents())
    pieces = bytes(corpus.held_out.tolist()).split(corpus_module.SEPARATOR)
    assert pieces == [*(documents[name] for name in corpus.held_out_names), b""]
    assert not [
        name for name in documents if set(name.split("/")) & (corpus_module.SKIPPED_FOLDERS - {"pydoc_data"})
    ]

    backwards = list(documents.items())[::-1]
    monkeypatch.setattr(corpus_module, "standard_library_documents", lambda: iter(backwards))
    again = corpus_module.load_corpus(2_000_000)
    assert torch.equal(again.train, corpus.train)
    assert again.held_out_names == corpus.held_out_names


def test_windows_visit_all_tokens_once_an_epoch_and_reshuffle(modules: dict[str, ModuleType]) -> None:
    windows = modules["corpus"].Windows(torch.arange(101, dtype=torch.uint8), seq_len=10, seed=3)
    first, second = windows.next_batch(10), windows.next_batch(10)
    for epoch in (first, second):
        assert sorted(epoch[:, :-1].flatten().tolist()) == list(range(100))
        assert torch.equal(epoch[:, 1:], epoch[:, :-1] + 1)
    assert not torch.equal(first, second)


def test_windows_position_alone_restores_the_next_batch(modules: dict[str, ModuleType]) -> None:
    tokens = torch.arange(101, dtype=torch.uint8)
    windows = modules["corpus"].Windows(tokens, seq_len=10, seed=3)
    windows.next_batch(13)
    other = modules["corpus"].Windows(tokens, seq_len=10, seed=3)
    other.position = windows.position
    assert torch.equal(other.next_batch(9), windows.next_batch(9))
