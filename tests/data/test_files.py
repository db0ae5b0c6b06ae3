import gzip
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from boltcutter.data.files import BLOCK_BYTES, ExpansionError, check_expansion, find_files, map_npy, sampled_hash
from boltcutter.data.image_io import read_image
from boltcutter.data.tabular import Tabular, read_table


def test_files_are_found_by_path_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.npy", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files(str(tmp_path), "data.path")] == ["a.bin", "b.npy"]
    assert find_files(f"{tmp_path}/c.txt", "data.path") == [tmp_path / "c.txt"]
    assert [path.name for path in find_files(f"{tmp_path}/*.n*", "data.path")] == ["b.npy"]
    with pytest.raises(ValueError, match=r"^data\.val=nothing/\*: no such file; give one, a folder of \.bin, \.npy"):
        find_files("nothing/*", "data.val")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data\.path=.*empty: no \.bin or \.npy file in this folder; give one"):
        find_files(f"{tmp_path}/empty", "data.path")


@pytest.mark.parametrize("name", ["a.npy", "a.csv", "a.parquet", "a.png"])
@pytest.mark.parametrize("is_fifo", [True, False])
def test_what_is_no_ordinary_file_is_not_opened(name: str, is_fifo: bool, tmp_path: Path) -> None:
    """A FIFO would block, and a device would fill the memory."""
    path = tmp_path / name
    if is_fifo:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    readers: dict[str, Callable[[Path], object]] = {"a.npy": map_npy, "a.png": lambda a: read_image(a, (1, 8, 8))}
    with pytest.raises(ValueError, match=rf"{name}: not an ordinary file; remove or replace it"):
        readers.get(name, read_table)(path)
    if name == "a.npy":
        with pytest.raises(ValueError, match=rf"{name}: not an ordinary file; remove or replace it"):
            find_files(str(tmp_path), "data.path")


def _write_gzip(path: Path) -> None:
    with gzip.open(path, "wb") as file:
        file.write(b"a,b\n" + b"1,2\n" * 100_000)


def _write_texts(path: Path) -> None:
    rows = np.zeros(300_000, np.int32)  # of one text that is stored once
    texts = pa.DictionaryArray.from_arrays(pa.array(rows), pa.array(["x" * 1000]))
    pq.write_table(pa.table({"a": texts, "b": rows}), path)


def _write_numbers(path: Path) -> None:
    pq.write_table(pa.table({"a": np.zeros(300_000), "b": np.zeros(300_000)}), path)


@pytest.mark.parametrize(
    ("name", "write"), [("a.csv.gz", _write_gzip), ("a.parquet", _write_texts), ("b.parquet", _write_numbers)]
)
def test_a_table_that_expands_to_any_size_is_refused(
    name: str, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    write(path)
    assert read_table(path).shape[1] == 2  # a small one in any case
    monkeypatch.setattr("boltcutter.files.ALWAYS_EXPANDED", 1 << 16)
    with pytest.raises(ValueError, match=rf"{name}: .*data\.max_expansion=40 .*raise it") as error:
        read_table(path, max_expansion=40)
    assert "\n" not in str(error.value)
    assert read_table(path, max_expansion=1e6).shape[1] == 2
    with pytest.raises(ValueError, match="max_expansion"):
        Tabular(path=path, target="b", max_expansion=40).setup("fit")


def test_no_memory_is_taken_for_what_a_parquet_file_claims(tmp_path: Path) -> None:
    """A text of a megabyte, a million times: without limits, 1 TB."""
    path, rows = tmp_path / "a.parquet", np.zeros(1_000_000, np.int32)
    texts = pa.DictionaryArray.from_arrays(pa.array(rows), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"a": texts}), path)
    assert path.stat().st_size < 1 << 20
    before = pa.total_allocated_bytes()
    with pytest.raises(ValueError, match="max_expansion"):
        read_table(path)
    assert pa.total_allocated_bytes() == before
    assert pa.default_memory_pool().max_memory() - before < 1 << 30


@pytest.mark.parametrize("value", [np.array(3), np.array(["a", "b"]), np.zeros(2, "i4,f4"), np.zeros((9, 0))])
def test_an_array_that_is_not_rows_of_numbers_is_one_line(value: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", value)
    with pytest.raises(ValueError, match=r"a\.npy: not a valid .npy file \(.*, not rows of numbers\); replace it$"):
        map_npy(tmp_path / "a.npy")


def test_the_hash_depends_on_size_time_and_blocks(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    seen = []
    for content, time in (
        (bytes(9 * BLOCK_BYTES), 1),
        (bytes(9 * BLOCK_BYTES), 2),
        (bytes(9 * BLOCK_BYTES + 1), 2),
        (b"1" * 9, 2),
    ):
        file.write_bytes(content)
        os.utime(file, (time, time))
        assert sampled_hash(file) == sampled_hash(file)
        seen.append(sampled_hash(file))
    assert len(set(seen)) == 4


def test_what_another_reader_would_expand_is_limited(tmp_path: Path) -> None:
    (many := tmp_path / "many.csv.gz").write_bytes(gzip.compress(bytes(3 << 20)))
    (single := tmp_path / "one.zip").write_bytes(b"")
    with zipfile.ZipFile(single, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", bytes(3 << 20))
    for file in (many, single):
        check_expansion(file, 3 << 20)
        with pytest.raises(ExpansionError):
            check_expansion(file, (3 << 20) - 1)


def test_a_large_gzip_file_of_somebody_else_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hand_over: Callable[[Path], None]
) -> None:
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(os.urandom(1 << 22)) + gzip.compress(bytes(1 << 26)))
    monkeypatch.setattr("boltcutter.data.files.MAX_COUNTED", 1 << 20)
    check_expansion(path, 1 << 25)  # of this user, as its first megabyte expands to less
    hand_over(path)
    with pytest.raises(ExpansionError):
        check_expansion(path, 1 << 25)
