import sys

import pytest

from boltcutter.data.tokenizer import EOS, ByteTokenizer, load_tokenizer, train_bpe

TEXTS = ["def main():\n    return 1\n", "äöü – 漢字 🙂\n", "def other(x):\n    return main() + x\n" * 20]
ENCODED = [text.encode() for text in TEXTS]


@pytest.mark.parametrize("saved", ["bytes", train_bpe(ENCODED, 300)], ids=["bytes", "bpe"])
def test_text_is_restored_and_its_bytes_are_counted(saved: str) -> None:
    tokenizer = load_tokenizer(saved)
    lengths = tokenizer.token_bytes(400)
    assert len(lengths) == 400
    assert lengths[tokenizer.eos_id] == lengths[399] == 0  # the end of a document, and what is not there
    for text, tokens in zip(ENCODED, tokenizer.encode_many(ENCODED), strict=True):
        assert tokenizer.encode(text) == tokens.tolist()
        assert sum(lengths[token] for token in tokens.tolist()) == len(text)
        assert tokenizer.decode([*tokens.tolist(), tokenizer.eos_id]) == text.decode()
        assert tokens.max() < tokenizer.vocab_size


def test_bpe_training_is_deterministic_and_shortens_text() -> None:
    assert train_bpe(ENCODED, 290) == train_bpe(ENCODED, 290)
    tokenizer = load_tokenizer(train_bpe(ENCODED, 290))
    assert tokenizer.vocab_size == 290
    assert len(tokenizer.encode(ENCODED[2])) < len(ENCODED[2]) / 2
    assert EOS not in TEXTS[2]


def test_a_tokenizer_file_is_read(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "tokenizer.json"  # type: ignore[operator]
    file.write_text(train_bpe(ENCODED, 280))
    assert load_tokenizer(str(file)).vocab_size == 280
    file.write_text("{}")
    load_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=r"^data.tokenizer is not the JSON of a tokenizer \(.*\); give another file$"):
        load_tokenizer(str(file))


def test_invalid_settings_are_one_line_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^data.tokenizer=bpee: No such file or directory; give bytes, bpe, or the"):
        load_tokenizer("bpee")
    with pytest.raises(ValueError, match=r"^data.vocab_size=256 must be at least 257 for .*; try 4096$"):
        train_bpe(ENCODED, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"^data.tokenizer: the package tokenizers is not installed; pip install .*"):
        train_bpe(ENCODED, 300)
    assert ByteTokenizer().encode(b"ab") == [97, 98]  # does without
