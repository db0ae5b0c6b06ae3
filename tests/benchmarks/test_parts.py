import json
from pathlib import Path

import pytest
from benchmarks import parts
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_feature_is_disabled_once(script: Script, tmp_path: Path) -> None:
    done = script("bench", "parts", "rounds=1", "turns=2", "steps=2", f"folder={tmp_path}", timeout=1100)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "parts.json").read_text())["per_step"]
    assert found.keys() == parts.PARTS.keys() | {part + parts.OF_PLAIN for part in parts.PLAIN_PARTS}
    assert all(len(each) == 2 and min(each) > 0 for each in found.values())


def test_the_overrides_that_disable_features_are_valid() -> None:
    for overrides in parts.PARTS.values():
        assert all("=" in override or override.startswith("~callback.") for override in overrides)
