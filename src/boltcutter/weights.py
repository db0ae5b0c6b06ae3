"""The weights in files that any training program has written, and whether they fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from boltcutter.adapt import is_native_task
from boltcutter.loading import load, read_metadata
from boltcutter.storage import CheckpointError
from boltcutter.unpickle import find_placeholders

LATE_HOOKS = ("setup", "configure_model", "on_load_checkpoint")  # hooks that may change what a foreign module loads
TRAINING_STATE = ("state_dict", "optimizer_states", "lr_schedulers", "loops")  # without which training cannot go on
# What torch.compile, FSDP and activation checkpointing put into names.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

KERAS_FILES = (".keras", ".weights.h5")


@runtime_checkable
class ReadsKerasFiles(Protocol):
    """What a model has that can take its weights from a file that Keras wrote."""

    def load(self, path: str | Path) -> list[str]:
        """Take over what fits, and return the names of what the file does not have."""


def extract_weights(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's own weights in any file that training programs write.

    Understood are Lightning's checkpoints, bare state dicts, ``{"model": …}`` and ``{"state_dict": …}``, with the
    prefixes that DataParallel, ``torch.compile``, FSDP and a LightningModule's ``model.`` put before each key.
    """
    plain = _named(found)
    for outer in ("module.", "model.", "module."):  # DataParallel around or inside a LightningModule
        if any(key.startswith(outer) for key in plain):
            plain = {key.removeprefix(outer): value for key, value in plain.items() if key.startswith(outer)}
    return plain


def _named(found: Mapping[str, Any]) -> dict[str, Tensor]:
    """All weights in a file, by their names without those of wrappers."""
    inner = next(
        (found[key] for key in ("state_dict", "model", "model_state_dict") if isinstance(found.get(key), Mapping)),
        found,
    )
    plain = {}
    for key, value in inner.items():
        if isinstance(value, Tensor):
            plain[".".join(part for part in key.split(".") if part not in WRAPPERS)] = value
    return plain


def load_weights(model: nn.Module, path: str | Path) -> list[str]:
    """Give ``model`` the weights of a file, where names and shapes fit.

    Args:
        model: A model; or a whole LightningModule, whose own ``model`` may be all that the file has.
        path: Of the file.

    Returns:
        A line for each kind of weight that was left alone: missing, unexpected, of another shape.

    Raises:
        CheckpointError: The file cannot be read, or nothing in it fits.
    """
    if str(path).endswith(KERAS_FILES):
        return _initialize_from_keras(model, path)
    found, own = load(path), model.state_dict()
    stripped = extract_weights(found)
    readings = [stripped, _named(found), {f"model.{key}": value for key, value in stripped.items()}]
    given = max(readings, key=lambda names: len(names.keys() & own.keys()))
    fitting = {key: value for key, value in given.items() if key in own and _shape(own[key]) == list(value.shape)}
    if not fitting:
        some = ", ".join(list(given)[:3]) or "no weights"
        raise CheckpointError(f"init_from={path}: nothing in it fits the model (it has {some} …); take another file")
    model.load_state_dict(fitting, strict=False)
    reshaped = [f"{k} {list(given[k].shape)} → {_shape(own[k])}" for k in given if k in own and k not in fitting]
    kinds = {
        "missing": [key for key in own if key not in given],
        "unexpected": [key for key in given if key not in own],
        "of another shape": reshaped,
    }
    return [f"{len(keys)} {kind}: {_some(keys)}" for kind, keys in kinds.items() if keys]


def _initialize_from_keras(model: nn.Module, path: str | Path) -> list[str]:
    if not isinstance(model, ReadsKerasFiles):
        raise CheckpointError(
            f"init_from={path}: only a Keras model takes a file of Keras, and model is {type(model).__name__}; take "
            "another file, or try model=keras_convnet"
        )
    try:
        missing = model.load(path)
    except (ValueError, OSError) as error:
        text = " ".join(str(error).split())
        raise CheckpointError(f"init_from={path}: not read ({text}); take another file") from error
    return [f"{len(missing)} missing: {_some(missing)}"] if missing else []


def incompatibility(path: str | Path, task: nn.Module) -> str | None:
    """In one line, why training cannot go on from a checkpoint with this task; None if it can.

    Compared are names and shapes of the weights, unless the task gets them later or loads them in its own way, and the
    settings that the optimizer keeps for each group. All of the training's state must be plain values.
    """
    found = read_metadata(path)
    given, own = ({}, {}) if _loads_its_own_way(task) else (found.get("state_dict", {}), task.state_dict())
    kinds = {
        "weights are missing": [key for key in own if key not in given],
        "weights are unexpected": [key for key in given if key not in own],
        "weights have another shape": [
            k for k in own if k in given and not is_lazy(own[k]) and _shape(given[k]) != _shape(own[k])
        ],
    }
    restored = {key: found[key] for key in TRAINING_STATE if key in found}
    kinds["values are objects, which are not loaded"] = list(find_placeholders(restored))
    make: Any = None if _is_foreign(task) else getattr(task, "optimizer", None)
    if make is not None and found.get("optimizer_states"):
        then = found["optimizer_states"][0]["param_groups"][0].keys()  # with what schedulers have added
        now = make([nn.Parameter(torch.zeros(1))]).param_groups[0].keys()
        kinds["optimizer settings are missing"] = sorted(now - then)
    return "; ".join(f"{len(keys)} {kind} ({_some(keys)})" for kind, keys in kinds.items() if keys) or None


def _loads_its_own_way(task: nn.Module) -> bool:
    """Whether the weights of a foreign module may be other ones by the time that a checkpoint is loaded."""
    lenient = not getattr(task, "strict_loading", True)
    return _is_foreign(task) and (lenient or any(is_overridden(hook, task) for hook in LATE_HOOKS))


def _is_foreign(task: nn.Module) -> bool:
    return isinstance(task, L.LightningModule) and not is_native_task(task)


def _shape(value: Any) -> list[int] | None:
    """None for what has none: the extra state of a module may be anything, a lazy parameter is not made yet."""
    return None if is_lazy(value) or not hasattr(value, "shape") else list(value.shape)


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (" …" if len(keys) > 3 else "")
