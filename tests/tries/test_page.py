from __future__ import annotations

from pathlib import Path


def test_the_page_shows_pairs_verdict_and_cost(ask, tmp_path: Path) -> None:
    _, result = ask("optimizer.lr=0.05", "tags=[fail:1]", "budget=6")
    text = Path(result["folder"], "report.html").read_text()
    assert text.count('<circle class="dot') == result["pairs"]
    assert 'class="dot lost"' in text
    assert "too large" in text
    assert result["verdict"] in text
    assert "of 100 such tries" in text
