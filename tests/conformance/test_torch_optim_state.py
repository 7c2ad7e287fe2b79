"""The checkpoint, copy, hook and scaling checks of PyTorch's optimizer tests, over the plugged-in classes."""

# ruff: noqa: PT009 - the framework makes unittest methods, whose asserts compare nested tensors

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerInfo, optims
from torch.testing._internal.common_utils import TestCase

from support.trajectory import role_names

from .arguments import IDLE, least
from .problem import Linear, inputs, train
from .registry import plug_in

every_class = optims(plug_in(), dtypes=[torch.float32, torch.float64])


class TestOptimStateConformance(TestCase):
    """One method per check of the upstream suite; the framework makes one test per class and dtype."""

    def primed(self, info: OptimizerInfo, kwargs: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
        problem = Linear(device, dtype)
        optimizer = info.optim_cls(problem.params, **copy.deepcopy(kwargs))
        train(optimizer, problem, 3)
        return problem, optimizer

    def twin(self, info: OptimizerInfo, kwargs: dict[str, Any], problem: Linear) -> Any:
        other = copy.deepcopy(problem)
        return other, info.optim_cls(other.params, **copy.deepcopy(kwargs))

    def assert_goes_on_equally(
        self, problem: Linear, optimizer: Optimizer, other: Linear, second: Optimizer
    ) -> None:
        train(optimizer, problem, 3)
        train(second, other, 3)
        self.assertEqual(problem.params, other.params, rtol=0, atol=0)

    @every_class
    def test_state_dict_deterministic(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            other, second = self.twin(optim_info, kwargs, problem)
            saved = copy.deepcopy(optimizer.state_dict())
            loaded = copy.deepcopy(saved)
            second.load_state_dict(loaded)
            self.assert_goes_on_equally(problem, optimizer, other, second)
            self.assertEqual(saved, loaded)
            self.assertEqual(optimizer.state_dict(), second.state_dict())
            # Parameters that appear twice have one representation.
            second.param_groups.extend(second.param_groups)
            groups = second.state_dict()["param_groups"]
            self.assertEqual(groups[0], groups[-1])

    @every_class
    def test_can_load_older_state_dict(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        self.assertTrue(optim_info.not_og_supported_flags)
        for flag in optim_info.not_og_supported_flags:
            problem, optimizer = self.primed(optim_info, least(optim_info.name), device, dtype)
            other, second = self.twin(optim_info, least(optim_info.name), problem)
            older = copy.deepcopy(optimizer.state_dict())
            for group in older["param_groups"]:
                self.assertIn(flag, group)
                del group[flag]
            second.load_state_dict(older)
            self.assertIn(flag, second.param_groups[0])
            self.assert_goes_on_equally(problem, optimizer, other, second)

    @every_class
    def test_can_load_from_to_named_state_dict(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            for named_source, named_target in ((True, False), (False, True)):
                problem, other = Linear(device, dtype), Linear(device, dtype)
                source = self.over(optim_info, kwargs, problem, named=named_source)
                train(source, problem, 2)
                other.weight.data.copy_(problem.weight)
                other.bias.data.copy_(problem.bias)
                target = self.over(optim_info, kwargs, other, named=named_target)
                target.load_state_dict(source.state_dict())
                self.assertEqual(target.param_groups[0].get("param_names"), ["weight", "bias"])
                self.assert_goes_on_equally(problem, source, other, target)

    @every_class
    def test_save_load_equality_with_weights_only(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            saved = optimizer.state_dict()
            buffer = io.BytesIO()
            torch.save(saved, buffer)
            buffer.seek(0)
            loaded = torch.load(buffer, weights_only=True)
            self.assertEqual(loaded, saved)
            other, second = self.twin(optim_info, kwargs, problem)
            second.load_state_dict(loaded)
            self.assert_goes_on_equally(problem, optimizer, other, second)

    @every_class
    def test_load_nontensor_step(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        counted = False
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            saved = copy.deepcopy(optimizer.state_dict())
            for state in saved["state"].values():
                for key in {"step", "step_dev"} & set(state):
                    counted = True
                    state[key] = state[key].item()
            other, second = self.twin(optim_info, kwargs, problem)
            second.load_state_dict(saved)
            self.assert_goes_on_equally(problem, optimizer, other, second)
            self.assertEqual(optimizer.state_dict(), second.state_dict())
        self.assertEqual(counted, optim_info.name != "Lion")

    @every_class
    def test_deepcopy_copies_all_public_attrs(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            for steps in (0, 1):
                problem = Linear(device, dtype)
                optimizer = optim_info.optim_cls(problem.params, **kwargs)
                train(optimizer, problem, steps)
                twin = copy.deepcopy(optimizer)
                public = [
                    {name for name in vars(opt) if not name.startswith("_")} for opt in (optimizer, twin)
                ]
                self.assertEqual(public[0], public[1])
                self.assertEqual(optimizer.state_dict(), twin.state_dict())

    @every_class
    def test_non_empty_state(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem = Linear(device, dtype)
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            train(optimizer, problem, 1 + IDLE.get(optim_info.optim_cls.__name__, 0))
            self.assertEqual(set(map(id, optimizer.state)), set(map(id, problem.params)))
            for state in optimizer.state.values():
                self.assertTrue(state)
            self.assertGreater(
                float(optimizer.state[problem.weight][self.first_moment(optimizer)].norm()), 0.0
            )

    @every_class
    def test_cpu_load_state_dict(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            other, second = self.twin(optim_info, kwargs, problem)
            second.load_state_dict(optimizer.state_dict())
            for param, twin in zip(problem.params, other.params, strict=True):
                self.assertEqual(set(optimizer.state[param]), set(second.state[twin]))
                for key, value in optimizer.state[param].items():
                    loaded = second.state[twin][key]
                    self.assertEqual(loaded.device, value.device)
                    self.assertEqual(loaded.dtype, value.dtype)
                    self.assertEqual(loaded, value, rtol=0, atol=0)

    @every_class
    def test_step_and_state_dict_hooks(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        problem = Linear(device, dtype)
        optimizer = optim_info.optim_cls(problem.params, **least(optim_info.name))
        fired: list[str] = []
        handles = [
            optimizer.register_step_pre_hook(lambda opt, args, kwargs: fired.append("step pre")),
            optimizer.register_step_post_hook(lambda opt, args, kwargs: fired.append("step post")),
            optimizer.register_state_dict_pre_hook(lambda opt: fired.append("save pre")),
            optimizer.register_state_dict_post_hook(lambda opt, saved: fired.append("save post")),
            optimizer.register_load_state_dict_pre_hook(lambda opt, saved: fired.append("load pre")),
            optimizer.register_load_state_dict_post_hook(lambda opt: fired.append("load post")),
        ]
        train(optimizer, problem, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual(fired, ["step pre", "step post", "save pre", "save post", "load pre", "load post"])
        for handle in handles:
            handle.remove()
        train(optimizer, problem, 1)
        optimizer.load_state_dict(optimizer.state_dict())
        self.assertEqual(len(fired), 6)

    @every_class
    def test_does_not_step_if_found_inf(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            before = copy.deepcopy((problem.params, optimizer.state_dict()))
            optimizer.grad_scale = None
            optimizer.found_inf = torch.ones((), device=device)
            train(optimizer, problem, 1)
            self.assertEqual((problem.params, optimizer.state_dict()), before, rtol=0, atol=0)
            optimizer.found_inf.zero_()
            train(optimizer, problem, 1)
            self.assertFalse(torch.equal(problem.weight, before[0][0]))

    @every_class
    def test_grad_scale_is_applied(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            problem, optimizer = self.primed(optim_info, kwargs, device, dtype)
            other, second = self.twin(optim_info, kwargs, problem)
            second.load_state_dict(optimizer.state_dict())
            for target, scale in ((problem, 1.0), (other, 128.0)):
                for param in target.params:
                    param.grad = torch.full_like(param, 0.5 * scale)
            optimizer.step()
            second.grad_scale, second.found_inf = torch.tensor(128.0), torch.tensor(0.0)
            second.step()
            self.assertEqual(problem.params, other.params, rtol=0, atol=0)

    def first_moment(self, optimizer: Any) -> str:
        keys = optimizer.state[optimizer.param_groups[0]["params"][0]]
        by_role = {role_names(type(optimizer)).get(key, key): key for key in keys}
        return next(by_role[role] for role in ("momentum", "row") if role in by_role)

    def over(self, info: OptimizerInfo, kwargs: dict[str, Any], problem: Linear, *, named: bool) -> Any:
        params: list[Parameter] | list[tuple[str, Parameter]] = problem.params
        if named:
            params = list(zip(("weight", "bias"), problem.params, strict=True))
        return info.optim_cls(params, **copy.deepcopy(kwargs))


instantiate_device_type_tests(TestOptimStateConformance, globals(), only_for="cpu")
