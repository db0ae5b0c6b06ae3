import pickle

import pytest

from boltcutter.config.errors import ConfigError, Mistake, as_config_error, hint, one_line, prefix_errors, printable


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


def test_a_hint_is_as_similar_as_required() -> None:
    assert hint("learning", ["learn"], 0.75) == "; did you mean learn?"
    assert hint("learning", ["learn"], 0.8) == ""


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b\n")) == "a b"
    assert one_line("a sentence; ") == "a sentence;"
    assert one_line("a sentence.; ", 20) == "a sentence"
    assert [one_line("abcd", limit) for limit in (3, 4)] == ["abc…", "abcd"]


@pytest.mark.parametrize("kind", [ValueError, OSError, ImportError])
def test_an_error_of_a_component_is_one_line(kind: type[Exception]) -> None:
    with pytest.raises(ConfigError, match=r"^a b$"), as_config_error():
        raise kind("a\nb")
    with pytest.raises(TypeError), as_config_error():
        raise TypeError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("is damaged", "run=a: is damaged"),
        ("a: is damaged", "run=a: is damaged"),
        ("give run=b", "give run=b"),
    ],
)
def test_an_error_begins_with_its_setting(text: str, expected: str) -> None:
    for kind in (ConfigError, ValueError):
        with pytest.raises(ConfigError) as error, prefix_errors("run=a", ValueError):
            raise kind(text)
        assert str(error.value) == expected
    with pytest.raises(ValueError, match="is damaged"), prefix_errors("run=a"):
        raise ValueError("is damaged")


def test_control_characters_are_not_sent_to_a_terminal() -> None:
    assert printable(text := "größe\n" * 3) is text  # at once, as a log may have a hundred million characters
    assert printable("größe\n\x1b]0;title\x07 \r\u2028") == "größe\n\\x1b]0;title\\x07 \\r\\u2028"


def test_each_mistake_is_one_line_whatever_it_quotes() -> None:
    assert str(ConfigError("name=a\nb: no name", "seed=\r\u2028\x1b: no number")) == (
        "name=a\\nb: no name\nseed=\\r\\u2028\\x1b: no number"
    )
    with pytest.raises(ConfigError) as error, prefix_errors("run=a\nb"):
        raise ConfigError("model: no such option", "run=a\nb: is damaged")
    assert error.value.args == ("run=a\\nb: model: no such option", "run=a\\nb: is damaged")


def test_the_parts_of_a_mistake_are_kept_wherever_it_goes() -> None:
    made = Mistake.of("a", "is\nwrong", "remove it", value=1, kind="wrong_type")
    assert made == "a=1: is\\nwrong; remove it"
    other = pickle.loads(pickle.dumps(made.mapped(lambda text: text.replace("wrong", "odd"))))
    assert (other, other.kind) == ("a=1: is\\nodd; remove it", "wrong_type")
    assert other.parts == ("a", "1", "is\\nodd", "remove it")
    assert Mistake("a: b").parts is None
