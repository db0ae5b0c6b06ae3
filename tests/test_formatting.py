import json
import math

import pytest
import torch

from boltcutter.formatting import (
    aligned,
    format_duration,
    format_limit,
    format_number,
    parse_count,
    parse_duration,
    to_json,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0000"), (0.34412, "0.3441"), (-12.5, "-12.5000"), (1e-7, "1e-07"), (123456.0, "123456")],
)
def test_numbers_are_formatted(value: float, text: str) -> None:
    assert format_number(torch.tensor(value)) == text
    assert format_number(float("nan")) == "nan"


@pytest.mark.parametrize(
    ("text", "seconds", "limit"),
    [
        ("30m", 1800, "00:00:30:00"),
        ("90s", 90, "00:00:01:30"),
        ("8:00:00", 28_800, "00:08:00:00"),
        ("02:12:00:01", 216_001, "02:12:00:01"),
    ],
)
def test_time_limits_are_read_and_formatted(text: str, seconds: float, limit: str) -> None:
    assert parse_duration(text) == seconds
    assert format_limit(seconds) == limit
    assert [
        parse_duration(other) for other in ("soon", "30", "0m", "1:2", f"{'9' * 400}s", "1\N{FULLWIDTH DIGIT TWO}s")
    ] == [None] * 6


def test_counts_are_digits_of_ascii() -> None:
    assert [parse_count(text) for text in ("0", "12", "007")] == [0, 12, 7]
    others = ("", None, "-1", "1_0", " 1", "1\n", "x", "9" * 19, "9" * 5000, "\N{SUPERSCRIPT TWO}")
    assert [parse_count(text) for text in (*others, "\N{FULLWIDTH DIGIT TWO}", "\N{DEVANAGARI DIGIT ONE}")] == [
        None
    ] * 12


def test_durations_are_formatted() -> None:
    assert [format_duration(seconds) for seconds in (0, 9.6, 65, 3600, 100_000)] == [
        "0:00",
        "0:10",
        "1:05",
        "1:00:00",
        "27:46:40",
    ]


@pytest.mark.parametrize(
    ("left", "lines"),
    [
        (None, ["name  value", "a     1", "long  22"]),
        (1, ["name  value", "a         1", "long     22"]),
        (0, ["name  value", "   a      1", "long     22"]),
    ],
)
def test_columns_are_aligned(left: int | None, lines: list[str]) -> None:
    assert aligned([["name", "value"], ["a", "1"], ["long", "22"]], left) == lines


def test_json_has_no_nan() -> None:
    """RFC 8259 knows none, and most readers refuse it."""
    value = {"a": math.nan, "b": [math.inf, -math.inf, 1.5], "c": {"d": (2, None, "NaN")}}
    found = json.loads(to_json(value), parse_constant=pytest.fail)
    assert found == {"a": None, "b": [None, None, 1.5], "c": {"d": [2, None, "NaN"]}}


def test_a_line_end_in_a_cell_begins_no_row() -> None:
    assert aligned([["dog\nerror: forged", "1"], ["cat", "2"]]) == ["dog\\nerror: forged  1", "cat                 2"]
