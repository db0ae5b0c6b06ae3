import json
from pathlib import Path

from conftest import Script


def test_the_preset_writes_a_trace_and_a_table(script: Script, tmp_path: Path) -> None:
    done = script("train", "debug=profile", "model=mlp", f"folder={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    (trace,) = (tmp_path / "run" / "profile").glob("*.pt.trace.json")
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if "name" in event]
    assert names.count("aten::addmm") == 5 * 3  # of five steps, three layers each
    table = (tmp_path / "run" / "profile" / "fit-steps.txt").read_text()
    assert "aten::addmm" in table
    assert "boltcutter.model.mlp.MLP: model" in table
