"""Inject a fault into a script: ``python tests/faulty.py <fault> <place> scripts/train.py <overrides>``.

The fault is the name of a signal, which the process sends to itself, or ``exception``. The run folder has no trace of
the injection, so the run resumes as after an external fault.
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
    """Before or after the n-th call, counted from 1, of a function of a module."""

    module: str
    name: str
    call: int
    after: bool = False


# For two epochs of 19 batches, with gradients accumulated over two batches; 5 validation batches after 9 (within an
# accumulation) and 18 batches, and 2 before training. Checkpoints: the best after each validation, the last after each
# epoch.
PLACES = {
    "start": Place("boltcutter.training.train", "assemble", 1),
    "begin": Place("boltcutter.training.recorder", "Recorder.on_fit_start", 1),
    "training": Place("boltcutter.task.base", "Task.training_step", 27),
    "validation": Place("boltcutter.task.base", "Task.validation_step", 2 + 5 + 5 + 3),
    "checkpoint": Place("lightning.pytorch", "Trainer.save_checkpoint", 3),
    "saved": Place("lightning.pytorch", "Trainer.save_checkpoint", 3, after=True),
    "test": Place("boltcutter.task.base", "Task.test_step", 2),
    "report": Place("boltcutter.report.page", "write_page", 1),
    "exit": Place("boltcutter.environment.process", "_destroy_process_group", 1),
}

SETUP = Place("boltcutter.callback.preemption", "Preemption.setup", 1)  # a signal ends the process at once before it


def fail(fault: str) -> None:
    """Raise the exception, or send the signal."""
    if fault == "exception":
        raise RuntimeError("a fault")
    os.kill(os.getpid(), getattr(signal, fault))


def inject(place: Place, trigger: Callable[[], None]) -> None:
    """Patch the function of a place so that it calls ``trigger``."""
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
            trigger()
        found = inner(*args, **options)
        if hit and place.after:
            trigger()
        return found

    setattr(owner, name, outer)


def write_half(trigger: Callable[[], None]) -> None:
    """Call ``trigger`` when half of the next checkpoint is written, in the process that writes it."""
    import torch

    save = torch.save

    def half(checkpoint: Any, file: Any, *args: Any, **options: Any) -> None:
        torch.save = save
        buffer = io.BytesIO()
        save(checkpoint, buffer, *args, **options)
        middle = buffer.tell() // 2
        file.write(buffer.getvalue()[:middle])
        file.flush()
        trigger()
        file.write(buffer.getvalue()[middle:])

    torch.save = half


def main(fault: str, name: str) -> None:
    """Inject the fault at a place, or at another call of its function, such as ``validation@5``."""
    trigger = functools.partial(fail, fault)
    writes = name == "checkpoint" and os.environ.get("RANK", "0") == "0"
    known, _, call = name.partition("@")
    place = SETUP if known == "setup" else PLACES[known]
    place = place._replace(call=int(call)) if call else place
    inject(place, functools.partial(write_half, trigger) if writes else trigger)


if __name__ == "__main__":
    main(*sys.argv[1:3])
    sys.argv[:] = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
