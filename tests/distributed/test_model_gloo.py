"""A model in DDP provides its ranks, and work that several ranks repeat is reported."""

from __future__ import annotations

from pathlib import Path

from support import forks

SCRIPT = """
import logging, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import oxidion

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=ranks)
said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage()) if record.name == "oxidion" else None
logging.getLogger("oxidion").addHandler(handler)
logging.getLogger("oxidion").setLevel(logging.INFO)

def network():
    torch.manual_seed(0)
    hidden = [nn.Linear(24, 24) for _ in range(4)]
    return nn.Sequential(nn.Embedding(32, 24), *hidden, nn.GELU(), nn.Linear(24, 40)).double()

def stepped(make):
    model = network()
    outer = DistributedDataParallel(model)
    optimizer = make(model, outer)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        outer(torch.randint(32, (8,))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer, torch.cat([param.detach().flatten() for param in model.parameters()])

for cls in (oxidion.Muon, oxidion.Dion):
    options = dict(lr=0.02, scalar_lr=1e-3, summary=False)
    wrapped, by_model = stepped(lambda model, outer: cls(outer, **options))
    assert not said, said
    assert wrapped.plan().transfers
    assert wrapped.param_groups[0]["param_names"] == [f"{at}.weight" for at in range(1, 5)]
    _, by_mesh = stepped(lambda model, outer: cls(model, distributed_mesh=outer.process_group, **options))
    assert torch.equal(by_model, by_mesh)
    assert not said, said
    compiled, by_compiled = stepped(lambda model, outer: cls(torch.compile(outer), **options))
    assert compiled.plan().transfers
    assert torch.equal(by_model, by_compiled)
    assert not said, said
    alone, repeated = stepped(lambda model, outer: cls(model, **options))
    assert not alone.plan().transfers
    torch.testing.assert_close(by_model, repeated, rtol=1e-12, atol=1e-13)
    (line,) = said
    assert f"{cls.__name__}: each of the {ranks} ranks does all work" in line, line
    said.clear()
oxidion.AdamW(network().parameters())
assert not said, said
for call in (lambda: oxidion.Muon([nn.Parameter(torch.ones(8, 8))], dist.group.WORLD),
             lambda: oxidion.Muon([nn.Parameter(torch.ones(8, 8))], 0.1,
                                  dist.device_mesh.init_device_mesh("cpu", (ranks,)))):
    try:
        call()
    except TypeError as error:
        assert "Meshes are given by keyword: distributed_mesh=" in str(error), error
    else:
        raise AssertionError("a mesh as another argument was taken")
dist.destroy_process_group()
"""


def test_model_in_ddp_gives_the_ranks_that_share_the_work(tmp_path: Path) -> None:
    for ended in forks.common().run(SCRIPT, str(tmp_path), ranks=2, limit=60):
        assert ended.returncode == 0, ended.stderr
