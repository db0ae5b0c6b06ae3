from pathlib import Path

import numpy as np
import pandas as pd

from boltcutter.evaluation.table import concatenate, count_rows, select_rows, write_csv


def test_numbers_are_read_back_exactly(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    table = {
        "index": np.arange(25_000),
        "double": random.normal(size=25_000) * 1e-9,
        "single": random.normal(size=25_000).astype(np.float32),
        "flag": random.random(25_000) < 0.5,
    }
    write_csv(tmp_path / "new" / "table.csv", table)
    found = pd.read_csv(tmp_path / "new" / "table.csv", float_precision="round_trip")
    assert list(found) == list(table)
    assert all((found[name].to_numpy().astype(column.dtype) == column).all() for name, column in table.items())


def test_texts_are_quoted(tmp_path: Path) -> None:
    texts = ['a, "b"', "line\nbreak", "ß"]
    write_csv(tmp_path / "table.csv", {"text": texts, "value": [1.5, float("nan"), float("inf")]})
    found = pd.read_csv(tmp_path / "table.csv")
    assert found["text"].tolist() == texts
    assert np.array_equal(found["value"], [1.5, np.nan, np.inf], equal_nan=True)


def test_tables_are_joined_by_their_common_columns() -> None:
    first = {"a": np.array([1, 2]), "b": np.array([3, 4])}
    joined = concatenate([first, {"b": np.array([5]), "a": np.array([6])}, {"a": np.array([7])}])
    assert {name: column.tolist() for name, column in joined.items()} == {"a": [1, 2, 6, 7]}
    assert concatenate([]) == {}


def test_rows_are_counted_and_selected() -> None:
    table = {"a": np.array([1, 2, 3]), "b": np.array([4, 5, 6])}
    assert {name: column.tolist() for name, column in select_rows(table, [2, 0]).items()} == {"a": [3, 1], "b": [6, 4]}
    assert count_rows(table) == 3
    assert count_rows(select_rows(table, [])) == 0
    assert count_rows({}) == 0
