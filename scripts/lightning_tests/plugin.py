"""Pytest plugin: each Trainer of a test becomes what a training makes of it; writes the outcome of each test.

Environment variables: ``LIGHTNING_TESTS_RUNS``, the folder of run folders, without which tests run plain;
``LIGHTNING_TESTS_RESULTS``, the file to which outcomes are appended as JSON lines; with ``LIGHTNING_TESTS_QUIET``, what
a user sees of the default configuration is left out: checkpoints, progress bar, rates, throughput and ``metrics.csv``.

Callbacks, loggers and the checkpoint IO are built by the library's own functions from its default configuration. Left
out are the explanation of errors, which changes the class of exceptions, the capture of output, the lease, filters of
warnings, and what the arguments of a test exclude. A trainer that has not been fitted evaluates without the callbacks
of training.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

RUNS, RESULTS = os.environ.get("LIGHTNING_TESTS_RUNS"), os.environ.get("LIGHTNING_TESTS_RESULTS")
RUNS = RUNS and os.path.join(RUNS, os.environ.get("PYTEST_XDIST_WORKER", "main"))  # each removes its own
IS_QUIET = bool(os.environ.get("LIGHTNING_TESTS_QUIET"))
SEEN = ("best", "last", "learning_rate", "throughput", "recompiles", "progress")  # callbacks


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Write the outcome of a test when it is torn down."""
    result: Any = yield
    report = result.get_result()
    outcome = getattr(item, "outcome", "passed")
    if report.outcome == "failed" or (report.outcome == "skipped" and outcome == "passed"):
        item.outcome = outcome = report.outcome
    if call.when == "teardown" and RESULTS:
        with open(RESULTS, "a") as file:
            file.write(json.dumps({"test": item.nodeid, "outcome": outcome}) + "\n")


