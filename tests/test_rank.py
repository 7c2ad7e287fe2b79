"""``python -m oxidion rank``: manual shares of energy, forms of checkpoints, hostile checkpoints."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import re
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import oxidion
from oxidion.__main__ import main
from oxidion._energy.files import whole
from oxidion._energy.report import POINTS, Report, plot, report
from oxidion._energy.spectrum import matrices, spectrum
from support.inputs import gaussian, with_singular_values

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

QUARTER, HALF = Fraction(1, 4), Fraction(1, 2)


def looked_at(*paths: Path | str, **settings: Any) -> Report:
    """The report of a checkpoint."""
    asked: dict[str, Any] = {"key": None, "names": None, "match": "", "energy": 0.9}
    asked |= {"fractions": [QUARTER, HALF], **settings}
    return report([Path(path) for path in paths], **asked)


def saved(folder: Path, content: Any, name: str = "a.pt") -> Path:
    """A file of torch.save."""
    torch.save(content, folder / name)
    return folder / name


def state_dict(**momenta: Tensor) -> dict[str, Any]:
    """A state dict of an optimizer with these momenta, its parameters numbered."""
    return {
        "state": {number: {"momentum": value} for number, value in enumerate(momenta.values())},
        "param_groups": [
            {"params": list(range(len(momenta))), "param_names": [*momenta], "lr": 0.1, "algorithm": "muon"}
        ],
    }


def diagonal(*values: float, rows: int = 0, columns: int = 0) -> Tensor:
    """A matrix with these singular values, between random bases."""
    shape = (max(rows, len(values)), max(columns, len(values)))
    return with_singular_values(shape, torch.tensor(values, dtype=torch.float64), 1)


def trained(name: str = "Muon", **settings: Any) -> tuple[nn.Module, Any]:
    """A model of two layers and a norm, and its optimizer after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 32))
    groups = oxidion.param_groups(model, algorithm=name.lower(), lr=0.01)
    optimizer = getattr(oxidion, name)(groups, **settings)
    for seed in range(2):
        for number, param in enumerate(model.parameters()):
            param.grad = gaussian(param.shape, 10 * seed + number).to(param.dtype)
        optimizer.step()
    return model, optimizer


def shares(matrix: Tensor, *fractions: Fraction) -> list[float]:
    """The same by a singular value decomposition."""
    squares = torch.linalg.svdvals(matrix.detach().double()).square()
    ranks = [math.ceil(fraction * len(squares)) for fraction in fractions]
    return [float(squares[:rank].sum() / squares.sum()) for rank in ranks]


