from __future__ import annotations

from pathlib import Path

from boltcutter_search.results import Result


def test_a_trial_has_no_error_unless_it_failed() -> None:
    result = Result(3, "running", {"optimizer": "sgd"}, {}, [(9, 0.5)], {}, 1.5, Path("trials/0003"))
    assert result.error == ""
    assert result == Result(3, "running", {"optimizer": "sgd"}, {}, [(9, 0.5)], {}, 1.5, Path("trials/0003"), "")
