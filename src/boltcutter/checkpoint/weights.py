"""Load weights from checkpoints of any training program, and check their compatibility."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from boltcutter.checkpoint.load import find_objects, load_checkpoint
from boltcutter.checkpoint.storage import CheckpointError, open_file, store_errors
from boltcutter.config.errors import one_line
from boltcutter.project import install_command
from boltcutter.protocols import NativeTask

LATE_HOOKS = ("setup", "configure_model", "on_load_checkpoint")  # may change the parameters of a user's module
TRAINING_STATE = ("state_dict", "optimizer_states", "lr_schedulers", "loops")  # needed to resume training
MATRIX = torch.Size((2, 3))  # of a parameter with which an optimizer is tried
MAX_HEADER = 100_000_000  # bytes of the header of a file of safetensors, as its library limits it
NUMBER = (int, float, Tensor, type(None))  # which versions of torch exchange
# Components that torch.compile, FSDP and activation checkpointing insert into parameter names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


def extract_weights(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Extract the model's state dict from a checkpoint of any training program.

    Supports Lightning checkpoints, bare state dicts, ``{"model": …}`` and ``{"state_dict": …}``. Removes the prefixes
    added by DataParallel, ``torch.compile``, FSDP and a LightningModule's attribute ``model``.
    """
    plain = _named(content)
    for outer in ("module.", "model.", "module."):  # DataParallel around or inside a LightningModule
        if any(key.startswith(outer) for key in plain):
            plain = {key.removeprefix(outer): value for key, value in plain.items() if key.startswith(outer)}
    return plain


