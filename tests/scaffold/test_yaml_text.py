import pytest

from boltcutter.scaffold.yaml_text import parse, without


def test_a_removed_key_takes_what_is_below_it() -> None:
    text = "a: 1\nb:\n  c: 2\n\n  d: 3  # kept with b\ne:\n- 1\n\n\n# of e\n- 2\n\n# of f\nf: 4\n"
    assert without(text, "b", "e") == "a: 1\n\n# of f\nf: 4\n"


def test_python_tuples_are_lists() -> None:
    text = (
        "a: !!python/tuple [1, 2]\nb: !!python/unicode x\nc: !!python/none ''\nd: !!python/dict {e: !!python/int '3'}\n"
    )
    assert parse(text) == {"a": [1, 2], "b": "x", "c": None, "d": {"e": 3}}


def test_python_objects_are_refused_with_their_place() -> None:
    with pytest.raises(ValueError, match=r"!!python/object:os.system is an object; .* line 2, column 4"):
        parse("a: 1\nb: !!python/object:os.system {}\n")
    with pytest.raises(ValueError, match="class_path or _target_"):
        parse("b: !!python/name:torch.nn.ReLU ''\n")
