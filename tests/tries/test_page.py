from __future__ import annotations

from pathlib import Path

import pytest

from boltcutter.tries.command import UNDECIDED


def test_the_page_shows_pairs_verdict_and_cost(ask, tmp_path: Path) -> None:
    _, result = ask("optimizer.lr=0.05", "tags=[fail:1]", "budget=6")
    text = Path(result["folder"], "report.html").read_text()
    assert text.count('<circle class="dot') == result["pairs"]
    assert 'class="dot lost"' in text
    assert "too large" in text
    assert result["verdict"] in text
    assert "of 100 such tries" in text


def test_the_page_of_a_try_that_was_stopped_has_its_expected_cost(ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOLTCUTTER_TRY_LIMITS", "30/6")
    status, result = ask("optimizer.lr=0.05")
    assert status == UNDECIDED
    assert "more pairs" in Path(result["folder"], "report.html").read_text()
