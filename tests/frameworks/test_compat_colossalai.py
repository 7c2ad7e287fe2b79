"""ColossalAI's names: its calls, what is refused, ``setup_distributed``, and the page's script on meshes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oxidion
from oxidion.compat import colossalai
from support import forks

from .models import tiny

PAGE = Path(__file__).resolve().parents[2] / "docs" / "coming-from" / "colossalai.md"
REQUIRED = inspect.Parameter.empty

Optimizer = torch.optim.Optimizer


class Sizes:
    """A process group, as far as ``setup_distributed`` looks at it."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def size(self) -> int:
        """Number of ranks."""
        return self.ranks


def stepped(make: Callable[[nn.Module], Optimizer]) -> list[Tensor]:
    """Weights after four steps of a model whose largest matrix has moments of 8 bits at any bound."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(24, 96), nn.Tanh(), nn.LayerNorm(96), nn.Linear(96, 20))
    optimizer = make(model)
    inputs = torch.randn(16, 24)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def built(line: str) -> Callable[[nn.Module], Any]:
    """The function that builds an optimizer of ``model`` by a line of code."""
    names = {**vars(colossalai), "oxidion": oxidion}
    return lambda model: eval(line, {**names, "model": model, "params": model.parameters()})


GROUPS = "get_galore_param_groups(model, decay=1e-2, rank=8)"
GALORE = "oxidion.GaLoreAdamW({}, {}svd='exact', decay_order='galore')"
CALLS = [
    ("DistributedLamb(params)", "oxidion.Lamb(params, debias='step', always_adapt=True)"),
    (
        "DistributedLamb(params, 1e-2, (0.8, 0.99), 1e-7, 0.1, False)",
        "oxidion.Lamb(params, 1e-2, (0.8, 0.99), 1e-7, 0.1, debias='none', always_adapt=True)",
    ),
    (
        "Lamb(params, lr=1e-2, weight_decay=0.1)",
        "oxidion.Lamb(params, lr=1e-2, weight_decay=0.1, debias='none', always_adapt=True)",
    ),
    (
        "Lamb(params, 1e-2, (0.9, 0.999), 1e-6, 0, False, True)",
        "oxidion.Lamb(params, 1e-2, debias='step', always_adapt=True)",
    ),
    ("DistributedAdaFactor(params)", "oxidion.Adafactor(params)"),
    (
        "DistributedAdaFactor(params, 1e-2, (1e-30, 1e-3), 0.5, -0.7, 0.9, 0.1, False, False, False)",
        "oxidion.Adafactor(params, lr=1e-2, clip_threshold=0.5, decay_rate=-0.7, beta1=0.9, "
        "weight_decay=0.1, scale_parameter=False, relative_step=False)",
    ),
    ("Adafactor(params, warmup_init=True)", "oxidion.Adafactor(params, warmup_init=True)"),
    (
        "DistributedCAME(params, 1e-3, (1e-30, 1e-16), 0.5, (0.8, 0.99, 0.999), 0.1)",
        "oxidion.CAME(params, lr=1e-3, clip_threshold=0.5, betas=(0.8, 0.99, 0.999), weight_decay=0.1)",
    ),
    ("CAME(params, lr=1e-3)", "oxidion.CAME(params, lr=1e-3)"),
    (
        f"DistGaloreAwamW({GROUPS}, lr=1e-3, betas=(0.9, 0.99), eps=1e-6, nbits=8, percentile_clipping=100, "
        "block_wise=True, min_8bit_size=512)",
        GALORE.format(GROUPS, "lr=1e-3, betas=(0.9, 0.99), eps=1e-6, min_quant_numel=512, "),
    ),
    (
        f"DistGaloreAwamW({GROUPS}, nbits=32, block_wise=False, percentile_clipping=101)",
        GALORE.format(GROUPS, "state_bits=32, "),
    ),
    (
        f"GaLoreAdamW8bit({GROUPS}, 1e-3, (0.9, 0.999), 1e-8, 0.1, 8, 1e10)",
        GALORE.format(GROUPS, "lr=1e-3, state_bits=32, weight_decay=0.1, "),
    ),
    (
        "DistributedLamb(params, lr=1e-2, state_bits=8)",
        "oxidion.Lamb(params, lr=1e-2, state_bits=8, debias='step', always_adapt=True)",
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), CALLS)
def test_call_of_colossalai_steps_as_the_class_it_stands_for(theirs: str, ours: str) -> None:
    pairs = zip(stepped(built(theirs)), stepped(built(ours)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_lamb_takes_the_steps_that_colossalai_documents() -> None:
    """Moments without correction, which scales the finished step, and a ratio of norms in any case."""
    torch.manual_seed(5)
    expected, rate, first, second = torch.randn(6, 5, dtype=torch.float64), 1e-2, 0.9, 0.999
    weight = nn.Parameter(expected.clone())
    optimizer = colossalai.DistributedLamb([weight], lr=rate)
    mean, square = torch.zeros_like(expected), torch.zeros_like(expected)
    for step in range(1, 4):
        weight.grad = torch.randn_like(expected)
        optimizer.step()
        mean.lerp_(weight.grad, 1 - first)
        square.lerp_(weight.grad.square(), 1 - second)
        update = mean / (square.sqrt() + 1e-6)
        correction = (1 - second**step) ** 0.5 / (1 - first**step)
        expected -= rate * correction * expected.norm() / update.norm() * update
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_adafactor_has_a_setting_for_the_steps_of_colossalai() -> None:
    """There the scale of a parameter is the least one, 1e-3, and the relative step 1e-2 at first."""
    weight = nn.Parameter(torch.full((6, 5), 0.1, dtype=torch.float64))
    moves = []
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"lr": 1e-5, "scale_parameter": False, "relative_step": False},
    )
    for own in settings:
        param = nn.Parameter(weight.detach().clone())
        optimizer = colossalai.DistributedAdaFactor([param], **own)
        param.grad = torch.ones_like(param)
        optimizer.step()
        moves.append((weight - param).detach())
    torch.testing.assert_close(moves[0], 100 * moves[1], rtol=1e-9, atol=0.0)
    torch.testing.assert_close(moves[1], torch.full_like(moves[1], 1e-5), rtol=1e-9, atol=0.0)


ADAFACTOR = {
    "params": REQUIRED,
    "lr": None,
    "eps": (1e-30, 1e-3),
    "clip_threshold": 1.0,
    "decay_rate": -0.8,
    "beta1": None,
    "weight_decay": 0.0,
    "scale_parameter": True,
    "relative_step": True,
    "warmup_init": False,
}
ADAM = {"params": REQUIRED, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0}
CAME = {
    "params": REQUIRED,
    "lr": None,
    "eps": (1e-30, 1e-16),
    "clip_threshold": 1.0,
    "betas": (0.9, 0.999, 0.9999),
    "weight_decay": 0.0,
}
EIGHT_BITS = {
    **ADAM,
    "lr": 1e-2,
    "eps": 1e-8,
    "weight_decay": 1e-2,
    "nbits": 8,
    "min_8bit_size": 4096,
    "percentile_clipping": 100,
    "block_wise": True,
    "is_paged": False,
    "args": None,
}
SIGNATURES: dict[str, dict[str, Any]] = {
    "Adafactor": ADAFACTOR,
    "CAME": CAME,
    "DistGaloreAwamW": EIGHT_BITS,
    "DistributedAdaFactor": ADAFACTOR,
    "DistributedCAME": CAME,
    "DistributedLamb": {**ADAM, "bias_correction": True},
    "GaLoreAdamW8bit": EIGHT_BITS,
    "Lamb": {**ADAM, "adam": False, "bias_correction": False},
    "get_galore_param_groups": {
        "model": REQUIRED,
        "weight_decay": None,
        "rank": 256,
        "update_proj_gap": 200,
        "scale": 0.25,
        "proj_type": "std",
    },
}
"""Arguments by position with their defaults, as in ColossalAI 4f9953b.

