"""Scripts for microsoft/dion on `oxidion.compat.dion`: calls as their authors write them, and the shim."""

from __future__ import annotations

import inspect
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import oxidion
import oxidion.compat.dion as dion
from oxidion.__main__ import main

Groups = list[dict[str, Any]]

ORDER = {
    "Muon": (None, 0.01, 0.95, (0.9, 0.95), 0.01, False, 1e-8, False, "spectral_norm", False, False),
    "NorMuon": (None, 0.01, 0.95, 0.95, (0.9, 0.95), 0.01, False, 1e-8, False, "spectral_norm", False),
    "Dion2": (None, 0.01, 0.25, 0.95, (0.9, 0.95), 0.01, 1e-8, "spectral_norm", False, False, True, False),
    "NorDion2": (None, 0.01, 0.25, 0.95, 0.95, (0.9, 0.95), 0.01, 1e-8, "spectral_norm", False, False),
    "Dion": (None, None, None, True, 1.0, 1, 0.01, 0.95, (0.9, 0.95), 0.01, 1e-8, 1, "rcqr", 150, 1.25, None),
    "MuonReference": (1e-3, 0.95, (0.95, 0.95), 0.1, 1e-8, True, "spectral_norm", 5),
}
"""Defaults of microsoft/dion at 0a059a4 behind the parameters, in its order; the first of each class."""


class Model(nn.Module):
    """A table, two layers, a gain and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(12, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)])
        self.gain = nn.Parameter(torch.ones(8))
        self.lm_head = nn.Linear(8, 12, bias=False)

    @property
    def matrices(self) -> list[nn.Parameter]:
        return list(self.layers.parameters())

    def groups(self, **others: Any) -> Groups:
        """Matrices, and a group for each of the others, which have ``others``."""
        rest = ([self.gain], [self.table.weight], [self.lm_head.weight])
        return [{"params": self.matrices}, *({"params": params, **others} for params in rest)]


def weights(optimizer: Any, model: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for param in model.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def check_same_weights(theirs: Callable[[Model], Any], ours: Callable[[Model], Any]) -> None:
    first, second = Model(), Model()
    for one, other in zip(weights(theirs(first), first), weights(ours(second), second), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ORDER)
def test_arguments_have_the_order_and_defaults_of_dion(name: str) -> None:
    parameters = list(inspect.signature(getattr(dion, name)).parameters.values())
    assert parameters[0].name == "params"
    assert tuple(each.default for each in parameters[1:])[: len(ORDER[name])] == ORDER[name]
    made = getattr(dion, name)(Model().matrices, *ORDER[name])
    assert isinstance(made, getattr(oxidion, name.removesuffix("Reference")))


def test_mesh_stands_second_and_unknown_words_are_named() -> None:
    with pytest.raises(TypeError, match="distributed_mesh must be a DeviceMesh or ProcessGroup"):
        dion.Muon(Model().matrices, 0.02)
    with pytest.raises(TypeError, match="multiple values for argument 'lr'"):
        dion.Muon(Model().matrices, None, 0.02, lr=0.02)
    with pytest.raises(TypeError, match=r"'learning_rate', .* the nearest known argument is 'lr'"):
        dion.Muon(Model().matrices, learning_rate=0.1)


def train_py(name: str, algorithm: str, **own: Any) -> Callable[[Model], Any]:
    """A call as microsoft/dion's train.py makes it."""

    def make(model: Model) -> Any:
        lr, betas = 0.02, (0.95, 0.98)
        scale = dion.opt_utils.lm_head_lr_scale(algorithm, 8)
        others = {"algorithm": algorithm, "betas": betas, "weight_decay": 0}
        groups = [
            {"params": [*model.matrices]},
            {"params": [model.table.weight], "lr": lr, **others},
            {"params": [model.lm_head.weight], "lr": lr * scale, **others},
        ]
        return getattr(dion, name)(groups, lr=lr, mu=0.9, weight_decay=0.1, **own)

    return make


