import pytest

from boltcutter.config.errors import hint, one_line, printable


@pytest.mark.parametrize(
    ("word", "known", "expected"),
    [
        ("sgdd", ["adam", "sgd"], "; did you mean sgd?"),
        ("modle", ["data", "model"], "; did you mean model?"),
        ("12", [1, 128], "; did you mean 128?"),
        ("quite_else", ["adam", "sgd"], ""),
        ("adam", [], ""),
    ],
)
def test_hint(word: str, known: list[object], expected: str) -> None:
    assert hint(word, known) == expected


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b\n")) == "a b"


def test_control_characters_are_not_sent_to_a_terminal() -> None:
    assert printable(text := "größe\n" * 3) is text  # at once, as a log may have a hundred million characters
    assert printable("größe\n\x1b]0;title\x07 \r\u2028") == "größe\n\\x1b]0;title\\x07 \\r\\u2028"
