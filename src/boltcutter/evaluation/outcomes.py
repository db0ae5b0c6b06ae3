"""Predictions for each sample of a split, gathered over ranks: tables, a plot and the worst errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from boltcutter.data.batches import count_samples, first_tensor
from boltcutter.protocols import is_native_data

WORST = 24  # number of samples with the largest loss whose inputs are saved
MAX_COLUMNS = 32  # per entry of an output
MAX_CLASSES = 2000  # of a confusion matrix
SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # whose order cannot be reproduced

Columns = dict[str, npt.NDArray[Any]]


class BatchResult(NamedTuple):
    """Columns from the outputs of one batch."""

    dataloader: int
    samples: int
    columns: Columns


class PredictionWriter(Callback):
    """Gather the outputs of ``test_step`` per sample over all ranks, and write them.

    ``predictions.csv`` has a row per sample, with a column for each output that has one number per sample, see
    ``to_columns``. ``classes.csv`` and ``confusion.csv`` have metrics and counts per class; ``confusion.png`` or
    ``scatter.png`` plots them; ``worst.npz`` has the inputs with the largest loss. Outputs of other shapes are skipped
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
        worst = (local.iloc[places], [values for _, _, values in self.worst])
        gathered = _gather((local, worst))
        gathered = gathered[:: trainer.world_size // _data_parallel_size(trainer)]  # others process the same samples
        if not trainer.is_global_zero:
            return
        table = pd.concat([frame for frame, _ in gathered if len(frame)] or [local], join="inner", ignore_index=True)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if len(table.columns.drop(["index", "dataloader"], errors="ignore")):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (table["index"] < 0).any():
                table["index"] = range(len(table))  # in the order of ranks and batches
            table = table.sort_values(["dataloader", "index"] if "dataloader" in table else "index", ignore_index=True)
            table.to_csv(self.folder / "predictions.csv", index=False)
            _write_summary(self.folder, table, _classes(data))
            _write_worst(self.folder, [worst for _, worst in gathered], data)
        else:
            self.skipped.setdefault("predictions.csv", f"{type(pl_module).__name__} returns no outputs per sample")
        if self.skipped:
            skipped = "; ".join(f"{what} ({why})" for what, why in self.skipped.items())
            print(f"{self.folder}: metrics are written; skipped outputs: {skipped}")

    on_validation_end = on_test_end

    def _table(self, trainer: L.Trainer) -> pd.DataFrame:
        """One row per sample of this rank."""
        tables = [batch.columns for batch in self.batches]
        common = [name for name in (tables[0] if tables else ()) if all(name in found for found in tables)]
        for name in {name for found in tables for name in found}.difference(common):
            self.skipped[name] = "is not returned for each batch"
        table = pd.DataFrame({name: np.concatenate([batch.columns[name] for batch in self.batches]) for name in common})
        loaders = trainer.val_dataloaders if trainer.validating else trainer.test_dataloaders
        multiple = isinstance(loaders, list | tuple) and len(loaders) > 1
        indices: list[int] = []
        for number, loader in enumerate(loaders if isinstance(loaders, list | tuple) else [loaders]):
            indices += _indices(loader, sum(batch.samples for batch in self.batches if batch.dataloader == number))
        table.insert(0, "index", indices if len(indices) == len(table) else range(len(table)))
        if multiple:
            table.insert(0, "dataloader", [batch.dataloader for batch in self.batches for _ in range(batch.samples)])
        return table


def to_columns(outputs: Any, targets: Any, count: int) -> tuple[Columns, dict[str, str]]:
    """Convert the outputs of a step to columns of a table.

    A tensor of shape (B,) or (B, 1) is one column, one of shape (B, C) C columns. In a mapping, ``losses`` become the
    column ``loss``. ``predictions`` (B, C) are class probabilities if ``targets`` (an entry, or else the second element
    of the batch) are integers; then the most probable class and its confidence are columns.

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
    targets = named.pop("targets", targets)
    predictions = named.pop("predictions", None)
    if predictions is None and isinstance(outputs, Tensor) and outputs.ndim and len(outputs) == count:
        predictions = named.pop("prediction")
    found: Columns = {}
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
            found |= _spread(name, to_numpy(value))
        elif fault:
            skipped[name] = fault
    return found, skipped


def to_numpy(value: Tensor) -> npt.NDArray[Any]:
    """Convert a tensor to NumPy, half precision to float32: NumPy has no bfloat16, pandas no float16 index."""
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
        return f"{' × '.join(map(str, value.shape[1:]))} values per sample"
    return None


def _spread(name: str, values: npt.NDArray[Any]) -> Columns:
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


def _data_parallel_size(trainer: L.Trainer) -> int:
    """Number of data-parallel ranks."""
    return int((getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1))


def _gather(local: Any) -> list[Any]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [local]
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, local)
    return gathered


def _write_worst(folder: Path, ranks: Sequence[tuple[pd.DataFrame, list[npt.NDArray[Any]]]], data: Any) -> None:
    """Write the inputs with the largest loss, if they have the same shape."""
    inputs = [values for _, some in ranks for values in some]
    if len({values.shape for values in inputs}) != 1:
        return
    rows = pd.concat([frame for frame, _ in ranks if len(frame)], ignore_index=True)
    rows = rows.sort_values(["loss", "index"], ascending=[False, True]).head(WORST)
    chosen = [inputs[place] for place in rows.index]
    np.savez_compressed(
        folder / "worst.npz",
        inputs=np.stack(chosen),
        allow_pickle=False,
        **{str(name): rows[name].to_numpy() for name in rows},
        **_texts(data, chosen),
    )


def _classes(data: Any) -> list[str]:
    """Class names, if the data module lists them; in a foreign one ``classes`` may be their number."""
    names = getattr(data, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _texts(data: Any, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """Decoded text of the worst inputs, if they are tokens."""
    if not is_native_data(data) or "tokenizer" not in data.statistics:
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for tokens in inputs])}


def _write_summary(folder: Path, table: pd.DataFrame, classes: list[str]) -> None:
    """Write metrics and counts per class, or a scatter plot."""
    if not {"target", "prediction"} <= set(table):
        return
    pairs = table[["target", "prediction"]]
    if all(np.issubdtype(kind, np.integer) for kind in pairs.dtypes):
        if pairs.to_numpy().min() >= 0 and pairs.to_numpy().max() < MAX_CLASSES:
            _write_classes(folder, table, classes)
    else:
        _draw_scatter(folder / "scatter.png", table)


def _write_classes(folder: Path, table: pd.DataFrame, classes: list[str]) -> None:
    count = max(len(classes), int(table[["target", "prediction"]].to_numpy().max()) + 1)
    names = classes or [str(number) for number in range(count)]
    truth, predicted, numbers = table["target"], table["prediction"], list(range(count))
    precision, recall, f1, support = precision_recall_fscore_support(truth, predicted, labels=numbers, zero_division=0)
    by_class = {"class": names, "precision": precision, "recall": recall, "f1": f1, "samples": support}
    pd.DataFrame(by_class).to_csv(folder / "classes.csv", index=False)
    matrix = confusion_matrix(truth, predicted, labels=numbers)
    pd.DataFrame(matrix, names, names).to_csv(folder / "confusion.csv", index_label="target")
    _draw_confusion(folder / "confusion.png", matrix, names)


def _draw_confusion(path: Path, matrix: npt.NDArray[Any], names: list[str]) -> None:
    """Draw a confusion matrix with targets as rows, colored by the fraction of the row, with counts if they fit."""
    size = min(16.0, 2.5 + 0.45 * len(names))
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.add_subplot()
    fractions = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    axes.imshow(fractions, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= 30:
        axes.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, column in np.argwhere(matrix):
            text_color = "white" if fractions[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=text_color, fontsize=8)
    axes.set(xlabel="prediction", ylabel="target")
    figure.savefig(path, dpi=150)


def _draw_scatter(path: Path, table: pd.DataFrame) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(table["target"], table["prediction"], s=12, alpha=0.6)
    ends = [table[["target", "prediction"]].min().min(), table[["target", "prediction"]].max().max()]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xlabel="target", ylabel="prediction")
    figure.savefig(path, dpi=150)
