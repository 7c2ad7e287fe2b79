"""Jobs of the ranks in tests of deferred comparisons, and of the number of collectives of a comparison."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import oxidion
from oxidion._core import runner
from oxidion._cuda import device
from oxidion._dist import agree, collectives
from support.inputs import gaussian

from .agreeing import compared_steps, cut, own, two_errors
from .jobs import device as where
from .jobs import mesh_of

SHAPES = {"first": (12, 10), "second": (10, 14)}
PLACED = {1: [Shard(0)], 2: [Shard(0), Shard(1)], 3: [Replicate(), Shard(0), Shard(1)]}


def late(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Makes ranks compare as with NCCL alone: no rank waits for the result."""
    return mock.patch.object(collectives, "run_ahead", return_value=True) if on else contextlib.nullcontext()


class Refusing(runner.Direct):
    """A runner that refuses a step that could begin."""

    def prepare(self, session: Any) -> None:
        """Refuses."""
        raise ValueError("not this step")


class Training:
    """Two matrices on a mesh, their optimizer, and gradients of each step."""

    def __init__(self, axes: dict[str, int], name: str = "Muon", **keys: Any) -> None:
        self.mesh, self.placed = mesh_of(axes), PLACED[len(axes)]
        self.params = {
            label: nn.Parameter(distribute_tensor(gaussian(shape, 3).float(), self.mesh, self.placed))
            for label, shape in SHAPES.items()
        }
        self.optimizer = getattr(oxidion, name)(list(self.params.items()), lr=0.01, **keys)
        self.is_last = dist.get_rank() == dist.get_world_size() - 1

    @property
    def group(self) -> dict[str, Any]:
        """The one group of the optimizer."""
        group: dict[str, Any] = self.optimizer.param_groups[0]
        return group

    def set_gradients(self, step: int) -> None:
        """Those of a step, without communication."""
        for label, param in self.params.items():
            local = gaussian(tuple(own(param).shape), step, len(label), dist.get_rank()).float().to(where())
            param.grad = DTensor.from_local(
                local, self.mesh, self.placed, run_check=False, shape=param.shape, stride=param.stride()
            )

    def steps(self, *numbers: int) -> None:
        """Takes steps."""
        for number in numbers:
            self.set_gradients(number)
            self.optimizer.step()

    def values(self) -> list[Tensor]:
        """What this process has of the parameters."""
        return [own(param).clone() for param in self.params.values()]

    def deviate(self, kind: str) -> None:
        """What the last rank does that the others do not, before a step whose gradients are there."""
        if not self.is_last:
            return
        settings = {"lr": ("lr", 0.0123), "weight_decay": ("weight_decay", 0.0123), "unusable": ("lr", -1.0)}
        settings["plan"] = ("num_heads", 2)
        if kind in settings:
            key, value = settings[kind]
            self.group[key] = value
        elif kind == "not to be captured":
            self.optimizer._runner = Refusing()
        elif kind == "step":
            self.group["step"] += 1
        elif kind == "gradient":
            self.params["second"].grad = None
        elif kind == "bound again":
            for state in self.optimizer.state.values():
                state.update({key: value.clone() for key, value in state.items()})
        elif kind == "infinity":
            self.optimizer.found_inf, self.optimizer.grad_scale = torch.tensor(1.0), None
        elif kind == "axes":
            # As long as one of the mesh, on a mesh of its own.
            line = DeviceMesh.from_group(self.mesh.get_group(0), where(), mesh_dim_names=("own",))
            self.optimizer.add_param_group({"params": [("third", nn.Parameter(cut(line)))]})
        elif kind == "placement":
            param = self.params["first"]
            param.grad = DTensor.from_local(
                torch.ones(SHAPES["first"]), self.mesh, [Replicate()] * self.mesh.ndim, run_check=False
            )
        else:
            raise ValueError(kind)


