"""Launch a search as a job array whose tasks share its trials."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.config.errors import ConfigError
from boltcutter.config.values import split_overrides
from boltcutter.environment import user_key
from boltcutter.launch.job import Job, Launcher
from boltcutter.launch.slurm import SlurmLauncher
from boltcutter.launch.submit import describe_code, start
from boltcutter.project import Project, command
from boltcutter.run.folder import update_record
from boltcutter.search.command import open_study, worker_folder
from boltcutter.search.plan import RECORD, Plan, continued, planned, save, signed_part

REPORT = run_files.REPORT  # written by the last worker


def launch_search(
    project: Project, settings: Mapping[str, Any], launcher: Launcher, overrides: list[str], flags: Sequence[str]
) -> None:
    """Check and submit a search, or stop earlier as the flags say."""
    plan = plan_search(project, launcher, overrides)
    job = create_job(plan, project.root, launcher)
    if start(launcher, settings, job, lambda: prepare(plan), flags, resumed=True):
        sys.exit(not (job.folder / REPORT).is_file())


def plan_search(project: Project, launcher: Any, overrides: Sequence[str]) -> Plan:
    """Return the search; raises ConfigError if it has mistakes, or the launcher cannot run it."""
    special, rest = split_overrides(overrides, "resume")
    plan = continued(project, Path(special["resume"]), rest) if special else planned(project, rest, runs_here=False)
    if not launcher.index_variable:
        raise ConfigError(
            "launch: a search is launched by launch=slurm and launch=kubernetes only; elsewhere, call "
            f"{command('search')} there"
        )
    if launcher.array:
        raise ConfigError("launch.array: the workers of a search are an array; set search.max_parallel instead")
    if isinstance(launcher, SlurmLauncher) and launcher.chain > 1:
        raise ConfigError(f"launch.chain={launcher.chain}: arrays cannot be chained; remove it")
    if plan.search.engine != "local":
        raise ConfigError(f"search.engine={plan.search.engine}: workers of a cluster need search.engine=local; set it")
    return plan


def create_job(plan: Plan, root: Path, launcher: Launcher) -> Job:
    """Create the job of a search, which runs a copy of the code in ``root`` or the code there."""
    return Job(
        name=plan.folder.parent.name,
        folder=plan.folder,
        array_size=plan.search.max_parallel or 1,
        devices=plan.devices,
        gpus=plan.gpus > 0,
        num_workers=plan.num_workers,
        progress="../study.log",
        digests=(user_key.digest(signed_part(plan)),),
        search=True,
        **describe_code(launcher, root, plan.folder, "search.py"),
    )


def prepare(plan: Plan) -> None:
    """Write the search, its study and the folders of its workers, before the job is submitted."""
    if not (plan.folder / RECORD).is_file():
        save(plan)
    open_study(plan)
    for worker in range(plan.search.max_parallel or 1):
        folder = worker_folder(plan.folder, worker)
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        if not (folder / run_files.RECORD).is_file():
            update_record(folder, id=folder.name, name=plan.folder.parent.name, attempts=[])
