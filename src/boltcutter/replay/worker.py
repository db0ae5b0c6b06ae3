"""The process of replays: trains some steps of a run once more, without writing to its folder."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar

from boltcutter.assembly.assemble import assemble, complete_config, recorded_loggers
from boltcutter.assembly.overrides import load_run_config
from boltcutter.config.errors import ConfigError, one_line
from boltcutter.config.settings import Settings
from boltcutter.diagnosis.invariants import Invariants
from boltcutter.diagnosis.ledger import StepLedger
from boltcutter.environment import startup
from boltcutter.environment.identity import run_id
from boltcutter.environment.process import call_glibc, distributed_shutdown, track_children
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.project import Project
from boltcutter.protocols import handles_signals
from boltcutter.replay.job import COPY, Job, with_values
from boltcutter.replay.watch import ReplayEndError, Watch
from boltcutter.run import trust
from boltcutter.run.changes import SettingChanges
from boltcutter.training import callbacks
from boltcutter.training.ending import EndOfTraining
from boltcutter.training.failure import explain_errors
from boltcutter.training.resume import load_initial_state
from boltcutter.training.train import load_data

LEFT_OUT = (Checkpoint, ProgressBar, Invariants)  # what saves, shows or checks, but changes no step


def serve_jobs() -> None:
    """Replay a job whose file is given, or those that standard input names, each in a process of its own."""
    startup.begin()
    if COPY in os.environ and sys.path[0] in ("", os.getcwd()):  # where -m looks first; PYTHONPATH has the copy
        del sys.path[0]
    if len(sys.argv) > 1:
        sys.exit(run(sys.argv[1]))
    for line in sys.stdin:
        path, owner = line.strip(), os.getpid()
        if (child := os.fork()) == 0:
            call_glibc("prctl", startup.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != owner:
                os._exit(1)
            sys.argv[1:] = [path]  # of the other ranks, which are started by the same command
            os.dup2(2, 1)
            status = run(path)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        os.waitpid(child, 0)
        print("done", flush=True)


def run(path: str) -> int:
    """Replay a job, and return an exit status."""
    job = Job(**json.loads(Path(path).read_text()))
    if job.trusts:
        trust.apply_overrides(["trust=true"])
    try:
        replay(Project.find(None), job)
    except ReplayEndError:
        return 0
    except (ConfigError, SystemExit) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if not getattr(error, "hide_traceback", False):
            traceback.print_exc()
        print(f"error: {type(error).__name__}: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def replay(project: Project, job: Job) -> None:
    """Train the steps of a job.

    Raises:
        ReplayEndError: The last step was done.
    """
    project.activate()
    filter_warnings()
    recorded = complete_config(with_values(load_run_config(project, Path(job.run)), job.values, job.unset))
    cfg = settings(recorded, job)
    ending, changes = EndOfTraining(cfg), SettingChanges(recorded)
    with run_id([job.folder]), distributed_shutdown():
        components = assemble(cfg, lambda configured: callbacks.in_order(cfg, configured, changes, ending))
        trainer = components.trainer
        found: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        found[:] = [each for each in found if not isinstance(each, LEFT_OUT) and not handles_signals([each])]
        for callback in found:
            if isinstance(callback, StepLedger):
                callback.every_n_steps = 1
        if not any(isinstance(callback, StepLedger) for callback in found):
            found.append(StepLedger(Path(job.folder), every_n_steps=1))
        found.append(Watch(job))
        trainer.loggers = [*recorded_loggers(recorded)[:-1], *trainer.loggers]
        with explain_errors(trainer):
            load_data(components)
        load_initial_state(components, cfg, job.checkpoint, ending, changes)
        track_children(trainer.strategy.launcher)
        trainer.fit(components.task, datamodule=components.data, ckpt_path=job.checkpoint, weights_only=True)


def settings(recorded: Settings, job: Job) -> Settings:
    """The configuration of a replay: that of the run, which writes elsewhere, on as many ranks of one machine."""
    trainer: dict[str, Any] = {"devices": job.devices, "num_nodes": 1}
    strategy = recorded.trainer.get("strategy")
    if isinstance(strategy, Mapping) and strategy.get("start_method") == "popen" and job.forks:
        trainer["strategy"] = {"start_method": "fork"}  # of this process, which has imported all modules
    if job.double:
        trainer["precision"] = "64-true"
    new: dict[str, Any] = {"folder": job.folder, "checkpoints": f"{job.folder}/checkpoints", "trainer": trainer}
    new |= {"logger": dict.fromkeys(recorded.logger), "resume": None, "reproduce": None}
    new |= dict.fromkeys(("report", "test", "final_validation"), False)
    if "asynchronous" in (recorded.get("checkpoint_io") or {}):
        new["checkpoint_io"] = {"asynchronous": False}
    return recorded.changed(new)


if __name__ == "__main__":
    serve_jobs()
