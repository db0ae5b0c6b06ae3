import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boltcutter.data.loader import FETCH_BYTES
from boltcutter.data.sampler import Batch
from boltcutter.data.tokenizer import train_bpe
from boltcutter.data.tokens import Tokens, TokenWindows


def tokens(path: Path | str, **settings: Any) -> Tokens:
    data = Tokens(path=str(path), **{"shape": (8,), "vocab_size": 1000, "batch_size": 4} | settings)
    data.setup("fit")
    return data


def write(path: Path, values: Any, dtype: str = "uint16") -> Path:
    np.asarray(values, dtype).tofile(path)
    return path


def windows(data: Tokens, split: str) -> list[list[int]]:
    return [row for inputs, _ in data.loader(split) for row in inputs.tolist()]  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int64"])
def test_windows_follow_the_order_of_files(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a.bin", range(30), dtype)
    write(tmp_path / "b.bin", range(100, 127), dtype)
    np.save(tmp_path / "val.npy", np.arange(50, 80, dtype=dtype))
    data = tokens(f"{tmp_path}/*.bin", val=f"{tmp_path}/val.npy", test=f"{tmp_path}/val.npy", dtype=dtype)
    assert windows(data, "val") == [list(range(at, at + 8)) for at in (50, 58, 66)]
    batch = next(iter(data.train_dataloader()))
    assert torch.equal(batch[0].long() + 1, batch[1].long())
    assert len(data.splits.train) == 4  # type: ignore[union-attr]  # (29 - 8) // 8 and (26 - 8) // 8:


def test_epochs_have_different_windows_without_overlap(tmp_path: Path) -> None:
    data = tokens(write(tmp_path / "a.bin", range(900)), split=(0.9, 0.05, 0.05))
    loader, firsts = data.train_dataloader(), set()
    for epoch in range(4):
        loader.sampler.set_epoch(epoch)
        rows = sorted(row for inputs, _ in loader for row in inputs.tolist())
        assert rows == sorted(row for inputs, _ in loader for row in inputs.tolist())
        flat = [token for row in rows for token in row]
        assert len(set(flat)) == len(flat)
        firsts.add(rows[0][0] % 8)
    assert len(firsts) > 1


def test_val_and_test_are_fractions_of_each_file(tmp_path: Path) -> None:
    write(tmp_path / "a.bin", range(200))
    write(tmp_path / "b.bin", range(500, 700))
    data = tokens(tmp_path, split=(0.8, 0.1, 0.1))
    assert windows(data, "val") == [list(range(at, at + 8)) for at in (160, 168, 660, 668)]
    assert windows(data, "test") == [list(range(at, at + 8)) for at in (180, 188, 680, 688)]
    alone = tokens(tmp_path / "a.bin", val=f"{tmp_path}/b.bin", split=(0.8, 0.1, 0.1))
    assert windows(alone, "test")[-1][-1] <= 199
    assert windows(alone, "val")[0] == list(range(500, 508))


def test_200_gb_are_opened_at_once(tmp_path: Path) -> None:
    before, path = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(200_000_000_000)
    data = tokens(path, shape=(1024,))
    known, first = data.fingerprint(), next(iter(data.train_dataloader()))
    assert first[0].shape == (4, 1024)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2**19  # KiB; the order alone would take 0.8 GB
    loader = data.train_dataloader()
    assert loader.sampler.num_samples == (98_000_000_000 - 1024) // 1024
    state = data.state_dict()
    again = tokens(path, shape=(1024,))
    state["position"]["samples_seen"] = 40_000_000
    again.load_state_dict(state)
    next(iter(again.train_dataloader()))
    assert again.fingerprint() == known


def test_fingerprint_depends_on_the_contents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.bin", np.zeros(100_000))
    known = {tokens(path).fingerprint()}
    assert tokens(path).fingerprint() in known
    stat = path.stat()
    with open(path, "r+b") as file:
        file.seek(100)
        file.write(b"\1")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    known.add(tokens(path).fingerprint())
    os.utime(path, (1, 1))
    known.add(tokens(path).fingerprint())
    write(path, np.zeros(100_001))
    known.add(tokens(path).fingerprint())
    assert len(known) == 4


def test_a_tokenizer_gives_lengths_and_text(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(train_bpe([b"def main():\n" * 20], 270))
    data = tokens(write(tmp_path / "a.bin", range(300)), tokenizer=str(file), split=(0.5, 0.25, 0.25))
    assert len(data.statistics["token_bytes"]) == 1000
    assert data.tokenizer.decode(data.tokenizer.encode(b"def main")) == "def main"
    plain = tokens(tmp_path / "a.bin", split=(0.5, 0.25, 0.25))
    assert plain.statistics == {}
    with pytest.raises(ValueError, match=r"^data.tokenizer is not set, so these tokens cannot be decoded; set it to"):
        _ = plain.tokenizer


@pytest.mark.parametrize(
    ("name", "contents", "settings", "message"),
    [
        (
            "a.bin",
            b"\0" * 801,
            {},
            "a.bin: 801 bytes are not a whole number of 2-byte tokens; the file is truncated, or ",
        ),
        ("a.bin", b"", {}, "a.bin: 0 bytes are not a whole number"),
        ("a.npy", b"\x93NUMPY", {}, "a.npy: not a valid .npy file .*; replace it"),
        ("a.bin", b"\0" * 8, {}, "a.bin: 4 tokens are too few for a window of 8; lower data.shape="),
        (
            "a.bin",
            b"\0" * 800,
            {"val": "none.bin"},
            "data.val=none.bin: no such file; give one, a folder of",
        ),
    ],
)
def test_damaged_files_are_one_line_errors(
    tmp_path: Path, name: str, contents: bytes, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(ValueError, match=message) as error:
        tokens(tmp_path / name, **settings)
    assert "\n" not in str(error.value)


def test_an_invalid_npy_file_is_an_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(1000, np.uint16))
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-500])
    with pytest.raises(ValueError, match=r"a.npy: not a valid .npy file .*; replace it"):
        tokens(tmp_path / "a.npy")
    np.save(tmp_path / "b.npy", np.zeros((10, 10), np.float32))
    with pytest.raises(ValueError, match=r"b.npy: float32 of shape \[10, 10\]; a 1-D array of integers is needed"):
        tokens(tmp_path / "b.npy")


@pytest.mark.parametrize("split", ["one", "two"])
def test_a_token_outside_the_vocabulary_is_an_error(tmp_path: Path, split: str) -> None:
    values = np.arange(100)
    values[77] = 1000
    parts = [(values.astype(np.uint16), Path("a.bin"))]
    parts = [*parts, (np.zeros(50, np.uint16), Path("b.bin"))] if split == "two" else parts
    found = TokenWindows(parts, 8, 1000)
    found.__getitems__(Batch([0, 1, 8]))
    with pytest.raises(ValueError, match=r"^a.bin: token 1000, but data.vocab_size=1000; increase it, or set"):
        found.__getitems__(Batch([0, 9]))


def test_short_windows_are_fetched_by_pages(tmp_path: Path) -> None:
    np.arange(400_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = Tokens(path=str(tmp_path / "a.bin"), shape=(8,), vocab_size=65536, batch_size=16)
    loader = data.train_dataloader()
    asked = []
    windows = loader.dataset
    fetch = windows.__getitems__
    windows.__getitems__ = lambda batch: asked.append(len(batch)) or fetch(batch)  # type: ignore[func-returns-value]
    for _, _ in zip(loader, range(200), strict=False):
        pass
    assert max(asked) * 4096 <= FETCH_BYTES
    assert max(asked) > 16
