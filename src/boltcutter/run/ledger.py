"""The ledger of a run: what each optimizer step has computed, by which two runs are compared step by step.

``steps.ledger`` in the folder of a run is that of rank 0, ``steps-rank-1.ledger`` that of rank 1: a header of 64 bytes,
then a row of 64 bytes for each optimizer step.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from boltcutter import files
from boltcutter.config.errors import ConfigError

# Little-endian on each machine. A digest of 0 was not computed.
ROW = np.dtype(
    [
        ("step", "<u4"),  # optimizer steps that were done, also this one: from 1
        ("epoch", "<u4"),
        ("loss", "<f8"),  # mean over the batches of the step, as training_step returned it; NaN if it is unknown
        ("gradient_norm", "<f8"),  # before clipping; NaN if it is unknown
        ("lr", "<f8"),  # with which the step was done, of the first parameter group
        ("samples", "<u8"),  # digest of the indices of the samples; of the batch where a loader has no indices
        ("gradient", "<u8"),  # digest of the norms of all gradients and, on the CPU, of all bits of two small ones
        ("weights", "<u8"),  # digests after the step, at each 100th and at each checkpoint
        ("optimizer", "<u4"),  # of its state
        ("buffers", "<u4"),  # of buffers, as of BatchNorm, of rank 0, and of averages of the weights, as of EMA
    ]
)
DIGESTS = ("samples", "gradient", "weights", "optimizer", "buffers")
COLUMNS = ("samples", "loss", "gradient_norm", "gradient", "lr", *DIGESTS[2:])  # first what causes the others
SIZE = 64
BLOCK = 1 << 16  # rows that are read at once
FORMAT = "boltcutter steps 3"

Rows = npt.NDArray[Any]


def ledger_path(folder: Path, rank: int = 0) -> Path:
    """Where the rows of a rank are."""
    return folder / (f"steps-rank-{rank}.ledger" if rank else "steps.ledger")


def header(device: str) -> bytes:
    """The beginning of a ledger.

    Args:
        device: Type of the device: digests of gradients are those of their norms and, on the CPU, of two gradients.
    """
    return f"{FORMAT} {device}\n".encode().ljust(SIZE, b"\0")


@dataclass(frozen=True)
class Ledger:
    """The steps of one rank.

    Args:
        device: Type of the device.
        rows: Of type ``ROW``, by increasing steps.
    """

    device: str
    rows: Rows

    @property
    def last(self) -> int:
        """Number of the last step; 0 if there is none."""
        return int(self.rows["step"][-1]) if len(self.rows) else 0


def read_ledger(path: Path) -> Ledger | None:
    """Read a ledger; None if there is none. A torn tail, as of a machine that lost power, is left out."""
    try:
        with files.open_file(path, sys.maxsize) as file:
            data = file.read(SIZE)
            if len(data) < SIZE or not data.startswith(f"{FORMAT} ".encode()):
                return None
            device = data[len(FORMAT) + 1 :].rstrip(b"\0").decode(errors="replace").strip()
            return Ledger(device, _read_rows(file))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; remove it") from None


def _read_rows(file: IO[bytes]) -> Rows:
    """The rows up to the first that does not follow; no memory is taken for the holes of a file of somebody else."""
    blocks, last = list[Rows]([np.empty(0, ROW)]), 0
    while data := file.read(BLOCK * SIZE):
        rows = np.frombuffer(data, ROW, len(data) // SIZE)
        steps = rows["step"].astype(np.int64)
        torn = np.flatnonzero(np.diff(steps, prepend=last) <= 0)
        blocks.append(rows[: torn[0]] if len(torn) else rows)
        if len(torn) or not len(rows):
            break
        last = int(steps[-1])
    return np.concatenate(blocks)


def read_ledgers(folder: Path) -> Iterator[Ledger]:
    """The ledgers of a run, one for each rank; none for a run that wrote none."""
    for rank in count():
        if (ledger := read_ledger(ledger_path(folder, rank))) is None:
            return
        yield ledger


@dataclass(frozen=True)
class Difference:
    """The first step at which two ledgers differ.

    Args:
        step: Its number.
        epoch: In which it is.
        columns: Which differ, first what causes the others.
        values: Both values of each.
        rank: Of which rank.
    """

    step: int
    epoch: int
    columns: tuple[str, ...]
    values: tuple[tuple[Any, Any], ...]
    rank: int = 0

    def __str__(self) -> str:
        where = f"step {self.step} (epoch {self.epoch}){f' of rank {self.rank}' if self.rank else ''}"
        shown = zip(self.columns, self.values, strict=True)
        return f"{where}: " + ", ".join(
            name if name in DIGESTS else f"{name} {here!r} → {there!r}" for name, (here, there) in shown
        )


def first_difference(
    first: Ledger,
    second: Ledger,
    rank: int = 0,
    tolerance: Mapping[str, float] | None = None,
    without: Collection[str] = (),
) -> Difference | None:
    """The first step that both ledgers have and in which they differ; None if there is none.

    Args:
        first: Of one run.
        second: Of another one.
        rank: Whose they are.
        tolerance: By how much numbers of a column may differ, relative to the larger one.
        without: Columns that are not compared.
    """
    skipped = {*without, *(("gradient",) if first.device != second.device else ())}
    allowed = tolerance or {}
    for one, other in _common(first.rows, second.rows):
        differs = {
            name: _differs(name, one[name], other[name], allowed.get(name, 0.0))
            for name in COLUMNS
            if name not in skipped
        }
        somewhere = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
        if len(somewhere):
            number = int(somewhere[0])
            columns = tuple(name for name, where in differs.items() if where[number])
            values = tuple((one[name][number].item(), other[name][number].item()) for name in columns)
            return Difference(int(one["step"][number]), int(one["epoch"][number]), columns, values, rank)
    return None


def _common(first: Rows, second: Rows) -> Iterator[tuple[Rows, Rows]]:
    """The rows of the steps that both have, some at a time: ledgers may have millions."""
    steps = np.ascontiguousarray(second["step"])
    for begin in range(0, len(first), BLOCK):
        block = first[begin : begin + BLOCK]
        low, high = np.searchsorted(steps, block["step"][0]), np.searchsorted(steps, block["step"][-1], "right")
        _, at, there = np.intersect1d(block["step"], steps[low:high], assume_unique=True, return_indices=True)
        yield block[at], second[low + there]


def mean_over_ranks(ledgers: Sequence[Ledger]) -> Ledger:
    """Steps as all ranks have done them together: the mean of their losses, and no digests, which are of one rank."""
    length = min(len(ledger.rows) for ledger in ledgers)
    rows = ledgers[0].rows[:length].copy()
    for name in ("loss", "gradient_norm"):
        rows[name] = np.mean([ledger.rows[name][:length] for ledger in ledgers], axis=0)
    for name in DIGESTS:
        rows[name] = 0
    return Ledger(ledgers[0].device, rows)


def differences(first: Path, second: Path) -> Iterator[Difference]:
    """The first difference of each rank of two runs."""
    for rank, pair in enumerate(zip(read_ledgers(first), read_ledgers(second), strict=False)):
        if found := first_difference(*pair, rank=rank):
            yield found


def _differs(name: str, one: Rows, other: Rows, tolerance: float = 0.0) -> npt.NDArray[np.bool_]:
    """Where two columns differ: without a tolerance, in any bit. NaN equals NaN."""
    if name in DIGESTS:
        return np.asarray((one != other) & (one != 0) & (other != 0))
    if tolerance:
        is_close = np.isclose(one, other, rtol=tolerance, atol=0, equal_nan=True)
        return ~(is_close | np.isclose(other, one, rtol=tolerance, atol=0, equal_nan=True))
    return np.asarray((one.view("<u8") != other.view("<u8")) & ~(np.isnan(one) & np.isnan(other)))
