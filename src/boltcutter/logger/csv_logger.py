"""CSV logger: one file with one row per logged step."""

from __future__ import annotations

import csv
import errno
import io
import os
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyExperiment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import rank_zero_only

from boltcutter.files import opener
from boltcutter.formatting import as_cell, parse_count

# Why not Lightning's CSVLogger: a resumed run would delete the metrics of earlier attempts, metrics of one step would
# be in different rows, a killed process could leave an incomplete file, and training would wait for each write.
Row = dict[str, str]


class CSVLogger(Logger):
    """Log metrics to one CSV file for the whole run, over all of its attempts.

    Metrics of the same step share a row. A resumed run overwrites the steps that it repeats. Rows are appended, and the
    file is rewritten only for new columns, so the cost of a write does not grow. A thread writes the file, which is
    never incomplete. Values round-trip exactly; pandas before 3.1 needs ``float_precision="round_trip"`` for it.

    Args:
        path: Path of the file.
        seconds_between_writes: Minimum seconds between two writes; a killed process loses at most these.
    """

    def __init__(self, path: Path, *, seconds_between_writes: float = 1.0) -> None:
        super().__init__()
        self.path, self.seconds_between_writes = Path(path), seconds_between_writes
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._warned = False
        self._pending: dict[int, Row] = {}  # rows, or parts of rows, that are not yet written
        self._first: int | None = None  # first step of this attempt
        self._columns: list[str] = []  # of the file, once this attempt has written it
        self._last_row: tuple[int, Row] = (-1, {})  # of the file; more metrics may be added to it
        self._last_row_start = self._end = 0  # byte offsets of its start and end

    def __reduce__(self) -> tuple[Callable[[], CSVLogger], tuple[()]]:
        return partial(CSVLogger, self.path, seconds_between_writes=self.seconds_between_writes), ()

    @property
    def name(self) -> str:
        """Name of the logger."""
        return "csv"

    @property
    def version(self) -> str:
        """Empty, because the run folder identifies the run."""
        return ""

    @property
    def experiment(self) -> Any:
        """A dummy experiment that ignores images and other calls of a module."""
        return DummyExperiment()

    @property
    def save_dir(self) -> str:
        """Folder of the file."""
        return str(self.path.parent)

    log_dir = save_dir  # where modules write files of their own

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Do nothing; config.yaml holds the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add metrics to the row of ``step``."""
        at = step or 0
        with self._lock:
            self._first = at if self._first is None else self._first
            row = self._pending.setdefault(at, {})
            for name, value in metrics.items():
                with suppress(TypeError, ValueError):  # pictures and text, which other loggers take
                    row[name] = str(int(value)) if name == "epoch" else repr(float(value))

    @rank_zero_only
    def save(self) -> None:
        """Schedule a write within ``seconds_between_writes``."""
        if self._pending and self._timer is None:
            self._timer = threading.Timer(self.seconds_between_writes, self._write_from_timer)
            self._timer.daemon = True
            self._timer.start()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Write all pending rows."""
        self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Write all pending rows now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self._try_to_write()

    @rank_zero_only
    def discard(self) -> None:
        """Discard pending rows, because another process writes to the file now."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            self._pending = {}

    def _write_from_timer(self) -> None:
        self._timer = None
        self._try_to_write()

    def _try_to_write(self) -> None:
        """Write pending rows, or keep them if that fails; a full disk must not stop training."""
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                print(
                    f"warning: {self.path}: not written ({error}); new rows are kept in memory until it can be written",
                    file=sys.stderr,
                )
            self._warned = True

    def _write(self) -> None:
        with self._lock:
            pending = dict(sorted(self._pending.items()))
            if not pending:
                return
            new = dict.fromkeys(name for row in pending.values() for name in row if name not in self._columns)
            backwards = next(iter(pending)) < self._last_row[0]
            if new or backwards or not self.path.is_file() or self.path.stat().st_size != self._end:
                self._write_all(pending)
            else:
                self._append(pending)
            self._pending = {}

    def _append(self, pending: dict[int, Row]) -> None:
        """Append rows, overwriting the last one if metrics were added to it."""
        step, row = self._last_row
        grown = step in pending
        rows = pending | ({step: row | pending[step]} if grown else {})
        lines = self._lines(rows)
        begin = self._last_row_start if grown else self._end
        if begin + sum(map(len, lines)) < self._end:  # a shorter row would leave the end of the old one
            return self._write_all(pending)
        with open(self.path, "r+b", buffering=0, opener=opener(self.path.parent)) as file:
            file.seek(begin)
            text = b"".join(lines)
            if (file.write(text) or 0) < len(text):  # a disk that fills up accepts a part without an error
                self._pending = rows
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._remember_end(rows, lines, begin)
        return None

    def _write_all(self, pending: dict[int, Row]) -> None:
        """Replace the file, keeping its rows except for repeated steps."""
        columns, rows = self._read()
        if not self._columns and self._first is not None:
            rows = {step: row for step, row in rows.items() if step <= self._first}  # the first step may be incomplete
        for step, row in pending.items():
            rows[step] = rows.get(step, {}) | row
        rows = dict(sorted(rows.items()))
        names = (name for row in pending.values() for name in row)
        self._columns = list(dict.fromkeys([*columns, "step", "epoch", *names]))
        header, lines = _line(map(as_cell, self._columns)), self._lines(rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.path.with_name(f".{self.path.name}.part")
        draft.unlink(missing_ok=True)  # of a killed process, or a link
        with open(draft, "xb") as file:
            file.write(header + b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path)
        self._remember_end(rows, lines, len(header))

    def _lines(self, rows: dict[int, Row]) -> list[bytes]:
        return [
            _line([str(step) if name == "step" else row.get(name, "") for name in self._columns])
            for step, row in rows.items()
        ]

    def _remember_end(self, rows: dict[int, Row], lines: list[bytes], begin: int) -> None:
        self._last_row = next(reversed(rows.items()))
        self._end = begin + sum(map(len, lines))
        self._last_row_start = self._end - len(lines[-1])

    def _read(self) -> tuple[list[str], dict[int, Row]]:
        """Columns and rows of the file, without an incomplete last row."""
        if not self.path.is_file():
            return [], {}
        text = self.path.read_text(errors="replace").replace("\0", "")
        reader = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
        rows: dict[int, dict[str, str]] = {}
        with suppress(csv.Error):  # a field that is too long, which this logger does not write
            rows.update((step, row) for row in reader if (step := parse_count(row.get("step"))) is not None)
        names = {name: name[1:] if as_cell(name[1:]) == name else name for name in reader.fieldnames or ()}
        return list(names.values()), {
            step: {names[name]: value for name, value in row.items() if name and value} for step, row in rows.items()
        }


def _line(cells: Iterable[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
