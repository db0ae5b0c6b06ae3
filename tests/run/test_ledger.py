import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boltcutter.config.errors import ConfigError
from boltcutter.run.ledger import (
    ROW,
    SIZE,
    Ledger,
    first_difference,
    header,
    ledger_path,
    mean_over_ranks,
    read_ledger,
    read_ledgers,
)


def rows(count: int = 5, **changed: Any) -> Any:
    """Rows of consecutive steps; ``loss={3: 0.5}`` changes that of step 3."""
    found = np.zeros(count, ROW)
    found["step"], found["epoch"], found["lr"] = np.arange(1, count + 1), 1, 0.1
    found["loss"], found["gradient_norm"] = 1 / found["step"], np.nan
    found["samples"] = found["gradient"] = found["step"] + 100
    for name, values in changed.items():
        for step, value in values.items():
            found[name][step - 1] = value
    return found


def write(path: Path, content: Any, extra: bytes = b"") -> Path:
    path.write_bytes(header("cpu") + content.tobytes() + extra)
    return path


def test_rows_have_64_bytes_and_are_read_as_written(tmp_path: Path) -> None:
    assert SIZE == ROW.itemsize == len(header("cpu")) == 64
    found = read_ledger(write(tmp_path / "steps.ledger", rows(3)))
    assert found is not None
    assert found.device == "cpu"
    assert found.last == 3
    assert found.rows["loss"].tolist() == [1.0, 0.5, 1 / 3]


@pytest.mark.parametrize("tail", [b"\x07" * 63, b"\0" * 64, rows(2).tobytes(), b"\0" * 200])
def test_a_torn_tail_is_left_out(tail: bytes, tmp_path: Path) -> None:
    found = read_ledger(write(tmp_path / "steps.ledger", rows(3), tail))
    assert found is not None
    assert found.rows["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("content", [None, b"", b"boltcutter", b"\0" * 640])
def test_a_file_that_is_no_ledger_is_none(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        ledger_path(tmp_path).write_bytes(content)
    assert list(read_ledgers(tmp_path)) == []


def test_ledgers_of_all_ranks_are_read(tmp_path: Path) -> None:
    for rank in (0, 1):
        write(ledger_path(tmp_path, rank), rows(rank + 1))
    assert [ledger.last for ledger in read_ledgers(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    ("changed", "step", "columns"),
    [
        ({}, None, ()),
        ({"loss": {3: 1 / 3 + 1e-16}}, 3, ("loss",)),
        ({"loss": {4: 9.0}, "gradient": {3: 7}}, 3, ("gradient",)),
        ({"loss": {2: np.nan}, "samples": {2: 5}, "lr": {1: 0.1}}, 2, ("samples", "loss")),
        ({"weights": {4: 5}}, None, ()),  # only one of them has hashed it
        ({"gradient_norm": {5: 1.0}}, 5, ("gradient_norm",)),
    ],
)
def test_the_first_step_that_differs(changed: dict[str, Any], step: int | None, columns: tuple[str, ...]) -> None:
    found = first_difference(Ledger("cpu", rows()), Ledger("cpu", rows(**changed)))
    assert (found and found.step) == step
    assert (found.columns if found else ()) == columns


def test_only_common_steps_are_compared() -> None:
    assert first_difference(Ledger("cpu", rows(5)), Ledger("cpu", rows(3))) is None


def test_the_mean_over_ranks_is_that_of_all_samples_and_has_no_digests() -> None:
    one, other = Ledger("cpu", rows(loss={2: 3.0})), Ledger("cpu", rows(4, loss={2: 5.0}))
    found = mean_over_ranks([one, other])
    assert (found.last, found.rows["loss"][1]) == (4, 4.0)
    assert first_difference(found, one) is not None
    assert first_difference(found, mean_over_ranks([Ledger("cpu", rows(loss={2: 4.0}))])) is None


def test_columns_can_be_left_out() -> None:
    other = Ledger("cpu", rows(gradient={1: 5}, loss={4: 2.0}))
    found = first_difference(Ledger("cpu", rows(gradient={1: 6})), other, without=("gradient",))
    assert found
    assert (found.step, found.columns) == (4, ("loss",))


def test_digests_of_gradients_of_different_devices_are_not_compared() -> None:
    assert first_difference(Ledger("cpu", rows()), Ledger("cuda", rows(gradient={1: 5}))) is None


def test_the_holes_of_a_ledger_of_somebody_else_take_no_memory(tmp_path: Path) -> None:
    with open(ledger_path(tmp_path), "wb") as file:
        file.write(header("cpu"))
        file.truncate(1 << 42)
    found = read_ledger(ledger_path(tmp_path))
    assert found
    assert len(found.rows) == 0


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_ordinary_file_is_no_ledger(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(ledger_path(tmp_path))
    with pytest.raises(ConfigError, match=r"steps\.ledger: not an ordinary file"):
        read_ledger(ledger_path(tmp_path))


def test_millions_of_steps_are_compared_some_at_a_time() -> None:
    rows = np.zeros(3_000_000, ROW)
    rows["step"], rows["loss"] = np.arange(1, len(rows) + 1), 1.0
    other = rows[1000:].copy()
    other["loss"][[2_000_000, 2_500_000]] = 2.0
    tracemalloc.start()
    try:
        found = first_difference(Ledger("cpu", rows), Ledger("cpu", other))
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()
    assert found
    assert (found.step, found.columns) == (2_001_001, ("loss",))
    assert first_difference(Ledger("cpu", rows[:1000]), Ledger("cpu", other)) is None
    assert first_difference(Ledger("cpu", rows[:0]), Ledger("cpu", other)) is None
