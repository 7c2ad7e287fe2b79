"""``python -m oxidion rank`` of damaged and odd checkpoints: tables, or a usage error with status 2."""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from oxidion.__main__ import main

from .draw import Draw

SETTINGS: dict[str, list[Any]] = {
    "num_heads": [1, 2, 3, 0, -1, 2**63, "x", [2], None, torch.ones(2)],
    "interleaved": [1, 2, 3, 0, -1, 2**63, "x", None],
    "split_sizes": [[1, 1], [2**40, 2**40], [], "ab", 3, [-1, 3], None],
    "split_dim": [0, 1, 2, -1, "x"],
    "flatten": [True, False, 1, "x"],
    "block_size": [8, 256, 0, -1, 2**62, "x"],
    "algorithm": ["muon", "adamw", "galore_adamw", "x", 3, ["muon"]],
    "param_names": [["a"], ["a\n\x1b[2J", "b"], "ab", [[]], 3],
    "params": [[0], [0, 1], ["a"], 3, None, [[0]]],
}
OPTIONS: dict[str, list[str]] = {
    "--key": ["momentum", "weights", "exp_avg", "x", ""],
    "--match": ["", "a", "(", "[0-9]+$"],
    "--fractions": ["1/8", "1", "0", "x"],
    "--energy": ["0.5", "1", "1e-9", "nan"],
    "--names": ["{path}", "/none", "/proc/version"],
    "--json": ["{folder}/a.json", "/proc/none/a.json", "{folder}"],
}


def momentum(draw: Draw) -> Any:
    """A state: mostly a tensor, of any shape, type and content."""
    if draw.often(0.1):
        return draw.choice([None, 3, "x", [1.0], torch.ones(1).expand(2**20, 2**20), torch.ones(2, 3).bool()])
    shape = draw.shape()
    value = draw.content(draw.choice(["ordinary", "zeros", "tiny", "huge", "inf", "nan"]), shape)
    return value.to(draw.choice([torch.float64, torch.float32, torch.bfloat16, torch.uint8]))


def content(draw: Draw) -> dict[str, Any]:
    """A dict as a training program saves it, and odd ones."""
    state: dict[Any, Any] = {
        key: {"momentum": momentum(draw)} | draw.some({"momentum_absmax": [momentum(draw)]}, 0.2)
        for key in draw.sample([0, 1, 2, "a", "b.c"], draw.randint(1, 3))
    }
    group = {"params": list(state), "lr": 0.1} | draw.some(SETTINGS, 0.15)
    optimizer = {"state": state, "param_groups": [group]}
    return draw.choice([optimizer, {"optim": optimizer, "model": {"a.weight": momentum(draw)}}])


def damaged(draw: Draw, path: Path) -> None:
    """Changes bytes of a file, or its length."""
    data = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 8)):
        data[draw.randrange(len(data))] = draw.randrange(256)
    path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])


def case(draw: Draw) -> None:
    """One checkpoint and one command line."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about what is loaded
        saved, path = content(draw), Path(folder, "a.pt")
        torch.save(saved, path)
        file = path
        kept = [value for state in saved.get("optim", saved)["state"].values() for value in state.values()]
        kept += saved.get("model", {}).values()
        # DCP makes room for all elements of what it saves.
        if draw.often(0.4) and all(isinstance(each, torch.Tensor) and each.is_contiguous() for each in kept):
            path = Path(folder, "dcp")
            dcp.save(saved, checkpoint_id=path)
            file = draw.choice(sorted(path.iterdir()))
        if draw.often(0.4):
            damaged(draw, file)
        words = ["rank", str(path), *[str(path)] * draw.often(0.1)]
        for option in draw.sample(sorted(OPTIONS), draw.randint(0, 2)):
            words += [option, draw.choice(OPTIONS[option]).format(path=path, folder=folder)]
        out, err = io.StringIO(), io.StringIO()
        label = f"{words} with {described(saved)}"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status: Any = main(words)
        except SystemExit as end:
            status = end.code
        except Exception as error:
            raise AssertionError(f"{label}: {error!r}") from error
        assert status in (0, 2), f"{label}: status {status}"
        assert out.getvalue() or status == 2, f"{label}: nothing is printed"
        assert "\x1b" not in out.getvalue(), f"{label}: a name reaches the terminal as a command"
        assert ("error:" in err.getvalue()) == (status == 2), f"{label}: {err.getvalue()}"


def described(value: Any) -> Any:
    """The same with shapes for tensors: some have more elements than memory."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    return [described(each) for each in value] if isinstance(value, list) else value
