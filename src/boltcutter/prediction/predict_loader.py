"""Predictions for the ``predict_dataloader`` of any module or data module, for ``boltcutter predict``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from boltcutter.assembly.assemble import Components
from boltcutter.checkpoint.load import restore
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.evaluation.splits import loader_owner
from boltcutter.export.exported import ExportedModel
from boltcutter.prediction.generate import SAMPLING
from boltcutter.prediction.output import write_predictions
from boltcutter.protocols import NativeData
from boltcutter.report.columns import concatenate, to_columns
from boltcutter.report.csv_table import Table, count_rows
from boltcutter.run.best import find_checkpoint
from boltcutter.run.remote.store import run_store
from boltcutter.structure import count_samples


def predict_loader(
    components: Components,
    cfg: Settings,
    folder: Path,
    overrides: dict[str, str],
    exported: ExportedModel | None = None,
) -> Table | list[Any]:
    """Write the outputs of ``predict_step`` for ``predict_dataloader`` of any module or data module.

    Numbers per sample become a table; other outputs are saved to ``predictions.pt`` as a list over batches.

    Returns:
        What was written.
    """
    if given := [name for name in ("input", *SAMPLING) if name in overrides]:
        raise ConfigError(
            f"{given[0]}={overrides[given[0]]}: {type(components.data or components.task).__name__} does not use it; "
            "remove it to predict the samples of predict_dataloader"
        )
    if loader_owner(components.data, components.task, "predict") is None:
        raise ConfigError(
            f"run={folder}: {type(components.data or components.task).__name__} has no predict_dataloader; add one"
        )
    if components.topology.world_size > 1:
        raise ConfigError(
            f"trainer.devices={components.topology.num_devices}: prediction runs on one device; try trainer.devices=1"
        )
    if exported is not None:
        if isinstance(components.data, NativeData):
            restore(components.data, exported)
        loaders: Any = [list(exported.predict_batches(_only_loader(components)))]
    else:
        checkpoint = find_checkpoint(cfg.place, overrides.get("ckpt", "best"))
        found: Any = components.trainer.predict(
            components.task, datamodule=components.data, ckpt_path=checkpoint, weights_only=True
        )
        multiple = len(components.trainer.num_predict_batches) > 1  # then Lightning returns a list per loader
        loaders = found if multiple else [found]
    loaders = _plain(loaders)
    table = _columns(loaders)
    batches = loaders if len(loaders) > 1 else loaders[0]
    write_predictions(
        Path(overrides.get("output") or folder / "predictions.csv"),
        batches if table is None else {"index": np.arange(count_rows(table)), **table},
    )
    run_store().push(folder)
    return batches if table is None else table


def _plain(value: Any) -> Any:
    """Convert to CPU tensors in plain dictionaries and lists, which any program can load."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def _columns(loaders: list[list[Any]]) -> Table | None:
    """One row per sample, with the index of the loader if there are several; None if there are other outputs."""
    parts = []
    for number, batches in enumerate(loaders):
        for batch in batches:
            count = count_samples(batch)
            found, skipped = ({}, {"": ""}) if count is None else to_columns(batch, None, count)
            if skipped or not found:
                return None
            parts.append({"dataloader": np.full(count_rows(found), number), **found} if loaders[1:] else found)
    return concatenate(parts) or None


def _only_loader(components: Components) -> Any:
    """The loader of samples to predict, for an export."""
    owner: Any = loader_owner(components.data, components.task, "predict")
    owner.prepare_data()
    owner.setup(stage="predict")
    loader = owner.predict_dataloader()
    if isinstance(loader, list | tuple):
        raise ConfigError(f"export: {type(owner).__name__} has {len(loader)} loaders to predict; use the checkpoint")
    return loader
