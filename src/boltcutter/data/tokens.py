"""Windows of tokens from files of any size, of which only what is asked for is read."""

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

from boltcutter.data.files import PAGE, find, sampled, stretches
from boltcutter.data.loader import Pair
from boltcutter.data.module import DataModule, Splits, check_shares
from boltcutter.data.sampler import Batch
from boltcutter.data.tokenizer import Tokenizer, make_tokenizer

Dtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
Array = npt.NDArray[Any]
Part = tuple[Array, Path]  # tokens (n,), and where they are from
BLOCK = 4096  # numbers at the beginning of a file that tell how wide they are


class Windows:
    """Stretches of T + 1 tokens: T of input, and the same one further as targets.

    Windows lie side by side, so that all of an epoch's are different; what is left at the end of a part is left out.

    Args:
        parts: Tokens, mapped from a file or in memory, and the file.
        context: T.
        vocabulary: Tokens are below this.
        shift: Whether each epoch begins at another place, so that windows are cut otherwise each time.
        fingerprint: Of the contents, where it is known already.

    Attributes:
        read_bytes: What the disk reads for a window: the pages that it is in.

    Raises:
        ValueError: There is not one window.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        context: int,
        vocabulary: int,
        *,
        shift: bool = False,
        fingerprint: bytes | None = None,
    ) -> None:
        self.context, self.vocabulary, self.known = context, vocabulary, fingerprint
        self.room = context if shift else 1  # places where an epoch can begin
        self.parts = [part for part in parts if len(part[0]) >= context + self.room]
        if not self.parts:
            length = max((len(tokens) for tokens, _ in parts), default=0)
            where = f"{parts[0][1]}: " if parts else ""
            raise ValueError(
                f"{where}{length} tokens are too few for a window of {context}; lower data.shape=[{context}]"
            )
        self.counts = [(len(tokens) - self.room) // context for tokens, _ in self.parts]
        self.ends = np.cumsum(self.counts)
        dtypes = {tokens.dtype for tokens, _ in self.parts}
        self.dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.int64)
        self.unsigned = np.dtype(f"u{self.dtype.itemsize}")  # in which a token below zero is a large one
        self.read_bytes = PAGE + (context + 1) * self.dtype.itemsize
        self.any_fits = self.dtype.kind == "u" and np.iinfo(self.dtype).max < vocabulary

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitems__(self, batch: Batch) -> Pair:
        """Inputs and targets (N, T) as the file has them, of 8 to 64 bits.

        Raises:
            ValueError: A token is not in the vocabulary.
        """
        begin = _begin(self.room, batch.seed, batch.epoch)
        chosen = batch.array
        if len(self.parts) == 1:
            inputs, targets = self._cut(0, chosen, begin)
        else:
            inputs, targets = (np.empty((len(chosen), self.context), self.dtype) for _ in range(2))
            owners = np.searchsorted(self.ends, chosen, side="right")
            for part in np.unique(owners).tolist():
                mine = np.flatnonzero(owners == part)
                cut = self._cut(part, chosen[mine] - (self.ends[part] - self.counts[part]), begin)
                inputs[mine], targets[mine] = cut
        for found in () if self.any_fits else (inputs[:, :1], targets):  # all that is in them
            if found.view(self.unsigned).max(initial=0) >= self.vocabulary:
                self._tell(batch, found)
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def fingerprint(self) -> bytes:
        """Of length, time of change, and some blocks of each file, which may be too large to be read in whole."""
        return self.known or hashlib.sha256(b"".join(sampled(path) for _, path in self.parts)).digest()

    def _cut(self, part: int, windows: npt.NDArray[np.int64], begin: int) -> tuple[Array, Array]:
        """Inputs and targets of some windows of a part, neither of which is the other's memory."""
        tokens, count, context = self.parts[part][0], self.counts[part], self.context
        # Taken twice, the second time from the processor's cache.
        first, second = (stretches(tokens, at, count, context, context)[windows] for at in (begin, begin + 1))
        return first.view(tokens.dtype).reshape(-1, context), second.view(tokens.dtype).reshape(-1, context)

    def _tell(self, batch: Batch, found: Array) -> None:
        row, column = np.argwhere((found >= self.vocabulary) | (found < 0))[0]
        path = self.parts[int(np.searchsorted(self.ends, batch[row], side="right"))][1]
        raise ValueError(
            f"{path}: token {found[row, column]} is not one of the {self.vocabulary} of the vocabulary; set "
            "data.vocab_size to their number, or data.dtype to what the file was written with"
        )


