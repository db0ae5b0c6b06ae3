"""A run ends soon after any fault; resumed, it is bitwise identical to an uninterrupted run."""

import csv
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import environment
from faulty import PLACES
from forkserver import Forked, ForkServer, rank_variables

from boltcutter.data.huggingface import HuggingFace
from boltcutter.data.shards import Shards
from boltcutter.data.tokens import Tokens

# Dropout, weight averaging, accumulated gradients, a schedule over all steps, and each step in metrics.csv.
OVERRIDES = ["logger=null", "report=false", "test=false", "model=mlp", "model.hidden_sizes=[32]", "model.dropout=0.2"]
OVERRIDES += ["model.norm=batchnorm", "callback=[default,ema]", "scheduler=onecycle", "trainer.max_epochs=2"]
OVERRIDES += ["trainer.accumulate_grad_batches=2", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"]
OVERRIDES += ["trainer.val_check_interval=0.5"]
LIMIT = 40.0  # for a run that takes two seconds on a quiet machine
GRACE = 10.0  # seconds in which all ranks reach a fault at the start, or are ended by the launcher
NOT_COMPARED = ("throughput/", "test/")
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")

# Quick tests: for each place, the faults with one process, and those with two with the ranks that they hit. Each place
# has at least one; `pytest -m slow` runs all other combinations.
QUICK = {
    "start": ("SIGKILL", ""),
    "begin": ("SIGINT", ""),
    "training": ("SIGKILL", ""),
    "validation": ("SIGINT", ""),
    "checkpoint": ("", "SIGKILL:first"),
    "saved": ("SIGUSR2", ""),
    "test": ("SIGUSR1", ""),
    "report": ("SIGTERM", ""),
    "exit": ("SIGTERM", ""),
}


class Row(NamedTuple):
    """A fault, and where it occurs."""

    place: str
    processes: int
    fault: str
    hit: list[int]  # ranks


def table() -> Iterator[Any]:
    """Yield every place, fault and selection of ranks; those that are not in ``QUICK`` are slow."""
    for place in PLACES:
        for processes, quick in zip((1, 2), QUICK[place], strict=True):
            for fault in ("SIGKILL", *SIGNALS, "exception"):
                for ranks, hit in {"first": [0], "last": [processes - 1], "all": list(range(processes))}.items():
                    name = fault if processes == 1 else f"{fault}:{ranks}"
                    distinct = "all" if processes == 1 else "first" if place == "report" else ranks
                    if ranks != distinct:
                        continue  # the same selection; only the first rank writes the report
                    marks = () if name in quick.split() else pytest.mark.slow
                    yield pytest.param(Row(place, processes, fault, hit), id=f"{place}-{processes}-{name}", marks=marks)


class Runs:
    """Start the processes of runs.

    Args:
        forks: The server that starts them.
        errors: File for their standard error.
    """

    def __init__(self, forks: ForkServer, errors: Path) -> None:
        self.forks, self.errors = forks, errors

    def attempt(self, overrides: list[str], processes: int, row: Row | None = None) -> list[int]:
        """Run to the end, with or without a fault; return the exit status of each rank."""
        with ExitStack() as stack:
            devnull = stack.enter_context(open(os.devnull, "wb")).fileno()
            stderr = stack.enter_context(open(self.errors, "ab")).fileno()
            started: list[Forked] = []
            for rank, variables in enumerate(rank_variables(processes) if processes > 1 else [{}]):
                hit = row is not None and rank in row.hit
                prefix = ["tests/faulty.py", row.fault, row.place] if row and hit else []
                argv = [*prefix, "scripts/train.py", *overrides]
                started.append(stack.enter_context(self.forks.start(argv, environment(**variables), devnull, stderr)))
            if row and row.place == "start" and processes > 1:
                started[row.hit[0]].wait(LIMIT)
                for process in started:  # a rank that waits for the missing one is ended by the launcher
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE if len(row.hit) == processes else 0.0)
                    process.kill_group()
            end = time.monotonic() + LIMIT
            try:
                return [process.wait(max(end - time.monotonic(), 0.0)) for process in started]
            except subprocess.TimeoutExpired:
                running = [rank for rank, process in enumerate(started) if process.poll() is None]
        raise AssertionError(f"ranks {running} hang after {row}\n{self.read_errors()}")

    def finish(self, folder: Path, overrides: list[str], processes: int) -> None:
        """Resume a run, or start it again if it has no record, and wait until it is complete."""
        has_begun = (folder / "record.json").is_file()
        statuses = self.attempt([f"resume={folder}"] if has_begun else overrides, processes)
        assert statuses == [0] * processes, self.read_errors()

    def read_errors(self) -> str:
        """Return the standard error of all attempts."""
        return self.errors.read_text(errors="replace")


