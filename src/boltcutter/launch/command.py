"""From words to a job: composed, checked, frozen into the run's folder, submitted; then asked after."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from boltcutter import build, lineage, run
from boltcutter.config import ConfigError, DictConfig, compose, one_line, parse, plain, public, say
from boltcutter.describe import describe as describe_keys
from boltcutter.environment.identity import fresh
from boltcutter.launch import snapshot
from boltcutter.launch.array import combinations
from boltcutter.launch.job import Job, Launcher

SITE = Path("~/.config/boltcutter/launch")  # a user's own values: <option>.yaml, laid over those of configs/launch
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


def main(configs: Path, words: list[str]) -> None:
    """Launch, or ask after what has been launched.

    Raises:
        ConfigError: There are mistakes, or the job was refused.
    """
    flags = [word for word in words if word in FLAGS]
    words = [word for word in words if word not in FLAGS]
    with refusals():
        if "--describe" in flags:
            describe(configs, words)
        elif words and words[0] in VERBS:
            special, rest = run.take(words[1:], "run")
            if rest or not special.get("run"):
                raise ConfigError(f"{words[0]}: say {words[0]} run=<folder of a run or of an array>, and nothing else")
            ask(words[0], Path(special["run"]), follow="--wait" in flags)
        else:
            launch(configs, words, flags)


@contextmanager
def refusals() -> Iterator[None]:
    """What a launcher refuses is a mistake of the user."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(one_line(error)) from error


def launch(configs: Path, words: list[str], flags: Sequence[str]) -> None:
    """Do all up to submission, as far as the flags go."""
    settings, launcher = read_launcher(configs, words)
    rest = [word for word in words if not is_launch(word)]
    tasks = combinations(launcher.array) if launcher.array else [[]]
    resumed, _ = run.take(rest, "resume")
    if resumed and launcher.array:
        raise ConfigError("launch.array: a run goes on alone; leave out resume or the array")
    cfgs = [check(read_training(configs, [*rest, *task])) for task in tasks]
    if not can_check_values():
        print("note: without torch here, only the names of the configuration were checked, not its values")
    root = Path(configs).absolute().parent
    copies = launcher.snapshot and snapshot.can_copy(root)
    if launcher.snapshot and not copies:
        print(f"note: {root} is no git repository: the job runs the code as it is when it starts, not as it is now")
    job = describe_job(cfgs, root, array=bool(launcher.array), copies=copies)
    launcher.check(job)
    if "--dry-run" in flags:
        print(launcher.render(job), end="")
    elif "--check" in flags:
        print("ok")
    else:
        submit(launcher, settings, job, cfgs, bool(resumed))
        print(f"python {sys.argv[0]} status|logs|cancel run={shown(job.folder)}")
        if "--wait" in flags:
            ask("logs", job.folder, follow=True)
            sys.exit(any(reason(folder) != "completed" for folder in job.runs))


def is_launch(word: str) -> bool:
    """Whether a word speaks of the launch and not of the training."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0] == "launch"


def read_launcher(configs: Path, words: Sequence[str]) -> tuple[DictConfig, Launcher]:
    """The launcher that the words, the project and the user's own file mean; and its settings."""
    special, _ = run.take(words, "launch")
    rest = [word for word in words if is_launch(word) and not word.startswith("launch=")]
    if not special.get("launch"):
        known = ", ".join(sorted(file.stem for file in (configs / "launch").glob("*.yaml")))
        raise ConfigError(f"launch: not set; say launch=… (there are: {known})")
    picked = parse("launch", special["launch"])
    options = list(picked) if not isinstance(picked, str) else [picked]
    own = [str(file) for option in options if (file := (SITE / f"{option}.yaml").expanduser()).is_file()]
    settings = compose(configs, [f"launch={say([*options, *own])}", *rest], base=DictConfig({}))
    alone = DictConfig({"launch": settings.launch})
    if mistakes := build.check(alone, Settings):
        raise ConfigError("\n".join(mistakes))
    return settings.launch, build.build(settings.launch, "launch")


def read_training(configs: Path, words: Sequence[str]) -> DictConfig:
    """The configuration of the training, which does not know how it is launched."""
    cfg = run.read_words(configs, words)
    cfg.pop("launch", None)
    return cfg


def can_check_values() -> bool:
    """Whether what the configuration calls is there; on a login node it need not be."""
    return all(find_spec(name) for name in ("torch", "lightning"))


