import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from boltcutter.callback.status_line import Field, StatusLine, layout

FIELDS = [
    Field("epoch", "3/20", 9),
    Field("", "15 %", 1),
    Field("loss", "0.3441", 6),
    Field("val/accuracy", "0.9101", 5),
    Field("", "5,722 samples/s", 3),
    Field("step", "171/1,140", 0),
    Field("", "1:05 left", 4),
]


class Terminal(io.StringIO):
    """Shows what a person would see, line by line."""

    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        lines = self.getvalue().split("\n")
        return [line.rpartition("\x1b[2K")[2].rstrip("\r") for line in lines]


@pytest.fixture
def terminal() -> Terminal:
    return Terminal()


@contextmanager
def screen_on(terminal: Terminal, width: int = 80) -> Iterator[StatusLine]:
    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = terminal
    screen = StatusLine(Console(file=terminal, force_terminal=True, color_system=None, width=width))
    try:
        yield screen
    finally:
        screen.close()
        sys.stdout, sys.stderr = before


@pytest.mark.parametrize("width", [79, 119])
@pytest.mark.parametrize("share", [0.0, 0.15, 1.0])
def test_a_line_fills_the_width(width: int, share: float) -> None:
    assert len(layout(FIELDS, share, width)) == width


def test_what_is_less_wanted_gives_way_to_the_bar() -> None:
    def shown(width: int) -> set[str]:
        text = layout(FIELDS, 0.15, width).plain
        return {field.text for field in FIELDS if field.text in text}

    assert len(shown(119)) == 7
    assert shown(79) == {"epoch 3/20", "loss 0.3441", "val/accuracy 0.9101", "1:05 left"}
    assert shown(60) == {"epoch 3/20", "loss 0.3441", "val/accuracy 0.9101"}
    assert shown(40) == {"epoch 3/20", "loss 0.3441"}
    assert shown(5) == {"epoch 3/20"}


@pytest.mark.parametrize(
    ("share", "bar"), [(0, "----------"), (0.55, "#####-----"), (1, "##########"), (2, "##########")]
)
def test_a_bar_shows_the_share(share: float, bar: str) -> None:
    assert layout(FIELDS[:1], share, 22, ascii_only=True).plain == f"epoch 3/20  {bar}"


def test_without_an_end_there_is_no_bar() -> None:
    assert layout(FIELDS[:3], None, 80).plain == "epoch 3/20  15 %  loss 0.3441"


def test_a_line_is_drawn_over_the_last(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        screen.show(FIELDS, 0.1)
        screen.show([Field("epoch", "4/20", 9)], None)
        assert terminal.seen() == ["epoch 4/20"]
    assert terminal.seen() == ["epoch 4/20", ""]


def test_what_is_printed_stands_above(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        screen.show([Field("epoch", "1/2", 9)], None)
        print("one", "two")
        print("warned", file=sys.stderr)
        screen.show([Field("epoch", "2/2", 9)], None)
        screen.close()
        print("after")
    assert terminal.seen() == ["one two", "warned", "epoch 2/2", "after", ""]


def test_a_line_half_printed_is_left_alone(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        print("loading", end="")
        screen.show([Field("epoch", "1/2", 9)], None)
        print(" done")
        assert terminal.seen() == ["loading done", ""]
        screen.show([Field("epoch", "1/2", 9)], None)
        assert terminal.seen() == ["loading done", "epoch 1/2"]


def test_the_line_is_left_standing_after_a_print(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        screen.show([Field("epoch", "1/2", 9)], None)
        print("stopped early")
    assert terminal.seen() == ["stopped early", "epoch 1/2", ""]


def test_streams_are_given_back_and_nothing_is_hidden(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        assert sys.stdout is not terminal
        assert sys.stdout.isatty()
        screen.show(FIELDS, 0.5)
        screen.close()
        screen.close()
        assert (sys.stdout, sys.stderr) == (terminal, terminal)
    assert "\x1b[?" not in terminal.getvalue()  # neither the cursor nor the screen was changed


def test_a_stream_that_others_replaced_is_theirs(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        sys.stdout = theirs = io.StringIO()
        screen.close()
        assert sys.stdout is theirs


def test_a_file_is_not_touched(terminal: Terminal) -> None:
    with screen_on(terminal) as screen:
        screen.close()
        sys.stderr = file = io.StringIO()
        screen = StatusLine(screen.console)
        screen.show(FIELDS, 0.5)
        print("to a file", file=sys.stderr)
        screen.close()
        assert sys.stderr is file
    assert terminal.getvalue().count("\x1b[2K") == 1


def test_a_line_keeps_within_a_narrow_terminal(terminal: Terminal) -> None:
    with screen_on(terminal, width=20) as screen:
        screen.show([Field("epoch", "1" * 30, 9)], 0.5)
        assert len(terminal.seen()[-1]) <= 20


def test_a_terminal_without_lines_gets_letters() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    screen = StatusLine(Console(file=file, force_terminal=True, color_system=None, width=80))
    screen.show(FIELDS, 0.5)
    screen.close()
    assert b"####" in raw.getvalue()


def test_a_line_has_colours() -> None:
    assert {str(span.style) for span in layout(FIELDS, 1.0, 79).spans} >= {"bold", "dim", "green"}
