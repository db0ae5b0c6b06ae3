import pytest

from boltcutter.config.values import split_values
from boltcutter_launch.command import combinations


def test_combinations_are_the_cartesian_product() -> None:
    expected = [["seed=1", "lr=0.1"], ["seed=1", "lr=0.01"], ["seed=2", "lr=0.1"], ["seed=2", "lr=0.01"]]
    assert combinations("seed=1,2;lr=0.1,0.01") == expected
    assert combinations(["seed=1,2", "lr=0.1,0.01"]) == expected
    assert combinations("callback=default,[default,ema]") == [["callback=default"], ["callback=[default,ema]"]]


def test_commas_in_brackets_and_quotes_do_not_split() -> None:
    assert split_values("[1,2],{a: 1, b: 2},'x,y', z") == ["[1,2]", "{a: 1, b: 2}", "'x,y'", "z"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("seed", "launch.array=seed: invalid syntax"),
        ("seed=1,", "launch.array=seed=1,: invalid syntax"),
        ("seed=1,1", "launch.array=seed=1,1 has a duplicate value"),
        ("seed=1;seed=2", "has a duplicate key"),
    ],
)
def test_invalid_arrays_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        combinations(spec)
