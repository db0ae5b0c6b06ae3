import csv
import os
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from boltcutter.report.csv_table import write_csv


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = {
        "index": np.arange(25_000),
        "double": random.normal(size=25_000) * 1e-9,
        "single": random.normal(size=25_000).astype(np.float32),
        "flag": random.random(25_000) < 0.5,
    }
    write_csv(tmp_path / "new" / "table.csv", table)
    found = pd.read_csv(tmp_path / "new" / "table.csv", dtype={"double": str})
    assert list(found) == list(table)
    assert all((found[name].to_numpy().astype(column.dtype) == column).all() for name, column in table.items())


def test_text_of_data_is_no_formula(tmp_path: Path) -> None:
    texts = ['=HYPERLINK("http://evil.example")', "+1", "-2", "@SUM(A1)", "\tx", "\rx", "plain=1", "a\r=1"]
    for column in (texts, np.array(texts, dtype=object)):
        write_csv(tmp_path / "table.csv", {"=name": column, "value": np.full(8, -0.5, np.float32)})
        with open(tmp_path / "table.csv", newline="") as file:
            header, *rows = csv.reader(file)
        assert header == ["'=name", "value"]
        assert [value for _, value in rows] == ["-0.5"] * 8
        assert [name for name, _ in rows] == [*(f"'{text}" for text in texts[:5]), "'\nx", "plain=1", "a\n=1"]


def test_texts_are_quoted(tmp_path: Path) -> None:
    texts = ['a, "b"', "line\nbreak", "ß"]
    write_csv(tmp_path / "table.csv", {"text": texts, "value": [1.5, float("nan"), float("inf")]})
    found = pd.read_csv(tmp_path / "table.csv")
    assert found["text"].tolist() == texts
    assert np.array_equal(found["value"], [1.5, np.nan, np.inf], equal_nan=True)


def test_a_fifo_in_place_of_the_table_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "table.csv")
    with pytest.raises(OSError, match="No such device or address"):
        write_csv(tmp_path / "table.csv", {"a": [1]})


def test_a_pipe_gets_a_whole_table(tmp_path: Path) -> None:
    """Also one that is larger than the pipe, whose reader is slow."""
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as pool, os.fdopen(read) as reader:
        written = pool.submit(write_csv, Path(f"/dev/fd/{write}"), {"a": np.arange(50_000)})
        time.sleep(0.5)
        lines = [reader.readline() for _ in range(50_001)]
        written.result()
        os.close(write)
    assert lines[-1] == "49999\n"


@pytest.mark.slow
def test_writing_a_wide_table_takes_little_memory(tmp_path: Path) -> None:
    table = {str(number): np.zeros(5000, np.float32) for number in range(200)}
    tracemalloc.start()
    write_csv(tmp_path / "wide.csv", table)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60e6  # 1e6 cells as text of 128 bytes each are 128 MB