# ------------------------------------------------------------------ figures


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (9, 4), (4, 9)])
@pytest.mark.parametrize("scale", [1.0, 1e-200, 1e200])
def test_shares_of_a_matrix_are_those_of_its_singular_values(rows: int, columns: int, scale: float) -> None:
    found = spectrum(diagonal(4.0, 3.0, 2.0, 1.0, rows=rows, columns=columns) * scale, {})
    assert not isinstance(found, str)
    expected = {
        Fraction(1, 100): 16 / 30,
        QUARTER: 16 / 30,
        HALF: 25 / 30,
        Fraction(3, 4): 29 / 30,
        Fraction(1): 1,
    }
    for fraction, share in expected.items():
        assert found.energy(fraction) == pytest.approx(share, rel=1e-12)
    # Two ranks hold 0.8333.
    for energy, rank in ((0.1, 1), (0.53, 1), (0.54, 2), (0.83, 2), (0.84, 3), (0.97, 4), (1.0, 4)):
        assert found.needed(energy) == Fraction(rank, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_shares_of_narrow_numbers_equal_those_in_float64(tmp_path: Path, dtype: torch.dtype) -> None:
    x = gaussian((8, 6), 1).to(dtype)
    assert_shares(looked_at(saved(tmp_path, {"w": x})), {"w": shares(x.double(), QUARTER, HALF)})


def test_all_energy_of_a_low_rank_matrix_is_reached_at_its_rank() -> None:
    found = spectrum(diagonal(2.0, 1.0, 1.0, rows=16, columns=12), {})
    assert not isinstance(found, str)
    assert found.needed(1.0) == QUARTER


def test_shares_of_a_stack_are_those_of_its_matrices_together() -> None:
    stack = torch.stack([diagonal(2.0, 0.0), diagonal(1.0, 1.0), diagonal(3.0, 1.0)]).reshape(3, 1, 2, 2)
    found = spectrum(stack, {})
    assert not isinstance(found, str)
    assert found.energy(HALF) == pytest.approx((4 + 1 + 9) / (4 + 2 + 10), rel=1e-12)


def test_matrices_get_the_rank_of_their_own_short_side() -> None:
    whole = torch.cat([diagonal(2.0, 1.0, rows=2, columns=6), diagonal(3.0, 2.0, 1.0, 1.0, columns=6)])
    found = spectrum(whole, {"split_sizes": [2, 4]})
    assert not isinstance(found, str)
    assert found.energy(HALF) == pytest.approx((4 + 13) / 20, rel=1e-12)
    assert found.energy(QUARTER) == pytest.approx((4 + 9) / 20, rel=1e-12)
    assert found.needed(0.9) == Fraction(3, 4)  # ranks 2 and 3: 19 of 20
    assert found.needed(0.85) == HALF


def test_large_matrices_are_summed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = gaussian((5, 24, 17), 3).float()
    once = spectrum(x, {})
    monkeypatch.setattr("oxidion._energy.spectrum.AT_ONCE", 100)
    parts = spectrum(x, {})
    assert not isinstance(once, str)
    assert not isinstance(parts, str)
    assert parts.energy(QUARTER) == pytest.approx(once.energy(QUARTER), rel=1e-12)
    squares = torch.linalg.svdvals(x.double()).square()
    assert once.energy(QUARTER) == pytest.approx(float(squares[:, :5].sum() / squares.sum()), rel=1e-12)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_heads": 2},
    {"split_sizes": (4, 2, 2)},
    {"num_heads": 3, "split_dim": 1},
]


@pytest.mark.parametrize("settings", [*SETTINGS, {"flatten": True}])
def test_matrices_are_those_that_an_optimizer_reads(settings: dict[str, Any]) -> None:
    from oxidion._reference import matrices as reference

    x = gaussian((8, 3, 5), 1) if "flatten" in settings else gaussian((8, 6), 1)
    found = [matrix for stack in matrices(x, settings) for matrix in stack]
    wanted = reference.matrices(x, settings)
    assert len(found) == len(wanted)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_blocks_of_a_stack_are_those_of_its_matrices() -> None:
    x = gaussian((2, 8, 6), 1)
    top, bottom = matrices(x, {"num_heads": 2})
    assert torch.equal(torch.cat([top, bottom], dim=1), x)
    left, right = matrices(x, {"split_sizes": [2, 4], "split_dim": 1})
    assert torch.equal(torch.cat([left, right], dim=2), x)
    assert left.shape == (2, 8, 2)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_heads": 3},
        {"num_heads": 10**12},
        {"num_heads": "2"},
        {"split_sizes": [4, 5]},
        {"split_sizes": [9, -1]},
        {"split_sizes": "44"},
        {"split_dim": 2, "num_heads": 2},
    ],
)
def test_settings_that_do_not_fit_are_a_value_error(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"num_heads|split_sizes|split_dim"):
        matrices(gaussian((8, 6), 1), settings)


