"""Settings that the launcher refuses; test_batch.py tests the script."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch.job import Job
from boltcutter.launch.slurm import SlurmLauncher

JOB = Job("digits convnet", Path("/runs/a b/x"), Path("/p/scripts/train.py"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"time": "0:03:00"}, "launch.time=0:03:00 is too short .* try launch.time=0:07:00"),
        ({"time": "90"}, "launch.time=90 is not a time limit; write H:MM:SS"),
        ({"grace": 5}, "launch.grace=5 is less than 30; try launch.grace=30"),
        ({"chain": 2, "array": "seed=1,2"}, "launch.chain=2: arrays cannot be chained"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: secrets must not be written"),
        ({"sbatch": ["--nodes=3"]}, "launch.sbatch=--nodes=3: set by launch and trainer"),
        ({"sbatch": ["-N3"]}, "launch.sbatch=-N3: set by launch and trainer"),
        ({"sbatch": ["reservation=x"]}, "launch.sbatch=reservation=x: not an option of sbatch"),
        ({"sbatch": ["--error=/x"]}, "launch.sbatch=--error=/x: set by launch and trainer"),
        ({"sbatch": ["-e", "/x"]}, "launch.sbatch=-e: set by launch and trainer"),
        ({"srun": ["--export=NONE"]}, "launch.srun=--export=NONE: set by launch and trainer"),
        ({"srun": ["verbose"]}, "launch.srun=verbose: not an option of srun"),
        ({"memory": "64"}, "launch.memory=64 has no unit; try launch.memory=64G"),
        ({"container": "x", "container_engine": "edf", "container_mounts": ["/a"]}, "launch.container_mounts: .*edf"),
        ({"environment": {"A B": "x"}}, "launch.environment.'A B' is not a valid variable name"),
        ({"environment": {"A": "x\x1b[0m"}}, r"launch.environment=.* has the control character '\\x1b'"),
        ({"partition": "gpu\nrm -rf x"}, r"launch.partition=.* has the control character '\\n'"),
        ({"sbatch": ["--comment=a\rb"]}, r"launch.sbatch=.* has the control character '\\r'"),
        ({"modules": ["a\nb"]}, "launch.modules=.* has the control character"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmLauncher(**settings)


@pytest.mark.parametrize(
    ("job", "settings", "message"),
    [
        (replace(JOB, folder=Path("/r/a\\b")), {}, "folder=.*; choose another"),
        (JOB, {"venv": "/no/such"}, "launch.venv=/no/such: no virtual environment found"),
    ],
)
def test_invalid_jobs_are_refused(job: Job, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmLauncher(**settings).check(job)


@pytest.mark.parametrize("job_id", ["--user=me", "7,-u me", ""])
def test_malformed_job_ids_are_refused(job_id: str) -> None:
    for query in (SlurmLauncher().cancel, SlurmLauncher().status):
        with pytest.raises(ValueError, match=r"record\.json"):
            query(job_id)
