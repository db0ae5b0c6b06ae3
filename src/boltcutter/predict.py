"""Predictions for new files, or the continuation of a text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from boltcutter import run
from boltcutter.adapt import is_native_data, loader_owner
from boltcutter.assemble import Components, as_config_error, assemble, check_config
from boltcutter.batches import count_samples
from boltcutter.config import ConfigError, DictConfig
from boltcutter.environment.warnings import filter_warnings
from boltcutter.evaluate import find_checkpoint
from boltcutter.loading import load
from boltcutter.outcomes import columns
from boltcutter.project import Project

SAMPLING = ("tokens", "temperature", "top_k", "seed")


def main(project: Project, words: list[str]) -> None:
    """Write a line for each new sample; or where the run's task can ``generate``, go on with a text.

    Data modules that read no files are asked for their ``predict_dataloader``.

    Args:
        project: Whose configuration is used.
        words: ``run=<folder>``, ``input=<file or folder>`` (several with commas), and ``ckpt=best|last|<path>``,
            ``output=<file>``; for a text ``input=<file or text>``, ``tokens=<how many>``, ``temperature=<0 or more>``,
            ``top_k=<likeliest tokens to draw from>`` and ``seed=<number>``; any other word changes the run's
            configuration.
    """
    filter_warnings()
    special, rest = run.split_overrides(words, "run", "input", "ckpt", "output", *SAMPLING)
    cfg, folder = run.load_evaluation_config(project, special, rest)
    check_config(cfg)
    components = assemble(cfg, with_callbacks=False)
    if not is_native_data(components.data):
        predict_loader(components, cfg, folder, special)
        return
    writes = hasattr(components.task, "generate")
    if not special.get("input"):
        what = "<text or file>" if writes else "<file or folder>, several with commas between them"
        raise ConfigError(f"input: not set; say input={what}")
    checkpoint = find_checkpoint(cfg.checkpoints, special.get("ckpt", "best"))
    if writes:
        _write_text(continuation(components, checkpoint, special), special.get("output"))
        return
    if odd := [name for name in SAMPLING if name in special and name != "seed"]:
        raise ConfigError(f"{odd[0]}: task={cfg.choices.task} writes no text; leave it out")
    inputs = [Path(text) for text in special["input"].split(",")]
    if missing := [str(path) for path in inputs if not path.exists()]:
        raise ConfigError(f"input={missing[0]}: no such file or folder; give files that are there")
    table = predict(components, checkpoint, inputs)
    if components.trainer.is_global_zero:
        output = Path(special.get("output") or folder / "predictions.csv")
        output.parent.mkdir(parents=True, exist_ok=True)
        table.to_csv(output, index=False)
        print(f"{len(table)} predictions: {output}")


def predict(components: Components, checkpoint: str, inputs: list[Path]) -> pd.DataFrame:
    """A line for each sample in ``inputs``: its name and prediction, and the probability of each class.

    Raises:
        ConfigError: The data module cannot read an input.
    """
    data: Any = components.data
    _restore(data, checkpoint)
    with as_config_error():
        inputs_read, names = data.read(inputs)
    loader = DataLoader(TensorDataset(inputs_read), batch_size=data.batch_size)
    found: Any = components.trainer.predict(components.task, loader, ckpt_path=checkpoint, weights_only=True)
    return _table(torch.cat(found).float(), names, list(data.classes), data.kind)


def predict_loader(components: Components, cfg: DictConfig, folder: Path, words: dict[str, str]) -> None:
    """Write what ``predict_step`` returns for the ``predict_dataloader`` of a module or data module of any kind.

    A table where there are numbers for each sample; else ``predictions.pt``, the list of what each batch gave.

    Raises:
        ConfigError: There are no samples, or a word has no meaning here.
    """
    if given := [name for name in ("input", *SAMPLING) if name in words]:
        raise ConfigError(
            f"{given[0]}={words[given[0]]}: {type(components.data).__name__} reads no files; leave it out, and the samples "
            "of predict_dataloader are predicted"
        )
    if loader_owner(components.data, components.task, "predict") is None:
        raise ConfigError(
            f"run={folder}: {type(components.task).__name__} and its data have no predict_dataloader; add one"
        )
    if components.trainer.world_size > 1:
        raise ConfigError(
            f"trainer.devices={components.trainer.num_devices}: one device predicts; try trainer.devices=1"
        )
    checkpoint = find_checkpoint(cfg.checkpoints, words.get("ckpt", "best"))
    found: Any = components.trainer.predict(
        components.task, datamodule=components.data, ckpt_path=checkpoint, weights_only=True
    )
    several = len(components.trainer.num_predict_batches) > 1  # then Lightning has a list for each loader
    batches = [_plain(batch) for batch in found]
    table = _columns_of_each(batches) if several else _columns(batches)
    output = Path(words.get("output") or folder / "predictions.csv")
    output.parent.mkdir(parents=True, exist_ok=True)
    if table is None:
        output = output.with_suffix(".pt")
        torch.save(batches, output)
        print(f"{len(batches)} batches of predictions: {output}")
    else:
        table.to_csv(output, index_label="index")
        print(f"{len(table)} predictions: {output}")


def _plain(value: Any) -> Any:
    """Tensors on the host, in dictionaries and lists: what any program can load."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _columns(batches: list[Any]) -> pd.DataFrame | None:
    """A row for each sample; None where there are other things than a few numbers for each."""
    parts = []
    for batch in batches:
        count = count_samples(batch)
        found, left_out = ({}, {"": ""}) if count is None else columns(batch, None, count)
        if left_out or not found:
            return None
        parts.append(pd.DataFrame(found))
    return pd.concat(parts, ignore_index=True) if parts else None


