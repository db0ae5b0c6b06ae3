import json
from pathlib import Path

from boltcutter.bench.window import Stopwatch


def test_a_stopwatch_tells_seconds_a_step(tmp_path: Path) -> None:
    Stopwatch().write(tmp_path / "a", 1, [2.5])
    Stopwatch().write(tmp_path / "b", 1_000_000, [])
    one, many = (json.loads((tmp_path / name).read_text()) for name in "ab")
    assert 0 < many["wall"] < one["wall"]
    assert one["losses"] == [2.5]
    assert one["mib"] > 1
