"""Runs as a table in the terminal and as CSV."""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from boltcutter.analysis.query import FIELDS, UNITS, find_fault, value_of
from boltcutter.analysis.record import Run, metric_mode
from boltcutter.config.errors import ConfigError, printable
from boltcutter.config.values import format_value
from boltcutter.formatting import aligned, csv_text, format_duration, format_number

NOT_COMPARED = (
    *("name", "tags", "runs", "resume", "resume_exact", "reproduce", "launch", "checkpoints", "search"),
    *("report", "test"),
)
MAX_SETTINGS = 6  # columns of settings that differ
MAX_METRICS = 4
FIELD_ORDER = ("id", "name", "age", "status")  # before settings and metrics
FIELDS_AFTER = ("devices", "time", "tag", "note")
MAX_DIGITS = 8  # characters of a number, beyond which it is rounded for people


def differing_settings(runs: Sequence[Run]) -> list[str]:
    """The settings in which runs differ: keys that have a value of their own, and config groups by their name.

    Where runs differ in the option of a group, settings that only one of the options has are left out.
    """
    compared = [run for run in runs if run.settings and run.kind != "search"]
    values, own = defaultdict[str, Counter[str]](Counter), set[str]()
    for run in compared:
        own |= run.settings.keys() - set(run.references)
        for key, value in run.settings.items():
            values[key][repr(value)] += 1
    missing = {key for key, counts in values.items() if counts.total() < len(compared)}
    several = {key for key, counts in values.items() if len(counts) > 1}
    chosen = {key.removeprefix("choices.") for key in several if key.startswith("choices.")} - {"experiment"}
    found = [
        key
        for key in (several | missing) & own
        if (top := key.partition(".")[0]) not in (*NOT_COMPARED, "choices")
        and not key.endswith("_target_")
        and not (key in missing and top in chosen)
    ]
    # Settings of a group whose options differ come last, as most of them are those of the option.
    return sorted({*chosen, *found}, key=lambda key: (key not in chosen, key.partition(".")[0] in chosen, key))


def shown_metrics(runs: Sequence[Run]) -> list[str]:
    """The metrics that are shown: those that choose the best checkpoint, and those of the test."""
    monitored = dict.fromkeys(
        value
        for run in runs
        for key, value in run.settings.items()
        if key.startswith("callback.") and key.endswith(".monitor") and value in run.metrics
    )
    tested = dict.fromkeys(name for run in runs for name in sorted(run.metrics) if name.startswith("test"))
    return [*monitored, *tested][:MAX_METRICS]


def columns(runs: Sequence[Run], given: str | None = None) -> tuple[list[str], list[str]]:
    """Keys of the columns, by default what there is and what differs, and settings that differ but are not shown."""
    if given:
        keys = [key.strip() for key in given.split(",") if key.strip()]
        for key in keys:
            if fault := find_fault(runs, key):
                raise ConfigError(f"--columns={key}: {fault}")
        return keys, []
    settings = differing_settings(runs)
    after = [key for key in FIELDS_AFTER if any(FIELDS[key](run) for run in runs)]
    return [*FIELD_ORDER, *settings[:MAX_SETTINGS], *shown_metrics(runs), *after], settings[MAX_SETTINGS:]


def sort(runs: Sequence[Run], key: str) -> list[Run]:
    """Sort runs by a key, of a metric the best first; ``-key`` reverses this. Runs without it are at the end."""
    is_reversed, key = key.startswith("-"), key.removeprefix("-")
    if fault := find_fault(runs, key):
        raise ConfigError(f"--sort={key}: {fault}")
    if key not in FIELDS and any(key in run.metrics for run in runs) and metric_mode(runs, key) == "max":
        is_reversed = not is_reversed
    values = [(value_of(run, key), run) for run in runs]
    known = [(value, run) for value, run in values if value is not None and value == value]

    def rank(pair: tuple[Any, Run]) -> tuple[bool, float, str]:
        value = pair[0]
        return (False, float(value), "") if isinstance(value, int | float) else (True, 0.0, str(value))

    ranked = [run for _, run in sorted(known, key=rank, reverse=is_reversed)]
    return ranked + [run for value, run in values if value is None or value != value]


