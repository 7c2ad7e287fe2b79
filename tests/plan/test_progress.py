"""Progress of comparisons that take longer than a moment."""

from __future__ import annotations

import io
import sys

import pytest

from oxidion.__main__ import main
from oxidion._planning import progress

SWEEP = ["plan", "--model", "gpt-160m", "--algorithm", "muon", "--sweep", "fs=2..8"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Makes stderr a terminal. In a fixture pytest would take stderr back before the test."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    return shown


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All work counts as slow."""
    monkeypatch.setattr(progress, "SLOW", -1.0)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rich is not installed."""
    for name in ("rich", "rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("slow", "plain")
def test_terminal_without_rich_shows_numbers_and_is_left_clean(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = at_terminal(monkeypatch)
    assert main(SWEEP) == 0
    parts = terminal.getvalue().split("\r")
    assert [part for part in parts if part.strip()] == ["0 of 3 plans", "1 of 3 plans", "2 of 3 plans"]
    assert parts[-2:] == [" " * len("2 of 3 plans"), ""]
    assert "of 3 plans" not in capsys.readouterr().out


@pytest.mark.usefixtures("slow")
def test_terminal_with_rich_shows_its_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = at_terminal(monkeypatch)
    pytest.importorskip("rich")
    for name, value in (("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    assert main(SWEEP) == 0
    assert "plans" in terminal.getvalue()
    assert "2/3" in terminal.getvalue()
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # the line is erased
    assert "2/3" not in capsys.readouterr().out


@pytest.mark.usefixtures("slow", "plain")
def test_error_leaves_the_terminal_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)

    def failing() -> None:
        with progress.progress(4, "plans") as report:
            report(1)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        failing()
    assert terminal.getvalue().endswith("\r" + " " * len("1 of 4 plans") + "\r")


def test_quick_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    with progress.progress(2, "plans") as report:
        report(0)
        report(1)
    assert terminal.getvalue() == ""


def test_slow_work_is_shown_after_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_terminal(monkeypatch)
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.progress(3, "plans") as report:
        now += 1.9
        report(1)
        assert terminal.getvalue() == ""
        now += 0.2
        report(2)
        assert terminal.getvalue() != ""


@pytest.mark.usefixtures("slow")
def test_nothing_is_shown_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SWEEP) == 0
    assert capsys.readouterr().err == ""