def _columns_of_each(loaders: list[Any]) -> pd.DataFrame | None:
    """As ``_columns``, with the number of the loader in front."""
    tables = {number: _columns(batches) for number, batches in enumerate(loaders)}
    known = {number: table for number, table in tables.items() if table is not None}
    if not known or len(known) < len(tables):
        return None
    return pd.concat(known, names=["dataloader"]).reset_index(level=0).reset_index(drop=True)


def continuation(components: Components, checkpoint: str, words: dict[str, str]) -> str:
    """The text of ``input``, which may be a file, and what the model makes of it.

    Args:
        components: Of a run whose task can ``generate``, and whose data has a ``tokenizer``.
        checkpoint: Whose weights are asked.
        words: ``input``, ``tokens`` (200), ``temperature`` (0.8), ``top_k`` (50), ``seed`` (0).

    Raises:
        ConfigError: A word is no number of its kind, or there is no text to begin from.
    """
    count, seed = _number(words, "tokens", 200, int, 1), _number(words, "seed", 0, int, 0)
    temperature, top_k = _number(words, "temperature", 0.8, float, 0), _number(words, "top_k", 50, int, 1)
    data: Any = components.data
    task: Any = components.task
    state = _restore(data, checkpoint)
    with as_config_error():
        tokenizer = data.tokenizer
        text, file = words["input"].encode(), Path(words["input"])
        # The name of a file is shorter than a text may be, and the system refuses to look for a longer one.
        if len(text) < 256 and file.is_file():
            text = file.read_bytes()
        prompt = torch.tensor(tokenizer.encode(text))
    task.load_state_dict(state["state_dict"])
    task.to(components.trainer.strategy.root_device)
    found = list(task.generate(prompt, count, temperature=temperature, top_k=top_k, seed=seed))
    return str(tokenizer.decode([*prompt.tolist(), *found]))


def _write_text(text: str, output: str | None) -> None:
    print(text)
    if output:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        Path(output).write_text(text + "\n")


def _number(words: dict[str, str], name: str, default: Any, kind: type, least: int) -> Any:
    """A word's number, or the default.

    Raises:
        ConfigError: It is none, or too small.
    """
    text = words.get(name, str(default))
    pattern = r"\d+" if kind is int else r"\d+(\.\d*)?|\.\d+"
    if not re.fullmatch(pattern, text) or kind(text) < least:
        raise ConfigError(f"{name}={text} is not a number of {least} or more; try {name}={default}")
    return kind(text)


def _restore(data: Any, checkpoint: str) -> dict[str, Any]:
    """Give the data module what a checkpoint keeps for it; give the checkpoint."""
    state = load(checkpoint)
    data.load_state_dict(state.get(type(data).__qualname__, {"statistics": {}}))
    return state


def _table(predictions: Tensor, names: list[str], classes: list[str], kind: str) -> pd.DataFrame:
    if kind == "regression":
        columns = (
            ["prediction"] if predictions.size(1) == 1 else [f"prediction_{t}" for t in range(predictions.size(1))]
        )
        return pd.DataFrame({"input": names} | dict(zip(columns, predictions.numpy().T, strict=True)))
    labels = np.array(classes or [str(number) for number in range(predictions.size(1))])
    table = {"input": names, "prediction": labels[predictions.argmax(dim=-1).numpy()]}
    return pd.DataFrame(table | {str(label): predictions[:, c].numpy() for c, label in enumerate(labels)})
