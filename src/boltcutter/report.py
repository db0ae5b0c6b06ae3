"""report.html: the whole run in one file."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path) -> Path:
    """Write ``report.html`` of the run in ``folder``."""
    return folder / "report.html"
