"""Predictions for each sample of a split, gathered over ranks: tables, a plot and the worst errors."""

from __future__ import annotations

from collections import deque
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

from boltcutter.checkpoint.atomic import write_atomically, write_text
from boltcutter.evaluation.spool import Spool, gather_rows, row_type
from boltcutter.formatting import csv_text
from boltcutter.protocols import data_parallel, gather_objects
from boltcutter.report.columns import concatenate, select_rows, to_columns, to_numpy
from boltcutter.report.csv_table import CELLS_AT_ONCE, Table, count_rows, write_csv, write_parts
from boltcutter.report.plots import draw_confusion, draw_targets, has_series
from boltcutter.structure import count_samples, inputs_of, targets_of, tensors

WORST = 24  # number of samples with the largest loss whose inputs are saved
MAX_CLASSES = 2000  # of a confusion matrix
NPZ_ARGUMENTS = ("file", "inputs", "allow_pickle")  # which no column in worst.npz can be called
SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # whose order cannot be reproduced


class RankRows(NamedTuple):
    """What all ranks have to know of the rows of one."""

    dtype: np.dtype[Any] | None  # of a row of all outputs
    table: Table  # a few columns of all rows: index and dataloader, and outputs that are summarized
    worst: Table  # rows with the largest loss
    inputs: list[npt.NDArray[Any]]  # of these rows


