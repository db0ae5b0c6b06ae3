"""Log to Neptune and Trackio, for which Lightning has no logger."""

from __future__ import annotations

from abc import abstractmethod
from argparse import Namespace
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class ServiceLogger(Logger):
    """Log to one run of a service over all attempts of a run.

    Args:
        folder: Run folder; its last component identifies the run of the service, which a resumed run continues.
        project: Project of the service, which is ``workspace/project`` for Neptune.
        tags: Tags of the run.
        init: Other arguments of the function that starts a run, such as ``mode`` or ``space_id``.
    """

    package: str

    def __init__(self, *, folder: Path, project: str | None, tags: list[str] | None = None, **init: Any) -> None:
        super().__init__()
        self._service = import_module(self.package)  # here, as only its users have it
        self._folder, self._project, self._tags, self._init = Path(folder), project, tags or [], init
        self._config: dict[str, Any] = {"tags": self._tags}
        self._run: Any = None

    @property
    def name(self) -> str | None:
        """The project."""
        return self._project

    @property
    def version(self) -> str:
        """The ID or name of the run."""
        return self._folder.name

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The run of the service, started on first access."""
        if self._run is None:
            self._run = self.start()
        return self._run

    @abstractmethod
    def start(self) -> Any:
        """Start or continue the run of the service."""

    @abstractmethod
    def end(self) -> None:
        """Wait until everything is stored or uploaded, and end the run of the service."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """End the run of the service, if it was started."""
        if self._run is not None:
            self.end()
            self._run = None


class NeptuneLogger(ServiceLogger):
    """Log to Neptune, whose logger Lightning has removed."""

    package = "neptune"

    def start(self) -> Any:  # noqa: D102
        names = {"custom_run_id": self.version, "name": "/".join(self._folder.parts[-2:])}
        return self._service.init_run(project=self._project, tags=self._tags, **names, **self._init)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Log the configuration."""
        values = vars(params) if isinstance(params, Namespace) else params
        self.experiment["configuration"] = import_module("neptune.utils").stringify_unsupported(values)

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of a step."""
        for name, value in metrics.items():
            self.experiment[name].append(value, step=step)

    def end(self) -> None:  # noqa: D102
        self._run.stop()


class TrackioLogger(ServiceLogger):
    """Log to Trackio."""

    package = "trackio"

    def start(self) -> Any:  # noqa: D102
        options = {"embed": False, "resume": "allow", **self._init}
        return self._service.init(self._project, name=self.version, config=self._config, **options)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Keep the configuration, with which the run starts."""
        self._config |= vars(params) if isinstance(params, Namespace) else params

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log metrics of a step."""
        self.experiment.log(dict(metrics), step=step)

    def end(self) -> None:  # noqa: D102
        self._run.finish()