class Treatment:
    """Patches ``Trainer``.

    Args:
        runs: Folder of the run folders.
    """

    def __init__(self, runs: Path) -> None:
        from boltcutter.assembly.assemble import read_config
        from boltcutter.environment.platform_facts import disable_mpi_detection
        from boltcutter.project import Project
        from boltcutter.run.folder import create_folder

        runs.mkdir(parents=True, exist_ok=True)
        self.runs, root = runs, Path(tempfile.mkdtemp(prefix="project-", dir=runs))
        (root / "configs" / "task").mkdir(parents=True)
        (root / "pyproject.toml").write_text("[tool.boltcutter]\n")
        target = "_target_: lightning.pytorch.demos.boring_classes.BoringModel\n"
        (root / "configs" / "task" / "own.yaml").write_text(f"# Own module.\n{target}")
        overrides = ["task=own", "data=null", "logger=csv", "trainer.accelerator=cpu"]
        self.cfg = read_config(Project.find(root), overrides)
        self.template = root / "run"
        create_folder(self.cfg.changed({"folder": str(self.template)}), root)
        disable_mpi_detection()

    def patch(self) -> None:
        """Replace methods of ``Trainer``."""
        import lightning.pytorch as pl

        pl.Trainer.__init__ = self._init(pl.Trainer.__init__)  # type: ignore[method-assign]
        pl.Trainer.fit = self._fit(pl.Trainer.fit)  # type: ignore[method-assign]
        for name in ("validate", "test", "predict"):
            setattr(pl.Trainer, name, self._evaluation(getattr(pl.Trainer, name)))

    def own_callbacks(self, cfg: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The callbacks of the configuration, without those that a user of these arguments has to remove."""
        from lightning.pytorch.callbacks import Callback, Checkpoint, LearningRateMonitor, ProgressBar

        from boltcutter.assembly.assemble import build_each

        given = as_list(arguments.get("callbacks"))
        excluded: tuple[type, ...] = ()
        if arguments.get("enable_checkpointing") is False or arguments.get("barebones"):
            excluded += (Checkpoint,)
        if arguments.get("enable_progress_bar") is False or any(isinstance(one, ProgressBar) for one in given):
            excluded += (ProgressBar,)
        if arguments.get("barebones"):
            excluded += (ProgressBar, LearningRateMonitor)
        found = build_each(cfg, "callback", Callback)
        hidden = SEEN if IS_QUIET else ()
        return {name: one for name, one in found.items() if name not in hidden and not isinstance(one, excluded)}

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        from lightning.fabric.plugins import CheckpointIO
        from lightning.pytorch import loggers as kinds
        from lightning.pytorch.strategies import Strategy, StrategyRegistry

        from boltcutter.assembly.assemble import build_loggers, permit_removals
        from boltcutter.callback.metrics import SeparateMetrics
        from boltcutter.callback.reseed import EvaluationSeeds
        from boltcutter.checkpoint.checkpoint_io import AtomicCheckpointIO
        from boltcutter.data.hooks import shard_loaders
        from boltcutter.internals import launches_processes, set_launcher
        from boltcutter.report.media_logging import MediaLogging
        from boltcutter.run.changes import SettingChanges
        from boltcutter.strategy.process_launcher import MultiProcessingLauncher
        from boltcutter.training.callbacks import in_order
        from boltcutter.training.ending import EndOfTraining
        from boltcutter.training.failure import LostRankReport

        @functools.wraps(original)
        def init(trainer: Any, *args: Any, **arguments: Any) -> None:
            folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.runs))
            shutil.copy(self.template / "record.json", folder)
            cfg = self.cfg.changed({"folder": str(folder)})
            own = self.own_callbacks(cfg, arguments)
            given = {f"given{index}": one for index, one in enumerate(as_list(arguments.get("callbacks")))}
            ordered = in_order(cfg, own | given, SettingChanges(cfg), EndOfTraining(cfg))
            arguments["callbacks"] = [one for one in ordered if not isinstance(one, LostRankReport)]
            if not arguments.get("barebones") and not IS_QUIET:
                loggers = arguments.get("logger")
                if loggers is None or loggers is True:
                    loggers = kinds.CSVLogger(arguments.get("default_root_dir") or os.getcwd())
                arguments["logger"] = [*as_list(loggers), *build_loggers(cfg)[-1:]]
            plugins, strategy = as_list(arguments.get("plugins")), arguments.get("strategy")
            has_own = isinstance(strategy, Strategy) and strategy._checkpoint_io is not None
            if isinstance(strategy, str) and strategy in StrategyRegistry:
                has_own = "checkpoint_io" in StrategyRegistry[strategy]["init_params"]
            if not has_own and not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
                arguments["plugins"] = [*plugins, AtomicCheckpointIO()]
            original(trainer, *args, **arguments)
            shard_loaders(trainer, 0)
            permit_removals(trainer)
            if launches_processes(trainer.strategy):
                set_launcher(trainer.strategy, MultiProcessingLauncher)
            evaluates = (EvaluationSeeds, SeparateMetrics, MediaLogging)
            training = [one for one in ordered if not isinstance(one, evaluates) and one not in given.values()]
            trainer.of_training, trainer.is_fitted = {id(one) for one in training}, False

        return init

    def _fit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        import lightning.pytorch as pl

        from boltcutter.assembly.adapt import adapt, load_compiled
        from boltcutter.data.hooks import run_hooks_early, seed_hooks

        @functools.wraps(original)
        def fit(trainer: Any, model: Any, *args: Any, **options: Any) -> Any:
            if isinstance(model, pl.LightningModule) and not trainer.is_fitted:
                trainer.is_fitted = True
                load_compiled(model)
                data = options.get("datamodule")
                seed_hooks(data or model, 0)
                adapt(trainer, model, is_own=True)
                if data is not None:
                    run_hooks_early(trainer, model, data)
                options.setdefault("weights_only", True)
            return original(trainer, model, *args, **options)

        return fit

    def _evaluation(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def evaluate(trainer: Any, *args: Any, **options: Any) -> Any:
            if trainer.is_fitted:
                return original(trainer, *args, **options)
            kept = list(trainer.callbacks)
            trainer.callbacks = [one for one in kept if id(one) not in trainer.of_training]
            try:
                return original(trainer, *args, **options)
            finally:
                known = {id(one) for one in kept}
                trainer.callbacks = [*kept, *(one for one in trainer.callbacks if id(one) not in known)]

        return evaluate


def as_list(given: Any) -> list[Any]:
    """An argument that may be one object, several or none."""
    if given is None or given is False:
        return []
    return list(given) if isinstance(given, list | tuple) else [given]


if RUNS:
    Treatment(Path(RUNS)).patch()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call() -> Iterator[None]:
        """End what a command does until its end, before Lightning's fixtures look for threads that a test has left."""
        from boltcutter.environment import announcement

        yield
        announcement.withdraw()
        for thread in threading.enumerate():
            is_cancelled = isinstance(thread, threading.Timer) and thread.finished.is_set()
            if is_cancelled or thread.name == "announcement":
                thread.join(10)

    @pytest.fixture(autouse=True)
    def _after_each() -> Iterator[None]:
        from boltcutter.environment import stop_signals as signals

        yield
        signals.restore_handlers()
        for folder in Path(RUNS or "").glob("run-*"):
            shutil.rmtree(folder, ignore_errors=True)
