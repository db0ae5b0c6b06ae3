from conftest import Script

from boltcutter.bench.precision import WORK, rows


def test_every_row_is_a_training_that_can_begin(script: Script) -> None:
    for words in rows(cuda=True, eight=False).values():
        done = script("train", *WORK, *words, "--check")
        assert done.returncode == 0, done.stderr


def test_tf32_is_measured_where_there_is_a_gpu() -> None:
    without = rows(cuda=False, eight=False).keys()
    assert rows(cuda=True, eight=False).keys() - without == {"TF32"}
    assert rows(cuda=True, eight=True).keys() - without == {"TF32", "float8"}
