"""Metrics of a run: stage and mode, inferred from the name, and the values that training ended with."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Literal, NamedTuple, TypeAlias

from boltcutter import files, run_files
from boltcutter.formatting import parse_count

Mode = Literal["min", "max"]
Columns: TypeAlias = "dict[str, tuple[array[int], array[int], array[float]]]"  # steps, epochs and values by name

SMALLER_IS_BETTER = re.compile(r"loss|err|mae|mse|mape|perplexity|nll|bits", re.I)
LARGER_IS_BETTER = re.compile(r"acc|f1|r2|auc|auroc|precision|recall|iou|dice|bleu|pearson|spearman|kappa", re.I)
STAGES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
NAME = re.compile(rf"(?:({'|'.join(STAGES)})[/_.-])?(.+?)(_epoch|_step)?", re.S)
MAX_TABLE, MAX_OWN_TABLE = 1 << 27, 1 << 31  # bytes of metrics.csv of somebody else, and of this user: 50 million rows
MAX_NAMES = 1 << 17  # bytes of its first line
MAX_LINE = 1 << 24  # bytes of another line, which may be somebody else's
MAX_ROWS, MAX_END = 2000, 1 << 22  # rows and bytes at its end that are searched for the last value of each metric
BLOCK = 8192  # rows that are converted at a time


class MetricName(NamedTuple):
    """Components of a metric's name: ``val_loss`` and ``val/loss_epoch`` are both the validation loss."""

    group: str  # name without stage and suffix
    stage: str  # train, val, test or ""
    of_epoch: bool  # mean of an epoch


def parse_name(name: str) -> MetricName:
    """Split a metric's name into its components."""
    found = NAME.fullmatch(name)
    stage, group, ending = found.groups() if found else (None, name, None)
    return MetricName(group or name, STAGES.get(stage or "", ""), ending == "_epoch")


def infer_mode(name: str) -> Mode | None:
    """``min`` if smaller values of a metric are better, ``max`` if larger; None if its name does not say."""
    if LARGER_IS_BETTER.search(name):
        return "max"
    return "min" if SMALLER_IS_BETTER.search(name) else None


def final_metrics(folder: Path) -> dict[str, tuple[float, int]]:
    """Read the last value of each training and validation metric, over all attempts, from ``metrics.csv``.

    Returns:
        For each metric, its value and the number of optimizer steps after which it was measured.
    """
    found: dict[str, tuple[float, int]] = {}
    for step, values in read_rows(folder / run_files.METRICS):
        found |= {name: (value, step + 1) for name, value in values.items()}  # loggers count steps from 0
    return {name: value for name, value in found.items() if not name.startswith(run_files.NO_METRICS)}


def last_values(folder: Path, step: int | None = None) -> dict[str, str]:
    """The last value of each metric in ``metrics.csv``, or those at a step: of its last rows alone, for many runs."""
    try:
        with open_metrics(folder / run_files.METRICS) as file:
            if not (header := file.readline(MAX_NAMES)).endswith(b"\n"):
                return {}
            if step is not None:  # several rows if a resumed run has logged it again
                rows = [line for line in file if line.startswith(b"%d," % step) and line.endswith(b"\n")]
            else:
                begin = file.tell()
                if file.seek(max(begin, file.seek(0, os.SEEK_END) - MAX_END)) > begin:
                    file.readline()  # the rest of a row
                content = file.read()
                rows = content[: content.rfind(b"\n") + 1].splitlines()[-MAX_ROWS:]
    except (OSError, ValueError):
        return {}
    last: dict[str, str] = {}
    with suppress(csv.Error, StopIteration):
        table = csv.reader(line.decode(errors="replace") for line in (header, *rows))
        names = next(table)
        for row in table:
            last |= {name: value for name, value in zip(names, row, strict=False) if name and value}
    return {name: value for name, value in last.items() if not name.startswith(run_files.NO_METRICS)}


def has_rows(folder: Path) -> bool:
    """Whether ``metrics.csv`` in a folder has at least one row, or is no file that can be read."""
    try:
        with files.open_file(folder / run_files.METRICS, sys.maxsize) as file:
            return bool(file.readline(MAX_LINE) and file.readline(MAX_LINE))  # the header and a row
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True


