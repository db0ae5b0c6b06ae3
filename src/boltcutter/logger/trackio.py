"""Log to Trackio, for which Lightning has no logger."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class TrackioLogger(Logger):
    """Log to one run of Trackio over all attempts of a run.

    Args:
        folder: Run folder; its last component is the name of Trackio's run, which a resumed run continues.
        project: Project of Trackio.
        tags: Tags of the run.
        init: Other arguments of ``trackio.init``, such as ``space_id``.
    """

    def __init__(self, *, folder: Path, project: str, tags: list[str] | None = None, **init: Any) -> None:
        super().__init__()
        self._trackio = import_module("trackio")  # here, as only its users have it
        self._folder, self._project, self._init = Path(folder), project, init
        self._config: dict[str, Any] = {"tags": tags or []}
        self._run: Any = None

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
        """Trackio's run, started on first access."""
        if self._run is None:
            options = {"embed": False, "resume": "allow", "name": self.version, **self._init}
            self._run = self._trackio.init(self._project, config=self._config, **options)
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
        """Wait until everything is stored or uploaded, and end Trackio's run, if it was started."""
        if self._run is not None:
            self._run.finish()
            self._run = None
