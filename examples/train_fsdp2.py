r"""Trains the small GPT of ``gpt.py`` on several processes, sharded with FSDP2 and tensor parallelism.

    torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --mesh fs=2,tp=2 --compare
    torchrun --standalone --nproc-per-node 4 examples/train_fsdp2.py --mesh dp=2,fs=2 --rank-fraction 0.25 \
        --compressed on --checkpoint runs/fsdp2 --save-every 20 --stop-at 60
    torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --mesh fs=2 --rank-fraction 0.25 \
        --resume runs/fsdp2
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 4 --max-restarts 3 \
        examples/train_fsdp2.py --mesh fs=2,tp=2 --checkpoint runs/job --save-every 20 --resume auto
    python examples/train_fsdp2.py

The mesh has three axes. Along ``dp`` processes hold copies, along ``fs`` they share the parameters
(``fully_shard``), and each trains on its part of the batch. Along ``tp`` they split the heads and the MLP of
every block (``parallelize_module``) and see the same data. The losses are those of one process, but for the
order of sums: training magnifies what that rounds off, and ``--dtype float64`` shows that it is no more.

A checkpoint is a folder of its own, ``runs/fsdp2/step-00000060``, which has this name only once it is whole:
``--resume runs/fsdp2`` goes on from the newest, whenever the run was killed. With ``--resume auto`` the same
command can be started again and again: it goes on from the newest checkpoint in the folder of
``--checkpoint``, starts where there is none yet, and trains no further once the run is finished. A scheduler
of jobs may do so, or torchrun itself, which under ``--max-restarts`` restarts all processes when one of
them is killed. The variable above makes torchrun create a new store; the old one still has the addresses of
the dead processes.

Gradients are clipped by the norm of all of them together, which is the same number on every mesh.

With ``--route`` Dion keeps matrices sharded or gathers them at owners along some axes or all; by default it
takes what sends least. The losses are the same; the bytes that a step sends, which are printed, are not.

With ``--compressed on`` the optimizer averages over ``dp``: of a low-rank Dion only the two thin factors.
The norm of the averaged gradients is then not known before the step, so they are not clipped. With ``off``
FSDP averages the gradients. Without torchrun nothing is sharded and nothing communicates.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import oxidion
from corpus import VOCABULARY, Corpus, Windows, load_corpus
from gpt import GPT, GPTShape
from options import AUTO, chosen_device, not_negative, refuse_auto_without_checkpoint
from recipes import RECIPES, Settings, build_scheduler
from training import DTYPES

AXES = ("dp", "fs", "tp")
Route = str | tuple[str, ...]


def shard(model: GPT, mesh: DeviceMesh, *, compressed: bool) -> None:
    """Splits the blocks over ``tp`` and all parameters over ``fs``; ``compressed`` keeps FSDP off ``dp``."""
    if mesh["tp"].size() > 1:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan: dict[str, Any] = {f"attention.{name}": columns for name in ("query", "key", "value")}
        plan |= {"attention.project": rows, "expand": columns, "contract": rows}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], plan)
    fs = mesh["fs"].size()

    def other_dimension(param: nn.Parameter) -> Shard | None:
        # Where tp splits the rows fs splits the columns: no dimension twice. FSDP wants equal columns.
        taken = isinstance(param, DTensor) and param.placements[0] == Shard(0)
        return Shard(1) if taken and param.shape[1] % fs == 0 else None

    over = mesh["fs"] if compressed or mesh["dp"].size() == 1 else mesh["dp", "fs"]
    for block in model.blocks:
        fully_shard(block, mesh=over, shard_placement_fn=other_dimension)
    fully_shard(model, mesh=over, shard_placement_fn=other_dimension)


def build_optimizer(
    model: GPT, settings: Settings, mesh: DeviceMesh | None, *, compressed: bool, route: Route | None = None
) -> torch.optim.Optimizer:
    """Builds the named algorithm for block matrices and AdamW (with Lion: Lion) for embedding, head, norms.

    The optimizer sorts the parameters of the model by their modules; the first process prints a summary.
    """
    recipe = RECIPES[settings.optimizer]
    keys = recipe.arguments(settings)
    if compressed and mesh is not None:
        # How parameters are sharded is read from them; only where the optimizer is to average must be said.
        keys["replicate_mesh"] = mesh["dp"]
    if route is not None:
        keys["route"] = route
    optimizer: torch.optim.Optimizer = getattr(oxidion, recipe.class_name)(
        model,
        lr=settings.lr,
        scalar_algorithm=recipe.scalar_algorithm,
        scalar_lr=settings.scalar_lr,
        weight_decay=settings.weight_decay,
        **keys,
    )
    return optimizer


def clip_gradients(params: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scales all gradients by one factor so that their norm together is at most ``largest``.

    ``torch.nn.utils.clip_grad_norm_`` takes tensors on one mesh, and here some are on ``fs`` and some on
    ``fs`` and ``tp``. So each process takes the norm of what it holds, and one sum goes over all processes.

    Args:
        params: parameters of the whole model, with gradients that are averaged over the batch.
        largest: bound on the norm.

    Returns:
        The norm of the gradients of the whole model before, the same in all processes.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    by_copies: dict[int, list[Tensor]] = {}
    for param in params:
        held, mesh, copies = param.grad, None, world
        if isinstance(held, DTensor):
            mesh = held.device_mesh
            for size, placement in zip(mesh.shape, held.placements, strict=True):
                copies //= 1 if placement.is_replicate() else size
            held = held.to_local()
        if held is not None:
            by_mesh.setdefault(mesh, []).append(param)
            by_copies.setdefault(copies, []).append(held)
    parts = {copies: torch.nn.utils.get_total_norm(held) for copies, held in by_copies.items()}
    # What several processes hold is counted once, as each adds its share.
    square = torch.stack([part.double().square() / copies for copies, part in parts.items()]).sum()
    if dist.is_initialized():
        dist.all_reduce(square)
    norm = square.sqrt().to(next(iter(parts.values())).dtype)
    for together in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(together, largest, norm)
    return norm


class Training:
    """Model, optimizer, schedule and data of one run: on a mesh or, without one, in this process alone."""

    def __init__(
        self,
        settings: Settings,
        corpus: Corpus,
        mesh: DeviceMesh | None,
        device: str,
        compressed: bool,
        route: Route | None = None,
    ) -> None:
        """Builds the whole model from the seed in every process, then shards it.

        Raises:
            ValueError: sizes that the model or the text cannot serve.
        """
        self.settings = settings
        self.device = device
        self.route = route
        torch.manual_seed(settings.seed)
        sizes = (settings.seq_len, settings.layers, settings.dim, settings.heads)
        self.model = GPT(GPTShape(VOCABULARY, *sizes, tied=False)).to(device, DTYPES[settings.dtype])
        self.parts, self.part = 1, 0
        if mesh is not None:
            shard(self.model, mesh, compressed=compressed)
            self.parts = mesh["dp"].size() * mesh["fs"].size()
            self.part = mesh["dp"].get_local_rank() * mesh["fs"].size() + mesh["fs"].get_local_rank()
        self.optimizer = build_optimizer(self.model, settings, mesh, compressed=compressed, route=route)
        self.scheduler = build_scheduler(self.optimizer, settings)
        self.windows = Windows(corpus.train, settings.seq_len, settings.seed)
        self.losses: list[float] = []

    def step(self) -> None:
        """Takes a step on this process's part of the next global batch; records the mean loss."""
        batch = self.windows.next_batch(self.settings.batch_size).chunk(self.parts)[self.part]
        loss = self.model.loss(batch.to(self.device))
        loss.backward()
        if self.settings.clip_norm > 0:
            clip_gradients(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        mean = loss.detach().double()
        if dist.is_initialized():  # processes along tp have equal losses: they do not change the mean
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.losses.append(mean.item())

    def sent(self) -> dict[str, int]:
        """Bytes that a process sends on average in a step of the optimizer, by axis, with sums as rings."""
        found: dict[str, int] = {}
        optimizer: Any = self.optimizer
        for transfer in optimizer.plan().transfers:
            ranks, given = len(transfer["ranks"]), transfer["send"][1]
            if transfer["kind"] == "all_gather":
                size = given * (ranks - 1)
            elif transfer["kind"] == "all_reduce":
                size = 2 * given * (ranks - 1) // ranks
            else:  # what it keeps is not sent
                size = given - transfer["send_bytes"][transfer["coordinate"]]
            found[transfer["axis"]] = found.get(transfer["axis"], 0) + size
        if found:
            sums = torch.tensor(list(found.values()), device=self.device)
            dist.all_reduce(sums)
            found = dict(zip(found, (sums // dist.get_world_size()).tolist(), strict=True))
        return found

    def save(self, root: Path, keep: int) -> None:
        """Writes a checkpoint that ``load`` takes on any mesh; all processes call it.

        Args:
            root: folder of all checkpoints of the run.
            keep: number of newest checkpoints that are kept.
        """
        self.optimizer.synchronize_for_checkpoint()
        with oxidion.checkpoint.whole_folder(root, len(self.losses), keep=keep) as folder:
            dcp.save(self._state(), checkpoint_id=folder, no_dist=not dist.is_initialized())

    def load(self, folder: Path) -> None:
        """Continues from a checkpoint of the same settings, written on any mesh; all processes call it.

        Raises:
            ValueError: the checkpoint was written under other settings.
        """
        state = self._state()
        dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
        record = json.loads(state["record"])
        for key, value in asdict(self.settings).items():
            if record["settings"][key] != value:
                raise ValueError(
                    f"{folder} was written with {key}={record['settings'][key]!r}, not {value!r}"
                )
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts)
        if self.route is not None:  # groups are loaded with the route of the run that wrote them
            self.optimizer.param_groups[0]["route"] = self.route
        self.scheduler.load_state_dict(record["scheduler"])
        self.windows.position = record["position"]
        self.losses = record["losses"]

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        record = {
            "settings": asdict(self.settings),
            "scheduler": self.scheduler.state_dict(),
            "position": self.windows.position,
            "losses": self.losses,
        }
        return {"model": model, "optimizer": optimizer, "record": json.dumps(record)}

    def run(
        self, stop_at: int, label: str | None, save: Callable[[], None] | None = None, save_every: int = 0
    ) -> float:
        """Trains until ``stop_at`` steps are done; prints losses after ``label``; returns the seconds.

        Args:
            stop_at: number of steps, counted from the start of the run.
            label: what a printed line begins with; None prints nothing.
            save: writes a checkpoint, at the end and every ``save_every`` steps.
            save_every: steps between two checkpoints; 0 writes one at the end only.
        """
        began = time.perf_counter()
        while len(self.losses) < stop_at:
            self.step()
            done = len(self.losses)
            if save is not None and (done == stop_at or (save_every and done % save_every == 0)):
                save()
            if label is not None and (done % max(1, self.settings.steps // 10) == 0 or done == stop_at):
                print(f"{label}: step {done:4d}, loss {self.losses[-1]:.4f}", flush=True)
        return time.perf_counter() - began


def found_checkpoint(folder: Path) -> Path:
    """The newest whole checkpoint of a run's folder; the folder itself if it is a checkpoint.

    Raises:
        ValueError: where there is none.
    """
    if (folder / ".metadata").is_file():
        return folder
    newest = oxidion.checkpoint.latest_folder(folder)
    if newest is None:
        raise ValueError(f"{folder} has no whole checkpoint: start without --resume, or with --resume auto")
    return newest


def resume(training: Training, options: argparse.Namespace) -> Path | None:
    """Loads the checkpoint that ``--resume`` asks for and returns it; None for a run that starts.

    Raises:
        ValueError: where there is none, it is of other settings, or ``--checkpoint`` has a later one.
    """
    found = None
    if options.resume == AUTO:
        found = oxidion.checkpoint.latest_folder(options.checkpoint)
    elif options.resume is not None:
        found = found_checkpoint(options.resume)
    if found is not None:
        training.load(found)
    if options.checkpoint is not None:
        refuse_later_checkpoints(options.checkpoint, len(training.losses))
    return found


def refuse_later_checkpoints(root: Path, step: int) -> None:
    """Refuses to write where another run has come further: its checkpoint would be taken for the newest.

    Raises:
        ValueError: with both steps.
    """
    newest = oxidion.checkpoint.latest_folder(root)
    if newest is not None and int(newest.name.removeprefix("step-")) > step:
        raise ValueError(
            f"--checkpoint: {root} has {newest.name}, and this run starts at step {step}: --resume {root}, "
            "or name another folder"
        )


def mesh_sizes(text: str) -> dict[str, int]:
    """Sizes by axis of ``dp=2,fs=2``; axes that are not named have one process."""
    sizes = dict.fromkeys(AXES, 1)
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"must be like dp=2,fs=2,tp=1, got {text!r}")
        sizes[axis] = int(size)
    return sizes


def route_of(text: str) -> Route:
    """A word, or the axes that are gathered, as in ``fs,tp``."""
    axes = tuple(text.split(","))
    if text in ("auto", "keep", "gather"):
        return text
    if not set(axes) <= set(AXES):
        raise argparse.ArgumentTypeError(f"must be auto, keep, gather, or axes as in fs,tp, got {text!r}")
    return axes


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options: list[tuple[str, Any, Any, str]] = [
        ("--mesh", mesh_sizes, None, "processes by axis: dp=2,fs=2,tp=2; fs takes all unless given"),
        ("--optimizer", tuple(RECIPES), "dion", "of the block matrices"),
        ("--compressed", ("on", "off"), "off", "the optimizer averages over dp, not FSDP"),
        ("--lr", float, None, "of the block matrices; unless given that of recipes.py"),
        ("--rank-fraction", float, 1.0, "rank of Dion over the smaller side"),
        ("--route", route_of, None, "of Dion: auto (unless given), keep, gather, or axes to gather: fs,tp"),
        ("--fraction", float, 0.25, "share of rows or columns in a step of Dion2 and NorDion2"),
        ("--weight-decay", float, 0.01, "decoupled, of the block matrices"),
        ("--clip-norm", not_negative, None, "largest norm of all gradients, 1 unless given; 0: any"),
        ("--steps", int, 160, "length of the run; the schedule ends there"),
        ("--batch", int, 8, "sequences in the global batch"),
        ("--seq-len", int, 128, "tokens in a sequence"),
        ("--layers", int, 4, "blocks"),
        ("--dim", int, 224, "width of the model"),
        ("--heads", int, 4, "attention heads"),
        ("--seed", int, 0, "weights, order of batches, sketches"),
        ("--corpus-mb", float, 8.0, "size cap on the text"),
        ("--dtype", tuple(DTYPES), "float32", "parameters"),
        ("--device", ("cpu", "cuda"), "cpu", "gloo or NCCL"),
        ("--checkpoint", Path, None, "folder of the run's checkpoints; one is written at the end"),
        ("--save-every", int, 0, "steps between two checkpoints; 0: only one at the end"),
        ("--keep", int, 2, "newest checkpoints to keep"),
        ("--stop-at", int, None, "stop after this step and leave the rest to --resume"),
        (
            "--resume",
            Path,
            None,
            "that folder, or one checkpoint in it, to continue from on any mesh;\n"
            "auto: the newest checkpoint in the folder of --checkpoint, if there is one",
        ),
        ("--json", Path, None, "file for settings, losses and times"),
        ("--tolerance", float, math.inf, "--compare fails where losses differ by more"),
    ]
    for name, kind, default, text in options:
        accept: dict[str, Any] = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        shown = "" if default is None else f" (default: {default})"
        parser.add_argument(name, default=default, help=text + shown, **accept)
    parser.add_argument("--compare", action="store_true", help="then train in one process too and compare")
    return parser


def check_files(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Leaves through ``parser.error`` where the options about checkpoints contradict each other."""
    if options.save_every < 0:
        parser.error(f"--save-every must be at least 0, got {options.save_every}")
    if options.save_every and not options.checkpoint:
        parser.error("--save-every needs --checkpoint FOLDER")
    if options.checkpoint is not None and options.checkpoint.is_file():
        parser.error(f"--checkpoint must be a folder here, got the file {options.checkpoint}")
    refuse_auto_without_checkpoint(parser, options)
    if options.resume not in (None, AUTO) and not options.resume.is_dir():
        parser.error(f"--resume: no such folder: {options.resume}")


def clip_norm_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> float:
    """The largest norm of the gradients, 0 for any; leaves through ``parser.error`` where none is known."""
    if options.compressed == "off":
        return 1.0 if options.clip_norm is None else float(options.clip_norm)
    if options.clip_norm:
        parser.error(
            f"--clip-norm {options.clip_norm:g} needs --compressed off. With --compressed on the optimizer "
            "averages over dp within its step, so the norm of the averaged gradients is not known before: "
            "leave --clip-norm out, or give 0"
        )
    return 0.0


def checked_settings(parser: argparse.ArgumentParser, options: argparse.Namespace, world: int) -> Settings:
    """The settings; leaves through ``parser.error`` where the options contradict each other."""
    for name in ("steps", "batch", "stop_at", "keep"):
        if (number := vars(options)[name]) is not None and number < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {number}")
    check_files(parser, options)
    options.mesh = options.mesh or dict.fromkeys(AXES, 1) | {"fs": world}
    parts = options.mesh["dp"] * options.mesh["fs"]
    if parts * options.mesh["tp"] != world:
        parser.error(f"--mesh has {parts * options.mesh['tp']} processes, torchrun started {world}")
    if options.batch % parts:
        parser.error(f"--batch must be a multiple of dp * fs = {parts}, got {options.batch}")
    if options.heads % options.mesh["tp"]:
        parser.error(f"--heads must be a multiple of tp = {options.mesh['tp']}, got {options.heads}")
    if options.compressed == "on" and options.optimizer != "dion":
        parser.error("--compressed on needs --optimizer dion: the others take averaged gradients")
    if options.route and options.optimizer != "dion":
        parser.error("--route needs --optimizer dion: the others have one")
    recipe = RECIPES[options.optimizer]
    lr = recipe.lr if options.lr is None else options.lr
    values = vars(options) | {"lr": lr, "scalar_lr": recipe.scalar_lr or lr, "batch_size": options.batch}
    values |= {"warmup": 0.1, "schedule": "cosine", "tied": False, "initial_scale": 1.0}
    values["clip_norm"] = clip_norm_of(parser, options)
    values |= {"eval_every": options.steps, "eval_windows": 0}  # there is no held-out evaluation here
    return Settings(**{field.name: values[field.name] for field in fields(Settings)})


def join(parser: argparse.ArgumentParser, device: str) -> None:
    """Joins the processes of torchrun; leaves through ``parser.error`` where they would not meet."""
    is_restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if is_restart and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        parser.error(  # https://github.com/pytorch/pytorch/issues/135712
            "torchrun has restarted the processes with the same store, which still has their old "
            "addresses: start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line in this process; exits with 1 when a loss is not finite or --compare fails."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    settings = checked_settings(parser, options, world)
    if chosen_device(parser, options.device).type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = None
    if dist.is_torchelastic_launched():
        join(parser, options.device)
        mesh = init_device_mesh(options.device, tuple(options.mesh.values()), mesh_dim_names=AXES)
    name = ",".join(f"{axis}={size}" for axis, size in options.mesh.items() if size > 1) or "one process"
    stop_at = min(options.stop_at or settings.steps, settings.steps)
    try:
        corpus = load_corpus(round(options.corpus_mb * 1e6))
        training = Training(settings, corpus, mesh, options.device, options.compressed == "on", options.route)
        found = resume(training, options)
    except ValueError as error:
        parser.error(str(error))

    report: dict[str, Any] = {"mesh": options.mesh, "compressed": options.compressed, **asdict(settings)}
    report["first_step"] = len(training.losses)
    report["route"], report["sent"] = options.route, training.sent()
    if rank == 0 and report["first_step"] >= stop_at:
        done = f"{found} has done {report['first_step']} steps, and {stop_at} are asked for"
        print(f"{name}: nothing to train: {done}", flush=True)
    elif rank == 0 and found is not None:
        print(f"{name}: goes on from {found}", flush=True)
    if rank == 0 and mesh is not None:
        each = ", ".join(f"{size:,} along {axis}" for axis, size in report["sent"].items())
        print(f"{name}: bytes that a process sends in a step: {each or 0}", flush=True)
    save = partial(training.save, options.checkpoint, options.keep) if options.checkpoint else None
    report["seconds"] = training.run(stop_at, name if rank == 0 else None, save, options.save_every)
    report["losses"] = training.losses
    if mesh is not None:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0 and options.compare:
        torch.set_num_threads(min(world, os.cpu_count() or 1))
        alone = Training(settings, corpus, None, options.device, False)
        report["seconds_of_one_process"] = alone.run(len(training.losses), "one process")
        report["losses_of_one_process"] = alone.losses
        gaps = [abs(one - other) for one, other in zip(training.losses, alone.losses, strict=True)]
        report["largest_difference"] = most = max(gaps)
        what = f"{name} against one process, {len(gaps)} steps in {settings.dtype}: losses differ by"
        print(f"{what} {most:.1e} at most, {gaps[-1]:.1e} in the end", flush=True)
    if rank == 0 and options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1))
    differs = report.get("largest_difference", -math.inf) > options.tolerance
    return 1 if differs or not all(map(math.isfinite, training.losses)) else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # Threads of gloo outlive their group, and one that lets go of a tensor while Python is torn down aborts.
    os._exit(status)
