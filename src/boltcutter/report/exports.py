"""Exports of a run, as its report shows them."""

from __future__ import annotations

from pathlib import Path

from boltcutter.report.template import load_template
from boltcutter.run import trust


def render_exports(file: Path) -> str:
    """Render ``export.json`` as the section of a report: a row for the original and for each export."""
    exports = trust.read_json(file)
    original = exports["results"]["fp32"]
    unit = "points" if original["metric"] == "accuracy" else "%"
    template = load_template(Path(__file__).with_suffix(".html"))
    return template.render(exports, original=original, unit=unit, format_bytes=format_bytes)


def format_bytes(size: int) -> str:
    """Size with a decimal unit."""
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
