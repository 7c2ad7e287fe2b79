"""Where the core lets Python run within a step: what the step uses is looked at again after each place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BORDER = ROOT / "src" / "binding"
SESSION = ROOT / "src" / "session"

USES_MEMORY = {"begin", "compute", "average", "end"}
"""Methods of a session that read or write tensors of the user: Python has run since the one before."""
USES_NONE = {
    "abandon", "copied", "details", "expect_functions", "fits", "gradient_room", "hold", "idle", "invalidate",
    "live", "measurements", "own", "pattern", "place_gradient", "set_probe", "set_streams", "take_inside",
    "try_fast",
}  # fmt: skip
"""Others that the border calls. `place_gradient` writes to memory that the session made for itself."""
CALLS_PYTHON = {"group.rs": 1}
"""Files that attach the interpreter, with the number of places: the function of the user."""


def body(source: str, name: str) -> str:
    """The text of a function, up to the next one of its depth."""
    found = re.search(rf"^( *)(?:pub(?:\([a-z]+\))? )?fn {name}\b.*?^\1}}$", source, re.DOTALL | re.MULTILINE)
    assert found, name
    return found[0]


def called() -> set[str]:
    """Methods of the session that the border calls."""
    text = (BORDER / "session.rs").read_text()
    locked = r"(?:\binner|\.lock\(\)\??(?:\s*\.map_err\(to_python\)\?)?)"
    found = set(re.findall(rf"{locked}\s*\.(\w+)\(", text))
    return found - {"map_err", "map", "into_iter", "lock", "try_lock", "unwrap_or_else"}


def test_every_method_of_the_session_is_known_to_use_memory_or_not() -> None:
    assert called() == USES_MEMORY | USES_NONE


@pytest.mark.parametrize("name", sorted(USES_MEMORY))
def test_method_that_uses_memory_looks_at_it_again(name: str) -> None:
    files = {"begin": ("step.rs", "take"), "end": ("step.rs", "end"), "average": ("average.rs", "average")}
    file, function = files.get(name, ("mod.rs", name))
    text = body((SESSION / file).read_text(), function)
    assert "look_again(" in text
    if name == "begin":  # numbers are read before memory is looked for
        border = body((BORDER / "session.rs").read_text(), "take")
        assert border.index("self.read(") < border.index("try_fast") < border.index(".begin(")
    else:  # handlers of `logging` wait until it is done
        assert re.search(rf"logs::after\(\|\| py\.enter\(\|\| self\.lock\(\)\?\.{name}\(", border_text())


def border_text() -> str:
    return (BORDER / "session.rs").read_text()


def test_interpreter_is_attached_where_it_is_listed() -> None:
    found = {}
    for path in sorted((ROOT / "src").rglob("*.rs")):
        count = len(re.findall(r"Python::attach|with_gil|assume_attached|PyGILState", path.read_text()))
        if count:
            found[path.name] = count
    assert found == CALLS_PYTHON


def test_what_is_in_use_is_looked_at_before_the_result_of_a_function_is_written() -> None:
    source = ROOT / "src" / "linalg" / "orthonormalizer.rs"
    text = body(source.read_text(), "call")
    order = ["function(", "require_memory(&", "drop(result)", "look_at_what_is_in_use()?", "x_bmn.f_copy_("]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    files = [path for path in (ROOT / "src").rglob("*.rs") if not path.stem.endswith("_tests")]
    callers = [path for path in files if ".get::<Function>()" in path.read_text()]
    assert callers == [source], "a function of the user is called elsewhere: look at what is in use there too"


def test_every_entry_keeps_operations_of_torch_from_python() -> None:
    assert "Dispatch::to_python(false)" in body((BORDER / "enter.rs").read_text(), "enter")
    for path in BORDER.glob("*.rs"):
        if path.name not in ("enter.rs", "tensor.rs"):
            assert ".detach(" not in path.read_text().replace("py.detach(cuda::let_go)", "")
