from dataclasses import asdict
from pathlib import Path

from boltcutter.replay import page
from boltcutter.replay.why import Answer, Change


def test_the_page_shows_the_answer(tmp_path: Path) -> None:
    answer = Answer("runs/<a>", 7, "spike", cause="sample", lines=["sample 4 is the cause"])
    answer.values = {"loss": {"value": float("nan"), "z": float("inf")}}
    answer.samples = [{"index": 4, "where": "<b>.png", "loss": "nan", "gradient_norm": 2.0, "values": ["targets is 0"]}]
    answer.layers = [{"layer": "net.0", "activation": None, "gradient": 3.0, "z": {"gradient": 9.0}}]
    answer.changes = [Change("without sample 4", 0.5, None, 0.25, None, True)]
    text = page.write_page(asdict(answer), tmp_path / "why.html").read_text()
    for part in ("sample 4 is the cause", "&lt;b&gt;.png", "targets is 0", "without sample 4", "net.0", 'class="high"'):
        assert part in text
    assert "<b>.png" not in text
