"""Exports of a run, as its report shows them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from boltcutter.report.template import load_template
from boltcutter.run import trust

WIDTH = 420  # of the longest bar, in pixels
MAX_RATIO = 2.0  # to the original; longer bars are cut


def render(file: Path) -> str:
    """Render ``export.json`` as the section of a report."""
    return load_template(Path(__file__).with_suffix(".html")).render(read_exports(file))


def read_exports(path: Path) -> dict[str, Any]:
    """Read ``export.json``: a row for the original and for each export, with bars relative to the original."""
    found = trust.read_json(path)
    results: dict[str, dict[str, Any]] = found["results"]
    original = results["fp32"]
    batches = list(original["latency"])
    rows = [
        {
            **result,
            "name": name,
            "latency": result["latency"] or {},
            "size_text": format_bytes(result["size"]),
            "top": 36 * index + 2,
            "bars": _bars(result, original, batches[0]),
        }
        for index, (name, result) in enumerate(results.items())
    ]
    unit = "points" if original["metric"] == "accuracy" else "%"
    return {"split": found["split"], "metric": original["metric"], "unit": unit, "batches": batches, "rows": rows}


def format_bytes(size: int) -> str:
    """Size with a decimal unit."""
    return f"{size / 1e6:.2f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _bars(result: dict[str, Any], original: dict[str, Any], batch: str) -> list[dict[str, Any]]:
    ratios = [result["size"] / original["size"]]
    if result["latency"]:
        ratios.append(result["latency"][batch] / original["latency"][batch])
    return [{"width": round(WIDTH * min(ratio / MAX_RATIO, 1), 1), "text": f"{ratio:.2f} ×"} for ratio in ratios]
