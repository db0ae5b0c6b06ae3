"""The state of training in a checkpoint, which Lightning restores without looking at the types of its entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities.migration.utils import migrate_checkpoint

from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.config.errors import one_line, printable

ANY = "*"  # all other entries of a dictionary
COUNTED = ("ready", "started", "processed", "completed")
VERSION = "pytorch-lightning_version"
COUNTS: dict[str, Any] = {"total": {ANY: int}, "current": {ANY: int}}
BATCHES: dict[str, Any] = {**COUNTS, "is_last_batch": bool}
EVALUATION = {"state_dict": {}, "batch_progress": BATCHES}
ZERO = dict.fromkeys(COUNTED, 0)
NO_BATCHES = {"total": ZERO, "current": ZERO, "is_last_batch": False}
FITTING: dict[str, Any] = {
    "state_dict": {},
    "epoch_progress": COUNTS,
    "epoch_loop.state_dict": {},
    "epoch_loop.batch_progress": BATCHES,
    "epoch_loop.scheduler_progress": COUNTS,
    "epoch_loop.automatic_optimization.state_dict": {},
    "epoch_loop.automatic_optimization.optim_progress": {"optimizer": {"step": COUNTS, "zero_grad": COUNTS}},
    "epoch_loop.manual_optimization.state_dict": {},
    "epoch_loop.manual_optimization.optim_step_progress": COUNTS,
    "epoch_loop.val_loop.state_dict": {},
    "epoch_loop.val_loop.batch_progress": BATCHES,
}
ENTRIES: dict[str, Any] = {  # written by Lightning 2.6
    "state_dict": {},
    "epoch": int,
    "global_step": int,
    "loops": {"fit_loop": FITTING, "validate_loop": EVALUATION, "test_loop": EVALUATION, "predict_loop": {}},
    "callbacks": {},
    "optimizer_states": [{"state": dict, "param_groups": [{"params": list}]}],
    "lr_schedulers": [{}],
}
PATHS = dict.fromkeys(("best_model_path", "kth_best_model_path", "last_model_path"), str)
CALLBACK: dict[str, Any] = {
    "best_k_models": {ANY: object},
    **PATHS,
    "wait_count": int,
    "stopped_epoch": int,
    "patience": int,
}

OPTIONAL = {"callbacks", *CALLBACK}
# Callbacks with the state of Lightning's; those of others may be of any type.
LIGHTNINGS = ("ModelCheckpoint", "BestCheckpoint", "LastCheckpoint", "EarlyStopping")


def check_state(content: dict[str, Any], path: str | Path, *, resumes: bool = False) -> None:
    """Convert the state of training from earlier versions of Lightning, and check its entries and their types.

    Args:
        content: A loaded checkpoint; changed.
        path: Of its file, for the message.
        resumes: Whether training continues. Otherwise only the weights are needed, and a state of training of which
            entries are missing or of another type is left out.

    Raises:
        CheckpointError: An entry is missing, or of another type.
    """
    fault = next(_faults(content), None)
    if fault and not resumes:
        states = {} if any(_misfits(content, {"callbacks": {}})) else content.get("callbacks", {})
        for name in ENTRIES.keys() - {"state_dict"}:
            if ENTRIES[name] is not int or any(_misfits(content, {name: int})):  # valid numbers stay
                content.pop(name, None)
        kept = {name: state for name, state in states.items() if not any(_callback_faults({name: state}))}
        content |= {"callbacks": kept, VERSION: L.__version__}
        fault = next(_misfits(content, {"state_dict": {}}), None)
    if fault:
        raise CheckpointError(f"{path}: {one_line(printable(fault), 300)}; use another checkpoint, or start a new run")


def _faults(content: dict[str, Any]) -> Iterator[str]:
    """Describe what prevents training from continuing."""
    yield from _misfits(content, {VERSION: str})
    version = str(content[VERSION])
    try:
        if len(version) > 100:
            raise ValueError
        migrate_checkpoint(content)
    except (LookupError, TypeError, ValueError, AttributeError):
        yield f"{VERSION}={version:.100} has another state of training"
    if isinstance(loops := content.get("loops"), dict):
        for name in ("validate_loop", "test_loop", "predict_loop"):  # of which earlier versions wrote other states
            loops.setdefault(name, {"state_dict": {}, "batch_progress": NO_BATCHES})
        if version.startswith("1.") and isinstance(fitting := loops.get("fit_loop"), dict):
            fitting.setdefault("epoch_loop.val_loop.batch_progress", NO_BATCHES)
    yield from _misfits(content, ENTRIES)
    yield from _callback_faults(content.get("callbacks", {}))


def _callback_faults(states: Mapping[str, Any]) -> Iterator[str]:
    for name, state in states.items():
        if name.startswith(LIGHTNINGS):
            yield from _misfits(state, CALLBACK, f"callbacks.{name}.")


def _misfits(value: Any, shape: Any, name: str = "") -> Iterator[str]:
    """Describe what differs from a shape: a type, the shapes of the entries of a dictionary, or of a list."""
    kind: Any = shape if isinstance(shape, type) else type(shape) if not isinstance(shape, dict) else Mapping
    label = name.removesuffix(".") or "it"
    if not isinstance(value, kind):
        yield f"{label} is a {type(value).__name__}, not a {'dict' if kind is Mapping else kind.__name__}"
    elif kind is int and not -1 <= value < 2**63:  # the epoch is -1 if max_steps ended the first one
        yield f"{label}={value:.3g} is no count"
    elif isinstance(shape, list):
        for number, item in enumerate(value):
            yield from _misfits(item, shape[0], f"{name}{number}.")
    elif isinstance(shape, dict):
        if wrong := [key for key in value if not isinstance(key, str)]:
            yield f"{label} has the key {wrong[0]!r}, which is no text"
        yield from (f"{name}{key} is missing" for key in shape if key not in {ANY, *value, *OPTIONAL})
        yield from (f"{name}{key} is no count" for key in value if shape.get(ANY) is int and key not in COUNTED)
        for key in value if ANY in shape else (key for key in shape if key in value):
            yield from _misfits(value[key], shape.get(key, shape.get(ANY)), f"{name}{key}.")
