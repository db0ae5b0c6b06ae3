"""Pictures and tables of a run, as its report shows them."""

from __future__ import annotations

from pathlib import Path

from boltcutter.report.template import load_template
from boltcutter_logging.media import read_media


def render(record: Path) -> str:
    """Render the pictures and tables of the run with this record, and of its evaluations."""
    media = read_media(record.parent)
    return load_template(Path(__file__).with_suffix(".html")).render(media=media) if media else ""
