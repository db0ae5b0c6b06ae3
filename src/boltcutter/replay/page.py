"""The page of an answer of ``why``, in the look of reports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from boltcutter.checkpoint.atomic import write_text
from boltcutter.report.template import format_number, load_template

TONES = {"sample": "bad", "weights": "bad", "learning_rate": "warn", "precision": "warn", "none": "warn"}


def write_page(answer: Mapping[str, Any], path: Path) -> Path:
    """Write the page."""
    page = load_template(Path(__file__).with_name("why.html")).render(
        **answer, tone=TONES.get(answer["cause"], "good"), name=Path(answer["run"]).name, shown=shown
    )
    write_text(path, page.encode(errors="replace").decode())
    return path


def shown(value: Any) -> str:
    """A number, which may be text where it is not finite."""
    return format_number(float(value)) if isinstance(value, str | int | float) else "–"
