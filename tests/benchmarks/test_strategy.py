import json
import sys
from pathlib import Path

import pytest
from benchmarks.harness import BenchmarkError
from benchmarks.strategy import ROWS, installed, main


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_rows_are_compared_with_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path, ["rows=one,dp", "epochs=1", f"folder={tmp_path}"])
    first, second, _ = json.loads((tmp_path / "strategy.json").read_text())["rows"]
    assert (first["apart"], first["speed"]) == (0, 1)
    assert 0 < second["apart"] < 1e-6
    assert "python scripts/train.py model=mlp" in capsys.readouterr().out


def test_rows_without_their_dependencies_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for package in ("horovod", "torchax"):
        monkeypatch.setitem(sys.modules, package, None)
    skipped = {name for name, overrides in ROWS.items() if not installed(overrides)}
    assert skipped == {name for name in ROWS if name.startswith(("mpirun", "horovod", "XLA"))}


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="rounds: unknown option"):
        main(tmp_path, ["rounds=2"])
    with pytest.raises(
        BenchmarkError, match=r"^rows=three: no row begins with this; choose from: one process; dp, 2 replicas; "
    ):
        main(tmp_path, ["rows=three"])
