"""``examples/tour.ipynb`` is a valid notebook, and its cells run in order.

Its outputs were stored by Jupyter; the cells run here without it, for fewer steps.
"""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from support import forks

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "tour.ipynb"
STEPS = 12

RUNNER = """
import ast, json, sys

path, steps, report = sys.argv[1:]
sys.path.insert(0, "")  # as in a kernel of Jupyter
with open(path, encoding="utf-8") as file:
    cells = [cell for cell in json.load(file)["cells"] if cell["cell_type"] == "code"]
names, shown = {"__name__": "__main__"}, {}
for number, cell in enumerate(cells):
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, cell["id"], "exec"), names)
    value = eval(compile(ast.Expression(last.value), cell["id"], "eval"), names) if last else None
    shown[cell["id"]] = value._repr_html_() if hasattr(value, "_repr_html_") else None
    if number == 0:
        assert names["STEPS"] > int(steps)
        names["STEPS"] = int(steps)
losses = {name: run.losses for name, run in names["runs"].items()}
curves = [line.get_ydata().tolist() for line in names["axes"].lines]
with open(report, "w") as file:
    json.dump({"shown": shown, "losses": losses, "curves": curves}, file)
"""
"""Runs all code cells in one namespace; reports the HTML of last expressions, the losses and the plot."""


@pytest.fixture(scope="module")
def notebook() -> dict[str, Any]:
    """The content of the file."""
    content: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return content


@pytest.fixture(scope="module")
def cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Its code cells."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run of all cells, and what they print."""
    report = tmp_path_factory.mktemp("tour") / "report.json"
    arguments = (str(NOTEBOOK), str(STEPS), str(report))
    agg = {"MPLBACKEND": "Agg"}
    (ended,) = forks.common().run(RUNNER, *arguments, folder=NOTEBOOK.parent, environment=agg)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    return {**json.loads(report.read_text()), "stdout": ended.stdout, "stderr": ended.stderr}


def texts(cell: dict[str, Any]) -> list[str]:
    """The stored outputs of a code cell without images."""
    parts = [output.get("text", "") for output in cell["outputs"]]
    for output in cell["outputs"]:
        parts += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return ["".join(part) for part in parts]


# ---- the file ------------------------------------------------------------------------


def test_notebook_has_the_structure_of_format_4(notebook: dict[str, Any]) -> None:
    assert notebook.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook["metadata"] == {"kernelspec": kernel, "language_info": {"name": "python"}}
    common = {"cell_type", "id", "metadata", "source"}
    for cell in notebook["cells"]:
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert cell.keys() == common | more
        assert cell["cell_type"] in {"code", "markdown"}
        assert cell["metadata"] == {}
        assert re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert all(line.endswith("\n") for line in cell["source"][:-1])
        assert "".join(cell["source"]).strip()
    identifiers = [cell["id"] for cell in notebook["cells"]]
    assert len({*identifiers}) == len(identifiers)


def test_stored_outputs_have_the_structure_of_format_4(cells: list[dict[str, Any]]) -> None:
    keys = {
        "stream": {"name", "output_type", "text"},
        "display_data": {"data", "metadata", "output_type"},
        "execute_result": {"data", "execution_count", "metadata", "output_type"},
    }
    for cell in cells:
        for output in cell["outputs"]:
            assert output.keys() == keys[output["output_type"]]  # an error is none of these
            assert output.get("execution_count", cell["execution_count"]) == cell["execution_count"]


def test_every_code_cell_was_executed_in_order(cells: list[dict[str, Any]]) -> None:
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert [cell["id"] for cell in cells if not cell["outputs"]] == []


def test_stored_outputs_name_no_absolute_path(cells: list[dict[str, Any]]) -> None:
    def paths(text: str) -> list[str]:
        return re.findall(r"(?<![\w.*<>/])/[\w.-][\w./-]*", text)

    assert paths("in /home/user/a.py, '/tmp/b'") == ["/home/user/a.py", "/tmp/b"]
    assert paths("mean / busiest, tokens/s, 3 */2, </td>, 1/16") == []
    assert [found for cell in cells for text in texts(cell) for found in paths(text)] == []


def test_notebook_and_its_plot_are_small(cells: list[dict[str, Any]]) -> None:
    assert NOTEBOOK.stat().st_size < 150_000
    outputs = [output.get("data", {}) for cell in cells for output in cell["outputs"]]
    (plot,) = [base64.b64decode(data["image/png"]) for data in outputs if "image/png" in data]
    assert plot.startswith(b"\x89PNG\r\n")
    assert len(plot) < 60_000


# ---- a run of its cells --------------------------------------------------------------


def test_every_code_cell_runs(done: dict[str, Any], cells: list[dict[str, Any]]) -> None:
    assert [*done["shown"]] == [cell["id"] for cell in cells]
    assert "guessed" not in done["stderr"]  # by param_groups: every parameter of the model is known


def test_three_optimizers_lower_the_loss_from_one_start(done: dict[str, Any]) -> None:
    assert [*done["losses"]] == ["AdamW", "Muon", "Dion"]
    for losses in done["losses"].values():
        assert len(losses) == STEPS
        # A uniform distribution over 256 bytes has a loss of 5.5; byte frequencies lower it by over 1.5.
        assert losses[-1] < losses[0] - 1.5
    assert len({losses[0] for losses in done["losses"].values()}) == 1
    assert len({losses[-1] for losses in done["losses"].values()}) == 3
    assert len(done["curves"]) == 3
    assert all(curve[-1] < curve[0] - 1 for curve in done["curves"])


def test_tables_are_shown_where_the_stored_outputs_have_them(
    done: dict[str, Any], cells: list[dict[str, Any]]
) -> None:
    shown = {name: html for name, html in done["shown"].items() if html}
    assert [*shown] == ["groups", "explain", "plan", "verify"]
    assert all("<table>" in html for html in shown.values())
    stored = [cell["id"] for cell in cells if any("text/html" in o.get("data", {}) for o in cell["outputs"])]
    assert stored == [*shown]


def test_commands_print_costs_and_a_rank_fraction(done: dict[str, Any]) -> None:
    for line in (
        r"llama-8b on dp=2,fs=16: rank 0 of 32",
        r"llama-8b  fs=64  muon .* %",
        r"rank_fraction=0\.\d+ keeps 0\.9 .*",
        r"name +algorithm  update_error.*",
    ):
        assert re.search(rf"^{line}$", done["stdout"], re.MULTILINE), line
    assert "oxidion.param_groups:" in done["stderr"]
