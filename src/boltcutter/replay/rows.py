"""Each sample of a batch alone: its loss, its gradient, its values, and where in the data it is."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from boltcutter.config.errors import one_line
from boltcutter.data.mapped import BatchedMapDataset
from boltcutter.diagnosis.probe import Trace, kept, without_effects
from boltcutter.internals import foreach_norm
from boltcutter.protocols import gather_objects
from boltcutter.replay.batches import IndivisibleBatchError, take_rows
from boltcutter.replay.scores import robust_z
from boltcutter.report.pixels import encode_image, to_pixels
from boltcutter.structure import count_samples, tensor_names, tensors

SECONDS = 60.0  # for all samples of a batch
PARTS = 8  # into which a batch is divided where each sample alone would take longer
DESCRIBED = 8  # samples whose values are described
PICTURES = 3

Measure = dict[str, Any]


def rows_of(trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> tuple[list[Measure], Measure]:
    """Loss and norm of the gradients of each sample of a batch, computed alone, and of the whole batch.

    A sample is computed twice in a batch of its own, so that normalization over the batch is possible. Where this would
    take longer than ``SECONDS``, the batch is divided, and only the parts with the largest values are divided further.
    Ranks make equally many passes, as the module may communicate.

    Returns:
        For each sample ``row``, ``loss``, ``gradient_norm`` and ``error``, which it raises if the whole batch does;
        none if samples cannot be told apart, or one cannot be computed alone although the batch can. The same of the
        batch.
    """
    states = random_states()

    def measure(rows: Sequence[int] | None) -> tuple[float, float, str]:
        given = batch if rows is None else take_rows(batch, [*rows] * 2 if len(rows) == 1 else rows)
        try:
            with kept(module), without_effects(trainer, module, Trace()), from_states(states):
                return *one_pass(trainer, module, given, batch_idx), ""
        except Exception as error:  # whatever a step raises
            return math.nan, math.nan, f"{type(error).__name__}: {one_line(error, 160)}"

    begin = monotonic()
    whole = measure(None)
    seconds = max(gather_objects(monotonic() - begin))
    count = max(gather_objects(count_samples(batch) or 0))
    own = count_samples(batch) or 0
    found: dict[int, tuple[float, float, str]] = {}
    reason = ""
    try:
        if own:
            take_rows(batch, [0])
        blocks = [[row] for row in range(count)] if count * seconds < SECONDS else divided(list(range(count)))
        while blocks:
            scored = [(block, measure([min(row, own - 1) for row in block])) for block in blocks]
            reason = reason or next((each[2] for _, each in scored if each[2] and not whole[2]), "")
            found |= {row: value for block, value in scored for row in block if len(block) == 1}
            larger = sorted((pair for pair in scored if len(pair[0]) > 1), key=lambda pair: _size(pair[1]))[-2:]
            blocks = [part for block, _ in larger for part in divided(block)]
    except IndivisibleBatchError as error:
        reason = str(error)
    names = ("loss", "gradient_norm", "error")
    rows = [{"row": row, **dict(zip(names, each, strict=True))} for row, each in sorted(found.items()) if row < own]
    return ([] if reason else rows), {**dict(zip(names, whole, strict=True)), "count": own, "reason": reason}


def divided(rows: list[int]) -> list[list[int]]:
    """Parts of about equal size."""
    size = -(-len(rows) // PARTS)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _size(value: Sequence[Any]) -> float:
    return math.inf if not all(map(math.isfinite, value[:2])) else value[1]


def one_pass(trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> tuple[float, float]:
    """Loss and norm of the gradients of a batch on this rank."""
    step: Callable[..., Any] = module.training_step
    indices = [batch_idx] if is_param_in_hook_signature(step, "batch_idx", min_args=2) else []
    parameters = [p for p in module.parameters() if p.requires_grad and not p.is_meta]
    with warnings.catch_warnings(), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")
        if not module.automatic_optimization:
            return _manual_pass(module, step, batch, indices, parameters)
        with trainer.precision_plugin.train_step_context():
            output = step(batch, *indices)
        loss = output["loss"] if isinstance(output, dict) else output
        # Not loss.backward(), which would reduce the gradients over ranks.
        gradients = [g for g in torch.autograd.grad(loss, parameters, allow_unused=True) if g is not None]
    return float(loss.detach()), _norm(gradients)


def _manual_pass(
    module: L.LightningModule, step: Callable[..., Any], batch: Any, indices: list[int], parameters: Sequence[Tensor]
) -> tuple[float, float]:
    """A step with manual optimization, whose losses are those that it gives to ``manual_backward``."""
    losses, norms = list[float](), list[float]()

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
        losses.append(float(loss.detach()))
        norms.append(_norm([g for g in found if g is not None]))

    vars(module)["manual_backward"] = backward
    try:
        step(batch, *indices)
    finally:
        del vars(module)["manual_backward"]
    return (sum(losses) if losses else math.nan), math.hypot(*norms)


def _norm(gradients: list[Tensor]) -> float:
    dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return float(torch.linalg.vector_norm(torch.stack(foreach_norm(dense)))) if dense else 0.0


def random_states() -> tuple[Any, ...]:
    """The states of all global generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda


def set_random_states(states: tuple[Any, ...]) -> None:
    """Set the states of all global generators."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state_all(states[3])


@contextmanager
def from_states(states: tuple[Any, ...]) -> Iterator[None]:
    """Draw the numbers that the step itself draws, and restore the states."""
    set_random_states(states)
    try:
        yield
    finally:
        set_random_states(states)


# What a sample is


def unreadable(trainer: L.Trainer, indices: Iterable[Any]) -> Iterator[Measure]:
    """Samples that a map-style dataset cannot read, with the error."""
    dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
    for index in indices:
        try:
            if isinstance(dataset, BatchedMapDataset):
                dataset.dataset[index]
            elif hasattr(dataset, "__getitem__"):
                dataset[index]
        except Exception as error:  # of a dataset of somebody else
            found = f"{type(error).__name__}: {one_line(error, 160)}"
            yield {"index": index, "where": locate(trainer, index), "error": found, "values": [found]}


def locate(trainer: L.Trainer, index: Any) -> str:
    """The file, row or key of a sample; empty if the dataset has no such name."""
    dataset: Any = getattr(trainer.train_dataloader, "dataset", None)
    try:
        return _locate(dataset, index)
    except Exception:  # of a dataset of somebody else, whose attributes may be anything
        return ""


def _locate(dataset: Any, index: Any) -> str:
    if isinstance(dataset, BatchedMapDataset):
        return _locate(dataset.dataset, index)
    if isinstance(dataset, Subset):
        inner = dataset.indices[index]
        return _locate(dataset.dataset, inner) or f"{inner} of the dataset before it was split"
    if isinstance(dataset, ConcatDataset):
        number = int(np.searchsorted(dataset.cumulative_sizes, index, side="right"))
        inner = index - (dataset.cumulative_sizes[number - 1] if number else 0)
        return _locate(dataset.datasets[number], inner) or f"{inner} of part {number}"
    if (rows := getattr(dataset, "rows", None)) is not None and len(rows) == len(dataset):
        return f"row {int(rows[index]) + 1}"
    if hasattr(dataset, "_global_indices") and hasattr(dataset, "ends"):
        at = int(dataset._global_indices(np.asarray([index]))[0])
        owner = int(np.searchsorted(dataset.ends, at, side="right"))
        return f"{Path(dataset.shards[owner].path).name}:{at - (dataset.ends[owner - 1] if owner else 0)}"
    for name in ("samples", "imgs", "names", "files", "paths", "image_files", "filenames", "keys", "ids"):
        found = getattr(dataset, name, None)
        if isinstance(found, Sequence) and not isinstance(found, str) and len(found) == len(dataset):
            entry = found[index][0] if isinstance(found[index], tuple | list) else found[index]
            if isinstance(entry, str | Path | int):
                return str(entry)
    frame: Any = getattr(dataset, "df", getattr(dataset, "frame", getattr(dataset, "data", None)))
    if hasattr(frame, "iloc") and len(frame) == len(dataset):
        return f"row {frame.index[index]}"
    return ""


def describe_rows(trainer: L.Trainer, batch: Any, rows: list[Measure]) -> None:
    """Add what is in the most unusual samples: values that are not finite, constant, or far from those of the others.

    Args:
        trainer: Whose data module may know the names of columns.
        batch: The batch of the samples.
        rows: What is known of them.
    """
    count = count_samples(batch)
    named = [(n, t) for n, t in zip(tensor_names(batch), tensors(batch), strict=False) if t.ndim and len(t) == count]
    columns = getattr(trainer.datamodule, "statistics", {}).get("columns")  # type: ignore[attr-defined]
    for number, row in enumerate(sorted(rows, key=lambda row: -_size((row["loss"], row["gradient_norm"])))[:DESCRIBED]):
        row["values"] = [
            text for name, tensor in named for text in _describe(name, tensor.detach(), row["row"], columns)
        ]
        if number < PICTURES and (picture := _picture(named, row["row"])):
            row["picture"] = picture


def _describe(name: str, tensor: Tensor, row: int, columns: Any) -> Iterator[str]:
    values = tensor[row]

    def place(at: int) -> str:
        where = [int(k) for k in np.unravel_index(at, tuple(values.shape))]
        if columns and tensor.ndim == 2 and len(columns) == tensor.shape[1]:
            return f"column {columns[at]}"
        return f"position {where}" if len(where) != 1 else f"position {where[0]}"

    if not values.numel():
        yield f"{name} is empty"
        return
    flat = values.reshape(-1)
    if len(flat) == 1 and values.ndim:
        yield from _describe(name, tensor.reshape(-1), row, None)
        return
    if tensor.is_floating_point() and not bool(flat.isfinite().all()):
        at = int((~flat.isfinite()).nonzero()[0])
        yield f"{name} has {float(flat[at])} at {place(at)}" if values.ndim else f"{name} is {float(flat[at])}"
        return
    if not values.ndim:
        z = _deviation(tensor.double(), row)
        yield f"{name} is {_shown(values)}" + (f", {z:.0f} deviations from the others" if z > 8 else "")
        return
    if len(flat) > 1 and bool((flat == flat[0]).all()):
        yield f"{name} is {_shown(flat[0])} everywhere"
        return
    if tensor.is_floating_point() and len(tensor) >= 8:
        others = tensor.reshape(len(tensor), -1).double()
        middle = others.nanmedian(0).values
        spread = (others - middle).abs().nanmedian(0).values.clamp_min(1e-3 * float(others.abs().nanmedian()) + 1e-12)
        distance = ((others[row] - middle).abs() / (1.4826 * spread)).nan_to_num(0)
        at = int(distance.argmax())
        if float(distance[at]) > 20:
            yield f"{name} has {float(flat[at]):.4g} at {place(at)}, where the median is {float(middle[at]):.4g}"
            return
    if tensor.is_floating_point():
        yield f"{name} from {float(flat.min()):.4g} to {float(flat.max()):.4g}"


def _deviation(values: Tensor, row: int) -> float:
    return abs(float(robust_z(values.cpu().numpy(), values.cpu().numpy())[row])) if len(values) >= 8 else 0.0


def _shown(value: Tensor) -> str:
    return f"{float(value):.4g}" if value.is_floating_point() else str(value.item())


def _picture(named: list[tuple[str, Tensor]], row: int) -> dict[str, Any] | None:
    for _, tensor in named:
        if tensor.ndim == 4 and tensor.shape[1] in (1, 3) and min(tensor.shape[2:]) >= 4:
            with torch.no_grad():
                image = tensor[row].detach().float().cpu().nan_to_num(0, 0, 0)
            low, high = float(image.min()), float(image.max())
            return encode_image(to_pixels((image - low) / ((high - low) or 1.0))[0])
    return None