def read_rows(path: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """Read the step and the values of each row of ``metrics.csv``, except for rows that are not as they are written."""
    with (
        suppress(OSError, ValueError, csv.Error),
        io.TextIOWrapper(open_metrics(path, sys.maxsize), errors="replace", newline="") as file,
    ):
        for row in csv.DictReader(file):
            if (step := parse_count(row.pop("step", None))) is not None:  # not a line that a full disk cut off
                texts = ((name, text) for name, text in row.items() if name and text)
                try:
                    values = {name: float(text) for name, text in texts}
                except (TypeError, ValueError):  # two lines that were written at once
                    continue
                yield step, values


def open_metrics(path: Path, limit: int = MAX_OWN_TABLE) -> IO[bytes]:
    """Open ``metrics.csv``, whoever has written it; of this user, it may have as many bytes as the limit.

    Raises:
        OSError: It cannot be read.
        ValueError: It is not an ordinary file, or too large for one of its owner.
    """
    file = files.open_file(path, limit)
    status = os.fstat(file.fileno())
    if status.st_size > MAX_TABLE and not files.is_ours(status):
        file.close()
        raise ValueError(f"larger than {MAX_TABLE >> 20} MiB, and of somebody else")
    return file


class MetricsReader:
    """Reads ``metrics.csv``, whoever has written it; if it has grown since, only its last row and what follows.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: Columns = {}
        self._read: tuple[int, bytes] | None = None  # inode and header of what was read
        self._last, self._names = 0, list[str]()  # where the last row begins, to which its logger may add; its metrics

    def read(self) -> Columns:
        """Return steps, epochs and values of each column where it has some.

        Steps are those of the optimizer after which a value was measured; loggers count them from 0.

        Raises:
            OSError: It cannot be read.
            ValueError: It is empty, not an ordinary file, too large, or has too many columns.
        """
        with open_metrics(self.path) as file:
            if not (head := file.readline(MAX_NAMES)).endswith(b"\n"):
                raise ValueError("more names than can be read" if head else "the file is empty")
            status = os.fstat(file.fileno())
            before, self._read = self._read, None  # if a row is invalid, all is read again
            if before != (status.st_ino, head) or status.st_size < self._last:
                self._columns, self._last, self._names = {}, len(head), []
            for name in self._names:
                for numbers in self._columns[name]:
                    numbers.pop()
            self._names = []
            file.seek(self._last)
            names = next(csv.reader([head.decode()]))
            table = csv.reader(self._complete_lines(file))
            while rows := list(islice(table, BLOCK)):
                self._add(names, rows)
            self._read = status.st_ino, head
        return {name: self._columns[name] for name in names if name in self._columns and self._columns[name][0]}

    def _complete_lines(self, file: IO[bytes]) -> Iterator[str]:
        size = 0
        for line in file:
            if line.endswith(b"\n"):  # the last may be incomplete
                self._last += size
                size = len(line)
                yield line.decode()

    def _add(self, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if all(len(row) == len(names) for row in rows):
            self._add_columns(dict(zip(names, zip(*rows, strict=True), strict=True)), len(rows))
        else:
            for row in rows:
                self._add_columns({name: (text,) for name, text in zip(names, row, strict=False)}, 1)

    def _add_columns(self, columns: dict[str, tuple[str, ...]], count: int) -> None:
        steps, epochs = (
            [int(_to_float(text or "-1")) for text in columns.pop(key, ("",) * count)] for key in ("step", "epoch")
        )
        self._names = [name for name, texts in columns.items() if texts[-1]]
        for name, texts in columns.items():
            if found := [place for place, text in enumerate(texts) if text]:
                ours = self._columns.setdefault(name, (array("q"), array("q"), array("d")))
                ours[0].extend([steps[place] + 1 for place in found])
                ours[1].extend([epochs[place] for place in found])
                ours[2].extend([_to_float(texts[place]) for place in found])


def _to_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
