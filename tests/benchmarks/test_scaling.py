import json
from pathlib import Path

import pytest
from benchmarks import scaling
from benchmarks.harness import BenchmarkError
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_two_processes_are_measured_against_two_runs(script: Script, tmp_path: Path) -> None:
    done = script("bench", "scaling", "rounds=1", "turns=2", "steps=2", f"folder={tmp_path}", timeout=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "scaling.json").read_text())
    assert found["ratios"][0]["target"] == scaling.LEAST
    assert found["ratios"][0]["least"]
    rates = found["details"]
    assert set(rates) == {"together", "gloo", "by hand", "apart", "waiting"}
    for (each,) in rates.values():
        assert len(each) == 2
        assert min(each) > 0
    assert rates["waiting"] < rates["apart"]


def test_unknown_options_are_refused() -> None:
    with pytest.raises(BenchmarkError, match=r"^round: unknown option"):
        scaling.main(Path(), ["round=1"])
