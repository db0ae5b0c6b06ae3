"""Record the first steps of a training, whichever script starts it, to compare a project with its import.

``python -m boltcutter.scaffold.proof <file> <steps> <seed> <script> [arguments]`` runs the script; its first call of
``Trainer.fit`` trains for the given number of steps, on samples in the order of the library, and ends the process.
"""

from __future__ import annotations

import functools
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, LearningRateMonitor

from boltcutter.callback.reseed import Reseed
from boltcutter.data.hooks import seed_hooks, shard_loaders

UNNEEDED = (Checkpoint, EarlyStopping, LearningRateMonitor)  # they need validation, or a logger
PROGRAM = "boltcutter"


class Steps(Callback):
    """Records the losses of the first steps.

    Args:
        file: Where they are written when training ends.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.losses = file, list[float | None]()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Let schedules be stepped without the metrics of validation, which does not run."""
        for schedule in trainer.lr_scheduler_configs:
            schedule.strict = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the loss of a step."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self.losses.append(None if loss is None else float(loss))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the losses."""
        self.file.write_text(json.dumps(self.losses))


def run_briefly(file: str, steps: str, seed: str, script: str, *arguments: str) -> None:
    """Run a script until its trainer has done ``steps`` optimizer steps."""
    fit = Trainer.fit

    @functools.wraps(fit)  # Lightning CLI reads the names of its arguments
    def fit_briefly(trainer: L.Trainer, model: L.LightningModule, *given: Any, **named: Any) -> None:
        data = named.get("datamodule")
        trainer.fit_loop.epoch_loop.max_steps = int(steps)
        trainer.fit_loop.max_epochs = -1
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        kept = [c for c in trainer.callbacks if not isinstance(c, UNNEEDED) and type(c).__name__ != "MonitorCheck"]  # type: ignore[attr-defined]
        if script != PROGRAM:  # the library does this itself
            shard_loaders(trainer, int(seed))
            seed_hooks(data or model, int(seed))
            kept.append(Reseed(int(seed)))
            trainer.loggers = []
        trainer.callbacks = [*kept, Steps(Path(file))]  # type: ignore[attr-defined]
        fit(trainer, model, *given, **named)
        sys.exit(0)

    Trainer.fit = fit_briefly  # type: ignore[assignment, method-assign]
    sys.argv = [script, *arguments]
    if script == PROGRAM:
        runpy.run_module(PROGRAM, run_name="__main__")
    else:
        L.seed_everything(int(seed))  # which some scripts do not do
        run_script(Path(script).resolve())


def run_script(script: Path) -> None:
    """Run a script, or a module of a package as its entry point does: by the function ``main``, if nothing calls it."""
    if not (script.parent / "__init__.py").is_file():
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
        return
    packages = [folder for folder in script.parents if (folder / "__init__.py").is_file()]
    root = packages[-1].parent
    sys.path[:0] = [str(root), str(script.parent)]  # as ``python -m``, and as ``python main.py``
    found = runpy.run_module(".".join(script.relative_to(root).with_suffix("").parts), run_name="__main__")
    if "__name__" not in script.read_text() and "main" in found:
        found["main"]()


if __name__ == "__main__":
    run_briefly(*sys.argv[1:])
