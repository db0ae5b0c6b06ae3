"""Windows of tokens from memory-mapped files of any size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from boltcutter.data.files import PAGE_BYTES, consecutive_ranges, find_files, map_npy, sampled_hash, strided_windows
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Splits
from boltcutter.data.sampler import Batch
from boltcutter.data.splits import check_split
from boltcutter.data.streams import Purpose, stream
from boltcutter.data.tokenizer import Tokenizer, load_tokenizer

Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
Array = npt.NDArray[Any]
Sequences = Sequence[tuple[Array, Path]]  # tokens of shape (n,), and their file


class TokenWindows:
    """Dataset of windows of T + 1 tokens: T inputs, and the same shifted by one as targets.

    Windows do not overlap, so all windows of an epoch are different. The incomplete window at the end of a sequence
    is dropped.

    Args:
        sequences: Tokens, memory-mapped or in memory, and their file.
        context: Context length T.
        vocab_size: Number of tokens in the vocabulary.
        random_offset: Whether windows start at a different offset in each epoch.
        fingerprint: Hash of the contents, if already known.

    Attributes:
        read_bytes: Bytes that the disk reads for a window: the pages that contain it.

    Raises:
        ValueError: The sequences are too short for a window.
    """

    def __init__(
        self,
        sequences: Sequences,
        context: int,
        vocab_size: int,
        *,
        random_offset: bool = False,
        fingerprint: bytes | None = None,
    ) -> None:
        self.context, self.vocab_size, self.known_fingerprint = context, vocab_size, fingerprint
        self.num_offsets = context if random_offset else 1
        self.sequences = [found for found in sequences if len(found[0]) >= context + self.num_offsets]
        if not self.sequences:
            length = max((len(tokens) for tokens, _ in sequences), default=0)
            where = f"{sequences[0][1]}: " if sequences else ""
            raise ValueError(
                f"{where}{length} tokens are too few for a window of {context}; lower data.shape=[{context}]"
            )
        self.counts = [(len(tokens) - self.num_offsets) // context for tokens, _ in self.sequences]
        self.ends = np.cumsum(self.counts)
        dtypes = {tokens.dtype for tokens, _ in self.sequences}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self.unsigned = np.dtype(f"u{self.dtype.itemsize}")  # where a negative token wraps to a large one
        self.read_bytes = PAGE_BYTES + (context + 1) * self.dtype.itemsize
        self.always_valid = self.dtype.kind == "u" and np.iinfo(self.dtype).max < vocab_size

    def __len__(self) -> int:
        return int(self.ends[-1])

    is_pure = True  # draws from no global random generator

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets (N, T) in the file's integer dtype."""
        begin = _window_offset(self.num_offsets, batch.seed, batch.stage, batch.epoch)
        chosen = batch.indices
        if len(self.sequences) == 1:
            inputs, targets = self._windows(0, chosen, begin)
        else:
            inputs, targets = (np.empty((len(chosen), self.context), self.dtype) for _ in range(2))
            owners = np.searchsorted(self.ends, chosen, side="right")
            for owner in np.unique(owners).tolist():
                rows = np.flatnonzero(owners == owner)
                local = chosen[rows] - (self.ends[owner] - self.counts[owner])
                inputs[rows], targets[rows] = self._windows(owner, local, begin)
        for found in () if self.always_valid else (inputs[:, :1], targets):  # together, all tokens of the windows
            if found.view(self.unsigned).max(initial=0) >= self.vocab_size:
                self._raise_invalid(batch, found)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def fingerprint(self) -> bytes:
        """Hash of size, modification time and some blocks of each file, which may be too large to be read whole."""
        return (
            self.known_fingerprint
            or hashlib.sha256(b"".join(sampled_hash(path) for _, path in self.sequences)).digest()
        )

    def _windows(self, owner: int, windows: npt.NDArray[np.int64], begin: int) -> tuple[Array, Array]:
        """Inputs and targets of some windows of one sequence, in separate memory."""
        tokens, count, context = self.sequences[owner][0], self.counts[owner], self.context
        # Copied twice; the second copy reads from the CPU's cache.
        first, second = (strided_windows(tokens, at, count, context, context)[windows] for at in (begin, begin + 1))
        return first.view(tokens.dtype).reshape(-1, context), second.view(tokens.dtype).reshape(-1, context)

    def _raise_invalid(self, batch: Batch, found: Array) -> None:
        row, column = np.argwhere((found >= self.vocab_size) | (found < 0))[0]
        path = self.sequences[int(np.searchsorted(self.ends, batch[row], side="right"))][1]
        raise ValueError(
            f"{path}: token {found[row, column]}, but data.vocab_size={self.vocab_size}; increase it, or set "
            "data.dtype to the dtype of the file"
        )


@cache
def _window_offset(num_offsets: int, seed: int, stage: str, epoch: int) -> int:
    """Offset of an epoch's first window, in tokens."""
    key = stream(Purpose.WINDOWS, seed, stage=stage, epoch=epoch)
    return int(np.random.default_rng(key).integers(num_offsets)) if num_offsets > 1 else 0


