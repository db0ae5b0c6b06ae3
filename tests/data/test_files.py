import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boltcutter_data.files import BLOCK_BYTES, find_files, map_npy, sampled_hash
from boltcutter_data.image_io import read_image
from boltcutter_data.tabular import read_table


def test_files_are_found_by_path_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.npy", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files(str(tmp_path), "data.path")] == ["a.bin", "b.npy"]
    assert find_files(f"{tmp_path}/c.txt", "data.path") == [tmp_path / "c.txt"]
    assert [path.name for path in find_files(f"{tmp_path}/*.n*", "data.path")] == ["b.npy"]
    with pytest.raises(ValueError, match=r"^data\.val=nothing/\*: no such file; give one, a folder of \.bin, \.npy"):
        find_files("nothing/*", "data.val")


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


@pytest.mark.parametrize("value", [np.array(3), np.array(["a", "b"]), np.zeros(2, "i4,f4")])
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
