"""Write predictions to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from boltcutter.config.errors import ConfigError
from boltcutter.report.csv_table import Table, count_rows, write_csv
from boltcutter.run.remote.store import run_store


def write_predictions(output: Path, found: Table | list[Any]) -> None:
    """Write a table, or else batches of tensors with the suffix ``.pt``.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        if isinstance(found, dict):
            count = f"{count_rows(found)}"
            write_csv(output, found)
        else:
            count, output = f"{len(found)} batches of", output.with_suffix(".pt")
            output.parent.mkdir(parents=True, exist_ok=True)
            torch.save(found, output)
    except OSError as error:
        raise ConfigError(f"output={output}: cannot be written ({error.strerror}); choose another file") from error
    print(f"{count} predictions: {run_store().show(output)}")
