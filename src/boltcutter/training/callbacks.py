"""All callbacks of a training, in their order."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning.pytorch.callbacks import Callback

from boltcutter import extend
from boltcutter.callback.announced import Announced
from boltcutter.callback.metrics import SeparateMetrics
from boltcutter.callback.monitors import MonitoredValues
from boltcutter.callback.plan import PlanCheck
from boltcutter.callback.reseed import EvaluationSeeds
from boltcutter.callback.weights import SameWeights
from boltcutter.checks.monitors import MonitorCheck
from boltcutter.checks.resources import ResourceNotes
from boltcutter.config.settings import Settings
from boltcutter.diagnosis.ledger import StepLedger
from boltcutter.environment.startup import TRIAL_FD
from boltcutter.report.media_logging import MediaLogging
from boltcutter.run.changes import SettingChanges
from boltcutter.training.best import CheckpointRecorder
from boltcutter.training.ending import EndOfTraining
from boltcutter.training.exactness import ExactnessCheck
from boltcutter.training.failure import LostRankReport
from boltcutter.training.recorder import Recorder
from boltcutter.training.resume_state import ResumeState


def in_order(
    cfg: Settings, configured: Mapping[str, Callback], changes: SettingChanges, ending: EndOfTraining
) -> list[Callback]:
    """The callbacks of a training in the order in which Lightning calls each hook.

    Users add, change and remove those of ``configs/callback``; the others belong to every training. Lightning moves the
    callbacks that save checkpoints behind all others.

    Args:
        cfg: Configuration of the run.
        configured: Callbacks of the configuration by name, in the order of its files.
        changes: Applies changed settings.
        ending: Evaluates the last weights, and records what ended training.
    """
    return [
        Announced(cfg.place.folder, float(cfg.timeout)),  # before another callback can hang, or wait on_exception
        LostRankReport(),  # of on_exception, in which another callback may wait for the rank that is lost
        MonitorCheck(configured),  # replaces a monitor, or says that it is not logged, before others read it
        EvaluationSeeds(cfg.seed),  # before another callback draws random numbers in validation
        SeparateMetrics(),  # before a metric is updated
        # The ledger of steps notes what the others have made of weights and averages.
        *sorted(configured.values(), key=lambda callback: isinstance(callback, StepLedger)),
        ResumeState(),  # logs the metrics of an unfinished epoch before they are recorded
        Recorder(cfg),  # prints the summary, when all callbacks are set up
        ending,  # before checkpoints are saved, as it validates once more
        changes,  # after the state of optimizers and schedulers was restored
        ExactnessCheck(cfg),  # compares what all callbacks above have restored
        CheckpointRecorder(cfg, configured),
        PlanCheck(),
        MonitoredValues(),
        SameWeights(),
        ResourceNotes(),
        *_of_launch(cfg),
        *extend.callbacks(cfg),  # of other distributions
        MediaLogging(cfg.place.folder),  # extends the loggers, which a callback above may have replaced
    ]


def _of_launch(cfg: Settings) -> list[Callback]:
    """Callbacks that depend on what has started this process; their modules are imported only then."""
    found = []
    if {"WORLD_SIZE", "SLURM_NNODES"} & os.environ.keys():  # maybe of several nodes
        from boltcutter.callback import transport

        found += transport.callbacks(cfg)
    if TRIAL_FD in os.environ:
        from boltcutter.callback.trial_callback import trial_reporter

        found += trial_reporter(cfg)
    return found
