"""metrics.csv: a line for each step that logged something."""

from __future__ import annotations

import csv
import time
from argparse import Namespace
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class CSV(Logger):
    """One file for the whole run, over all of its attempts.

    All that is logged at one step stands in one line. A resumed run overwrites the steps that it does again, and a
    new column rewrites the file; otherwise lines are only added, so writing costs no more late than early.

    Args:
        path: Of the file.
        seconds_between_writes: What may be lost when the process is killed.
    """

    def __init__(self, path: Path, *, seconds_between_writes: float = 1.0) -> None:
        super().__init__()
        self.path, self.seconds_between_writes = Path(path), seconds_between_writes
        self._rows: dict[int, dict[str, str]] | None = None
        self._columns = ["step", "epoch"]
        self._written = 0  # rows that stand in the file
        self._columns_written = 0
        self._newest_written = -1
        self._next = 0.0

    @property
    def name(self) -> str:
        """Of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """None: the run's folder tells."""
        return ""

    @property
    def save_dir(self) -> str:
        """The folder of the file."""
        return str(self.path.parent)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the line of ``step``."""
        at = step or 0
        rows = self._open(at)
        row = rows.get(at)
        if row is None:
            row = rows[at] = {"step": str(at)}
        elif at <= self._newest_written:
            self._columns_written = 0  # the line in the file is out of date: write all anew
        for name, value in metrics.items():
            if name not in self._columns:
                self._columns.append(name)
            row[name] = str(int(value)) if name == "epoch" else repr(float(value))

    @rank_zero_only
    def save(self) -> None:
        """Write what is new, but for the newest line, which may yet grow."""
        if self._rows and time.monotonic() >= self._next:
            self._write(len(self._rows) - 1)
            self._next = time.monotonic() + self.seconds_between_writes

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        if self._rows:
            self._write(len(self._rows))

    def _write(self, end: int) -> None:
        whole = self._columns_written != len(self._columns)
        draft = self.path.with_name(f".{self.path.name}.part")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft if whole else self.path, "w" if whole else "a", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            if whole:
                writer.writeheader()
            writer.writerows(islice((self._rows or {}).values(), 0 if whole else self._written, end))
        if whole:
            draft.replace(self.path)
        self._written, self._columns_written = end, len(self._columns)
        self._newest_written = next(islice(self._rows or (), end - 1, None), -1) if end else -1

    def _open(self, step: int) -> dict[int, dict[str, str]]:
        """The rows; at first those of earlier attempts up to ``step``."""
        if self._rows is None:
            self._rows = {}
            if self.path.is_file():
                with open(self.path, newline="") as file:
                    reader = csv.DictReader(file)
                    kept = [row for row in reader if row["step"].isdigit() and int(row["step"]) < step]
                    self._columns = list(reader.fieldnames or self._columns)
                self._rows = {int(row["step"]): {k: v for k, v in row.items() if v} for row in kept}
        return self._rows
