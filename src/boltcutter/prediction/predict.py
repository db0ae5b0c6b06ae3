"""Predict new files, or generate the continuation of a text."""

from __future__ import annotations

import glob
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from boltcutter.assembly.assemble import Components, complete_config
from boltcutter.assembly.overrides import load_evaluation_config
from boltcutter.checkpoint.load import restore
from boltcutter.config.errors import ConfigError, as_config_error
from boltcutter.config.settings import Settings
from boltcutter.config.values import split_overrides
from boltcutter.environment.warning_filters import filter_warnings
from boltcutter.evaluation.evaluate import assembled, explain_mismatch
from boltcutter.evaluation.splits import has_own_loader, note_limit
from boltcutter.export.exported import ExportedModel
from boltcutter.prediction.generate import SAMPLING, generate
from boltcutter.prediction.output import write_predictions
from boltcutter.prediction.predict_loader import predict_loader
from boltcutter.project import Project
from boltcutter.protocols import GeneratesTokens, NativeData
from boltcutter.report.csv_table import MAX_COLUMNS, Table, spread
from boltcutter.run.best import find_checkpoint
from boltcutter.run.remote.store import run_store
from boltcutter.structure import make_batch


def predict_command(project: Project, overrides: list[str]) -> Table | list[Any] | str:
    """Write the prediction of each new sample or, if the task can ``generate``, the continuation of a text.

    Without ``input``, or for data modules that do not read files, ``predict_dataloader`` is used.

    Args:
        project: Whose configuration is used.
        overrides: ``run=<folder>``, ``input=<file, folder or pattern>`` (several separated by commas), and
            ``ckpt=best|last|<path>`` or ``export=<format or file>``, ``output=<file>``; for a text
            ``input=<file or text>``, ``tokens=<number to generate>``, ``temperature=<0 or more>``,
            ``top_k=<tokens to sample from>`` and ``seed=<number>``; other overrides change the run's configuration.

    Returns:
        The columns of a table with one row per sample, by name; the text and its continuation if the task can
        ``generate``; a list of outputs over batches if they do not fit into a table.
    """
    filter_warnings(trains=False)
    special, rest = split_overrides(overrides, "run", "input", "ckpt", "export", "output", *SAMPLING)
    cfg, folder = load_evaluation_config(project, special, rest)
    cfg = complete_config(cfg)
    if "export" in special and "ckpt" in special:
        raise ConfigError(f"export={special['export']}: used in place of a checkpoint; remove ckpt={special['ckpt']}")
    with assembled(cfg, folder, "predict") as components:
        return _predict(components, cfg, folder, special, rest)


def _predict(
    components: Components, cfg: Settings, folder: Path, special: dict[str, str], rest: list[str]
) -> Table | list[Any] | str:
    export = special.get("export")
    exported = ExportedModel(folder, export) if export else None
    reads_files = isinstance(components.data, NativeData)
    if not reads_files or ("input" not in special and has_own_loader(components.data, "predict")):
        note_limit(components.trainer, "limit_predict_batches", rest)
        outputs: Table | list[Any] = predict_loader(components, cfg, folder, special, exported)
        return outputs
    generates = isinstance(components.task, GeneratesTokens)
    if not (special.get("input") if generates else split_paths(special.get("input", ""))):
        what = "<text or file>" if generates else "<file or folder>, several separated by commas"
        raise ConfigError(f"input is not set; set input={what}", kind="missing_value")
    note_limit(components.trainer, "limit_predict_batches", rest)
    model = exported or find_checkpoint(cfg.place, special.get("ckpt", "best"))
    if generates:
        return generate(components, model, special)
    if unused := [name for name in SAMPLING if name in special and name != "seed"]:
        raise ConfigError(f"{unused[0]}: task={cfg.choices['task']} generates no text; remove it")
    inputs = list(dict.fromkeys(path for text in split_paths(special["input"]) for path in find_inputs(text)))
    if missing := [str(path) for path in inputs if not os.path.exists(path)]:
        raise ConfigError(f"input={missing[0]}: no such file or folder; set it to an existing path")
    found = predict(components, model, inputs)
    if components.trainer.is_global_zero:
        write_predictions(Path(special.get("output") or folder / "predictions.csv"), found)
        run_store().push(folder)
    return found


def split_paths(text: str) -> list[str]:
    """The paths of ``a.csv,b.csv``, or of the list ``[a.csv, b.csv]``, as other settings are written."""
    if os.path.exists(text):  # a name may have a comma; a text is too long for the method of Path
        return [text]
    is_list = text.startswith("[") and text.endswith("]")
    parts = (text[1:-1] if is_list else text).split(",")
    return [path for part in parts if (path := part.strip().strip("\"'" if is_list else " "))]


def find_inputs(text: str) -> list[Path]:
    """The file or folder that a text names, or else those that match it as a pattern, such as ``new/**/*.png``."""
    path = Path(text)
    if os.path.exists(text) or not any(sign in text for sign in "*?["):
        return [path]
    return [Path(name) for name in sorted(glob.glob(text, recursive=True))] or [path]


def predict(components: Components, model: str | ExportedModel, inputs: list[Path]) -> Table | list[Any]:
    """Predict each sample in ``inputs``: a table with its name, prediction and the probability of each class.

    More than ``MAX_COLUMNS`` probabilities are left out, and of as many targets the tensor is returned in a list.

    ``model`` is a checkpoint to load, or an export.

    Raises:
        ConfigError: The data module cannot read an input.
    """
    data: Any = components.data
    restore(data, model)
    with as_config_error():
        inputs_read, names = data.read(inputs)
    rows: Any = range(len(names))
    collate = partial(make_batch, inputs_read, collate=getattr(data, "collate_fn", None))
    loader = DataLoader(rows, batch_size=data.batch_size, collate_fn=collate)
    if not isinstance(model, str):
        found: Any = [*model.predict_batches(loader)]
    else:
        with explain_mismatch(model):
            found = components.trainer.predict(components.task, loader, ckpt_path=model, weights_only=True)
    if not all(isinstance(part, Tensor) and part.ndim == 2 and part.shape[1:] == found[0].shape[1:] for part in found):
        return [{"input": names, "prediction": found}]  # such as one of each element of a sequence
    return _table(torch.cat(found).float(), names, list(data.classes), data.kind)


def _table(predictions: Tensor, names: list[str], classes: list[str], kind: str) -> Table | list[Any]:
    columns = predictions.numpy().T  # (C, N)
    is_wide = len(columns) > MAX_COLUMNS
    if is_wide:
        print(f"predictions: {len(columns):,} values per sample, of which a table has at most {MAX_COLUMNS:,}")
    if is_wide and kind == "regression":
        return [{"input": names, "prediction": predictions}]
    if kind == "regression":
        return {"input": np.array(names), **spread("prediction", columns.T)}
    labels = classes or [str(number) for number in range(len(columns))]
    table = {"input": np.array(names), "prediction": np.array(labels)[columns.argmax(axis=0)]}
    if is_wide:
        return {**table, "confidence": columns.max(axis=0)}
    heads = [f"class {label}" if label in table else label for label in labels]
    return {**table, **dict(zip(heads, columns, strict=True))}
