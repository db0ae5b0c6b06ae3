from __future__ import annotations

from typing import Any

import optuna
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.search.space import Choice, Grid, Range, Space


def sample(texts: dict[str, Any], times: int = 200) -> list[dict[str, Any]]:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [Space(texts).sample(study.ask()) for _ in range(times)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uniform(0, 0.5)", Range(0.0, 0.5)),
        ("uniform( -1e-3 ,1 )", Range(-0.001, 1.0)),
        ("loguniform(1e-5, 1e-1)", Range(1e-5, 0.1, log=True)),
        ("int(1, 8)", Range(1, 8)),
        ("logint(16, 512)", Range(16, 512, log=True)),
        ("choice(relu, gelu)", Choice(("relu", "gelu"))),
        ("choice([64], [64, 32])", Choice(("[64]", "[64, 32]"))),
        ("choice({a: 1, b: 2}, null)", Choice(("{a: 1, b: 2}", "null"))),
        ("choice('a, b', c)", Choice(("'a, b'", "c"))),
        ("grid(1, 2, 4)", Grid(("1", "2", "4"))),
    ],
)
def test_distributions(text: str, expected: object) -> None:
    found = Space({"key": text}).parameters[0].distribution
    assert found == expected
    assert not isinstance(found, Range) or found.is_integer == ("int" in text)


def test_samples_lie_within_the_bounds() -> None:
    texts = {"a": "uniform(0, 0.5)", "b": "loguniform(1e-5, 1e-1)", "c": "int(1, 3)", "d": "logint(16, 512)"}
    samples = sample({**texts, "e": "choice([64], [64, 32])"})
    assert all(0 <= s["a"] <= 0.5 and 1e-5 <= s["b"] <= 1e-1 and 16 <= s["d"] <= 512 for s in samples)
    assert {s["c"] for s in samples} == {1, 2, 3}
    assert {s["e"] for s in samples} == {"[64]", "[64, 32]"}
    assert 60 < sum(s["b"] < 1e-3 for s in samples) < 140  # the logarithm is uniform
    assert Space(texts).log_keys == {"b", "d"}


def test_a_parameter_is_sampled_only_where_its_condition_holds() -> None:
    texts = {
        "optimizer": "choice(adamw, sgd)",
        "optimizer.momentum": "uniform(0, 0.99) if optimizer == sgd",
        "optimizer.nesterov": "choice(true, false) if optimizer == sgd",
        "task.x": "int(1, 2) if optimizer.nesterov == true",
    }
    samples = sample(texts)
    for values in samples:
        assert ("optimizer.momentum" in values) == (values["optimizer"] == "sgd")
        assert ("task.x" in values) == (values.get("optimizer.nesterov") == "true")
    assert len({tuple(values) for values in samples}) == 3
    probes = [values for parameter, values in Space(texts).probes() if parameter.key == "task.x"]
    assert probes[0] == {"optimizer.nesterov": "true", "optimizer": "sgd", "task.x": 1}


def test_grids_are_combined_but_for_conditions_that_do_not_hold() -> None:
    space = Space({"a": "grid(1, 2)", "b": "uniform(0, 1)", "c": "grid(x, y) if a == 2"})
    assert space.combinations() == [{"a": "1"}, {"a": "2", "c": "x"}, {"a": "2", "c": "y"}]
    assert Space({"b": "uniform(0, 1)"}).combinations() == [{}]


def test_keys_may_be_nested_and_removed() -> None:
    space = Space({"optimizer": {"lr": "uniform(0, 1)", "betas": None}, "data.batch_size": "int(1, 2)"})
    assert [p.key for p in space.parameters] == ["optimizer.lr", "data.batch_size"]


@pytest.mark.parametrize(
    ("texts", "problem", "remedy"),
    [
        ({"a": "0.1"}, "search.space.a=0.1 is not a distribution", "write one such as loguniform("),
        ({"a": "[1, 2]"}, "search.space.a=[1, 2] is not a distribution", "choice(a, b)"),
        ({"a": "unifrom(0, 1)"}, "no such distribution", "did you mean uniform"),
        ({"a": "uniform(0)"}, "expected two numbers", "write uniform(low, high)"),
        ({"a": "uniform(0, x)"}, "expected two numbers", "write uniform(low, high)"),
        ({"a": "uniform(1, 0)"}, "search.space.a=uniform(1, 0): the range is empty", "smaller bound first"),
        ({"a": "int(2, 2)"}, "the range is empty", "smaller bound first"),
        ({"a": "loguniform(0, 1)"}, "the range of positive numbers is empty", "smaller bound first"),
        ({"a": "int(0.5, 2)"}, "expected two integers", "write int(low, high)"),
        ({"a": "uniform(0, nan)"}, "the range is empty", "smaller bound first"),
        ({"a": "choice()"}, "values must be given", "write choice(a, b)"),
        ({"a": "grid(1, 1)"}, "values must be given and differ", "write grid(a, b)"),
        ({"a": "int(1, 2) if b == 1"}, "b is no earlier key", "list it before"),
        ({"optimizer": "choice(x, y)", "a": "int(1, 2) if optimzer == x"}, "optimzer is no", "did you mean optimizer"),
        ({"b": "choice(x, y)", "a": "int(1, 2) if b == z"}, "b is never z", "use one of x, y"),
        ({"b": "uniform(0, 1)", "a": "int(1, 2) if b == 0"}, "b is no choice", "list its values"),
    ],
)
def test_mistakes(texts: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Space(texts)
    message = str(caught.value)
    assert message.startswith("search.space.a=")
    assert "\n" not in message
    assert problem in message
    assert remedy in message
