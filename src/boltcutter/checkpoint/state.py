"""The state of training in a checkpoint, which Lightning restores without looking at the types of its entries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.storage import CheckpointError
from boltcutter.config.errors import one_line, printable

ANY = "*"  # all other entries of a dictionary
COUNTS: dict[str, Any] = {"total": {ANY: int}, "current": {ANY: int}}
BATCHES: dict[str, Any] = {**COUNTS, "is_last_batch": bool}
EVALUATION = {"state_dict": {}, "batch_progress": BATCHES}
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
    "loops": {"fit_loop": FITTING, "validate_loop": EVALUATION, "test_loop": EVALUATION},
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

# Callbacks with the state of Lightning's; those of others may be of any type.
LIGHTNINGS = ("ModelCheckpoint", "BestCheckpoint", "LastCheckpoint", "EarlyStopping")


def check_state(content: Mapping[str, Any], path: str | Path, *, resumes: bool = False) -> None:
    """Check that the state of training has the entries and types that Lightning writes.

    Args:
        content: A loaded checkpoint.
        path: Of its file, for the message.
        resumes: Whether training continues, for which no entry may be missing, but of callbacks.

    Raises:
        CheckpointError: An entry is missing, or of another type.
    """
    needed = {name: shape for name, shape in ENTRIES.items() if name in content or (resumes and name != "callbacks")}
    fault = next(_misfits(content, needed), None)
    callbacks = content["callbacks"] if fault is None and "callbacks" in content else {}
    for name, state in callbacks.items():
        if name.startswith(LIGHTNINGS):
            shape = {key: kind for key, kind in CALLBACK.items() if isinstance(state, Mapping) and key in state}
            fault = fault or next(_misfits(state, shape, f"callbacks.{name}."), None)
    if fault:
        raise CheckpointError(f"{path}: {one_line(printable(fault), 300)}; use another checkpoint, or start a new run")


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
        yield from (f"{name}{key} is missing" for key in shape if key != ANY and key not in value)
        for key in value if ANY in shape else shape:
            yield from _misfits(value[key], shape.get(key, shape.get(ANY)), f"{name}{key}.")
