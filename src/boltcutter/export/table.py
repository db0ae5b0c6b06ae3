"""The table of exports that the command prints."""

from __future__ import annotations

from collections.abc import Mapping

from boltcutter.export.verify import LATENCY_BATCHES, Result
from boltcutter.formatting import aligned
from boltcutter.report.exports import format_bytes


def show(results: Mapping[str, Result]) -> None:
    """Print one line for the original and for each export."""
    original = results["fp32"]
    latencies = [f"ms at {size}" for size in LATENCY_BATCHES]
    rows = [["format", "size", "of fp32", original.metric, "drop", "difference", *latencies, "samples/s"]]
    for name, result in results.items():
        sizes = [format_bytes(result.size), f"{result.size / original.size:.3f}"]
        drop = f"{result.drop:+.2f} {'pt' if result.metric == 'accuracy' else '%'}"
        times = [f"{result.latency[size]:.3g}" if result.latency else "–" for size in LATENCY_BATCHES]
        rate = f"{result.throughput:,.0f}" if result.throughput else "–"
        rows.append([name, *sizes, f"{result.value:.4f}", drop, f"{result.max_difference:.1e}", *times, rate])
    print(*aligned(rows, left=1), sep="\n")
