"""Predictions for each sample of a split, gathered over ranks: tables, a plot and the worst errors."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from boltcutter import extend
from boltcutter.data.batches import count_samples, first_tensor
from boltcutter.evaluation.table import Table, concatenate, count_rows, select_rows, write_csv
from boltcutter.protocols import HasClasses, HasStatistics, data_parallel, gather_objects

WORST = 24  # number of samples with the largest loss whose inputs are saved
MAX_COLUMNS = 1000  # per entry of an output, in the tables of a test and of predictions
MAX_CLASSES = 2000  # of a confusion matrix
SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # whose order cannot be reproduced


class BatchResult(NamedTuple):
    """Columns from the outputs of one batch."""

    dataloader: int
    samples: int
    columns: Table


class PredictionWriter(Callback):
    """Gather the outputs of ``test_step`` per sample over all ranks, and write them.

    ``predictions.csv`` has a row per sample, with a column for each output that has one number per sample, see
    ``to_columns``. ``classes.csv`` and ``confusion.csv`` have metrics and counts per class; ``confusion.svg`` or
    ``scatter.svg`` plots them; ``worst.npz`` has the inputs with the largest loss. Outputs of other shapes are skipped
    and listed once.

    Args:
        folder: Folder to write to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[BatchResult] = []
        self.worst: list[tuple[float, int, npt.NDArray[Any]]] = []  # loss, position on this rank, input
        self.skipped: dict[str, str] = {}  # output, and reason

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Store columns of the batch, and inputs with the largest losses."""
        count = count_samples(batch)
        if count is None:
            self.skipped[type(batch).__name__] = "has an unknown number of samples"
            return
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        found, skipped = to_columns(outputs, batch[1] if pair else None, count)
        self.skipped |= skipped
        if not found:
            return
        begin = sum(batch.samples for batch in self.batches)
        self.batches.append(BatchResult(dataloader_idx, count, found))
        inputs = first_tensor(batch[0] if pair else batch)
        if "loss" in found and inputs is not None and len(inputs) == count:
            losses = torch.from_numpy(found["loss"])
            for place in losses.topk(min(WORST, count)).indices.tolist():
                self.worst.append((float(losses[place]), begin + place, to_numpy(inputs[place])))
            self.worst = sorted(self.worst, key=lambda entry: -entry[0])[:WORST]

    on_validation_batch_end = on_test_batch_end

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather over ranks and write on rank zero."""
        local = self._table(trainer)
        places = [place for _, place, _ in self.worst]
        worst = (select_rows(local, places), [values for _, _, values in self.worst])
        gathered = gather_objects((local, worst))
        # Other ranks process the same samples.
        gathered = gathered[:: trainer.world_size // data_parallel(trainer.strategy).size]
        if not trainer.is_global_zero:
            return
        table = concatenate([rows for rows, _ in gathered if count_rows(rows)] or [local])
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if table.keys() - {"index", "dataloader"}:
            self.folder.mkdir(parents=True, exist_ok=True)
            if (table["index"] < 0).any():
                table["index"] = np.arange(count_rows(table))  # in the order of ranks and batches
            keys = ("index", "dataloader")  # the last one is the primary key
            table = select_rows(table, np.lexsort([table[key] for key in keys if key in table]))
            write_csv(self.folder / "predictions.csv", table)
            _write_summary(self.folder, table, _classes(data))
            _write_worst(self.folder, [worst for _, worst in gathered], data)
        else:
            self.skipped.setdefault("predictions.csv", f"{type(pl_module).__name__} returns no outputs per sample")
        if self.skipped:
            skipped = "; ".join(f"{what} ({why})" for what, why in self.skipped.items())
            print(f"{self.folder}: metrics are written; skipped outputs: {skipped}")

    on_validation_end = on_test_end

    def _table(self, trainer: L.Trainer) -> Table:
        """One row per sample of this rank."""
        table = concatenate([batch.columns for batch in self.batches])
        for name in {name for batch in self.batches for name in batch.columns}.difference(table):
            self.skipped[name] = "is not returned for each batch"
        loaders = trainer.val_dataloaders if trainer.validating else trainer.test_dataloaders
        multiple = isinstance(loaders, list | tuple) and len(loaders) > 1
        indices: list[int] = []
        for number, loader in enumerate(loaders if isinstance(loaders, list | tuple) else [loaders]):
            indices += _indices(loader, sum(batch.samples for batch in self.batches if batch.dataloader == number))
        count = sum(batch.samples for batch in self.batches)
        first = {"index": np.array(indices if len(indices) == count else range(count), np.int64)}
        if multiple:
            samples = [batch.samples for batch in self.batches]
            first = {"dataloader": np.repeat([batch.dataloader for batch in self.batches], samples), **first}
        return first | {name: column for name, column in table.items() if name not in first}


def to_columns(outputs: Any, targets: Any, count: int) -> tuple[Table, dict[str, str]]:
    """Convert the outputs of a step to columns of a table.

    A tensor of shape (B,) or (B, 1) is one column, one of shape (B, C) or (B, C, 1) C columns. In a mapping, ``losses``
    become the column ``loss``. ``predictions`` (B, C) are class probabilities if ``targets`` (an entry, or else the
    second element of the batch) are integers; then the most probable class and its confidence are columns.

    Args:
        outputs: Output of the step: a tensor, a mapping, or anything else.
        targets: Targets of the batch, if any.
        count: Number of samples of the batch.

    Returns:
        Columns by name, and the skipped outputs with the reason.
    """
    if outputs is None or (isinstance(outputs, Tensor) and outputs.ndim == 0):
        return {}, {}
    named = dict(outputs) if isinstance(outputs, Mapping) else {"prediction": outputs}
    named, targets = {name: _flat(value) for name, value in named.items()}, _flat(targets)
    targets = named.pop("targets", targets)
    predictions = named.pop("predictions", None)
    if predictions is None and isinstance(outputs, Tensor) and outputs.ndim and len(outputs) == count:
        predictions = named.pop("prediction")
    found: Table = {}
    skipped: dict[str, str] = {}
    if "losses" in named:
        named = {"loss": named.pop("losses"), **named}
    if isinstance(predictions, Tensor):
        if _is_class(predictions, targets, count):
            confidence, predicted = predictions.float().max(dim=-1)
            named |= {"target": targets, "prediction": predicted, "confidence": confidence}
        else:
            named |= {"target": targets, "prediction": predictions}
    for name, value in named.items():
        fault = _skip_reason(value, count)
        if fault is None:
            found |= spread(name, to_numpy(value))
        elif fault:
            skipped[name] = fault
    return found, skipped


def _flat(value: Any) -> Any:
    """Series of one variable, shape (B, T, 1), as (B, T)."""
    return value.squeeze(2) if isinstance(value, Tensor) and value.ndim == 3 and value.size(2) == 1 else value


def to_numpy(value: Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to NumPy, half precision to float32: NumPy has no bfloat16."""
    value = value.detach()
    half = value.dtype in (torch.bfloat16, torch.float16)
    found: npt.NDArray[Any] = (value.float() if half else value).cpu().numpy()
    return found


def _is_class(predictions: Tensor, targets: Any, count: int) -> bool:
    """Whether targets are class indices and predictions have a value per class."""
    whole = isinstance(targets, Tensor) and targets.shape == (count,) and not targets.is_floating_point()
    return whole and predictions.ndim == 2 and len(predictions) == count and predictions.is_floating_point()


def _skip_reason(value: Any, count: int) -> str | None:
    """Reason why an output cannot be a column; empty if it is skipped silently."""
    if not isinstance(value, Tensor):
        return "" if value is None else f"a {type(value).__name__}, not a tensor"
    if value.ndim == 0:
        return "one value for the batch"
    if len(value) != count:
        return f"{len(value)} values for {count} samples"
    each = value[0].numel() if count else 0
    if value.ndim > 2 or each > MAX_COLUMNS:
        shape = " × ".join(map(str, value.shape[1:]))
        return f"{shape} values per sample, of which a table has at most {MAX_COLUMNS:,} in one dimension"
    return None


def spread(name: str, values: npt.NDArray[Any]) -> Table:
    """The column of values of shape (N,) or (N, 1), or the numbered columns of those of shape (N, C)."""
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return {name: values} if values.ndim == 1 else {f"{name}_{t}": values[:, t] for t in range(values.shape[1])}


def _indices(loader: Any, length: int) -> list[int]:
    """Indices of the samples of this rank, in order; -1 if unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(getattr(sampler, "sampler", None), SHUFFLED):
        return [-1] * length
    seen = list(islice((index for batch in sampler for index in batch), length))
    return seen if len(seen) == length and all(isinstance(index, int) for index in seen) else [-1] * length


def _write_worst(folder: Path, ranks: Sequence[tuple[Table, list[npt.NDArray[Any]]]], data: Any) -> None:
    """Write the inputs with the largest loss, if they have the same shape."""
    inputs = [values for _, some in ranks for values in some]
    if len({values.shape for values in inputs}) != 1:
        return
    rows = concatenate([table for table, _ in ranks if count_rows(table)])
    if "loss" not in rows:  # not returned for each batch
        return
    places = np.lexsort([rows["index"], -rows["loss"]])[:WORST]
    chosen = [inputs[place] for place in places]
    np.savez_compressed(
        folder / "worst.npz",
        inputs=np.stack(chosen),
        allow_pickle=False,
        **select_rows(rows, places),
        **_texts(data, chosen),
    )


def _classes(data: Any) -> list[str]:
    """Class names, if the data module lists them; in a third-party one ``classes`` may be their number."""
    names = data.classes if isinstance(data, HasClasses) else ()
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _texts(data: Any, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """Decoded text of the worst inputs, if they are tokens."""
    if not isinstance(data, HasStatistics) or "tokenizer" not in data.statistics or not hasattr(data, "tokenizer"):
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for tokens in inputs])}


