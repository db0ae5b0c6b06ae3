from pathlib import Path
from typing import Any

from boltcutter.config.settings import Settings
from boltcutter.replay.factors import find_factors

FOLDERS = Path("a"), Path("b")


def factors(one: Any, other: Any, **records: Any) -> list[tuple[str, list[str], bool]]:
    """Kind, keys and whether it matters of each factor."""
    first, second = ({name: pair[side] for name, pair in records.items()} for side in (0, 1))
    found = find_factors((Settings(one), Settings(other)), FOLDERS, (first, second), Path())
    return [(factor.kind, factor.keys, factor.matters) for factor in found]


def test_what_cannot_change_a_step_is_last() -> None:
    one = {"tags": ["a"], "task": {"lr": 0.1}, "data": {"num_workers": 0}}
    other = {"tags": ["b"], "task": {"lr": 0.2}, "data": {"num_workers": 2}}
    assert factors(one, other) == [
        ("setting", ["task.lr"], True),
        ("setting", ["tags"], False),
        ("setting", ["data.num_workers"], False),
    ]


def test_settings_of_another_class_are_one_factor() -> None:
    one = {"choices": {"model": "a"}, "model": {"_target_": "a.A", "width": 3}}
    other = {"choices": {"model": "b"}, "model": {"_target_": "b.B", "depth": 2}}
    assert factors(one, other) == [("setting", ["model"], True)]


def test_code_packages_and_hardware_are_factors() -> None:
    hardware = {"threads": 1, "memory_gib": 1.0}, {"threads": 2, "memory_gib": 2.0}
    found = factors(
        {},
        {},
        git=({"commit": "a"}, {"commit": "b"}),
        hardware=hardware,
        packages=({"x": "1"}, {"x": "2"}),
        data=("p", "q"),
    )
    assert [(kind, matters) for kind, _, matters in found] == [
        *(("code", True), ("packages", True), ("threads", True), ("data", True), ("hardware", False)),
    ]


def test_data_that_are_seen_to_differ_in_two_ways_are_one_factor() -> None:
    assert factors({}, {}, batches=({"1": "a"}, {"1": "b"}), data=("p", "q")) == [("data", [], True)]


def test_each_variable_is_a_factor_and_what_python_path_finds_another() -> None:
    one = {"variables": {"A": "1", "B": None}, "python": {"PYTHONPATH": None}}
    other = {"variables": {"A": "2", "B": "x"}, "python": {"PYTHONPATH": "/a", "sitecustomize": "/a/sitecustomize.py"}}
    found = factors({}, {}, environment=(one, other), python=("3.10", "3.11"))
    assert sorted(found) == [
        ("environment", ["A"], True),
        ("environment", ["B"], True),
        ("environment", ["PYTHONPATH"], True),
        ("packages", [], True),
    ]
