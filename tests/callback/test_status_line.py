import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from boltcutter.callback.status_line import Field, StatusLine, layout
from boltcutter.formatting import is_terminal

FIELDS = [
    Field("epoch", "3/20", 9),
    Field("", "15 %", 1),
    Field("loss", "0.3441", 6),
    Field("val/accuracy", "0.9101", 5),
    Field("", "5,722 samples/s", 3),
    Field("step", "171/1,140", 0),
    Field("", "1:05 left", 4),
]


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


class Terminal(io.StringIO):
    """A terminal that reports its visible lines."""

    def isatty(self) -> bool:
        return True

    def visible(self) -> list[str]:
        lines = self.getvalue().split("\n")
        return [line.rpartition("\x1b[2K")[2].rstrip("\r") for line in lines]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@contextmanager
def status_line_on(terminal: Terminal) -> Iterator[StatusLine]:
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = terminal
    status = StatusLine(terminal)
    try:
        yield status
    finally:
        status.close()
        sys.stdout, sys.stderr = before


@pytest.mark.parametrize("width", [79, 119])
@pytest.mark.parametrize("progress", [0.0, 0.15, 1.0])
def test_a_line_fills_the_width(width: int, progress: float) -> None:
    assert len(layout(FIELDS, progress, width)) == width


def test_fields_of_small_weight_are_dropped_for_the_bar() -> None:
    def shown(width: int) -> set[str]:
        text = layout(FIELDS, 0.15, width)
        return {field.text for field in FIELDS if field.text in text}

    assert len(shown(119)) == 7
    assert shown(79) == {"epoch 3/20", "loss 0.3441", "val/accuracy 0.9101", "1:05 left"}
    assert shown(60) == {"epoch 3/20", "loss 0.3441", "val/accuracy 0.9101"}
    assert shown(40) == {"epoch 3/20", "loss 0.3441"}
    assert shown(12) == {"epoch 3/20"}


@pytest.mark.parametrize(
    ("progress", "bar"), [(0, "----------"), (0.55, "#####-----"), (1, "##########"), (2, "##########")]
)
def test_a_bar_shows_the_progress(progress: float, bar: str) -> None:
    assert layout(FIELDS[:1], progress, 22, ascii_only=True) == f"epoch 3/20  {bar}"


def test_without_progress_there_is_no_bar() -> None:
    assert layout(FIELDS[:3], None, 80) == "epoch 3/20  15 %  loss 0.3441"


def test_a_line_replaces_the_previous_one(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        status.show(FIELDS, 0.1)
        status.show([Field("epoch", "4/20", 9)], None)
        assert terminal.visible() == ["epoch 4/20"]
    assert terminal.visible() == ["epoch 4/20", ""]


def test_printed_text_appears_above(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        status.show([Field("epoch", "1/2", 9)], None)
        print("one", "two")
        print("warned", file=sys.stderr)
        status.show([Field("epoch", "2/2", 9)], None)
        status.close()
        print("after")
    assert terminal.visible() == ["one two", "warned", "epoch 2/2", "after", ""]


def test_an_incomplete_printed_line_is_kept(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        print("loading", end="")
        status.show([Field("epoch", "1/2", 9)], None)
        print(" done")
        assert terminal.visible() == ["loading done", ""]
        status.show([Field("epoch", "1/2", 9)], None)
        assert terminal.visible() == ["loading done", "epoch 1/2"]


def test_the_last_line_stays_after_a_print(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        status.show([Field("epoch", "1/2", 9)], None)
        print("stopped early")
    assert terminal.visible() == ["stopped early", "epoch 1/2", ""]


def test_streams_are_restored(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        assert sys.stdout is not terminal
        assert sys.stdout.isatty()
        status.show(FIELDS, 0.5)
        status.close()
        status.close()
        assert (sys.stdout, sys.stderr) == (terminal, terminal)
    assert "\x1b[?" not in terminal.getvalue()  # neither the cursor nor the screen was changed


def test_a_stream_replaced_by_others_is_kept(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        sys.stdout = theirs = io.StringIO()
        status.close()
        assert sys.stdout is theirs


def test_a_file_is_not_redirected(terminal: Terminal) -> None:
    with status_line_on(terminal) as status:
        status.close()
        sys.stderr = file = io.StringIO()
        status = StatusLine(terminal)
        status.show(FIELDS, 0.5)
        print("to a file", file=sys.stderr)
        status.close()
        assert sys.stderr is file
    assert terminal.getvalue().count("\x1b[2K") == 1


def test_a_line_fits_a_narrow_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with status_line_on(terminal) as status:
        status.show([Field("epoch", "1" * 30, 9)], 0.5)
        assert terminal.visible() == ["epoch 1111111111111"]


def test_an_ascii_terminal_gets_an_ascii_bar() -> None:
    raw = io.BytesIO()
    status = StatusLine(io.TextIOWrapper(raw, encoding="ascii"))
    status.show(FIELDS, 0.5)
    status.close()
    assert b"####" in raw.getvalue()


@pytest.mark.parametrize(("term", "expected"), [("xterm", True), ("dumb", False)])
def test_a_dumb_terminal_cannot_erase_lines(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, term: str, expected: bool
) -> None:
    monkeypatch.setenv("TERM", term)
    assert is_terminal(terminal) == expected
    assert not is_terminal(io.StringIO())