@cache
def _begin(room: int, seed: int, epoch: int) -> int:
    """Where an epoch's first window begins."""
    return int(np.random.default_rng([seed, epoch]).integers(room)) if room > 1 else 0


class TokenData(DataModule):
    """What data of tokens share: windows of a context, a vocabulary, and a tokenizer that checkpoints keep.

    Args:
        shape: Of one sample: (T,), the context.
        vocab_size: Tokens of the vocabulary.
        batch_size: Windows in one step over all devices.
        seed: What split and order depend on.
        num_workers: Processes for each device that prepare batches.
    """

    kind: Literal["classification", "regression", "language_modeling"] = "language_modeling"

    def __init__(self, *, shape: tuple[int], vocab_size: int, batch_size: int, seed: int, num_workers: int) -> None:
        super().__init__(batch_size=batch_size, seed=seed, num_workers=num_workers)
        if shape[0] < 1:
            raise ValueError(f"data.shape={list(shape)} is not a number of tokens; try [256]")
        if vocab_size < 2:
            raise ValueError(f"data.vocab_size={vocab_size} is not a number of tokens; try 256")
        self.shape, self.vocab_size = shape, vocab_size

    @property
    def tokenizer(self) -> Tokenizer:
        """What turns text into these tokens, and back.

        Raises:
            ValueError: It is not known.
        """
        if "tokenizer" not in self.statistics:
            self.setup("predict")
        if "tokenizer" not in self.statistics:
            raise ValueError("data.tokenizer: not set, so these tokens stand for no text; set it to a tokenizer.json")
        return make_tokenizer(self.statistics["tokenizer"])

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[str]]:
        """Windows (N, T) of new files of text, each file named ``file:window``."""
        tokenizer, length = self.tokenizer, self.shape[0]
        windows: list[Tensor] = []
        names: list[str] = []
        for path in paths:
            tokens = torch.tensor(tokenizer.encode(path.read_bytes()))
            found = tokens[: len(tokens) // length * length].view(-1, length)
            windows.append(found)
            names += [f"{path}:{number}" for number in range(len(found))]
        if not names:
            raise ValueError(f"input: no text of {length} tokens or more; give a longer one")
        return torch.cat(windows), names

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint's position, with its tokenizer."""
        if self.statistics not in ({}, state_dict["statistics"]):
            self.splits = None
        super().load_state_dict(state_dict)


class Tokens(TokenData):
    """Files of token ids, one after another, as nanoGPT and others write them; mapped, never loaded.

    Args:
        path: A ``.bin`` or ``.npy`` file, a folder of them, or a pattern such as ``data/train_*.bin``.
        val: Likewise; none takes a share of ``path``.
        test: Likewise.
        dtype: Of a ``.bin`` file; a ``.npy`` file says its own.
        header: Bytes at the beginning of a ``.bin`` file to pass over.
        split: Shares of train, val and test, in this order in each file of ``path``; used for those without files.
        tokenizer: ``bytes``, or a ``tokenizer.json``, with which the tokens were made; for bits per byte and sampling.
        shape: Of one sample: (T,), the context.
        vocab_size: Tokens of the vocabulary.
        batch_size: Windows in one step over all devices.
        seed: What the order depends on.
        num_workers: Processes for each device that prepare batches.
    """

    def __init__(
        self,
        *,
        path: str,
        val: str | None = None,
        test: str | None = None,
        dtype: Dtype = "uint16",
        header: int = 0,
        split: tuple[float, float, float] = (0.98, 0.01, 0.01),
        tokenizer: str | None = None,
        shape: tuple[int] = (1024,),
        vocab_size: int = 50304,
        batch_size: int = 16,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(shape=shape, vocab_size=vocab_size, batch_size=batch_size, seed=seed, num_workers=num_workers)
        check_shares(split)
        if header < 0:
            raise ValueError(f"data.header={header} is not a number of bytes; try 0")
        self.paths = {"train": path, "val": val, "test": test}
        self.dtype, self.header, self.split, self.tokenized_by = dtype, header, split, tokenizer

    def load(self) -> Splits:
        """Map all files."""
        if self.tokenized_by and not self.statistics:
            tokenizer = make_tokenizer(self.tokenized_by)
            self.statistics = {"tokenizer": tokenizer.saved, "token_bytes": tokenizer.token_bytes(self.vocab_size)}
        files = {name: self._open(name, pattern) for name, pattern in self.paths.items() if pattern}
        shares = dict(zip(self.paths, self.split, strict=True))
        cut = {name: shares[name] for name in self.paths if name == "train" or name not in files}
        made: dict[str, Any] = {}
        for name in self.paths:
            if cut.get(name) == 0:
                continue
            parts = files[name] if name not in cut else [(_share(t, cut, name), path) for t, path in files["train"]]
            made[name] = Windows(parts, self.shape[0], self.vocab_size, shift=name == "train")
        return Splits(**made)

    def _open(self, name: str, pattern: str) -> list[Part]:
        setting = "data.path" if name == "train" else f"data.{name}"
        return [(open_tokens(path, self.dtype, self.header), path) for path in find(pattern, setting)]


def _share(tokens: Array, shares: dict[str, float], name: str) -> Array:
    """The part of ``tokens`` that is ``name``'s, where those in ``shares`` stand in their order."""
    names, total = list(shares), sum(shares.values())
    ends = np.round(np.cumsum([shares[n] / total for n in names]) * len(tokens)).astype(np.int64)
    at = names.index(name)
    return tokens[ends[at - 1] if at else 0 : ends[at]]


def open_tokens(path: Path, dtype: Dtype, header: int) -> Array:
    """Map a file of tokens; nothing of it is read but a few samples.

    Raises:
        ValueError: It is damaged, or was written otherwise.
    """
    if path.suffix == ".npy":
        try:
            found: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise ValueError(f"{path}: not a whole .npy file ({' '.join(str(error).split())}); replace it") from None
        if found.ndim != 1 or found.dtype.kind not in "ui" or found.dtype.itemsize > 8:
            raise ValueError(f"{path}: {found.dtype} of shape {list(found.shape)}; one row of whole numbers is needed")
        return np.asarray(found)
    size, each = path.stat().st_size - header, np.dtype(dtype).itemsize
    if size <= 0 or size % each:
        raise ValueError(
            f"{path}: {max(0, size)} bytes are not a number of tokens of {each} bytes; it is cut short, or "
            f"data.dtype={dtype} or data.header={header} is wrong"
        )
    tokens: Array = np.asarray(np.memmap(path, dtype, mode="r", offset=header))
    if dtype == "uint16" and looks_twice_as_wide(tokens):
        raise ValueError(f"{path}: every other token is 0, as if written with 32 bits; set data.dtype=uint32")
    return tokens


def looks_twice_as_wide(tokens: Array) -> bool:
    """Whether every other number is 0 at the beginning, and most of those between are not."""
    odd, even = tokens[1:BLOCK:2], tokens[0:BLOCK:2]
    return bool(len(odd) > 8 and not odd.any() and even.astype(bool).mean() > 0.5)
