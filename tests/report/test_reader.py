from pathlib import Path

from boltcutter.report.reader import ReportReader


def test_what_is_missing_or_damaged_is_named_and_left_out(tmp_path: Path) -> None:
    reader = ReportReader(tmp_path)
    assert reader.get("Curves", 0, (tmp_path / "metrics.csv").read_text) == 0
    (tmp_path / "metrics.json").write_text("{")
    assert reader.get("Metrics", [], int, "{") == []
    assert reader.missing[0] == ("Curves", "metrics.csv is missing")
    assert reader.missing[1][0] == "Metrics"
    assert reader.missing[1][1].startswith("cannot be read: ValueError")


def test_a_section_is_shown_if_its_file_is_there(tmp_path: Path) -> None:
    reader = ReportReader(tmp_path)
    assert reader.section("Own", "own.csv", lambda file: f"<p>{file.name}</p>") == ""
    (tmp_path / "own.csv").touch()
    assert reader.section("Own", "own.csv", lambda file: f"<p>{file.name}</p>") == "<p>own.csv</p>"
    assert reader.missing == []
