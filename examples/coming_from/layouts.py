"""A small language model, its layouts and its checkpoints, for the scripts of this folder.

``--dp``, ``--fs`` and ``--tp`` are the axes of the mesh: processes with copies of the parameters, processes
that share them (FSDP2), and processes that split each layer (tensor parallelism). Without them one process
trains. The batch of a step is a function of the step alone, so losses do not depend on the layout.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from oxidion.checkpoint import latest_folder, whole_folder

WORDS, DIM, HEADS, LENGTH, BATCH = 64, 32, 4, 16, 8

AddOptions = Callable[[argparse.ArgumentParser], None]
Optimizers = torch.optim.Optimizer | list[torch.optim.Optimizer]


class Block(nn.Module):
    """Causal attention with heads of ``2 * DIM / HEADS`` features, then an MLP."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query, self.key, self.value = (nn.Linear(DIM, 2 * DIM, bias=False) for _ in range(3))
        self.project = nn.Linear(2 * DIM, DIM, bias=False)
        self.expand, self.contract = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [batch, length, DIM] to the same shape; with tensor parallelism by the heads of this rank."""
        y = self.attention_norm(x)
        query, key, value = (
            layer(y).unflatten(-1, (-1, 2 * DIM // HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        result: Tensor = x + self.contract(F.gelu(self.expand(self.mlp_norm(x))))
        return result


class Model(nn.Module):
    """Embeddings of words and positions, two blocks, a norm and the LM head."""

    def __init__(self) -> None:
        """Makes the layers, with weights from torch's global generator."""
        super().__init__()
        self.embedding, self.positions = nn.Embedding(WORDS, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mean cross-entropy of each token of [batch, LENGTH + 1] after those before it."""
        x = self.embedding(tokens[:, :-1]) + self.positions(torch.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


def parameters_by_kind(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """The hidden matrices, the LM head, and the rest: embeddings, gains and biases."""
    matrices, head, rest = [], [], []
    for name, param in model.named_parameters():
        kind = head if "lm_head" in name else matrices if param.ndim == 2 and "blocks" in name else rest
        kind.append(param)
    return matrices, head, rest


def shorter_side(param: nn.Parameter) -> Shard:
    """The side of a matrix that FSDP shards; tensor parallelism splits the longer one in every block."""
    return Shard(1) if param.ndim == 2 and param.shape[1] < param.shape[0] else Shard(0)


class Job:
    """Command line, mesh, data and checkpoints of one run."""

    def __init__(self, description: str | None, *add_options: AddOptions) -> None:
        """Reads the command line, to which ``add_options`` add their own, and joins the other processes."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for axis in ("dp", "fs", "tp"):
            parser.add_argument(f"--{axis}", type=int, default=1, help=f"processes along {axis}")
        parser.add_argument("--folder", type=Path, help="of the checkpoints; the run goes on from the newest")
        parser.add_argument("--steps", type=int, default=40, help="length of the run")
        parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
        parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
        for add in add_options:
            add(parser)
        self.options = parser.parse_args()
        if self.options.tp > 1 and self.options.fs == 1:
            parser.error("--tp needs --fs of at least 2")
        torch.set_default_dtype(getattr(torch, self.options.dtype))
        torch.manual_seed(0)
        sizes = (self.options.dp, self.options.fs, self.options.tp)
        self.mesh: DeviceMesh | None = None
        self.parts, self.part = sizes[0] * sizes[1], 0
        if sizes != (1, 1, 1):
            dist.init_process_group("gloo")
            self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "fs", "tp"))
            self.part = self.mesh["dp"].get_local_rank() * sizes[1] + self.mesh["fs"].get_local_rank()

    def axis(self, name: str) -> DeviceMesh | None:
        """One axis of the mesh; None for one process."""
        return None if self.mesh is None else self.mesh[name]

    def distribute(self, model: Model, *, average_gradients: bool = True) -> nn.Module:
        """The model on the mesh: tensor parallelism, then FSDP2 or DDP.

        Args:
            model: the same in all processes.
            average_gradients: over ``dp`` in the backward pass; else the optimizer averages.
        """
        if self.mesh is None:
            return model
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan: dict[str, Any] = dict.fromkeys(("query", "key", "value", "expand"), columns)
        plan |= dict.fromkeys(("project", "contract"), rows)
        has_copies = self.options.dp > 1 and average_gradients
        if self.options.fs > 1:
            for block in model.blocks if self.options.tp > 1 else ():
                parallelize_module(block, self.mesh["tp"], plan)
            over = self.mesh["dp", "fs"] if has_copies else self.mesh["fs"]
            for module in (*model.blocks, model):
                fully_shard(module, mesh=over, shard_placement_fn=shorter_side)
            return model
        return DistributedDataParallel(model) if has_copies else model

    def batch(self, step: int) -> Tensor:
        """Counts that begin anywhere and go on by 1, 2 or 3, as many as this process trains on."""
        generator = torch.Generator().manual_seed(step)
        start = torch.randint(WORDS, (BATCH, 1), generator=generator)
        stride = torch.randint(1, 4, (BATCH, 1), generator=generator)
        return ((start + stride * torch.arange(LENGTH + 1)) % WORDS).chunk(self.parts)[self.part]

    def report(self, step: int, loss: Tensor) -> None:
        """Prints the mean loss of a step; all processes call it."""
        mean = loss.detach().clone()
        if self.mesh is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        if self.mesh is None or dist.get_rank() == 0:
            print(f"step {step} loss {mean.item():.15f}", flush=True)

    def resume(self, model: nn.Module, optimizers: Optimizers) -> int:
        """Loads the newest complete checkpoint, of any layout; returns the number of its steps."""
        newest = latest_folder(self.options.folder) if self.options.folder else None
        if newest is None:
            return 0
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
        dcp.load(state, checkpoint_id=newest, no_dist=self.mesh is None)
        set_state_dict(
            model, optimizers, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return int(newest.name.removeprefix("step-"))

    def is_to_save(self, step: int) -> bool:
        """Whether a checkpoint follows after this number of steps."""
        due = step == self.options.steps or step % self.options.save_every == 0
        return self.options.folder is not None and due

    def save(self, step: int, model: nn.Module, optimizers: Optimizers) -> None:
        """Writes a checkpoint, which has its name only once it is complete; all processes call it."""
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
        with whole_folder(self.options.folder, step) as folder:
            dcp.save(state, checkpoint_id=folder, no_dist=self.mesh is None)

    def close(self) -> None:
        """Leaves the process group."""
        if self.mesh is not None:
            dist.barrier()
            dist.destroy_process_group()
