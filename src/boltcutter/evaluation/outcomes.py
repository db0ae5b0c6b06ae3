"""Predictions for each sample of a split, gathered over ranks: tables, a plot and the worst errors."""

from __future__ import annotations

from collections.abc import Sequence
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

from boltcutter.checkpoint.atomic import write, write_text
from boltcutter.formatting import csv_text
from boltcutter.protocols import data_parallel, gather_objects
from boltcutter.report.columns import concatenate, select_rows, to_columns, to_numpy
from boltcutter.report.csv_table import Table, count_rows, write_csv
from boltcutter.report.plots import draw_confusion, draw_targets
from boltcutter.structure import count_samples, inputs_of, targets_of, tensors

WORST = 24  # number of samples with the largest loss whose inputs are saved
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
    ``boltcutter.report.columns.to_columns``. ``classes.csv`` and ``confusion.csv`` have metrics and counts per class;
    ``confusion.svg`` or ``series.svg`` plots them; ``worst.npz`` has the inputs with the largest loss. Outputs of
    other shapes are skipped and listed once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.batches: list[BatchResult] = []
        self.worst: list[tuple[float, int, npt.NDArray[Any]]] = []  # loss, position on this rank, input to show
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
        found, skipped = to_columns(outputs, targets_of(batch), count)
        self.skipped |= skipped
        if not found:
            return
        begin = sum(batch.samples for batch in self.batches)
        self.batches.append(BatchResult(dataloader_idx, count, found))
        inputs = find_shown(inputs_of(batch), count) if "loss" in found else None
        if inputs is not None:
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
            order = np.lexsort([table[key] for key in keys if key in table])
            if (np.diff(order) != 1).any():  # otherwise all would be copied
                table = select_rows(table, order)
            write_csv(self.folder / "predictions.csv", table | _class_names(table, _classes(data)), self.folder)
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
        table, seen = concatenate([batch.columns for batch in self.batches]), set[str]()
        for batch in self.batches:
            seen.update(batch.columns)
            batch.columns.clear()  # they are in the table now
        for name in seen.difference(table):
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
        names = getattr(getattr(loaders, "dataset", None), "names", None)  # of the files of a split
        if table and isinstance(names, list | tuple) and indices and 0 <= min(indices) <= max(indices) < len(names):
            first["file"] = np.array([names[index] for index in first["index"]])
        return first | {name: column for name, column in table.items() if name not in first}


def find_shown(inputs: Any, count: int) -> Any:
    """Return what a report shows of each sample: its picture if it has one, else its first tensor; None without any.

    Args:
        inputs: Of a batch, of any structure.
        count: Number of samples.
    """
    if isinstance(inputs, list) and len(inputs) == count and all(isinstance(part, Tensor) for part in inputs):
        return inputs  # a tensor for each sample
    found = [part for part in tensors(inputs) if part.ndim and len(part) == count]
    pictures = [part for part in found if part.ndim == 4 and part.size(1) in (1, 3)]
    return next(iter(pictures or found), None)


def _indices(loader: Any, length: int) -> list[int]:
    """Indices of the samples of this rank, in order; -1 if unknown."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(getattr(sampler, "sampler", None), SHUFFLED):
        return [-1] * length
    seen = list(islice((index for batch in sampler for index in batch), length))
    return seen if len(seen) == length and all(isinstance(index, int) for index in seen) else [-1] * length


def _write_worst(folder: Path, ranks: Sequence[tuple[Table, list[npt.NDArray[Any]]]], data: Any) -> None:
    """Write the inputs with the largest loss; those of different shapes are padded, and ``shapes`` has their own."""
    inputs = [values for _, some in ranks for values in some]
    if len({(values.ndim, values.dtype) for values in inputs}) != 1:
        return
    rows = concatenate([table for table, _ in ranks if count_rows(table)])
    if "loss" not in rows:  # not returned for each batch
        return
    places = np.lexsort([rows["index"], -rows["loss"]])[:WORST]
    chosen = [inputs[place] for place in places]
    facts = {**select_rows(rows, places), **_texts(data, chosen)}
    if len({values.shape for values in chosen}) > 1:
        facts["shapes"] = np.array([values.shape for values in chosen])
        largest = facts["shapes"].max(axis=0)
        pads = [[(0, end - size) for size, end in zip(values.shape, largest, strict=True)] for values in chosen]
        chosen = [np.pad(values, pad) for values, pad in zip(chosen, pads, strict=True)]
    stacked = np.stack(chosen)
    write(
        folder / "worst.npz",
        lambda file: np.savez_compressed(file, inputs=stacked, allow_pickle=False, **facts),
    )


def _classes(data: Any) -> list[str]:
    """Class names, if the data module lists them; in a third-party one ``classes`` may be their number."""
    names = getattr(data, "classes", ())
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _class_names(table: Table, classes: list[str]) -> Table:
    """The names of targets and predictions, as columns, if they are classes that have names."""
    found, known = {}, np.array(classes)
    for name in ("target", "prediction") if "confidence" in table else ():
        if np.issubdtype(table[name].dtype, np.integer) and 0 <= table[name].min() <= table[name].max() < len(known):
            found[f"{name}_class"] = known[table[name]]
    return found


def _texts(data: Any, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """Decoded text of the worst inputs, if they are tokens."""
    if "tokenizer" not in getattr(data, "statistics", ()) or not hasattr(data, "tokenizer"):
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for tokens in inputs])}


def _write_summary(folder: Path, table: Table, classes: list[str]) -> None:
    """Write metrics and counts per class, and plots."""
    if not count_rows(table):
        return
    draw_targets(folder, table)
    names = ("target", "prediction")
    if all(name in table and np.issubdtype(table[name].dtype, np.integer) for name in names):
        targets, predictions = (table[name] for name in names)
        if min(targets.min(), predictions.min()) >= 0 and max(targets.max(), predictions.max()) < MAX_CLASSES:
            _write_classes(folder, targets, predictions, classes)


def _write_classes(folder: Path, targets: npt.NDArray[Any], predictions: npt.NDArray[Any], classes: list[str]) -> None:
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
    write_csv(folder / "classes.csv", {"class": names, **scores, "samples": support}, folder)
    rows = [[name, *row] for name, row in zip(names, matrix.tolist(), strict=True)]  # names of classes may be equal
    write_text(folder / "confusion.csv", csv_text([["target", *names], *rows]))
    draw_confusion(folder / "confusion.svg", matrix, names)
