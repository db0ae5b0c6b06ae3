"""From words to a job: composed, checked, frozen into the run's folder, submitted; then asked after."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter import build, lineage, run, trust
from boltcutter.atomic import write_text
from boltcutter.config import ConfigError, DictConfig, compose, format_value, one_line, parse, plain, redacted
from boltcutter.describe import describe as describe_keys
from boltcutter.environment.identity import new_run_id
from boltcutter.launch import snapshot
from boltcutter.launch.array import combinations
from boltcutter.launch.job import JOB_VARIABLE, Job, Launcher, UnclearSubmissionError
from boltcutter.launch.jobs import ask, launched, list_runs, reason, shown
from boltcutter.project import Project, command

SITE = Path("~/.config/boltcutter/launch")  # a user's own values: <option>.yaml, laid over those of configs/launch
OF_SLURM = re.compile(r"\$\{oc\.env:\s*(SLURM_\w+)\s*\}")  # without a default
VERBS = ("status", "logs", "cancel")
FLAGS = {
    "--dry-run": "print the job's file and submit nothing",
    "--wait": "follow the log until the job has ended",
    "--check": "look for mistakes and leave",
    "--describe": "list every key that can be set below the next word, with type, value and documentation",
}


@dataclasses.dataclass
class Settings:
    """What this script takes besides a training's configuration.

    Args:
        launch: Where the run goes.
    """

    launch: Launcher


def main(project: Project, words: list[str]) -> None:
    """Launch, or ask after what has been launched.

    Raises:
        ConfigError: There are mistakes, or the job was refused.
    """
    flags = [word for word in words if word in FLAGS]
    words = [word for word in words if word not in FLAGS]
    with refusals():
        if "--describe" in flags:
            describe(project, words)
        elif words and words[0] == "list":
            special, rest = run.split_overrides(words[1:], "runs")
            if rest:
                raise ConfigError(f"list: {rest[0]}: takes nothing but runs=<folder>; leave it out")
            list_runs(Path(special.get("runs") or run.read_overrides(project, []).runs))
        elif words and words[0] in VERBS:
            special, rest = run.split_overrides(words[1:], "run")
            if rest or not special.get("run"):
                raise ConfigError(f"{words[0]}: say {words[0]} run=<folder of a run or of an array>, and nothing else")
            ask(words[0], Path(special["run"]), follow="--wait" in flags)
        else:
            launch(project, words, flags)


@contextmanager
def refusals() -> Iterator[None]:
    """What a launcher refuses is a mistake of the user."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def launch(project: Project, words: list[str], flags: Sequence[str]) -> None:
    """Do all up to submission, as far as the flags go."""
    resumed, _ = run.split_overrides(words, "resume")
    settings, launcher = read_launcher(project, words, recorded(resumed))
    rest = [word for word in words if not is_launch(word)]
    tasks = combinations(launcher.array) if launcher.array else [[]]
    if resumed and launcher.array:
        raise ConfigError("launch.array: a run goes on alone; leave out resume or the array")
    root = project.root
    copies = launcher.snapshot and snapshot.can_copy(root)
    if launcher.snapshot and not copies:
        print(f"note: git does not know {root}: the job runs the code as it is when it starts, not as it is now")
    cfgs = [read_training(project, [*rest, *task]) for task in tasks]
    with variables_of_the_job(cfgs, launcher.environment) as late:
        cfgs = [check(cfg, values=not late) for cfg in cfgs]
        if late:
            print(f"note: only the job knows {', '.join(late)}, so the values of the configuration are checked there")
        elif not can_check_values():
            print("note: without torch here, only the names of the configuration were checked, not its values")
        job = describe_job(cfgs, root, array=bool(launcher.array), copies=copies)
    launcher.check(job)
    if "--dry-run" in flags:
        print(launcher.render(job), end="")
    elif "--check" in flags:
        print("ok")
    else:
        submit(launcher, settings, job, cfgs, bool(resumed))
        print(f"{command('launch')} status|logs|cancel run={shown(job.folder)}")
        if "--wait" in flags:
            ask("logs", job.folder, follow=True)
            sys.exit(any(reason(folder) != "completed" for folder in job.runs))