def test_rank_fraction_is_what_half_of_the_elements_need(tmp_path: Path) -> None:
    flat = diagonal(*[1.0] * 8)  # 0.9 needs 8 of 8: 64 elements
    steep = diagonal(10.0, *[0.1] * 7)  # 1 of 8: 64 elements
    middle = diagonal(5.0, 5.0, 5.0, *[0.1] * 5, columns=20)  # 3 of 8: 160 elements
    path = saved(tmp_path, state_dict(a=flat, b=steep, c=middle))
    made = looked_at(path)
    assert [row.needed for row in made.rows] == [1.0, 0.125, 0.375]
    assert made.rank_fraction == 0.375  # 224 of 288
    assert looked_at(path, match="[ab]").rank_fraction == 0.125  # 64 of 128
    assert looked_at(path, match="[ac]").rank_fraction == 0.375
    third = diagonal(*[1.0] * 1, *[1e-9] * 2)
    assert looked_at(saved(tmp_path, state_dict(a=third))).rank_fraction == 0.334, "rounded up"
    ranks = oxidion.Dion([nn.Parameter(torch.zeros(3, 3))], rank_fraction=0.334).explain()[0]["rank"]
    assert ranks == 2, "a little too much, never too little"


def test_kinds_are_names_without_numbers_and_have_means(tmp_path: Path) -> None:
    names = ["layers.0.q.weight", "layers.11.q.weight", "layers.0.mlp.fc1.weight", "head2.weight"]
    values = [diagonal(2.0, 1.0), diagonal(3.0, 1.0), diagonal(1.0, 1.0), diagonal(1.0, 0.0)]
    made = looked_at(saved(tmp_path, state_dict(**dict(zip(names, values, strict=True)))))
    table = made.kinds().to_dict()
    assert table["kind"] == ["layers.*.q.weight", "layers.*.mlp.fc1.weight", "head2.weight"]
    assert table["parameters"] == [2, 1, 1]
    assert table["1/2"] == pytest.approx([(4 / 5 + 9 / 10) / 2, 1 / 2, 1.0])
    assert table["0.9 at"] == pytest.approx([(1.0 + 0.5) / 2, 1.0, 0.5])
    assert [len(row.curve) for row in made.rows] == [POINTS] * 4


# ------------------------------------------------------------------ forms of checkpoints


def momenta(model: nn.Module, optimizer: Any, key: str = "momentum") -> dict[str, list[float]]:
    """Shares of the matrices of an optimizer by name."""
    return {
        name: shares(optimizer.state[param][key], QUARTER, HALF)
        for name, param in model.named_parameters()
        if param.ndim == 2
    }


def assert_shares(made: Report, wanted: dict[str, list[float]], rel: float = 1e-9) -> None:
    """The report has these parameters and no other."""
    assert {row.name for row in made.rows} == wanted.keys()
    for row in made.rows:
        assert row.energies == pytest.approx(wanted[row.name], rel=rel)


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flattened"])
@pytest.mark.parametrize("folder", [False, True], ids=["file", "folder"])
def test_checkpoint_of_names_has_the_shares_of_the_states(tmp_path: Path, flat: bool, folder: bool) -> None:
    model, optimizer = trained()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    content = {"model": model_state, "optim": optimizer_state, "step": 7}
    if folder:
        dcp.save(content, checkpoint_id=tmp_path / "a")
    path = tmp_path / "a" if folder else saved(tmp_path, content)
    made = looked_at(path)
    assert made.key == "momentum"
    assert_shares(made, momenta(model, optimizer))
    weights = {
        f"model.{name}": shares(p, QUARTER, HALF) for name, p in model.named_parameters() if p.ndim == 2
    }
    assert_shares(looked_at(path, key="weights"), weights)


def test_names_of_groups_are_those_of_parameters(tmp_path: Path) -> None:
    model, optimizer = trained()
    made = looked_at(saved(tmp_path, optimizer.state_dict()))
    assert_shares(made, momenta(model, optimizer))


def test_momenta_of_8_bits_are_decoded(tmp_path: Path) -> None:
    settings = {"state_bits": 8, "rank_fraction": 0.5}
    model, optimizer = trained("Dion", **settings)
    for group in optimizer.param_groups:
        group |= {"min_quant_numel": 0, "block_size": 16}
    optimizer = type(optimizer)(optimizer.param_groups, **settings)
    for number, param in enumerate(model.parameters()):
        param.grad = gaussian(param.shape, number).to(param.dtype)
    optimizer.step()
    param = model[0].weight
    state = optimizer.state[param]
    assert state["momentum"].dtype == torch.uint8
    assert state["momentum_absmax"].shape == (48, 2)
    decoded = oxidion.functional.dequantize_blockwise(
        state["momentum"], state["momentum_absmax"], 16, signed=True
    )
    made = looked_at(saved(tmp_path, optimizer.state_dict()), match=r"^0\.")
    assert_shares(made, {"0.weight": shares(decoded, QUARTER, HALF)})


