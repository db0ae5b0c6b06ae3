"""The slowest steps of a run: a command, and a section of its report."""

import csv
import html
from pathlib import Path

from boltcutter import ConfigError
from boltcutter.project import Project


def main(project: Project, overrides: list[str]) -> None:
    """Print the slowest steps."""
    given = dict(override.partition("=")[::2] for override in overrides)
    file = Path(given.get("run", ""), "step_times.csv")
    if not file.is_file():
        raise ConfigError(f"run={given.get('run')}: has no step_times.csv; train with this part installed")
    for step, ms in slowest(file, int(given.get("count", 3))):
        print(f"step {step}: {ms:.1f} ms")


def slowest(file: Path, count: int) -> list[tuple[str, float]]:
    """The slowest steps with their milliseconds."""
    with open(file, newline="") as opened:
        times = [(row["step"], float(row["ms"])) for row in csv.DictReader(opened)]
    return sorted(times, key=lambda time: -time[1])[:count]


def render(file: Path) -> str:
    """Render the section."""
    rows = "".join(f"<tr><th>{html.escape(step)}</th><td>{ms:.1f} ms</td></tr>" for step, ms in slowest(file, 3))
    return f'<div class="sheet scroll"><table><tbody>{rows}</tbody></table></div>'
