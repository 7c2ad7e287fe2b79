"""``python -m oxidion`` with any words: a table, or a usage error that ends with status 2."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from oxidion.__main__ import main

from .draw import Draw

WORDS: dict[str, list[str]] = {
    "--model": ["gpt-160m", "llama-1b", "llama-3b", "", "/proc/version", "/none", "{file}"],
    "--mesh": [
        "dp=2",
        "fs=8,tp=2",
        "dp=2,fs=4,tp=2",
        "fs=0",
        "fs=-1",
        "fs",
        "=",
        "fs=2,fs=2",
        "xx=3",
        "fs=1e3",
    ],
    "--algorithm": ["dion", "muon", "adamw", "lamb", "galore_adamw", "adam"],
    "--rank-fraction": ["0.5", "1", "0", "nan", "inf", "-1", "x"],
    "--fraction": ["0.25", "1e-9", "2", "nan"],
    "--selection-scope": ["local", "global", "both"],
    "--dtype": ["float32", "bfloat16", "int8"],
    "--state-dtype": ["float32", "float16", "x"],
    "--rank": ["0", "1", "-1", "99999999999999999999", "x"],
    "--json": ["{out}/a.json", "/proc/none/a.json", "{out}"],
}
FLAGS = ["--compressed", "--schedule", "--help", "--wrong"]
SIZES: list[Any] = [0, 1, 2, 8, 64, 2**20, 2**40, 2**63, -1, 1.5, None, "x", [], True]
GOOD = {
    "layers": 2,
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 128,
    "vocab": 256,
    "gated": True,
    "tied": False,
}


def configuration(draw: Draw) -> str:
    """The text of a model's file, mostly JSON."""
    if draw.often(0.2):
        return draw.choice(["", "{", "[]", "null", "\0", '{"a": 1e999}', "[" * 5000])
    values = GOOD | draw.some(dict.fromkeys([*GOOD, "more"], SIZES), 0.1)
    return json.dumps({key: value for key, value in values.items() if not draw.often(0.02)})


def case(draw: Draw) -> None:
    """One command line."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.json")
        file.write_text(configuration(draw))
        words = [draw.choice(["plan", "plan", "plan", "plan", "env", "x"])]
        options = ["--model", *draw.sample(sorted(WORDS), draw.randint(0, 4))]
        for option in options if draw.often(0.95) else options[1:]:
            words += [option, draw.choice(WORDS[option])]
        words += [flag for flag in FLAGS if draw.often(0.08)]
        words = [word.replace("{file}", str(file)).replace("{out}", folder) for word in words]
        out, err = io.StringIO(), io.StringIO()
        label = f"{words} with {file.read_text()[:300]!r}"
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                status: Any = main(words)
        except SystemExit as end:
            status = end.code
        except Exception as error:
            raise AssertionError(f"{label}: {error!r}") from error
        assert status in (0, 2), f"{label}: status {status}"
        assert out.getvalue() or status == 2, f"{label}: nothing is printed"
        assert ("error:" in err.getvalue()) == (status == 2), f"{label}: {err.getvalue()}"
