"""Tokenizers: bytes, or byte pair encoding."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

EOS = "<|endoftext|>"  # end-of-sequence token, after each document
INSTALL = "pip install 'boltcutter[text]'"
Tokens = list[npt.NDArray[np.int64] | npt.NDArray[np.uint8]]


class ByteTokenizer:
    """Each byte is a token; 0, which does not occur in text, is the end-of-sequence token.

    Attributes:
        serialized: ``bytes``, or JSON, from which ``load_tokenizer`` restores the tokenizer.
        vocab_size: Number of tokens in the vocabulary.
        eos_id: Id of the end-of-sequence token.
    """

    serialized, vocab_size, eos_id = "bytes", 256, 0

    def encode(self, text: bytes) -> list[int]:
        """Bytes as integers."""
        return list(text)

    def encode_many(self, texts: Sequence[bytes]) -> Tokens:
        """Bytes as integers."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the bytes, without end-of-sequence tokens."""
        return bytes(token for token in tokens if 0 < token < 256).decode(errors="replace")

    def token_bytes(self, vocab_size: int) -> list[int]:
        """One byte per token."""
        return [int(0 < token < 256) for token in range(vocab_size)]


class BPETokenizer:
    """Byte pair encoding with Hugging Face ``tokenizers``, from the JSON of a tokenizer.

    Raises:
        ValueError: The package is not installed, or cannot read the JSON.

    Source: Sennrich et al., Neural Machine Translation of Rare Words with Subword Units, 2016; Radford et al., Language
    Models are Unsupervised Multitask Learners, 2019 (byte-level).
    """

    def __init__(self, serialized: str) -> None:
        library = _tokenizers()
        try:
            self.inner: Any = library.Tokenizer.from_str(serialized)
        except Exception as error:  # the package raises Exception itself
            raise ValueError(f"data.tokenizer is not the JSON of a tokenizer ({error}); give another file") from None
        self.serialized, self.vocab_size = serialized, int(self.inner.get_vocab_size())
        ids = [self.inner.token_to_id(name) for name in (EOS, "</s>", "<|end_of_text|>", "[SEP]")]
        self.eos_id = next((token for token in ids if token is not None), 0)

    def encode(self, text: bytes) -> list[int]:
        """Token ids of text, without added special tokens."""
        return list(self.inner.encode(text.decode(errors="replace"), add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[bytes]) -> Tokens:
        """Token ids of each text, on all cores."""
        found = self.inner.encode_batch_fast(
            [text.decode(errors="replace") for text in texts], add_special_tokens=False
        )
        return [np.asarray(each.ids, np.int64) for each in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self.inner.decode(list(tokens), skip_special_tokens=True))

    def token_bytes(self, vocab_size: int) -> list[int]:
        """Number of bytes of each token's text; 0 for special and unused tokens."""
        special = {token for token, added in self.inner.get_added_tokens_decoder().items() if added.special}
        names = [None if i in special else self.inner.id_to_token(i) for i in range(vocab_size)]
        byte_level = type(self.inner.decoder).__name__ == "ByteLevel"  # then each character stands for one byte
        return [0 if name is None else len(name) if byte_level else _length(name) for name in names]


Tokenizer = ByteTokenizer | BPETokenizer


def _length(name: str) -> int:
    """Number of bytes of a SentencePiece token, where ▁ is a space and <0x0A> a byte."""
    return 1 if re.fullmatch(r"<0x[0-9A-F]{2}>", name) else len(name.replace("▁", " ").encode())


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> str:
    """Train a byte-level BPE tokenizer.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens in the vocabulary; fewer if the texts have no more pairs to merge.

    Returns:
        JSON of the tokenizer.

    Raises:
        ValueError: The package is not installed, or ``vocab_size`` is below 257.
    """
    if vocab_size <= 256:
        raise ValueError(f"data.vocab_size={vocab_size} must be at least 257 for data.tokenizer=bpe; try 4096")
    library = _tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator((text.decode(errors="replace") for text in texts), trainer)
    return str(tokenizer.to_str())


@cache
def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer by ``bytes``, its JSON, or the path of a JSON file.

    Raises:
        ValueError: The file does not exist, or is not a tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.lstrip().startswith("{"):
        return BPETokenizer(name)
    try:
        return BPETokenizer(Path(name).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"data.tokenizer={name}: {reason}; give bytes, bpe, or the path of a tokenizer.json") from None


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(f"data.tokenizer: the package tokenizers is not installed; {INSTALL}, or use bytes") from None
    return tokenizers
