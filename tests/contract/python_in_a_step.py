"""Does to an optimizer what Python can do within its step. The process must end by itself.

Arguments: where Python runs, the class, the number of cases, the seed.
"""

from __future__ import annotations

import gc
import logging
import mmap
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import oxidion

SETTINGS: dict[str, dict[str, Any]] = {
    "Dion": {"rank_fraction": 0.5},
    "GaLoreAdamW": {"rank": 4},
    "SOAP": {"precondition_frequency": 1},
    "Adafactor": {"lr": 0.1, "relative_step": False},
}
SHAPES = [(48, 32), (48, 32), (24, 40), (64, 8)]
strangers: list[Tensor] = []


def in_own_pages(value: Tensor) -> Tensor:
    """The same numbers in pages of their own, which go with the tensor: a use after that ends the process."""
    size = value.untyped_storage().nbytes()
    made = torch.frombuffer(mmap.mmap(-1, size), dtype=value.dtype, count=size // value.itemsize)
    return made.as_strided(value.shape, value.stride()).copy_(value)


class Asking(nn.Parameter):
    """Runs something when it is asked for its gradient."""

    ask: Callable[[], None] | None = None

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        if self.ask:
            self.ask()
        return nn.Parameter.grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        nn.Parameter.grad.__set__(self, value)  # type: ignore[attr-defined]


class Number:
    """A learning rate that runs Python where it is read."""

    def __init__(self, value: float, ask: Callable[[], None]) -> None:
        self.value, self.ask = value, ask

    def __float__(self) -> float:
        self.ask()
        return self.value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __hash__(self) -> int:
        return hash(self.value)

    def __lt__(self, other: float) -> bool:
        return self.value < other

    def __le__(self, other: float) -> bool:
        return self.value <= other

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __ge__(self, other: float) -> bool:
        return self.value >= other

    def __rmul__(self, other: float) -> float:
        return other * self.value

    __mul__ = __rmul__


class Handler(logging.Handler):
    """Runs Python where something is logged."""

    def __init__(self, ask: Callable[[], None]) -> None:
        super().__init__()
        self.ask = ask

    def emit(self, _record: logging.LogRecord) -> None:
        self.ask()


def tensors(optimizer: Any, param: Tensor, which: str) -> Tensor | None:
    """The parameter, its gradient, or one of its states."""
    if which == "param":
        return param
    if which == "grad":
        return param.grad
    states = [value for value in optimizer.state[param].values() if isinstance(value, Tensor)]
    return random.choice(states) if states else None


def replace(x: Tensor, _: Any) -> None:
    x.data = torch.full_like(x, 5.0)


def replace_by_transposed(x: Tensor, _: Any) -> None:
    x.data = torch.full_like(x, 5.0).t().contiguous().t() if x.ndim == 2 else x.data[::2]


def replace_by_smaller(x: Tensor, _: Any) -> None:
    x.data = torch.ones(3, dtype=x.dtype)


def replace_by_double(x: Tensor, _: Any) -> None:
    x.data = x.data.double()


def give(x: Tensor, _: Any) -> None:
    x.data.set_(torch.zeros(0))  # type: ignore[call-overload]


def give_own(x: Tensor, _: Any) -> None:
    with torch.no_grad():
        x.set_(torch.zeros(0))  # type: ignore[call-overload]


def free(x: Tensor, _: Any) -> None:
    x.untyped_storage().resize_(0)


def shrink(x: Tensor, _: Any) -> None:
    x.untyped_storage().resize_(x.untyped_storage().nbytes() // 2)


def move(x: Tensor, _: Any) -> None:
    size = x.untyped_storage().nbytes()
    x.untyped_storage().resize_(0)
    strangers.append(torch.full((max(size // 4, 1),), 7.0))
    x.untyped_storage().resize_(size)


def grow(x: Tensor, _: Any) -> None:
    with torch.no_grad():
        x.resize_(400, 300)


def step(_: Tensor, optimizer: Any) -> None:
    optimizer.step()


def load(_: Tensor, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def forget_states(_: Tensor, optimizer: Any) -> None:
    optimizer.state.clear()
    gc.collect()


def forget_gradients(_: Tensor, optimizer: Any) -> None:
    optimizer.zero_grad()
    gc.collect()


def forget_session(_: Tensor, optimizer: Any) -> None:
    optimizer._session = None
    optimizer._comms = ()
    gc.collect()


def add_group(_: Tensor, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(8, 8))]})


def remove_params(_: Tensor, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["params"].clear()
    gc.collect()


def bind(_: Tensor, optimizer: Any) -> None:
    optimizer.init_state()


def free_workspace(_: Tensor, optimizer: Any) -> None:
    for found in gc.get_objects():
        if (
            type(found) is Tensor
            and found.dtype == torch.float32
            and found.ndim == 1
            and found.numel() > 4000
        ):
            found.untyped_storage().resize_(0)


Action = Callable[[Tensor, Any], None]
OF_TENSORS: list[Action] = [
    replace,
    replace_by_transposed,
    replace_by_smaller,
    replace_by_double,
    give,
    give_own,
]
OF_STORAGES: list[Action] = [free, shrink, move, grow, free_workspace]
OF_OPTIMIZERS: list[Action] = [step, load, forget_states, forget_gradients, forget_session, add_group]
ACTIONS = [*OF_TENSORS, *OF_STORAGES, *OF_OPTIMIZERS, remove_params, bind]


class Case:
    """An optimizer after one step, and what is done to it within the next one."""

    def __init__(self, place: str, name: str) -> None:
        self.place, self.armed, self.failure = place, False, ""
        strided, in_pages = random.random() < 0.3, random.random() < 0.4
        own = in_own_pages if in_pages else torch.Tensor.clone
        self.params: list[Tensor] = []
        for shape in SHAPES:
            value = torch.randn(shape)
            if strided and len(shape) == 2:
                value = value.t().contiguous().t()
            value = own(value)
            self.params.append(Asking(value) if place == "gradient" else nn.Parameter(value))
        for param in self.params:
            param.grad = own(torch.randn(param.shape))
            if place == "log":
                param.grad.zero_()
        settings = {"lr": 0.1, **SETTINGS.get(name, {})}
        if place == "function":
            settings["newton_schulz_func"] = self.function
        middle = len(self.params) // 2
        groups = [{"params": self.params[:middle]}, {"params": self.params[middle:]}]
        self.optimizer: Any = getattr(oxidion, name)(groups, **settings)
        self.optimizer.step()
        for states in self.optimizer.state.values() if in_pages else ():
            for state in states.values():
                if isinstance(state, Tensor) and state.numel():
                    state.data = in_own_pages(state)
        self.action, self.target = random.choice(ACTIONS), random.choice(self.params)
        self.which = random.choice(["param", "grad", "state"])
        self.at = random.randrange({"profile": 200, "gradient": 4}.get(place, 1))

    def function(self, x: Tensor, epsilon: float = 1e-7) -> Tensor:
        self.ask()
        return x

    def ask(self) -> None:
        if not self.armed:
            return
        self.at -= 1
        if self.at >= 0:
            return
        self.armed = False
        found = tensors(self.optimizer, self.target, self.which)
        if found is not None:
            try:
                self.action(found, self.optimizer)
            except Exception as raised:
                self.failure = type(raised).__name__
        del found
        gc.collect()
        strangers.append(torch.full((48 * 32,), 7.0))

    def leave(self, called: Any) -> None:
        if getattr(called, "__name__", "") == "compute":
            sys.setprofile(None)
            self.optimizer.zero_grad()

    def arm(self) -> None:
        """Has Python ask within the next step."""
        if self.place == "number":
            self.optimizer.param_groups[-1]["lr"] = Number(0.1, self.ask)
        if self.place == "hook":
            self.optimizer.register_step_pre_hook(lambda *_: self.ask())
        if self.place == "gradient":
            for param in self.params:
                param.ask = self.ask  # type: ignore[attr-defined]
        if self.place == "object":
            weakref.finalize(self.target.grad, self.ask)
        if self.place == "log":
            for name in ("oxidion", "oxidion.dion"):
                logging.getLogger(name).handlers[:] = [Handler(self.ask)]
                logging.getLogger(name).setLevel(logging.DEBUG)
        self.armed = True

    def run(self) -> str:
        before = [param.data for param in self.params]
        copies, ended = [x.clone() for x in before], threading.Event()
        other = threading.Thread(target=self.replace_all, args=(ended,))
        self.arm()
        try:
            if self.place == "profile":
                sys.setprofile(lambda *_: self.ask())
            if self.place == "object":  # the core has the last references, and the objects go with them
                sys.setprofile(lambda _, event, called: event == "c_call" and self.leave(called))
            if self.place == "thread":
                other.start()
            self.optimizer.step()
            result = "took the step"
        except Exception as raised:
            result = type(raised).__name__
        finally:
            sys.setprofile(None)
            ended.set()
        if self.place == "thread":
            other.join()
        acted, self.armed = not self.armed, False
        # Numbers are read before anything is written.
        if acted and (self.action, self.which, self.place) == (replace, "param", "number"):
            at = next(i for i, param in enumerate(self.params) if param is self.target)
            assert torch.equal(before[at], copies[at]), "the memory of before was written"
        for stranger in strangers:
            assert bool((stranger == 7.0).all()), f"memory of others was written: {self.action.__name__}"
        del strangers[8:]
        return f"{self.action.__name__} of {self.which}: {result} {'' if acted else '(not reached)'}"

    def replace_all(self, ended: threading.Event) -> None:
        while not ended.is_set():
            for param in self.params:
                param.data = torch.ones(param.shape)
                strangers.append(torch.full((48 * 32,), 7.0))
            del strangers[8:]


def main(place: str, name: str, count: int, seed: int) -> None:
    random.seed(f"{place} {name} {seed}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    gc.freeze()  # what is there now is not looked at again by each collection
    lines = [Case(place, name).run() for _ in range(count)]
    reached = sum("(not reached)" not in line for line in lines)
    sys.stdout.write("\n".join(sorted(set(lines))) + f"\nreached {reached} of {count}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