@pytest.fixture(scope="module")
def uninterrupted(forks: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the uninterrupted run, by number of processes."""
    found = {}
    for processes in (1, 2):
        place = tmp_path_factory.mktemp("uninterrupted")
        found[processes] = place / "run"
        runs = Runs(forks, place / "errors")
        overrides = [*OVERRIDES, "test=true", f"trainer.devices={processes}", f"folder={found[processes]}"]
        assert runs.attempt(overrides, processes) == [0] * processes, runs.read_errors()
    return found


def record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "record.json").read_text())
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return found


def lines(folder: Path) -> list[dict[str, str]]:
    """Return the rows of metrics.csv without throughput and test metrics."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = [{k: v for k, v in row.items() if v and not k.startswith(NOT_COMPARED)} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def allowed_statuses(row: Row) -> list[set[int]]:
    """Return the allowed exit statuses of each rank; ranks that were not hit exit with 1, or are aborted or killed."""
    affected = {1, -signal.SIGABRT, -signal.SIGKILL}
    if row.fault == "SIGKILL":
        return [{-signal.SIGKILL} if rank in row.hit else affected | {0} for rank in range(row.processes)]
    if row.place == "report" and row.fault == "exception":
        return [{0}] * row.processes  # a report that cannot be written is a warning
    exited = {1} if row.fault == "exception" else {128 + getattr(signal, row.fault)}
    if row.place == "start":  # nothing is saved, and a rank exits without the others, or is ended by the launcher
        return [
            affected if rank not in row.hit else exited | {-signal.SIGKILL} if rank else exited
            for rank in range(row.processes)
        ]
    if row.fault == "exception":
        return [exited if rank in row.hit else affected | {0} for rank in range(row.processes)]
    if row.place in ("report", "exit"):
        exited.add(0)  # the run may be complete by then
    return [exited] * row.processes


@pytest.mark.parametrize("row", list(table()))
def test_a_run_survives_each_fault(forks: ForkServer, uninterrupted: dict[int, Path], tmp_path: Path, row: Row) -> None:
    folder, runs = tmp_path / "run", Runs(forks, tmp_path / "errors")
    overrides = [*OVERRIDES, f"trainer.devices={row.processes}", f"folder={folder}"]
    overrides += {"test": ["test=true"], "report": ["report=true"], "exit": ["report=true"]}.get(row.place, [])
    statuses = runs.attempt(overrides, row.processes, row)
    unexpected = [rank for rank, allowed in enumerate(allowed_statuses(row)) if statuses[rank] not in allowed]
    assert not unexpected, (statuses, runs.read_errors())
    late = row.place in ("report", "exit")
    assert any(statuses) or late, statuses
    if any(statuses):
        runs.finish(folder, overrides, row.processes)
    expected = uninterrupted[row.processes]
    ours, theirs = weights(folder), weights(expected)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    assert lines(folder) == lines(expected)
    known = record(folder)
    assert known["attempts"][-1]["reason"] == "completed"
    assert known["metrics"] == record(expected)["metrics"]
    if row.place == "test":
        assert known["test"] == record(expected)["test"]
    has_report = late and (row.place, row.fault) != ("report", "exception")
    assert (folder / "report.html").is_file() == has_report
    assert not list((folder / "checkpoints").glob(".*")), "a partial checkpoint remains"


def test_a_rank_that_waits_for_one_that_a_signal_has_ended_ends_by_the_signal(
    forks: ForkServer, tmp_path: Path
) -> None:
    """Both get it while they connect, one of them shortly before it saves on signals, the other one shortly after."""
    overrides = ["scripts/train.py", *OVERRIDES, "trainer.devices=2", f"folder={tmp_path}/run"]
    first, second = rank_variables(2)
    with open(tmp_path / "errors", "wb") as errors, ExitStack() as stack:
        output = errors.fileno(), errors.fileno()
        late = ["tests/faulty.py", "SIGINT", "setup", *overrides]
        waiting = stack.enter_context(forks.start(overrides, environment(**first), *output))
        assert stack.enter_context(forks.start(late, environment(**second), *output)).wait(LIMIT) == 128 + signal.SIGINT
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(LIMIT) == 128 + signal.SIGINT, (tmp_path / "errors").read_text()


def test_a_validation_that_was_restarted_is_not_run_again(
    forks: ForkServer, uninterrupted: dict[int, Path], tmp_path: Path
) -> None:
    """The run is interrupted in it, and again before the next step, from which Lightning would run a part of it."""
    folder, runs = tmp_path / "run", Runs(forks, tmp_path / "errors")
    overrides = [*OVERRIDES, "trainer.devices=1", f"folder={folder}"]
    for arguments, call in ((overrides, 2 + 5 + 3), ([f"resume={folder}"], 5)):
        row = Row(f"validation@{call}", 1, "SIGTERM", [0])
        assert runs.attempt(arguments, 1, row) == [128 + signal.SIGTERM], runs.read_errors()
    runs.finish(folder, overrides, 1)
    assert lines(folder) == lines(uninterrupted[1])
    assert record(folder)["metrics"] == record(uninterrupted[1])["metrics"]


SPY = """
import json, os
from pathlib import Path
from lightning.pytorch.callbacks import Callback

class Spy(Callback):
    def __init__(self, file):
        self.file = f"{file}-{os.environ.get('RANK', 0)}"

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        inputs = batch[0].flatten(1)[:, :2].tolist()
        with open(self.file, "a") as file:
            file.write(json.dumps([trainer.current_epoch, batch_idx, inputs]) + "\\n")
"""
PER_BATCH, COUNT = 8, 240
TOKENS = [
    "data=tokens",
    "data.shape=[16]",
    "data.vocab_size=5000",
    "model=gpt",
    "model.num_layers=1",
    "model.hidden_size=16",
]
TOKENS += ["model.num_heads=1", "model.dropout=0.1", "task=language", "data.split=[0.8,0.1,0.1]"]
SHARDS = ["data=shards", "data.shape=[1,2,3]", "data.num_classes=4", "data.split=[0.8,0.1,0.1]", "model=mlp"]
PARQUET = ["data=huggingface", "data.input=x", "data.target=y", "data.shape=[1,2,3]", "data.num_workers=0", *SHARDS[3:]]
ON_DISK = {"tokens": TOKENS, "npy": SHARDS, "parquet": PARQUET}


def write_samples(kind: str, folder: Path) -> None:
    """Samples that differ in their first two numbers, in several files."""
    folder.mkdir()
    if kind == "tokens":
        for number, part in enumerate(np.array_split(np.arange(16 * COUNT + 50, dtype=np.uint16), 2)):
            part.tofile(folder / f"train-{number}.bin")
        return
    numbers = np.arange(COUNT, dtype=np.uint8)
    inputs = np.random.default_rng(0).integers(0, 256, (COUNT, 1, 2, 3), np.uint8)
    inputs[:, 0, 0, 0] = numbers
    for part in np.array_split(numbers, 3):
        if kind == "npy":
            np.save(folder / f"inputs-{part[0]:03}.npy", inputs[part])
            np.save(folder / f"targets-{part[0]:03}.npy", part.astype(np.int64) % 4)
            continue
        table = pa.table({"x": [sample.tobytes() for sample in inputs[part]], "y": part.astype(np.int64) % 4})
        pq.write_table(table, folder / f"train-{part[0]:03}.parquet")


def batches_of(place: Path) -> list[dict[tuple[int, int], list[Any]]]:
    """Return the samples of each batch of each epoch, per rank; the last ones of a batch that was repeated."""
    found = []
    for rank in range(2):
        lines = [json.loads(line) for line in (place / f"seen-{rank}").read_text().splitlines()]
        found.append({(epoch, number): inputs for epoch, number, inputs in lines})
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("tokens", "SIGKILL"),
        pytest.param("npy", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("tokens", "SIGTERM", marks=pytest.mark.slow),
        pytest.param("npy", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("parquet", "SIGKILL", marks=pytest.mark.slow),
        pytest.param("parquet", "SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_keep_their_order_after_a_fault(
    forks: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, fault: str
) -> None:
    (tmp_path / "spy.py").write_text(SPY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    write_samples(kind, tmp_path / "data")
    seen, kept = [], []
    for place, row in (("uninterrupted", None), ("hit", Row("training", 2, fault, [1]))):
        (tmp_path / place).mkdir()
        folder, runs = tmp_path / place / "run", Runs(forks, tmp_path / place / "errors")
        overrides = [
            *OVERRIDES[:3],
            *ON_DISK[kind],
            f"data.path={data_path(kind, tmp_path)}",
            f"data.batch_size={PER_BATCH}",
            "seed=3",
        ]
        overrides += [f"data.cache_dir={tmp_path}/cache"] if kind == "parquet" else []
        overrides += ["trainer.max_epochs=2", "trainer.accelerator=cpu", "trainer.devices=2", f"folder={folder}"]
        overrides += [f"+callback.spy={{_target_: spy.Spy, file: {tmp_path / place}/seen}}"]
        statuses = runs.attempt(overrides, 2, row)
        assert any(statuses) == (row is not None), (statuses, runs.read_errors())
        if row:
            runs.finish(folder, overrides, 2)
        seen.append(batches_of(tmp_path / place))
        kept.append(weights(folder))
    expected, resumed = seen
    assert resumed == expected
    assert [name for name in kept[0] if not torch.equal(kept[0][name], kept[1][name])] == []
    epochs = [
        [tuple(inputs) for rank in expected for (at, _), batch in rank.items() if at == epoch for inputs in batch]
        for epoch in (0, 1)
    ]
    assert len(expected[0]) == len(expected[1]) == 2 * (len(epochs[0]) // PER_BATCH)
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch) > 0.7 * COUNT  # each sample once
    assert epochs[0] != epochs[1]
    data = single_process_data(kind, tmp_path)
    for epoch in (0, 1):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        for number, (inputs, _) in enumerate(loader):  # the batches of both ranks are the batch of one process
            both = [*expected[0][epoch, number], *expected[1][epoch, number]]
            assert both == inputs.flatten(1)[:, :2].tolist()


def data_path(kind: str, folder: Path) -> str:
    """Value of ``data.path``."""
    return f"{folder}/data/*.parquet" if kind == "parquet" else f"{folder}/data"


def single_process_data(kind: str, folder: Path) -> Any:
    """Return the data module as in a single process."""
    settings: dict[str, Any] = {"path": data_path(kind, folder), "batch_size": PER_BATCH, "seed": 3}
    settings |= {"split": (0.8, 0.1, 0.1), "shape": (16,) if kind == "tokens" else (1, 2, 3)}
    data: Any
    if kind == "tokens":
        data = Tokens(vocab_size=5000, **settings)
    elif kind == "npy":
        data = Shards(num_classes=4, **settings)
    else:
        data = HuggingFace(input="x", target="y", cache_dir=folder / "cache", **settings)
    data.setup("fit")
    return data
