"""Errors of the first batch in one line: where, why, and the shapes of what was computed there."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import Dataset

from boltcutter.config.errors import one_line
from boltcutter.project import LIBRARY

PYTHON = re.escape(sysconfig.get_path("stdlib"))
INSTALLED = re.compile(rf"[/\\](site|dist)-packages[/\\]|<frozen|^<string>|^{PYTHON}")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")
WORKER = re.compile(r'Caught \w+ in DataLoader.* File "(.+?)", line ([0-9]+), in (\w+)\n.*?\n(\w.*)', re.S)
KINDS = {L.LightningDataModule: "data", Dataset: "data", Callback: "callback", L.LightningModule: "task"}
MORE = "(BOLTCUTTER_DEBUG=1 shows the traceback)"
DEVICE_ASSERT = re.compile(r"device-side assert")  # what CUDA says of an index
OUT_OF_RANGE = "an index is out of range, such as a target that is no class of the model, or an unknown token"
MAX_TENSORS = 6  # in a message


class FirstBatchError(RuntimeError):
    """The task, the model or the data failed at the first batch, or before it."""

    hide_traceback = True


def first_batch_message(trainer: L.Trainer, error: BaseException) -> str | None:
    """Explain an error in the user's code that occurred before a first batch was complete.

    Returns:
        One line with the place, the cause and shapes; None if batches were completed before, or if the error comes from
        elsewhere.
    """
    lines = dict(walk_tb(error.__traceback__))
    frames = [*lines]
    owned = [frame for frame in frames if _owner(frame)]
    step = next((f for f in owned if f.f_code.co_name in STEPS and isinstance(_owner(f), L.LightningModule)), None)
    in_worker = WORKER.search(str(error))  # whose traceback is a part of the text
    if not (owned or in_worker) or not _is_first_batch(trainer, step.f_code.co_name if step else "training_step"):
        return None
    if in_worker:
        file, number, function, text = in_worker.groups()
        return f"data: {function} ({Path(file).name}:{number}): {one_line(text)}; correct the data {MORE}"
    written = [f for f in frames if not INSTALLED.search(f.f_code.co_filename)]
    own = [f for f in written if str(f.f_globals.get("__name__")).partition(".")[0] != LIBRARY]
    place = (own or [f for f in owned if f in written] or owned)[-1]
    owner = _owner(place) or _owner(owned[-1])
    function = place.f_code.co_name
    name = f"{type(owner).__name__}.{function}" if _owner(place) else function
    where = next((kind for cls, kind in KINDS.items() if isinstance(owner, cls)), "model")
    text = one_line(error)
    if DEVICE_ASSERT.search(text):
        text = OUT_OF_RANGE
    elif not text or isinstance(error, KeyError | AssertionError | StopIteration):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    facts = [f"{where}: {name} ({Path(place.f_code.co_filename).name}:{lines[place]}): {text[:400].rstrip('.')}"]
    facts += _innermost(frames)
    if step:
        facts.append(f"batch: {describe(step.f_locals.get(step.f_code.co_varnames[1]))}")
    facts.append(f"correct the {where} or {'the data' if step else 'its settings'}")
    return f"{'; '.join(facts)} {MORE}"


def describe(value: Any, depth: int = 2) -> str:
    """Shape and dtype of a tensor, or of those in a list or mapping."""
    if isinstance(value, Tensor):
        if is_lazy(value):  # whose shape the first batch determines
            return "of a lazy layer"
        shape = "nested" if value.is_nested else tuple(value.shape)
        return f"{shape} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping) and depth:
        some = [f"{key}: {describe(inner, depth - 1)}" for key, inner in [*value.items()][:MAX_TENSORS]]
        return f"{{{', '.join(some)}}}"
    if isinstance(value, list | tuple) and depth:
        return f"[{', '.join(describe(inner, depth - 1) for inner in value[:MAX_TENSORS])}]"
    return type(value).__name__


def _is_first_batch(trainer: L.Trainer, step: str) -> bool:
    """Whether the loop that calls the step has not completed a batch."""
    fit = trainer.fit_loop.epoch_loop
    loops: dict[str, Any] = {
        "training_step": fit,
        "validation_step": fit.val_loop if str(trainer.state.fn) == "fit" else trainer.validate_loop,
        "test_step": trainer.test_loop,
        "predict_step": trainer.predict_loop,
    }
    return bool(loops[step].batch_progress.total.completed == 0)


def _owner(frame: FrameType) -> Any:
    """The object whose method this is, if users write such methods."""
    owner = frame.f_locals.get("self")
    users = (nn.Module, L.LightningDataModule, Dataset, Callback)
    return owner if isinstance(owner, users) and not frame.f_code.co_name.startswith("_call") else None


def _innermost(frames: list[FrameType]) -> list[str]:
    """What computed last, with the tensors that it had."""
    for frame in reversed(frames):
        tensors = [(name, value) for name, value in frame.f_locals.items() if isinstance(value, Tensor)]
        if tensors:
            owner = frame.f_locals.get("self")
            is_layer = isinstance(owner, nn.Module) and not [*owner.children()]
            shown = ", ".join(f"{name} {describe(value)}" for name, value in tensors[:MAX_TENSORS])
            return [f"in {repr(owner) if is_layer else frame.f_code.co_name} with {shown}"]
    return []
