"""Submit a job, and record it in the folders of its runs."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from boltcutter import run_files
from boltcutter.checkpoint.atomic import write_text
from boltcutter.config.errors import ConfigError
from boltcutter.environment import user_key
from boltcutter.environment.platform_facts import GPUS
from boltcutter.launch.job import Job, Launcher, UnclearSubmissionError
from boltcutter.launch.jobs import find_launcher, job_of, run_verb
from boltcutter.launch.stored_runs import find_stored
from boltcutter.project import Project, command, display_path
from boltcutter.run import lineage, snapshot
from boltcutter.run.folder import read_record, record_code, update_record


def describe_code(launcher: Launcher, root: Path, folder: Path, name: str) -> dict[str, Any]:
    """Return the fields of a job that tell which code it runs; says so if it should be a copy, but cannot.

    Args:
        launcher: The launcher.
        root: Root of the project.
        folder: Folder of the job.
        name: Name of the project's script; the module is called instead if it is missing or not part of the copy.
    """
    copies, file = launcher.snapshot and snapshot.can_copy(root), Path("scripts", name)
    if launcher.snapshot and not copies and not find_stored(launcher):  # which then refuses the job
        print(f"note: {root} is not tracked by git: the job runs the code as it is when it starts, not a copy")
    code = folder / "code" if copies else None
    has_script = str(file) in snapshot.list_files(root, folder) if copies else (root / file).is_file()
    place = code or root
    environment = {} if has_script else Project.at(place).environment
    return {"root": root, "code": code, "script": place / file if has_script else None, "environment": environment}


def start(
    launcher: Launcher,
    settings: Mapping[str, Any],
    job: Job,
    prepare: Callable[[], None],
    flags: Sequence[str],
    *,
    resumed: bool,
) -> bool:
    """Check and submit a job, or stop earlier as the flags say; returns whether it was waited for."""
    if job.gpus and find_stored(launcher):  # its node fails where torch finds none
        job = dataclasses.replace(job, environment={GPUS: str(job.devices)} | dict(job.environment))
    launcher.check(job)
    if "--dry-run" in flags:
        print(launcher.render(job), end="")
    elif "--check" in flags:
        print("ok")
    else:
        submit(launcher, settings, job, prepare, resumed)
        if "--wait" in flags:
            run_verb("logs", job.folder, follow=True)
            return True
    return False


def submit(
    launcher: Launcher, settings: Mapping[str, Any], job: Job, prepare: Callable[[], None], resumed: bool
) -> None:
    """Create the folders of the runs by ``prepare``, submit the job and record its id in each."""
    created = [folder for folder in (job.folder, *job.run_folders) if not folder.exists()]
    for folder in job.run_folders:
        check_unused(folder, resumed)
    try:
        prepare()
        if job.root and job.code:
            state, library = lineage.git_state(job.root), lineage.library_state(job.root)
            snapshot.copy_code(job.root, job.code, state, library)
            for folder in job.run_folders:
                if "git" not in read_record(folder):
                    record_code(folder, state, library)
        file = job.folder / launcher.job_file
        write_text(file, launcher.render(job))
        ids = launcher.submit(job, file)
    except UnclearSubmissionError:
        raise  # the job may still start, and needs its folder
    except BaseException:
        for folder in created:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    facts = {"settings": settings, "submitted": now, "signature": user_key.sign(settings)}
    for folder, job_id in zip(job.run_folders, ids, strict=True):
        launch = {**facts, "id": job_id}
        update_record(folder, launch={**launch, "id_signature": user_key.sign(job_of(launch))})
        try:
            text = launcher.status(job_id).text
        except ValueError:
            text = f"job {job_id}, submitted"
        print(f"{text}: {display_path(folder)}")
    verbs = "status|logs|cancel" + ("|fetch" if find_stored(launcher) else "")
    print(f"{command('launch')} {verbs} {shlex.quote(f'run={display_path(job.folder)}')}")


def check_unused(folder: Path, resumed: bool) -> None:
    """Raise ConfigError if a new run has no new folder, or a job of a resumed run is pending or running."""
    if not (folder / run_files.RECORD).is_file():
        return
    if not resumed:
        path = display_path(folder)
        raise ConfigError(f"folder={path} holds a run; use resume={path}, or choose another")
    if launched := find_launcher(folder):
        launcher, job_id = launched
        status = launcher.status(job_id)
        if status.state in ("running", "pending"):
            raise ConfigError(f"resume={display_path(folder)}: {status.text}; cancel it first")
        if stored := find_stored(launcher):
            stored.refresh(folder)  # as the record here is sent again, with the attempts that it has
