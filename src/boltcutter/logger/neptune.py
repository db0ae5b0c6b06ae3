"""Log to Neptune, whose logger Lightning has removed."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class NeptuneLogger(Logger):
    """Log to one run of Neptune over all attempts of a run.

    Args:
        folder: Run folder; its last component is the custom ID of the run, which a resumed run continues.
        project: ``workspace/project``.
        tags: Tags of the run.
        init: Other arguments of ``neptune.init_run``, such as ``mode``.
    """

    def __init__(self, *, folder: Path, project: str | None, tags: list[str] | None = None, **init: Any) -> None:
        import neptune  # here, as only its users have it
        from neptune.utils import stringify_unsupported

        super().__init__()
        self._start, self._as_stored = neptune.init_run, stringify_unsupported
        self._folder, self._project, self._tags, self._init = Path(folder), project, tags or [], init
        self._run: Any = None

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str:
        """The custom ID of the run."""
        return self._folder.name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of Neptune, started on first access."""
        if self._run is None:
            names = {"custom_run_id": self.version, "name": "/".join(self._folder.parts[-2:])}
            self._run = self._start(project=self._project, tags=self._tags, **names, **self._init)
        return self._run

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log the configuration."""
        values = vars(params) if isinstance(params, Namespace) else params
        self.experiment["configuration"] = self._as_stored(values)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of a step."""
        for name, value in metrics.items():
            self.experiment[name].append(value, step=step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Wait until everything is stored or uploaded, and end the run."""
        if self._run is not None:
            self._run.stop()
            self._run = None