@pytest.mark.parametrize("of_model", ["same file", "own file", "missing"])
def test_numbers_get_the_names_of_a_model_whose_shapes_agree(tmp_path: Path, of_model: str) -> None:
    model, _ = trained()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    content = {"optimizer": optimizer.state_dict()}
    if of_model == "same file":
        content["state_dict"] = model.state_dict()
    names = saved(tmp_path, model.state_dict(), "model.pt") if of_model == "own file" else None
    made = looked_at(saved(tmp_path, content), names=names)
    assert made.key == "exp_avg"
    wanted = [*momenta(model, optimizer, "exp_avg").values()]
    prefix = "state_dict." if of_model == "same file" else ""
    keys = (
        ["parameter 0", "parameter 4"]
        if of_model == "missing"
        else [f"{prefix}0.weight", f"{prefix}2.weight"]
    )
    assert_shares(made, dict(zip(keys, wanted, strict=True)))
    if of_model == "missing":
        assert [row.kind for row in made.rows] == ["48×32", "32×48"]


def test_model_whose_shapes_differ_gives_no_names(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD([*model.parameters()][::-1], momentum=0.9)
    optimizer.step()
    content = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    made = looked_at(saved(tmp_path, content))
    assert made.key == "momentum_buffer"
    assert [row.name for row in made.rows] == ["parameter 1", "parameter 5"]


def test_optimizers_of_one_checkpoint_are_separated(tmp_path: Path) -> None:
    content = {"one": state_dict(a=diagonal(2.0, 1.0)), "two": state_dict(a=diagonal(1.0, 1.0))}
    made = looked_at(saved(tmp_path, content))
    assert [row.name for row in made.rows] == ["one.a", "two.a"]
    assert [row.energies[1] for row in made.rows] == pytest.approx([0.8, 0.5])


def test_word_state_in_the_names_of_a_model_is_no_optimizer(tmp_path: Path) -> None:
    made = looked_at(
        saved(tmp_path, {"net.state.proj.weight": diagonal(2.0, 1.0), "net.bias": torch.ones(2)})
    )
    assert (made.key, [row.name for row in made.rows]) == ("weights", ["net.state.proj.weight"])


def test_matrices_projected_or_of_other_algorithms_are_left_out(tmp_path: Path) -> None:
    content = state_dict(a=diagonal(2.0, 1.0), b=diagonal(1.0, 1.0), c=diagonal(1.0, 1.0))
    group = content["param_groups"][0]
    content["param_groups"] = [
        {**group, "params": [0, 2], "param_names": ["a", "c"]},
        {**group, "params": [1], "param_names": ["b"], "algorithm": "adamw"},
    ]
    content["state"][2]["proj"] = torch.ones(2, 1)
    made = looked_at(saved(tmp_path, content))
    assert [row.name for row in made.rows] == ["a"]
    assert made.skipped == {"b": "of adamw", "c": "of a projected gradient"}
    assert "left out: b, of adamw\n" in str(made)
    for own in content["param_groups"]:
        own["algorithm"] = "adamw"  # of a run without matrix optimizers all are of interest
    assert [row.name for row in looked_at(saved(tmp_path, content)).rows] == ["a", "b"]


def test_difference_of_two_checkpoints_is_that_of_their_tensors(tmp_path: Path) -> None:
    before, after = gaussian((8, 6), 1).float(), gaussian((8, 6), 2).float()
    newer, older = (
        saved(tmp_path, {"w": value}, f"{name}.pt") for name, value in (("new", after), ("old", before))
    )
    assert_shares(looked_at(newer, older), {"w": shares(after.double() - before.double(), QUARTER, HALF)})
    with pytest.raises(ValueError, match="w must have one shape in both"):
        looked_at(newer, saved(tmp_path, {"w": before[:4]}, "short.pt"))
    with pytest.raises(ValueError, match="w is in the first checkpoint only"):
        looked_at(newer, saved(tmp_path, {"v": before}, "other.pt"))


@pytest.mark.parametrize(
    ("value", "reason"),
    [(torch.zeros(2, 2), "zero"), (torch.full((2, 2), math.inf), "not finite"), (torch.zeros(0, 2), "empty")],
)
def test_matrix_without_energy_is_left_out_with_the_reason(
    tmp_path: Path, value: Tensor, reason: str
) -> None:
    made = looked_at(saved(tmp_path, {"a": diagonal(2.0, 1.0), "b": value}))
    assert made.skipped == {"b": reason}
    with pytest.raises(ValueError, match=f"b is left out: {reason}"):
        looked_at(saved(tmp_path, {"b": value}))


# ------------------------------------------------------------------ checkpoints that are hostile


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_file_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2, 2), "x": Evil(tmp_path / "ran")})
    with pytest.raises(ValueError, match=r"weights_only=True loads \(it names posix.mkdir\)"):
        looked_at(path)
    path.write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"is no file of torch\.save"):
        looked_at(path)
    assert not (tmp_path / "ran").exists()
    torch.load(saved(tmp_path, Evil(tmp_path / "ran")), weights_only=False)
    assert (tmp_path / "ran").exists(), "it would have"


