"""metrics.csv: a line for each number that was logged."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class CSV(Logger):
    """One file for the whole run: columns step, metric, value. A resumed run replaces the steps that it does again.

    ``pandas.read_csv(path).pivot(index="step", columns="metric", values="value")`` has a column for each metric.
    """

    name, version = "csv", ""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)
        self._begun = False

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a line for each."""
        step = step or 0
        if not self._begun:
            self._begin(step)
        with open(self.path, "a", newline="") as file:
            csv.writer(file).writerows((step, name, repr(float(value))) for name, value in metrics.items())

    def _begin(self, step: int) -> None:
        """Keep what was logged before ``step``; a kill may have cut the last line off."""
        text = self.path.read_text() if self.path.is_file() else ""
        rows = list(csv.reader(text[: text.rfind("\n") + 1].splitlines()))[1:]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "w", newline="") as file:
            csv.writer(file).writerows([("step", "metric", "value"), *(row for row in rows if int(row[0]) < step)])
        self._begun = True
