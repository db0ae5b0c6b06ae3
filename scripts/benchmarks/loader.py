"""Time of an epoch of the training loader, relative to NumPy indexing of the same batches, from memory and from files.

The NumPy reference knows the position of each sample, and needs one indexing operation for the inputs of a batch and
one for its targets, in memory or in memory-mapped files in the page cache; with several files, one per file. It
validates nothing, and creates no tensors.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import chain, islice
from pathlib import Path
from pydoc import locate
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import harness
from benchmarks.harness import ratio_of_turns
from boltcutter.project import Project

Array = npt.NDArray[Any]
Read = Callable[[Array], Any]
Work = tuple[Any, Array | None, Read]  # data module, position of each training sample, NumPy reference
TARGET = 1.1


def in_memory(folder: Path, **settings: Any) -> Work:
    """Samples in memory."""
    data = _set_up_data("boltcutter.data.synthetic.Synthetic", in_memory=True, **settings)
    inputs, targets = (part.numpy() for part in (data.splits.train.inputs, data.splits.train.targets))
    return data, None, lambda at: (inputs[at], targets[at])


def tokens(folder: Path, *, files: int, count: int, context: int, batch_size: int) -> Work:
    """Windows of memory-mapped token files."""
    for number, part in enumerate(np.array_split(_random(count, np.uint16, 50_000), files)):
        part.tofile(folder / f"train-{number}.bin")
    data = _set_up_data(
        "boltcutter.data.tokens.Tokens", path=f"{folder}/train-*.bin", shape=(context,), batch_size=batch_size
    )
    windows = data.splits.train
    begin, pairs = _first_window(windows), []
    for shift in (0, 1):
        parts = [
            mapped[begin + shift : begin + shift + length * context].reshape(length, context)
            for (mapped, _), length in zip(windows.sequences, windows.counts, strict=True)
        ]
        pairs.append(_indexing(parts))
    inputs, targets = pairs
    return data, None, lambda at: (inputs(at), targets(at))


def arrays(folder: Path, *, files: int, count: int, shape: tuple[int, ...], batch_size: int) -> Work:
    """``.npy`` files of bytes."""
    for number in range(files):
        np.save(folder / f"inputs-{number}.npy", _random((count // files, *shape), np.uint8, 256))
        np.save(folder / f"targets-{number}.npy", _random(count // files, np.int64, 10))
    data = _set_up_data(
        "boltcutter.data.shards.Shards", path=str(folder), shape=shape, num_classes=10, batch_size=batch_size
    )
    train = data.splits.train
    inputs, targets = (_indexing([getattr(shard, name) for shard in train.shards]) for name in ("inputs", "targets"))
    return data, _positions(train), lambda at: (inputs(at), targets(at))


def parquet(folder: Path, *, count: int, shape: tuple[int, ...], batch_size: int) -> Work:
    """A Parquet file of bytes; NumPy reads the same samples from ``.npy`` files."""
    inputs, targets = _random((count, *shape), np.uint8, 256), _random(count, np.int64, 10)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "targets.npy", targets)
    table = pa.table({"input": [sample.tobytes() for sample in inputs], "target": targets})
    pq.write_table(table, folder / "train.parquet")
    settings: dict[str, Any] = {"input": "input", "target": "target", "shape": shape, "batch_size": batch_size}
    data = _set_up_data(
        "boltcutter.data.huggingface.HuggingFace",
        path=str(folder / "train.parquet"),
        cache_dir=folder / "cache",
        **settings,
    )
    at_inputs, at_targets = (_indexing([np.load(folder / f"{n}.npy", mmap_mode="r")]) for n in ("inputs", "targets"))
    return data, data.splits.train.indices, lambda at: (at_inputs(at), at_targets(at))


LARGE = {"context": 1024, "batch_size": 16}
SMALL = {"context": 128, "batch_size": 8}
WORKS: dict[str, Callable[[Path, int], Work]] = {
    "memory, 28 x 28 bytes, batch 64": lambda f, n: in_memory(f, shape=(1, 28, 28), num_samples=64 * n, batch_size=64),
    "memory, 3 x 32 x 32 bytes, batch 128": lambda f, n: in_memory(
        f, shape=(3, 32, 32), num_samples=128 * n, batch_size=128
    ),
    "memory, 3 x 64 x 64 floats, batch 64": lambda f, n: in_memory(
        f, shape=(3, 64, 64), num_samples=64 * n, batch_size=64, dtype="float32"
    ),
    "tokens, 16 x 1024": lambda f, n: tokens(f, files=1, count=16 * 1100 * n, **LARGE),
    "tokens, 8 x 128": lambda f, n: tokens(f, files=1, count=8 * 140 * n, **SMALL),
    "tokens, 4 files, 16 x 1024": lambda f, n: tokens(f, files=4, count=16 * 1100 * n, **LARGE),
    "npy, 28 x 28 bytes, batch 64": lambda f, n: arrays(f, files=1, count=72 * n, shape=(1, 28, 28), batch_size=64),
    "npy, 4 files, 3 x 32 x 32 bytes, batch 128": lambda f, n: arrays(
        f, files=4, count=144 * n, shape=(3, 32, 32), batch_size=128
    ),
    "parquet, 3 x 32 x 32 bytes, batch 64": lambda f, n: parquet(f, count=96 * n, shape=(3, 32, 32), batch_size=64),
}


def main(project: Project, overrides: list[str]) -> None:
    """Measure in one process; options: ``rounds=5 turns=10 batches=300 folder=runs/bench``.

    Raises:
        BenchmarkError: An option is invalid.
    """
    chosen = harness.parse_options(overrides, {"rounds": "5", "turns": "10", "batches": "300", "folder": "runs/bench"})
    rounds, turns, batches = (int(chosen[name]) for name in ("rounds", "turns", "batches"))
    ratios, details = [], {}
    for name, make in WORKS.items():
        with tempfile.TemporaryDirectory() as scratch:
            work = make(Path(scratch), batches)
            found = [compare(work, turns, batches) for _ in range(rounds)]
        ours, theirs = ([each[who] for each in found] for who in ("boltcutter", "numpy"))
        ratios.append(ratio_of_turns(name, ours, "numpy", theirs, TARGET))
        details[name] = found
        each = {part: statistics.median(chain(*(f[part] for f in found))) / batches * 1e6 for part in found[0]}
        times = "{boltcutter:.1f}, of which reading {reading:.1f}; numpy {numpy:.1f}".format(**each)
        print(f"{name}, µs per batch: boltcutter {times}", flush=True)
    harness.report("loader", Path(chosen["folder"]), ratios, details)


def compare(work: Work, turns: int, batches: int) -> dict[str, list[float]]:
    """Time the first batches of an epoch, alternating between the training loader and the NumPy reference.

    Returns:
        Seconds of each turn for the loader, for NumPy, and for the loader's reading of samples; the rest of the
        loader's time is spent on the order of samples and on collating.
    """
    data, places, read = work
    loader = data.train_dataloader()
    chosen = [batch.indices if places is None else places[batch.indices] for batch in islice(loader.sampler, batches)]
    timed = vars(loader)["dataset"] = Timed(loader.dataset)
    found: dict[str, list[float]] = {"boltcutter": [], "numpy": [], "reading": []}
    for number in range(turns):
        for mine in (True, False) if number % 2 else (False, True):
            timed.seconds = 0.0
            seconds = time_of(islice(loader, batches) if mine else map(read, chosen))
            found["boltcutter" if mine else "numpy"].append(seconds)
            if mine:
                found["reading"].append(timed.seconds)
    return found


class Timed:
    """Wraps a dataset and measures the time of reading samples, in seconds."""

    def __init__(self, samples: Any) -> None:
        self.samples, self.seconds = samples, 0.0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, batch: Any) -> Any:
        """Read a batch of samples."""
        began = time.perf_counter()
        found = self.samples.__getitems__(batch)
        self.seconds += time.perf_counter() - began
        return found


def time_of(batches: Iterable[Any]) -> float:
    """Return the seconds that it takes to iterate over all batches."""
    began = time.perf_counter()
    for _ in batches:
        pass
    return time.perf_counter() - began


def _set_up_data(name: str, **settings: Any) -> Any:
    kind: Any = locate(name)
    data = kind(**settings)
    data.setup("fit")
    return data


def _random(size: Any, dtype: Any, below: int) -> Array:
    found: Array = np.random.default_rng(0).integers(0, below, size, dtype)
    return found


def _first_window(windows: Any) -> int:
    """Return the offset of the first epoch's windows."""
    begin: Callable[..., int] = cast(Any, locate("boltcutter.data.tokens._window_offset"))
    return begin(windows.num_offsets, seed=0, stage="train", epoch=0)


def _positions(samples: Any) -> Array:
    """Return the positions of a split's samples among all samples."""
    found: Array = samples._global_indices(np.arange(len(samples)))
    return found


def _indexing(parts: list[Array]) -> Read:
    """Return a function that reads rows of concatenated arrays."""
    if len(parts) == 1:
        return lambda at: parts[0][at]
    ends = np.cumsum([len(part) for part in parts])

    def read(at: Array) -> Array:
        found = np.empty((len(at), *parts[0].shape[1:]), parts[0].dtype)
        owners = np.searchsorted(ends, at, side="right")
        for number, part in enumerate(parts):
            mine = np.flatnonzero(owners == number)
            found[mine] = part[at[mine] - (ends[number] - len(part))]
        return found

    return read
