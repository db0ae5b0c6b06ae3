import json
import sys
from pathlib import Path

import pytest

from boltcutter.bench.harness import BenchmarkError
from boltcutter.bench.strategy import ROWS, installed, main


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_row_is_told_beside_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(tmp_path, ["rows=one,dp", "epochs=1", f"folder={tmp_path}"])
    first, second, _ = json.loads((tmp_path / "strategy.json").read_text())["rows"]
    assert (first["apart"], first["speed"]) == (0, 1)
    assert 0 < second["apart"] < 1e-6
    assert "python scripts/train.py model=mlp" in capsys.readouterr().out


def test_rows_that_need_what_is_not_installed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "horovod", None)
    left_out = {name for name, words in ROWS.items() if not installed(words)}
    assert left_out == {name for name in ROWS if name.startswith(("mpirun", "horovod"))}


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="rounds: no such setting here"):
        main(tmp_path, ["rounds=2"])
    with pytest.raises(BenchmarkError, match=r"^rows=three: none begins so; there are: one process; dp, 2 copies; "):
        main(tmp_path, ["rows=three"])
