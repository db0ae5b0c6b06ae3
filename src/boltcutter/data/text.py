"""Text files as tokens."""

from __future__ import annotations

import glob
import hashlib
import json
import secrets
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from boltcutter.data.module import Splits, check_shares
from boltcutter.data.tokenizer import Tokenizer, make_tokenizer, train_bpe
from boltcutter.data.tokens import TokenData, Windows

NAMES = ("train", "val", "test")
CHUNK = 1 << 20  # bytes that are tokenized at once; longer documents are cut at the end of a line
LEARNT = 1 << 28  # bytes of training text, at most, that BPE is learnt from
FEW = 20  # documents, below which each is cut in three in place of being given to one split
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}  # not the library's own sources


class Piece(NamedTuple):
    """A document, or a part of one, in bytes."""

    path: Path
    begin: int
    end: int


class Text(TokenData):
    """Windows of text, tokenized once into files that are mapped from then on.

    Each document, which is a file, goes to one split; where there are fewer than 20, each is cut in three. BPE is
    learnt from the train split alone. Checkpoints keep the tokenizer. The files of tokens depend on names, sizes and
    times of change of the text files, on the seed and the settings, so that other text makes other files.

    Args:
        path: A file, a folder, or a pattern such as ``notes/**/*.md``; none means the sources of Python's own library.
            Of a folder, hidden files and those with a zero byte near their beginning are left out.
        tokenizer: ``bytes``; ``bpe``, learnt from the text; or the path of a ``tokenizer.json``.
        split: Shares of train, val and test, in bytes.
        cache: Folder where tokens are kept.
        shape: Of one sample: (T,), the context.
        vocab_size: Tokens of the vocabulary; BPE learns as many.
        batch_size: Windows in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that prepare batches.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        tokenizer: str = "bytes",
        split: tuple[float, float, float] = (0.9, 0.05, 0.05),
        cache: Path = Path("data/text"),
        shape: tuple[int] = (256,),
        vocab_size: int = 256,
        batch_size: int = 16,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(shape=shape, vocab_size=vocab_size, batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_shares(split)
        self.path, self.tokenized_by, self.split, self.cache = path, tokenizer, split, Path(cache)

    def prepare_data(self) -> None:
        """Tokenize, unless it has been done."""
        self._made()

    def load(self) -> Splits:
        """Map the files of tokens."""
        folder = self._made()
        facts = json.loads((folder / "facts.json").read_text())
        tokenizer = make_tokenizer((folder / "tokenizer").read_text())
        self.statistics = {"tokenizer": tokenizer.saved, "token_bytes": tokenizer.token_bytes(self.vocab_size)}
        made: dict[str, Any] = {}
        for name, share in zip(NAMES, self.split, strict=True):
            if not share:
                continue
            file = folder / f"{name}.bin"
            tokens = np.asarray(np.memmap(file, facts["dtype"], mode="r")) if file.stat().st_size else np.empty(0)
            known = hashlib.sha256(f"{facts['contents'][name]}{self.shape}".encode()).digest()
            made[name] = Windows(
                [(tokens, file)], self.shape[0], self.vocab_size, shift=name == "train", fingerprint=known
            )
        return Splits(**made)

    def _made(self) -> Path:
        """The folder with the tokens, made where it is not there."""
        files = list_files(self.path)
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        # That of a checkpoint, whose tokens a model knows.
        saved = self.statistics.get("tokenizer") or self.tokenized_by
        settings = [saved, self.vocab_size if saved == "bpe" else None, self.split, self.seed]
        folder = self.cache / hashlib.sha256(json.dumps([stats, settings]).encode()).hexdigest()[:16]
        if not (folder / "facts.json").is_file():
            draft = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.part")
            draft.mkdir(parents=True, exist_ok=True)
            try:
                self._make(draft, share_out(files, self.split, self.seed), saved)
                if not folder.exists():  # another process may have been faster
                    draft.rename(folder)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return folder

    def _make(self, folder: Path, pieces: dict[str, list[Piece]], saved: str) -> None:
        saved = train_bpe(_first(chunks(pieces["train"]), LEARNT), self.vocab_size) if saved == "bpe" else saved
        tokenizer = make_tokenizer(saved)
        if tokenizer.size > self.vocab_size:
            raise ValueError(
                f"data.vocab_size={self.vocab_size}, but the tokenizer has {tokenizer.size} tokens; "
                f"set data.vocab_size={tokenizer.size}"
            )
        dtype = np.uint8 if tokenizer.size <= 256 else np.uint16 if tokenizer.size <= 65536 else np.uint32
        contents = {}
        for name in NAMES:
            with open(folder / f"{name}.bin", "wb") as file:
                contents[name] = write_tokens(pieces[name], tokenizer, file, np.dtype(dtype))
        (folder / "tokenizer").write_text(tokenizer.saved)
        (folder / "facts.json").write_text(json.dumps({"dtype": np.dtype(dtype).name, "contents": contents}))


def list_files(path: str | None) -> list[Path]:
    """Files of text, in the order of their names.

    Raises:
        ValueError: There are none.
    """
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [file for file in library.rglob("*.py") if not OTHERS & set(file.relative_to(library).parts)]
    elif Path(path).is_dir():
        folder = Path(path)
        shown = (file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
        found = [file for file in shown if file.is_file() and _is_text(file)]
    else:
        found = [Path(path)] if Path(path).is_file() else [Path(p) for p in glob.glob(path, recursive=True)]
    files = sorted(file for file in found if file.is_file() and file.stat().st_size)
    if not files:
        raise ValueError(f"data.path={path}: no text there; give a file, a folder, or a pattern like 'notes/**/*.md'")
    return files


def _is_text(file: Path) -> bool:
    with open(file, "rb") as opened:
        return b"\0" not in opened.read(8192)


def share_out(files: Sequence[Path], split: tuple[float, float, float], seed: int) -> dict[str, list[Piece]]:
    """Which documents each split has; where there are few, which part of each document."""
    sizes = np.array([file.stat().st_size for file in files])
    if len(files) < FEW:
        parts: dict[str, list[Piece]] = {name: [] for name in NAMES}
        for file, size in zip(files, sizes.tolist(), strict=True):
            ends = [0, *(_line_end(file, round(size * share)) for share in np.cumsum(split)[:2]), size]
            for name, begin, end in zip(NAMES, ends[:-1], ends[1:], strict=True):
                parts[name].append(Piece(file, begin, end))
        return parts
    order = np.random.default_rng(seed).permutation(len(files))
    # A document belongs to where its middle lies, when all stand in a row of random order.
    middles = (np.cumsum(sizes[order]) - sizes[order] / 2) / sizes.sum()
    owners = np.searchsorted(np.cumsum(split)[:2], middles, side="right")
    return {
        name: [Piece(files[i], 0, int(sizes[i])) for i in np.sort(order[owners == number]).tolist()]
        for number, name in enumerate(NAMES)
    }


def _line_end(file: Path, place: int) -> int:
    """The end of the line in which ``place`` is."""
    with open(file, "rb") as opened:
        opened.seek(place)
        opened.readline()
        return opened.tell()


def chunks(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Text of each document in turn, at most about ``CHUNK`` bytes at once, an empty one after each document."""
    for path, begin, end in pieces:
        with open(path, "rb") as file:
            file.seek(begin)
            while file.tell() < end:
                text = file.read(min(CHUNK, end - file.tell()))
                if file.tell() < end:
                    text += file.readline(end - file.tell())
                yield text
        yield b""


def _first(texts: Iterator[bytes], size: int) -> Iterator[bytes]:
    for text in texts:
        yield text
        size -= len(text)
        if size <= 0:
            return


def write_tokens(pieces: Sequence[Piece], tokenizer: Tokenizer, file: BinaryIO, dtype: np.dtype[Any]) -> str:
    """Write all documents, an end after each, and give a hash of what was written."""
    digest, end = hashlib.sha256(), np.array([tokenizer.end], dtype)
    waiting: list[bytes] = []

    def write() -> None:
        found = iter(tokenizer.encode_many([text for text in waiting if text]))
        written = b"".join((next(found) if text else end).astype(dtype).tobytes() for text in waiting)
        digest.update(written)
        file.write(written)
        waiting.clear()

    for text in chunks(pieces):
        waiting.append(text)
        if sum(map(len, waiting)) > 8 * CHUNK:
            write()
    write()
    return digest.hexdigest()
