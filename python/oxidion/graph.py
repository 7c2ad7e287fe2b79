"""A step as a CUDA graph: captured once, replayed with the settings and gradients of each step."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from oxidion._core.base import HOOKS, OxOptimizer
from oxidion._core.runner import DIRECT
from oxidion._cuda.device import device_of, devices_of, refusal_of_graphs
from oxidion._cuda.replay import Replay


class CudaGraphOptimizer(Optimizer):
    """Takes the steps of an optimizer by replaying a CUDA graph.

    The first ``warmup_steps`` steps are ordinary ones. The next is captured and replayed, and those after it
    are replays. Before each of them the launches of the graph get new arguments: learning rates, decay, betas
    and other scalars of the groups, the step's number, the scale of a ``GradScaler``, and the addresses of
    the gradients. So schedulers work as without a graph, and ``zero_grad`` may set gradients to None (but for
    GaLore and APOLLO, whose gradients have to keep their memory). The capture fixes which parameters have
    gradients, the settings that shape the plan, and the arguments of libtorch's products (the epsilon of an
    orthonormalization).

    ``param_groups``, ``state`` and whatever else is not named here are those of the optimizer. A step in
    which GaLore computes a basis is taken without the graph, and so are all steps with ``orth_method="svd"``
    and those of APOLLO with ``stochastic_rounding`` or ``master_weights``. Parameters, states and groups are
    written in place as the optimizer does. Where libtorch computes instead of a kernel, all steps are
    ordinary ones, and a warning says so. Call `release` before ``torch.distributed.destroy_process_group``,
    and after changing the optimizer itself.

    Args:
        optimizer: an optimizer of this package with its parameters on one CUDA device.
        warmup_steps: ordinary steps before the capture, at least 1: they load kernels and allocate.
        capture_error_mode: as ``torch.cuda.graph``'s.

    Raises:
        ValueError: for fewer warm-up steps than 1.
        TypeError: for an optimizer of another package.
    """

    def __init__(
        self, optimizer: OxOptimizer, warmup_steps: int = 10, capture_error_mode: str = "thread_local"
    ) -> None:
        if isinstance(warmup_steps, bool) or not isinstance(warmup_steps, int) or warmup_steps < 1:
            raise ValueError(f"warmup_steps must be a whole number of at least 1, got {warmup_steps!r}")
        if not isinstance(optimizer, OxOptimizer):
            raise TypeError(f"the optimizer must be one of oxidion's, got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self._replay = Replay(warmup_steps, capture_error_mode, DIRECT)
        self._said = False
        for registry in HOOKS:
            setattr(self, registry, OrderedDict())
        self._patch_step_function()

    def __getattr__(self, name: str) -> Any:
        """Attributes of the optimizer, where this object has none of that name."""
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The optimizer's state."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def grad_scale(self) -> Any:
        """Loss scale that a ``GradScaler`` passes to the optimizer."""
        return self.optimizer.grad_scale  # type: ignore[attr-defined]

    @grad_scale.setter
    def grad_scale(self, scale: Any) -> None:
        self.optimizer.grad_scale = scale  # type: ignore[attr-defined]

    @grad_scale.deleter
    def grad_scale(self) -> None:
        del self.optimizer.grad_scale  # type: ignore[attr-defined]

    @property
    def found_inf(self) -> Any:
        """Count of infinities that a ``GradScaler`` found."""
        return self.optimizer.found_inf  # type: ignore[attr-defined]

    @found_inf.setter
    def found_inf(self, found: Any) -> None:
        self.optimizer.found_inf = found  # type: ignore[attr-defined]

    @found_inf.deleter
    def found_inf(self) -> None:
        del self.optimizer.found_inf  # type: ignore[attr-defined]

    @property
    def captured(self) -> bool:
        """True once steps are replays of a graph."""
        return self._replay.captured

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step: directly, by capturing it, or as a replay.

        Args:
            closure: as the optimizer's; it is not captured.

        Raises:
            RuntimeError: for gradients of other parameters than in the captured step, a missing gradient in
                the step to be captured, or an optimizer that changed; nothing has been written.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        replay = self._replay
        if replay.is_next and (reason := refusal_of_graphs(device_of(self.param_groups))):
            if not self._said:
                self._said = True
                warnings.warn(f"steps are taken without a graph: {reason}", stacklevel=2)
            self.optimizer.step()
            return loss
        if replay.is_next:
            self._require_gradients()
            replay.open_capture(devices_of(self.param_groups))
        self.optimizer._runner = replay
        try:
            self.optimizer.step()
        except BaseException:
            if not replay.captured:
                replay.release()
            raise
        finally:
            del self.optimizer._runner
        return loss

    def _require_gradients(self) -> None:
        for number, group in enumerate(self.param_groups):
            for at, param in enumerate(group["params"]):
                if param.requires_grad and param.grad is None:
                    raise RuntimeError(
                        f"group {number}, parameter {at} has no gradient: all need one for a capture"
                    )

    def release(self) -> None:
        """Waits for the device and drops the graph; another is captured after the next warm-up steps."""
        self._replay.release()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Resets gradients as the optimizer does: a replay reads them in their own memory."""
        self.optimizer.zero_grad(set_to_none)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the optimizer and drops the graph."""
        self.release()
        self.optimizer.add_param_group(param_group)

    @override
    def state_dict(self) -> dict[str, Any]:
        """The optimizer's."""
        return self.optimizer.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the optimizer's state and drops the graph."""
        self.release()
        self.optimizer.load_state_dict(state_dict)

    @override
    def __repr__(self) -> str:
        return f"CudaGraphOptimizer({self.optimizer!r})"
