import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boltcutter.data.text import Text, list_files
from boltcutter.data.tokens import TokenWindows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty documents that say which one they are."""
    made = tmp_path / "notes"
    (made / "inner").mkdir(parents=True)
    for number in range(40):
        path = made / ("inner" if number % 2 else ".") / f"{number:02}.txt"
        path.write_text(f"document {number:02}\n" * (20 + number))
    (made / ".hidden").write_text("secret\n")
    return made


def text(folder: Path, **settings: Any) -> Text:
    where = {"path": str(folder), "cache_dir": folder.parent / "cache"}
    data = Text(**where | {"shape": (32,), "batch_size": 4, "split": (0.8, 0.1, 0.1)} | settings)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    return data


def said(data: Text, split: str) -> str:
    """All text of a split, an end after each document."""
    windows: TokenWindows = getattr(data.splits, split)
    tokens, end = windows.sequences[0][0].tolist(), data.tokenizer.eos_id
    return "".join("|" if token == end else data.tokenizer.decode([token]) for token in tokens)


@pytest.mark.parametrize("settings", [{}, {"tokenizer": "bpe", "vocab_size": 280}], ids=["bytes", "bpe"])
def test_each_document_is_in_one_split(folder: Path, settings: dict[str, Any]) -> None:
    data = text(folder, **settings)
    documents = {split: said(data, split).split("|")[:-1] for split in ("train", "val", "test")}
    assert sorted(d for split in documents.values() for d in split) == sorted(
        path.read_text() for path in folder.rglob("*.txt")
    )
    sizes = {split: sum(map(len, found)) for split, found in documents.items()}
    assert sizes["train"] / sum(sizes.values()) == pytest.approx(0.8, abs=0.05)
    assert sizes["val"] / sum(sizes.values()) == pytest.approx(0.1, abs=0.05)
    assert said(text(folder, seed=1, **settings), "val") != said(data, "val")
    assert said(text(folder, **settings), "val") == said(data, "val")


def test_targets_are_the_inputs_shifted_by_one(folder: Path) -> None:
    data = text(folder)
    whole = said(data, "val")
    inputs, targets = zip(*data.val_dataloader(), strict=True)
    assert "".join(map(chr, torch.cat(inputs).flatten().tolist())).replace("\0", "|") == whole[: len(whole) // 32 * 32]
    assert torch.equal(torch.cat(targets).flatten()[:-1], torch.cat(inputs).flatten()[1:])


def test_few_documents_are_split_at_lines(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    data = text(tmp_path / "one.txt")
    parts = [said(data, split) for split in ("train", "val", "test")]
    assert "".join(parts).replace("|", "") == (tmp_path / "one.txt").read_text()
    assert all(part.startswith("line ") and part.endswith("\n|") for part in parts)


def test_text_is_tokenized_once(folder: Path) -> None:
    data = text(folder)
    (made,) = (folder.parent / "cache").iterdir()
    before = {file: file.stat().st_mtime_ns for file in made.iterdir()}
    again = text(folder)
    assert {file: file.stat().st_mtime_ns for file in made.iterdir()} == before
    assert again.fingerprint() == data.fingerprint()
    for path in folder.rglob("*.txt"):
        os.utime(path, (1, 1))  # as a copy has other times
    assert text(folder).fingerprint() == data.fingerprint()
    (folder / "02.txt").write_text("document 99\n" * 22)
    assert text(folder).fingerprint() != data.fingerprint()
    assert not list((folder.parent / "cache").glob("*.part"))


def test_processes_may_tokenize_at_the_same_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename
    first: list[Text] = []

    def rename_later(draft: Path, target: Path) -> Path:
        if not first:
            monkeypatch.setattr(Path, "rename", rename)
            first.append(text(folder))
        return rename(draft, target)

    monkeypatch.setattr(Path, "rename", rename_later)
    assert text(folder).fingerprint() == first[0].fingerprint()
    assert len(list((folder.parent / "cache").iterdir())) == 1


def test_a_checkpoint_keeps_the_tokenizer(folder: Path) -> None:
    before = text(folder, tokenizer="bpe", vocab_size=280)
    for path in folder.rglob("*.txt"):
        path.write_text(path.read_text().replace("document", "Dokument"))
    after = text(folder, tokenizer="bpe", vocab_size=280)  # as Lightning does: set up, then restored
    assert after.statistics != before.statistics
    after.load_state_dict(before.state_dict())
    after.train_dataloader()
    assert after.tokenizer.serialized == before.tokenizer.serialized
    assert said(after, "train") == said(before, "train").replace("document", "Dokument")  # those of the same documents
    assert torch.equal(after.read([folder / "00.txt"])[0], before.read([folder / "00.txt"])[0])


def test_the_default_is_the_standard_library(tmp_path: Path) -> None:
    data = Text(cache_dir=tmp_path, split=(0.98, 0.01, 0.01))
    data.setup("fit")
    assert data.splits is not None
    assert len(data.splits.train) * 256 > 4e6  # bytes
    tokens = np.concatenate([inputs.numpy().ravel() for inputs, _ in data.val_dataloader()])
    assert b"import " in tokens.tobytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "nowhere/*.md"}, r"^data.path=nowhere/\*.md: no text files; give a file, a folder or a pattern"),
        ({"path": "utf16/*.txt"}, r"^data.path=utf16/\*.txt: utf16/b.txt has bytes of 0, .*write it in UTF-8"),
        ({"split": (0.5, 0.5, 0.5)}, r"^data.split=\[0.5, 0.5, 0.5\]"),
        ({"shape": (0,)}, r"^data.shape=\[0\] must be 1 or more tokens; try \[256\]"),
        ({"shape": (9999,)}, r"train.bin: \d+ tokens are too few for a window of 9999; lower data.shape=\[9999\]"),
        ({"tokenizer": "bpe"}, r"^data.vocab_size=256 must be at least 257"),
        ({"vocab_size": 100}, r"^data.vocab_size=100, but the tokenizer has 256 tokens; set data.vocab_size=256"),
    ],
)
def test_invalid_settings_are_one_line_errors(
    folder: Path, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    Path("utf16").mkdir()
    Path("utf16/a.txt").write_text("plain\n" * 99)
    Path("utf16/b.txt").write_text("two bytes\n" * 99, encoding="utf-16")
    with pytest.raises(ValueError, match=message) as error:
        text(folder, **settings)
    assert "\n" not in str(error.value)


def test_files_without_text_are_counted(folder: Path) -> None:
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    with pytest.warns(UserWarning, match=r"^data.path=.*: not read, as they are no text: 1 \.png$"):
        assert len(list_files(str(folder))) == 40
    list_files(str(folder))  # a second warning would be an error


def test_folds_are_documents(folder: Path) -> None:
    test = said(text(folder, split=(0.7, 0.1, 0.2)), "test")
    vals = []
    for fold in range(4):
        data = text(folder, split=(0.7, 0.1, 0.2), num_folds=4, fold=fold, tokenizer="bpe", vocab_size=280)
        assert said(data, "test") == test
        train, val = (said(data, split).split("|")[:-1] for split in ("train", "val"))
        assert not set(train) & set(val)
        assert len(train) > 2 * len(val)
        vals += val
    assert sorted(vals + test.split("|")[:-1]) == sorted(path.read_text() for path in folder.rglob("*.txt"))
    with pytest.raises(ValueError, match=r"^data.num_folds=50, but the number of samples is \d+; try data.num_folds="):
        text(folder, num_folds=50)


def test_the_vocabulary_does_not_depend_on_the_val_fold(folder: Path) -> None:
    def vocabulary() -> str:
        return text(folder, num_folds=3, fold=1, tokenizer="bpe", vocab_size=280).tokenizer.serialized

    data = text(folder, num_folds=3, fold=1)
    before, val = vocabulary(), said(data, "val").split("|")[:-1]
    for path in folder.rglob("*.txt"):
        if path.read_text() in val:
            path.write_text(path.read_text().replace("document", "Dokument"))
    assert vocabulary() == before


def test_folds_of_few_documents_are_ranges_of_lines(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    test = said(text(tmp_path / "one.txt"), "test")
    vals = []
    for fold in range(3):
        data = text(tmp_path / "one.txt", num_folds=3, fold=fold)
        assert said(data, "test") == test
        train, val = (said(data, split).replace("|", "") for split in ("train", "val"))
        assert sorted((train + val + test.replace("|", "")).splitlines()) == sorted(f"line {n}" for n in range(1000))
        assert len(val.splitlines()) == pytest.approx(300, abs=10)
        vals.append(val)
    assert "".join([*vals, test.replace("|", "")]) == (tmp_path / "one.txt").read_text()
