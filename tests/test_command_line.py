"""Odd command lines: a usage error that names the option, with status 2."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oxidion.__main__ import main

CONFIG = {"layers": 1, "dim": 64, "heads": 4, "kv_heads": 2, "hidden": 128, "vocab": 256, "gated": True}
HARDWARE = {"flops": {"float32": 1e12}, "memory": 1e11, "inner": [1e-6, 1e10], "outer": [1e-6, 1e9]}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1},
    **{"vocab_size": 256, "intermediate_size": 128},
}
LONG, NUL = "a" * 300, "a\0b"


class File:
    """Content of a file that is named on the command line."""

    def __init__(self, content: Any) -> None:
        self.content = content if isinstance(content, (str, bytes)) else json.dumps(content)

    def __repr__(self) -> str:
        return repr(self.content[:30])

    def write(self, folder: Path, number: int) -> str:
        path = folder / f"file{number}.json"
        content = self.content
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)


def without(values: dict[str, Any], key: str) -> File:
    return File({each: value for each, value in values.items() if each != key})


NO_OBJECT = [File(b"\xff\xfe\0"), File(""), File("{"), File("[]"), File("null"), File("3"), File("[" * 10**5)]
NESTED = File('{"a":' * 50_000 + "1" + "}" * 50_000)
NO_FILE = ["", "/none/file", "{folder}", LONG, NUL]
UNWRITABLE = ["", "{folder}", "/none/file", "{text}/file", LONG, NUL]
SHARES = ["", "x", "0", "-1", "2", "nan", "inf", "1/0", "1e-999999999", "1e999999999"]
COUNTS = ["", "x", "-1", "1.5", "nan", str(2**64), "9" * 5000, "²"]

PLAN: dict[str, list[Any]] = {
    "--model": [
        *NO_FILE,
        *NO_OBJECT,
        NESTED,
        "gpt-9",
        without(CONFIG, "vocab"),
        without(LLAMA, "vocab_size"),
        *(File({**CONFIG, **change}) for change in ({"dim": "x"}, {"dim": 2**63}, {"vocab": 2**70})),
        *(File({**CONFIG, **change}) for change in ({"layers": None}, {"heads": 1.5}, {"more": 1})),
        *(File({**LLAMA, **change}) for change in ({"model_type": []}, {"model_type": "bert"})),
        File({**LLAMA, "model_type": "gpt2", "hidden_size": "a", "intermediate_size": None}),
    ],
    "--mesh": [
        *("", "fs", "=", "fs=", "=2", "fs=0", "fs=-1", "fs=two", "fs=1.5", "fs=1e3", "fs=²", "xx=2"),
        *(
            ",",
            "fs=2,",
            "fs=2,fs=2",
            "fs=2;tp=2",
            NUL,
            "fs=99999999999",
            "dp=2048,fs=1024",
            "fs=" + "9" * 5000,
        ),
    ],
    "--algorithm": ["", "sgd"],
    "--rank-fraction": SHARES,
    "--fraction": SHARES,
    "--selection-scope": ["both"],
    "--dtype": ["int8"],
    "--state-dtype": [""],
    "--state-bits": ["4", "x"],
    "--block-size": ["0", "7"],
    "--projection-rank": ["0", *COUNTS],
    "--sides": ["left"],
    "--device": ["tpu"],
    "--max-batch-bytes": COUNTS,
    "--workspace-limit": ["0", *COUNTS],
    "--route": ["", " ", ",", ",,", "fs,", "fs,,tp", "xx", "fs,fs", "auto,fs", "tp", NUL],
    "--hardware": [
        *NO_FILE,
        *NO_OBJECT,
        NESTED,
        *(without(HARDWARE, key) for key in HARDWARE),
        *(File({**HARDWARE, "memory": value}) for value in (0, -1, float("nan"), 10**400, "1", None, True)),
        *(File({**HARDWARE, "flops": value}) for value in ("abc", [["float32", 1]], {"float32": None}, {})),
        *(File({**HARDWARE, "inner": value}) for value in (3, [1], [1e300, 1], [10**400, 1], [1, 1e-320])),
        *(File({**HARDWARE, "axes": value}) for value in (3, [1], {"fs": 2})),
        *(File({**HARDWARE, "collectives": value}) for value in (7, {"send": [0, 1]})),
        *(File({**HARDWARE, key: "x"}) for key in ("node", "share", "hides", "measured", "more")),
        File({**HARDWARE, "share": 10**400}),
    ],
    "--links": ["string"],
    "--tokens-per-step": COUNTS,
    "--sweep": ["", "fs", "fs=1..", "fs=4..2", "xx=1..2", "fs=a..b", "fs=²..4", "fs=1..999999999999"],
    "--rank": ["2", *COUNTS],
    "--json": [*UNWRITABLE, "/proc/version"],
    "--plot": [*UNWRITABLE, "{folder}/a.exe"],
}
RANK: dict[str, list[Any]] = {
    "--key": ["", "variance"],
    "--names": ["", "/none", LONG, NUL],
    "--match": ["(", "a{99999999999999999999}", "(" * 3000, "no such name"],
    "--fractions": SHARES,
    "--energy": SHARES,
    "--json": UNWRITABLE,
    "--plot": [*UNWRITABLE, "{folder}/a.exe"],
}
GPU_CHECK: dict[str, list[Any]] = {
    "--json": UNWRITABLE,
    "--log": UNWRITABLE,
    "--rows": ["", "x", "0", "10", "-1", "²", ",,", "1,", "1;2"],
    "--device": ["", "x", "-1", "²", "1.5", "cuda:0"],
    "--jobs": ["0", *COUNTS],
    "--seconds": ["", "x", "nan", "0", "-1"],
    "--repeats": COUNTS,
}
OPTIONS = {"plan": PLAN, "rank": RANK, "gpu-check": GPU_CHECK}
LINES = [
    (command, option, value)
    for command, options in OPTIONS.items()
    for option, values in options.items()
    for value in values
]
FLAGS = {"--help", "--compressed", "--owned-states", "--compare", "--schedule", "--quick", "--recheck"}
FLAGS |= {"--master-weights", "--resume"}
"""Options without a value."""


@pytest.fixture
def path(tmp_path: Path) -> Callable[[Any, int], str]:
    """The word on the command line for a value: of a file its path."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("text")

    def made(value: Any, number: int = 0) -> str:
        if isinstance(value, File):
            return value.write(tmp_path, number)
        return value.replace("{folder}", str(tmp_path / "folder")).replace("{text}", str(tmp_path / "text"))

    return made


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of what a usage error prints, after its check that the process ends with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    line = error.splitlines()[-1]
    assert len(line) < 1200, "a long value is cut"
    assert line.startswith("python -m oxidion")
    return line


