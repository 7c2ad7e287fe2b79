from collections.abc import Callable

import pytest
import torch
from torch import nn

import oxidion

EXPECTED = """\
bucket 0  muon  2 × [8, 4] float32 · group 0 · no communication
bucket 1  muon  3 × [4, 4] float32 · group 0 · no communication
bucket 2  adamw  2 tensors, 14 elements float32 · group 1 · no communication
  0  compute  b0.prepare+orthonormalize+apply  in u float32 256 B, scratch float32 {first}
  1  compute  b1.prepare+orthonormalize+apply  in u float32 192 B, scratch float32 {second}
  2  compute  b2.apply
arena {arena}, hazards 0
"""


def model_groups() -> list[dict]:
    matrices = [
        nn.Parameter(torch.ones(8, 4)),
        nn.Parameter(torch.ones(3, 4, 4)),
        nn.Parameter(torch.ones(8, 4)),
    ]
    vectors = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(10))]
    return [{"params": matrices}, {"params": vectors, "algorithm": "adamw"}]


def test_plan_mixed_groups_prints_the_expected_schedule() -> None:
    text = str(oxidion.Muon(model_groups(), orth_dtype="float32").plan())
    lines = text.splitlines()
    scratch = [line.rsplit("float32 ", 1)[1] for line in lines if "scratch" in line]
    arena = lines[-1].removeprefix("arena ").removesuffix(", hazards 0")
    assert text == EXPECTED.format(first=scratch[0], second=scratch[1], arena=arena)


def test_plan_equal_optimizers_have_equal_fingerprints() -> None:
    one, two = (oxidion.Muon(model_groups(), orth_dtype="float32").plan() for _ in range(2))
    assert one.fingerprint == two.fingerprint
    other = oxidion.Muon(model_groups(), orth_dtype="float64").plan()
    assert other.fingerprint != one.fingerprint


def test_plan_schedule_names_every_bucket_once() -> None:
    assert list(oxidion.Muon(model_groups()).plan().schedule) == [(0, 0), (0, 1), (0, 2)]


def test_max_batch_bytes_bounds_the_arena_and_keeps_the_result() -> None:
    def run(limit: int | None) -> tuple[int, list[torch.Tensor]]:
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(32, 16)) for _ in range(20)]
        optimizer = oxidion.Dion(params, rank_fraction=0.5, max_batch_bytes=limit)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        return optimizer.plan().arena_bytes, [p.detach() for p in params]

    (whole, wanted), (bounded, got) = run(None), run(8_000)
    assert bounded <= 8_000 < whole
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [oxidion.Muon, oxidion.Dion])
def test_plan_many_small_matrices_need_little_memory_at_a_time(
    make: Callable[..., oxidion.Muon | oxidion.Dion],
) -> None:
    """200 of them at once would take 26 MB and more."""

    def arena(count: int) -> int:
        return make([nn.Parameter(torch.zeros(256, 256)) for _ in range(count)]).plan().arena_bytes

    assert arena(400) == arena(200) < 10e6


def test_plan_dtype_changed_between_steps_is_planned_again() -> None:
    param = nn.Parameter(torch.randn(8, 4))
    optimizer = oxidion.Muon([param])
    param.grad = torch.randn_like(param)
    optimizer.step()
    param.data = param.data.double()
    param.grad = torch.randn(8, 4, dtype=torch.float64)
    before = param.detach().clone()
    optimizer.step()
    assert "float64" in str(optimizer.plan())
    assert not torch.equal(before, param)