@pytest.mark.parametrize(
    ("name", "own", "more"),
    [
        ("Muon", {"nesterov": True, "use_triton": True, "distributed_mesh": None}, {}),
        ("NorMuon", {"nesterov": True, "muon_beta2": 0.9, "use_polar_express": False}, {}),
        ("NorDion2", {"fraction": 0.5, "triton_post_ortho": True}, {}),
        ("Dion", {"rank_fraction": 0.5, "rcqr_oversample": 1.5, "replicate_mesh": None}, {}),
        ("DionReference", {"rank_fraction": 0.5, "qr_method": "cqr", "cqr_warmup_steps": 1}, {}),
        ("DionSimple", {"rank": 5}, {"rank_fraction": 0.5, "rank_multiple_of": 5}),
    ],
)
@pytest.mark.parametrize("algorithm", ["adamw", "lion"])
def test_call_of_train_py_gives_the_weights_of_our_class(
    name: str, own: dict[str, Any], more: dict[str, Any], algorithm: str
) -> None:
    def ours(model: Model) -> Any:
        head = 0.02 / 8**0.5 if algorithm == "lion" else 0.02
        others = {"algorithm": algorithm, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0}
        groups = [
            {"params": model.matrices},
            {"params": [model.table.weight], **others},
            {"params": [model.lm_head.weight], "lr": head, **others},
        ]
        cls = getattr(oxidion, name.removesuffix("Reference").removesuffix("Simple"))
        kept = {key: value for key, value in own.items() if key != "rank"}
        return cls(groups, lr=0.02, mu=0.9, weight_decay=0.1, **kept, **more)

    check_same_weights(train_py(name, algorithm, **own), ours)


def test_reference_of_muon_reads_betas_and_not_beta1() -> None:
    def theirs(model: Model) -> Any:
        groups = model.groups(algorithm="adamw", betas=(0.8, 0.9), beta1=0.1)
        return dion.MuonReference(
            groups, lr=0.01, mu=0.9, weight_decay=0.1, nesterov=True, adjust_lr="rms_norm"
        )

    def ours(model: Model) -> Any:
        groups = model.groups(algorithm="adamw", betas=(0.8, 0.9))
        settings = {"ns_coefficients": "keller_jordan", "nesterov": True, "adjust_lr": "rms_norm"}
        return oxidion.Muon(groups, lr=0.01, mu=0.9, weight_decay=0.1, **settings)  # type: ignore[arg-type]

    check_same_weights(theirs, ours)


def test_betas_of_groups_are_not_read_and_a_line_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    with caplog.at_level(logging.WARNING, "oxidion"):
        made = dion.Muon(model.groups(algorithm="adamw", betas=(0.9, 0.95))[:2])
        assert not caplog.records
        made.add_param_group({"params": [model.table.weight], "algorithm": "lion", "betas": (0.5, 0.6)})
    assert "betas of (0.5, 0.6) is not read" in caplog.text
    assert "give the group beta1 and beta2" in caplog.text
    assert [group["betas"] for group in made.param_groups[1:]] == [(0.9, 0.95)] * 2
    named = dion.NorMuon(model, scalar_betas=(0.8, 0.9))
    assert named.param_groups[-1]["betas"] == (0.8, 0.9)


def test_saved_betas_that_dion_does_not_read_are_not_loaded() -> None:
    model = Model()
    made = dion.Muon(model.groups(algorithm="adamw"))
    saved = made.state_dict()
    for group in saved["param_groups"]:
        group["betas"] = (0.1, 0.2)
    made.load_state_dict(saved)
    assert made.param_groups[1]["betas"] == (0.9, 0.95)


def test_call_of_automodel_gives_the_weights_of_our_class() -> None:
    keys = {
        "algorithm": "adamw",
        "lr": 5e-4,
        "weight_decay": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
    }

    def theirs(model: Model) -> Any:
        groups = [*model.groups(**keys), {"params": [], **keys}]
        settings = {"mu": 0.95, "betas": (0.9, 0.95), "epsilon": 1e-8, "adjust_lr": "spectral_norm"}
        return dion.Muon(groups, lr=5e-4, weight_decay=0.0, nesterov=False, flatten=False, **settings)

    check_same_weights(theirs, lambda model: oxidion.Muon(model.groups(**keys), lr=5e-4, weight_decay=0.0))