def _write_summary(folder: Path, table: Table, classes: list[str]) -> None:
    """Write metrics and counts per class, and plots of predictions over targets."""
    if not count_rows(table):
        return
    plots = extend.find("plots")
    if plots:
        plots.draw_targets(folder, table)
    names = ("target", "prediction")
    if all(name in table and np.issubdtype(table[name].dtype, np.integer) for name in names):
        targets, predictions = (table[name] for name in names)
        if min(targets.min(), predictions.min()) >= 0 and max(targets.max(), predictions.max()) < MAX_CLASSES:
            _write_classes(folder, targets, predictions, classes, plots)


def _write_classes(
    folder: Path, targets: npt.NDArray[Any], predictions: npt.NDArray[Any], classes: list[str], plots: Any
) -> None:
    count = max(len(classes), int(targets.max()) + 1, int(predictions.max()) + 1)
    names = classes or [str(number) for number in range(count)]
    pairs = targets.astype(np.int64) * count + predictions
    matrix = np.bincount(pairs, minlength=count * count).reshape(count, count)
    correct, support, predicted = matrix.diagonal(), matrix.sum(axis=1), matrix.sum(axis=0)
    scores = {
        "precision": correct / np.maximum(1, predicted),  # 0 for a class that is never predicted
        "recall": correct / np.maximum(1, support),
        "f1": 2 * correct / np.maximum(1, predicted + support),
    }
    write_csv(folder / "classes.csv", {"class": names, **scores, "samples": support})
    with open(folder / "confusion.csv", "w", newline="", encoding="utf-8") as file:  # names of classes may be equal
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["target", *names])
        writer.writerows([name, *row] for name, row in zip(names, matrix.tolist(), strict=True))
    if plots:
        plots.draw_confusion(folder / "confusion.svg", matrix, names)
