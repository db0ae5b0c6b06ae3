"""Log to Trackio, which has no logger for Lightning of its own."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class TrackioLogger(Logger):
    """Log to one run of Trackio over all attempts of a run.

    Args:
        folder: Run folder; its last component is the name of the run.
        project: Project of Trackio.
        tags: Tags of the run, logged with its configuration.
        init: Other arguments of ``trackio.init``, such as ``space_id``.
    """

    def __init__(self, *, folder: Path, project: str, tags: list[str] | None = None, **init: Any) -> None:
        import trackio  # here, as only its users have it

        super().__init__()
        self._start = trackio.init
        self._folder, self._project, self._tags, self._init = Path(folder), project, tags or [], init
        self._run: Any = None
        self._config: dict[str, Any] = {"tags": self._tags}

    @property
    def name(self) -> str:
        """The project."""
        return self._project

    @property
    def version(self) -> str:
        """The name of the run."""
        return self._folder.name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Trackio, started on first access."""
        if self._run is None:
            options = {"embed": False, "resume": "allow", **self._init}
            self._run = self._start(self._project, name=self.version, config=self._config, **options)
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keep the configuration, with which the run starts."""
        self._config |= vars(params) if isinstance(params, Namespace) else params

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of a step."""
        self.experiment.log(dict(metrics), step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Upload or store what is left, and end the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