def check(cfg: DictConfig) -> DictConfig:
    """See that the configuration is right, and says what a job needs to know.

    Raises:
        ConfigError: It does not.
    """
    if can_check_values():
        from boltcutter.assemble import check_cfg  # imports torch

        cfg = check_cfg(cfg)
    trainer = public(cfg)["trainer"]
    nodes, devices = trainer.get("num_nodes", 1), count(trainer.get("devices", "auto"))
    if not isinstance(nodes, int) or nodes < 1:
        raise ConfigError(f"trainer.num_nodes={nodes} is no number of nodes; try trainer.num_nodes=1")
    size = cfg.data.get("batch_size")
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
    raise ConfigError(f"trainer.devices={say(devices)}: a job has to say how many; try trainer.devices=1")


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
    home = Path(cfgs[0].folder or Path(cfgs[0].runs) / cfgs[0].name / fresh()).absolute()
    folders = [str(home)]
    code = home / "code" if copies else None
    script = (code or root) / "scripts" / "train.py"
    if array:
        folders = [Job(name="", folder=home, script=script).run(task) for task in range(len(cfgs))]
    jobs = []
    for cfg, folder in zip(cfgs, folders, strict=True):
        cfg.folder = folder
        values = public(cfg)
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
                workers=(values["data"] or {}).get("workers") or 0,
                environment={"WANDB_RUN_GROUP": home.name} if array else {},
                progress="checkpoints" if values.get("checkpoints") == f"{folder}/checkpoints" else "metrics.csv",
                root=root,
                code=code,
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
        for cfg in cfgs:
            run.freeze(cfg)
        if job.root and job.code:
            state = lineage.git_state(job.root)
            snapshot.copy_code(job.root, job.code, state)
            for folder in job.runs:
                if "git" not in run.read_record(folder):
                    run.record_code(folder, state)
        file = job.folder / "job.sh"
        run.write_atomically(file, launcher.render(job))
        ids = launcher.submit(job, file)
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for folder, job_id in zip(job.runs, ids, strict=True):
        run.update_record(folder, launch={"settings": plain(settings), "id": job_id, "submitted": now})
        print(f"{launcher.status(job_id).text}: {shown(folder)}")


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


def launched(folder: Path) -> Iterator[tuple[Launcher, str]]:
    """The launcher that has a run, and the job's id there; nothing for a run that was started by hand."""
    facts = run.read_record(folder).get("launch")
    if facts:
        yield build.build(DictConfig(facts["settings"]), "launch"), facts["id"]


def ask(verb: str, place: Path, *, follow: bool) -> None:
    """Show how runs stand or what they print, or end them.

    Raises:
        ConfigError: There is no such run, or no launcher has it.
    """
    folders = [file.parent for file in sorted(place.glob("*/record.json"))]
    answers: dict[str, Callable[..., None]] = {"status": show_status, "logs": show_logs, "cancel": cancel}
    for folder in [place] if (place / "record.json").is_file() or not folders else folders:
        for launcher, job_id in launched(folder) or ():
            answers[verb](launcher, job_id, folder, follow=follow)
            break
        else:
            raise ConfigError(f"{folder}: no launcher has this run; it was started by hand")


def show_status(launcher: Launcher, job_id: str, folder: Path, **_: bool) -> None:
    """What the launcher says, and each attempt with its reason."""
    print(f"{shown(folder)}: {launcher.status(job_id).text}")
    for attempt in run.read_record(folder)["attempts"]:
        print(f"  {attempt['start']}  {attempt['reason']}")


def show_logs(launcher: Launcher, job_id: str, folder: Path, *, follow: bool) -> None:
    """What the run has printed."""
    for text in launcher.logs(job_id, folder, follow=follow):
        print(text, end="", flush=True)


def cancel(launcher: Launcher, job_id: str, folder: Path, **_: bool) -> None:
    """End a run, which saves before."""
    launcher.cancel(job_id)
    print(f"{shown(folder)}: {launcher.status(job_id).text}")


def reason(folder: Path) -> str:
    """How the last attempt ended."""
    attempts = run.read_record(folder)["attempts"]
    return str(attempts[-1]["reason"]) if attempts else "never started"


def shown(folder: Path) -> str:
    """A path as short as it can be written here."""
    return str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)


def describe(configs: Path, words: list[str]) -> None:
    """Show what can be set for a launch, or for the training."""
    prefix = next((word for word in words if "=" not in word and not word.startswith("~")), "launch")
    rest = [word for word in words if word != prefix]
    if prefix.partition(".")[0] == "launch":
        settings, _ = read_launcher(configs, rest)
        lines = describe_keys(DictConfig({"launch": settings}), Settings, prefix)
    else:
        from boltcutter.assemble import describe_words  # imports torch

        lines = describe_words(configs, [word for word in rest if not is_launch(word)], prefix)
    print("\n".join(lines))
