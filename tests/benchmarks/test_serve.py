import json
from pathlib import Path

import pytest
from conftest import Script


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_is_compared_with_a_loop(script: Script, tmp_path: Path) -> None:
    options = ["work=convnet", "rounds=1", "seconds=2", f"folder={tmp_path}"]
    done = script("bench", "serve", *options, fresh=True, timeout=300)
    assert done.returncode == 0, done.stderr
    served, slowest = json.loads((tmp_path / "serve.json").read_text())["ratios"]
    assert (served["target"], slowest["target"]) == (None, 5)  # HTTP takes longer than so small a model
    assert 0 < served["value"] < 1.2
    assert slowest["value"] >= 1