def differing(kind: str, axes: dict[str, int], is_late: bool, then: str, **keys: Any) -> dict[str, Any]:
    """Three steps, the third one different on the last rank, and what comes after it."""
    run = Training(axes, **keys)
    with late(is_late):
        run.steps(1, 2)
        saved = run.optimizer.state_dict()
        kept = {
            "param_groups": [dict(group) for group in saved["param_groups"]],
            "state": {key: {k: v.clone() for k, v in state.items()} for key, state in saved["state"].items()},
        }
        before = run.values()
        run.set_gradients(3)
        run.deviate(kind)
        answer: dict[str, Any] = {"third": two_errors(run.optimizer.step), "step": run.group["step"]}
        answer["unchanged"] = all(map(torch.equal, before, run.values()))
        run.optimizer._runner = runner.DIRECT
        run.set_gradients(4)
        actions: dict[str, Callable[[], object]] = {
            "step": run.optimizer.step,
            "state_dict": run.optimizer.state_dict,
            "synchronize_for_checkpoint": run.optimizer.synchronize_for_checkpoint,
        }
        before = run.values()
        with mock.patch.object(agree, "check_copies", wraps=agree.check_copies) as checked:
            answer["then"] = [two_errors(actions[each]) for each in then.split()]
        answer["copies checked"] = checked.call_count
        answer["unchanged since"] = all(map(torch.equal, before, run.values()))
        if kind == "infinity":
            run.optimizer.found_inf = None
        if kind == "axes" and run.is_last:
            del run.optimizer.param_groups[1:]
        run.optimizer.load_state_dict(kept)
        run.steps(3, 4)
        answer["went on to"] = run.group["step"]
    return answer


def alike(axes: dict[str, int], name: str) -> bool:
    """Whether steps with deferred comparisons end where others do."""
    ends = []
    for is_late in (False, True):
        run = Training(axes, name)
        with late(is_late):
            run.steps(*range(1, 7))
            run.optimizer.state_dict()
        ends.append(run.values())
    return all(map(torch.equal, *ends))


@contextlib.contextmanager
def counted() -> Iterator[Counter[tuple[int, ...]]]:
    """All-reduces of whole numbers, which are those of comparisons, by the ranks of their group."""
    found: Counter[tuple[int, ...]] = Counter()
    all_reduce = dist.all_reduce

    def counting(tensor: Tensor, *args: Any, **keys: Any) -> Any:
        if tensor.dtype == torch.int64:
            found[tuple(dist.get_process_group_ranks(keys["group"]))] += 1
        return all_reduce(tensor, *args, **keys)

    with mock.patch.object(dist, "all_reduce", counting):
        yield found


def collectives_of_a_comparison(axes: dict[str, int], is_late: bool) -> dict[tuple[int, ...], int]:
    """Those of a step that is like the one before it."""
    run = Training(axes)
    with late(is_late):
        run.steps(1, 2)
        with counted() as found:
            run.steps(3)
    return dict(found)


def on_overlapping_groups(is_late: bool) -> tuple[str, str, bool]:
    """All ranks share one matrix, pairs of them another: no grid. The last has no gradient of the other."""
    every, plane = mesh_of({"fs": 4}), mesh_of({"dp": 2, "tp": 2})["tp"]
    params = {
        name: nn.Parameter(distribute_tensor(gaussian((8, 6), 1).float(), mesh, [Shard(0)]))
        for name, mesh in (("wide", every), ("narrow", plane))
    }
    optimizer = oxidion.Muon(list(params.items()))
    with late(is_late):
        for step in range(3):
            for param in params.values():
                param.grad = DTensor.from_local(
                    torch.ones_like(own(param)), param.device_mesh, [Shard(0)], run_check=False
                )
            if step == 2 and dist.get_rank() == 3:
                params["narrow"].grad = None
            before = [own(param).clone() for param in params.values()]
            error, text = two_errors(optimizer.step)
            same = all(torch.equal(a, own(b)) for a, b in zip(before, params.values(), strict=True))
    return error, text, same


def in_a_ring(is_late: bool) -> list[tuple[str, str]]:
    """Four ranks that each share a matrix with the previous and with the next one: no grid."""
    me, params = dist.get_rank(), {}
    for edge in ((0, 1), (2, 3), (1, 2), (0, 3)):
        group = dist.new_group(list(edge))
        if me in edge:
            mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("fs",))
            local = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)], run_check=False)
            params[f"shared by {edge[0]} and {edge[1]}"] = nn.Parameter(local)
    optimizer, said = oxidion.AdamW(list(params.items())), []
    optimizer.compare_every = 1
    with late(is_late):
        for step in range(3):
            for param in params.values():
                param.grad = torch.ones_like(param)
            if me == 2 and step == 2:
                optimizer.param_groups[0]["lr"] = 0.0123
            said.append(two_errors(optimizer.step))
    return said


