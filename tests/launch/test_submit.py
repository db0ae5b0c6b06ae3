import os
import shutil
from pathlib import Path

import pytest
import yaml
from slurm_cluster import Launch

from boltcutter.config.errors import ConfigError
from boltcutter.environment.platform_facts import GPUS


def test_a_refused_submission_creates_no_folder(launch: Launch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sbatch is not installed"):
        launch("launch=slurm", f"folder={tmp_path}/array", "launch.array=seed=1,2")
    assert not (tmp_path / "array").exists()


KUBERNETES = ["launch=kubernetes", "launch.image=a:1", "launch.storage=s3://bucket/runs"]


@pytest.mark.parametrize(
    ("arguments", "requested"),
    [
        (["trainer.devices=1"], "1"),
        (["trainer.devices=2", "trainer.accelerator=cuda"], "2"),
        (["trainer.devices=1", "trainer.accelerator=cpu"], None),
    ],
)
def test_a_job_tells_its_node_that_it_asked_for_gpus(
    launch: Launch, arguments: list[str], requested: str | None, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "git").symlink_to(str(shutil.which("git", path=os.defpath)))  # which selects the files to send
    job = yaml.safe_load(
        launch(*KUBERNETES, *arguments, "--dry-run").partition("# kubectl")[2].partition("\n")[2].split("\n---")[0]
    )
    (container,) = job["spec"]["template"]["spec"]["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert variables.get(GPUS) == requested


def test_an_unconfirmed_submission_keeps_its_folder(launch: Launch, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text("#!/bin/bash\necho 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1\n")
    sbatch.chmod(0o755)
    folder = tmp_path / "run"
    with pytest.raises(ConfigError, match=f"may or may not be queued: .* remove {folder} and launch again"):
        launch("launch=slurm", f"folder={folder}")
    assert (folder / "job.sh").is_file()
