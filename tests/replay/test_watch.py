import json
import math

from planted import BAD
from replay.conftest import Replayed

from boltcutter.checkpoint.load import read_steps
from boltcutter.replay.watch import BEFORE, as_plain


def test_what_a_step_is_made_of_is_written(replayed: Replayed) -> None:
    found = json.loads((replayed.folder / "result-rank-0.json").read_text())
    assert "NonFiniteGradientError" in found["error"]
    assert found["ended"] == 8
    assert float(found["losses"]["9"][0]) == math.inf
    assert found["bad"] == []
    (culprit,) = [row for row in found["rows"] if not math.isfinite(float(row["loss"]))]
    assert culprit["index"] == BAD
    assert len(found["rows"]) == 16
    assert [layer["layer"] for layer in found["layers"]] == ["net.0", "net.2"]
    assert read_steps(str(replayed.folder / BEFORE)) == 8


def test_numbers_that_json_has_not_are_text() -> None:
    assert as_plain({1: [math.nan, 2.0, (math.inf,)]}) == {"1": ["nan", 2.0, ["inf"]]}
