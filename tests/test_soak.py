"""Kill and signal runs at random times: ``SOAK_RUNS=200 pytest -m soak``.

``SOAK_SEED`` repeats a sequence of runs, ``SOAK_FIRST`` begins with a later run of it.
"""

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from conftest import environment
from forkserver import Forked, ForkServer, rank_variables
from test_faults import LIMIT, lines, record, weights

OVERRIDES = [
    "logger=null",
    "report=false",
    "model=mlp",
    "model.hidden_sizes=[32]",
    "model.dropout=0.2",
    "model.norm=batchnorm",
]
OVERRIDES += ["trainer.max_epochs=3", "trainer.log_every_n_steps=1", "trainer.accelerator=cpu"]
HALVING = ["scheduler=constant", "scheduler._target_=torch.optim.lr_scheduler.ExponentialLR"]
HALVING += ["+scheduler.gamma=0.5", "task.interval=epoch"]
STOPPING = ["+callback.stop._target_=lightning.pytorch.callbacks.EarlyStopping", "+callback.stop.monitor=val/loss"]
STOPPING += ["+callback.stop.patience=1", "+callback.stop.min_delta=10.0"]
# Settings that affect the weights; one of each line is drawn, with equal probability.
CHOICES = [
    (["trainer.accumulate_grad_batches=1"], ["trainer.accumulate_grad_batches=2"]),
    (["callback=default"], ["callback=[default,ema]"]),
    (["scheduler=onecycle"], HALVING),
    (["trainer.val_check_interval=1.0"], ["trainer.val_check_interval=0.5"]),
    ([], ["trainer.max_steps=25"], STOPPING),
]
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")


@dataclass
class Tally:
    """Counts over all runs."""

    faults: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    resumes: int = 0
    hangs: int = 0
    unequal_rows: int = 0
    unequal_weights: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """One start of a run's processes, with an optional fault."""

    forks: ForkServer
    overrides: list[str]
    processes: int
    log: Path

    def run(self, after: float | None = None, fault: str = "", hit: tuple[int, ...] = ()) -> list[int | None]:
        """Run, and return the exit status of each rank; None for a rank that hangs.

        Args:
            after: Seconds until the fault.
            fault: Name of a signal.
            hit: Ranks that it is sent to.
        """
        begun = self.log.stat().st_size if self.log.is_file() else 0
        with ExitStack() as stack:
            output = stack.enter_context(open(self.log, "ab")).fileno()
            variables = rank_variables(self.processes) if self.processes > 1 else [{}]
            argv = ["scripts/train.py", *self.overrides]
            ranks = [
                stack.enter_context(self.forks.start(argv, environment(**rank), output, output)) for rank in variables
            ]
            if after is not None:
                time.sleep(after)
                for rank in hit:
                    ranks[rank].send_signal(getattr(signal, fault))
            if fault == "SIGKILL" and len(hit) < self.processes:
                ranks[hit[0]].wait(LIMIT)
                time.sleep(0.5)
                with open(self.log, "rb") as text:
                    text.seek(begun)
                    connected = b"\ndevices" in text.read()
                if not connected:  # a rank that waits for the missing one is ended by the launcher
                    for process in ranks:
                        process.kill_group()
            end = time.monotonic() + LIMIT
            return [self._status(process, end) for process in ranks]

    @staticmethod
    def _status(process: Forked, end: float) -> int | None:
        while time.monotonic() < end:
            if process.poll() is not None:
                return process.returncode
            time.sleep(0.01)
        return None


