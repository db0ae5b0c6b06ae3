from __future__ import annotations

import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.tries.question import Size, parse_request

GIVEN = ["optimizer.lr=0.1", "metric=val/accuracy", "effect=0.5%"]


def test_arguments_are_told_from_overrides_of_the_change() -> None:
    request = parse_request([*GIVEN, "runs=elsewhere", "seed=7", "~callback.ema", "against=model=mlp", "--again"])
    assert request.change == ["optimizer.lr=0.1", "~callback.ema"]
    assert (request.common, request.seed, request.against, request.again) == (["runs=elsewhere"], 7, "model=mlp", True)
    assert (request.question.mode, request.question.budget) == ("max", 12)


def test_sizes_are_absolute_or_relative() -> None:
    assert Size.parse("effect", "0.5%").resolve(-0.8) == pytest.approx(0.004)
    assert Size.parse("effect", "0.02").resolve(0.8) == 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        "effect=",
        "effect=small",
        "effect=0",
        "effect=nan",
        "effect=-1%",
        "margin=0.01",
        "margin=1%",
        "budget=4",
        "budget=21",
        "budget=x",
        "mode=more",
        "metric=test/accuracy",
        "metric=val/score",
        "metric=throughput/samples_per_second",
        "not_worse=val/loss",
        "not_worse=val/loss:0%",
        "not_worse=val/loss:x",
        "not_worse=val/score:1%",
        "not_worse=val/accuracy:1%",
        "not_worse=val/loss:1%,val/loss:2%",
        "not_worse=test/loss:1%",
        "metric=",
        "split=by_seed",
        "parallel=0",
        "gpus=x",
        "seed=x",
    ],
)
def test_mistakes_name_the_setting(wrong: str) -> None:
    key = "metric" if "test/" in wrong else wrong.partition("=")[0]
    with pytest.raises(ConfigError, match=key):
        parse_request([*(argument for argument in GIVEN if not argument.startswith(key)), wrong])


def test_metrics_that_must_not_get_worse() -> None:
    question = parse_request([*GIVEN, "not_worse=time/step:2%,val/loss:0.01"]).question
    assert [(c.metric, c.mode, str(c.tolerance)) for c in question.constraints] == [
        ("time/step", "min", "2%"),
        ("val/loss", "min", "0.01"),
    ]


@pytest.mark.parametrize("wrong", ["parallel=2", "mode=max"])
def test_speed_is_measured_one_run_at_a_time_and_less_is_better(wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong) as error:
        parse_request(["a=1", "effect=1%", "metric=time/step", wrong])
    assert error.value.mistakes[0].kind == "conflict"
    assert parse_request(["a=1", "effect=1%", "metric=memory/peak"]).question.mode == "min"


def test_the_test_split_needs_a_flag() -> None:
    given = [*GIVEN[::2], "metric=test/accuracy"]
    assert parse_request([*given, "--final"]).question.is_final