def a_folder(folder: Path, value: Tensor | None = None) -> Path:
    """A folder of DCP with one matrix."""
    dcp.save({"w": diagonal(2.0, 1.0) if value is None else value}, checkpoint_id=folder / "dcp")
    return folder / "dcp"


def rewrite(folder: Path, change: Callable[[Any], Any]) -> None:
    """Changes the metadata of a folder."""
    file = folder / ".metadata"
    read = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(read) or read))


def test_metadata_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    assert looked_at(folder).rows[0].energies[1] == pytest.approx(0.8)
    rewrite(folder, lambda read: setattr(read, "planner_data", Evil(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"no metadata .*: it names posix.mkdir"):
        looked_at(folder)
    rewrite_of = pickle.dumps(Evil(tmp_path / "ran"))
    (folder / ".metadata").write_bytes(rewrite_of)
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        looked_at(folder)
    assert not (tmp_path / "ran").exists()


def test_data_that_would_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    (file,) = folder.glob("*.distcp")
    data = io.BytesIO()
    torch.save(Evil(tmp_path / "ran"), data)
    file.write_bytes(data.getvalue())

    def longer(read: Any) -> None:
        for info in read.storage_data.values():
            info.offset, info.length = 0, len(data.getvalue())

    rewrite(folder, longer)
    with pytest.raises(ValueError, match=r"posix\.mkdir"):
        looked_at(folder)
    assert not (tmp_path / "ran").exists()


def nested_key(levels: int, *, doubled: bool) -> bytes:
    """A pickle of a dict whose key is ``levels`` nested tuples, of two items or of one."""
    return b"\x80\x02})" + (b"2\x86" if doubled else b"\x85") * levels + b"K\x01s."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # Its hash would take 2^99 steps.
        (nested_key(99, doubled=True), "a key of a dict is a tuple"),
        # Its hash would go through as many calls, beyond the end of the stack.
        (nested_key(500_000, doubled=False), "a key of a dict is a tuple"),
        (b"\x80\x02(" + nested_key(9, doubled=False)[3:-4] + b"K\x01d.", "a key of a dict is a tuple"),
        (b"\x80\x02}(" + nested_key(9, doubled=False)[3:-4] + b"K\x01u.", "a key of a dict is a tuple"),
        (b"\x80\x04\x8f(" + nested_key(9, doubled=True)[3:-4] + b"\x90.", "it has a set,"),
        (b"\x80\x02ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R.", "an object has 65 fields, more than 64"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "it has .* a bytearray"),
    ],
    ids=["doubled", "deep", "dict", "entries", "set", "size", "memory"],
)
def test_metadata_that_would_take_for_ever_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    began = time.process_time()
    with pytest.raises(ValueError, match=rf"is no metadata of torch\.distributed\.checkpoint: {message}"):
        looked_at(tmp_path)
    assert time.process_time() - began < 30
    assert main_status(tmp_path) == 2