There ``weight_decay`` of ``get_galore_param_groups`` has no default; here its other word has its place.
"""


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_order_and_defaults_of_colossalai(name: str) -> None:
    parameters = inspect.signature(getattr(colossalai, name)).parameters.values()
    by_place = {each.name: each.default for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD}
    assert list(by_place.items()) == list(SIGNATURES[name].items())


def test_every_name_has_a_signature_to_compare() -> None:
    assert sorted(colossalai.__all__) == sorted(SIGNATURES)
    assert oxidion.compat.colossalai is colossalai


REFUSED = [
    ("Lamb(params, adam=True)", ValueError, "adam must be False.*take oxidion.AdamW"),
    ("DistributedAdaFactor(params, lr=1e-3)", ValueError, "lr must be None with relative_step=True"),
    ("DistributedCAME(params)", ValueError, "CAME has no default for lr"),
    (f"DistGaloreAwamW({GROUPS}, nbits=4)", ValueError, r"nbits must be 8 or 32.*got 4"),
    (
        f"DistGaloreAwamW({GROUPS}, percentile_clipping=5)",
        ValueError,
        r"percentile_clipping must be 100, which clips nothing.*clip_grad_norm_ \(got 5\)",
    ),
    (f"DistGaloreAwamW({GROUPS}, block_wise=False)", ValueError, "block_wise must be True.*block"),
    (f"GaLoreAdamW8bit({GROUPS}, is_paged=True)", ValueError, "is_paged must be False.*docs/offload.md"),
    (f"GaLoreAdamW8bit({GROUPS}, args={{'optim_bits': 8}})", ValueError, "args must be None.*nbits"),
    (f"GaLoreAdamW8bit({GROUPS}, optim_bits=8)", TypeError, "no argument 'optim_bits'.*'state_bits'"),
    ("get_galore_param_groups(model)", TypeError, "needs weight_decay, or decay"),
    ("get_galore_param_groups(model, 0.1, decay=0.1)", TypeError, "needs weight_decay, or decay"),
]


@pytest.mark.parametrize(("line", "kind", "said"), REFUSED)
def test_word_that_cannot_be_mapped_is_refused_with_its_reason(
    line: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        built(line)(tiny())


def test_groups_are_sorted_by_dimension_and_name() -> None:
    model = tiny()
    groups = colossalai.get_galore_param_groups(model, 0.1, 4, 50, 0.5, "left")
    assert [group["param_names"] for group in groups] == [
        ["frozen", "embed.weight", "block.attn.weight", "block.mlp.weight", "lm_head.weight"],
        ["norm.weight"],
        ["block.attn.bias", "block.mlp.bias", "norm.bias"],
    ]
    named = dict(model.named_parameters())
    assert all(
        param is named[name]
        for group in groups
        for param, name in zip(group["params"], group["param_names"], strict=True)
    )
    keys = [{key: group[key] for key in group if not key.startswith("param")} for group in groups]
    projection = {"rank": 4, "update_proj_gap": 50, "scale": 0.5, "proj_type": "left"}
    assert keys == [{"weight_decay": 0.1, **projection}, {"weight_decay": 0.1}, {"weight_decay": 0.0}]


def test_bias_correction_of_a_group_is_read() -> None:
    first, second, third = (nn.Parameter(torch.ones(2)) for _ in range(3))
    groups: list[dict[str, Any]] = [{"params": [first], "bias_correction": False}, {"params": [second]}]
    optimizer = colossalai.DistributedLamb(groups)
    optimizer.add_param_group({"params": [third], "bias_correction": True})
    assert [group["debias"] for group in optimizer.param_groups] == ["none", "step", "step"]


def test_names_do_not_replace_the_classes_they_stand_for() -> None:
    group = {"params": [nn.Parameter(torch.ones(3, 3))], "algorithm": "lamb"}
    assert oxidion.AdamW([group]).param_groups[0]["debias"] == "moments"


def test_checkpoint_of_colossalai_is_loaded_and_goes_on() -> None:
    torch.manual_seed(7)
    weights = [nn.Parameter(torch.randn(4, 3)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    whole, resumed = (colossalai.DistributedLamb([weight], lr=1e-2, weight_decay=0.1) for weight in weights)
    weights[0].grad = torch.randn(4, 3)
    whole.step()
    state = whole.state[weights[0]]
    moments = {key: state[key].clone() for key in ("exp_avg", "exp_avg_sq")}
    keys = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.1, "bias_correction": True}
    saved = {"state": {0: {"step": 1, **moments}}, "param_groups": [{**keys, "params": [0]}]}
    resumed.load_state_dict(oxidion.checkpoint.import_state_dict(saved, "colossalai-lamb"))
    weights[1].data.copy_(weights[0].data)
    weights[0].grad = torch.randn(4, 3)
    weights[1].grad = weights[0].grad.clone()
    whole.step()
    resumed.step()
    assert torch.equal(weights[0], weights[1])


# ----------------------------------------------------------------------------------- setup_distributed

SET_UP = {
    "DistributedLamb": "is_zero",
    "DistGaloreAwamW": "is_zero",
    "DistributedAdaFactor": "use_zero",
    "DistributedCAME": "use_zero",
}


@pytest.mark.parametrize(("name", "word"), SET_UP.items())
def test_setup_refuses_plain_tensors_that_are_shards(name: str, word: str) -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    optimizer = getattr(colossalai, name)([{"params": [weight]}], **({"lr": 1e-3} if "CAME" in name else {}))
    before = copy.deepcopy(optimizer.state_dict())
    optimizer.setup_distributed()
    optimizer.setup_distributed(None, None, {}, None, **{word: True})
    optimizer.setup_distributed(Sizes(1), Sizes(2), {id(weight): weight}, {}, **{word: False})
    assert optimizer.state_dict() == before
    said = r"expects DTensors, got plain tensors, and {}.*FSDP2.*docs/coming-from/colossalai\.md"
    with pytest.raises(ValueError, match=said.format("tp_group has 2 ranks")):
        optimizer.setup_distributed(Sizes(2))
    with pytest.raises(ValueError, match=said.format(rf"dp_group has 2 ranks under ZeRO \({word}=False")):
        optimizer.setup_distributed(dp_group=Sizes(2), **{word: True})
    with pytest.raises(ValueError, match=said.format("shard_to_working_param maps")):
        optimizer.setup_distributed(None, Sizes(1), {id(weight): nn.Parameter(torch.ones(8, 3))})


def test_setup_has_the_default_of_each_class_for_zero() -> None:
    weight = nn.Parameter(torch.ones(4, 3))
    colossalai.DistributedLamb([weight]).setup_distributed(None, Sizes(2))
    with pytest.raises(ValueError, match="dp_group has 2 ranks"):
        colossalai.DistributedAdaFactor([weight]).setup_distributed(None, Sizes(2))


SHARDED = """
import copy
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from oxidion.compat.colossalai import (
    DistGaloreAwamW, DistributedAdaFactor, DistributedCAME, DistributedLamb, get_galore_param_groups
)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fs",))
torch.manual_seed(0)
start = torch.nn.Sequential(torch.nn.Linear(10, 14), torch.nn.Tanh(), torch.nn.Linear(14, 7)).double()
for make in (
    lambda model: DistributedLamb(model.parameters(), lr=1e-2, weight_decay=0.1),
    lambda model: DistributedAdaFactor(model.parameters()),
    lambda model: DistributedCAME(model.parameters(), lr=1e-3),
    lambda model: DistGaloreAwamW(get_galore_param_groups(model, decay=1e-2, rank=4), lr=1e-2, nbits=32),
):
    whole, sharded = copy.deepcopy(start), fully_shard(copy.deepcopy(start), mesh=mesh)
    optimizers = make(whole), make(sharded)
    optimizers[1].setup_distributed(None, dist.group.WORLD, {}, None, True)
    for model, optimizer in zip((whole, sharded), optimizers):
        for step in range(3):
            optimizer.zero_grad()
            inputs = torch.randn(8, 10, generator=torch.Generator().manual_seed(step)).double()
            model(inputs).square().mean().backward()
            optimizer.step()
    for old, one, other in zip(start.parameters(), whole.parameters(), sharded.parameters()):
        moved = (one - old).norm()
        assert moved > 0
        assert (other.full_tensor() - one).norm() <= 1e-9 * moved, optimizers[1]
    try:
        optimizers[0].setup_distributed(dist.group.WORLD)
    except ValueError as error:
        assert "tp_group has 2 ranks" in str(error)
    else:
        raise AssertionError("whole tensors were taken for DTensors")
