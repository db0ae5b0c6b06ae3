import pytest

from boltcutter.export.table import show
from boltcutter.export.verify import Result


def test_each_format_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    original = Result(200_000, "accuracy", 0.98, latency={1: 0.5, 32: 4.0}, throughput=8000.0)
    small = Result(50_000, "accuracy", 0.975, 0.5, 0.01, {1: 0.1, 32: 1.0}, 32000.0)
    show({"fp32": original, "int8": small, "safetensors": Result(200_000, "accuracy", 0.98)})
    header, first, second, third = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["format", "size", "of"]
    assert first.split() == ["fp32", "0.20", "MB", "1.000", "0.9800", "+0.00", "pt", "0.0e+00", "0.5", "4", "8,000"]
    assert second.split() == ["int8", "50.0", "kB", "0.250", "0.9750", "+0.50", "pt", "1.0e-02", "0.1", "1", "32,000"]
    assert third.endswith("–")
