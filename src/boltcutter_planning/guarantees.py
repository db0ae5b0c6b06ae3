"""What a run gives up without the default callbacks and the trainer's plugin, and how to get it back."""

from __future__ import annotations

import sys

import lightning as L
from lightning.pytorch.callbacks import Callback, Checkpoint

from boltcutter.callback.guard import Guard
from boltcutter.callback.reseed import Reseed
from boltcutter.checkpoint.io import AtomicCheckpointIO
from boltcutter.config.compose import DictConfig
from boltcutter.environment.process import is_rank_zero
from boltcutter.protocols import handles_signals


def report_missing(cfg: DictConfig, trainer: L.Trainer) -> None:
    """Print what the run gives up, in its first lines."""
    if not is_rank_zero():
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    picked = str(cfg.choices.get("callback"))
    missing = {
        "preemption": (handles_signals(callbacks), "Ctrl-C and the signals of clusters end the run without saving"),
        "reseed": (_has(Reseed, callbacks), "a resumed run draws other random numbers"),
        "guard": (_has(Guard, callbacks), "non-finite gradients do not stop training"),
    }
    if lost := {name: text for name, (is_there, text) in missing.items() if not is_there}:
        told = "; ".join(f"without callback.{name}, {text}" for name, text in lost.items())
        print(f"note: callback={picked}: {told}; {_remedy(cfg, list(lost))}")
    if not _has(Checkpoint, callbacks):
        if callbacks and "default" not in picked.split("+"):
            text = "no callback saves checkpoints, so the run cannot be resumed or evaluated"
            print(f"warning: callback={picked}: {text}; {_remedy(cfg, ['last'])}", file=sys.stderr)
    elif not _is_atomic(trainer.strategy.checkpoint_io):
        remedy = f"write 'defaults: default' or 'plugins: [${{checkpoint_io}}]' in trainer={cfg.choices.get('trainer')}"
        given = "trainer.plugins has no ${checkpoint_io}"
        print(f"note: {given}, so a process that is killed while it saves can damage a checkpoint; {remedy}")


def _has(kind: type[Callback], callbacks: list[Callback]) -> bool:
    return any(_is_a(kind, callback) for callback in callbacks)


def _is_a(kind: type, value: object) -> bool:
    """Whether a value is of a class, or of its copy in a project, which differs by the name of the package only."""
    names = {(cls.__module__.partition(".")[2], cls.__qualname__) for cls in type(value).__mro__}
    return (kind.__module__.partition(".")[2], kind.__qualname__) in names


def _is_atomic(writer: object) -> bool:
    """Whether checkpoints are written atomically, also if other plugins wrap the one that writes."""
    inner = getattr(writer, "checkpoint_io", None)
    return _is_a(AtomicCheckpointIO, writer) or (inner is not None and _is_atomic(inner))


def _remedy(cfg: DictConfig, names: list[str]) -> str:
    picked, given = str(cfg.choices.get("callback")), cfg.get("callback") or {}
    if all(name in given for name in names):
        return f"remove {', '.join(f'callback.{name}=null' for name in names)}"
    if "default" in picked.split("+"):
        return "write 'defaults: default' in your callback/default.yaml"
    return (
        "callback=default has them" if picked == "none" else f"add it by callback=[default,{picked.replace('+', ',')}]"
    )
