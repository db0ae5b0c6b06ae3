import json
from pathlib import Path

from boltcutter.bench import loader


def test_the_same_bytes_are_read_in_both_ways(tmp_path: Path) -> None:
    read: list[int] = []
    before = loader.rate
    loader.rate = lambda get: read.append(sum(get())) or 1.0  # type: ignore[assignment, func-returns-value]
    try:
        loader.main(Path(), ["rounds=1", "batches=2", f"folder={tmp_path}"])
    finally:
        loader.rate = before
    ours, theirs = read[::2], read[1::2]
    assert ours == theirs
    assert ours[0] == 2 * 64 * (28 * 28 + 8)
    assert json.loads((tmp_path / "loader.json").read_text())["ratios"][0]["value"] == 1.0
    assert before(lambda: [1, 2]) > 0
