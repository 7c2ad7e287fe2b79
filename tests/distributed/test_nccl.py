"""Real processes over NCCL, one on each CUDA device: wrapped models against one process on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.workers import Workers, workers

from . import agreeing, lagging, offloaded, wrapped

pytestmark = pytest.mark.cuda
NAMES = ("Muon", "AdamW", "Lion")
# As for gloo.
CLOSE = 1e-12


@pytest.fixture(scope="module", params=["nccl", "cpu:gloo,cuda:nccl"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with workers(min(torch.cuda.device_count(), 2), request.param) as group:
        yield group


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1])
def test_fsdp_model_equals_one_process(ranks: Workers, name: str, dim: int) -> None:
    assert max(ranks.run(wrapped.fsdp, name, True, dim)) <= CLOSE


@pytest.mark.parametrize("name", ["Dion", *NAMES])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
def test_offloaded_model_equals_one_process_and_offloads_states(name: str, pin: bool) -> None:
    with workers(min(torch.cuda.device_count(), 2), "cpu:gloo,cuda:nccl") as group:
        for far, places, pinned in group.run(offloaded.wrapped, "fsdp", name, pin):
            assert far <= CLOSE
            assert places == {"cpu"}
            assert pinned == {pin}


@pytest.mark.parametrize("name", NAMES)
def test_ddp_model_equals_one_process(ranks: Workers, name: str) -> None:
    assert max(ranks.run(wrapped.ddp, name, False)) <= CLOSE


@pytest.mark.parametrize("name", NAMES)
def test_tensor_parallel_model_equals_one_process(ranks: Workers, name: str) -> None:
    assert max(ranks.run(wrapped.tensor_parallel, name)) <= CLOSE


@pytest.mark.parametrize("every", [1, 3])
def test_ranks_compare_before_a_step(ranks: Workers, every: int) -> None:
    steps = [*range(1, 9)] if every == 1 else [1, 4, 6, 7]
    if len(ranks.pipes) == 1:
        steps = []  # a single rank has no other to compare with
    assert ranks.run(agreeing.compared_steps, every) == [steps] * len(ranks.pipes)


@pytest.mark.parametrize("kind", ["lr", "gradient", "step"])
def test_disagreeing_ranks_raise_at_the_step_or_next_checkpoint(ranks: Workers, kind: str) -> None:
    if len(ranks.pipes) == 1:
        pytest.skip("one rank alone cannot disagree")
    for answer in ranks.run(lagging.differing, kind, {"fs": 2}, False, "state_dict"):
        found = [answer["third"][0], *(error for error, _ in answer["then"])]
        # With a process group of the host all hear before the step, and nothing has changed.
        assert found in (["", "PoisonedOptimizer"], ["PlanMismatch", ""])
        assert answer["went on to"] == 4
