"""Text files, tokenized once."""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import secrets
import shutil
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from boltcutter.data.folds import fold_indices
from boltcutter.data.module import Splits
from boltcutter.data.splits import check_split
from boltcutter.data.streams import Purpose, stream
from boltcutter.data.tokenizer import Tokenizer, load_tokenizer, train_bpe
from boltcutter.data.tokens import TokenDataModule, TokenWindows

NAMES = ("train", "val", "test")
CHUNK_BYTES = 1 << 20  # bytes that are tokenized at once; longer documents are divided at the end of a line
BPE_TRAINING_BYTES = 1 << 28  # bytes of training text, at most, that BPE is trained on
MIN_DOCUMENTS = 20  # with fewer documents, each one is divided over the splits
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}  # not the standard library


class Span(NamedTuple):
    """A range of bytes of a document."""

    path: Path
    begin: int
    end: int


class Text(TokenDataModule):
    """Windows of text, which is tokenized once into memory-mapped files.

    Each document (a file) belongs to one split; with fewer than 20 documents, each one is divided over the splits. BPE
    is trained on the train split only. Checkpoints save the tokenizer. Tokens are cached by names, sizes and
    modification times of the text files, and by seed and settings. Folds are of documents, each tokenized separately.

    Args:
        path: A file, a folder, or a glob pattern such as ``notes/**/*.md``; None: the sources of Python's standard
            library. In a folder, hidden files and those with a zero byte near their beginning are ignored.
        tokenizer: ``bytes``; ``bpe``, trained on the text; or the path of a ``tokenizer.json``.
        split: Fractions of train, val and test, in bytes.
        cache_dir: Folder for the tokenized text.
        shape: Shape of one sample: (T,), the context length in tokens.
        vocab_size: Number of tokens in the vocabulary; BPE is trained to this size.
        options: Arguments of ``TokenDataModule`` and ``DataModule``.
    """

    def __init__(
        self,
        *,
        path: str | None = None,
        tokenizer: str = "bytes",
        split: tuple[float, float, float] = (0.9, 0.05, 0.05),
        cache_dir: Path = Path("data/text"),
        shape: tuple[int] = (256,),
        vocab_size: int = 256,
        **options: Any,
    ) -> None:
        super().__init__(shape=shape, vocab_size=vocab_size, **options)
        check_split(split)
        self.path, self.tokenizer_name, self.split, self.cache_dir = path, tokenizer, split, Path(cache_dir)

    def check_files(self) -> None:
        """Check that there are text files."""
        list_files(self.path)

    def prepare_data(self) -> None:
        """Tokenize the text, unless the tokens are cached."""
        self._tokenized_folder()

    def load(self) -> Splits:
        """Memory-map the files of tokens."""
        folder = self._tokenized_folder()
        metadata = json.loads((folder / "metadata.json").read_text())
        tokenizer = load_tokenizer((folder / "tokenizer").read_text())
        self.statistics = {"tokenizer": tokenizer.serialized, "token_bytes": tokenizer.token_bytes(self.vocab_size)}
        splits: dict[str, Any] = {}
        for name, fraction in zip(NAMES, self.split, strict=True):
            if not fraction:
                continue
            file = folder / f"{name}.bin"
            tokens = np.asarray(np.memmap(file, metadata["dtype"], mode="r")) if file.stat().st_size else np.empty(0)
            known = hashlib.sha256(f"{metadata['hashes'][name]}{self.shape}".encode()).digest()
            splits[name] = TokenWindows(
                [(tokens, file)], self.shape[0], self.vocab_size, random_offset=name == "train", fingerprint=known
            )
        return Splits(**splits)

    def _tokenized_folder(self) -> Path:
        """Return the folder of the tokens, after tokenizing if it does not exist."""
        files = list_files(self.path)
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        # A checkpoint's tokenizer comes first: its model was trained with it.
        tokenizer = self.statistics.get("tokenizer") or self.tokenizer_name
        settings = [tokenizer, self.vocab_size if tokenizer == "bpe" else None, self.split, self.seed]
        settings += [self.num_folds, self.fold] if self.num_folds else []
        folder = self.cache_dir / hashlib.sha256(json.dumps([stats, settings]).encode()).hexdigest()[:16]
        if not (folder / "metadata.json").is_file():
            draft = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.part")
            draft.mkdir(parents=True, exist_ok=True)
            try:
                spans = split_documents(files, self.split, self.seed, self.num_folds, self.fold)
                self._tokenize(draft, spans, tokenizer)
                draft.rename(folder)
            except OSError:
                if not (folder / "metadata.json").is_file():  # otherwise another process has finished first
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return folder

    def _tokenize(self, folder: Path, spans: dict[str, list[Span]], name: str) -> None:
        if name == "bpe":
            name = train_bpe(_first(read_chunks(spans["train"]), BPE_TRAINING_BYTES), self.vocab_size)
        tokenizer = load_tokenizer(name)
        if tokenizer.vocab_size > self.vocab_size:
            raise ValueError(
                f"data.vocab_size={self.vocab_size}, but the tokenizer has {tokenizer.vocab_size} tokens; "
                f"set data.vocab_size={tokenizer.vocab_size}"
            )
        dtype = np.uint8 if tokenizer.vocab_size <= 256 else np.uint16 if tokenizer.vocab_size <= 65536 else np.uint32
        hashes = {}
        for split in NAMES:
            with open(folder / f"{split}.bin", "wb") as file:
                hashes[split] = write_tokens(spans[split], tokenizer, file, np.dtype(dtype))
        (folder / "tokenizer").write_text(tokenizer.serialized)
        (folder / "metadata.json").write_text(json.dumps({"dtype": np.dtype(dtype).name, "hashes": hashes}))


