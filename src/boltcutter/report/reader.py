"""Read the parts of a report, of which any may be missing or damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from markupsafe import Markup


class ReportReader:
    """Reads the parts of a report, and records which could not be read and why."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.missing = folder, list[tuple[str, str]]()

    def get(self, title: str, empty: Any, read: Callable[..., Any], *args: Any) -> Any:
        """Return ``read(*args)``, or ``empty`` if it fails."""
        try:
            return read(*args)
        except FileNotFoundError as error:
            self.missing.append((title, f"{Path(error.filename).relative_to(self.folder)} is missing"))
        except Exception as error:  # a damaged file must not fail a finished training
            self.missing.append((title, f"cannot be read: {type(error).__name__}: {error}"[:200]))
        return empty

    def section(self, title: str, name: str, render: Callable[[Path], str]) -> Markup:
        """Return the HTML of a section, which escapes the texts in it; nothing if its file does not exist."""
        file = self.folder / name
        return Markup(self.get(title, "", render, file) if file.is_file() else "")  # noqa: S704
