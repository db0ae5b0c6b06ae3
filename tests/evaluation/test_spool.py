import tracemalloc
from pathlib import Path

import numpy as np

from boltcutter.evaluation.spool import Spool, gather_rows


def test_rows_are_not_held_in_memory(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    tracemalloc.start()
    for number in range(100):
        spool.append({str(column): np.full(500, number, np.float32) for column in range(500)})  # 1 MB
    rows = spool.read(np.array([49_999, 0]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert spool.length == 50_000
    assert rows["7"].tolist() == [99, 0]
    assert peak < 5e6
    assert not [*tmp_path.iterdir()]  # the file has no name: nothing is left after a kill
    spool.close()


def test_columns_that_all_tables_have_are_kept_with_their_values(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "new")
    spool.append({"a": np.array([1, 2]), "b": np.array([True, False])})
    spool.append({"b": np.array([True]), "a": np.array([0.5]), "c": np.array([3])})
    spool.append({"c": np.array([3]), "a": np.array([7], np.int8), "b": np.array([False])})
    assert spool.dropped == {"c"}
    found = spool.read(slice(None))
    assert found["a"].tolist() == [1, 2, 0.5, 7]
    assert found["b"].tolist() == [True, False, True, False]
    spool.append({"c": np.array([3])})
    assert spool.dropped == {"a", "b", "c"}
    assert spool.read(slice(None)) == {}
    spool.close()


def test_rows_of_one_rank_are_read_in_any_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    spool.append({"a": np.arange(5)})
    assert spool.dtype
    assert gather_rows(spool, spool.dtype, [5], np.array([4, 0, 4]), 0, 1)["a"].tolist() == [4, 0, 4]
    spool.close()
