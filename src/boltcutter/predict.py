"""Predictions for new files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltcutter import run
from boltcutter.assemble import Parts, assemble, check_cfg, told_in_one_line
from boltcutter.checkpoint import load
from boltcutter.config import ConfigError
from boltcutter.evaluate import find_checkpoint
from boltcutter.quiet import quiet


def main(configs: Path, words: list[str]) -> None:
    """Write a line for each new sample.

    Args:
        configs: Folder of the configuration.
        words: ``run=<folder>``, ``input=<file or folder>`` (several with commas), and ``ckpt=best|last|<path>``,
            ``output=<file>``; any other word changes the run's configuration.
    """
    quiet()
    special, rest = run.take(words, "run", "input", "ckpt", "output")
    cfg, folder = run.reopen_for(configs, special, rest)
    if not special.get("input"):
        raise ConfigError("input: not set; say input=<file or folder>, several with commas between them")
    inputs = [Path(text) for text in special["input"].split(",")]
    if missing := [str(path) for path in inputs if not path.exists()]:
        raise ConfigError(f"input={missing[0]}: no such file or folder; give files that are there")
    check_cfg(cfg)
    parts = assemble(cfg, logs=False)
    table = predict(parts, find_checkpoint(cfg.checkpoints, special.get("ckpt", "best")), inputs)
    if parts.trainer.is_global_zero:
        output = Path(special.get("output") or folder / "predictions.csv")
        output.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(output, index=False)
        print(f"{len(table)} predictions: {output}")


def predict(parts: Parts, checkpoint: str, inputs: list[Path]) -> pd.DataFrame:
    """A line for each sample in ``inputs``: its name and prediction, and the probability of each class.

    Raises:
        ConfigError: The data module cannot read an input.
    """
    data: Any = parts.data
    state = load(checkpoint)
    data.load_state_dict(state.get(type(data).__qualname__, {"statistics": {}}))
    with told_in_one_line():
        samples, names = data.read(inputs)
    loader = DataLoader(TensorDataset(samples), batch_size=data.batch_size)
    found: Any = parts.trainer.predict(parts.task, loader, ckpt_path=checkpoint, weights_only=True)
    return _table(torch.cat(found).float(), names, list(data.classes), data.kind)


def _table(predictions: Tensor, names: list[str], classes: list[str], kind: str) -> pd.DataFrame:
    if kind == "numbers":
        columns = (
            ["prediction"] if predictions.size(1) == 1 else [f"prediction_{t}" for t in range(predictions.size(1))]
        )
        return pd.DataFrame({"input": names} | dict(zip(columns, predictions.numpy().T, strict=True)))
    labels = np.array(classes or [str(number) for number in range(predictions.size(1))])
    table = {"input": names, "prediction": labels[predictions.argmax(dim=-1).numpy()]}
    return pd.DataFrame(table | {str(label): predictions[:, c].numpy() for c, label in enumerate(labels)})
