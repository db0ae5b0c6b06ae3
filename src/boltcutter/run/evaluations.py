"""The log of a run's evaluations: how often, and at which checkpoints, its test split was read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from statistics import NormalDist
from typing import Any

from boltcutter import files
from boltcutter.formatting import to_json
from boltcutter.run import trust

DEPTHS = ("*/*", "*/*/*", "*/*/*/*")  # of the folders of runs, below that of all runs
FILE = Path("evaluation", "log.jsonl")  # in the folder of a run; a line for each evaluation, whatever it wrote where


def append(folder: Path, settings: Mapping[str, Any]) -> None:
    """Add an evaluation, unless the folder cannot be written.

    Args:
        folder: Folder of the run.
        settings: What was evaluated: its ``split``, ``checkpoint``, and when that was ``written``.
    """
    line = to_json({"time": datetime.now(timezone.utc).isoformat(timespec="seconds"), **settings})
    with suppress(OSError):
        (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
        with open(folder / FILE, "a", encoding="utf-8", opener=files.opener(folder)) as file:
            file.write(f"{line}\n")


def of_test(folder: Path | str) -> list[dict[str, Any]]:
    """The evaluations of the test split, as the log of a run says that may be somebody else's; the oldest first."""
    found = []
    with suppress(OSError, ValueError):
        for line in trust.read_bytes(Path(folder, FILE)).splitlines():
            found.append(trust.parse_json(line))
    return [entry for entry in found if entry.get("split") == "test"]


def describe(tests: list[dict[str, Any]]) -> str:
    """How often the test split was evaluated, and at which checkpoints if these are several."""
    checkpoints = dict.fromkeys((str(entry.get("checkpoint")), str(entry.get("written"))) for entry in tests)
    names = ", ".join(dict.fromkeys(name for name, _ in checkpoints))
    times = "once" if len(tests) == 1 else f"{len(tests)} times"
    return f"{times}, at {len(checkpoints)} checkpoints ({names})" if len(checkpoints) > 1 else times


def folders_of(runs: Path) -> list[Path]:
    """The folders of runs that were evaluated, below that of all runs."""
    return [file.parents[1] for depth in DEPTHS for file in runs.glob(f"{depth}/{FILE}")]


def count_tests(folders: Iterable[Path | str]) -> tuple[int, int]:
    """How often the test split was evaluated, and at how many models: checkpoints of runs."""
    found = [(str(folder), entry) for folder in folders for entry in of_test(folder)]
    return len(found), len({(folder, str(e.get("checkpoint")), str(e.get("written"))) for folder, e in found})


def luck_of_best(count: int) -> float:
    """By how many standard deviations the best of some equally good models is expected to look better than it is.

    An upper bound where they are not: 36 to 103% of it were seen. Source: Blom, Statistical Estimates and Transformed
    Beta-Variables, 1958 (approximate expected maximum of normal values).
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def describe_luck(reads: int, models: int, luck: str) -> str:
    """How often a test split was read, and by how much the best of its models is lucky."""
    return (
        f"the test split was read {reads} times, at {models} models of this project: the best of {models} is expected "
        f"to be lucky by up to {luck}; choose by val/…"
    )
