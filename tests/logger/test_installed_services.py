"""MLflow, Comet and Trackio as they are released: a run logs to each, and the service's own functions read it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

UV = ROOT / ".uv" / "bin" / "uv"
READ = {  # prints the values of val/loss that the package finds in a working directory
    "mlflow": """
import mlflow
client = mlflow.MlflowClient("sqlite:///runs/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("digits-linear").experiment_id])
assert run.info.status == "FINISHED" and run.data.params["trainer/max_epochs"] == "2"
print([metric.value for metric in client.get_metric_history(run.info.run_id, "val/loss")])
""",
    "comet_ml": """
import json, pathlib, zipfile
(archive,) = pathlib.Path("comet").glob("*.zip")
lines = zipfile.ZipFile(archive).read("messages.json").decode().splitlines()
metrics = [message["payload"]["metric"] for message in map(json.loads, lines) if message["type"] == "metric_msg"]
print([metric["metricValue"] for metric in metrics if metric["metricName"] == "val/loss"])
""",
    "trackio": """
import json, pathlib, sqlite3
(file,) = pathlib.Path.home().rglob("digits-linear.db")
rows = [json.loads(row) for (row,) in sqlite3.connect(file).execute("SELECT metrics FROM metrics ORDER BY id")]
print([row["val/loss"] for row in rows if "val/loss" in row])
""",
}
LOGGER = {"comet_ml": "comet"}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not UV.is_file(), reason="uv is not installed: bash .ci/prepare")
@pytest.mark.parametrize("package", READ)
def test_a_run_is_read_by_the_service(package: str, tmp_path: Path) -> None:
    packages = tmp_path / "packages"  # before those of this environment, whose versions some of them exclude
    installing = ["pip", "install", "-q", "--python", sys.executable, "--target", str(packages), package]
    subprocess.run([UV, *installing], check=True, timeout=600)
    for heavy in ("torch", "torch-*.dist-info", "nvidia*"):  # dependencies that this environment has
        assert not [*packages.glob(heavy)]
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (project / "pyproject.toml").write_text("[tool.boltcutter]\n")
    env = os.environ | {"PYTHONPATH": str(packages), "HOME": str(home), "COMET_OFFLINE_DIRECTORY": "comet"}
    env["COMET_START_ONLINE"] = "0"
    overrides = ["model=linear", "trainer.max_epochs=2", "report=false", "test=false"]

    def python(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", *arguments]
        done = subprocess.run(command, cwd=project, env=env, text=True, capture_output=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python("-m", "boltcutter", "train", *overrides, f"logger={LOGGER.get(package, package)}")
    (record,) = (project / "runs").rglob("record.json")
    last = json.loads(record.read_text())["metrics"]["val/loss"]
    values = json.loads(python("-c", READ[package]).splitlines()[-1])
    assert len(values) == 2
    assert float(values[-1]) == pytest.approx(last, rel=1e-5)