class Soak:
    """Runs with faults, and the uninterrupted runs that they are compared with."""

    def __init__(self, forks: ForkServer, place: Path, seed: int) -> None:
        self.forks, self.place, self.seed = forks, place, seed
        self.tally = Tally()
        self._uninterrupted: dict[tuple[str, ...], tuple[Path, float]] = {}

    def uninterrupted(self, overrides: list[str], processes: int) -> tuple[Path, float]:
        """Return the folder of an uninterrupted run, and its duration in seconds."""
        key = (*overrides, str(processes))
        if key not in self._uninterrupted:
            folder = self.place / f"uninterrupted-{len(self._uninterrupted)}"
            began = time.monotonic()
            attempt = Attempt(self.forks, [*overrides, f"folder={folder}"], processes, folder.with_suffix(".txt"))
            assert attempt.run() == [0] * processes, attempt.log.read_text()
            self._uninterrupted[key] = folder, time.monotonic() - began
        return self._uninterrupted[key]

    def run(self, number: int) -> None:
        """Run with one to three faults, then resume without faults until the run is complete."""
        draw = random.Random(f"{self.seed}-{number}")
        processes = draw.choice((1, 2))
        overrides = [
            *OVERRIDES,
            f"trainer.devices={processes}",
            *(w for choice in CHOICES for w in draw.choice(choice)),
        ]
        expected, seconds = self.uninterrupted(overrides, processes)
        folder = self.place / f"run-{number}"
        overrides = [*overrides, f"data.num_workers={draw.choice((0, 2))}", f"folder={folder}"]
        log, history = folder.with_suffix(".txt"), []
        for hits in range(draw.choice((1, 2, 3)), -1, -1):
            began = (folder / "record.json").is_file()
            self.tally.resumes += bool(history)
            attempt = Attempt(self.forks, [f"resume={folder}"] if began else overrides, processes, log)
            if hits:
                fault, after = draw.choice(FAULTS), draw.uniform(0, seconds)
                hit = draw.choice([(0,), (processes - 1,), tuple(range(processes))])
                self.tally.faults[f"{fault} to {'all' if len(hit) == processes else 'one'}"] += 1
                statuses = attempt.run(after, fault, hit)
                history.append(f"{fault} to {hit} after {after:.2f} s: {statuses}")
            else:
                statuses = attempt.run()
                history.append(f"no fault: {statuses}")
            if None in statuses:
                self.tally.hangs += 1
                self._add_failure(number, "hangs", overrides, history, log)
                return
            if not any(statuses):
                break
        self.tally.runs += 1
        self._compare(number, folder, expected, overrides, history, log)

    def _compare(
        self, number: int, folder: Path, expected: Path, overrides: list[str], history: list[str], log: Path
    ) -> None:
        if not (folder / "checkpoints" / "last.ckpt").is_file() or record(folder)["attempts"][-1]["end"] is None:
            self.tally.unequal_weights += 1
            self._add_failure(number, "did not end", overrides, history, log)
            return
        ours, theirs = weights(folder), weights(expected)
        if ours.keys() != theirs.keys() or not all(torch.equal(ours[name], theirs[name]) for name in theirs):
            self.tally.unequal_weights += 1
            self._add_failure(number, "has other weights", overrides, history, log)
        if lines(folder) != lines(expected):
            self.tally.unequal_rows += 1
            self._add_failure(number, "has other rows in metrics.csv", overrides, history, log)

    def _add_failure(self, number: int, what: str, overrides: list[str], history: list[str], log: Path) -> None:
        again = f"SOAK_SEED={self.seed} SOAK_FIRST={number} SOAK_RUNS=1 pytest -m soak"
        self.tally.failures.append(
            f"run {number} {what}: {again}\n  {' '.join(overrides)}\n  " + "\n  ".join(history) + f"\n  {log}"
        )


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_random_faults(forks: ForkServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32))
    first, count = int(os.environ.get("SOAK_FIRST", 0)), int(os.environ.get("SOAK_RUNS", 200))
    soak = Soak(forks, tmp_path, seed)
    tally = soak.tally
    for number in range(first, first + count):
        soak.run(number)
        if (number + 1 - first) % 20 == 0:
            with capsys.disabled():
                print(f"\n{number + 1 - first} runs, {len(tally.failures)} failures", flush=True)
    with capsys.disabled():
        print(f"\nseed {seed}: {tally.runs} runs, {sum(tally.faults.values())} faults, {tally.resumes} resumes")
        print(*(f"  {name}: {times}" for name, times in sorted(tally.faults.items())), sep="\n")
        print(f"hangs {tally.hangs}, runs with lost or doubled rows {tally.unequal_rows}, ", end="")
        print(f"with unequal weights {tally.unequal_weights}")
        print(*tally.failures, sep="\n", flush=True)
    assert (tally.hangs, tally.unequal_rows, tally.unequal_weights) == (0, 0, 0)
