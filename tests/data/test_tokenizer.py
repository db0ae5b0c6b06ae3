import sys

import pytest

from boltcutter.data.tokenizer import END, Bytes, make_tokenizer, train_bpe

TEXTS = ["def main():\n    return 1\n", "äöü – 漢字 🙂\n", "def other(x):\n    return main() + x\n" * 20]
ENCODED = [text.encode() for text in TEXTS]


@pytest.mark.parametrize("saved", ["bytes", train_bpe(ENCODED, 300)], ids=["bytes", "bpe"])
def test_text_comes_back_and_its_bytes_are_counted(saved: str) -> None:
    tokenizer = make_tokenizer(saved)
    lengths = tokenizer.token_bytes(400)
    assert len(lengths) == 400
    assert lengths[tokenizer.end] == lengths[399] == 0  # the end of a document, and what is not there
    for text, tokens in zip(ENCODED, tokenizer.encode_many(ENCODED), strict=True):
        assert tokenizer.encode(text) == tokens.tolist()
        assert sum(lengths[token] for token in tokens.tolist()) == len(text)
        assert tokenizer.decode([*tokens.tolist(), tokenizer.end]) == text.decode()
        assert tokens.max() < tokenizer.size


def test_bpe_is_learnt_the_same_each_time_and_shortens() -> None:
    assert train_bpe(ENCODED, 290) == train_bpe(ENCODED, 290)
    tokenizer = make_tokenizer(train_bpe(ENCODED, 290))
    assert tokenizer.size == 290
    assert len(tokenizer.encode(ENCODED[2])) < len(ENCODED[2]) / 2
    assert END not in TEXTS[2]


def test_a_file_of_a_tokenizer_is_read(tmp_path: pytest.TempPathFactory) -> None:
    file = tmp_path / "tokenizer.json"  # type: ignore[operator]
    file.write_text(train_bpe(ENCODED, 280))
    assert make_tokenizer(str(file)).size == 280
    file.write_text("{}")
    make_tokenizer.cache_clear()
    with pytest.raises(ValueError, match=r"^data.tokenizer: not the JSON of a tokenizer \(.*\); give another file$"):
        make_tokenizer(str(file))


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^data.tokenizer=bpee: No such file or directory; give bytes, bpe, or the"):
        make_tokenizer("bpee")
    with pytest.raises(ValueError, match=r"^data.vocab_size=256: 256 bytes and an end are the least for .*; try 4096$"):
        train_bpe(ENCODED, 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"^data.tokenizer: the package tokenizers is not installed; pip install .*"):
        train_bpe(ENCODED, 300)
    assert Bytes().encode(b"ab") == [97, 98]  # does without