def _named(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, by their names without those of wrappers."""
    keys = ("state_dict", "model", "model_state_dict")
    inner = next((content[key] for key in keys if isinstance(content.get(key), Mapping)), content)
    tensors = {key: value for key, value in inner.items() if isinstance(value, Tensor)}
    return {".".join(p for p in key.split(".") if p not in WRAPPERS): value for key, value in tensors.items()}


def load_weights(model: nn.Module, path: str | Path) -> list[str]:
    """Load all weights from a file whose names and shapes match those of ``model``.

    Args:
        model: A model, or a LightningModule; the file may hold the weights of its attribute ``model`` only.
        path: Path or URL of the file.

    Returns:
        One line for each kind of mismatch: missing, unexpected, of another shape.

    Raises:
        CheckpointError: The file cannot be read, or no weights match.
    """
    if str(path).endswith((".keras", ".weights.h5")):
        unmatched: list[str] = load_keras_weights(model, path)
        return unmatched
    found = _read_safetensors(path) if str(path).endswith(".safetensors") else load_checkpoint(path)
    own = model.state_dict()
    stripped = extract_weights(found)
    candidates = [stripped, _named(found), {f"model.{key}": value for key, value in stripped.items()}]
    given = max(candidates, key=lambda names: len(names.keys() & own.keys()))
    matching = {key: value for key, value in given.items() if key in own and _shape(own[key]) == list(value.shape)}
    if not matching:
        some = ", ".join(list(given)[:3]) or "no weights"
        raise CheckpointError(f"init_from={path}: no weights match the model (the file has {some} …); use another file")
    model.load_state_dict(matching, strict=False)
    reshaped = [f"{k} {list(given[k].shape)} → {_shape(own[k])}" for k in given if k in own and k not in matching]
    kinds = {
        "missing": [key for key in own if key not in given],
        "unexpected": [key for key in given if key not in own],
        "of another shape": reshaped,
    }
    return [f"{len(keys)} {kind}: {first_names(keys)}" for kind, keys in kinds.items() if keys]


def _read_safetensors(path: str | Path) -> dict[str, Any]:
    """Read a file of safetensors, which holds only tensors.

    Raises:
        CheckpointError: It cannot be read, or the package is not installed.
    """
    try:
        from safetensors import torch as safetensors
    except ModuleNotFoundError:
        remedy = install_command("safetensors")
        raise CheckpointError(f"init_from={path}: the package safetensors is not installed; {remedy}") from None
    with store_errors(path), open_file(path) as file:
        if file is None:
            raise CheckpointError(f"init_from={path}: no such file; use another checkpoint")
        try:
            begin = file.read(9)  # the length of the header, and its first letter: the file may be of any size
            is_other = not begin.endswith(b"{") or int.from_bytes(begin[:8], "little") > MAX_HEADER
            content = begin if is_other else begin + file.read()
        except MemoryError:
            raise CheckpointError(f"init_from={path}: larger than the memory; use another file") from None
    try:
        return dict(safetensors.load(content))
    except Exception as error:  # of the library's own kind
        raise CheckpointError(
            f"init_from={path}: not a safetensors file ({one_line(error)}); use another file"
        ) from None


def incompatibility(content: Mapping[str, Any], task: nn.Module) -> str | None:
    """Return why a loaded checkpoint cannot be resumed with this task, in one line; None if it can.

    Compares names and shapes of the weights, unless the task creates them later or loads them differently, the settings
    that the optimizer stores in each parameter group, and the types of the states of optimizer and scheduler. The whole
    training state must be plain values.
    """
    given, own = ({}, {}) if _has_own_loading(task) else (content.get("state_dict", {}), task.state_dict())
    kinds = {
        "weights are missing": [key for key in own if key not in given],
        "weights are unexpected": [key for key in given if key not in own],
        "weights have another shape": [
            k for k in own if k in given and not is_lazy(own[k]) and _shape(given[k]) != _shape(own[k])
        ],
    }
    restored = {key: content[key] for key in TRAINING_STATE if key in content}
    kinds["values are objects, which are not loaded"] = find_objects(restored)
    if isinstance(task, NativeTask) and (states := content.get("optimizer_states")) and states[0]["param_groups"]:
        then = states[0]["param_groups"][0].keys()  # including those added by schedulers
        optimizer, scheduler = _train_a_matrix(task)
        lazy = any(is_lazy(parameter) for parameter in task.parameters())
        shapes = set() if lazy else {parameter.shape for parameter in task.parameters()}
        kinds["optimizer settings are missing"] = sorted(optimizer["param_groups"][0].keys() - then)
        kinds["entries of the optimizer are of another type"] = list(_unlike(states[0], optimizer, shapes))
        kinds["entries of the scheduler are of another type"] = [
            line for state in content.get("lr_schedulers", []) for line in _unlike(state, scheduler, shapes)
        ]
    return "; ".join(f"{len(keys)} {kind} ({first_names(keys)})" for kind, keys in kinds.items() if keys) or None


def _train_a_matrix(task: NativeTask) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states of the task's optimizer and scheduler after a step of one parameter, as far as they can be known."""
    weight, state = nn.Parameter(torch.zeros(MATRIX)), dict[str, Any]()
    weight.grad = torch.zeros(MATRIX)
    optimizer = task.optimizer([weight])
    with suppress(Exception):  # it needs what only training has, such as a device
        optimizer.step()
        if task.scheduler is not None:
            steps = {"total_steps": 2} if "total_steps" in inspect.signature(task.scheduler).parameters else {}
            state = task.scheduler(optimizer, **steps).state_dict()
    return optimizer.state_dict(), state


def _unlike(value: Any, model: Any, shapes: set[Any], name: str = "") -> Iterator[str]:
    """Name the entries of a saved state of training which have another type, or whose tensors have another shape.

    Args:
        value: The saved state.
        model: What a step with one parameter of the shape ``MATRIX`` leaves.
        shapes: Of the parameters of the task; empty if some are not known yet.
        name: Of the state, with a dot.
    """
    if isinstance(model, Mapping) and isinstance(value, Mapping):
        for key in value:
            of_all = model.get(0) if name == "state." else model.get(key)  # parameters have the same entries
            if of_all is not None and key != "params":
                yield from _unlike(value[key], of_all, shapes, f"{name}{key}.")
    elif isinstance(model, list | tuple) and isinstance(value, list | tuple) and model:
        for number, item in enumerate(value):
            yield from _unlike(item, model[0], shapes, f"{name}{number}.")
    elif isinstance(model, Tensor) and isinstance(value, Tensor):
        if value.shape not in {MATRIX: shapes or {value.shape}, (): {(), (1,)}}.get(model.shape, {value.shape}):
            yield name[:-1]
    elif not isinstance(value, NUMBER if isinstance(model, NUMBER) and not getattr(model, "ndim", 0) else type(model)):
        yield name[:-1]


def _has_own_loading(task: nn.Module) -> bool:
    """Return whether the parameters of a user's module may change before a checkpoint is loaded."""
    if not isinstance(task, L.LightningModule) or isinstance(task, NativeTask):
        return False
    return not task.strict_loading or any(is_overridden(hook, task) for hook in LATE_HOOKS)


def _shape(value: Any) -> list[int] | None:
    """Return the shape; None for a lazy parameter, and for a module's extra state, which may be any object."""
    return None if is_lazy(value) or not hasattr(value, "shape") else list(value.shape)


def first_names(keys: list[str]) -> str:
    """The first three of these names, for a message."""
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")


@runtime_checkable
class StoresKerasFiles(Protocol):
    """A model that can be saved as a Keras file and loaded from one."""

    def load(self, path: str | Path) -> list[str]:
        """Load the matching weights, and return the names of weights that are missing in the file."""

    def save(self, path: str | Path) -> None:
        """Save the current weights; the suffix of ``path`` selects the format."""


def load_keras_weights(model: nn.Module, path: str | Path) -> list[str]:
    """Load the weights of a Keras file whose layers and shapes match.

    Returns:
        A line with the names of weights that are missing in the file, if there are any.

    Raises:
        CheckpointError: The file cannot be read, or the model is no Keras model.
    """
    if not isinstance(model, StoresKerasFiles):
        raise CheckpointError(
            f"init_from={path}: only a Keras model loads Keras files, and model is {type(model).__name__}; use "
            "another file, or model=keras_convnet"
        )
    try:
        missing = model.load(path)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"init_from={path}: cannot be read ({one_line(error)}); use another file") from error
    return [f"{len(missing)} missing: {first_names(missing)}"] if missing else []