class TokenDataModule(DataModule):
    """Base class of data modules of tokens: windows of a fixed context, and a tokenizer that checkpoints save.

    Args:
        shape: Shape of one sample: (T,), the context length in tokens.
        vocab_size: Number of tokens in the vocabulary.
        batch_size: Global batch size: windows in one step over all devices.
        options: Arguments of ``DataModule``.
    """

    kind: Literal["classification", "regression", "language_modeling"] = "language_modeling"

    def __init__(self, *, shape: tuple[int], vocab_size: int, batch_size: int = 16, **options: Any) -> None:
        super().__init__(batch_size=batch_size, **options)
        if shape[0] < 1:
            raise ValueError(f"data.shape={list(shape)} must be 1 or more tokens; try [256]")
        if vocab_size < 2:
            raise ValueError(f"data.vocab_size={vocab_size} must be 2 or more; try 256")
        self.shape, self.vocab_size = shape, vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of these tokens."""
        if "tokenizer" not in self.statistics:
            self.setup("predict")
        if "tokenizer" not in self.statistics:
            raise ValueError("data.tokenizer is not set, so these tokens cannot be decoded; set it to a tokenizer.json")
        return load_tokenizer(self.statistics["tokenizer"])

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Read text files as windows (N, T), named ``file:window``."""
        tokenizer, length = self.tokenizer, self.shape[0]
        windows: list[Tensor] = []
        names: list[str] = []
        for path in paths:
            tokens = torch.tensor(tokenizer.encode(path.read_bytes()))
            found = tokens[: len(tokens) // length * length].view(-1, length)
            windows.append(found)
            names += [f"{path}:{number}" for number in range(len(found))]
        if not names:
            raise ValueError(f"input: no text has {length} tokens or more; give a longer one")
        return torch.cat(windows), names


class Tokens(TokenDataModule):
    """Memory-mapped files of token ids, as nanoGPT and others write them.

    Args:
        path: A ``.bin`` or ``.npy`` file, a folder of them, or a glob pattern such as ``data/train_*.bin``.
        val: Files of the val split, like ``path``; None: a fraction of ``path``.
        test: Files of the test split, like ``path``; None: a fraction of ``path``.
        dtype: Dtype of a ``.bin`` file; a ``.npy`` file has its own.
        split: Fractions of train, val and test, in this order in each file of ``path``, for splits without files.
        tokenizer: ``bytes``, or the ``tokenizer.json`` that the tokens were made with; for bits per byte and text
            generation.
        shape: Shape of one sample: (T,), the context length in tokens.
        vocab_size: Number of tokens in the vocabulary.
        options: Arguments of ``TokenDataModule`` and ``DataModule``.
    """

    def __init__(
        self,
        *,
        path: str,
        val: str | None = None,
        test: str | None = None,
        dtype: Dtype = "uint16",
        split: tuple[float, float, float] = (0.98, 0.01, 0.01),
        tokenizer: str | None = None,
        shape: tuple[int] = (1024,),
        vocab_size: int = 50304,
        **options: Any,
    ) -> None:
        super().__init__(shape=shape, vocab_size=vocab_size, **options)
        check_split(split)
        self.paths = {"train": path, "val": val, "test": test}
        self.dtype, self.split, self.tokenizer_name = dtype, split, tokenizer

    def load(self) -> Splits:
        """Map all files."""
        if self.tokenizer_name and not self.statistics:
            tokenizer = load_tokenizer(self.tokenizer_name)
            self.statistics = {"tokenizer": tokenizer.serialized, "token_bytes": tokenizer.token_bytes(self.vocab_size)}
        files = {name: self._open(name, pattern) for name, pattern in self.paths.items() if pattern}
        given = dict(zip(self.paths, self.split, strict=True))
        fractions = {name: given[name] for name in self.paths if name == "train" or name not in files}
        splits: dict[str, Any] = {}
        for name in self.paths:
            if fractions.get(name) == 0:
                continue
            found = files.get(name, [])
            if name in fractions:
                ranges = [slice(*consecutive_ranges(fractions, len(tokens))[name]) for tokens, _ in files["train"]]
                found = [(tokens[part], path) for part, (tokens, path) in zip(ranges, files["train"], strict=True)]
            splits[name] = TokenWindows(found, self.shape[0], self.vocab_size, random_offset=name == "train")
        return Splits(**splits)

    def _open(self, name: str, pattern: str) -> list[tuple[Array, Path]]:
        setting = "data.path" if name == "train" else f"data.{name}"
        return [(open_tokens(path, self.dtype), path) for path in find_files(pattern, setting)]


def open_tokens(path: Path, dtype: Dtype) -> Array:
    """Memory-map a ``.npy`` file of tokens, or a ``.bin`` file of ``dtype``.

    Raises:
        ValueError: The file is damaged, or has another dtype.
    """
    if path.suffix == ".npy":
        found = map_npy(path)
        if found.ndim != 1 or found.dtype.kind not in "ui" or found.dtype.itemsize > 8:
            raise ValueError(f"{path}: {found.dtype} of shape {list(found.shape)}; a 1-D array of integers is needed")
        return found
    size, each = path.stat().st_size, np.dtype(dtype).itemsize
    if not size or size % each:
        raise ValueError(
            f"{path}: {size} bytes are not a whole number of {each}-byte tokens; the file is truncated, or "
            f"data.dtype={dtype} is wrong"
        )
    return np.asarray(np.memmap(path, dtype, mode="r"))