def test_call_of_olmo_core_gives_the_weights_of_our_class() -> None:
    class Rule(str, Enum):
        RMS = "rms_norm"

    def theirs(model: Model) -> Any:
        groups = model.groups(algorithm="adamw", weight_decay=0.0)
        meshes = {"replicate_mesh": None, "outer_shard_mesh": None, "inner_shard_mesh": None}
        made = dion.Dion(groups, replicate_mesh_grad_sync=False, **meshes, rank_fraction=0.5)
        for group in made.param_groups:
            group.setdefault("initial_lr", group["lr"])
        dion.NorMuon(Model().groups(algorithm="adamw"), distributed_mesh=None, adjust_lr=Rule.RMS).step()
        return made

    def ours(model: Model) -> Any:
        return oxidion.Dion(model.groups(algorithm="adamw", weight_decay=0.0), rank_fraction=0.5)

    check_same_weights(theirs, ours)


def test_calls_of_nanoplm_and_open_instruct_run_unedited() -> None:
    def theirs(model: Model) -> Any:
        given = {"lr": 0.02, "mu": 0.95, "epsilon": 1e-7, "nesterov": True, "adjust_lr": "rms_norm"}
        iterate = dion.newton_schulz_triton.newton_schulz_triton  # type: ignore[attr-defined]
        dion.Muon(Model().groups(algorithm="adamw", lr=0.02), distributed_mesh=None, **given).step()
        matrices = [{"params": model.matrices}]
        return dion.NorMuon(matrices, cautious_wd=True, use_triton=True, newton_schulz_func=iterate, **given)

    def ours(model: Model) -> Any:
        def iterate(x: torch.Tensor, epsilon: float) -> torch.Tensor:
            return oxidion.functional.newton_schulz(x.bfloat16(), epsilon=epsilon)

        settings = {"epsilon": 1e-7, "nesterov": True, "adjust_lr": "rms_norm", "cautious_wd": True}
        return oxidion.NorMuon(model.matrices, lr=0.02, newton_schulz_func=iterate, **settings)  # type: ignore[arg-type]

    check_same_weights(theirs, ours)


