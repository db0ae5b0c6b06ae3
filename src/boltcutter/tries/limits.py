"""How many runs of tries an agent may start, which a person sets where the tools are served."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from boltcutter.config.errors import ConfigError
from boltcutter.environment.startup import TRY_LIMITS
from boltcutter.formatting import parse_count
from boltcutter.tries.pairs import append_line, read_lines

STARTED = "started.jsonl"  # in the folder of tries: a line for each run that was started
HOUR = 3600.0


@dataclass(frozen=True)
class RunLimits:
    """The most runs of all tries of a project within an hour, and in all.

    Args:
        place: Folder of the tries.
        per_hour: Runs within an hour; None: any number.
        total: Runs in all; None: any number.
    """

    place: Path
    per_hour: int | None = None
    total: int | None = None

    @classmethod
    def of_environment(cls, place: Path) -> RunLimits:
        """The limits that the server of the tools has set, as ``per_hour/total``; none without it."""
        if not (text := os.environ.get(TRY_LIMITS)):
            return cls(place)
        per_hour, total = map(parse_count, text.partition("/")[::2])
        if per_hour is None or total is None:
            raise ConfigError(f"{TRY_LIMITS}={text}: not runs per hour and in all, such as 30/200; correct it")
        return cls(place, per_hour, total)

    def reached(self) -> str:
        """Which limit is reached; empty if another run may start."""
        if self.total is None or self.per_hour is None:
            return ""
        times = [float(entry.get("time") or 0) for entry in read_lines(self.place / STARTED)]
        recent = sum(start > time.time() - HOUR for start in times)
        if len(times) >= self.total:
            return f"max_runs={self.total}: all runs of tries are used; only a person can raise it"
        if recent >= self.per_hour:
            return f"max_runs_per_hour={self.per_hour}: {recent} runs were started within an hour; continue later"
        return ""

    def add(self, name: str) -> None:
        """Count a run that starts."""
        append_line(self.place / STARTED, {"time": time.time(), "run": name})
