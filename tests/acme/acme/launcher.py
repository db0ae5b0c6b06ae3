"""Runs that leave the CPU to other programs."""

from dataclasses import dataclass

from boltcutter.launch.job import Job
from boltcutter.launch.local import LocalLauncher


@dataclass(kw_only=True, eq=False)
class NiceLauncher(LocalLauncher):
    """Start the run on this machine with a lower priority.

    Args:
        priority: From 0, that of other programs, to 19, the lowest.
    """

    option = "nice"
    priority: int = 10

    def command(self, job: Job) -> list[str]:
        """Return the command that trains."""
        return ["nice", "-n", str(self.priority), *super().command(job)]
