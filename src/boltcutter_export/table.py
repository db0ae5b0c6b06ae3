"""The table of exports that the command prints."""

from __future__ import annotations

from collections.abc import Mapping

from boltcutter.formatting import aligned
from boltcutter_export.report_section import format_bytes
from boltcutter_export.verify import LATENCY_BATCHES, Result

HEADER = [
    "format",
    "size",
    "of fp32",
    "{metric}",
    "drop",
    "difference",
    *(f"ms at {n}" for n in LATENCY_BATCHES),
    "samples/s",
]


def show(results: Mapping[str, Result]) -> None:
    """Print one line for the original and for each export."""
    original = results["fp32"]
    rows = [[title.format(metric=original.metric) for title in HEADER]]
    rows += [_row(name, result, original) for name, result in results.items()]
    print(*aligned(rows, left=1), sep="\n")


def _row(name: str, result: Result, original: Result) -> list[str]:
    unit = " pt" if result.metric == "accuracy" else " %"
    latency = result.latency or {}
    return [
        name,
        format_bytes(result.size),
        f"{result.size / original.size:.3f}",
        f"{result.value:.4f}",
        f"{result.drop:+.2f}{unit}",
        f"{result.max_difference:.1e}",
        *(f"{latency[size]:.3g}" if size in latency else "–" for size in LATENCY_BATCHES),
        f"{result.throughput:,.0f}" if result.throughput else "–",
    ]
