"""Filters of runs."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from boltcutter.analysis.query import find_fault, parse, select
from boltcutter.analysis.record import Run
from boltcutter.config.errors import ConfigError


def make(id: str, accuracy: float | None, **more: Any) -> Run:
    settings = {"seed": 0, "data.batch_size": 64, "choices.model": "resnet", "data.num_folds": None, "logger": None}
    values: dict[str, Any] = {"name": "digits", "status": "completed", "started": time.time() - 3 * 86400}
    values |= {"seconds": 600.0, "settings": settings | more.pop("settings", {}), "folder": Path("runs", id)}
    return Run(id=id, metrics={} if accuracy is None else {"val/accuracy": accuracy, "lr-AdamW": 0.1}, **values | more)


RUNS = [
    make("a", 0.9, tags=("paper", "v2"), note="the first one"),
    make("b", 0.99, settings={"seed": 1, "choices.model": "convnet", "data.shape": [1, 8, 8], "amp": True}),
    make("c", float("nan"), status="failed", seconds=None, started=time.time() - 60),
    make("d", None, kind="trial", parent="s", settings={"data.num_folds": 5, "text": "a b"}),
]


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", "abcd"),
        ("val/accuracy>0.95", "b"),
        ("val/accuracy >= .9", "ab"),
        ("val/accuracy<1", "ab"),  # neither NaN nor a metric that is missing
        ("model=resnet and not status=failed", "ad"),
        ("model!=resnet", "b"),
        ("not model=resnet", "b"),
        ("choices.model=convnet", "b"),
        ("seed=1 or status=failed and model=resnet", "bc"),  # and binds more closely
        ("(seed=1 or status=failed) and model=resnet", "c"),
        ("not (seed=1 or status=failed)", "ad"),
        ("not not seed=1", "b"),
        ("age<1h", "c"),
        ("age>2d and age<=1w", "abd"),
        ("time>=10m", "abd"),
        ("started<2026-01-01", "abcd" if time.time() < 1767222000 else ""),
        ("tag=paper", "a"),
        ("tag!=paper", "bcd"),
        ("tag~^v", "a"),
        ("note~first", "a"),
        ("note='the first one'", "a"),
        ('text="a b"', "d"),
        ("kind=trial", "d"),
        ("search=s", "d"),
        ("data.num_folds=null", "abc"),
        ("data.num_folds>=5", "d"),
        ("data.shape=[1, 8, 8]", "b"),
        ("amp=true", "b"),
        ("amp>0", ""),  # no number
        ("seed=0.0", "acd"),
        ("id~'^(a|b)$'", "ab"),
        ("'val/accuracy'=0.9", "a"),
        ("lr-AdamW<1", "abc"),
        ("folder~runs/b", "b"),
    ],
)
def test_filters_select(text: str, ids: str) -> None:
    assert "".join(run.id for run in select(RUNS, text)) == ids


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("val/acuracy>1", 1, "did you mean val/accuracy?"),
        ("seed=0 and accuracy>1", 12, "did you mean val/accuracy?"),
        ("batch_size=1", 1, "did you mean data.batch_size?"),
        ("nothing_like_it=1", 1, "fields are id, name"),
        ("seed", 5, "an operator was expected"),
        ("seed=", 6, "a value was expected; write seed=<value>"),
        ("seed==0", 6, "a value was expected"),
        ("seed=0 or", 10, "a comparison was expected"),
        ("(seed=0", 8, "close the parenthesis"),
        ("seed=0)", 7, ") where"),
        ("seed=0 seed=1", 8, "and, or or the end"),
        ("=0", 1, "= where a comparison"),
        ("age<3x", 5, "3x is not a duration; write one as 30s, 10m, 3h, 7d or 2w"),
        ("started>soon", 9, "soon is not a date"),
        ("val/accuracy>high", 14, "high is not a number"),
        ("name~'('", 6, "no regular expression"),
        ("(" * 200 + "seed=0" + ")" * 200, 102, "more than 100 levels"),
        ("not " * 5000 + "seed=0", 405, "more than 100 levels"),
    ],
)
def test_mistakes_are_one_line_with_the_position(text: str, position: int, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(RUNS, text)
    message = str(caught.value)
    assert message.startswith(f"filter={text}: position {position}: ")
    assert words in message
    assert "\n" not in message


def test_nothing_in_a_filter_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    for text in (f"name=__import__('os').mkdir('{marker}')", f"name=${{oc.create:{marker}}}", f"__class__={marker}"):
        with suppress(ConfigError):
            assert select(RUNS, text) == []
    assert os.listdir(tmp_path) == []


def test_a_filter_of_no_runs_is_parsed() -> None:
    assert select([], "unknown=1") == []
    with pytest.raises(ConfigError, match="operator"):
        select([], "unknown")
    assert parse("seed=1")(RUNS[1])


def test_a_key_is_known_if_one_run_has_it() -> None:
    for key in ("age", "val/accuracy", "data.shape", "choices.model", "model"):
        assert find_fault(RUNS, key) is None
    assert find_fault([], "unknown") is None
    assert find_fault(RUNS, "modle") == "no metric, setting or field of these runs; did you mean model?"
