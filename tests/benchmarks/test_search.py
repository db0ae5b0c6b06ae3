import json
from pathlib import Path

import pytest
from conftest import Script, require

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_search_is_compared_with_a_shell_loop(script: Script, tmp_path: Path) -> None:
    done = script("bench", "search", "epochs=2", "trials=100", f"folder={tmp_path}", fresh=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    ratios = {f"{r['what']} / {r['over']}": r for r in json.loads((tmp_path / "search.json").read_text())["ratios"]}
    for engine in ("local", "ray"):
        trainings = ratios[f"8 trainings, engine={engine} / xargs -P 2"]
        assert trainings["target"] == 1.15
        assert trainings["value"] < 5  # trainings of two epochs are shorter than the start of Ray
        assert 0 < ratios[f"a trial of 100, engine={engine} / one of 10"]["value"] < 5  # a busy machine shows no more
    assert ratios["report of 100 trials / 5 s"]["value"] < 5
