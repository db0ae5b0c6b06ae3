"""Loggers of a training as an evaluation of it has them: with their names and folders, but nothing is logged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger

from boltcutter.config.errors import ConfigError
from boltcutter.config.locate import locate

TEXTS = ("name", "version")
PATHS = ("save_dir", "log_dir")


class RecordedLogger(DummyLogger):
    """Stands for a logger of the training where a module reads its folder or asks for its class.

    Args:
        target: Dotted path of its class.
        values: ``name``, ``version``, ``save_dir`` and ``log_dir`` of the logger.
    """

    def __init__(self, target: str, values: Mapping[str, Any]) -> None:
        super().__init__()
        self._target, self._values = target, values

    @property
    def __class__(self) -> Any:
        """The class of the logger; imported only if somebody asks, and an evaluation may be where it is missing."""
        with suppress(ConfigError):
            found = locate(self._target)
            return found if isinstance(found, type) and issubclass(found, Logger) else RecordedLogger
        return RecordedLogger

    @__class__.setter
    def __class__(self, kind: type) -> None:
        vars(object)["__class__"].__set__(self, kind)

    @property
    def name(self) -> Any:
        """Name of the training's logger."""
        return self._values.get("name")

    @property
    def version(self) -> Any:
        """Version of the training's logger."""
        return self._values.get("version")

    @property
    def save_dir(self) -> str | None:
        """Folder of the training's logger."""
        return self._values.get("save_dir")

    @property
    def log_dir(self) -> str | None:
        """Folder of the training's logger in which one run writes."""
        return self._values.get("log_dir")


def describe(loggers: Sequence[Logger], folder: Path) -> list[dict[str, Any]]:
    """Names and folders of loggers, as plain values; folders within that of the run are relative to it."""
    found = []
    for logger in loggers:
        values = dict[str, Any]()
        for name in (*TEXTS, *PATHS):
            with suppress(Exception):  # a logger of a third party may raise anything
                value = getattr(logger, name, None)
                if isinstance(value, Path) or (isinstance(value, str) and name in PATHS):
                    path = Path(value).absolute()
                    is_inside = path.is_relative_to(folder.absolute())
                    value = str(path.relative_to(folder.absolute()) if is_inside else path)
                if isinstance(value, str | int):
                    values[name] = value
        found.append(values)
    return found


def within(recorded: Any, folder: Path, roots: Sequence[str | Path | None]) -> dict[str, Any]:
    """What ``describe`` returned for a logger, with folders of today: those outside of ``roots`` are that of the run.

    Args:
        recorded: Names and folders; anything, as it is read from a file.
        folder: Folder of the run, which may have been moved.
        roots: Folders that those of the logger may be in.
    """
    values = dict(recorded) if isinstance(recorded, dict) else {}
    for name in PATHS:
        if isinstance(values.get(name), str):
            path = folder / values[name]
            is_allowed = any(root and path.resolve().is_relative_to(Path(root).resolve()) for root in roots)
            values[name] = str(path if is_allowed else folder)
    return values