def short_ids(runs: Sequence[Run]) -> dict[str, str]:
    """For each id the last part of it, if no other run has the same, which ``run=`` takes as well."""
    owners: dict[str, set[str]] = {}
    for owner in (run.id.partition("/")[0] for run in runs):
        owners.setdefault(owner.rpartition("-")[2], set()).add(owner)
    shorts = {whole: text for text, (whole, *others) in owners.items() if len(text) >= 8 and not others}
    return {run.id: shorts.get(owner := run.id.partition("/")[0], owner) + run.id[len(owner) :] for run in runs}


def format_cell(run: Run, key: str) -> str:
    """The text of a cell for people."""
    value = value_of(run, key)
    formats: Mapping[str, Callable[[Any], str]] = {
        "age": format_age,
        "time": lambda seconds: "" if seconds is None else format_duration(seconds),
        "started": lambda seconds: time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds)),
        "tag": ", ".join,
    }
    if key in formats:
        return formats[key](value)
    if value is None:
        return "null" if key in run.settings else ""
    if key in run.metrics and key not in FIELDS:
        return format_number(value)
    text = format_value(value)
    return f"{value:.5g}" if isinstance(value, float) and len(text) > MAX_DIGITS else text


def format_age(seconds: float) -> str:
    """A duration as filters take it, in the largest unit that it fills: ``3d``."""
    unit, size = next(((unit, size) for unit, size in reversed(UNITS.items()) if seconds >= size), ("s", 1))
    return f"{max(0, int(seconds // size))}{unit}"


def print_table(runs: Sequence[Run], keys: Sequence[str]) -> list[str]:
    """Print runs as a table; returns the columns for which a terminal is too narrow, settings before others.

    Without rich, of the extra ``runs``, the table has no colors, and all columns whatever the width.
    """
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ModuleNotFoundError:
        names = short_ids(runs)
        rows = [[names[run.id] if key == "id" else format_cell(run, key) for key in keys] for run in runs]
        print("\n".join(aligned([[printable(text).replace("\n", " ") for text in row] for row in [[*keys], *rows]])))
        return []
    console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=10_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    ids = short_ids(runs)
    styles = {"failed": "red", "killed": "red", "unreadable": "red", "running": "cyan", "interrupted": "yellow"}

    def cell(run: Run, key: str) -> Text:
        text = printable(ids[run.id] if key == "id" else format_cell(run, key)).replace("\n", " ")
        return Text(text, styles.get(run.status, "") if key == "status" else "")

    cells = {key: [Text(printable(key)), *(cell(run, key) for run in runs)] for key in keys}
    metrics = {name for run in runs for name in run.metrics}
    first = [key for key in keys if key in FIELD_ORDER or key in metrics - FIELDS.keys()]
    shown, left = set[str](), console.width
    for key in dict.fromkeys([*first, *keys]):
        width = 2 + max(text.cell_len for text in cells[key])
        if width <= left + 2 or not shown:
            shown, left = shown | {key}, left - width
    for key in (key for key in keys if key in shown):
        is_number = any(isinstance(value_of(run, key), int | float) for run in runs)
        table.add_column(cells[key][0], "", justify="right" if is_number else "left", no_wrap=True)
    for row in zip(*(cells[key][1:] for key in keys if key in shown), strict=True):
        table.add_row(*row)
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
    return [key for key in keys if key not in shown]


def as_csv(runs: Sequence[Run], keys: Sequence[str]) -> str:
    """Runs as CSV, with numbers as they are: durations in seconds, and times in seconds since the epoch."""
    return csv_text([keys, *([_csv_cell(value_of(run, key)) for key in keys] for run in runs)])


def _csv_cell(value: Any) -> Any:
    if value in (None, []):
        return ""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else format_value(value)
