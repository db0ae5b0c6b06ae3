"""Compare the metrics of two runs, of which one may be a reproduction of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from boltcutter.config.errors import printable
from boltcutter.run.folder import read_record
from boltcutter.run.store import run_store

IGNORED_METRICS = {"recompiles"}  # restarts from 0 in a resumed run


def report_reproduction(original: Path, reproduction: Path) -> None:
    """Print whether a reproduced run has the same data and bitwise identical metrics as the original."""
    before, after = read_record(original), read_record(reproduction)
    if before.get("data") != after.get("data"):
        print(printable(f"warning: data differ: fingerprint {after.get('data')}, was {before.get('data')}"))
    different = list(metric_differences(after, before))
    if not different:
        count = len({**before.get("metrics", {}), **before.get("test", {})}.keys() - IGNORED_METRICS)
        print(f"reproduced: all {count} metrics equal those of {run_store().show(original)}")
    for line in different:
        print(printable(f"not reproduced: {line}"))
    for device in nondeterministic_devices(before, after) if different else ():
        print(f"note: rounding varies on {device} without trainer.deterministic=true")
    if different and any(attempt.get("resumed_from") for attempt in before.get("attempts", [])):
        print("note: the original was resumed; what changed then, such as trainer.max_epochs, now holds from the start")


def nondeterministic_devices(*records: Mapping[str, Any]) -> tuple[str, ...]:
    """Types of the devices on which an attempt trained without deterministic algorithms, although they need them."""
    attempts = [attempt for record in records for attempt in record.get("attempts", [])]
    return tuple(sorted({str(attempt.get("device")) for attempt in attempts if attempt.get("deterministic") is False}))


def metric_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[str]:
    """Describe each metric that differs between two records."""
    here, there = ({**record.get("metrics", {}), **record.get("test", {})} for record in (first, second))
    for name in sorted((here.keys() | there.keys()) - IGNORED_METRICS):
        if here.get(name) != there.get(name):
            yield f"{name} is {here.get(name)}, was {there.get(name)}"
