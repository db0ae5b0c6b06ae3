"""The command ``boltcutter tries``: all questions that were asked, and their verdicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from boltcutter.analysis.references import runs_folder
from boltcutter.config.errors import ConfigError, printable, quoted
from boltcutter.formatting import aligned
from boltcutter.project import Project
from boltcutter.report.template import format_duration
from boltcutter.run.store import refuse
from boltcutter.tries import ledger
from boltcutter.tries.ledger import Entry
from boltcutter.tries.plan import STATE, TRIES

COLUMNS = ("id", "ended", "change", "against", "metric", "effect", "verdict", "pairs", "difference", "interval", "cost")


def tries_command(project: Project, arguments: list[str]) -> list[dict[str, Any]]:
    """List the tries, the oldest first, and return them."""
    if wrong := [argument for argument in arguments if not argument.startswith("runs=") and argument != "--json"]:
        raise ConfigError(f"{wrong[0]}: tries takes only runs=<folder>; remove it", kind="unknown_key")
    place = runs_folder(project, arguments)
    refuse({"runs": place}, "the pairs of a try are in a folder")
    entries = ledger.read_entries(Path(place))
    rows = [list(COLUMNS), *(cells(entry, number_of(entries, entry)) for entry in entries)]
    if entries:
        print(printable("\n".join(aligned(rows))))
    open_ones = sorted(file.parent.name for file in Path(place, TRIES).glob(f"*/{STATE}"))
    if begun := [id for id in open_ones if id not in {entry.id for entry in entries}]:
        print(quoted(f"not ended: {', '.join(begun)}; the same command continues each"))
    if not entries and not begun:
        print(f"no tries in {place}; `boltcutter try --help` says how to begin")
    accepted = [entry for entry in unconfirmed(entries) if entry.verdict == "accepted"]
    if len(accepted) > 1:
        print(
            f"{len(accepted)} were accepted, of which some may be luck: `boltcutter try --confirm` runs them together "
            "on fresh seeds"
        )
    return [vars(entry) for entry in entries]


def number_of(entries: list[Entry], entry: Entry) -> int:
    """How often its question was asked up to an entry."""
    return 1 + len(ledger.earlier(entries[: entries.index(entry)], entry.question, entry.id))


def unconfirmed(entries: list[Entry]) -> list[Entry]:
    """The tries that no accepted confirmation has confirmed, and that are none."""
    confirmed = {id for entry in entries if entry.verdict == "accepted" for id in entry.confirms}
    return [entry for entry in entries if not entry.confirms and entry.id not in confirmed]


def cells(entry: Entry, number: int) -> list[str]:
    """A row of the table."""
    ends = ["" if end is None else f"{end:.3g}" for end in (entry.low, entry.high)]
    verdict = entry.verdict + " (stopped)" * entry.is_stopped + f" (asked {number} times)" * (number > 1)
    change = f"confirms {', '.join(entry.confirms)}" if entry.confirms else entry.change
    return [
        entry.id,
        entry.time[:16].replace("T", " "),
        change,
        entry.baseline,
        entry.metric,
        entry.effect,
        verdict,
        f"{entry.pairs} of {entry.budget}",
        "" if entry.difference is None else f"{entry.difference:+.3g}",
        f"{ends[0]} … {ends[1]}" if any(ends) else "",
        f"{entry.runs} runs, {format_duration(entry.seconds)}",
    ]
