import json
from pathlib import Path

import pytest

from boltcutter.bench.window import Stopwatch


def test_a_stopwatch_tells_seconds_a_step(tmp_path: Path) -> None:
    stopwatch = Stopwatch()
    for _ in range(3):
        stopwatch.lap()
    stopwatch.write(tmp_path / "measured.json", 3, [2.5])
    found = json.loads((tmp_path / "measured.json").read_text())
    assert len(found["each"]) == 3
    assert 0 < found["wall"] == pytest.approx(sum(found["each"]) / 3)
    assert found["losses"] == [2.5]
    assert found["mib"] > 1
