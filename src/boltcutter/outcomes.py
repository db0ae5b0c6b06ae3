"""What was found of each sample of a split: tables, a picture, and the worst errors, over all ranks."""

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

from boltcutter.adapt import is_native_data
from boltcutter.batches import count_samples, first_tensor

WORST = 24  # errors whose inputs are kept to be looked at
NUMBERS = 32  # columns at most that one entry of an output may take
CLASSES = 2000  # rows at most of a confusion matrix
SHUFFLED = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)  # whose order cannot be had a second time

Columns = dict[str, npt.NDArray[Any]]


class Part(NamedTuple):
    """What one batch gave."""

    dataloader: int
    samples: int
    columns: Columns


class PredictionWriter(Callback):
    """Gathers what ``test_step`` returns for each sample, over all ranks, and writes it.

    ``predictions.csv`` has a line for each sample, with a column for whatever ``test_step`` returns of one number for
    each sample: see ``columns``. ``classes.csv`` and ``confusion.csv`` have the counts for each class;
    ``confusion.png`` or ``scatter.png`` is to be looked at; ``worst.npz`` has the inputs with the largest loss. What
    does not fit is left out, and named once.

    Args:
        folder: Where it writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts: list[Part] = []
        self.worst: list[tuple[float, int, npt.NDArray[Any]]] = []  # loss, place on this rank, input
        self.left_out: dict[str, str] = {}  # what, and why

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep what fits; keep inputs of the largest losses."""
        count = count_samples(batch)
        if count is None:
            self.left_out[type(batch).__name__] = "does not say how many samples it has"
            return
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        found, left_out = columns(outputs, batch[1] if pair else None, count)
        self.left_out |= left_out
        if not found:
            return
        begin = sum(part.samples for part in self.parts)
        self.parts.append(Part(dataloader_idx, count, found))
        inputs = first_tensor(batch[0] if pair else batch)
        if "loss" in found and inputs is not None and len(inputs) == count:
            losses = torch.from_numpy(found["loss"])
            for place in losses.topk(min(WORST, count)).indices.tolist():
                self.worst.append((float(losses[place]), begin + place, array(inputs[place])))
            self.worst = sorted(self.worst, key=lambda kept: -kept[0])[:WORST]

    on_validation_batch_end = on_test_batch_end

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bring the ranks together; the first one writes."""
        mine = self._table(trainer)
        places = [place for _, place, _ in self.worst]
        worst = (mine.iloc[places], [values for _, _, values in self.worst])
        everyone = _gather((mine, worst))[:: trainer.world_size // _sharing(trainer)]  # others saw the same samples
        if not trainer.is_global_zero:
            return
        table = pd.concat([frame for frame, _ in everyone if len(frame)] or [mine], join="inner", ignore_index=True)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        if len(table.columns.drop(["index", "dataloader"], errors="ignore")):
            self.folder.mkdir(parents=True, exist_ok=True)
            if (table["index"] < 0).any():
                table["index"] = range(len(table))  # in the order of ranks and batches
            table = table.sort_values(["dataloader", "index"] if "dataloader" in table else "index", ignore_index=True)
            table.to_csv(self.folder / "predictions.csv", index=False)
            _write_summary(self.folder, table, _classes(data))
            _write_worst(self.folder, [kept for _, kept in everyone], data)
        else:
            self.left_out.setdefault("predictions.csv", f"{type(pl_module).__name__} returns nothing for each sample")
        if self.left_out:
            told = "; ".join(f"{what} ({why})" for what, why in self.left_out.items())
            print(f"{self.folder}: metrics are written; left out of what was found of each sample: {told}")

    on_validation_end = on_test_end

    def _table(self, trainer: L.Trainer) -> pd.DataFrame:
        """A row for each sample that this rank has seen."""
        every = [part.columns for part in self.parts]
        common = [name for name in (every[0] if every else ()) if all(name in found for found in every)]
        for name in {name for found in every for name in found}.difference(common):
            self.left_out[name] = "is not there for each batch"
        table = pd.DataFrame({name: np.concatenate([part.columns[name] for part in self.parts]) for name in common})
        loaders = trainer.val_dataloaders if trainer.validating else trainer.test_dataloaders
        several = isinstance(loaders, list | tuple) and len(loaders) > 1
        indices: list[int] = []
        for number, loader in enumerate(loaders if isinstance(loaders, list | tuple) else [loaders]):
            indices += _indices(loader, sum(part.samples for part in self.parts if part.dataloader == number))
        table.insert(0, "index", indices if len(indices) == len(table) else range(len(table)))
        if several:
            table.insert(0, "dataloader", [part.dataloader for part in self.parts for _ in range(part.samples)])
        return table


def columns(outputs: Any, targets: Any, count: int) -> tuple[Columns, dict[str, str]]:
    """Columns of a table from what a step returns for a batch, and what does not fit, with the reason.

    A tensor of one number for each sample is a column; one of a few numbers has a column for each. In a mapping,
    ``losses`` become the column ``loss``, and ``predictions`` are probabilities of classes where ``targets`` (an entry,
    or else the second part of the batch) are whole numbers, of which the likeliest is told.

    Args:
        outputs: Of the step: a tensor, a mapping, or anything else.
        targets: Of the batch, where it has them.
        count: Samples of the batch.
    """
    if outputs is None or (isinstance(outputs, Tensor) and outputs.ndim == 0):
        return {}, {}
    named = dict(outputs) if isinstance(outputs, Mapping) else {"prediction": outputs}
    targets = named.pop("targets", targets)
    predictions = named.pop("predictions", None)
    if predictions is None and isinstance(outputs, Tensor) and outputs.ndim and len(outputs) == count:
        predictions = named.pop("prediction")
    found: Columns = {}
    left_out: dict[str, str] = {}
    if "losses" in named:
        named = {"loss": named.pop("losses"), **named}
    if isinstance(predictions, Tensor):
        if _is_class(predictions, targets, count):
            confidence, predicted = predictions.float().max(dim=-1)
            named |= {"target": targets, "prediction": predicted, "confidence": confidence}
        else:
            named |= {"target": targets, "prediction": predictions}
    for name, value in named.items():
        fault = _unfit(value, count)
        if fault is None:
            found |= _spread(name, array(value))
        elif fault:
            left_out[name] = fault
    return found, left_out


def array(value: Tensor) -> npt.NDArray[Any]:
    """A tensor's numbers on the host, of at least 32 bits: NumPy has no bfloat16, and pandas no index of float16."""
    value = value.detach()
    half = value.dtype in (torch.bfloat16, torch.float16)
    found: npt.NDArray[Any] = (value.float() if half else value).cpu().numpy()
    return found


