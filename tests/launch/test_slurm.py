"""What the settings of a job refuse; test_batch.py has the text of its file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boltcutter.launch.job import Job
from boltcutter.launch.slurm import SlurmLauncher, seconds

JOB = Job("digits convnet", Path("/runs/a b/x"), Path("/p/scripts/train.py"))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"time": "0:03:00"}, "launch.time=0:03:00 leaves no minute of training .* try launch.time=0:07:00"),
        ({"time": "90"}, "launch.time=90 is no time; write H:MM:SS"),
        ({"grace": 5}, "launch.grace=5 is less than 30; try launch.grace=30"),
        ({"chain": 2, "array": "seed=1,2"}, "launch.chain=2: arrays are not chained"),
        ({"environment": {"WANDB_API_KEY": "x"}}, "launch.environment.WANDB_API_KEY: a secret must not stand"),
        ({"sbatch": ["--nodes=3"]}, "launch.sbatch=--nodes=3: launch and trainer set it"),
        ({"sbatch": ["-N3"]}, "launch.sbatch=-N3: launch and trainer set it"),
        ({"sbatch": ["reservation=x"]}, "launch.sbatch=reservation=x: no option of sbatch"),
        ({"sbatch": ["--error=/x"]}, "launch.sbatch=--error=/x: launch and trainer set it"),
        ({"sbatch": ["-e", "/x"]}, "launch.sbatch=-e: launch and trainer set it"),
        ({"srun": ["--export=NONE"]}, "launch.srun=--export=NONE: launch and trainer set it"),
        ({"srun": ["verbose"]}, "launch.srun=verbose: no option of srun"),
        ({"memory": "64"}, "launch.memory=64 has no unit of SLURM; try launch.memory=64G"),
        ({"container": "x", "container_engine": "edf", "container_mounts": ["/a"]}, "launch.container_mounts: edf"),
        ({"environment": {"A B": "x"}}, "launch.environment.'A B' is no name of a variable"),
        ({"environment": {"A": "x\x1b[0m"}}, r"launch.environment=.* has the control character '\\x1b'"),
        ({"partition": "gpu\nrm -rf x"}, r"launch.partition=.* has the control character '\\n'"),
        ({"sbatch": ["--comment=a\rb"]}, r"launch.sbatch=.* has the control character '\\r'"),
        ({"modules": ["a\nb"]}, "launch.modules=.* has the control character"),
    ],
)
def test_what_cannot_be_is_told_before_submission(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SlurmLauncher(**settings)


def test_times() -> None:
    times = {"1:30:00": 5400, "90:00": 5400, "2-12": 216000, "1-00:30": 88200, "0-1:00:05": 3605}
    assert {time: seconds(time) for time in times} == times


@pytest.mark.parametrize(
    ("job", "settings", "told"),
    [
        (replace(JOB, name="a\nb"), {}, "name=.* has the control character"),
        (replace(JOB, folder=Path("/r/a\tb")), {}, "folder=.* has the control character"),
        (replace(JOB, folder=Path("/r/a\\b")), {}, "folder=.*; choose another"),
        (JOB, {"venv": "/no/such"}, "launch.venv=/no/such: no virtual environment there"),
    ],
)
def test_what_the_job_cannot_have_is_refused(job: Job, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SlurmLauncher(**settings).check(job)


@pytest.mark.parametrize("job_id", ["--user=me", "7,-u me", ""])
def test_no_other_jobs_are_cancelled_than_the_recorded_one(job_id: str) -> None:
    for ask in (SlurmLauncher().cancel, SlurmLauncher().status):
        with pytest.raises(ValueError, match=r"record\.json"):
            ask(job_id)
