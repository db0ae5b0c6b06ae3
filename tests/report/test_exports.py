import json
from pathlib import Path

from boltcutter.report.exports import format_bytes
from boltcutter.report.page import render_page


def test_a_report_shows_a_table(tmp_path: Path) -> None:
    original = {"size": 1000, "metric": "accuracy", "value": 0.9, "drop": 0.0, "max_difference": 0.0}
    original |= {"latency": {"1": 2.0, "32": 20.0}, "throughput": 1600.0}
    small = original | {"size": 250, "drop": 0.25, "latency": {"1": 8.0, "32": 10.0}}
    weights = original | {"latency": None, "throughput": None}
    results = {"fp32": original, "int8": small, "safetensors": weights}
    (tmp_path / "export").mkdir()
    path = tmp_path / "export" / "export.json"
    path.write_text(json.dumps({"split": "test", "checkpoint": "best.ckpt", "results": results}))
    page = render_page(tmp_path)
    for text in ("+0.25 points", "0.2 kB", "25%", "8.000 ms", "1,600", '<th scope="row">safetensors</th>'):
        assert text in page
    path.write_text("{")
    assert "Exports" in render_page(tmp_path)  # among the missing parts


def test_sizes_have_decimal_units() -> None:
    assert [format_bytes(size) for size in (950, 99_000, 2_500_000)] == ["0.9 kB", "99.0 kB", "2.50 MB"]
