"""Licences: both texts are in the package. Crates: allowed licences, one source, one version each."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

from .sources import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = ["LICENSE-MIT", "LICENSE-APACHE"]


def toml(name: str) -> dict[str, Any]:
    """A TOML file of the checkout."""
    return tomllib.loads((ROOT / name).read_text())


def allows(expression: str, allowed: set[str]) -> bool:
    """Whether an SPDX expression can be met by allowed licences alone."""
    tokens = re.findall(r"[()]|[\w.+-]+(?: WITH [\w.+-]+)?", expression.replace("/", " OR "))
    words = {"(": "(", ")": ")", "AND": "and", "OR": "or"}
    terms = [words.get(token, str(token in allowed)) for token in tokens]
    return bool(eval(" ".join(terms)))  # nothing but True, False, and, or, parentheses


@pytest.mark.parametrize(
    ("expression", "met"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("GPL-2.0/MIT", True),
        ("(GPL-3.0-only OR MIT) AND ISC", True),
        ("MIT AND GPL-3.0-only", False),
        ("MIT WITH LLVM-exception", False),
        ("ISC WITH LLVM-exception OR GPL-3.0-only", True),
    ],
)
def test_expression_is_met_only_by_allowed_licences(expression: str, met: bool) -> None:
    assert allows(expression, {"MIT", "ISC", "ISC WITH LLVM-exception"}) == met


def test_crate_and_distribution_name_the_same_licence_files() -> None:
    project = toml("pyproject.toml")["project"]
    assert project["license"] == toml("Cargo.toml")["package"]["license"] == "MIT OR Apache-2.0"
    assert project["license-files"] == FILES
    mit, apache = ((ROOT / name).read_text() for name in FILES)
    assert mit.startswith("MIT License\n\nCopyright (c) 2026 The oxidion developers\n")
    assert "WITHOUT WARRANTY OF ANY KIND" in mit
    assert re.match(r"\s*Apache License\s+Version 2\.0, January 2004", apache)
    assert "END OF TERMS AND CONDITIONS" in apache


def test_source_distribution_holds_both_files_and_names_them(tmp_path: Path) -> None:
    maturin = shutil.which("maturin", path=str(Path(sys.executable).parent))
    assert maturin, "maturin is not in the interpreter's folder"
    subprocess.run([maturin, "sdist", "--out", tmp_path], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        top = archive.name.removesuffix(".tar.gz")
        assert {f"{top}/{name}" for name in FILES} <= set(files.getnames())
        information = files.extractfile(f"{top}/PKG-INFO")
        assert information
        fields = Parser().parsestr(information.read().decode())
    assert fields.get_all("License-File") == FILES
    assert fields["License-Expression"] == "MIT OR Apache-2.0"


def locked() -> list[dict[str, Any]]:
    """What is known of every locked crate, for every feature and platform."""
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--quiet", "--all-features"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    crates: list[dict[str, Any]] = json.loads(done.stdout)["packages"]
    assert len(crates) > 50
    return crates


def test_every_crate_licence_is_allowed_and_no_allowance_is_idle() -> None:
    licences = {package["name"]: package["license"] for package in locked()}
    allowed = set(toml(".ci/deny.toml")["licenses"]["allow"])
    assert {name: text for name, text in licences.items() if not allows(text or "none", allowed)} == {}
    texts = [text.replace("/", " OR ") for text in licences.values()]
    needed = {one for one in allowed if not all(allows(text, allowed - {one}) for text in texts)}
    assert needed == allowed


def test_every_locked_crate_comes_from_the_registry() -> None:
    (registry,) = toml(".ci/deny.toml")["sources"]["allow-registry"]
    sources = {package["name"]: package["source"] for package in locked()}
    assert {name for name, source in sources.items() if source is None} == {"oxidion"}
    assert {source for source in sources.values() if source} == {f"registry+{registry}"}


def test_crates_of_two_versions_are_listed_with_a_reason() -> None:
    versions: dict[str, list[str]] = {}
    for package in locked():
        versions.setdefault(package["name"], []).append(package["version"])

    def order(version: str) -> list[int]:
        return [int(number) for number in re.split(r"[.+-]", version)[:3]]

    older = {f"{name}@{v}" for name, all_of in versions.items() for v in sorted(all_of, key=order)[:-1]}
    skipped = toml(".ci/deny.toml")["bans"]["skip"]
    assert {entry["crate"] for entry in skipped} == older
    assert all(entry["reason"] for entry in skipped)