@contextmanager
def variables_of_the_job(cfgs: Sequence[DictConfig], environment: Mapping[str, str]) -> Iterator[list[str]]:
    """Let references to variables of the job resolve here: to the values that the job will have, or to their names.

    Args:
        cfgs: Whose references, as ``${oc.env:SLURM_TMPDIR}``, may be to variables that SLURM sets in the job.
        environment: That the launcher sets for the job.

    Yields:
        Variables whose values are not known here.
    """
    named = {name for cfg in cfgs for name in OF_SLURM.findall(json.dumps(plain(cfg), default=str))}
    values = {name: f"${name}" for name in sorted(named - os.environ.keys())}
    values |= {name: str(value) for name, value in environment.items()}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield [name for name, value in values.items() if JOB_VARIABLE.search(value)]
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def recorded(resumed: dict[str, str]) -> DictConfig | None:
    """The launch settings of the run that is resumed; None where it was not launched."""
    folder = Path(resumed.get("resume") or "")
    facts = run.read_record(folder).get("launch") if resumed and (folder / "record.json").is_file() else None
    if not facts:
        return None
    trust.check(facts["settings"], f"resume={folder}", folder, signature=facts.get("signature"), runs=True)
    settings = dict(facts["settings"])
    for name in ("array", "max_parallel"):  # it goes on alone
        settings.pop(name, None)
    return DictConfig(settings)


