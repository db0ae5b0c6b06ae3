import json
from pathlib import Path
from typing import Any

import pytest

from boltcutter.run import compare


def folder_with(where: Path, name: str, **record: Any) -> Path:
    (where / name).mkdir()
    (where / name / "record.json").write_text(json.dumps(record))
    return where / name


def test_equal_metrics_are_reproduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = {"val/loss": 0.1}
    compare.report_reproduction(
        folder_with(tmp_path, "a", metrics=metrics), folder_with(tmp_path, "b", metrics=metrics)
    )
    assert capsys.readouterr().out == f"reproduced: all 1 metrics equal those of {tmp_path / 'a'}\n"


def test_a_resumed_original_is_named_as_a_possible_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, attempts=[{"resumed_from": "last.ckpt"}])
    compare.report_reproduction(before, folder_with(tmp_path, "b", metrics={"val/loss": 0.2}))
    assert "note: the original was resumed" in capsys.readouterr().out


def test_rounding_of_a_gpu_is_named_as_a_possible_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempts = [{"device": "cpu", "deterministic": True}, {"device": "cuda", "deterministic": False}]
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, attempts=attempts)
    after = folder_with(tmp_path, "b", metrics={"val/loss": 0.2}, attempts=attempts[:1])
    compare.report_reproduction(before, after)
    assert "note: rounding varies on cuda without trainer.deterministic=true" in capsys.readouterr().out
    compare.report_reproduction(after, folder_with(tmp_path, "c", metrics={}, attempts=attempts[:1]))
    assert "rounding" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({"metrics": {"val/loss": 0.1 + 1e-17}}, "reproduced"),
        ({"metrics": {"val/loss": 0.1, "recompiles": 1.0}}, "reproduced: all 1 metrics"),
        ({"metrics": {"val/loss": 0.1 + 1e-15}}, "not reproduced: val/loss is 0.100000000000001, was 0.1"),
        ({"metrics": {}}, "not reproduced: val/loss is None, was 0.1"),
        ({"metrics": {"val/loss": 0.1}, "data": "b"}, "warning: data differ: fingerprint b, was a"),
    ],
)
def test_differences_are_reported_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], here: dict[str, object], message: str
) -> None:
    before = folder_with(tmp_path, "a", metrics={"val/loss": 0.1}, data="a")
    compare.report_reproduction(before, folder_with(tmp_path, "b", **({"data": "a"} | here)))
    assert message in capsys.readouterr().out


def test_records_of_somebody_else_are_reported_in_printable_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    escapes = "\x1b]0;title\x07\x9b31m"
    odd = [{"deterministic": False}, {"deterministic": False, "device": []}, {"deterministic": False, "device": "cuda"}]
    first = folder_with(tmp_path, "first", attempts=odd, metrics={escapes: 1}, data=escapes)
    second = folder_with(tmp_path, "second", attempts=None, metrics=None, test=None)
    compare.report_reproduction(first, second)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 3
    assert all(line.isprintable() for line in lines)