@pytest.mark.parametrize(
    ("command", "option", "value"), LINES, ids=[f"{c}{o}-{str(v)[:20]!a}" for c, o, v in LINES]
)
def test_odd_value_is_refused_with_the_name_of_its_option(
    path: Callable[..., str], capsys: pytest.CaptureFixture[str], command: str, option: str, value: Any
) -> None:
    words = [command]
    if command == "plan" and option != "--model":
        words += ["--model", path(File(CONFIG), 1)]
    if command == "plan" and option != "--mesh":
        words += ["--mesh", "fs=2"]
    if command == "rank":
        checkpoint = Path(path(File(""), 1))
        torch.save({"weight": torch.eye(8)}, checkpoint)
        words.append(str(checkpoint))
    if option == "--projection-rank":
        words += ["--algorithm", "galore_adamw"]
    words.append(f"{option}={path(value, 2)}")
    assert re.search(rf" error: (argument )?{option}\b", refusal(words, capsys))


def test_odd_values_are_those_of_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(LINES) >= 80
    for command, options in OPTIONS.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", capsys.readouterr().out))
        hidden = {"--repeats"}
        assert shown - FLAGS == set(options) - hidden, command


@pytest.mark.parametrize(
    "value", ["", "/none", "{folder}", "{text}", LONG, NUL, File(b"\x80\x02"), File("{}")]
)
def test_path_that_is_not_a_checkpoint_is_refused(
    path: Callable[..., str], capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    assert " error: argument checkpoint: " in refusal(["rank", path(value)], capsys)


def test_names_that_are_no_checkpoint_are_refused(
    path: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Path(path(File(""), 1))
    state = {"state": {0: {"momentum": torch.eye(8)}}, "param_groups": [{"params": [0]}]}
    torch.save(state, checkpoint)
    for value in ("{folder}", "{text}"):
        line = refusal(["rank", str(checkpoint), "--names", path(value)], capsys)
        assert " error: argument --names: " in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: command"),
        (["x"], "argument command: invalid choice: 'x'"),
        (["env", "x"], "unrecognized arguments: x"),
        (["plan"], "required: --model"),
        (["plan", "--model"], "argument --model: expected at least one argument"),
        (["plan", "--model", "gpt-160m", "--wrong"], "unrecognized arguments: --wrong"),
        (["rank"], "required: checkpoint"),
        (["rank", *[__file__] * 3], "takes one checkpoint, or two to subtract the second, got 3"),
        (["gpu-check", "--resume"], "--resume needs --json"),
        (["gpu-check", "--part", "3"], "argument --part: expected 2 arguments"),
        (
            ["gpu-check", "--rank", "a", "2", "Muon", "/none"],
            "--rank must be a rank and a number of ranks, got 'a'",
        ),
    ],
)
def test_words_that_are_missing_or_too_many_are_named(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(words, capsys)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to any folder")
def test_folder_that_may_not_be_written_to_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o500)
    line = refusal(["plan", "--model", "gpt-160m", "--json", str(tmp_path / "a.json")], capsys)
    assert "this user may not write to" in line


def test_rank_fraction_may_be_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt-160m", "--rank-fraction", "1/16"]) == 0
    assert "dion at rank fraction 0.0625" in capsys.readouterr().out


def test_figures_go_to_a_device_or_into_a_file_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    for file in (tmp_path / "a.json", Path("/dev/null")):
        assert main(["plan", "--model", "gpt-160m", "--json", str(file)]) == 0
    assert json.loads((tmp_path / "a.json").read_text())[0]["model"] == "gpt-160m"