def is_launch(word: str) -> bool:
    """Whether a word speaks of the launch and not of the training."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0] == "launch"


def read_launcher(
    project: Project, words: Sequence[str], earlier: DictConfig | None = None
) -> tuple[DictConfig, Launcher]:
    """The launcher that the words, the project and the user's own file mean; and its settings.

    Args:
        project: Whose configuration is used.
        words: Of the command line.
        earlier: Settings with which the run was launched before; they stay, but for what the words change.
    """
    special, _ = run.split_overrides(words, "launch")
    rest = [word for word in words if is_launch(word) and not word.startswith("launch=")]
    picked = parse("launch", special.get("launch") or "null")
    options = [picked] if isinstance(picked, str) else list(picked or [])
    if not options and earlier is None:
        raise ConfigError(f"launch: not set; give launch=…{project.list_options('launch')}")
    base = DictConfig({"launch": earlier}) if earlier is not None else DictConfig({})
    own = [str(file) for option in options if (file := (SITE / f"{option}.yaml").expanduser()).is_file()]
    chosen = compose(project, [f"launch={format_value([*options, *own])}"], base=DictConfig({})) if options else base
    # Several options name a cluster by what differs there, so they count more than those of the last one.
    stays = earlier is not None and len(options) < 2 and chosen.launch.get("_target_") == earlier.get("_target_")
    settings = compose(project, rest, base=base if stays else chosen)
    alone = DictConfig({"launch": settings.launch})
    if mistakes := build.check(alone, Settings):
        raise ConfigError("\n".join(mistakes))
    return settings.launch, build.build(settings.launch, "launch")


def read_training(project: Project, words: Sequence[str]) -> DictConfig:
    """The configuration of the training, which does not know how it is launched."""
    cfg = run.read_overrides(project, words)
    cfg.pop("launch", None)
    return cfg


def can_check_values() -> bool:
    """Whether what the configuration calls is there; on a login node it need not be."""
    return all(find_spec(name) for name in ("torch", "lightning"))


def check(cfg: DictConfig, *, values: bool = True) -> DictConfig:
    """See that the configuration is right, and says what a job needs to know.

    Args:
        cfg: Of the training.
        values: Whether they are known here, and can be checked where torch is installed.

    Raises:
        ConfigError: It does not.
    """
    if values and can_check_values():
        from boltcutter.assemble import check_config  # imports torch

        cfg = check_config(cfg)
    trainer = redacted(cfg)["trainer"]
    nodes, devices = trainer.get("num_nodes", 1), count(trainer.get("devices", "auto"))
    if not isinstance(nodes, int) or nodes < 1:
        raise ConfigError(f"trainer.num_nodes={nodes} is no number of nodes; try trainer.num_nodes=1")
    target = str((cfg.data or {}).get("_target_"))
    own = target.partition(".")[0] == __name__.partition(".")[0]  # the batch of another data module is that of a rank
    size = cfg.data.get("batch_size") if own else None
    strategy = trainer.get("strategy", "auto")
    shares = isinstance(strategy, str) or str(strategy.get("_target_")).endswith(".DDPStrategy")
    if shares and isinstance(size, int) and size % (ranks := nodes * devices):
        raise ConfigError(f"data.batch_size={size} does not divide over {ranks} ranks; try {size + -size % ranks}")
    return cfg


def count(devices: Any) -> int:
    """The number of devices on each node.

    Raises:
        ConfigError: It cannot be known here.
    """
    if isinstance(devices, list) and devices:
        return len(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    raise ConfigError(f"trainer.devices={format_value(devices)}: a job has to say how many; try trainer.devices=1")


def describe_job(cfgs: Sequence[DictConfig], root: Path, *, array: bool, copies: bool) -> Job:
    """What the launcher has to know of the configurations, which are given their folders.

    Args:
        cfgs: Of each run.
        root: Folder of the project.
        array: Whether they are an array, also if there is one alone.
        copies: Whether the job runs a copy of the code.

    Raises:
        ConfigError: Runs of one array need different nodes.
    """
    home = Path(cfgs[0].folder or Path(cfgs[0].runs) / cfgs[0].name / new_run_id()).absolute()
    folders = [str(home)]
    code = home / "code" if copies else None
    script = (code or root) / "scripts" / "train.py"
    if array:
        folders = [Job(name="", folder=home, script=script).run(task) for task in range(len(cfgs))]
    jobs = []
    for cfg, folder in zip(cfgs, folders, strict=True):
        cfg.folder = folder
        values = redacted(cfg)
        trainer = values["trainer"]
        jobs.append(
            Job(
                name=str(cfgs[0].name),
                folder=home,
                script=script,
                tasks=len(cfgs) if array else 0,
                nodes=trainer.get("num_nodes", 1),
                devices=count(trainer.get("devices", "auto")),
                gpus=trainer.get("accelerator", "auto") != "cpu",
                workers=(values["data"] or {}).get("num_workers") or 0,
                environment={"WANDB_RUN_GROUP": home.name} if array else {},
                progress="checkpoints" if values.get("checkpoints") == f"{folder}/checkpoints" else "metrics.csv",
                root=root,
                code=code,
                trusted=trust.is_granted() or not cfg.get("resume") or run.is_signed_by_user(Path(cfg.resume)),
            )
        )
    if any(job != jobs[0] for job in jobs):
        raise ConfigError("launch.array: all runs need the same nodes, devices and workers; launch those apart")
    return jobs[0]


def submit(launcher: Launcher, settings: DictConfig, job: Job, cfgs: Sequence[DictConfig], resumed: bool) -> None:
    """Freeze each run into its folder, hand the job over, and record who has it.

    Raises:
        ConfigError: The folder is in use.
    """
    made = [folder for folder in (job.folder, *job.runs) if not folder.exists()]
    for folder in job.runs:
        refuse_used(folder, resumed)
    try:
        with variables_of_the_job(cfgs, launcher.environment):
            for cfg in cfgs:
                run.save_config(cfg)
        if job.root and job.code:
            state = lineage.git_state(job.root)
            snapshot.copy_code(job.root, job.code, state)
            for folder in job.runs:
                if "git" not in run.read_record(folder):
                    run.record_code(folder, state)
        file = job.folder / "job.sh"
        write_text(file, launcher.render(job))
        ids = launcher.submit(job, file)
    except UnclearSubmissionError:
        raise  # the job may start, and needs its folder
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    known = {"settings": plain(settings), "submitted": now, "signature": trust.sign(plain(settings))}
    for folder, job_id in zip(job.runs, ids, strict=True):
        run.update_record(folder, launch={**known, "id": job_id})
        try:
            text = launcher.status(job_id).text
        except ValueError:
            text = f"job {job_id}, submitted"
        print(f"{text}: {shown(folder)}")


def refuse_used(folder: Path, resumed: bool) -> None:
    """See that nobody trains in a folder, and that a new run has a new one.

    Raises:
        ConfigError: It is not so.
    """
    if not (folder / "record.json").is_file():
        return
    if not resumed:
        raise ConfigError(f"folder={shown(folder)} holds a run; say resume={shown(folder)}, or choose another")
    for launcher, job_id in launched(folder):
        status = launcher.status(job_id)
        if status.state in ("running", "waiting"):
            raise ConfigError(f"resume={shown(folder)}: {status.text}; cancel it first")


def describe(project: Project, words: list[str]) -> None:
    """Show what can be set for a launch, or for the training."""
    prefix = next((word for word in words if "=" not in word and not word.startswith("~")), "launch")
    rest = [word for word in words if word != prefix]
    if prefix.partition(".")[0] == "launch":
        settings, _ = read_launcher(project, rest)
        lines = describe_keys(DictConfig({"launch": settings}), Settings, prefix)
    else:
        from boltcutter.assemble import describe_overrides  # imports torch

        lines = describe_overrides(project, [word for word in rest if not is_launch(word)], prefix)
    print("\n".join(lines))