class Device:
    """What ``torch.cuda`` and pinned memory are to a comparison, without a device: everything is noted.

    Attributes:
        log: what was asked for, in order.
        slow: whether an event is over only after a caller has waited for it.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.slow = False
        self._streams: list[object] = []
        self.over: set[object] = set()
        owner = self

        class Stream:
            def __init__(self, where: torch.device) -> None:
                assert where.type == "cuda"

        class Event:
            def record(self, stream: Stream) -> None:
                assert owner._streams == [stream]
                owner.log.append("record")

            def query(self) -> bool:
                owner.log.append("query")
                if not owner.slow:
                    owner.over.add(self)
                return self in owner.over

            def synchronize(self) -> None:
                owner.log.append("wait")
                owner.over.add(self)

        class Pinned:
            """Memory that a device writes at some time before the event that was recorded next."""

            def __init__(self, numbers: Tensor) -> None:
                self._numbers = numbers

            def to(self, where: torch.device, non_blocking: bool) -> Tensor:
                assert owner._streams
                assert non_blocking
                assert where.type == "cuda"
                return self._numbers.clone()

            def copy_(self, there: Tensor, non_blocking: bool) -> Pinned:
                assert owner._streams
                assert non_blocking
                self._numbers = there
                return self

            def tolist(self) -> Any:
                assert owner.log[-1] in ("query", "wait"), "read before it was there"
                assert owner.over, "read before it was there"
                owner.over.clear()
                owner.log.append("read")
                return self._numbers.tolist()

        @contextlib.contextmanager
        def stream(given: Stream) -> Iterator[None]:
            self._streams.append(given)
            yield
            self._streams.pop()

        sums_of = collectives.sums_of

        def waited(*args: Any) -> list[int]:
            self.log.append("wait in the step")
            with mock.patch.object(collectives, "host", return_value=torch.device("cpu")):
                return sums_of(*args)

        self._answers = [
            mock.patch.multiple(torch.cuda, Stream=Stream, Event=Event, stream=stream),
            mock.patch.multiple(
                collectives,
                needs_device=lambda group: True,
                host=lambda group: torch.device("cuda"),
                pinned=Pinned,
            ),
            mock.patch("oxidion._dist.agree.sums_of", waited),
        ]

    @contextlib.contextmanager
    def there(self) -> Iterator[None]:
        """Answers for torch in this context."""
        collectives._stream_of.cache_clear()
        with contextlib.ExitStack() as stack:
            for answer in self._answers:
                stack.enter_context(answer)
            yield
        collectives._stream_of.cache_clear()

    def since(self) -> list[str]:
        """The log since this was last asked for."""
        log, self.log = self.log, []
        return log


def on_a_device(axes: dict[str, int]) -> dict[str, Any]:
    """The host's part of comparisons by a device: warm steps, a slow device, a capture, and a checkpoint."""
    run, machine = Training(axes), Device()
    answer: dict[str, Any] = {}
    with machine.there():
        run.steps(1)
        answer["first"] = machine.since()
        run.steps(2)
        answer["second"] = machine.since()
        run.steps(3)
        answer["warm"] = machine.since()
        machine.slow = True
        run.steps(4)
        answer["slow"] = machine.since()
        machine.slow = False
        with mock.patch.object(device, "is_capturing", return_value=True):
            run.steps(5)
        answer["captured"] = machine.since()
        run.steps(6)
        answer["after"] = machine.since()
        run.set_gradients(7)
        run.deviate("lr")
        run.optimizer.step()
        machine.since()
        answer["state_dict"] = two_errors(run.optimizer.state_dict)
        answer["looked"] = machine.since()
        answer["again"] = two_errors(run.optimizer.state_dict)
        answer["then"] = two_errors(run.optimizer.step)
    return answer


def refused_everywhere(axes: dict[str, int]) -> list[tuple[str, str]]:
    """A setting that all ranks refuse in one step, and mend."""
    run, said = Training(axes), []
    with late(True):
        run.steps(1, 2)
        said.append(two_errors(run.optimizer.state_dict))
        run.set_gradients(3)
        run.group["lr"] = -1.0
        said.append(two_errors(run.optimizer.step))
        run.group["lr"] = 0.01
        said.append(two_errors(run.optimizer.step))
    return said


def waited_for(name: str) -> tuple[list[bool], str, str]:
    """Steps, some with collectives that others lack; the last rank assumes that it is one ahead."""
    run = Training({"fs": 2}, name, rank=4)
    with late(True):
        run.steps(1, 2)
        run.set_gradients(3)
        run.deviate("step")
        error, text = two_errors(run.optimizer.step)
    return [transfer["when_due"] for transfer in run.optimizer.plan().transfers], error, text


def compared(every: int) -> list[int]:
    """As `compared_steps`, with deferred comparisons."""
    with late(True):
        return compared_steps(every)
