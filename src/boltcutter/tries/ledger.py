"""The ledger of all tries: ``tries.jsonl`` in the folder of all runs, to which each verdict is appended."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boltcutter.environment import user_key
from boltcutter.run import trust
from boltcutter.tries.pairs import append_line, read_lines

LEDGER = "tries.jsonl"


@dataclass(frozen=True)
class Entry:
    """A try that has ended, or was stopped by hand.

    Args:
        id: Name of its folder below ``tries``.
        time: When it ended, in ISO 8601.
        question: Fingerprint of baseline, change and metric, without effect, budget and seeds.
        change: What was changed.
        baseline: What it was compared with.
        metric: The metric.
        mode: Whether smaller or larger values are better.
        effect, margin: As they were given.
        verdict: ``accepted``, ``rejected`` or ``undecided``.
        is_stopped: Whether it was stopped by hand, so that it can be continued.
        pairs, budget: Pairs that the verdict is based on, and the most there could be.
        seeds: Seeds of all pairs.
        difference, low, high: Mean of the differences and the interval, more being better; None if there is none.
        runs, reused: Runs that were trained, and runs of the baseline that existed.
        seconds: Duration of the runs that were trained.
        baseline_overrides, change_overrides: Of training.
        code: Fingerprint of the code of the change; empty if it is that of the baseline.
        confirms: Ids of the tries that it has confirmed together.
        not_worse: Metrics that must not get worse, with their tolerances, as they were given.
    """

    id: str
    time: str
    question: str
    change: str
    baseline: str
    metric: str
    mode: str
    effect: str
    margin: str
    verdict: str
    is_stopped: bool
    pairs: int
    budget: int
    seeds: list[int]
    difference: float | None
    low: float | None
    high: float | None
    runs: int
    reused: int
    seconds: float
    baseline_overrides: list[str]
    change_overrides: list[str]
    code: str = ""
    confirms: tuple[str, ...] = ()
    not_worse: tuple[str, ...] = ()


def append(runs: Path, entry: Entry) -> None:
    """Append a verdict, with a signature, as overrides in it may be run again."""
    values = asdict(entry)
    append_line(runs / LEDGER, values | {"signature": user_key.sign(values)})


def read_entries(runs: Path) -> list[Entry]:
    """The newest entry of each try, in the order in which they were first written; torn and foreign lines are left out.

    Those of somebody else, which this user has not signed, are left out as well.
    """
    found: dict[str, Entry] = {}
    for values in read_lines(runs / LEDGER):
        signature = values.pop("signature", None)
        if user_key.is_signed(values, signature) or trust.is_granted():
            with suppress(TypeError):
                entry = Entry(**_as_tuple(values))
                found[entry.id] = entry
    return list(found.values())


def _as_tuple(values: dict[str, Any]) -> dict[str, Any]:
    return values | {key: tuple(values.get(key) or ()) for key in ("confirms", "not_worse")}


def earlier(entries: Sequence[Entry], question: str, id: str) -> list[Entry]:
    """Entries of the same question, apart from the try itself."""
    return [entry for entry in entries if entry.question == question and entry.id != id]
