"""The script of docs/ray.md that starts Ray inside a SLURM allocation."""

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Script, require
from ray_run import OVERRIDES, assert_bitwise_equal
from slurm_cluster import Cluster, wait_until

require(install="pip install -c constraints.txt -e '.[dev-cloud]'", package="ray")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_trains_inside_an_allocation(cluster: Cluster, script: Script, tmp_path: Path) -> None:
    (text,) = re.findall(
        r"^```bash\n(#!/bin/bash\n#SBATCH.*?)^```$", (ROOT / "docs" / "ray.md").read_text(), re.M | re.S
    )
    folder, file = cluster.runs / "ray", cluster.runs / "ray.sh"
    overrides = [override for override in OVERRIDES if override != "trainer.devices=2"]
    programs = Path(sys.executable).parent
    for documented, tested in {
        "cd /path/to/the/project && source .venv/bin/activate": f"cd {ROOT} && PATH={programs}:$PATH",
        "--wait": " ".join([*overrides, f"folder={folder}", "--wait"]),
        "#SBATCH ": f"#SBATCH --output={cluster.runs}/ray.log ",
    }.items():
        assert documented in text
        text = text.replace(documented, tested)
    file.write_text(text)
    done = cluster.call("sbatch", "--parsable", str(file))
    assert done.returncode == 0, done.stderr
    state = lambda: cluster.job(done.stdout.strip()).get("JobState")  # noqa: E731
    wait_until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"), folder, 300)
    log = (cluster.runs / "ray.log").read_text()
    assert state() == "COMPLETED", log
    record = json.loads((folder / "record.json").read_text())
    assert [attempt["reason"] for attempt in record["attempts"]] == ["completed"], log
    whole = script("train", *OVERRIDES, f"folder={tmp_path}/ddp")
    assert whole.returncode == 0, whole.stderr
    assert_bitwise_equal(folder, tmp_path / "ddp")
