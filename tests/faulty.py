"""Run a script that meets a fault at a place: ``python tests/faulty.py <fault> <place> scripts/train.py <words>``.

The fault is the name of a signal, which the process sends to itself, or ``exception``. Nothing of it is left in the
run's folder, so that the run goes on as one that was hit from outside.
"""

from __future__ import annotations

import functools
import io
import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Place(NamedTuple):
    """A call of a function of a module, counted from 1, or the moment after it."""

    module: str
    name: str
    call: int
    after: bool = False


# In two epochs of 19 batches, of which two make a step; 5 are validated after 9, between the batches of a step, and
# after 18, and 2 before all. Checkpoints: the best after each validation, then the one to go on from after each epoch.
PLACES = {
    "start": Place("boltcutter.train", "assemble", 1),
    "begin": Place("boltcutter.train", "Recorder.on_fit_start", 1),
    "training": Place("boltcutter.task.base", "Task.training_step", 27),
    "validation": Place("boltcutter.task.base", "Task.validation_step", 2 + 5 + 5 + 3),
    "checkpoint": Place("lightning.pytorch", "Trainer.save_checkpoint", 3),
    "saved": Place("lightning.pytorch", "Trainer.save_checkpoint", 3, after=True),
    "test": Place("boltcutter.task.base", "Task.test_step", 2),
    "report": Place("boltcutter.report", "write", 1),
    "exit": Place("boltcutter.environment.process", "_disconnect", 1),
}


def fail(fault: str) -> None:
    """Let it happen."""
    if fault == "exception":
        raise RuntimeError("a fault")
    os.kill(os.getpid(), getattr(signal, fault))


def lay(place: Place, happen: Callable[[], None]) -> None:
    """See that it happens at the place."""
    __import__(place.module)
    owner: Any = sys.modules[place.module]
    *path, name = place.name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, name), iter(range(1, 1_000_000))

    @functools.wraps(inner)
    def outer(*args: Any, **options: Any) -> Any:
        hit = next(calls) == place.call
        if hit and not place.after:
            happen()
        found = inner(*args, **options)
        if hit and place.after:
            happen()
        return found

    setattr(owner, name, outer)


def write_half(happen: Callable[[], None]) -> None:
    """Let it happen when half of the next checkpoint is written, in the process that writes."""
    import torch

    save = torch.save

    def half(checkpoint: Any, file: Any, *args: Any, **options: Any) -> None:
        torch.save = save
        whole = io.BytesIO()
        save(checkpoint, whole, *args, **options)
        middle = whole.tell() // 2
        file.write(whole.getvalue()[:middle])
        file.flush()
        happen()
        file.write(whole.getvalue()[middle:])

    torch.save = half


def main(fault: str, name: str) -> None:
    """Lay the fault."""
    happen = functools.partial(fail, fault)
    writes = name == "checkpoint" and os.environ.get("RANK", "0") == "0"
    lay(PLACES[name], functools.partial(write_half, happen) if writes else happen)


if __name__ == "__main__":
    main(*sys.argv[1:3])
    sys.argv[:] = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