def main_status(path: Path) -> Any:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as end:
        main(["rank", str(path)])
    return end.value.code


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "sub/file", "..", ""])
def test_metadata_naming_a_file_outside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = a_folder(tmp_path)

    def elsewhere(read: Any) -> None:
        for info in read.storage_data.values():
            info.relative_path = name

    rewrite(folder, elsewhere)
    with pytest.raises(ValueError, match=f"w must lie in a file of the folder, the metadata names {name!r}"):
        looked_at(folder)


def in_parts(folder: Path, parts: list[tuple[tuple[int, ...], Tensor]], size: tuple[int, ...]) -> Path:
    """A folder of DCP with a tensor ``w`` in parts, as several ranks write one."""
    folder.mkdir(exist_ok=True)
    chunks, places = [], {}
    for number, (offset, part) in enumerate(parts):
        data = io.BytesIO()
        torch.save(part, data)
        (folder / f"__{number}_0.distcp").write_bytes(b"x" * number + data.getvalue())
        chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), part.shape))
        index = metadata.MetadataIndex("w", torch.Size(offset))
        places[index] = filesystem._StorageInfo(f"__{number}_0.distcp", number, len(data.getvalue()))
    about = metadata.TensorStorageMetadata(metadata.TensorProperties(), torch.Size(size), chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata.Metadata({"w": about}, None, places)))
    return folder


def test_tensor_in_parts_is_put_together(tmp_path: Path) -> None:
    x = gaussian((6, 5), 1).float()
    parts = [((0, 0), x[:2, :3].clone()), ((0, 3), x[:2, 3:].clone()), ((2, 0), x[2:].clone())]
    made = looked_at(in_parts(tmp_path, parts, (6, 5)))
    assert_shares(made, {"w": shares(x, QUARTER, HALF)})


@pytest.mark.parametrize(
    ("offset", "shape", "message"),
    [((4, 0), (2, 4), "not all"), ((4, 1), (2, 5), "a part of w must be"), ((3, 0), (3, 5), "not all")],
)
def test_parts_that_do_not_fit_are_refused(
    tmp_path: Path, offset: tuple[int, int], shape: tuple[int, int], message: str
) -> None:
    x = gaussian((4, 5), 1)
    with pytest.raises(ValueError, match=message):
        looked_at(in_parts(tmp_path, [((0, 0), x), (offset, gaussian(shape, 2))], (6, 5)))


def test_tensor_larger_than_its_memory_is_refused(tmp_path: Path) -> None:
    huge = torch.ones(1).expand(2**20, 2**20)
    with pytest.raises(ValueError, match="w has 1099511627776 elements and memory for fewer"):
        looked_at(saved(tmp_path, {"w": huge}))
    with pytest.raises(ValueError, match="memory for fewer"):
        looked_at(in_parts(tmp_path, [((0, 0), huge)], (2**20, 2**20)))


def test_part_of_a_tensor_is_refused() -> None:
    part = torch.ones(2, 2)
    part.placements = ()  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="w is a DTensor, and a file holds one rank's part of it"):
        whole(part, "w")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_tensors_without_matrices_of_numbers_are_left_out(tmp_path: Path) -> None:
    content = {
        "w": diagonal(2.0, 1.0),
        "positions": torch.ones(1, 8, dtype=torch.int64),
        "mask": torch.ones(2, 2, dtype=torch.bool),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(2, 2, device="meta"),
    }
    made = looked_at(saved(tmp_path, content))
    assert [row.name for row in made.rows] == ["w"]
    assert made.skipped == {
        "positions": "no floating-point numbers: torch.int64",
        "mask": "no floating-point numbers: torch.bool",
        "sparse": "no dense tensor: torch.sparse_coo on cpu",
        "meta": "no dense tensor: torch.strided on meta",
    }


