import json
from pathlib import Path

import pytest
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_generation_with_a_cache_is_compared_with_recomputation(script: Script, tmp_path: Path) -> None:
    done = script("bench", "generate", "work=eager,onnx", "rounds=1", f"folder={tmp_path}", fresh=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "generate.json").read_text())
    assert [ratio["target"] for ratio in found["ratios"]] == [5, 5]
    assert all(ratio["value"] > 2 for ratio in found["ratios"])
    assert found["details"]["same_tokens"] == {"eager": 1, "onnx": 1}
