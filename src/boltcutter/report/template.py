"""What HTML reports share: loading a template, styles and charts, and how numbers, durations and commands are shown."""

from __future__ import annotations

import math
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
import numpy as np

from boltcutter.config.redaction import MAX_COMMAND, redact_arguments


@cache
def load_template(path: Path) -> jinja2.Template:
    """Load a template of a self-contained page, which may extend ``base.html`` of this folder.

    ``include_text("explore.js")`` inserts a file of this folder.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([path.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.ChainableUndefined,  # records of earlier versions may lack fields
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": format_number, "duration": format_duration}
    environment.globals["include_text"] = lambda name: markupsafe.Markup(Path(__file__).with_name(name).read_text())  # noqa: S704 - a file of this package
    return environment.get_template(path.name)


def redact_command(command: str) -> str:
    """Redact secrets in the command; of one that is too long to be split, only the length is shown."""
    if len(command) > MAX_COMMAND:
        return f"<{len(command):,} characters>"
    return shlex.join(redact_arguments(shlex.split(command)))


def format_number(value: Any) -> str:
    """Format a number for reading."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        return "–" if value is None or isinstance(value, jinja2.Undefined) else str(value)
    if isinstance(value, int | np.integer) or not math.isfinite(value):
        return f"{value:,}"
    size = abs(float(value))
    return f"{value:,.0f}" if 1e4 <= size < 1e9 else f"{value:#.4g}" if size >= 1e-3 or not size else f"{value:.3g}"


def shorten(value: float) -> float:
    """Round a number to the digits that a chart can show."""
    return float(f"{value:.5g}")


def format_duration(seconds: float | None) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