dist.destroy_process_group()
"""


def test_every_class_steps_on_fsdp2_as_in_one_process() -> None:
    ended = forks.common().run(SHARDED, ranks=2)
    assert [rank.returncode for rank in ended] == [0, 0], "".join(rank.stderr for rank in ended)


def test_bias_correction_of_groups_counts_whenever_it_is_written() -> None:
    def moved(given: dict[str, Any], written: dict[str, Any]) -> Tensor:
        param = nn.Parameter(torch.linspace(1.0, 2.0, 6))
        optimizer: Any = colossalai.DistributedLamb([{"params": [param], **given}], lr=0.1)
        optimizer.param_groups[0].update(written)
        for _ in range(2):
            param.grad = torch.linspace(-1.0, 3.0, 6)
            optimizer.step()
        return param.detach()

    plain, without = moved({}, {}), moved({"bias_correction": False}, {})
    assert not torch.equal(plain, without)
    assert torch.equal(moved({}, {"bias_correction": False}), without)
    saved = colossalai.DistributedLamb([nn.Parameter(torch.ones(6))]).state_dict()
    saved["param_groups"][0]["bias_correction"] = saved["param_groups"][0].pop("debias") == "none"
    other: Any = colossalai.DistributedLamb([nn.Parameter(torch.ones(6))])
    other.load_state_dict(saved)
    assert other.param_groups[0]["debias"] == "none"
    with pytest.raises(ValueError, match="two words for one setting"):
        moved({"bias_correction": False, "debias": "step"}, {})


@pytest.mark.parametrize("given", ["none", 1, None])
def test_bias_correction_is_a_flag(given: Any) -> None:
    for arguments in ({"bias_correction": given}, {}):
        group = {"params": [nn.Parameter(torch.ones(4))]}
        with pytest.raises(ValueError, match="bias_correction must be True or False"):
            colossalai.DistributedLamb(
                [group if arguments else {**group, "bias_correction": given}], **arguments
            )
