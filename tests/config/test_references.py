from typing import Any

import pytest

from boltcutter.config.references import multiplies

DOUBLING = {f"a{level}": f"${{a{level + 1}}}${{a{level + 1}}}" for level in range(150)} | {"a150": "x"}


@pytest.mark.parametrize(
    "node",
    [
        {"a": ["${b.${c}}/${c}"] * 100, "b": {"x": 1}, "c": "x"},  # a computed key
        {"a": "${b}${b}", "b": "${a}${a}"} | {f"c{n}": "${d}-${d}" for n in range(30)} | {"d": "x"},  # a circle
        {"files": ["x" * 100] * 30_000, "a": ["${b}-${b}"] * 100, "b": "y"},
        {f"a{n}": f"${{a{n + 1}}}" for n in range(90)} | {"a90": "${b}" * 30, "b": "x"},
    ],
)
def test_what_the_user_writes_is_refused_only_if_it_multiplies(node: Any) -> None:
    assert multiplies(node, is_own=True) is None


def test_a_text_with_which_references_expand_too_far_is_named() -> None:
    assert multiplies({"tags": ["${a130}"]} | DOUBLING, is_own=True) in DOUBLING
    assert multiplies(DOUBLING)
    assert multiplies({f"a{level}": [f"${{a{level + 1}}}"] * 3 for level in range(12)} | {"a12": "x"}, is_own=True)
    assert multiplies({"a": "b"}) is None


def test_a_computed_key_in_a_record_of_somebody_else_is_no_multiplication() -> None:
    ordinary = {f"k{n}": "${name}" for n in range(20)} | {"task": {"model": "${model}"}, "folder": "${name}-${seed}"}
    record = ordinary | {"name": "x", "seed": 1, "model": {"size": "${sizes.${name}}"}, "sizes": {"x": 1}}
    assert multiplies(record) is None
