"""metrics.csv: a line for each step that logged something."""

from __future__ import annotations

import csv
import errno
import io
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

Row = dict[str, str]


class CSVLogger(Logger):
    """One file for the whole run, over all of its attempts.

    All that is logged at one step stands in one line. A resumed run overwrites the steps that it does again, and a
    new column rewrites the file; otherwise lines are only added, so writing costs no more late than early. It is done
    by a thread, and never leaves half a file. Numbers are as exact as ``float`` has them:
    ``pandas.read_csv(path, float_precision="round_trip")``.

    Args:
        path: Of the file.
        seconds_between_writes: What may be lost when the process is killed.
    """

    def __init__(self, path: Path, *, seconds_between_writes: float = 1.0) -> None:
        super().__init__()
        self.path, self.seconds_between_writes = Path(path), seconds_between_writes
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._told = False
        self._fresh: dict[int, Row] = {}  # rows that the file lacks, in whole or in part
        self._first: int | None = None  # step of this attempt
        self._columns: list[str] = []  # of the file, once it is this attempt's
        self._newest: tuple[int, Row] = (-1, {})  # the file's last row, which may yet grow
        self._newest_at = self._end = 0  # where in the file it begins and ends

    def __reduce__(self) -> tuple[Callable[[], CSVLogger], tuple[()]]:
        return partial(CSVLogger, self.path, seconds_between_writes=self.seconds_between_writes), ()

    @property
    def name(self) -> str:
        """Of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """None: the run's folder tells."""
        return ""

    @property
    def experiment(self) -> Any:
        """Accepts pictures and whatever else a module logs here by itself, and keeps none of it."""
        return _DummyExperiment()

    @property
    def save_dir(self) -> str:
        """The folder of the file."""
        return str(self.path.parent)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: config.yaml has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add to the line of ``step``."""
        at = step or 0
        with self._lock:
            self._first = at if self._first is None else self._first
            row = self._fresh.setdefault(at, {})
            for name, value in metrics.items():
                row[name] = str(int(value)) if name == "epoch" else repr(float(value))

    @rank_zero_only
    def save(self) -> None:
        """See that what is new gets written within ``seconds_between_writes``."""
        if self._fresh and self._timer is None:
            self._timer = threading.Timer(self.seconds_between_writes, self._write_later)
            self._timer.daemon = True
            self._timer.start()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write what is left."""
        self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Write what is new, now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._try_to_write()

    @rank_zero_only
    def discard(self) -> None:
        """Write nothing of what is new, as another process writes to the file now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            self._fresh = {}

    def _write_later(self) -> None:
        self._timer = None
        self._try_to_write()

    def _try_to_write(self) -> None:
        """Write, or keep for the next time what cannot be written; a full disk must not end a training."""
        try:
            self._write()
        except OSError as error:
            if not self._told:
                print(
                    f"warning: {self.path}: not written ({error}); what is new is kept until it can be", file=sys.stderr
                )
            self._told = True

    def _write(self) -> None:
        with self._lock:
            fresh = dict(sorted(self._fresh.items()))
            if not fresh:
                return
            new = dict.fromkeys(name for row in fresh.values() for name in row if name not in self._columns)
            backwards = next(iter(fresh)) < self._newest[0]
            if new or backwards or not self.path.is_file() or self.path.stat().st_size != self._end:
                self._write_all(fresh)
            else:
                self._add(fresh)
            self._fresh = {}

    def _add(self, fresh: dict[int, Row]) -> None:
        """Write after the last row, or over it if it has grown."""
        step, row = self._newest
        grown = step in fresh
        rows = fresh | ({step: row | fresh[step]} if grown else {})
        lines = self._lines(rows)
        begin = self._newest_at if grown else self._end
        if begin + sum(map(len, lines)) < self._end:  # a shorter row would leave the end of the old one behind
            return self._write_all(fresh)
        with open(self.path, "r+b", buffering=0) as file:
            file.seek(begin)
            text = b"".join(lines)
            if (file.write(text) or 0) < len(text):  # a disk that becomes full takes a part, without an error
                self._fresh = rows
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._keep(rows, lines, begin)
        return None

    def _write_all(self, fresh: dict[int, Row]) -> None:
        """Put a new file in place of the old, whose rows stay but for those that are done again."""
        columns, rows = self._read()
        if not self._columns and self._first is not None:
            rows = {step: row for step, row in rows.items() if step <= self._first}  # it may begin in mid-step
        for step, row in fresh.items():
            rows[step] = rows.get(step, {}) | row
        rows = dict(sorted(rows.items()))
        self._columns = list(
            dict.fromkeys([*columns, "step", "epoch", *(name for row in fresh.values() for name in row)])
        )
        header, lines = _line(self._columns), self._lines(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.part")
        with open(draft, "wb") as file:
            file.write(header + b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        self._keep(rows, lines, len(header))

    def _lines(self, rows: dict[int, Row]) -> list[bytes]:
        return [
            _line([str(step) if name == "step" else row.get(name, "") for name in self._columns])
            for step, row in rows.items()
        ]

    def _keep(self, rows: dict[int, Row], lines: list[bytes], begin: int) -> None:
        self._newest = next(reversed(rows.items()))
        self._end = begin + sum(map(len, lines))
        self._newest_at = self._end - len(lines[-1])

    def _read(self) -> tuple[list[str], dict[int, Row]]:
        """Columns and rows of the file, without a last one that a kill cut off."""
        if not self.path.is_file():
            return [], {}
        text = self.path.read_text(errors="replace").replace("\0", "")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        rows = {int(row["step"]): row for row in reader if (row.get("step") or "").isdigit()}
        filled = {step: {name: value for name, value in row.items() if name and value} for step, row in rows.items()}
        return list(reader.fieldnames or []), filled


def _line(cells: Iterable[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