def list_files(path: str | None) -> list[Path]:
    """Return the non-empty text files of ``path``, sorted by name; see ``Text``."""
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        found = [file for file in library.rglob("*.py") if not EXCLUDED_FOLDERS & set(file.relative_to(library).parts)]
    elif Path(path).is_dir():
        folder = Path(path)
        visible = (file for file in folder.rglob("*") if not any(p[0] == "." for p in file.relative_to(folder).parts))
        files = [file for file in visible if file.is_file()]
        found = [file for file in files if _is_text(file)]
        if ends := Counter(file.suffix or file.name for file in set(files) - set(found)):
            counts = ", ".join(f"{count} {end}" for end, count in ends.most_common(5))
            _warn(f"data.path={path}: not read, as they are no text: {counts}{', …' if len(ends) > 5 else ''}")
    else:
        found = [Path(path)] if Path(path).is_file() else [Path(p) for p in glob.glob(path, recursive=True)]
        if others := sorted(file for file in found if file.is_file() and not _is_text(file)):
            raise ValueError(
                f"data.path={path}: {others[0]} has bytes of 0, as compressed files and UTF-16 have; expand it, "
                "write it in UTF-8, or leave it out"
            )
    files = sorted(file for file in found if file.is_file() and file.stat().st_size)
    if not files:
        raise ValueError(f"data.path={path}: no text files; give a file, a folder or a pattern like 'notes/**/*.md'")
    return files


@functools.cache  # as the files are listed before the training, and again to load them
def _warn(text: str) -> None:
    rank_zero_warn(text)


def _is_text(file: Path) -> bool:
    with open(file, "rb") as opened:
        return b"\0" not in opened.read(8192)


def split_documents(
    files: Sequence[Path], split: tuple[float, float, float], seed: int, num_folds: int | None = None, fold: int = 0
) -> dict[str, list[Span]]:
    """Assign documents, or parts of documents if there are few, to splits, by fractions of bytes."""
    sizes = np.array([file.stat().st_size for file in files])
    if len(files) < MIN_DOCUMENTS:
        spans: dict[str, list[Span]] = {name: [] for name in NAMES}
        for file, size in zip(files, sizes.tolist(), strict=True):
            ends = [0, *(_line_end(file, round(size * fraction)) for fraction in np.cumsum(split)[:2]), size]
            ranges: dict[str, list[tuple[int, int]]] = {
                name: [pair] for name, pair in zip(NAMES, pairwise(ends), strict=True)
            }
            if num_folds:
                begin, end = (_line_end(file, ends[2] * at // num_folds) for at in (fold, fold + 1))
                begin, end = begin if fold else 0, min(end, ends[2])
                ranges |= {"train": [(0, begin), (end, ends[2])], "val": [(begin, end)]}
            for name in NAMES:
                spans[name] += [Span(file, *pair) for pair in ranges[name]]
        return spans
    order = np.random.default_rng(stream(Purpose.SPLIT, seed)).permutation(len(files))
    # The middle of a document, in a random concatenation of all, determines its split.
    middles = (np.cumsum(sizes[order]) - sizes[order] / 2) / sizes.sum()
    owners = np.searchsorted(np.cumsum(split)[:2], middles, side="right")
    if num_folds:
        train, _ = fold_indices(order[owners < 2], num_folds, fold, seed)
        owners = np.where(owners == 2, 2, ~np.isin(order, train))
    return {
        name: [Span(files[i], 0, int(sizes[i])) for i in np.sort(order[owners == number]).tolist()]
        for number, name in enumerate(NAMES)
    }


def _line_end(file: Path, offset: int) -> int:
    """Offset of the end of the line that contains ``offset``."""
    with open(file, "rb") as opened:
        opened.seek(offset)
        opened.readline()
        return opened.tell()


def read_chunks(spans: Sequence[Span]) -> Iterator[bytes]:
    """Yield the text of each document in chunks of about ``CHUNK_BYTES``, and an empty chunk after each document."""
    for path, begin, end in spans:
        with open(path, "rb") as file:
            file.seek(begin)
            while file.tell() < end:
                text = file.read(min(CHUNK_BYTES, end - file.tell()))
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


def write_tokens(spans: Sequence[Span], tokenizer: Tokenizer, file: BinaryIO, dtype: np.dtype[Any]) -> str:
    """Write the tokens of all documents, each followed by an end-of-sequence token; return a hash of the tokens."""
    digest, end = hashlib.sha256(), np.array([tokenizer.eos_id], dtype)
    pending: list[bytes] = []

    def write() -> None:
        found = iter(tokenizer.encode_many([text for text in pending if text]))
        written = b"".join((next(found) if text else end).astype(dtype).tobytes() for text in pending)
        digest.update(written)
        file.write(written)
        pending.clear()

    for text in read_chunks(spans):
        pending.append(text)
        if sum(map(len, pending)) > 8 * CHUNK_BYTES:
            write()
    write()
    return digest.hexdigest()
