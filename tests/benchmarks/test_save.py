import json
from pathlib import Path

import pytest
from benchmarks import save

from boltcutter.project import Project


def test_training_waits_less_for_an_asynchronous_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save.main(Project.find(__file__), ["mib=64", "rounds=3", f"folder={tmp_path}"])
    found = json.loads((tmp_path / "save.json").read_text())
    (ratio,) = found["ratios"]
    assert ratio["value"] < 1
    assert {len(values) for values in found["details"].values()} == {3}
    assert "s per GiB" in capsys.readouterr().out
