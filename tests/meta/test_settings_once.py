"""Settings of every class stand once: few files name one, no class restates one, a new one takes eight."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oxidion._core import schema
from oxidion._core.base import OxOptimizer
from oxidion._core.signature import CommonOptions, ModelOptions

from .sources import PACKAGE, ROOT, python_files, relative, rust_files

#: Product files that may name a common key.
MOST = 8
#: Keys that more files name, with how many. The naive steps of verify() read settings on their own.
MORE = {
    "block_size": 9,
    "capturable": 11,
    "cautious_wd": 10,
    "state_bits": 13,
    "stochastic_rounding": 10,
}
#: Keys that any optimizer has are left out.
KEYS = [*schema.COMMON.keys() - {"lr", "weight_decay", "algorithm", "step"}, *schema.ONLY_ARGUMENTS]
#: Keys that some classes take by position, as microsoft/dion does.
BY_POSITION = {"Muon": {"cautious_wd"}, "MuonH": {"cautious_wd"}, "NorMuon": {"cautious_wd"}}
DEFAULTS = ROOT / "src" / "spec" / "options_of_tests.txt"


def naming(key: str) -> list[str]:
    """Product files that name a key: as a string, or as a field of a type."""
    named = re.compile(rf"[\"']{key}[\"']|^\s+{key}: ", re.MULTILINE)
    files = [*rust_files(tests=False), *python_files("python/oxidion")]
    return [relative(file) for file in files if named.search(file.read_text())]


@pytest.mark.parametrize("key", sorted(KEYS))
def test_few_product_files_name_a_common_key(key: str) -> None:
    found = naming(key)
    assert "python/oxidion/_core/schema.py" in found or key.startswith("average")
    assert len(found) <= MORE.get(key, MOST), found


def test_keys_with_more_files_are_no_fewer_than_the_list_says() -> None:
    assert {key: len(naming(key)) for key in MORE} == MORE, "lower the number"


def constructors() -> dict[str, ast.FunctionDef]:
    """The constructors of all classes, as they are written."""
    found: dict[str, ast.FunctionDef | None] = {}
    for file in python_files("python/oxidion/optim"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                inits = [each for each in node.body if isinstance(each, ast.FunctionDef)]
                found[node.name] = next((each for each in inits if each.name == "__init__"), None)
    return {name: init for name, init in found.items() if init is not None and init.args.kwarg}


def test_no_constructor_restates_a_common_argument() -> None:
    common = CommonOptions.__annotations__.keys() - ModelOptions.__annotations__.keys()
    assert common == {*common} & {*KEYS}
    assert len(constructors()) >= 17
    for name, init in constructors().items():
        written = {each.arg for each in (*init.args.args, *init.args.kwonlyargs)}
        assert written & common == BY_POSITION.get(name, set()), name
        assert init.args.kwarg is not None
        assert init.args.kwarg.arg == "common", name


def test_core_repeats_no_default() -> None:
    """A setting is read without a value for its absence, which the classes have."""
    default = re.compile(r"options\s*\.\w+\(\"(\w+)\"(?:,[^\"]*?\)|\)\?\s*\.unwrap_or)")
    found = {match[1] for file in rust_files(tests=False) for match in default.finditer(file.read_text())}
    assert found == {"num_heads"}  # None is one head


def test_settings_of_core_tests_are_defaults_of_classes() -> None:
    lines = [line.partition(" ") for line in DEFAULTS.read_text().splitlines()]
    classes = OxOptimizer._registry.values()
    for key, _, value in lines:
        fields = [{**schema.COMMON, **cls._SCHEMA}.get(key) for cls in classes]
        known = [field.default for field in fields if field] + [cls._ABSENT.get(key) for cls in classes]
        assert ast.literal_eval(value) in known, key
    assert [key for key, _, _ in lines] == sorted({key for key, _, _ in lines})


#: The recipe of CONTRIBUTING.md: file, text behind which a line is put, and the line.
RECIPE = [
    (
        "python/oxidion/_core/schema.py",
        '    "cautious_wd": validate.flag(False),\n',
        '    "sober": validate.flag(True),\n',
    ),
    ("python/oxidion/_core/signature.py", "    cautious_wd: bool\n", "    sober: bool\n"),
    (
        "python/oxidion/_core/signature.py",
        "        differentiable: must be False.\n",
        "        sober: steps soberly.\n",
    ),
    ("src/algorithm/mod.rs", '    "cautious_wd",\n', '    "sober",\n'),
    ("src/plan/master.rs", "-> Result<Option<StateSpec>> {\n", '    options.flag("sober")?;\n'),
    ("src/spec/options_of_tests.txt", "sides 'both'\n", "sober True\n"),
    ("python/oxidion/_reference/update.py", "from __future__ import annotations\n", "# sober\n"),
    ("CHANGELOG.md", "### Added\n\n", "- `sober`.\n"),
]

SCRIPT = """
import inspect, torch, oxidion
from torch import nn
for name in oxidion.__all__:
    cls = getattr(oxidion, name)
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        continue
    assert inspect.signature(cls).parameters["sober"].default is True, name
    assert "\\n    sober: steps soberly." in inspect.getdoc(cls), name
    weight, needed = nn.Parameter(torch.ones(4, 4)), {"lr": 0.1} if name == "CAME" else {}
    made = cls([weight], sober=False, **needed)
    assert made.param_groups[0]["sober"] is False
    assert cls([weight], **needed).param_groups[0]["sober"] is True
    for wrong, error in (({"sober": 2}, ValueError), ({"sobre": True}, TypeError)):
        try:
            cls([weight], **wrong, **needed)
        except error as raised:
            assert "sober" in str(raised), raised
        else:
            raise AssertionError(name)
print("done")
"""


def test_new_common_key_takes_eight_files(tmp_path: Path) -> None:
    built = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, tmp_path / "python" / "oxidion", ignore=built)
    for library in PACKAGE.rglob("*.so"):
        (tmp_path / library.relative_to(ROOT)).symlink_to(library)
    for name, before, line in RECIPE:
        file = tmp_path / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, file)
        text = file.read_text()
        assert text.count(before) >= 1, name
        file.write_text(text.replace(before, before + line, 1))
    assert len({name for name, _, _ in RECIPE}) <= MOST
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## A setting of every class")[2]
    for name, _, _ in RECIPE:
        assert f"`{name}`" in page or name == "src/plan/master.rs", name
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "python")}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


def test_every_class_has_every_common_argument_in_its_signature() -> None:
    common = CommonOptions.__annotations__.keys() - ModelOptions.__annotations__.keys()
    for cls in OxOptimizer._registry.values():
        assert common <= inspect.signature(cls).parameters.keys(), cls
