import os
from pathlib import Path

import pytest

from boltcutter_data.files import BLOCK_BYTES, find_files, sampled_hash


def test_files_are_found_by_path_folder_and_pattern(tmp_path: Path) -> None:
    for name in ("b.npy", "a.bin", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in find_files(str(tmp_path), "data.path")] == ["a.bin", "b.npy"]
    assert find_files(f"{tmp_path}/c.txt", "data.path") == [tmp_path / "c.txt"]
    assert [path.name for path in find_files(f"{tmp_path}/*.n*", "data.path")] == ["b.npy"]
    with pytest.raises(ValueError, match=r"^data\.val=nothing/\*: no such file; give one, a folder of \.bin, \.npy"):
        find_files("nothing/*", "data.val")


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
