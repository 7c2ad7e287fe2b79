"""The checks of PyTorch's optimizer tests, over the plugged-in classes, in float32 and float64."""

# ruff: noqa: PT009, PT027 - the framework makes unittest methods, whose asserts compare nested tensors

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer, lr_scheduler
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInfo, optims
from torch.testing._internal.common_utils import TestCase

import oxidion
from oxidion._core.constructor import LEFT_OUT

from .arguments import IDLE, least
from .problem import Linear, inputs, train
from .registry import INFOS, plug_in

OPTIM_DB = plug_in()
DTYPES = [torch.float32, torch.float64]
every_class = optims(OPTIM_DB, dtypes=DTYPES)

SCHEDULERS = (
    lambda opt: [lr_scheduler.StepLR(opt, gamma=0.9, step_size=10)],
    lambda opt: [lr_scheduler.LinearLR(opt, start_factor=0.4, end_factor=0.8, total_iters=4)],
    lambda opt: [
        lr_scheduler.StepLR(opt, gamma=0.99, step_size=10),
        lr_scheduler.ExponentialLR(opt, gamma=0.99),
    ],
    lambda opt: [lr_scheduler.StepLR(opt, gamma=0.9, step_size=10), lr_scheduler.ReduceLROnPlateau(opt)],
    lambda opt: [lr_scheduler.ConstantLR(opt, factor=0.4, total_iters=4)],
    lambda opt: [lr_scheduler.PolynomialLR(opt, power=0.9, total_iters=4)],
)


