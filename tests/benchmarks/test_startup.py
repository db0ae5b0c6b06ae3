import json
from pathlib import Path

import pytest
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ratios_are_measured_in_one_run(script: Script, tmp_path: Path) -> None:
    done = script("bench", "startup", "rounds=1", f"folder={tmp_path}", timeout=1100)
    assert done.returncode == 0, done.stderr
    ratios = {r["what"]: r for r in json.loads((tmp_path / "startup.json").read_text())["ratios"]}
    assert ratios["import lightning.pytorch"]["value"] == 1.0
    assert 0 < ratios["--help"]["value"] < ratios["--check"]["value"]  # a single round on a busy machine shows no more
    assert ratios["first training step"]["target"] == 1.35
