"""Measure a checkpoint: each sample counted once on any number of processes; tables, a picture, the worst errors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from lightning.pytorch.callbacks import Callback
from matplotlib.figure import Figure
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import Tensor

from boltcutter import run, summary
from boltcutter.assemble import Parts, assemble, check_cfg
from boltcutter.config import ConfigError, hint
from boltcutter.environment.process import is_first, leaving_together
from boltcutter.loading import damage
from boltcutter.quiet import quiet
from boltcutter.selection import best, names, newest
from boltcutter.storage import CheckpointError

WORST = 24  # errors whose inputs are kept to be looked at


def main(configs: Path, words: list[str]) -> None:
    """Evaluate a run.

    Args:
        configs: Folder of the configuration.
        words: ``run=<folder>``, and ``ckpt=best|last|<path>``, ``split=test|val|train``, ``output=<folder>``; any other
            word changes the run's configuration, as ``data=…`` does.
    """
    quiet()
    special, rest = run.take(words, "run", "ckpt", "split", "output")
    cfg, folder = run.reopen_for(configs, special, rest)
    split = special.get("split", "test")
    if split not in ("train", "val", "test"):
        raise ConfigError(f"split={split}: expected train, val or test{hint(split, ('train', 'val', 'test'))}")
    check_cfg(cfg)
    name = split if not any(word.startswith("data") for word in rest) else f"{cfg.choices.data}-{split}"
    output = Path(special.get("output") or folder / "evaluation" / name)
    parts = assemble(cfg, logs=False)
    with leaving_together():
        scores = score(parts, find_checkpoint(cfg.checkpoints, special.get("ckpt", "best")), output, split)
        if parts.trainer.is_global_zero:
            summary.evaluation(output, scores)


def find_checkpoint(place: str, which: str) -> str:
    """``best``, ``last``, the name of one of the run's checkpoints, a path or a URL.

    Raises:
        ConfigError: There is none, or it is damaged.
    """
    try:
        known = names(place)
        if which in ("best", "last"):
            found = (best if which == "best" else newest)(place, print if is_first() else lambda told: None)
        else:
            found = f"{place}/{which}" if which in known else which
        fault = damage(found) if found else "none is there"
    except CheckpointError as error:
        raise ConfigError(f"ckpt={which}: {error}") from error
    if found is None or fault:
        raise ConfigError(f"ckpt={which}: {fault} (the run has: {', '.join(known) or 'none yet'})")
    return found


def score(parts: Parts, checkpoint: str | None, output: Path, split: str = "test") -> dict[str, float]:
    """Measure ``checkpoint`` on a split and write ``output``: metrics, tables, predictions, a picture, worst errors.

    Args:
        parts: Trainer, data and task.
        checkpoint: Whose weights are measured; None takes those that the task has.
        output: Folder.
        split: Which samples.

    Returns:
        Metrics by name, over all samples of the split.
    """
    outcomes = Outcomes(output)
    callbacks: list[Callback] = parts.trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(outcomes)
    try:
        if split != "test":
            data: Any = parts.data
            whole = partial(data.loader, split) if hasattr(data, "loader") else getattr(data, f"{split}_dataloader")
            data.test_dataloader = whole
        found = parts.trainer.test(
            parts.task, datamodule=parts.data, ckpt_path=checkpoint, verbose=False, weights_only=True
        )
    finally:
        callbacks.remove(outcomes)
    scores = {name.replace("test/", f"{split}/", 1): float(value) for name, value in dict(found[0]).items()}
    if parts.trainer.is_global_zero:
        run.write_atomically(output / "metrics.json", json.dumps(scores, indent=2) + "\n")
    return scores


class Outcomes(Callback):
    """Gathers what the task says of each sample, over all ranks, and writes it.

    ``predictions.csv`` has a line for each sample: its loss and, where the task tells it, its prediction;
    ``classes.csv`` and ``confusion.csv`` have the counts for each class; ``confusion.png`` or ``scatter.png`` is to be
    looked at; ``worst.npz`` has the inputs with the largest loss.

    Args:
        folder: Where it writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.columns: list[dict[str, npt.NDArray[Any]]] = []
        self.worst: list[tuple[float, int, npt.NDArray[Any]]] = []  # loss, place on this rank, input

    def on_test_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep predictions; keep inputs of the largest losses."""
        inputs, targets = batch
        losses = outputs["losses"].float().cpu()
        begin = sum(len(columns["loss"]) for columns in self.columns)
        told = _columns(outputs["predictions"].float().cpu(), targets.cpu()) if "predictions" in outputs else {}
        self.columns.append({"loss": losses.numpy(), **told})
        for place in losses.topk(min(WORST, len(losses))).indices.tolist():
            self.worst.append((float(losses[place]), begin + place, inputs[place].cpu().numpy()))
        self.worst = sorted(self.worst, key=lambda kept: -kept[0])[:WORST]

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bring the ranks together; the first one writes."""
        names = self.columns[0].keys() if self.columns else ()
        mine = pd.DataFrame({name: np.concatenate([part[name] for part in self.columns]) for name in names})
        mine.insert(0, "index", _indices(trainer, len(mine)))
        worst = [(loss, int(mine["index"][place]), values) for loss, place, values in self.worst]
        everyone = _gather((mine, worst))[:: trainer.world_size // _sharing(trainer)]  # others saw the same samples
        if trainer.is_global_zero:
            table = pd.concat([frame for frame, _ in everyone]).sort_values("index", ignore_index=True)
            kept = sorted((w for _, some in everyone for w in some), key=lambda w: (-w[0], w[1]))[:WORST]
            data = trainer.datamodule  # type: ignore[attr-defined]
            _write(self.folder, table, kept, list(getattr(data, "classes", ())), _texts(data, kept))


def _columns(predictions: Tensor, targets: Tensor) -> dict[str, npt.NDArray[Any]]:
    """Classes and the confidence in them, or numbers."""
    if not targets.is_floating_point():
        confidence, predicted = predictions.max(dim=-1)
        return {"target": targets.numpy(), "prediction": predicted.numpy(), "confidence": confidence.numpy()}
    pairs = [("target", targets), ("prediction", predictions)]
    if targets.size(-1) == 1:
        return {name: values[:, 0].numpy() for name, values in pairs}
    return {f"{name}_{t}": values[:, t].numpy() for name, values in pairs for t in range(targets.size(-1))}


def _indices(trainer: L.Trainer, length: int) -> Sequence[int]:
    """Which samples of the split this rank saw, in its order."""
    sampler = getattr(trainer.test_dataloaders, "batch_sampler", None)
    seen = list(islice((index for batch in sampler or () for index in batch), length))
    return seen if len(seen) == length else range(length)


def _sharing(trainer: L.Trainer) -> int:
    """Ranks that share the samples out."""
    return int((getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}).get("num_replicas", 1))


def _gather(mine: Any) -> list[Any]:
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [mine]
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, mine)
    return everyone


def _texts(data: Any, worst: Sequence[tuple[float, int, Any]]) -> dict[str, Any]:
    """What the worst inputs say, where they are tokens of text."""
    if not worst or getattr(data, "kind", None) != "tokens" or "tokenizer" not in data.statistics:
        return {}
    return {"text": np.array([data.tokenizer.decode(tokens.tolist()) for _, _, tokens in worst])}


def _write(
    folder: Path,
    table: pd.DataFrame,
    worst: Sequence[tuple[float, int, Any]],
    classes: list[str],
    texts: dict[str, Any],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "predictions.csv", index=False)
    chosen = table.set_index("index").loc[[index for _, index, _ in worst]]
    np.savez_compressed(
        folder / "worst.npz",
        inputs=np.stack([values for _, _, values in worst]),
        index=chosen.index.to_numpy(),
        allow_pickle=False,
        **{str(name): chosen[name].to_numpy() for name in chosen},
        **texts,
    )
    if "confidence" in table:
        _write_classes(folder, table, classes)
    elif "target" in table:
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
