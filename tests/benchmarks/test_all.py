import json
from pathlib import Path

import pytest
from benchmarks import all as everything
from benchmarks.harness import BenchmarkError


@pytest.mark.slow
def test_all_ratios_are_collected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    everything.main(Path(), [f"folder={tmp_path}", "parts=loader"])
    single, together = (json.loads((tmp_path / f"{name}.json").read_text())["ratios"] for name in ("loader", "all"))
    assert [r["what"] for r in together] == [f"loader: {r['what']}" for r in single]
    met = sum(ratio["met"] for ratio in single)
    assert f"\n{met} of {len(single)} meet their targets\n" in capsys.readouterr().out
    with pytest.raises(BenchmarkError, match="parts=loder: unknown benchmark"):
        everything.main(Path(), ["parts=loder"])
