import pytest

from boltcutter.launch.array import combinations, split


def test_every_value_of_one_key_meets_every_value_of_the_others() -> None:
    expected = [["seed=1", "lr=0.1"], ["seed=1", "lr=0.01"], ["seed=2", "lr=0.1"], ["seed=2", "lr=0.01"]]
    assert combinations("seed=1,2;lr=0.1,0.01") == expected
    assert combinations(["seed=1,2", "lr=0.1,0.01"]) == expected
    assert combinations("callback=default,[default,ema]") == [["callback=default"], ["callback=[default,ema]"]]


def test_commas_in_brackets_and_quotes_do_not_part_values() -> None:
    assert split("[1,2],{a: 1, b: 2},'x,y', z") == ["[1,2]", "{a: 1, b: 2}", "'x,y'", "z"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("seed", "launch.array=seed: cannot be read"),
        ("seed=1,", "launch.array=seed=1,: cannot be read"),
        ("seed=1,1", "launch.array=seed=1,1 has a value twice"),
        ("seed=1;seed=2", "has a key twice"),
    ],
)
def test_what_is_no_array_is_one_line(spec: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        combinations(spec)
