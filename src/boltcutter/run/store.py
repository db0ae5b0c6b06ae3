"""Where run folders are: on disk, or elsewhere, such as on object storage.

A run always works in a local folder. A store copies it from and to another place; the one below leaves folders where
they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boltcutter import extend
from boltcutter.checkpoint.storage import is_url
from boltcutter.config.errors import ConfigError
from boltcutter.config.settings import Settings
from boltcutter.environment.lease import Lease


class UploadError(RuntimeError):
    """Files of a run could not be copied to their place."""

    hide_traceback = True


def join(parent: str, *names: str) -> str:
    """A path or URL below a folder."""
    return "/".join([parent.rstrip("/"), *names]) if is_url(parent) else str(Path(parent, *names))


def refuse(settings: Mapping[str, str | None], reason: str) -> None:
    """Raise ConfigError for a URL among settings that support only folders, with the reason."""
    for key, value in settings.items():
        if value and is_url(value):
            raise ConfigError(f"{key}={value}: {reason}; set {key} to a folder")


class RunStore:
    """Folders on disk; ``ObjectStorage`` adds those at URLs."""

    def locate(self, place: str | Path) -> Path:
        """The local folder of a run at a path or URL."""
        return Path(place)

    def show(self, text: str | Path) -> str:
        """Replace local folders in a text by the places of their runs."""
        return str(text)

    def pull(self, place: str | Path, setting: str, *, again: bool = False) -> Path:
        """Copy the files of a run except for its checkpoints to the local folder, unless a process here uses it.

        Args:
            place: Path or URL of the run.
            setting: Key that was set to ``place``, for error messages.
            again: Whether to copy also while others use them.

        Returns:
            The local folder.

        Raises:
            ConfigError: The place cannot be reached.
        """
        return Path(place)

    def localize(self, overrides: Sequence[str]) -> list[str]:
        """Replace the URLs of runs in overrides by their local folders, with the files of the runs."""
        found = []
        for override in overrides:
            key, _, value = override.partition("=")
            found.append(f"{key}={self.pull(value, key)}" if key in extend.RUNS and is_url(value) else override)
        return found

    def use_url(self, cfg: Settings) -> Settings:
        """The settings with the URL of the checkpoints, if the run is at one."""
        return cfg

    def check(self, cfg: Settings) -> None:
        """Check that a training can write its checkpoints to the place.

        Raises:
            ConfigError: It cannot.
        """

    def portable(self, cfg: Settings) -> dict[str, Any]:
        """The values of a configuration, with which the run can be read also from a copy of its folder."""
        return cfg.written

    def lease(self, folder: Path) -> Lease | None:
        """The lease at the place of a local folder; None if it is the one in the folder itself."""
        return None

    def push(self, folder: Path) -> None:
        """Copy the files of a local folder that have changed to their place.

        Raises:
            UploadError: They could not be copied.
        """

    @contextmanager
    def mirrored(self, folder: Path) -> Iterator[None]:
        """Copy the files of a local folder to their place as they change; of nodes but the first one, only their logs.

        Raises:
            UploadError: At the end, the last changes could not be copied.
        """
        yield

    def flush(self, folder: Path) -> None:
        """Wait until the record and the metrics of a mirrored folder are copied, unless that fails."""
