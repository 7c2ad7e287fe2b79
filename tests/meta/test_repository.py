"""What a host of the repository reads: workflows, templates, attributes."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from .sources import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = [file for file in sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) if file.stem != "config"]
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
#: A major version, or a commit.
PINNED = re.compile(r"[\w.-]+/[\w./-]+@((release/)?v\d+|[0-9a-f]{40})")


def workflow(name: str) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key ``on`` as true."""
    loaded: dict[Any, Any] = yaml.safe_load((GITHUB / "workflows" / name).read_text())
    return {"on" if key is True else key: value for key, value in loaded.items()}


def steps(flow: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every step of every job."""
    for job in flow["jobs"].values():
        yield from job["steps"]


def made(text: str) -> list[str]:
    """Targets that a shell script makes."""
    calls = re.findall(r"^\s*(?:\w+=\S+ )*make\b(.*)$", text, re.MULTILINE)
    words = [[word for word in call.split() if "=" not in word] for call in calls]
    assert all(words), "make without a target"
    return [target for call in words for target in call]


def test_there_are_workflows_for_tests_nights_wheels_and_docs() -> None:
    assert {file.stem for file in WORKFLOWS} >= {"test", "nightly", "wheels", "docs"}
    assert made('make build TORCH=2.13\nA=1 make test ARGS="x=y"\ncmake it') == ["build", "test"]


@pytest.mark.parametrize("name", [file.name for file in WORKFLOWS])
def test_workflow_is_valid_read_only_and_makes_existing_targets(name: str) -> None:
    flow = workflow(name)
    assert {"name", "on", "permissions", "jobs"} <= flow.keys()
    assert flow["permissions"] == {"contents": "read"}
    assert "pull_request_target" not in flow["on"]
    for job, content in flow["jobs"].items():
        assert content["timeout-minutes"] <= 360, job
        assert set(content.get("needs", "").split()) <= flow["jobs"].keys()
        # What publishes may ask for a token of its own; nothing else has more than the workflow.
        pages = {"pages": "write"} if name == "docs.yml" else {}
        expected = {"id-token": "write", **pages} if job == "publish" else None
        assert content.get("permissions") == expected, job
    used = [step["uses"] for step in steps(flow) if "uses" in step]
    scripts = [step["run"] for step in steps(flow) if "run" in step]
    assert scripts
    assert [action for action in used if not PINNED.fullmatch(action)] == []
    assert {target for script in scripts for target in made(script)} <= TARGETS
    for path in re.findall(r"(?<![\w/])\.ci/[\w.]+", (GITHUB / "workflows" / name).read_text()):
        assert (ROOT / path).exists(), path


def test_workflow_of_tests_runs_on_oldest_and_newest_python() -> None:
    job = workflow("test.yml")["jobs"]["test"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    lowest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert lowest
    assert job["strategy"]["matrix"]["python"][0] == lowest[1]


def test_only_a_tag_publishes_and_only_what_was_installed() -> None:
    publish = workflow("wheels.yml")["jobs"]["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["needs"] == "install"
    assert "secrets." not in (GITHUB / "workflows" / "wheels.yml").read_text()


@pytest.mark.parametrize("name", [file.name for file in FORMS])
def test_issue_form_has_fields_with_names_of_their_own(name: str) -> None:
    form = yaml.safe_load((GITHUB / "ISSUE_TEMPLATE" / name).read_text())
    assert form["name"]
    assert form["description"]
    identifiers = [field["id"] for field in form["body"]]
    assert identifiers
    assert len(set(identifiers)) == len(identifiers)
    assert all(field["type"] in {"input", "textarea", "dropdown"} for field in form["body"])
    assert all(field["attributes"]["label"] for field in form["body"])


@pytest.mark.parametrize(
    ("path", "attribute", "value"),
    [
        ("tests/golden/x.npz", "binary", "set"),
        ("tests/golden/x.npz", "linguist-generated", "set"),
        ("benchmarks/results/step.json", "diff", "unset"),
        ("benchmarks/results/zen5.json", "linguist-generated", "set"),
        ("Cargo.lock", "linguist-generated", "set"),
        ("src/lib.rs", "linguist-generated", "unspecified"),
    ],
)
def test_recorded_files_are_separated_from_written_ones(path: str, attribute: str, value: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    command = ["git", "check-attr", attribute, "--", path]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip().rpartition(" ")[2] == value


def test_recipe_for_conda_says_what_the_project_says() -> None:
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    crate = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert recipe["context"]["version"] == crate["package"]["version"]
    assert recipe["about"]["summary"] == project["project"]["description"]
    assert recipe["about"]["license"] == project["project"]["license"]
    needs = recipe["requirements"]
    assert {line.replace(" ", "") for line in needs["host"]} >= set(project["build-system"]["requires"])
    run = {line.replace(" ", "").replace("pytorch", "torch") for line in needs["run"]}
    assert run >= set(project["project"]["dependencies"])


def test_badges_of_the_readme_are_true() -> None:
    readme = (ROOT / "README.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    badges = dict(re.findall(r"!\[(\w+): ([^\]]+)\]\(https://img\.shields\.io/badge/", readme))
    assert badges["Python"].removesuffix("+") == project["requires-python"].removeprefix(">=")
    (torch,) = (need for need in project["dependencies"] if need.startswith("torch"))
    assert badges["torch"].removesuffix("+") == torch.removeprefix("torch>=")
    assert badges["license"] == project["license"]
