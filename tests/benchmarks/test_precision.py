from benchmarks.precision import WORK, rows
from conftest import Script


def test_the_configuration_of_each_row_is_valid(script: Script) -> None:
    for overrides in rows(cuda=True, eight=False).values():
        done = script("train", *WORK, *overrides, "--check")
        assert done.returncode == 0, done.stderr


def test_tf32_and_float8_need_a_gpu() -> None:
    without = rows(cuda=False, eight=False).keys()
    assert rows(cuda=True, eight=False).keys() - without == {"TF32"}
    assert rows(cuda=True, eight=True).keys() - without == {"TF32", "float8"}