def test_dict_that_holds_itself_is_looked_at_once(tmp_path: Path) -> None:
    content: dict[str, Any] = {"w": diagonal(2.0, 1.0)}
    content |= {"a": content, "b": content}
    assert [row.name for row in looked_at(saved(tmp_path, content)).rows] == ["w"]


def test_names_do_not_reach_the_terminal_as_commands(tmp_path: Path) -> None:
    made = looked_at(saved(tmp_path, {"w\x1b[2J\nx": diagonal(2.0, 1.0)}))
    assert [row.name for row in made.rows] == ["w�[2J�x"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_damaged_checkpoint_is_a_value_error_or_another_one(tmp_path: Path, kind: str) -> None:
    folder = a_folder(tmp_path)
    path = folder if kind == "folder" else saved(tmp_path, state_dict(a=diagonal(2.0, 1.0)))
    file = folder / ".metadata" if kind == "folder" else path
    whole, chance, refused = file.read_bytes(), random.Random(0), 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        file.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        try:
            looked_at(path)
        except (ValueError, OSError):
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("damage", ["several disks", "cut off", "empty"])
def test_file_that_is_no_whole_archive_is_refused(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path, {"w": diagonal(2.0, 1.0)})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x06\x07")  # where the end of a large archive is, and on how many disks
    data[at + 16] = 2
    path.write_bytes({"several disks": data, "cut off": data[: len(data) // 2], "empty": b""}[damage])
    with pytest.raises(ValueError, match=r"is no file of torch\.save"):
        looked_at(path)


@pytest.mark.parametrize(
    ("quantized", "scales"), [("float32", "float32"), ("uint8", "float64"), ("uint8", "uint8")]
)
def test_quantized_values_and_scales_of_other_types_are_refused(
    tmp_path: Path, quantized: str, scales: str
) -> None:
    content = state_dict(a=torch.ones(4, 4, dtype=getattr(torch, quantized)))
    content["state"][0]["momentum_absmax"] = torch.ones(4, 1, dtype=getattr(torch, scales))
    with pytest.raises(ValueError, match="a: 8-bit values need scales in float32"):
        looked_at(saved(tmp_path, content))


def test_settings_that_are_tensors_say_nothing(tmp_path: Path) -> None:
    content = state_dict(a=diagonal(2.0, 1.0))
    content["param_groups"][0] |= dict.fromkeys(("num_heads", "split_sizes", "flatten"), torch.ones(3))
    content["param_groups"][0]["algorithm"] = ["muon"]
    assert looked_at(saved(tmp_path, content)).rows[0].energies[1] == pytest.approx(0.8)


@pytest.mark.parametrize("settings", [{"num_heads": 7}, {"split_sizes": [2**62, 2**62]}, {"block_size": 0}])
def test_settings_of_a_group_that_do_not_fit_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    content = state_dict(
        a=torch.zeros(4, 4, dtype=torch.uint8) if "block_size" in settings else torch.ones(4, 4)
    )
    content["param_groups"][0] |= settings
    content["state"][0]["momentum_absmax"] = torch.ones(4, 1)
    if "block_size" not in settings:
        del content["state"][0]["momentum_absmax"]
    with pytest.raises(ValueError, match=next(iter(settings))):
        looked_at(saved(tmp_path, content))


# ------------------------------------------------------------------ command line


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of two matrices."""
    return saved(tmp_path, state_dict(**{"a.0.w": diagonal(2.0, 1.0), "a.1.w": diagonal(3.0, 1.0)}))


def test_output_is_two_tables_and_the_rank_fraction(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rank", str(path), "--fractions", "1/2", "1", "--energy", "0.85"]) == 0
    assert capsys.readouterr().out == (
        f"{path}: energy of momentum by rank fraction\n\n"
        "name   shape  1/2  1  0.85 at\n"
        "a.0.w  2×2    0.8  1  1\n"
        "a.1.w  2×2    0.9  1  0.5\n\n"
        "kind   parameters  elements  1/2   1  0.85 at\n"
        "a.*.w  2           8         0.85  1  0.75\n\n"
        "rank_fraction=0.5 keeps 0.85 of the energy for half of the elements\n"
        "rank_fraction=1.000 keeps it for all parameters\n"
    )


def test_recommended_fractions_are_rounded_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved(tmp_path, state_dict(w=diagonal(*[1.0] * 5, *[1e-3] * 11)))  # all five of 16 are needed
    assert main(["rank", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "rank_fraction=0.313 keeps 0.9 of the energy for half of the elements",
        "rank_fraction=0.313 keeps it for all parameters",
    ]


def test_json_file_holds_the_figures(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert main(["rank", str(path), "--json", str(file), "--match", "1"]) == 0
    read = json.loads(file.read_text())
    assert (read["key"], read["energy"], read["rank_fraction"]) == ("momentum", 0.9, 0.5)
    assert read["fractions"] == ["1/16", "1/8", "1/4", "1/2"]
    (row,) = read["parameters"]
    assert (row["name"], row["kind"], row["shape"]) == ("a.1.w", "a.*.w", [2, 2])
    assert row["energies"] == pytest.approx([0.9] * 4)
    assert row["curve"] == pytest.approx([0.9] * (POINTS // 2) + [1.0] * (POINTS // 2))


def test_plot_is_a_png_or_an_svg_by_its_name(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, start in (("a.png", b"\x89PNG\r\n\x1a\n"), ("a.SVG", b"<?xml"), ("a", b"\x89PNG")):
        assert main(["rank", str(path), "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "a.SVG").read_text()
    for label in ("Energy of the momentum that low ranks capture", "a.*.w (2)", "rank_fraction=0.5"):
        assert f"<!-- {label} -->" in text


def test_plot_of_many_kinds_has_ten_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tensors = {f"{letter}.w": diagonal(2.0, 1.0) for letter in "abcdefghijklm"}
    plot(looked_at(saved(tmp_path, state_dict(**tensors))), tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "<!-- 4 other kinds (4) -->" in text
    assert len(re.findall(r"<!-- [a-z0-9. ]+ \(\d+\) -->", text)) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--fractions", "2"], r"must be in \(0, 1\], got 2"),
        (["--fractions", "1/0"], "expected a fraction as 1/8 or 0.125"),
        (["--energy", "nan"], "expected a fraction"),
        (["--energy", "0"], r"must be in \(0, 1\]"),
        (["--match", "("], "--match: "),
        (["--match", "z"], "has no matrices among its momentum"),
        (["--key", "variance"], r"has no states 'variance'; those of its optimizer are \['momentum'\]"),
        (["--key", "weights"], "holds no tensors of a model"),
        (["--names", "/none"], "No such file"),
        (["--plot", "/none/a.png"], "--plot: .* there is no folder /none"),
        (["/b"], "checkpoint: .* got '/b': No such file"),
        (["/", "/"], "takes one checkpoint, or two"),
    ],
)
def test_wrong_options_exit_with_2_and_say_what_is_wrong(
    path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["rank", str(path), *options])
    assert caught.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("what", ["absent", "text", "empty folder"])
def test_path_that_is_not_a_checkpoint_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "empty folder").mkdir()
    with pytest.raises(SystemExit) as caught:
        main(["rank", str(tmp_path / what)])
    assert caught.value.code == 2
    wanted = {"absent": "No such file", "text": "no file of torch.save", "empty folder": "no file .metadata"}
    assert wanted[what] in capsys.readouterr().err


def test_plot_without_matplotlib_says_what_to_install(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit):
        main(["rank", str(path), "--plot", str(tmp_path / "a.png")])
    assert "pip install matplotlib" in capsys.readouterr().err


def test_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"oxidion {oxidion.__version__}\n"