class PredictionWriter(Callback):
    """Gather the outputs of ``test_step`` per sample over all ranks, and write them.

    ``predictions.csv`` has a row per sample, with a column for each output that has one number per sample, see
    ``boltcutter.report.columns.to_columns``. ``classes.csv`` and ``confusion.csv`` have metrics and counts per class;
    ``confusion.svg`` or ``series.svg`` plots them; ``worst.npz`` has the inputs with the largest loss. Outputs of
    other shapes are skipped and listed once. Until the end, outputs are on the disk of ``folder``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = Spool(folder)
        self.batches: list[tuple[int, int]] = []  # index of the loader, and number of samples
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
        begin = self.rows.length
        self.rows.append(found)
        self.batches.append((dataloader_idx, count))
        inputs = find_shown(inputs_of(batch), count) if "loss" in found else None
        if inputs is not None:
            losses = torch.from_numpy(found["loss"])
            for place in losses.topk(min(WORST, count)).indices.tolist():
                self.worst.append((float(losses[place]), begin + place, to_numpy(inputs[place])))
            self.worst = sorted(self.worst, key=lambda entry: -entry[0])[:WORST]

    on_validation_batch_end = on_test_batch_end

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Gather over ranks, some rows at a time, and write on rank zero."""
        every = trainer.world_size // data_parallel(trainer.strategy).size  # other ranks process the same samples
        loaders = trainer.val_dataloaders if trainer.validating else trainer.test_dataloaders
        loaders = [*loaders] if isinstance(loaders, list | tuple) else [loaders]
        ranks = gather_objects(self._rows(loaders))[::every]
        dtypes = [rank.dtype for rank in ranks if rank.dtype is not None]
        dtype = row_type(dtypes) if dtypes else np.dtype([])
        if {*(dtype.names or ())} - {"index", "dataloader"}:
            self._write(trainer, loaders, ranks, dtype, every)
        else:
            self.skipped.setdefault("predictions.csv", f"{type(pl_module).__name__} returns no outputs per sample")
        self.rows.close()
        if self.skipped and trainer.is_global_zero:
            skipped = "; ".join(f"{what} ({why})" for what, why in self.skipped.items())
            print(f"{self.folder}: metrics are written; skipped outputs: {skipped}")

    on_validation_end = on_test_end

    def _rows(self, loaders: list[Any]) -> RankRows:
        """What the other ranks have to know of the rows of this one."""
        self.skipped |= dict.fromkeys(sorted(self.rows.dropped), "is not returned for each batch")
        numbers, samples = np.array(self.batches, np.int64).reshape(-1, 2).T
        indices: list[int] = []
        for number, loader in enumerate(loaders):
            indices += _indices(loader, int(samples[numbers == number].sum()))
        table = {"dataloader": np.repeat(numbers, samples)} if len(loaders) > 1 else {}
        table["index"] = np.array(indices if len(indices) == self.rows.length else range(self.rows.length), np.int64)
        for name, column in (self.rows.dtype.fields or {} if self.rows.dtype else {}).items():
            if name == "loss" or (name in ("target", "prediction") and np.issubdtype(column[0], np.integer)):
                table[name] = self.rows.read(slice(None), [name])[name]
        places = np.array([place for _, place, _ in self.worst], np.int64)
        worst = self.rows.read(places) | select_rows(table, places)
        return RankRows(self.rows.dtype, table, worst, [values for _, _, values in self.worst])

    def _write(
        self, trainer: L.Trainer, loaders: list[Any], ranks: list[RankRows], dtype: np.dtype[Any], every: int
    ) -> None:
        """Write on rank zero, to which all ranks send some rows at a time."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        classes, names = _classes(data), dtype.names or ()
        lengths = [count_rows(rank.table) for rank in ranks]
        table = concatenate([rank.table for rank in ranks if count_rows(rank.table)] or [ranks[0].table])
        files = _file_names(loaders, table["index"])
        if (table["index"] < 0).any():
            table["index"] = np.arange(count_rows(table))  # in the order of ranks and batches
        order = np.lexsort([table[key] for key in ("index", "dataloader") if key in table])  # the last one is primary
        table = select_rows(table, order)
        known, named = np.array(classes), _named_columns(table, classes) if "confidence" in names else []

        def rows(places: npt.NDArray[Any]) -> Table:
            found: Table = {key: table[key][places] for key in ("dataloader", "index") if key in table}
            if files:
                found["file"] = np.array([files[index] for index in found["index"]])
            outputs = gather_rows(self.rows, dtype, lengths, order[places], trainer.global_rank, every)
            found |= {name: column for name, column in outputs.items() if name not in found}
            return found | {f"{name}_class": known[found[name]] for name in named}

        step = max(1, CELLS_AT_ONCE // len(names))
        parts = (rows(np.arange(begin, min(begin + step, len(order)))) for begin in range(0, max(1, len(order)), step))
        if trainer.is_global_zero:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_parts(self.folder / "predictions.csv", parts, self.folder)
        else:
            deque(parts, maxlen=0)
        series = rows(_examples(table)) if has_series(names) and len(order) else {}
        if trainer.is_global_zero:
            if series:
                draw_targets(self.folder, series)
            _write_summary(self.folder, table, classes)
            _write_worst(self.folder, [(rank.worst, rank.inputs) for rank in ranks], files, data)


def _file_names(loaders: Sequence[Any], indices: npt.NDArray[np.int64]) -> Sequence[str]:
    """Names of the files of a split, of which the indices are some; empty if they are unknown."""
    names = getattr(getattr(loaders[0], "dataset", None), "names", None) if len(loaders) == 1 else None
    is_list = isinstance(names, list | tuple) and len(indices) and 0 <= indices.min() <= indices.max() < len(names)
    return names if names and is_list else ()


def _examples(table: Table) -> npt.NDArray[Any]:
    """Places of some rows, from the smallest to the largest loss if it is known."""
    order = np.argsort(table.get("loss", np.arange(count_rows(table))), kind="stable")
    return np.asarray(order[np.unique(np.linspace(0, len(order) - 1, 4).astype(int))], np.int64)


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


def _write_worst(
    folder: Path, ranks: Sequence[tuple[Table, list[npt.NDArray[Any]]]], files: Sequence[str], data: Any
) -> None:
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
    if files:
        facts["files"] = np.array([files[index] for index in facts["index"]])
    if len({values.shape for values in chosen}) > 1:
        facts["shapes"] = np.array([values.shape for values in chosen])
        largest = facts["shapes"].max(axis=0)
        pads = [[(0, end - size) for size, end in zip(values.shape, largest, strict=True)] for values in chosen]
        chosen = [np.pad(values, pad) for values, pad in zip(chosen, pads, strict=True)]
    named = {name: column for name, column in facts.items() if name not in NPZ_ARGUMENTS}
    stacked = np.stack(chosen)
    write_atomically(
        folder / "worst.npz", lambda file: np.savez_compressed(file, inputs=stacked, allow_pickle=False, **named)
    )


def _classes(data: Any) -> list[str]:
    """Class names, if the data module lists them; in a third-party one ``classes`` may be their number."""
    names = getattr(data, "classes", ())
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _named_columns(table: Table, classes: list[str]) -> list[str]:
    """Those of targets and predictions that are indices of classes."""
    return [
        name
        for name in ("target", "prediction")
        if name in table and 0 <= table[name].min(initial=0) <= table[name].max(initial=0) < len(classes)
    ]


def _texts(data: Any, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """Decoded text of the worst inputs, if they are tokens."""
    if "tokenizer" not in getattr(data, "statistics", ()) or not hasattr(data, "tokenizer"):
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for tokens in inputs])}


def _write_summary(folder: Path, table: Table, classes: list[str]) -> None:
    """Write metrics and counts per class."""
    names = ("target", "prediction")
    if count_rows(table) and all(name in table for name in names):
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
