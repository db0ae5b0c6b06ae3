"""Text to tokens and back: bytes, or pairs of bytes that stand together often."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

END = "<|endoftext|>"  # between documents
INSTALL = "pip install 'boltcutter[text]'"


class Tokenizer(Protocol):
    """What data of tokens needs.

    Attributes:
        saved: All it takes to make it again: ``bytes``, or JSON.
        size: Tokens that it knows.
        end: The token after a document.
    """

    saved: str
    size: int
    end: int

    def encode(self, text: bytes) -> list[int]:
        """Tokens of text in UTF-8."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
        """Tokens of each text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens; what is no UTF-8 becomes �."""
        ...

    def token_bytes(self, vocabulary: int) -> list[int]:
        """Bytes that each of ``vocabulary`` tokens stands for; 0 for those that stand for no text."""
        ...


class Bytes:
    """Each byte is a token; 0, which text does not have, ends a document."""

    saved, size, end = "bytes", 256, 0

    def encode(self, text: bytes) -> list[int]:
        """The bytes as numbers."""
        return list(text)

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
        """The bytes as numbers."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes, up to the end of the document."""
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def token_bytes(self, vocabulary: int) -> list[int]:
        """One byte each."""
        return [int(0 < token < 256) for token in range(vocabulary)]


class BPE:
    """Byte pair encoding by Hugging Face's ``tokenizers``.

    Args:
        saved: JSON.

    Raises:
        ValueError: The package is not installed, or it cannot read the JSON.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, 2016; Radford et al., Language
    Models are Unsupervised Multitask Learners, 2019 (of bytes).
    """

    def __init__(self, saved: str) -> None:
        try:
            self.inner: Any = _tokenizers().Tokenizer.from_str(saved)
        except Exception as error:  # the package raises Exception itself
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"data.tokenizer: not the JSON of a tokenizer ({error}); give another file") from None
        self.saved, self.size = saved, int(self.inner.get_vocab_size())
        ends = [self.inner.token_to_id(name) for name in (END, "</s>", "<|end_of_text|>", "[SEP]")]
        self.end = next((end for end in ends if end is not None), 0)

    def encode(self, text: bytes) -> list[int]:
        """Tokens of text, without any that the tokenizer would put around it."""
        return list(self.inner.encode(text.decode(errors="replace"), add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[bytes]) -> list[npt.NDArray[np.int64] | npt.NDArray[np.uint8]]:
        """Tokens of each text, on all cores."""
        found = self.inner.encode_batch_fast(
            [text.decode(errors="replace") for text in texts], add_special_tokens=False
        )
        return [np.asarray(each.ids, np.int64) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, vocabulary: int) -> list[int]:
        """Length of each token's text; 0 for special ones and those that are not there."""
        special = {token for token, added in self.inner.get_added_tokens_decoder().items() if added.special}
        names = [None if i in special else self.inner.id_to_token(i) for i in range(vocabulary)]
        of_bytes = type(self.inner.decoder).__name__ == "ByteLevel"  # there, each letter stands for one byte
        return [0 if name is None else len(name) if of_bytes else _length(name) for name in names]


def _length(name: str) -> int:
    """Bytes of a SentencePiece token, where ▁ is a space and <0x0A> a byte."""
    return 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", name) else len(name.replace("▁", " ").encode())


def train_bpe(texts: Iterable[bytes], size: int) -> str:
    """JSON of a tokenizer of ``size`` tokens learnt from ``texts``, fewer where there is nothing more to learn.

    Raises:
        ValueError: The package is not installed, or the size is below what bytes need.
    """
    if size <= 256:
        raise ValueError(f"data.vocab_size={size}: 256 bytes and an end are the least for data.tokenizer=bpe; try 4096")
    library = _tokenizers()
    made = library.Tokenizer(library.models.BPE())
    made.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    made.train_from_iterator(_decoded(texts), trainer)
    return str(made.to_str())


def _decoded(texts: Iterable[bytes]) -> Iterator[str]:
    for text in texts:
        yield text.decode(errors="replace")


@cache
def make_tokenizer(saved: str) -> Tokenizer:
    """A tokenizer from ``bytes``, JSON, or the path of a JSON file.

    Raises:
        ValueError: There is no such file, or it is something else.
    """
    if saved == "bytes":
        return Bytes()
    if saved.lstrip().startswith("{"):
        return BPE(saved)
    try:
        return BPE(Path(saved).read_text())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"data.tokenizer={saved}: {why}; give bytes, bpe, or the path of a tokenizer.json") from None


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise ValueError(f"data.tokenizer: the package tokenizers is not installed; {INSTALL}, or take bytes") from None
    return tokenizers
