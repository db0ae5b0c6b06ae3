"""The trials of a search, as its report and its tables read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """One trial of a search.

    Args:
        number: Number of the trial, from 0.
        state: ``running``, ``complete``, ``pruned`` (stopped early by the scheduler) or ``failed``.
        values: Sampled values, by key of the configuration.
        objectives: Final value of each metric of the search; empty if there is none.
        curve: Step and value of the first metric after each validation.
        metrics: All metrics of the best validation by a single objective; of several, of the last one.
        seconds: Duration of training.
        folder: Folder of the run.
        error: Why it failed, on one line.
    """

    number: int
    state: str
    values: dict[str, Any]
    objectives: dict[str, float]
    curve: list[tuple[int, float]]
    metrics: dict[str, float]
    seconds: float
    folder: Path
    error: str = field(default="")
