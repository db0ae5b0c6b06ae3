"""``boltcutter why``: why a run is as it is."""

from __future__ import annotations

from typing import Any

from boltcutter.analysis import hang
from boltcutter.config.errors import ConfigError
from boltcutter.project import Project

FLAGS = {hang.FLAG: "where each rank of a run that does not go on is, and which of them the others wait for"}


def why_command(project: Project, overrides: list[str]) -> Any:
    """Say where the ranks of a run are.

    Raises:
        ConfigError: Nothing is asked, or there is no such run.
    """
    if hang.FLAG in overrides:
        return hang.print_hang(project, [override for override in overrides if override != hang.FLAG])
    raise ConfigError(f"why: asks nothing; try boltcutter why run=latest {hang.FLAG}")