def test_words_of_prime_rl_are_read() -> None:
    def theirs(model: Model) -> Any:
        group = {"params": model.matrices, "adjust_lr": "keller_muon", "distributed_mesh_name": "experts"}
        fork = {"world_mesh": None, "fsdp_mesh_dim": 0, "matrix_partitions": {model.matrices[0]: (12, 4)}}
        return dion.Muon(params=[{**group, "algorithm": "muon"}], adjust_lr="rms_norm", lr=0.01, **fork)

    def ours(model: Model) -> Any:
        first, second = model.matrices
        groups: Groups = [{"params": [second]}, {"params": [first], "split_sizes": (12, 4)}]
        return oxidion.Muon(groups, adjust_lr="original", lr=0.01)

    check_same_weights(theirs, ours)
    with pytest.raises(ValueError, match="matrix_partitions has parameters that no group has"):
        dion.Muon(Model().matrices, matrix_partitions={nn.Parameter(torch.ones(4, 4)): (2, 2)})
    with pytest.raises(ValueError, match="matrix_partitions needs parameters or groups, got Model"):
        dion.Muon(Model(), matrix_partitions={nn.Parameter(torch.ones(4, 4)): (2, 2)})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"world_mesh": None}, "leave it out: layouts are read from the DTensors"),
        ({"fsdp_mesh_dim": 0}, "leave it out: layouts are read from the DTensors"),
        ({"matrix_partitions": {}}, "give its parameters groups of their own with the key 'split_sizes'"),
        ({"adjust_lr": "keller_muon"}, "the nearest is 'original'"),
    ],
)
def test_our_own_class_says_what_to_do_with_words_of_forks(given: dict[str, Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        oxidion.Muon(Model().matrices, **given)
    with pytest.raises(ValueError, match="leave it out"):
        oxidion.Muon([{"params": Model().matrices, "distributed_mesh_name": "experts"}])


@contextmanager
def ranks(size: int) -> Iterator[None]:
    """A process group whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_outer_shard_mesh_gives_its_side_to_q_as_there() -> None:
    with ranks(2):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fs",))
        sides = {}
        for shape in ((32, 16), (16, 32)):
            weight = nn.Parameter(distribute_tensor(torch.ones(shape), mesh, [Shard(0)]))
            for outer in (None, mesh):
                made = dion.Dion([weight], None, outer, rank_fraction=0.5, init_state=True)
                sides[shape, outer is not None] = tuple(made.state[weight]["Q"].shape)
    assert sides == {
        ((32, 16), False): (16, 8),
        ((32, 16), True): (32, 8),
        ((16, 32), False): (16, 8),
        ((16, 32), True): (16, 8),
    }


def test_mesh_that_shards_along_with_experts_may_be_given() -> None:
    with ranks(4):
        flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard_cp",))
        experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard_mod_ep", "ep"))
        layer = nn.Parameter(distribute_tensor(torch.ones(16, 8), flat, [Shard(0)]))
        expert = nn.Parameter(distribute_tensor(torch.ones(4, 16, 8), experts, [Shard(1), Shard(0)]))
        groups = [{"params": [layer]}, {"params": [expert], "distributed_mesh_name": "dp_shard_mod_ep"}]
        made = dion.Muon(groups, distributed_mesh=flat)
        ours = oxidion.Muon([{"params": [layer]}, {"params": [expert]}])
        assert str(made.plan()) == str(ours.plan())
        alone = dion.Muon([{"params": [layer]}], flat)
        assert str(alone.plan()) == str(oxidion.Muon([layer], distributed_mesh=flat).plan())
        group = dist.group.WORLD
        plain = [nn.Parameter(torch.ones(16, 8)) for _ in range(4)]
        shared = dion.Muon([{"params": iter(plain)}], group)
        assert str(shared.plan()) == str(oxidion.Muon(plain, distributed_mesh=group).plan())
        assert str(dion.Muon([{"params": iter([expert])}], experts).plan()).count("dp_shard_mod_ep")
        with pytest.raises(oxidion.LayoutError, match="Leave that mesh out: the DTensors tell"):
            oxidion.Muon([expert], distributed_mesh=flat, init_state=True)


def test_parts_of_the_steps_there_are_refused_with_a_reason() -> None:
    with pytest.raises(ImportError, match="'AsyncTask': it is a part of microsoft/dion's steps"):
        from oxidion.compat.dion.opt_utils import AsyncTask  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ImportError, match="'DionParamConfig': it is a part of"):
        from oxidion.compat.dion import DionParamConfig  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'wrong'"):
        from oxidion.compat.dion.muon import wrong  # type: ignore[import-not-found]  # noqa: F401
    from oxidion.compat.dion.cuda_graph import CudaGraphOptimizer  # type: ignore[import-not-found]

    assert CudaGraphOptimizer is dion.CudaGraphOptimizer


def test_subclass_of_a_user_keeps_its_own_signature() -> None:
    class Own(dion.Muon):
        def __init__(self, params: Any, *, rate: float) -> None:
            super().__init__(params, lr=rate)

    assert list(inspect.signature(Own).parameters) == ["params", "rate"]
    assert Own(Model().matrices, rate=0.5).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("given", [{"betas": 0.9}, {"betas": None}, {"betas": (0.9,)}])
def test_betas_that_are_no_pair_are_named(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="betas must be"):
        dion.Muon([{"params": Model().matrices}], **given)
    dion.Muon([{"params": Model().matrices, **given}])


def test_parameters_without_memory_wait_for_their_states() -> None:
    made = dion.Muon([nn.Parameter(torch.empty(8, 4, device="meta"))])
    assert not made.state
    assert dion.Muon([nn.Parameter(torch.ones(8, 4))]).state


SCRIPT = """
import dion
from dion import Dion3, DionReference, opt_utils
from dion.dion import Dion, DionMixedPrecisionConfig
from dion.newton_schulz_triton import zeropower_via_newtonschulz5
from dion.opt_utils import lm_head_lr_scale
import dion.muon
import oxidion.compat.dion as own
assert dion.muon.Muon is own.Muon and DionReference is Dion is own.Dion and Dion3 is dion.NorDion2
print(lm_head_lr_scale("lion", 4))
"""


def shim(*words: object) -> int:
    return main(["shim", "dion", *map(str, words)])


def test_shim_makes_import_dion_find_this_package(tmp_path: Path) -> None:
    package = Path(oxidion.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(package)])}
    assert shim("--target", tmp_path) == shim("--target", tmp_path) == 0
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.stdout, ran.stderr) == ("0.5\n", "")
    assert shim("--target", tmp_path, "--remove") == 0
    assert not list(tmp_path.iterdir())


def test_shim_leaves_a_package_of_others_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other, target = tmp_path / "there", tmp_path / "target"
    (other / "dion").mkdir(parents=True)
    target.mkdir()
    (other / "dion" / "__init__.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(other)
    for words, text in {
        ("--target", target): "dion is there already, as",
        ("--target", other): "is not of this command",
        ("--target", other, "--remove"): "nothing was removed",
        ("--target", tmp_path / "none"): "expected a folder that is there",
    }.items():
        with pytest.raises(SystemExit):
            shim(*words)
        assert text in capsys.readouterr().err
    assert (other / "dion" / "__init__.py").read_text() == "value = 1\n"
    assert not list(target.iterdir())


def test_words_of_our_class_and_of_forks_are_read_everywhere() -> None:
    def weight() -> nn.Parameter:
        return nn.Parameter(torch.ones(8, 4))

    assert dion.Muon([weight()], momentum=0.5).param_groups[0]["mu"] == 0.5
    with pytest.raises(ValueError, match="two words for one setting"):
        dion.Muon([weight()], mu=0.7, momentum=0.5)
    optimizer: Any = dion.Muon([weight()], adjust_lr="keller_muon")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["adjust_lr"] = "keller_muon"
    optimizer.load_state_dict(saved)
    imported = oxidion.checkpoint.import_state_dict(saved, "microsoft-dion", oxidion.Muon([weight()]))
    assert optimizer.param_groups[0]["adjust_lr"] == imported["param_groups"][0]["adjust_lr"] == "original"


def test_partitions_of_parameters_with_names() -> None:
    first, second = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(6, 4))
    made: Any = dion.Muon([("a", first), ("b", second)], matrix_partitions={first: (4, 4)})
    assert [(g["param_names"], g["split_sizes"]) for g in made.param_groups] == [
        (["b"], None),
        (["a"], (4, 4)),
    ]
    alone: Any = dion.Muon([("a", first)], matrix_partitions={first: (4, 4)})
    assert [group["param_names"] for group in alone.param_groups] == [["a"]]
    with pytest.raises(TypeError, match="matrix_partitions maps parameters to sizes, got list"):
        dion.Muon([first], matrix_partitions=[(first, (4, 4))])


def test_model_may_be_named_without_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert len(dion.Muon(None, model=model, summary=False).param_groups) == 2


def test_more_than_three_dimensions_number_matrices_as_there() -> None:
    stack = torch.nn.Parameter(torch.randn(2, 3, 6, 4))
    single = torch.nn.Parameter(stack.detach()[1, 2].clone())
    stack.grad = torch.randn_like(stack)
    single.grad = stack.grad[1, 2].clone()
    for param in (stack, single):
        dion.Muon([param], lr=0.1).step()
    torch.testing.assert_close(stack.detach()[1, 2], single.detach())
