"""Where the core lets Python run within a step: what the step uses is looked at again after each place."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BORDER = ROOT / "src" / "binding"
SESSION = ROOT / "src" / "session"

USES_MEMORY = {"begin", "compute", "average", "end"}
"""Methods of a session that read or write tensors of the user: Python has run since the one before."""
USES_NONE = {
    "abandon", "copied", "details", "expect_functions", "fits", "gradient_room", "hold", "idle",
    "invalidate", "live", "look_at_all", "look_before", "look_before_averages", "measurements", "own",
    "pattern", "place_gradient", "set_probe", "set_streams", "take_inside", "try_fast",
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
    return found - {"map_err", "map", "and_then", "into_iter", "lock", "try_lock", "unwrap_or_else"}


def test_every_session_method_is_known_to_use_memory_or_not() -> None:
    assert called() == USES_MEMORY | USES_NONE


def test_memory_is_looked_at_again_before_every_use() -> None:
    border, step = border_text(), (SESSION / "step.rs").read_text()
    # Numbers are read before memory is looked for.
    order = ["self.read(", "try_fast", "self.look_closely(", "look_at_all()", ".begin("]
    assert_order(body(border, "take"), order)
    assert_order(body(step, "take"), ["self.look_at_all()", "self.fits(", "check_gradient("])
    for name, look in (("compute", "look_before(k)"), ("average", "look_before_averages()")):
        # With the interpreter, so that no other thread comes between; handlers of `logging` wait.
        assert_order(body(border, name), [look, f"logs::after(|| py.enter(|| self.lock()?.{name}("])
    assert "logs::after(|| py.enter_attached(|| self.lock()?.end()))" in body(border, "end")
    assert_order(body(step, "end"), ["look_again(", ".count()", ".commit()", "drop(gone)"])


def assert_order(text: str, parts: list[str]) -> None:
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)


def border_text() -> str:
    return (BORDER / "session.rs").read_text()


def test_interpreter_is_attached_where_it_is_listed() -> None:
    found = {}
    for path in sorted((ROOT / "src").rglob("*.rs")):
        count = len(re.findall(r"Python::attach|with_gil|assume_attached|PyGILState", path.read_text()))
        if count:
            found[path.name] = count
    assert found == CALLS_PYTHON


def test_memory_in_use_is_checked_after_the_users_function() -> None:
    text = body((BORDER / "group.rs").read_text(), "callback")
    order = [".call(", "require_memory(&result)", "drop(result)", "look_at_what_is_in_use()?", "Ok(values)"]
    assert_order(text, order)


def test_every_entry_keeps_operations_of_torch_from_python() -> None:
    assert "Dispatch::to_python(false)" in body((BORDER / "enter.rs").read_text(), "guarded")
    for path in BORDER.glob("*.rs"):
        if path.name not in ("enter.rs", "tensor.rs"):
            assert ".detach(" not in path.read_text().replace("py.detach(cuda::let_go)", "")