class TestOptimConformance(TestCase):
    """One method per check of the upstream suite; the framework makes one test per class and dtype."""

    def assert_direction(self, kwargs: dict[str, Any], problem: Linear, start: torch.Tensor) -> None:
        end = problem.loss()
        if kwargs.get("maximize"):
            self.assertGreater(end.item(), start.item())
        else:
            self.assertLess(end.item(), start.item())

    @every_class
    def test_errors(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        errors = optim_info.optim_error_inputs_func(device=device, dtype=dtype)
        self.assertGreaterEqual(len(errors), 20)
        sample = [Parameter(torch.randn(1, 1, device=device, dtype=dtype))]
        for error in errors:
            given = error.optimizer_error_input
            params = sample if given.params is None else given.params
            if error.error_on is OptimizerErrorEnum.STEP_ERROR:
                optimizer = optim_info.optim_cls(params, **given.kwargs)
                with self.assertRaisesRegex(error.error_type, error.error_regex, msg=given.desc):
                    optimizer.step()
            elif error.error_type is UserWarning:
                with self.assertWarnsRegex(error.error_type, error.error_regex, msg=given.desc):
                    optim_info.optim_cls(params, **given.kwargs)
            else:
                with self.assertRaisesRegex(error.error_type, error.error_regex, msg=given.desc):
                    optim_info.optim_cls(params, **given.kwargs)

    @every_class
    def test_goes_right_direction(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for index, kwargs in enumerate(inputs(optim_info, device, dtype)):
            problem = Linear(device, dtype, strided=index % 2 == 0)
            optimizer = optim_info.optim_cls(problem.params, **kwargs)
            start = problem.loss().detach()
            train(optimizer, problem, 10)
            self.assert_direction(kwargs, problem, start)

    @every_class
    def test_goes_right_direction_with_lr_scheduler(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for make_schedulers in SCHEDULERS:
            for kwargs in ({}, {"maximize": True}, {"weight_decay": 0.1}):
                problem = Linear(device, dtype)
                groups = [{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.01}]
                arguments = {**least(optim_info.name), **kwargs}
                optimizer = optim_info.optim_cls(groups, **arguments)
                schedulers = make_schedulers(optimizer)
                start = problem.loss().detach()
                for _ in range(10):
                    loss = optimizer.step(problem.closure(optimizer))
                    for scheduler in schedulers:
                        if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                            scheduler.step(loss.detach())
                        else:
                            scheduler.step()
                self.assert_direction(kwargs, problem, start)

    @every_class
    def test_tensor_lr(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            kwargs.pop("lr", None)
            one, two = Linear(device, dtype), Linear(device, dtype)
            for shape in ((), (1,)):
                by_float = optim_info.optim_cls(one.params, **kwargs, lr=1e-3)
                by_tensor = optim_info.optim_cls(
                    two.params, **kwargs, lr=torch.full(shape, 1e-3, dtype=torch.float64)
                )
                train(by_float, one, 3)
                train(by_tensor, two, 3)
                self.assertEqual(one.weight, two.weight, rtol=0, atol=0)
                self.assertEqual(one.bias, two.bias, rtol=0, atol=0)
                self.assertIsInstance(by_tensor.param_groups[0]["lr"], torch.Tensor)
            by_tensor.param_groups[0]["lr"].fill_(0.0)
            if kwargs.get("beta1") is not None:
                continue  # the average of finished steps moves on
            held = two.weight.detach().clone()
            train(by_tensor, two, 1)
            self.assertEqual(two.weight, held, rtol=0, atol=0)

    @every_class
    def test_foreach_matches_forloop(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for given in optim_info.optim_inputs_func(device, dtype):
            lr = given.kwargs.get("lr")
            if given.kwargs.get("fused") or (
                isinstance(lr, torch.Tensor) and not given.kwargs.get("capturable")
            ):
                continue
            results = []
            for foreach in (False, True, None):
                problem = Linear(device, dtype)
                optimizer = optim_info.optim_cls(
                    problem.params, **copy.deepcopy(given.kwargs), foreach=foreach
                )
                train(optimizer, problem, 3)
                results.append([param.detach() for param in problem.params])
            self.assertEqual(results[0], results[1], rtol=0, atol=0)
            self.assertEqual(results[0], results[2], rtol=0, atol=0)

    @every_class
    def test_step_is_noop_when_params_have_no_grad(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            params = Linear(device, dtype).params
            optimizer = optim_info.optim_cls(params, **kwargs)
            before = [param.detach().clone() for param in params]
            optimizer.step()
            self.assertEqual(params, before, rtol=0, atol=0)

    @every_class
    def test_step_is_noop_for_zero_grads(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            kwargs["weight_decay"] = 0.0
            params = Linear(device, dtype).params
            optimizer = optim_info.optim_cls(params, **kwargs)
            before = [param.detach().clone() for param in params]
            for param in params:
                param.grad = torch.zeros_like(param)
            optimizer.step()
            optimizer.step()
            self.assertEqual(params, before, rtol=0, atol=0)

    @every_class
    def test_param_groups_lr(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            kwargs.update(lr=0.0, weight_decay=0.0)
            problem = Linear(device, dtype)
            groups = [{"params": [problem.weight], "lr": 0.01}, {"params": [problem.bias]}]
            optimizer = optim_info.optim_cls(groups, **kwargs)
            weight, bias = (param.detach().clone() for param in problem.params)
            train(optimizer, problem, 3)
            self.assertFalse(torch.equal(problem.weight, weight))
            self.assertEqual(problem.bias, bias, rtol=0, atol=0)

    @every_class
    def test_param_groups_weight_decay(
        self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo
    ) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            kwargs["weight_decay"] = 0.0
            # The rate of these is not lr * weight_decay: tests/algorithm/test_lamb.py, test_adafactor.py.
            scaled = optim_info.optim_cls is oxidion.Lamb or kwargs.get("scale_parameter", False)
            if kwargs.pop("cautious_wd", False) or scaled:
                continue
            problem = Linear(device, dtype)
            lr = float(kwargs.get("lr", 0.01))
            kwargs["lr"] = lr
            groups = [{"params": [problem.weight], "weight_decay": 0.25}, {"params": [problem.bias]}]
            optimizer = optim_info.optim_cls(groups, **kwargs)
            weight, bias = (param.detach().clone() for param in problem.params)
            for param in problem.params:
                param.grad = torch.zeros_like(param)
            for _ in range(1 + IDLE.get(optim_info.optim_cls.__name__, 0)):
                optimizer.step()
            self.assertEqual(problem.weight.detach(), weight * (1 - lr * 0.25))
            self.assertEqual(problem.bias, bias, rtol=0, atol=0)

    @every_class
    def test_mixed_dtypes(self, device: str, dtype: torch.dtype, optim_info: OptimizerInfo) -> None:
        for kwargs in inputs(optim_info, device, dtype):
            alone, mixed = Linear(device, dtype), Linear(device, dtype)
            stranger = Linear(device, torch.bfloat16)
            kwargs["lr"] = 0.25  # large enough to move a bfloat16 weight
            kwargs.pop("max_grad_norm", None)  # the norm of the group
            optimizer = optim_info.optim_cls([*mixed.params, *stranger.params], **copy.deepcopy(kwargs))
            reference = optim_info.optim_cls(alone.params, **kwargs)
            for _ in range(2):
                for opt, problems in ((optimizer, (mixed, stranger)), (reference, (alone,))):
                    opt.zero_grad()
                    for problem in problems:
                        problem.loss().backward()
                    opt.step()
            self.assertEqual(mixed.params, alone.params, rtol=0, atol=0)
            self.assertFalse(torch.equal(stranger.weight, Linear(device, torch.bfloat16).weight))


class TestRegistry(TestCase):
    """The plugged-in data base."""

    def test_data_base_holds_every_class_and_nothing_else(self) -> None:
        exported = {getattr(oxidion, name) for name in oxidion.__all__}
        classes = {item for item in exported if isinstance(item, type) and issubclass(item, Optimizer)}
        self.assertGreaterEqual(len(classes), 4)
        # MuonH is Muon with other defaults.
        self.assertEqual({info.optim_cls for info in OPTIM_DB}, classes - {oxidion.MuonH})
        self.assertIs(OPTIM_DB[0], INFOS[0])
        import torch.testing._internal.common_optimizers as framework

        self.assertIs(framework.optim_db, OPTIM_DB)

    def test_framework_multiplies_inputs_by_the_flags_of_the_device(self) -> None:
        (info,) = (info for info in OPTIM_DB if info.optim_cls is oxidion.AdamW)
        self.assertEqual({kwargs["fused"] for kwargs in inputs(info, "cpu", torch.float32)}, {False, True})
        for info in OPTIM_DB:
            self.assertGreaterEqual(len(list(inputs(info, "cpu", torch.float32))), 12)

    def test_inputs_cover_every_hyper_parameter_of_every_class(self) -> None:
        meshes = {"replicate_mesh", "outer_shard_mesh", "inner_shard_mesh", "distributed_mesh"}
        kernels = {"newton_schulz_func", "use_triton", "use_gram_newton_schulz"} | {
            "verbose",
            "triton_post_ortho",
        }
        elsewhere = {"replicate_mesh_grad_sync", "check_grad_sync", "differentiable", "foreach", "init_state"}
        elsewhere |= {"warmup_init"}  # goes with relative_step, which excludes lr
        elsewhere |= {"master_weights"}  # of bfloat16 parameters alone
        uncovered = {"params", "model_options", "strict", *meshes, *kernels, *elsewhere}
        for info in OPTIM_DB:
            words = {
                name
                for name, parameter in inspect.signature(info.optim_cls).parameters.items()
                if parameter.default is LEFT_OUT  # other words for arguments that are covered
            }
            refused = set() if info.optim_cls._LEAVES_UPDATE else {"weight_norm", "weight_norm_floor"}
            covered = refused | {key for kwargs in inputs(info, "cpu", torch.float32) for key in kwargs}
            self.assertEqual(
                set(inspect.signature(info.optim_cls).parameters) - covered - uncovered - words, set()
            )


instantiate_device_type_tests(TestOptimConformance, globals(), only_for="cpu")
