import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import pytest
from planted import forked, overrides, write_project

from boltcutter.project import Project
from boltcutter.replay import worker
from boltcutter.replay.job import Job
from boltcutter.training import train


class Replayed(NamedTuple):
    """A run that was stopped by a sample, and a replay of its last step."""

    run: Path
    folder: Path
    status: int


@pytest.fixture(scope="session")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    scratch = tmp_path_factory.mktemp("replayed")
    root, run, folder = write_project(scratch / "project"), scratch / "run", scratch / "replay"
    folder.mkdir()
    project = Project.at(root)

    def start() -> None:
        os.chdir(root)
        project.activate()
        train.train_command(project, overrides("log-of-zero", run))

    assert forked(start) == 1
    job = Job(run=str(run), folder=str(folder), last=9, save_before=9, inspect=9, trace=[8], forks=True)
    (folder / "record.json").write_bytes((run / "record.json").read_bytes())
    (folder / "job.json").write_text(json.dumps(asdict(job)))

    def again() -> None:
        os.chdir(root)
        raise SystemExit(worker.run(str(folder / "job.json")))

    return Replayed(run, folder, forked(again))