def _is_class(predictions: Tensor, targets: Any, count: int) -> bool:
    """Whether each sample has one class and a number for each class."""
    whole = isinstance(targets, Tensor) and targets.shape == (count,) and not targets.is_floating_point()
    return whole and predictions.ndim == 2 and len(predictions) == count and predictions.is_floating_point()


def _unfit(value: Any, count: int) -> str | None:
    """Why something is no column; empty where it is not worth a word."""
    if not isinstance(value, Tensor):
        return "" if value is None else f"a {type(value).__name__}, no tensor"
    if value.ndim == 0:
        return "one number for the batch"
    if len(value) != count:
        return f"{len(value)} for {count} samples"
    each = value[0].numel() if count else 0
    if value.ndim > 2 or each > NUMBERS:
        return f"{' × '.join(map(str, value.shape[1:]))} numbers for each sample"
    return None


def _spread(name: str, values: npt.NDArray[Any]) -> Columns:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return {name: values} if values.ndim == 1 else {f"{name}_{t}": values[:, t] for t in range(values.shape[1])}


def _indices(loader: Any, length: int) -> list[int]:
    """Which samples of the split this rank saw, in its order; -1 where that cannot be known."""
    sampler = getattr(loader, "batch_sampler", None)
    if sampler is None or isinstance(getattr(sampler, "sampler", None), SHUFFLED):
        return [-1] * length
    seen = list(islice((index for batch in sampler for index in batch), length))
    return seen if len(seen) == length and all(isinstance(index, int) for index in seen) else [-1] * length


def _sharing(trainer: L.Trainer) -> int:
    """Ranks that share the samples out."""
    return int((getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1))


def _gather(mine: Any) -> list[Any]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def _write_worst(folder: Path, kept: Sequence[tuple[pd.DataFrame, list[npt.NDArray[Any]]]], data: Any) -> None:
    """The inputs with the largest loss, where they are of one shape."""
    inputs = [values for _, some in kept for values in some]
    if len({values.shape for values in inputs}) != 1:
        return
    rows = pd.concat([frame for frame, _ in kept if len(frame)], ignore_index=True)
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
    """Names of the classes, where the data module lists them; a foreign one may mean their number."""
    names = getattr(data, "classes", None)
    return [str(name) for name in names] if isinstance(names, list | tuple) else []


def _texts(data: Any, inputs: Sequence[npt.NDArray[Any]]) -> dict[str, Any]:
    """What the worst inputs say, where they are tokens of text."""
    if not is_native_data(data) or "tokenizer" not in data.statistics:
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for tokens in inputs])}


def _write_summary(folder: Path, table: pd.DataFrame, classes: list[str]) -> None:
    """Counts for each class, or a picture of numbers."""
    if not {"target", "prediction"} <= set(table):
        return
    pairs = table[["target", "prediction"]]
    if all(np.issubdtype(kind, np.integer) for kind in pairs.dtypes):
        if pairs.to_numpy().min() >= 0 and pairs.to_numpy().max() < CLASSES:
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
    pd.DataFrame(matrix, names, names).to_csv(folder / "confusion.csv", index_label="truth")
    _draw_confusion(folder / "confusion.png", matrix, names)


def _draw_confusion(path: Path, matrix: npt.NDArray[Any], names: list[str]) -> None:
    """Rows are the truth, coloured by their share; the count stands in each cell where there is room."""
    size = min(16.0, 2.5 + 0.45 * len(names))
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.add_subplot()
    shares = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    if len(names) <= 30:
        axes.set_xticks(range(len(names)), names, rotation=45 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, column in np.argwhere(matrix):
            colour = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(matrix[row, column]), ha="center", va="center", color=colour, fontsize=8)
    axes.set(xlabel="predicted", ylabel="truth")
    figure.savefig(path, dpi=150)


def _draw_scatter(path: Path, table: pd.DataFrame) -> None:
    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(table["target"], table["prediction"], s=12, alpha=0.6)
    ends = [table[["target", "prediction"]].min().min(), table[["target", "prediction"]].max().max()]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xlabel="truth", ylabel="predicted")
    figure.savefig(path, dpi=150)
